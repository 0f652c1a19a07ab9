"""How a program is told to stop, on all processes alike, and how it leaves."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from flaxckpt import _run, _util, errors
from flaxckpt._training.signals import Notice, Watch
from flaxckpt._training.triggers import Triggers

_log = logging.getLogger(__name__)


class Stopping:
    """Watches for what tells the program to stop, if it is to.

    Args:
        watches: Whether signals, and jax's preemption service, are watched for.
        exit_code: What the program leaves with; None if it does not leave.
        clock: Seconds.

    Attributes:
        is_heeded: Whether what was told has been done.
    """

    def __init__(
        self, *, watches: bool, exit_code: int | None, clock: Callable[[], float]
    ) -> None:
        self.is_heeded = False
        self._watch = Watch(clock) if watches else None
        if exit_code is not None and (
            _util.arguments.whole("exit_code", exit_code) not in range(256)
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
        """What has told the program to stop, as far as this process knows."""
        return None if self._watch is None else self._watch.notice

    @property
    def leaves(self) -> bool:
        """Whether the program leaves when it is told to stop."""
        return self._exit_code is not None

    def begin(self) -> None:
        """Watches from here on."""
        if self._watch is not None and self._watch.begin():
            self.is_heeded = False

    def end(self) -> None:
        """Watches no more: signals are put back."""
        if self._watch is not None:
            self._watch.end()

    def is_told(self) -> bool:
        """Whether any process was told to stop; all of them call this."""
        if self._watch is None:
            return False
        told = self._watch.poll() is not None
        return any(row[0] for row in _util.processes.gather_flags([told]))

    def agreed(self, triggers: Triggers) -> tuple[bool, Notice | None]:
        """Whether the time is up, and what tells to stop, the same on all processes.

        The first process's clock counts, and everybody's signals.
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
        """Says what has become of the last step.

        Args:
            events: Of the checkpointer.
            step: It.
            notice: What has told to stop.
            what: What has become of it.
            at: The step as the loop counts.
        """
        goes = "leaves" if self.leaves else "goes on"
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
