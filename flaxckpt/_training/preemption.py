"""Preemption: agreement of all processes on a stop, and the exit of the program."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from flaxckpt import _run, _util, errors
from flaxckpt._training.signals import Notice, Watch
from flaxckpt._training.triggers import Triggers

_log = logging.getLogger(__name__)


class Stopping:
    """Watches for requests to stop the program.

    Args:
        watches: Whether to watch signals and jax's preemption service.
        exit_code: Exit code of the program; None to continue running.
        clock: Seconds.

    Attributes:
        is_heeded: Whether the request to stop has been handled.
    """

    def __init__(
        self, *, watches: bool, exit_code: int | None, clock: Callable[[], float]
    ) -> None:
        self.is_heeded = False
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
    def leaves(self) -> bool:
        """True if the program exits after a request to stop."""
        return self._exit_code is not None

    def begin(self) -> None:
        """Starts watching for signals."""
        if self._watch is not None and self._watch.begin():
            self.is_heeded = False

    def end(self) -> None:
        """Stops watching, and restores the signal handlers."""
        if self._watch is not None:
            self._watch.end()

    def is_told(self) -> bool:
        """Returns True if any process must stop; all processes must call."""
        if self._watch is None:
            return False
        told = self._watch.poll() is not None
        return any(row[0] for row in _util.processes.gather_flags([told]))

    def agreed(self, triggers: Triggers) -> tuple[bool, Notice | None]:
        """Returns True if `every_secs` passed, and the request to stop or None.

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

    def tell(
        self,
        events: _run.events.stream.Stream,
        step: int,
        notice: Notice,
        what: str,
        *,
        at: int,
    ) -> None:
        """Reports the outcome of the last step.

        Args:
            events: Event stream of the checkpointer.
            step: The last step.
            notice: The request to stop.
            what: The outcome.
            at: The step in the count of the loop.
        """
        goes = "exits" if self.leaves else "continues"
        _log.warning("%s: step %d %s; the program %s", notice.name, step, what, goes)
        events.emit("preempted", step, reason=notice.name, saved=what)
        events.deliver(at)

    def leave(self, notice: Notice) -> None:
        """Ends the program.

        Raises:
            SystemExit, KeyboardInterrupt: Always.
        """
        if notice.is_interrupt:
            raise KeyboardInterrupt
        raise SystemExit(self._exit_code)
