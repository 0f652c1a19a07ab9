"""The data of a report: numbers and names, without drawing."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from flaxckpt import errors, policies
from flaxckpt._arrays.leaf_sample import LeafSample
from flaxckpt._formats.reader import Lineage
from flaxckpt._inspect import best_step, subtrees
from flaxckpt._inspect.dataset_positions import Position
from flaxckpt._inspect.history import SavedStep, Verdict
from flaxckpt._inspect.listing import Step
from flaxckpt._inspect.subtrees import Subtree
from flaxckpt._report.parts import Copy, Part
from flaxckpt._steps.event import Event

if TYPE_CHECKING:  # it imports numpy, which only a comparison needs
    from flaxckpt._inspect.diff import CheckpointDiff


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


class LeafHistory(NamedTuple):
    """Statistics of a leaf at the saves of a run, from samples of its values.

    Attributes:
        group: The part of the state: `params`, or a part of the optimizer.
        kind: `layer` for parameters and other values that a layer has; `optimizer` for
            the leaves of the optimizer and for copies, as averages; `other` for
            counters and random keys.
        norms: Step -> the norm, ascending; NaN if a value in the sample is not finite.
        sampled: Step -> the number of values in the sample.
        last: The sample of the last step.
        drawn: Step -> its sample, of the steps whose histograms are drawn.
    """

    path: str
    group: str
    kind: Literal["layer", "optimizer", "other"]
    norms: Mapping[int, float]
    sampled: Mapping[int, int]
    last: LeafSample
    drawn: Mapping[int, LeafSample]

    @property
    def nonfinite_steps(self) -> Sequence[int]:
        """The steps at which a value in the sample was not finite."""
        return [n for n, norm in self.norms.items() if not math.isfinite(norm)]


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
        saves: The saves in the journal, with failed ones, in the order of their starts.
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
    saves: tuple[SavedStep, ...]
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

    @property
    def stalls(self) -> Sequence[SavedStep]:
        """The saves whose wait is known, durable or not, the oldest first."""
        return [save for save in self.saves if save.blocked_secs is not None]

    @functools.cached_property
    def layers(self) -> Mapping[str, Sequence[LeafHistory]]:
        """Layer -> its leaves; those of the optimizer only without any others."""
        kinds = {leaf.kind for leaf in self.leaf_histories}
        kind = "layer" if "layer" in kinds else "optimizer"
        leaves = {leaf.path: leaf for leaf in self.leaf_histories if leaf.kind == kind}
        layers = collections.defaultdict[str, list[LeafHistory]](list)
        for path, layer in subtrees.find_layers(leaves).items():
            layers[layer].append(leaves[path])
        return layers

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
    def marks(self) -> Mapping[int | None, Sequence[tuple[str, str]]]:
        """Step -> the kind and the text of its marks; the newest is a good step."""
        is_one = len({name for name, _ in self.bests}) < 2
        marks = collections.defaultdict[int | None, list[tuple[str, str]]](list)
        for step in self.good[-1:] if self.is_run else ():
            marks[step.step].append(("latest", "latest"))
        for name, best in self.bests:
            marks[best.step].append(("best", "best" if is_one else f"best {name}"))
        for step in self.steps:
            others = [m for m in step.marks if m not in ("latest", "best", "damaged")]
            others += [self.faults[step.step]] if step.step in self.faults else []
            marks[step.step] += [(mark, mark) for mark in others]
        return marks

    @property
    def states(self) -> Mapping[State, int]:
        """The number of checkpoints in each state of integrity."""
        return collections.Counter(check.state for check in self.integrity)

    @functools.cached_property
    def ranges(self) -> Sequence[Sequence[Integrity]]:
        """Neighbouring checkpoints in the same state; those that are bad are alone."""
        found = itertools.groupby(self.integrity, lambda c: c if c.is_bad else c.state)
        return [[*checks] for _, checks in found]


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


# ---- several reports --------------------------------------------------------------


class RunRanking(NamedTuple):
    """The order of runs: by the lowest or highest values of a metric, or by name."""

    metric: str | None
    mode: Literal["min", "max"]

    @property
    def text(self) -> str:
        """The order in a phrase."""
        if self.metric is None:
            return "name"
        end = "highest" if self.mode == "max" else "lowest"
        return f"the best {errors.printable(self.metric)}, {end} first"

    def rank(self, reports: Mapping[str, Report]) -> list[str]:
        """Returns the runs in this order; those without a value come last."""
        sign = -1 if self.mode == "max" else 1

        def place(run: str) -> tuple[float, bool, str]:
            best = self.find_best(reports[run])
            is_bad = best is not None and bool(reports[run].faults)
            return math.inf if best is None else sign * best.value, is_bad, run

        return sorted(reports, key=place)

    def find_best(self, report: Report) -> MetricValue | None:
        """Returns the best value of the metric at the steps that can be used."""
        points = report.metrics.get(self.metric or "", ())
        usable = {p.step: p for p in points if not (p.is_bad or p.is_deleted)}
        values = {step: point.value for step, point in usable.items()}
        best = policies.rank(values, self.mode)[:1]
        return usable[best[0]] if best and self.metric is not None else None


def find_rankings(reports: Mapping[str, Report]) -> dict[str, RunRanking]:
    """Returns the choices of a ranking: those of the policies of most runs first.

    The next one is by name. A metric without a policy may be ranked either way.
    """
    counts = collections.Counter(
        RunRanking(name, best.mode)
        for report in reports.values()
        for name, best in report.bests
        if best.mode is not None
    )
    found = [ranking for ranking, _ in counts.most_common()]
    known = {ranking.metric for ranking in found}
    others = dict.fromkeys(name for each in reports.values() for name in each.metrics)
    modes: tuple[Literal["min", "max"], ...] = ("min", "max")
    found.append(RunRanking(None, "min"))
    found += [RunRanking(n, mode) for n in others if n not in known for mode in modes]
    return {f"{each.mode}:{each.metric or ''}": each for each in found}
