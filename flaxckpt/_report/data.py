"""What a report is made of: numbers and names, nothing drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from flaxckpt._inspect.listing import Step
from flaxckpt.formats._reader import Lineage


class Save(NamedTuple):
    """A save, as the journal tells of it.

    Attributes:
        step: Its number; None if it has none.
        began: When it was called, in seconds since 1970.
        blocked_secs: How long the caller waited; None if it never came back.
        total_secs: Until the step was durable; None if it never was.
        bytes: What was written; None likewise.
        uploaded_secs: How long it took to bring it from a staging directory.
        outcome: `durable`, `failed`, or `unfinished`: the process ended, or the save is
            still under way.
        error: Why it failed.
    """

    step: int | None
    began: float
    blocked_secs: float | None
    total_secs: float | None
    bytes: int | None
    uploaded_secs: float | None
    outcome: Literal["durable", "failed", "unfinished"]
    error: str | None

    @property
    def behind_secs(self) -> float | None:
        """How long was written while the caller went on; None if it never ended."""
        if self.total_secs is None:
            return None
        return max(0.0, self.total_secs - (self.blocked_secs or 0.0))


class Happened(NamedTuple):
    """Something else in the journal: `restored`, `fell_back`, `preempted`, `deleted`.

    Attributes:
        kind: As that of an `Event`.
        step: Its number; None if it has none.
        time: Seconds since 1970.
        why: What the journal says of it.
    """

    kind: str
    step: int | None
    time: float
    why: str


class Measured(NamedTuple):
    """What was measured at a step.

    Attributes:
        step: Its number.
        value: The metric.
        stays: Whether a policy, or something else, keeps the step.
        best: `best` or `among the best` by a policy; where there is none for this
            metric, `lowest` or `highest`; None if it is neither.
    """

    step: int
    value: float
    stays: bool
    best: str | None


class Part(NamedTuple):
    """A part of a state, or several small ones of one container together.

    Attributes:
        group: The part of the whole state that it is in.
        path: Its leaf path, or what those of its leaves begin with; that of the first,
            if it is several.
        until: The same of the last; None if it is one.
        subtrees: How many these are.
        leaves: How many leaves it has.
        bytes: The size of their values, uncompressed.
    """

    group: str
    path: str
    until: str | None
    subtrees: int
    leaves: int
    bytes: int


class Changed(NamedTuple):
    """A leaf that differs between two steps.

    Attributes:
        path: Its leaf path.
        what: What differs, as `LeafDiff.kind`; or `only in` one of the steps.
        shown: Its type, or both.
        different: How many elements differ.
        max_abs: The largest difference of two elements.
        rel_norm: The norm of the difference, in terms of that of the first.
    """

    path: str
    what: str
    shown: str
    different: int
    max_abs: float
    rel_norm: float


class Change(NamedTuple):
    """What differs between two steps.

    Attributes:
        step_a: The one.
        step_b: The other.
        leaves: The leaves that differ, those that changed most first.
        equal: How many are equal.
        bytes_compared: Size of the values of one step.
    """

    step_a: int
    step_b: int
    leaves: tuple[Changed, ...]
    equal: int
    bytes_compared: int


class Position(NamedTuple):
    """Where the dataset iterators stood at a step.

    Attributes:
        step: Its number; None if the checkpoint stands alone.
        type: The class of the iterator; empty if that is not recorded.
        processes: How many saved theirs.
        bytes: The size of all of them; None in object stores.
        values: Whole numbers in the state of the first, by name.
    """

    step: int | None
    type: str
    processes: int
    bytes: int | None
    values: Mapping[str, int]


State: TypeAlias = Literal["verified", "whole", "damaged", "unread", "unknown"]


class Integrity(NamedTuple):
    """What is known of a checkpoint's integrity.

    Attributes:
        step: Its number; None if it stands alone.
        state: `verified`: every byte was read. `whole`: all files are there, with
            their sizes. `damaged`; `unread`: it could not be looked at; `unknown`:
            nobody has looked.
        detail: What was found.
        bytes_checked: How much was read and compared.
    """

    step: int | None
    state: State
    detail: str
    bytes_checked: int


@dataclass(frozen=True, slots=True)
class Report:
    """All that a page says of a run, or of one checkpoint.

    Attributes:
        path: Where it is.
        is_run: Whether it is a run directory.
        made: When this was gathered, in seconds since 1970.
        version: Of flaxckpt.
        formats: Whose the checkpoints are.
        bytes: What they take on the disk; None in object stores.
        policies: What the reasons were computed for.
        steps: The checkpoints, the oldest first, with metrics and reasons.
        saves: In their order.
        happened: What else the journal tells, in its order.
        metrics: Name -> what was measured, by step.
        shown: The checkpoint of which there are `parts`; None if none can be read.
        total_bytes: The size of all its arrays, uncompressed.
        leaves: How many leaves it has.
        parts: What takes the space in it; their sizes add up to `total_bytes`.
        change: What differs between two steps.
        positions: Of dataset iterators, the oldest first.
        lineage: What the run began from, the nearest first.
        integrity: Of each checkpoint, the oldest first.
        notes: Section -> why there is nothing in it, or less than there could be.
    """

    path: str
    is_run: bool
    made: float
    version: str
    formats: tuple[str, ...]
    bytes: int | None
    policies: tuple[str, ...]
    steps: tuple[Step, ...]
    saves: tuple[Save, ...]
    happened: tuple[Happened, ...]
    metrics: Mapping[str, tuple[Measured, ...]]
    shown: str | None
    total_bytes: int
    leaves: int
    parts: tuple[Part, ...]
    change: Change | None
    positions: tuple[Position, ...]
    lineage: tuple[Lineage, ...]
    integrity: tuple[Integrity, ...]
    notes: Mapping[str, str]

    @property
    def looked_at(self) -> int:
        """The number of checkpoints whose integrity is known, good or bad."""
        return sum(each.state != "unknown" for each in self.integrity)

    @property
    def is_good(self) -> bool:
        """Whether nothing is known to be damaged, and nothing could not be read.

        Of the checkpoints that were not looked at, nothing is known.
        """
        return all(each.state not in ("damaged", "unread") for each in self.integrity)
