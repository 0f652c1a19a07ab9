"""Reconstructs the saves of a run from the events in its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flaxckpt._report.data import Save
from flaxckpt._steps.event import Event
from flaxckpt._types import JSON

_OTHERS = frozenset(
    ("restored", "fell_back", "found_damaged", "found_good", "preempted", "deleted")
)


def saves(events: Iterable[Event]) -> tuple[Save, ...]:
    """Returns the saves, in the order of their starts.

    Saves do not overlap, so each event of a step belongs to its last save.
    """
    history: list[Save] = []
    latest: dict[int | None, int] = {}  # step -> index of its last save in `history`
    for event in events:
        number = latest.get(event.step)
        is_open = number is not None and history[number].outcome == "unfinished"
        if event.kind == "started" or (event.kind in _SAVE_EVENTS and not is_open):
            number, is_open = len(history), True
            latest[event.step] = number
            history.append(Save(event.step, event.time))
        if number is None:
            continue
        if event.kind == "copied":
            copies = int(_number(event.details, "copies") or 0)
            history[number] = history[number]._replace(copies=copies)
        elif is_open:
            history[number] = _add_event(history[number], event)
    return tuple(history)


_SAVE_EVENTS = frozenset(("snapshot", "committed", "failed", "cancelled"))


def _add_event(save: Save, event: Event) -> Save:
    """Returns the save with the data of an event added."""
    blocked = _number(event.details, "blocked_secs")
    match event.kind:
        case "snapshot":
            began = event.time - (blocked or 0.0)
            return save._replace(blocked_secs=blocked, began=began)
        case "committed":
            total = _number(event.details, "total_secs")
            return save._replace(
                blocked_secs=save.blocked_secs if blocked is None else blocked,
                total_secs=total,
                began=save.began if total is None else event.time - total,
                outcome="durable",
            )
        case "failed":
            error = str(event.details.get("error", "the journal gives no reason"))
            return save._replace(outcome="failed", error=error)
        case "cancelled":
            return save._replace(outcome="cancelled")
    return save


def other_events(events: Iterable[Event]) -> tuple[Event, ...]:
    """Returns the events in a journal that are no part of a save."""
    return tuple(event for event in events if event.kind in _OTHERS)


def source_outcome(events: Iterable[Event]) -> str:
    """Returns how many leaves of its source a run loaded; empty if unknown."""
    outcomes = (e.details.get("outcome") for e in events if e.kind == "restored")
    first = next((each for each in outcomes if isinstance(each, str)), "")
    return first.replace(" init", " initialized")


def explain(event: Event) -> str:
    """Returns the reason or the error that an event records, else its duration."""
    for name in ("reason", "error"):
        if name in event.details:
            return str(event.details[name])
    secs = _number(event.details, "secs")
    return "" if secs is None else f"in {secs:.3g} s"


def _number(details: Mapping[str, JSON], name: str) -> float | None:
    value = details.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _LONGEST else None


_LONGEST = 1e9
"""Seconds. Values in a journal are untrusted."""
