"""Preemption: agreement of all processes on a stop, the last save, and the exit."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable

from flaxckpt import _util, errors
from flaxckpt._checkpoint.save_handle import SaveHandle
from flaxckpt._run.checkpointer import Checkpointer, session_of
from flaxckpt._training.completed_step import CompletedStep
from flaxckpt._training.signals import Notice, Watch
from flaxckpt._training.triggers import Triggers

_log = logging.getLogger(__name__)


class Preemption:
    """Watches for requests to stop the program, and saves in the time that is left.

    With the `exit_code` None, the program continues to run. `offset` is the difference
    of a completed step and the step of the loop.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        watches: bool,
        grace_secs: float | None,
        exit_code: int | None,
        offset: int,
        clock: Callable[[], float],
    ) -> None:
        self.is_handled = False
        self._checkpointer = checkpointer
        self._offset = offset
        if grace_secs is not None:
            _util.arguments.check_positive("grace_secs", grace_secs)
        self._grace_secs = grace_secs
        self._save_secs: float | None = None
        self._last_save: SaveHandle | None = None
        self._watch = Watch(clock) if watches else None
        if exit_code is not None and (
            _util.arguments.check_int("exit_code", exit_code) not in range(256)
        ):
            raise errors.OptionError(
                f"exit_code must be None or from 0 to 255, got {exit_code}"
            )
        self._exit_code = exit_code
        self._clock = clock
        if self._watch is not None:
            weakref.finalize(self, self._watch.end)

    @property
    def notice(self) -> Notice | None:
        """The request to stop known to this process, or None."""
        return None if self._watch is None else self._watch.notice

    @property
    def exits(self) -> bool:
        """True if the program exits after a request to stop."""
        return self._exit_code is not None

    def begin(self) -> None:
        if self._watch is not None and self._watch.begin():
            self.is_handled = False

    def end(self) -> None:
        """Stops watching, and restores the signal handlers."""
        if self._watch is not None:
            self._watch.end()

    def is_requested(self) -> bool:
        """Returns True if any process must stop; all processes must call."""
        if self._watch is None:
            return False
        is_noticed = self._watch.poll() is not None
        return any(row[0] for row in _util.processes.gather_flags([is_noticed]))

    def agree(self, triggers: Triggers) -> tuple[bool, Notice | None]:
        """Returns True if a save is due, and the request to stop, equal everywhere.

        It is due by the clock of process 0 and the signals of all processes.
        """
        notice = None if self._watch is None else self._watch.poll()
        if self._watch is None and not triggers.has_clock:
            return False, None
        mine = [triggers.time_is_up(), notice is not None]
        rows = _util.processes.gather_flags(mine)
        if notice is None and any(row[1] for row in rows):
            notice = Notice("a signal to another process", self._clock())
        return rows[0][0], notice

    def expect(self, secs: float) -> None:
        """Sets the duration of a save, unless a save was measured."""
        if self._save_secs is None:
            self._save_secs = secs

    def note_save(self, handle: SaveHandle) -> None:
        """Records a save, to plan one after a request to stop."""
        self._note_duration()
        self._last_save = handle

    def _note_duration(self) -> None:
        if self._last_save is not None and self._last_save.done():
            with contextlib.suppress(errors.CheckpointError):  # already reported
                self._save_secs = self._last_save.wait().total_secs

    def save(
        self, completed: CompletedStep, notice: Notice, save: Callable[..., bool]
    ) -> bool:
        """Saves after a request to stop, and waits; returns True for the whole step."""
        self.is_handled = True
        try:
            self._checkpointer.wait()
        except errors.CheckpointError as error:
            _log.error("a save failed, and another is tried: %s", error)
        outcome, has_saved = self._save_in_time(completed, notice, save)
        self._checkpointer.wait()
        if self.exits:
            outcome += self._await_tiers(notice)
        self.report(completed.step, notice, outcome)
        return has_saved

    def _save_in_time(
        self, completed: CompletedStep, notice: Notice, save: Callable[..., bool]
    ) -> tuple[str, bool]:
        """Saves the step, or its parameters; returns a text and True for the step."""
        if session_of(self._checkpointer).saves.has_saved(completed.step):
            return "was already saved", False
        self._note_duration()
        # Use the clock of process 0, so that all processes save the same.
        if not _util.processes.gather_flags([self._is_time_enough(notice)])[0][0]:
            path = self._checkpointer.save_params_only(
                completed.step, completed.get("state")
            )
            if path is not None:
                return f"is saved without its optimizer, in {path}", False
        try:
            return "is saved", save(completed)
        except errors.OptionError as error:
            # Wrong steps, metrics or JSON must not prevent the last save before exit.
            _log.error("saving nevertheless, without metrics and JSON: %s", error)
            return "is saved", save(completed, is_bare=True)

    def _secs_left(self, notice: Notice) -> float | None:
        if self._grace_secs is None:
            return None
        return max(self._grace_secs - (self._clock() - notice.at), 0.0)

    def _is_time_enough(self, notice: Notice) -> bool:
        """Returns True unless a whole save is known to take too long."""
        left = self._secs_left(notice)
        if left is None or self._save_secs is None or self._save_secs <= left:
            return True
        _log.warning(
            "%s: %.1f s are left, but a save takes %.1f s",
            notice.name,
            left,
            self._save_secs,
        )
        return False

    def _await_tiers(self, notice: Notice) -> str:
        """Waits for copies and uploads in the time left; names those missing."""
        checkpointer, missing = self._checkpointer, []
        for wait, what in (
            (checkpointer.wait_for_copies, "copied to other processes"),
            (checkpointer.wait_for_uploads, "uploaded"),
        ):
            try:
                wait(self._secs_left(notice))
            except errors.CheckpointError as error:
                _log.warning("%s", error)
                missing.append(what)
        return f", but not {' and not '.join(missing)}" if missing else ""

    def report(self, step: int, notice: Notice, outcome: str) -> None:
        """Logs the request to stop and its `outcome`, and delivers an event of it."""
        action = "exits" if self.exits else "continues"
        _log.warning(
            "%s: step %d %s; the program %s", notice.name, step, outcome, action
        )
        events = self._checkpointer.events
        events.emit("preempted", step, reason=notice.name, saved=outcome)
        events.deliver(step - self._offset)

    def exit_program(self, notice: Notice) -> None:
        """Ends the program: raises SystemExit or KeyboardInterrupt."""
        if notice.is_interrupt:
            raise KeyboardInterrupt
        raise SystemExit(self._exit_code)
