"""The history of a run: every save there ever was, from its journal and its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flaxckpt import _run, _steps, _storage, policies
from flaxckpt._inspect import best_step
from flaxckpt._inspect import listing as listings
from flaxckpt._inspect.listing import Listing
from flaxckpt._steps.event import Event
from flaxckpt._types import JSON, PathLike
from flaxckpt.policies import PreservationPolicy


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step that was saved, whether or not it still exists; None is unknown.

    Attributes:
        saved: When the save was durable, in seconds since 1970.
        bytes: Bytes written by the save.
        blocked_secs: Seconds that the training loop waited.
        total_secs: Seconds until the step was durable.
        began: The time of the call, in seconds since 1970; 0 if unknown.
        copies: The number of other processes that had a durable copy of each part.
        outcome: `durable`, `failed`, `cancelled`, or `unfinished`: the process ended,
            or the save is still running.
        error: Why the save failed.
        deleted: When the step was deleted, in seconds since 1970; None if it exists.
            NaN if nobody recorded the deletion.
        reason: The recorded reason of the deletion.
        temporary: True if the step was saved as a temporary step.
        damage: The known damage of a step that exists, or None.
        is_counted: As of `Step`.
    """

    step: int
    saved: float | None = None
    bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    blocked_secs: float | None = None
    total_secs: float | None = None
    began: float = 0.0
    copies: int = 0
    outcome: Literal["durable", "failed", "cancelled", "unfinished"] = "durable"
    error: str | None = None
    deleted: float | None = None
    reason: str | None = None
    temporary: bool = False
    damage: str | None = None
    is_counted: bool = True

    @property
    def exists(self) -> bool:
        return self.deleted is None

    @property
    def created(self) -> float:
        """Like `saved`, for policies; 0 if unknown."""
        return self.saved or 0.0

    @property
    def failure(self) -> str | None:
        """The error, or that it never ended; None if durable or cancelled."""
        if self.outcome in ("durable", "cancelled"):
            return None
        return f"failed: {self.error}" if self.error else "never became durable"


def history(path: PathLike, step_format: str | None = None) -> list[SavedStep]:
    """Returns every step that a run directory has or had, ascending.

    A journal in an object store, and a run without a journal, miss older steps.
    """
    root = _storage.paths.resolve(path)
    events = _steps.journal.read(root / _steps.journal.NAME)
    return of_events(events, listings.listing(root, step_format=step_format))


def of_events(events: Iterable[Event], listing: Listing) -> list[SavedStep]:
    """Returns every step in a journal or a listing, ascending, as it was saved last."""
    saved = of_journal(events)
    there = {step.step: step for step in listing.steps if step.step is not None}
    for number, found in there.items():
        step = saved.get(number, SavedStep(number, found.created, found.bytes))
        saved[number] = replace(
            step,
            metrics=found.metrics,
            deleted=None,
            reason=None,
            damage=found.damage,
            is_counted=found.is_counted,
        )
    for number, step in saved.items():
        if step.exists and number not in there:
            saved[number] = replace(step, deleted=math.nan)
    return [saved[number] for number in sorted(saved)]


def of_journal(events: Iterable[Event]) -> dict[int, SavedStep]:
    """Returns the steps in a journal, which may miss deletions, by number."""
    journal = _Journal()
    for event in events:
        journal.add(event)
    return journal.steps()


def saves(events: Iterable[Event]) -> list[SavedStep]:
    """Returns every save in a journal, in the order of their starts."""
    journal = _Journal()
    for event in events:
        journal.add(event)
    return journal.saves


class _Journal:
    """The saves in a journal so far; an event belongs to its step's last save."""

    def __init__(self) -> None:
        self.saves: list[SavedStep] = []
        self._last: dict[int, int] = {}  # step -> index of its last save in `saves`
        self._durable: dict[int, int] = {}

    def steps(self) -> dict[int, SavedStep]:
        return {step: self.saves[at] for step, at in self._durable.items()}

    def add(self, event: Event) -> None:
        """Adds an event, unless it has no step, or is of an upload or copies."""
        is_other = event.kind == "failed" and "what" in event.details
        if (step := event.step) is None or is_other:
            return
        at = self._last.get(step)
        is_open = at is not None and self.saves[at].outcome == "unfinished"
        is_part = event.kind in ("snapshot", "committed", "failed", "cancelled")
        if event.kind == "started" or (is_part and not is_open):
            at = self._last[step] = len(self.saves)
            start = SavedStep(step, began=event.time, outcome="unfinished")
            self.saves.append(start)
        elif not is_part:
            at = self._durable.get(step)
        if event.kind == "committed" and at is not None:
            self._durable[step] = at
        if at is not None:
            self.saves[at] = replace(self.saves[at], **_read(event, self.saves[at]))


def _read(event: Event, save: SavedStep) -> dict[str, Any]:
    details = event.details
    blocked = _number(details.get("blocked_secs"), _LONGEST)
    match event.kind:
        case "snapshot":
            return {"blocked_secs": blocked, "began": event.time - (blocked or 0.0)}
        case "committed":
            size = _number(details.get("bytes"))
            total = _number(details.get("total_secs"), _LONGEST)
            return {
                "saved": event.time,
                "bytes": None if size is None else int(size),
                "metrics": _metrics(details.get("metrics")),
                "blocked_secs": save.blocked_secs if blocked is None else blocked,
                "total_secs": total,
                "began": save.began if total is None else event.time - total,
                "outcome": "durable",
                "temporary": details.get("temporary") is True,
            }
        case "failed":
            error = str(details.get("error", "the journal gives no reason"))
            return {"outcome": "failed", "error": error}
        case "cancelled":
            return {"outcome": "cancelled"}
        case "copied":
            return {"copies": int(_number(details.get("copies"), _LONGEST) or 0)}
        case "measured":
            return {"metrics": {**save.metrics, **_metrics(details.get("metrics"))}}
        case "deleted":
            reason = str(details.get("reason", ""))
            return {"deleted": event.time, "reason": reason}
    return {}


_LONGEST = 1e9
"""Seconds, and the most copies."""

_LARGEST = 1e300
"""Numbers in a journal are untrusted; Python's ints have no limit."""


def _number(value: JSON, most: float = _LARGEST) -> float | None:
    """Returns a finite number of at least 0, or None; a journal is untrusted."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < most else None


def _metrics(value: JSON) -> dict[str, float]:
    """Returns the metrics in an event; older events only have their number."""
    metrics = {}
    for name, number in value.items() if isinstance(value, dict) else ():
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_number and abs(number) > _LARGEST:
            continue
        if is_number or number in ("nan", "inf", "-inf"):
            metrics[name] = float(number)
    return metrics


# ---- one step ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """The choice of a policy, `kept`, at the time when a step was deleted."""

    policy: str
    kept: tuple[int, ...]
    metric: str | None = None


def explain_deletions(
    events: Iterable[Event], listing: Listing
) -> dict[int, tuple[Verdict, ...]]:
    """Returns step -> a verdict for each policy in force at its last deletion.

    Steps that policies did not delete are left out, and policies that would have kept a
    step: the journal does not have all that they knew.
    """
    verdicts: dict[int, tuple[Verdict, ...]] = {}
    journal = _Journal()
    together: dict[int, SavedStep] = {}  # deleted by one decision
    keep: Sequence[PreservationPolicy] = ()
    damaged_since = _damaged_since(listing)
    damaged: set[int | None] = set()  # steps marked by the journal at the time
    for event in events:
        if event.kind == "configured":
            settings = _run.settings.last([event])
            keep = () if settings is None else settings.rules.keep
        number = event.step
        if number is None:
            continue
        by_policies = event.details.get("reason") == _steps.event.NOT_KEPT
        if event.kind != "deleted" or not by_policies:
            together.clear()
        if event.kind == "deleted":
            verdicts.pop(number, None)
            if keep and by_policies:
                there = [
                    step
                    for step in (journal.steps() | together).values()
                    if step.exists
                    and step.step not in damaged
                    and damaged_since.get(step.step, math.inf) > event.time
                ]
                found = [_verdict(policy, there) for policy in keep]
                verdicts[number] = tuple(v for v in found if number not in v.kept)
                if number in (steps := journal.steps()):
                    together[number] = steps[number]
        if event.kind == "found_damaged":
            damaged.add(number)
        elif event.kind in ("found_good", "committed"):
            damaged.discard(number)
        journal.add(event)
    return verdicts


def _damaged_since(listing: Listing) -> dict[int, float]:
    """Returns the steps marked as damaged: step -> when, in seconds since 1970."""
    times = {
        step.step: _steps.markers.damage_time(_storage.paths.resolve(step.path))
        for step in listing.steps
        if step.step is not None and step.damage is not None
    }
    return {step: time for step, time in times.items() if time is not None}


def _verdict(policy: PreservationPolicy, there: Sequence[SavedStep]) -> Verdict:
    if isinstance(policy, _run.settings.UnknownPolicy):
        return Verdict(str(policy), ())
    metric = policy.metric if isinstance(policy, policies.BestN) else None
    return Verdict(str(policy), tuple(sorted(policy.preserved(there))), metric)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The place of a step, 1 for the best, among all saved with a finite metric.

    `next` is the step behind; `better` has the nearest existing and deleted ones.
    """

    metric: str
    end: Literal["lowest", "highest"]
    value: float
    place: int
    count: int
    next: int | None = None
    next_value: float | None = None
    better: Mapping[int, float] = field(default_factory=dict)


def rank(
    number: int, best: policies.BestN, steps: Sequence[SavedStep]
) -> Ranking | None:
    """Returns the place of a step in the order of a policy; None without the metric."""
    known = {each.step: each.metrics.get(best.metric) for each in steps}
    ranked = policies.rank(known, best.mode)
    if number not in ranked:
        return None
    values = {step: value for step, value in known.items() if value is not None}
    place = ranked.index(number)
    exists = {each.step: each.exists for each in steps}
    nearest = {exists[step]: step for step in ranked[:place]}
    following = (*ranked, None)[place + 1]
    return Ranking(
        metric=best.metric,
        end=best_step.end(best.mode),
        value=values[number],
        place=place + 1,
        count=len(ranked),
        next=following,
        next_value=None if following is None else values[following],
        better={
            nearest[is_there]: values[nearest[is_there]]
            for is_there in (True, False)
            if is_there in nearest
        },
    )
