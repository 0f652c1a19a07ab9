"""Reconstructs the saves of a run from the events in its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flaxckpt._report.data import Happened, Save
from flaxckpt._steps.event import Event
from flaxckpt._types import JSON

_OTHERS = frozenset(("restored", "fell_back", "preempted", "deleted"))


def saves(events: Iterable[Event]) -> tuple[Save, ...]:
    """Returns the saves, in the order of their starts.

    Saves do not overlap, so each event of a step belongs to its last save.
    """
    found: list[Save] = []
    latest: dict[int | None, int] = {}  # step -> index of its last save in `found`
    for event in events:
        number = latest.get(event.step)
        is_open = number is not None and found[number].outcome == "unfinished"
        if event.kind == "started" or (event.kind in _SAVING and not is_open):
            number = latest[event.step] = len(found)
            found.append(
                Save(event.step, event.time, None, None, None, None, "unfinished", None)
            )
            is_open = True
        if number is None:
            continue
        if event.kind == "uploaded":
            secs = _number(event.details, "secs")
            found[number] = found[number]._replace(uploaded_secs=secs)
        elif is_open:
            found[number] = _with(found[number], event)
    return tuple(found)


_SAVING = frozenset(("snapshot", "committed", "failed"))


def _with(save: Save, event: Event) -> Save:
    """Returns the save with the facts of an event added."""
    blocked = _number(event.details, "blocked_secs")
    match event.kind:
        case "snapshot":
            return save._replace(
                blocked_secs=blocked, began=event.time - (blocked or 0.0)
            )
        case "committed":
            total, size = (
                _number(event.details, "total_secs"),
                event.details.get("bytes"),
            )
            return save._replace(
                blocked_secs=save.blocked_secs if blocked is None else blocked,
                total_secs=total,
                began=event.time - total if total is not None else save.began,
                bytes=size if isinstance(size, int) else None,
                outcome="durable",
            )
        case "failed":
            error = str(event.details.get("error", "it is not said why"))
            return save._replace(outcome="failed", error=error)
    return save


def happened(events: Iterable[Event]) -> tuple[Happened, ...]:
    """Returns the other events in a journal."""
    return tuple(
        Happened(event.kind, event.step, event.time, _why(event))
        for event in events
        if event.kind in _OTHERS
    )


def _why(event: Event) -> str:
    for name in ("reason", "error"):
        if name in event.details:
            return str(event.details[name])
    secs = _number(event.details, "secs")
    return "" if secs is None else f"in {secs:.3g} s"


def _number(details: Mapping[str, JSON], name: str) -> float | None:
    found = details.get(name)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number and 0 <= found < _LONGEST else None  # type: ignore[arg-type, operator]


_LONGEST = 1e9
"""Seconds. Values in a journal are untrusted."""


def deleted(found: Sequence[Happened]) -> tuple[int, ...]:
    """Returns the steps deleted according to the journal, ascending."""
    return tuple(
        sorted({e.step for e in found if e.kind == "deleted" and e.step is not None})
    )
