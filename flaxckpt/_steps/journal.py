"""The journal of a run: a file, or an object, with a line of JSON for each event."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from pathlib import Path

from flaxckpt import _storage, _util
from flaxckpt._steps.event import KINDS, Event

NAME = "events.jsonl"
"""The journal's name in a run directory."""

_MAX_LINE_BYTES = 64 * 2**10

_MAX_BYTES = 2**20
"""Of a journal in a store, which is written anew each time; its oldest lines go."""

_WORTH_WRITING = frozenset(
    ("committed", "deleted", "failed", "restored", "preempted", "skipped", "preflight")
)
"""Events with which those before them are written, where that takes a request."""


class EventJournal:
    """Writes the journal of one process.

    Args:
        path: Of the journal; it is made with the first event.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._storage = _storage.of(path)
        # Only where each write is a request. A fork leaves them to the parent.
        self._unwritten = _util.forks.PerProcess(_no_lines)
        self._writing = _util.forks.PerProcess(threading.Lock)

    def __str__(self) -> str:
        return str(self._path)

    def write(self, event: Event) -> None:
        """Appends an event; in a store, perhaps only with those that follow.

        Raises:
            OSError: It cannot be written.
        """
        if not self._storage.costs_requests:
            self._storage.append_lines(self._path, _line(event), _MAX_BYTES)
            return
        with self._writing.get():
            self._unwritten.get().append(_line(event))
            if event.kind in _WORTH_WRITING:
                self._flush()

    def close(self) -> None:
        """Writes what is left."""
        # An error was reported with the event.
        with self._writing.get(), contextlib.suppress(OSError):
            self._flush()

    def _flush(self) -> None:
        if unwritten := self._unwritten.get():
            self._storage.append_lines(self._path, b"".join(unwritten), _MAX_BYTES)
            unwritten.clear()


def _no_lines() -> list[bytes]:
    return []


def _line(event: Event) -> bytes:
    row = {
        "time": event.time,
        "kind": event.kind,
        "step": event.step,
        "path": event.path,
        "details": event.details,
    }
    line = json.dumps(row).encode() + b"\n"
    if len(line) > _MAX_LINE_BYTES:
        line = json.dumps(row | {"details": {}}).encode() + b"\n"
    return line


def pass_on(journal: Path, other: Path) -> None:
    """Appends to another journal what has been written to this one since the last time.

    That is what comes after the last line that both have.

    Raises:
        OSError: One of them cannot be read, or the other one not written.
    """
    lines = _last_lines(journal)
    numbers = {line: number for number, line in enumerate(lines, 1)}
    known = (numbers[line] for line in reversed(_last_lines(other)) if line in numbers)
    new = b"".join(lines[next(known, 0) :])
    if new:
        _storage.of(other).append_lines(other, new, _MAX_BYTES)


def recent(journal: Path) -> list[Event]:
    """The last events of a journal, in its order; none if it cannot be read."""
    try:
        lines = _last_lines(journal)
    except OSError:
        return []
    return [event for line in lines if (event := _parse(line))]


def _last_lines(journal: Path) -> list[bytes]:
    """The last whole lines of a journal; none if it is not there."""
    try:
        return _storage.of(journal).last_lines(journal, _MAX_BYTES)
    except FileNotFoundError:
        return []


def read(path: Path) -> list[Event]:
    """The events in a journal, in its order; none if there is no such file.

    Lines that were cut off, or are not ours, are left out.
    """
    events: list[Event] = []
    if not path.is_file():
        return events
    with _storage.local.opened(path) as file:
        is_begin = True
        while line := file.readline(_MAX_LINE_BYTES):
            if is_begin and (event := _parse(line)):
                events.append(event)
            is_begin = line.endswith(b"\n")  # else the line is longer than any of ours
    return events


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
