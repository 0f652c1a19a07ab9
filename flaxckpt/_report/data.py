"""The data of a report: numbers and names, without drawing."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from flaxckpt import policies
from flaxckpt._arrays.leaf_sample import LeafSample
from flaxckpt._formats.reader import Lineage
from flaxckpt._inspect import best_step
from flaxckpt._inspect.history import SavedStep, Verdict
from flaxckpt._inspect.listing import Step
from flaxckpt._report.copies import Copy
from flaxckpt._run.disk_usage import Subtree
from flaxckpt._steps.event import Event

if TYPE_CHECKING:  # it imports numpy, which only a comparison needs
    from flaxckpt._inspect.diff import CheckpointDiff


class Save(NamedTuple):
    """A save, from the events in the journal.

    Attributes:
        began: The time of the call, in seconds since 1970.
        blocked_secs: Seconds that the caller waited; None if the call did not return.
        total_secs: Seconds until the step was durable, or None.
        copies: The number of other processes that had a durable copy of each part.
        outcome: `durable`, `failed`, `cancelled`, or `unfinished`: the process ended,
            or the save is still running.
    """

    step: int | None
    began: float
    blocked_secs: float | None = None
    total_secs: float | None = None
    copies: int = 0
    outcome: Literal["durable", "failed", "cancelled", "unfinished"] = "unfinished"
    error: str | None = None

    @property
    def behind_secs(self) -> float | None:
        """Seconds of writing in the background; None if the save never ended."""
        if self.total_secs is None:
            return None
        return max(0.0, self.total_secs - (self.blocked_secs or 0.0))

    @property
    def has_failed(self) -> bool:
        """True if the save failed or never ended."""
        return self.outcome in ("failed", "unfinished")

    @property
    def failure(self) -> str | None:
        """The error, or a note that nothing was saved; None if durable."""
        if self.outcome == "durable":
            return None
        if self.outcome == "cancelled":
            return "cancelled"
        return f"failed: {self.error}" if self.error else "never became durable"


class MetricValue(NamedTuple):
    """The value of a metric at a step.

    Attributes:
        stays: True if any reason keeps the step.
        is_deleted: True if the step was deleted since.
        is_ranked: True if the step is among the best that a policy keeps.
        mode: The mode of the policy for which the value is the best; None for others.
        is_bad: True if the step is damaged, or could not be read.
    """

    step: int
    value: float
    stays: bool
    is_deleted: bool = False
    is_ranked: bool = False
    mode: Literal["min", "max"] | None = None
    is_bad: bool = False


class Part(NamedTuple):
    """A part of a state, or several small parts of a container combined.

    Attributes:
        name: The leaf path, or the common prefix of the leaves; of several parts that
            of the first, and the last key of the last one.
        bytes: The size of the values, uncompressed.
    """

    name: str
    leaves: int
    bytes: int


class LeafHistory(NamedTuple):
    """Statistics of a leaf at the saves of a run, from samples of its values.

    Attributes:
        group: The part of the state: `params`, or a part of the optimizer.
        kind: `layer` for parameters and other values that a layer has; `optimizer` for
            the leaves of the optimizer and for copies, as averages; `other` for
            counters and random keys.
        norms: Step -> the norm, ascending; NaN if a value in the sample is not finite.
        last: The sample of the last step.
        drawn: Step -> its sample, of the steps whose histograms are drawn.
    """

    path: str
    group: str
    kind: Literal["layer", "optimizer", "other"]
    norms: Mapping[int, float]
    last: LeafSample
    drawn: Mapping[int, LeafSample]

    @property
    def nonfinite_steps(self) -> Sequence[int]:
        """The steps at which a value in the sample was not finite."""
        return [n for n, norm in self.norms.items() if not math.isfinite(norm)]


class Position(NamedTuple):
    """The positions of the dataset iterators at a step.

    Attributes:
        step: The step; None for a checkpoint outside of a run.
        type: The class of the iterator; empty if not recorded.
        processes: The number of processes that saved a state.
        bytes: The size of all states; None in object stores.
        values: Integers in the state of the first iterator, by name.
    """

    step: int | None
    type: str
    processes: int
    bytes: int | None
    values: Mapping[str, int]


State: TypeAlias = Literal["verified", "whole", "damaged", "unread", "unknown"]


class Integrity(NamedTuple):
    """The integrity of a checkpoint, as far as checked.

    Attributes:
        step: The step; None for a checkpoint outside of a run.
        state: `verified`: every byte was read. `whole`: all files exist with their
            sizes. `damaged`; `unread`: reading failed; `unknown`: not checked.
        bytes_checked: Bytes that were read and compared.
        found: When this was found, in seconds since 1970: the beginning of the check,
            or the time of the marker of damage; None if not checked.
    """

    step: int | None
    state: State
    detail: str
    bytes_checked: int
    found: float | None = None

    @property
    def is_bad(self) -> bool:
        """True if the checkpoint is damaged or could not be read."""
        return self.state in ("damaged", "unread")


class Mark(NamedTuple):
    """A mark of a step, as pages show it.

    The text is the kind, and the metric of the best step if there are several.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Report:
    """The data of a page on a run, or on a checkpoint.

    Attributes:
        made: The time of the report, in seconds since 1970.
        tags: The strings, numbers and booleans in the metadata of the run, as text.
        bytes: The size on disk; None in object stores.
        policies: The policies that give the reasons; None if unknown.
        steps: The checkpoints, the oldest first, with metrics and reasons.
        history: The steps that were ever saved, the oldest first; with existing ones.
        verdicts: Deleted step -> what each policy kept at that time, of the last ones.
        happened: The events in the journal that are no part of a save: of restores,
            deletions, preemptions and markers of damage.
        metrics: Name -> values by step, of existing and deleted steps.
        modes: Metric that policies rank steps by -> which values are the best.
        shown: The checkpoint that `parts` describes; None if none can be read.
        total_bytes: The size of all its arrays, uncompressed.
        copies: Its containers that repeat the shapes of another one.
        parts: The sizes of its other parts; with the copies, they add up to
            `total_bytes`.
        tree: Its other containers and leaves, each container before its content.
        change: The differences between the steps `compared`; None if not compared.
        leaf_histories: Statistics of leaves over the saves, if the run recorded any;
            the parameters first.
        positions: The positions of dataset iterators, the oldest step first.
        lineage: The checkpoints that the run started from, the nearest first.
        source_outcome: How many leaves of the nearest one were loaded, initialized and
            dropped; empty if unknown.
        integrity: The integrity of each checkpoint, the oldest first.
        notes: Section -> the reason for missing or incomplete data.
    """

    path: str
    is_run: bool
    made: float
    version: str
    tags: Mapping[str, str]
    formats: tuple[str, ...]
    bytes: int | None
    policies: tuple[str, ...] | None
    steps: tuple[Step, ...]
    history: tuple[SavedStep, ...]
    verdicts: Mapping[int, tuple[Verdict, ...]]
    saves: tuple[Save, ...]
    happened: tuple[Event, ...]
    metrics: Mapping[str, tuple[MetricValue, ...]]
    modes: Mapping[str, Sequence[Literal["min", "max"]]]
    shown: str | None
    total_bytes: int
    leaves: int
    copies: tuple[Copy, ...]
    parts: tuple[Part, ...]
    tree: tuple[Subtree, ...]
    change: CheckpointDiff | None
    compared: tuple[int, int] | None
    leaf_histories: tuple[LeafHistory, ...]
    positions: tuple[Position, ...]
    lineage: tuple[Lineage, ...]
    source_outcome: str
    integrity: tuple[Integrity, ...]
    notes: Mapping[str, str]

    @property
    def checked_count(self) -> int:
        """The number of checkpoints with a known integrity, good or bad."""
        return sum(check.state != "unknown" for check in self.integrity)

    @functools.cached_property
    def copied(self) -> Mapping[int | None, int]:
        """Step -> `Save.copies` of its last save."""
        return {save.step: save.copies for save in self.saves}

    @functools.cached_property
    def faults(self) -> Mapping[int | None, str]:
        """The steps that cannot be used -> `damaged` or `not readable`."""
        return {
            check.step: "damaged" if check.state == "damaged" else "not readable"
            for check in self.integrity
            if check.is_bad
        }

    @functools.cached_property
    def good(self) -> Sequence[Step]:
        """The checkpoints without known damage, the oldest first."""
        return [step for step in self.steps if step.step not in self.faults]

    @property
    def good_steps(self) -> Sequence[int]:
        """The steps without known damage, ascending."""
        return [step.step for step in self.good if step.step is not None]

    @property
    def usable(self) -> Sequence[int]:
        """The steps without known damage, ascending; all if all are damaged."""
        numbers = [step.step for step in self.steps if step.step is not None]
        return self.good_steps or numbers

    @property
    def bests(self) -> Sequence[tuple[str, MetricValue]]:
        """Each metric that a policy ranks steps by, with its best usable value."""
        return [
            (name, point)
            for name, points in self.metrics.items()
            for point in points
            if point.mode is not None and not point.is_bad
        ]

    @functools.cached_property
    def drawn(self) -> Mapping[str, Sequence[MetricValue]]:
        """The metrics with a finite value."""
        return {
            name: points
            for name, points in self.metrics.items()
            if any(math.isfinite(point.value) for point in points)
        }

    def with_integrity(self, checks: Sequence[Integrity]) -> Report:
        """Returns the report with other checks, and the best values of good steps."""
        report = dataclasses.replace(self, integrity=tuple(checks))
        metrics = {
            name: _find_best(points, self.modes.get(name, ()), report.faults)
            for name, points in self.metrics.items()
        }
        return dataclasses.replace(report, metrics=metrics)

    @property
    def marks(self) -> Mapping[int | None, tuple[Mark, ...]]:
        """Step -> its marks: of the good steps, the last is the newest."""
        names: dict[int | None, list[str]] = {}
        for name, point in self.bests:
            names.setdefault(point.step, []).append(name)
        is_one = len({name for each in names.values() for name in each}) < 2
        newest = [step.step for step in self.good[-1:] if self.is_run]
        marks = {}
        for step in self.steps:
            number, fault = step.step, self.faults.get(step.step)
            best = ["best" if is_one else f"best {n}" for n in names.get(number, ())]
            gone = ("latest", "best", *(["damaged"] if fault else []))
            shown = [Mark("latest", "latest")] if number in newest else []
            shown += [Mark("best", text) for text in best]
            shown += [Mark(kind, kind) for kind in step.marks if kind not in gone]
            marks[number] = (*shown, Mark(fault, fault)) if fault else (*shown,)
        return marks

    @property
    def is_good(self) -> bool:
        """True if no checkpoint that was checked is damaged or unreadable."""
        return not self.faults


def last_good(points: Sequence[MetricValue]) -> MetricValue | None:
    """Returns the newest value that can be used, of values by ascending step."""
    return next((point for point in reversed(points) if not point.is_bad), None)


def _find_best(
    points: Sequence[MetricValue],
    modes: Sequence[Literal["min", "max"]],
    faults: Mapping[int | None, str],
) -> tuple[MetricValue, ...]:
    """Returns values of which the best ones are of good steps, if there are any."""
    there = {point.step: point.value for point in points if not point.is_deleted}
    kept = {point.step: point.value for point in points if point.is_ranked}
    best: dict[int, Literal["min", "max"]] = {}
    for mode in modes:
        for first in policies.rank(kept, mode)[:1]:
            good = best_step.find(there, faults, mode).good
            best[first if good is None or first not in faults else good] = mode
    return tuple(
        point._replace(mode=best.get(point.step), is_bad=point.step in faults)
        for point in points
    )
