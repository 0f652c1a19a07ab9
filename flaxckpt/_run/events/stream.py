"""The events of a run, delivered once to sinks and to a journal.

The thread of an event writes the journal. Sinks are called on the thread of the user:
loggers and their runs often belong to the thread that made them.
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
    """The events of a run.

    Args:
        path: The run directory; the default path of events.
        journal: The file to which process 0 appends each event as a line of JSON, made
            with the first event; None for no journal.
    """

    def __init__(self, path: Path, journal: Path | None) -> None:
        self._path = path
        self._journal = None
        if journal is not None:
            self._journal = _steps.journal.EventJournal(journal)
        self._has_lost = False
        self._sinks: list[sinks.Teller] = []
        # The parent delivers events from before a fork.
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
        """Records an event, on any thread; never raises.

        Args:
            kind: The kind of the event.
            step: The step of the checkpoint.
            path: The checkpoint; by default the run directory.
            **details: JSON values; other values are converted to text.
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
        """Adds a sink for all later events, unless already added.

        Returns:
            True if the sink is new.

        Raises:
            OptionError: `sink` is not a sink.
        """
        teller = sinks.Teller(sink)
        is_new = not any(sinks.is_same(sink, known.sink) for known in self._sinks)
        if is_new:
            self._sinks.append(teller)
        return is_new

    def unsubscribe(self, sink: Sink) -> None:
        """Delivers pending events, and removes a sink."""
        self.deliver()
        self._sinks = [s for s in self._sinks if not sinks.is_same(sink, s.sink)]

    def deliver(self, step: int | None = None) -> None:
        """Delivers pending events to the sinks, on the thread of the caller.

        Exceptions of sinks are logged, once per sink.

        Args:
            step: The current step of the caller, used as the step of scalars: some
                loggers drop scalars of earlier steps. By default the step of the event,
                or the last step of the caller if later.
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


def _new_queue() -> collections.deque[Event]:
    return collections.deque()
