"""Preemption: agreement of all processes on a stop, and the exit of the program."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from flaxckpt import _util, errors
from flaxckpt._training.signals import Notice, Watch
from flaxckpt._training.triggers import Triggers


class Preemption:
    """Watches for requests to stop the program.

    If `watches`, they are signals and those of jax's preemption service. With the
    `exit_code` None, the program continues to run. `is_handled` is True once the
    request has been handled.
    """

    def __init__(
        self, *, watches: bool, exit_code: int | None, clock: Callable[[], float]
    ) -> None:
        self.is_handled = False
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
        """Starts watching for signals."""
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
        """Returns True if it is time for a save, and the request to stop or None.

        All processes get the same result, from the clock of process 0 and the signals
        of all processes.
        """
        notice = None if self._watch is None else self._watch.poll()
        if self._watch is None and not triggers.has_clock:
            return False, None
        mine = [triggers.time_is_up(), notice is not None]
        rows = _util.processes.gather_flags(mine)
        if notice is None and any(row[1] for row in rows):
            notice = Notice("a signal to another process", self._clock())
        return rows[0][0], notice

    def exit_program(self, notice: Notice) -> None:
        """Ends the program: raises SystemExit or KeyboardInterrupt."""
        if notice.is_interrupt:
            raise KeyboardInterrupt
        raise SystemExit(self._exit_code)
