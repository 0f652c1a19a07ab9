"""What happens to the checkpoints of a run, told once: to sinks and to a journal.

An event is written to the journal by whichever thread it happens on. Sinks wait for the
caller's own thread: loggers and their runs often belong to the thread that made them.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import inspect
import json
import logging
import math
import numbers
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from flaxckpt import _multihost, _remote, _storage, errors
from flaxckpt._types import JSON

_log = logging.getLogger(__name__)

JOURNAL = "events.jsonl"
"""The journal's name in a run directory."""

_MAX_LINE_BYTES = 64 * 2**10

_MAX_OBJECT_BYTES = 2**20
"""Of a journal in a store, which is written anew each time; its oldest lines go."""

_WORTH_WRITING = frozenset(
    ("committed", "deleted", "failed", "restored", "preempted", "skipped", "preflight")
)
"""Events with which those before them are written, where that takes a request."""

Kind: TypeAlias = Literal[
    "preflight",
    "started",
    "snapshot",
    "committed",
    "uploaded",
    "deleted",
    "restored",
    "fell_back",
    "failed",
    "skipped",
    "preempted",
]

_KINDS = frozenset(get_args(Kind))

Sink: TypeAlias = Any
"""An object with `write_scalars`, `log_metrics`, `add_scalar` or `log`, or a function
of an `Event`."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a checkpoint.

    Attributes:
        kind: What happened: `started`, `snapshot`, `committed`, `failed` and `skipped`
            of a save, `uploaded` from a staging directory, `restored` and `fell_back`
            of a restore, `deleted`; `preflight` and `preempted` of a trainer.
        step: The checkpoint's step; None if it has none.
        path: The checkpoint, or the run directory.
        time: Seconds since 1970.
        details: What else is known, by name: `bytes`, `total_secs`, `error`.
    """

    kind: Kind
    step: int | None
    path: str
    time: float
    details: Mapping[str, JSON]


class Stream:
    """The events of one run.

    Args:
        path: The run directory; events that name no checkpoint are of it.
        journal: The file to which each event is appended as a line of JSON, by process
            0 only; None for no journal. It is made with the first event.
    """

    def __init__(self, path: Path, journal: Path | None) -> None:
        self._path = path
        self._journal = journal
        self._has_lost = False
        self._unwritten: list[bytes] = []  # of a journal in a store
        self._writing = threading.Lock()
        self._sinks: list[_Teller] = []
        self._queue: collections.deque[Event] = collections.deque()
        self._delivering = threading.Lock()
        self._caller_step: int | None = None

    def emit(
        self,
        kind: Kind,
        step: int | None = None,
        *,
        path: Path | str | None = None,
        **details: Any,
    ) -> None:
        """Notes an event, on any thread; never raises.

        Args:
            kind: What happened.
            step: The checkpoint's step.
            path: The checkpoint; by default the run directory.
            **details: JSON. What is none becomes text.
        """
        try:
            number = None if step is None else int(step)
            plain = {name: _plain(value) for name, value in details.items()}
            event = Event(kind, number, str(path or self._path), time.time(), plain)
            if self._sinks:
                self._queue.append(event)
            if self._journal is not None and _multihost.is_first():
                self._write(self._journal, event)
        except Exception as error:
            if not self._has_lost:
                _log.warning("events are missing in %s: %s", self._journal, error)
            self._has_lost = True

    def _write(self, journal: Path, event: Event) -> None:
        if not _remote.is_remote(journal):
            _append(journal, _line(event))
            return
        with self._writing:
            self._unwritten.append(_line(event))
            if event.kind in _WORTH_WRITING:
                self._flush(journal)

    def _flush(self, journal: _remote.RemotePath) -> None:
        if self._unwritten:
            _append_object(journal, b"".join(self._unwritten))
            self._unwritten.clear()

    def subscribe(self, sink: Sink) -> bool:
        """Tells a sink of all events from now on; of each once if it is added twice.

        Returns:
            Whether it is new.

        Raises:
            OptionError: It is none.
        """
        tell = _teller(sink)
        is_new = not any(_is_same(sink, known.sink) for known in self._sinks)
        if is_new:
            self._sinks.append(_Teller(sink, tell))
        return is_new

    def unsubscribe(self, sink: Sink) -> None:
        """Tells a sink what has happened until now, and no more."""
        self.deliver()
        self._sinks = [s for s in self._sinks if not _is_same(sink, s.sink)]

    def deliver(self, step: int | None = None) -> None:
        """Tells the sinks what has happened, on the thread of the caller.

        What a sink raises is logged, once for each sink.

        Args:
            step: Where the caller is, which is the step that scalars get: some loggers
                drop those that go back. By default that of the event, or where the
                caller was last if that is later.
        """
        if step is not None:
            self._caller_step = step
        # Whoever finds another at it, or is called by a sink, leaves it to the other.
        while self._queue and self._delivering.acquire(blocking=False):
            try:
                self._deliver(step)
            finally:
                self._delivering.release()

    def _deliver(self, step: int | None) -> None:
        while self._queue:
            event = self._queue.popleft()
            at = step
            if at is None:
                at = max(event.step or 0, self._caller_step or 0)
            for sink in self._sinks:
                sink(event, at)

    def close(self) -> None:
        """Delivers what is left, and says which sinks have failed more than once."""
        self.deliver()
        if _remote.is_remote(self._journal):
            with self._writing, contextlib.suppress(OSError):  # it was told of before
                self._flush(self._journal)
        for sink in self._sinks:
            if sink.failures > 1:
                _log.warning("%s failed %d more times", sink.name, sink.failures - 1)
                sink.failures = 1


def check_sink(sink: Sink) -> None:
    """Refuses what is no sink.

    Raises:
        OptionError: It is none.
    """
    _teller(sink)


# ---- sinks --------------------------------------------------------------------------


class _Teller:
    """A sink, and how it is told."""

    def __init__(self, sink: Sink, tell: Callable[[Event, int], object]) -> None:
        self.sink = sink
        self.failures = 0
        self._tell = tell

    @property
    def name(self) -> str:
        """What it is, for messages."""
        name = getattr(self.sink, "__qualname__", type(self.sink).__qualname__)
        return f"the event sink {name}"

    def __call__(self, event: Event, step: int) -> None:
        try:
            self._tell(event, step)
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                _log.warning(
                    "%s failed, which changes nothing for checkpoints:",
                    self.name,
                    exc_info=error,
                )


def _is_same(sink: Sink, other: Sink) -> bool:
    """Whether they are one; each look at a bound method makes another object of it."""
    return sink is other or bool(inspect.isroutine(sink) and sink == other)


class _Shape(NamedTuple):
    """How loggers of a kind are recognised and told.

    Attributes:
        method: The method that they have.
        tell: Gives them scalars at a step.
    """

    method: str
    tell: Callable[[Any, dict[str, float], int], object]


def _add_each(writer: Any, scalars: dict[str, float], step: int) -> None:
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, step)


_SHAPES = (
    _Shape("write_scalars", lambda sink, values, at: sink.write_scalars(at, values)),
    _Shape("log_metrics", lambda sink, values, at: sink.log_metrics(values, step=at)),
    _Shape("add_scalar", _add_each),
    _Shape("log", lambda sink, values, at: sink.log(values, step=at)),
)


def _teller(sink: Sink) -> Callable[[Event, int], object]:
    # A class is not yet a sink, and the standard library's loggers have a `log`, too.
    if not isinstance(sink, type | logging.Logger):
        for shape in _SHAPES:
            if callable(getattr(sink, shape.method, None)):
                return _Scalars(sink, shape.tell)
        if callable(sink):
            return lambda event, step: sink(event)
    raise errors.OptionError(
        f"{sink!r:.80} is no sink for events; wanted one of\n"
        "  a function of a flaxckpt.Event\n"
        "  a clu writer: write_scalars(step, dict)\n"
        "  a W&B run: log(dict, step=)\n"
        "  an MLflow module: log_metrics(dict, step=)\n"
        "  a TensorBoard writer: add_scalar(tag, value, step)"
    )


_COUNTED = frozenset(("deleted", "failed", "fell_back", "skipped"))


class _Scalars:
    """Numbers of events, for a sink that plots them."""

    def __init__(
        self, sink: Sink, tell: Callable[[Any, dict[str, float], int], object]
    ) -> None:
        self._sink = sink
        self._tell = tell
        self._counts: collections.Counter[str] = collections.Counter()

    def __call__(self, event: Event, step: int) -> None:
        scalars = self._of(event)
        if scalars:
            named = {f"checkpoint/{name}": value for name, value in scalars.items()}
            self._tell(self._sink, named, step)

    def _of(self, event: Event) -> dict[str, float]:
        if event.kind in _COUNTED:
            self._counts[event.kind] += 1
            return {event.kind: self._counts[event.kind]}
        match event.kind, event.details:
            case "snapshot", {"blocked_secs": float(blocked)}:
                return {"blocked_secs": blocked}
            case "committed", {"total_secs": float(secs), "bytes": int(size)}:
                rate = size / secs if secs else 0.0
                return {"total_secs": secs, "bytes": size, "bytes_per_sec": rate}
            case "uploaded", {"secs": float(secs)}:
                return {"upload_secs": secs}
            case "restored", {"secs": float(secs)}:
                return {"restore_secs": secs}
        return {}


# ---- the journal --------------------------------------------------------------------


def first_lines(error: BaseException, lines: int = 3) -> str:
    """What an error says, in short."""
    text = "\n".join(str(error).strip().splitlines()[:lines])[:500]
    return text or type(error).__name__


def _plain(value: Any) -> JSON:
    """A value as JSON has it; what it has not becomes text."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


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


def _append_object(path: _remote.RemotePath, lines: bytes) -> None:
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
    if new and _remote.is_remote(other):
        _append_object(other, new)
    elif new:
        _append(other, new)


def _last_lines(journal: Path) -> list[bytes]:
    """The last whole lines of a journal; none if it is not there."""
    try:
        if _remote.is_remote(journal):
            return journal.read_bytes().splitlines(keepends=True)
        with _storage.opened(journal) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_OBJECT_BYTES))
            found = file.read()
    except FileNotFoundError:
        return []
    is_cut = size > _MAX_OBJECT_BYTES
    whole = found[: found.rfind(b"\n") + 1]
    return whole.splitlines(keepends=True)[1 if is_cut else 0 :]


def read_journal(path: Path) -> list[Event]:
    """The events in a journal, in its order; none if there is no such file.

    Lines that were cut off, or are not ours, are left out.
    """
    events: list[Event] = []
    if not path.is_file():
        return events
    with _storage.opened(path) as file:
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
        } if kind in _KINDS and not isinstance(step, bool) and math.isfinite(when):
            return Event(kind, step, path, when, details)  # type: ignore[arg-type]
    return None
