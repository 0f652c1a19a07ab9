"""Signals that ask a program to end: noted here, instead of ending it at once."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from flaxckpt import _util

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

    Attributes:
        notice: The first signal; None as long as there was none.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.notice: Notice | None = None
        self._clock = clock
        self._polls = 0
        self._program: _Program | None = None

    def begin(self) -> bool:
        """Watches, from now on anew; nothing changes if it does already.

        Left alone are signals that the program ignores, and SIGTERM where jax's
        preemption service has taken it over.

        Returns:
            Whether it did not watch before.
        """
        self._program = _running_program()
        if self in _watches:
            return False
        self.notice = None
        _watches.append(self)
        _install()
        return True

    def end(self) -> None:
        """Watches no more. The last one puts back what had handled the signals."""
        if self in _watches:
            _watches.remove(self)
        if not _watches:
            _uninstall()

    def note(self, name: str) -> None:
        """Notes that the program shall end, unless that is known."""
        if self.notice is None:
            self.notice = Notice(name, self._clock())

    def poll(self) -> Notice | None:
        """The notice, if there is one; asks jax's preemption service as well.

        Where several processes run, all of them poll equally often.
        """
        self._polls += 1
        self._program = _running_program()
        if self.notice is None and _util.processes.reached_preemption(self._polls):
            self.note("jax's preemption sync point")
        return self.notice

    def is_over(self, frame: FrameType | None) -> bool:
        """Whether nobody will poll any more.

        That is so where a cell of a notebook, or an input to Python's prompt, polled
        last, and has ended: its loop is over, though the callback was not closed.

        Args:
            frame: What the main thread is doing.
        """
        if self._program is None:
            return False
        while frame is not None:
            if id(frame) == self._program.frame and frame.f_code is self._program.code:
                return False
            frame = frame.f_back
        return True


class _Program(NamedTuple):
    """A script, a cell of a notebook or an input to Python's prompt, while it runs.

    Attributes:
        frame: The `id` of its frame: the frame itself would keep its variables.
        code: What runs there; another cell has another one.
    """

    frame: int
    code: CodeType


def _running_program() -> _Program | None:
    """The program part that runs now; None if unknown, as in other threads."""
    if threading.current_thread() is not threading.main_thread():
        return None
    names = vars(sys.modules["__main__"])
    found = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is names:
            found = _Program(id(frame), frame.f_code)  # the outermost in the end
        frame = frame.f_back
    return found


# ---- one handler for all watches ----------------------------------------------------

_watches: list[Watch] = []
_previous: dict[int, Any] = {}
"""What had handled each signal that is taken over."""
_handling = threading.local()


def _install() -> None:
    if threading.current_thread() is not threading.main_thread():
        if not _previous:
            _log.warning(
                "signals are not watched, which only the main thread can do: call"
                " restore_or_init there, or pass on_preemption=False"
            )
        return
    is_jaxs = _util.processes.has_preemption_service()
    for number in SIGNALS:
        if number == signal.SIGTERM and is_jaxs:
            continue  # its handler is not Python's, and would be lost
        current = signal.getsignal(number)
        if current not in (None, signal.SIG_IGN, _handle):
            _previous[number] = signal.signal(number, _handle)


def _uninstall() -> None:
    for number in tuple(_previous):
        # Whoever came after us may still call us: then we only pass on. And so do we
        # where this is not the main thread.
        if signal.getsignal(number) is _handle:
            with contextlib.suppress(ValueError):
                signal.signal(number, _previous[number])
                del _previous[number]


def _handle(number: int, frame: FrameType | None) -> None:
    if getattr(_handling, "is_on", False):
        return  # a handler that we call calls us
    _handling.is_on = True
    try:
        _note(number, frame)
    finally:
        _handling.is_on = False


def _note(number: int, frame: FrameType | None) -> None:
    previous = _previous.get(number, signal.SIG_DFL)
    watches = [watch for watch in _watches if not watch.is_over(frame)]
    if not watches:
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return
    if number == signal.SIGINT:
        if all(watch.notice is not None for watch in watches):
            _watches.clear()
            _uninstall()
            raise KeyboardInterrupt
        os.write(2, _INTERRUPTED)  # print may be busy in the code we interrupt
    for watch in watches:
        watch.note(signal.Signals(number).name)
    if callable(previous) and previous is not signal.default_int_handler:
        previous(number, frame)


def _forget() -> None:
    """A child that was forked does not train: it ends as its parent would have."""
    _watches.clear()
    _uninstall()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# ---- time ---------------------------------------------------------------------------


class Grace:
    """Whether there is time to save everything before the program is killed.

    Args:
        secs: How long it lives after a notice; None if that is not known.
        clock: Seconds, the one of the notices.

    Attributes:
        save_secs: How long a save takes; None if that is not known.
    """

    def __init__(self, secs: float | None, clock: Callable[[], float]) -> None:
        if secs is not None:
            _util.arguments.positive("grace_secs", secs)
        self.save_secs: float | None = None
        self._secs = secs
        self._clock = clock

    def is_enough(self, notice: Notice) -> bool:
        """Whether a whole save would end in time, as far as is known."""
        if self._secs is None or self.save_secs is None:
            return True
        left = self._secs - (self._clock() - notice.at)
        if self.save_secs > left:
            _log.warning(
                "%s: %.1f s are left, and a save takes %.1f s",
                notice.name,
                max(left, 0.0),
                self.save_secs,
            )
        return self.save_secs <= left
