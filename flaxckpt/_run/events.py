"""The events of a run, delivered once to sinks and to a journal.

The thread of an event writes the journal. Sinks are called on the thread of the user:
loggers and their runs often belong to the thread that made them.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flaxckpt import _steps, _util, errors
from flaxckpt._steps.event import Event, Kind

_log = logging.getLogger(__name__)

Sink: TypeAlias = Any
"""An object with `write_scalars`, `log_metrics`, `add_scalar` or `log`, or a function
of an `Event`."""


class Stream:
    """The events of a run at `path`; process 0 appends each to the journal, if any."""

    def __init__(
        self, path: Path, journal: Path | None, mode: int | None = None
    ) -> None:
        self._path = path
        self._journal = None
        if journal is not None:
            self._journal = _steps.journal.EventJournal(journal, mode)
        self._has_lost = False
        self._sinks: list[_Receiver] = []
        # The parent delivers events from before a fork.
        self._queue = _util.forks.PerProcess(collections.deque[Event])
        self._delivering = _util.forks.PerProcess(threading.Lock)
        self._caller_step: int | None = None

    def emit(
        self,
        kind: Kind,
        step: int | None = None,
        *,
        path: Path | str | None = None,
        **details: Any,
    ) -> None:
        """Records an event, on any thread; never raises.

        The path is by default the run directory's. Details that are no JSON become
        text.
        """
        self._add(kind, step, path, details, in_journal_only=False)

    def record(self, kind: Kind, **details: Any) -> bool:
        """Adds an event to the journal only; returns False, with a log, if it fails."""
        return self._add(kind, None, None, details, in_journal_only=True)

    def _add(
        self,
        kind: Kind,
        step: int | None,
        path: Path | str | None,
        details: Mapping[str, Any],
        *,
        in_journal_only: bool,
    ) -> bool:
        """Adds an event; logs the first failure, and returns False after any."""
        try:
            number = None if step is None else int(step)
            plain = {name: _steps.event.plain(value) for name, value in details.items()}
            event = Event(kind, number, str(path or self._path), time.time(), plain)
            if self._sinks and not in_journal_only:
                self._queue.get().append(event)
            if self._journal is not None and _util.job.is_first():
                self._journal.write(event)
        except Exception as error:
            if not self._has_lost:
                _log.warning("events are missing in %s: %s", self._journal, error)
            self._has_lost = True
            return False
        return True

    def subscribe(self, sink: Sink) -> bool:
        """Adds a sink for later events; returns True unless it was added before.

        Raises OptionError if it is no sink.
        """
        receiver = _Receiver(sink)
        is_new = not any(_is_same(sink, known.sink) for known in self._sinks)
        if is_new:
            self._sinks.append(receiver)
        return is_new

    def unsubscribe(self, sink: Sink) -> None:
        self.deliver()
        self._sinks = [s for s in self._sinks if not _is_same(sink, s.sink)]

    def deliver(self, step: int | None = None) -> None:
        """Delivers pending events to the sinks, on the thread of the caller.

        Logs the first exception of each sink. Scalars get the caller's `step`: some
        loggers drop scalars of earlier steps.
        """
        if step is not None:
            self._caller_step = step
        # If another thread is delivering, or a sink calls this, leave events to it.
        queue, delivering = self._queue.get(), self._delivering.get()
        while queue and delivering.acquire(blocking=False):
            try:
                self._deliver(queue, step)
            finally:
                delivering.release()

    def _deliver(self, queue: collections.deque[Event], step: int | None) -> None:
        while queue:
            event = queue.popleft()
            at = step
            if at is None:
                at = max(event.step or 0, self._caller_step or 0)
            for sink in self._sinks:
                sink(event, at)

    @contextlib.contextmanager
    def delivery(self) -> Iterator[None]:
        """Delivers the events when the `with` block ends."""
        try:
            yield
        finally:
            self.deliver()

    def close(self) -> None:
        """Delivers pending events, and logs sinks with several failures."""
        self.deliver()
        if self._journal is not None:
            self._journal.close()
        for sink in self._sinks:
            sink.close()


# ---- sinks ----------------------------------------------------------------------


class _Receiver:
    """Sends events to a sink, or raises OptionError; logs its first exception."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.failures = 0
        self._send = _adapt(sink)

    def close(self) -> None:
        """Logs the number of failures if the sink failed more than once."""
        if self.failures > 1:
            _log.warning("%s failed %d more times", self.name, self.failures - 1)
            self.failures = 1

    @property
    def name(self) -> str:
        name = getattr(self.sink, "__qualname__", type(self.sink).__qualname__)
        return f"the event sink {name}"

    def __call__(self, event: Event, step: int) -> None:
        try:
            self._send(event, step)
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                _log.warning(
                    "%s failed; checkpoints are not affected:",
                    self.name,
                    exc_info=error,
                )


def list_sinks(sinks: Sequence[Sink]) -> tuple[Sink, ...]:
    """Returns sinks as a tuple, or raises OptionError."""
    if not _util.arguments.is_list(sinks):
        raise errors.OptionError(
            f"sinks must be a list, got {_util.arguments.describe(sinks)}: write"
            " sinks=[sink]"
        )
    listed = tuple(sinks)
    for sink in listed:
        _adapt(sink)
    return listed


def _is_same(sink: Sink, other: Sink) -> bool:
    """Returns True for the same sink, also for two objects of a bound method."""
    return sink is other or bool(inspect.isroutine(sink) and sink == other)


def _add_each(writer: Any, scalars: dict[str, float], step: int) -> None:
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, step)


_Log: TypeAlias = Callable[[Any, dict[str, float], int], object]

_LOGGERS: Mapping[str, _Log] = {
    "write_scalars": lambda sink, values, at: sink.write_scalars(at, values),
    "log_metrics": lambda sink, values, at: sink.log_metrics(values, step=at),
    "add_scalar": _add_each,
    "log": lambda sink, values, at: sink.log(values, step=at),
}
"""Method of a kind of loggers -> a function that logs scalars at a step."""


def _adapt(sink: Sink) -> Callable[[Event, int], object]:
    # A class is not yet a sink, and the standard library's loggers have a `log`, too.
    if not isinstance(sink, type | logging.Logger):
        for method, log in _LOGGERS.items():
            if callable(getattr(sink, method, None)):
                return _Scalars(sink, log)
        if callable(sink):
            return lambda event, step: sink(event)
    raise errors.OptionError(
        f"{sink!r:.80} is not an event sink; wanted one of\n"
        "  a function of a flaxckpt.Event\n"
        "  a clu writer: write_scalars(step, dict)\n"
        "  a W&B run: log(dict, step=)\n"
        "  an MLflow module: log_metrics(dict, step=)\n"
        "  a TensorBoard writer: add_scalar(tag, value, step)"
    )


_COUNTED = frozenset(
    ("deleted", "failed", "cancelled", "fell_back", "found_damaged", "skipped")
)


class _Scalars:
    """Converts events to numbers for a logger."""

    def __init__(self, sink: Sink, log: _Log) -> None:
        self._sink = sink
        self._log = log
        self._counts: collections.Counter[str] = collections.Counter()

    def __call__(self, event: Event, step: int) -> None:
        scalars = self._of(event)
        if scalars:
            named = {f"checkpoint/{name}": value for name, value in scalars.items()}
            self._log(self._sink, named, step)

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
