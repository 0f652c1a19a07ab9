"""The journal of a run: a file, or an object, with a line of JSON for each event."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import threading
from pathlib import Path

from flaxckpt import _storage, _util
from flaxckpt._steps.event import KINDS, Event

NAME = "events.jsonl"
"""The journal's name in a run directory."""

_MAX_LINE_BYTES = 64 * 2**10

_MAX_OBJECT_BYTES = 2**20
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
        # Of one in a store. What happened before a fork is written by the parent.
        self._unwritten = _util.forks.PerProcess(_no_lines)
        self._writing = _util.forks.PerProcess(threading.Lock)

    def __str__(self) -> str:
        return str(self._path)

    def write(self, event: Event) -> None:
        """Appends an event; in a store, perhaps only with those that follow.

        Raises:
            OSError: It cannot be written.
        """
        if not _storage.paths.is_remote(self._path):
            _append(self._path, _line(event))
            return
        with self._writing.get():
            self._unwritten.get().append(_line(event))
            if event.kind in _WORTH_WRITING:
                self._flush(self._path)

    def close(self) -> None:
        """Writes what is left."""
        if _storage.paths.is_remote(self._path):
            with (
                self._writing.get(),
                contextlib.suppress(OSError),
            ):  # it was told of before
                self._flush(self._path)

    def _flush(self, path: _storage.paths.RemotePath) -> None:
        if unwritten := self._unwritten.get():
            _append_object(path, b"".join(unwritten))
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


def _append(path: Path, line: bytes) -> None:
    """Appends a line in one write: lines of others do not mix with it."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        end = os.pread(descriptor, 1, status.st_size - 1) if status.st_size else b"\n"
        # A crash, or a full disk, may have cut the last line off.
        content = line if end == b"\n" else b"\n" + line
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, "no space left", str(path))
    finally:
        os.close(descriptor)


def _append_object(path: _storage.paths.RemotePath, lines: bytes) -> None:
    """Writes a journal anew with more lines, whoever else does so."""
    for _ in range(_TRIES):
        found = path.store.read(path.key)
        if found is None:
            if path.store.create(path.key, lines) is not None:
                return
            continue
        content = found.value + lines
        if len(content) > _MAX_OBJECT_BYTES:
            content = content[-_MAX_OBJECT_BYTES // 2 :].partition(b"\n")[2]
        if path.store.exchange(path.key, content, found.generation) is not None:
            return
    raise OSError(errno.EAGAIN, "others write all the time", str(path))


_TRIES = 20


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
    if new and _storage.paths.is_remote(other):
        _append_object(other, new)
    elif new:
        _append(other, new)


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
        if _storage.paths.is_remote(journal):
            return journal.read_bytes().splitlines(keepends=True)
        with _storage.local.opened(journal) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_OBJECT_BYTES))
            found = file.read()
    except FileNotFoundError:
        return []
    is_cut = size > _MAX_OBJECT_BYTES
    whole = found[: found.rfind(b"\n") + 1]
    return whole.splitlines(keepends=True)[1 if is_cut else 0 :]


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
