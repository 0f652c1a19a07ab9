"""The journal of a run: a file or an object with a line of JSON for each event."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import threading
from pathlib import Path

from flaxckpt import _storage, _util
from flaxckpt._steps.event import KINDS, Event

NAME = "events.jsonl"
"""The journal's name in a run directory."""

STATISTICS = "statistics.jsonl"
"""Name of the file with the statistics of the leaves at each save."""

_MAX_LINE_BYTES = 64 * 2**10

_MAX_BYTES = 2**20
"""Limit on a journal in a store; a write beyond the limit drops the oldest lines."""

_WORTH_WRITING = frozenset(
    (
        "committed",
        "deleted",
        "found_damaged",
        "found_good",
        "failed",
        "cancelled",
        "restored",
        "preempted",
        "skipped",
        "preflight",
    )
)
"""Events that trigger a write of all unwritten events, if writes take requests."""


class EventJournal:
    """Writes the journal of a single process; the first event creates it."""

    def __init__(self, path: Path, mode: int | None = None) -> None:
        self._path = path
        self._mode = mode
        self._storage = _storage.of(path)
        # Used only where each write is a request. A fork does not inherit events.
        self._unwritten = _util.forks.PerProcess(list[bytes])
        self._writing = _util.forks.PerProcess(threading.Lock)

    def __str__(self) -> str:
        return str(self._path)

    def write(self, event: Event) -> None:
        """Appends an event; in a store, perhaps only along with later events.

        Raises OSError if the event cannot be written.
        """
        if not self._storage.costs_requests:
            self._append(_line(event))
            return
        with self._writing.get():
            self._unwritten.get().append(_line(event))
            if event.kind in _WORTH_WRITING:
                self._flush()

    def close(self) -> None:
        # `write` has reported the error already.
        with self._writing.get(), contextlib.suppress(OSError):
            self._flush()

    def _flush(self) -> None:
        if unwritten := self._unwritten.get():
            self._append(b"".join(unwritten))
            unwritten.clear()

    def _append(self, lines: bytes) -> None:
        self._storage.append_lines(self._path, lines, _MAX_BYTES, mode=self._mode)


def _line(event: Event) -> bytes:
    row = {
        "time": event.time,
        "kind": event.kind,
        "step": event.step,
        "path": event.path,
    }
    short = {name: event.details[name] for name in event.details if name != "metrics"}
    for details in (event.details, short, {}):
        line = json.dumps(row | {"details": details}).encode() + b"\n"
        if len(line) <= _MAX_LINE_BYTES:
            break
    return line


def append_new_lines(journal: Path, other: Path, mode: int | None = None) -> None:
    """Appends the lines after the last that both journals have, or raises OSError."""
    lines = _last_lines(journal)
    numbers = {line: number for number, line in enumerate(lines, 1)}
    common = (numbers[line] for line in reversed(_last_lines(other)) if line in numbers)
    new = b"".join(lines[next(common, 0) :])
    if new:
        _storage.of(other).append_lines(other, new, _MAX_BYTES, mode=mode)


def recent(journal: Path) -> list[Event]:
    """Returns the last events of a journal in order; none if unreadable."""
    try:
        lines = _last_lines(journal)
    except OSError:
        return []
    return [event for line in lines if (event := _parse(line))]


def describe_deletion(root: Path, step: int) -> str:
    """Returns text for an error that a step was deleted, `; …`; empty if unrecorded."""
    kinds = [event.kind for event in recent(root / NAME) if event.step == step]
    if not kinds or kinds[-1] != "deleted":
        return ""
    command = shlex.join(["flaxckpt", "explain", str(root), str(step)])
    return f"; step {step} was deleted, and `{command}` says why"


def _last_lines(journal: Path) -> list[bytes]:
    try:
        return _storage.of(journal).last_lines(journal, _MAX_BYTES)
    except FileNotFoundError:
        return []


def read(path: Path, torn: list[bytes] | None = None) -> list[Event]:
    """Returns the whole lines of events in order; none if missing.

    Adds the lines that are not JSON to `torn`.
    """
    if not path.is_file():
        return []
    events: list[Event] = []
    with _storage.of(path).open_file(path) as file:
        is_start = True
        while line := file.readline(_MAX_LINE_BYTES):
            if is_start and (event := _parse(line)):
                events.append(event)
            elif torn is not None and not _is_json(line):
                torn.append(line)
            is_start = line.endswith(b"\n")  # otherwise the line is too long for ours
    return events


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(line: bytes) -> Event | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match row:
        case {
            "time": float(when),
            "kind": str(kind),
            "step": int() | None as step,
            "path": str(path),
            "details": dict(details),
        } if kind in KINDS and not isinstance(step, bool) and math.isfinite(when):
            return Event(kind, step, path, when, details)  # type: ignore[arg-type]
    return None
