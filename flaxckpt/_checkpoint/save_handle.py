"""Saves in progress: threads, results, and errors at the end of the program."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Literal, NoReturn

from flaxckpt import _doors, _steps, _util, errors
from flaxckpt._util.pace import Pace

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class SaveResult:
    """Result of a finished save.

    Attributes:
        step: The checkpoint's step; None for a single checkpoint.
        path: Path of the checkpoint.
        bytes_written: Size of the written files, without files hard-linked from the
            previous step.
        blocked_secs: Seconds that the call blocked the caller.
        total_secs: Seconds from the call until the checkpoint was durable and old steps
            were deleted.
        deleted_steps: Steps deleted by the preservation policies; with a staging
            directory, steps deleted from staging.
        skipped: None, or the reason why nothing was written.
        tier: The tier with the durable checkpoint: `directory`, or `staging`, from
            where it is uploaded.
    """

    step: int | None
    path: str
    bytes_written: int
    blocked_secs: float
    total_secs: float
    deleted_steps: tuple[int, ...] = ()
    skipped: str | None = None
    tier: Literal["directory", "staging"] = "directory"

    @property
    def copies(self) -> int:
        """Number of other processes that have a durable copy of each part by now.

        0 unless the step is in a staging directory with `staging_copies`.
        """
        if self.tier == "directory":
            return 0
        try:
            return _steps.markers.count_copies(os.listdir(self.path))  # noqa: PTH208
        except OSError:  # deleted since
            return 0


class Cancellation:
    """The decision whether a save is cancelled or may commit; thread-safe.

    Holds no lock, which a forked process would wait for: `dict.setdefault` is atomic.
    """

    def __init__(self) -> None:
        self._decision: dict[str, str | None] = {}

    def cancel(self, message: str) -> None:
        """Cancels the save unless it is already decided; `message` is its error."""
        self._decision.setdefault("message", message)

    def check(self) -> None:
        """Raises SaveCancelledError if the save is cancelled."""
        if (message := self._decision.get("message")) is not None:
            raise errors.SaveCancelledError(message)

    def close(self) -> None:
        """Ends the time in which the save can be cancelled, or raises its error."""
        self._decision.setdefault("message", None)
        self.check()


@_util.guessed_names.explain
class SaveHandle:
    """A save in progress. The program waits for the save at exit."""

    def __init__(
        self,
        work: Callable[[], SaveResult],
        *,
        name: str,
        counter: _util.progress.Counter,
        cancellation: Cancellation,
        pace: Pace,
    ) -> None:
        _doors.open_all()
        self._cancellation = cancellation
        self._pace = pace
        self._name = name
        self._counter = counter
        self._result: SaveResult | None = None
        self._error: BaseException | None = None
        self._ended = _util.threads.Latch()
        _register_in_child()
        # No daemon thread: a script that ends still finishes the last save.
        run = functools.partial(self._run, work)
        self._thread = _util.threads.background(run, name)
        _unfinished.add(self)  # whole: Ctrl-C may come between any two lines
        try:
            if not _is_ending.is_set():  # else no exit handler joins the thread
                self._thread.start()
                return
        except RuntimeError:  # no thread can be started
            pass
        self._run(work)  # in the caller's thread
        if _is_ending.is_set():
            _exit_if_failed()

    def __repr__(self) -> str:
        if not self.done():
            return f"<{self._name}: in progress>"
        if self.is_cancelled():
            return f"<{self._name}: cancelled>"
        return f"<{self._name}: {'durable' if self._error is None else 'failed'}>"

    def _run(self, work: Callable[[], SaveResult]) -> None:
        try:
            self._result = work()
        except errors.SaveCancelledError as error:
            self._error = error  # asked for, so not reported at exit
            _log.info("%s", error)
        except BaseException as error:
            self._error = error
            _unreported.add(self)
        finally:
            self._ended.set()
            _unfinished.discard(self)

    def _mark_as_forked(self) -> None:
        """Marks the save as ended in a fork, where the saving thread does not exist."""
        self._error = errors.SaveFailedError(
            f"the {self._name} was started before this process was forked, and only the"
            " parent process finishes it: wait for it there"
        )
        self._ended = _util.threads.Latch()  # one that waited may hold the old one
        self._ended.set()

    def _await_end(self, timeout_secs: float | None = None) -> None:
        if not _util.threads.wait_for(self._ended, self._thread, timeout_secs):
            self._error = errors.SaveFailedError(
                f"the {self._name} ended before it began, as there was no memory for"
                " its thread: free memory, and save again"
            )
            self._ended.set()
            _unfinished.discard(self)

    def done(self) -> bool:
        """Returns True if the save has succeeded or failed."""
        return self._ended.is_set()

    def cancel(self) -> bool:
        """Stops the save, unless the checkpoint is already committed.

        Returns once the save has ended, and the written files are removed: there is no
        step, a checkpoint to be overwritten is untouched, and `wait` raises
        SaveCancelledError. A save that overwrites a checkpoint in an object store
        cannot be cancelled, as the old checkpoint is removed first.

        With several processes, the save is stopped in all processes or in none, also
        if only one process cancels. Of a process that does not, `wait` raises
        SaveCancelledError, too.

        Returns:
            True if the save was cancelled; False if the checkpoint is committed, or
            the save has failed, with an error that `wait` raises.
        """
        if not self.done():
            self._cancellation.cancel(
                f"the {self._name} was cancelled before its commit: nothing was saved,"
                " and earlier checkpoints are untouched"
            )
            self._pace.lift()
            self._await_end()
        return self.is_cancelled()

    def is_cancelled(self) -> bool:
        """Returns True if the save was cancelled and has ended."""
        return isinstance(self._error, errors.SaveCancelledError)

    def has_failed(self) -> bool:
        """Returns True if the save has ended and saved nothing."""
        return self._error is not None

    def is_awaited(self) -> bool:
        """Returns True if any caller has waited for the save while it was running."""
        return self._pace.is_lifted()

    def has_unreported_error(self) -> bool:
        """Returns True if the save failed and `wait` has not yet raised the error."""
        return self in _unreported

    def _join(self, timeout_secs: float | None = None) -> None:
        if not self._ended.is_set():
            self._pace.lift()
            with _util.progress.bar(self._counter):
                self._await_end(timeout_secs)

    def wait(self, timeout_secs: float | None = None) -> SaveResult:
        """Waits until the checkpoint is durable and old steps are deleted.

        Until then, the save writes at low priority, to slow down the program little.
        If many steps have to be deleted, the rest is deleted after the next save.

        Raises:
            CheckpointTimeoutError: The save is still running after `timeout_secs`.
            SaveCancelledError: The save was cancelled.
            CheckpointError: The save failed and saved nothing.
        """
        _util.arguments.check_timeout(timeout_secs)
        self._join(timeout_secs)
        if not self._ended.is_set():
            raise errors.CheckpointTimeoutError(
                f"the {self._name} is still running after {timeout_secs} s;"
                " call wait() again to wait longer"
            )
        _unreported.discard(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def join(handle: SaveHandle) -> None:
    """Waits until a save has ended; `SaveHandle.wait` raises its error."""
    handle._join()


_unfinished: set[SaveHandle] = set()
"""Unfinished saves."""

_unreported: set[SaveHandle] = set()
"""Failed saves with unreported errors."""


_is_ending = threading.Event()
"""Set when the exit handler has started; later saves block their callers."""

if not threading.main_thread().is_alive():
    # Imported by an exit handler: a handler registered now would not be called.
    _is_ending.set()


def _report_at_exit() -> None:
    """Exits with a nonzero code if a failed save was never reported."""
    _is_ending.set()
    try:
        for handle in list(_unfinished):  # on daemon threads, and in children
            handle._pace.lift()
            handle._await_end()
    except BaseException:  # Ctrl-C; an exception here would not change the exit code
        _exit(f"the {each._name} was interrupted" for each in list(_unfinished))
    _exit_if_failed()


def _exit_if_failed() -> None:
    if _unreported:
        _exit(f"the {each._name}: {each._error}" for each in list(_unreported))


def _exit(messages: Iterable[str]) -> NoReturn:
    """Prints the errors if possible, and ends the program with a failure code."""
    try:
        for stream, lines in ((sys.stdout, ()), (sys.stderr, messages)):
            # The stream may be closed, on a full disk, or None.
            with contextlib.suppress(Exception):
                stream.writelines(f"flaxckpt: {line}\n" for line in lines)
                stream.flush()
    finally:
        os._exit(1)


atexit.register(_report_at_exit)

_registered_in: set[int] = set()
"""The `multiprocessing` processes with a registered exit handler."""


def _register_in_child() -> None:
    """Registers the handler in a `multiprocessing` child, which skips `atexit`."""
    if multiprocessing.parent_process() is None or os.getpid() in _registered_in:
        return
    _registered_in.add(os.getpid())
    # Run after multiprocessing's own finalizers, which empty queues.
    multiprocessing.util.Finalize(None, _report_at_exit, exitpriority=-1000)


def _forget_other_process() -> None:
    """After fork(): forgets the parent's saves; only the parent reports them."""
    for handle in _unfinished:
        handle._mark_as_forked()
    _unfinished.clear()
    _unreported.clear()


os.register_at_fork(after_in_child=_forget_other_process)
