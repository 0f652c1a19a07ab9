"""Copies of parts at this process, made in the background."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flaxckpt import _distributed, _steps, _util, errors
from flaxckpt._run import events as run_events
from flaxckpt._run.tiers import part_copies, parts
from flaxckpt._run.tiers.part_copies import Copied, Sources
from flaxckpt._util.pace import Pace

if TYPE_CHECKING:
    from flaxckpt._distributed.operation import Operation

_log = logging.getLogger(__name__)


class CopyTask(NamedTuple):
    """A step whose parts are to be copied to this process.

    Attributes:
        step: Its number.
        path: The step in the directory of this process.
        find_sources: Finds where the parts are; raises OSError if the step was deleted.
        parts: The parts that this process is to keep.
        copies: Number of copies that each part has then.
        operation: The operation of all processes.
    """

    step: int
    path: Path
    find_sources: Callable[[], Sources]
    parts: Collection[int]
    copies: int
    operation: Operation


class Copier:
    """Copies parts of steps on a thread, those of the newest step first.

    Args:
        events: Stream for the events of copies.
        mode: Mode of new directories; None for the umask's.

    Attributes:
        failure: Why the newest copy failed; None if it did not.
    """

    def __init__(self, events: run_events.Stream, mode: int | None) -> None:
        self.failure: str | None = None
        self._events = events
        self._mode = mode
        self._guard = _util.forks.PerProcess(threading.Lock)
        self._waiting: list[tuple[CopyTask, Pace]] = []
        self._ended: _util.threads.Latch | None = None
        self._thread = threading.current_thread()

    def begin(self, task: CopyTask) -> None:
        """Begins to copy the parts of a step, at low priority until `wait`."""
        with self._guard.get():
            self._waiting.append((task, Pace()))
            if self._ended is not None:
                return
            self._ended = _util.threads.Latch()
            run = functools.partial(self._run, self._ended)
            self._thread = _util.threads.background(run, "flaxckpt copies")
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: copy on this one
            run()

    def wait(self, timeout_secs: float | None) -> list[int]:
        """Waits for copies in progress; returns the steps that are not copied yet."""
        with self._guard.get():
            for _, pace in self._waiting:
                pace.lift()
            ended, thread = self._ended, self._thread
        if ended and not _util.threads.wait_for(ended, thread, timeout_secs):
            self._run(ended)  # there was no memory for its thread
        return self.unfinished()

    def unfinished(self) -> list[int]:
        with self._guard.get():
            return [task.step for task, _ in self._waiting]

    def _run(self, ended: _util.threads.Latch) -> None:
        while True:
            with self._guard.get():
                if not self._waiting:
                    self._ended = None
                    ended.set()
                    return
                # The newest first; its copies replace those of older steps.
                *older, newest = self._waiting
            for task, _ in older:
                with contextlib.suppress(Exception):  # its copies are of no use
                    self._leave_out(task)
            try:
                with _distributed.agreement.closing_background(newest[0].operation):
                    self.failure = self._copy(*newest)
            except Exception as error:
                self.failure = errors.one_line(error)
            if (why := self.failure) is not None:
                step, path = newest[0].step, newest[0].path
                _log.warning("step %d is not copied: %s", step, why)
                self._events.emit("failed", step, path=path, what="copies", error=why)
            with self._guard.get():
                self._waiting = [
                    each for each in self._waiting if each not in (*older, newest)
                ]

    def _leave_out(self, task: CopyTask) -> None:
        """Tells the others that a step is not copied here."""
        why = "a newer step was saved before"
        with _distributed.agreement.closing_background(task.operation):
            task.operation.report("copied", [why, ""])
            if task.operation.is_first:
                task.operation.first("durable", lambda: why)

    def _copy(self, task: CopyTask, pace: Pace) -> str | None:
        """Copies the parts of others to this process; returns why that failed."""
        operation, begun = task.operation, time.monotonic()
        copied, fault, save = Copied(), None, ""
        try:
            sources = task.find_sources()
            save = sources.save
            known = parts.find_parts(sources.path)
            # Another save of the step, by now, may have fewer parts.
            rows = [files for n, files in enumerate(known.files) if n in task.parts]
            wanted = [name for files in rows for name in files]
            copied = part_copies.copy_parts(sources, wanted, self._mode, pace=pace)
            part_copies.sync(sources.path, wanted)
            if parts.identify(sources.path) != save:
                fault = "another process has replaced the step"
        except (OSError, ValueError, errors.CheckpointError) as error:
            fault = errors.one_line(error)
        operation.report("copied", [fault, save])

        def gather() -> str:
            rows = operation.gather("copied", [fault, save])
            faults = [f"process {n}: {why}" for n, (why, _) in enumerate(rows) if why]
            if not faults and len({save for _, save in rows}) > 1:
                faults = ["the processes have different saves of it"]
            return "; ".join(faults)

        fault = operation.first("durable", gather, is_patient=True) or None
        if fault is None and parts.identify(sources.path) == save:
            path = sources.path
            with contextlib.suppress(FileNotFoundError):  # just deleted
                _steps.markers.mark_copied(path, task.copies)
            secs = time.monotonic() - begun
            self._events.emit(
                "copied",
                task.step,
                path=path,
                copies=task.copies,
                bytes=copied.from_peers,
                secs=secs,
            )
        return fault
