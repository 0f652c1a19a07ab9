"""The events of a run, told once: to sinks and to a journal.

An event is written to the journal by whichever thread it happens on. Sinks wait for the
caller's own thread: loggers and their runs often belong to the thread that made them.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flaxckpt import _steps, _util
from flaxckpt._run.events import sinks
from flaxckpt._run.events.sinks import Sink
from flaxckpt._steps.event import Event, Kind

_log = logging.getLogger(__name__)


class Stream:
    """The events of one run.

    Args:
        path: The run directory; events that name no checkpoint are of it.
        journal: The file to which each event is appended as a line of JSON, by process
            0 only; None for no journal. It is made with the first event.
    """

    def __init__(self, path: Path, journal: Path | None) -> None:
        self._path = path
        self._journal = None
        if journal is not None:
            self._journal = _steps.journal.EventJournal(journal)
        self._has_lost = False
        self._sinks: list[sinks.Teller] = []
        # What happened before a fork is told by the parent.
        self._queue = _util.forks.PerProcess(_new_queue)
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
        """Notes an event, on any thread; never raises.

        Args:
            kind: What happened.
            step: The checkpoint's step.
            path: The checkpoint; by default the run directory.
            **details: JSON. What is none becomes text.
        """
        try:
            number = None if step is None else int(step)
            plain = {name: _steps.event.plain(value) for name, value in details.items()}
            event = Event(kind, number, str(path or self._path), time.time(), plain)
            if self._sinks:
                self._queue.get().append(event)
            if self._journal is not None and _util.processes.is_first():
                self._journal.write(event)
        except Exception as error:
            if not self._has_lost:
                _log.warning("events are missing in %s: %s", self._journal, error)
            self._has_lost = True

    def subscribe(self, sink: Sink) -> bool:
        """Tells a sink of all events from now on; of each once if it is added twice.

        Returns:
            Whether it is new.

        Raises:
            OptionError: It is none.
        """
        teller = sinks.Teller(sink)
        is_new = not any(sinks.is_same(sink, known.sink) for known in self._sinks)
        if is_new:
            self._sinks.append(teller)
        return is_new

    def unsubscribe(self, sink: Sink) -> None:
        """Tells a sink what has happened until now, and no more."""
        self.deliver()
        self._sinks = [s for s in self._sinks if not sinks.is_same(sink, s.sink)]

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
        """Delivers what is left, and says which sinks have failed more than once."""
        self.deliver()
        if self._journal is not None:
            self._journal.close()
        for sink in self._sinks:
            sink.close()


def _new_queue() -> collections.deque[Event]:
    return collections.deque()
