"""Signals that ask a program to end: noted here, instead of ending it at once."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from flaxckpt import _multihost, errors

_log = logging.getLogger(__name__)

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGINT")
    if hasattr(signal, name)
)
"""SIGTERM: clusters that take a machine away. SIGUSR1: Slurm, some time before it does.
SIGINT: Ctrl-C."""

_INTERRUPTED = b"\nflaxckpt: saving, then stopping; Ctrl-C again stops at once\n"


class Notice(NamedTuple):
    """That the program shall end.

    Attributes:
        name: The signal, or what else has told so.
        at: When, on the watch's clock.
    """

    name: str
    at: float

    @property
    def is_interrupt(self) -> bool:
        """Whether a person has pressed Ctrl-C."""
        return self.name == "SIGINT"


class Watch:
    """Notes the first signal that comes.

    What had handled the signal before is called, too, if it was the program's own. A
    second Ctrl-C ends the program at once; other signals may come again and again, as
    some launchers send them to each process and to all together.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.notice: Notice | None = None
        self._clock = clock
        self._previous: dict[int, Any] = {}
        self._active = False

    def begin(self) -> None:
        """Takes the signals over; once is enough.

        Left alone are those that the program ignores, and those that are handled
        outside of Python, as jax's preemption service does. Only the main thread can
        do this; elsewhere nothing is taken over.
        """
        if self._active:
            return
        self._active = True
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "signals are not watched: CheckpointCallback was first called outside"
                " of the main thread; call restore_or_init there, or pass"
                " on_preemption=False"
            )
            return
        is_jaxs = _multihost.has_preemption_service()
        for number in SIGNALS:
            if number == signal.SIGTERM and is_jaxs:
                continue  # its handler is not Python's, and would be lost
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._previous[number] = signal.signal(number, self._note)

    def end(self) -> None:
        """Puts back what had handled the signals before."""
        self._active = False
        for number in list(self._previous):
            # Whoever came after us may still call us: then we only pass on.
            if signal.getsignal(number) == self._note:
                # Elsewhere than in the main thread, too, we can only pass on.
                with contextlib.suppress(ValueError):
                    signal.signal(number, self._before(number))
                    del self._previous[number]

    def poll(self, step: int) -> Notice | None:
        """The notice, if there is one; asks jax's preemption service as well.

        Args:
            step: Completed steps, the same on all processes.
        """
        if self.notice is None and _multihost.reached_preemption(step):
            self.notice = Notice("jax's preemption sync point", self._clock())
        return self.notice

    def _before(self, number: int) -> Any:
        """What had handled a signal before us, and before watches that have ended."""
        previous = self._previous.get(number, signal.SIG_DFL)
        owner = getattr(previous, "__self__", None)
        if isinstance(owner, Watch) and not owner._active:
            return owner._before(number)
        return previous

    def _note(self, number: int, frame: FrameType | None) -> None:
        previous = self._before(number)
        if not self._active:
            _pass_on(number, previous, frame)
            return
        is_interrupt = number == signal.SIGINT
        if is_interrupt and self.notice is not None:
            self.end()
            raise KeyboardInterrupt
        if is_interrupt:
            os.write(2, _INTERRUPTED)  # print may be busy in the code we interrupt
        if self.notice is None:
            self.notice = Notice(signal.Signals(number).name, self._clock())
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


def _pass_on(number: int, previous: Any, frame: FrameType | None) -> None:
    if callable(previous):
        previous(number, frame)
    elif previous is signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class Grace:
    """Whether there is time to save everything before the program is killed.

    Args:
        secs: How long it lives after a notice; None if that is not known.
        clock: Seconds, the one of the notices.

    Attributes:
        save_secs: How long a save takes; None as long as there was none.
    """

    def __init__(self, secs: float | None, clock: Callable[[], float]) -> None:
        if secs is not None and not secs > 0:
            raise errors.OptionError(f"grace_secs must be positive, got {secs}")
        self.save_secs: float | None = None
        self._secs = secs
        self._clock = clock

    def is_enough(self, notice: Notice) -> bool:
        """Whether a save like the last one would end in time, as far as is known."""
        if self._secs is None or self.save_secs is None:
            return True
        left = self._secs - (self._clock() - notice.at)
        if self.save_secs > left:
            _log.warning(
                "%s: %.1f s are left, and the last save took %.1f s",
                notice.name,
                max(left, 0.0),
                self.save_secs,
            )
        return self.save_secs <= left
