"""Handlers that record termination signals instead of ending the program."""

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
"""SIGTERM: a cluster takes the machine away. SIGUSR1: Slurm's early warning. SIGINT:
Ctrl-C."""

_INTERRUPTED = b"\nflaxckpt: saving, then stopping; Ctrl-C again stops at once\n"


class Notice(NamedTuple):
    """A request to end the program, by a signal or another source, and its time."""

    name: str
    at: float

    @property
    def is_interrupt(self) -> bool:
        """True for a request by Ctrl-C."""
        return self.name == "SIGINT"


class Watch:
    """Records the first termination signal as its `notice`.

    Also calls the program's own handler. A second Ctrl-C ends the program at once;
    other signals may repeat, as some launchers send them to each process and to the
    group.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.notice: Notice | None = None
        self._clock = clock
        self._polls = 0
        self._program: _Program | None = None

    def begin(self) -> bool:
        """Starts watching; returns True unless already watching.

        Leaves ignored signals alone, and SIGTERM if jax's preemption service has it.
        """
        self._program = _running_program()
        if self in _watches:
            return False
        self.notice = None
        _watches.append(self)
        _install()
        return True

    def end(self) -> None:
        """Stops watching. The last watch restores the previous signal handlers."""
        if self in _watches:
            _watches.remove(self)
        if not _watches:
            _uninstall()

    def note(self, name: str) -> None:
        """Records a request to end the program, unless there already was a request."""
        if self.notice is None:
            self.notice = Notice(name, self._clock())

    def poll(self) -> Notice | None:
        """Returns the notice, or None; all processes must poll equally often."""
        self._polls += 1
        self._program = _running_program()
        if self.notice is None and _util.processes.reached_preemption(self._polls):
            self.note("jax's preemption sync point")
        return self.notice

    def is_over(self, frame: FrameType | None) -> bool:
        """Returns True if the cell or prompt with the last poll has ended."""
        if self._program is None:
            return False
        while frame is not None:
            if id(frame) == self._program.frame and frame.f_code is self._program.code:
                return False
            frame = frame.f_back
        return True


class _Program(NamedTuple):
    """A running script, cell or prompt, without a reference to its variables."""

    frame: int
    code: CodeType


def _running_program() -> _Program | None:
    """Returns the running script or cell; None if unknown, as in other threads."""
    if threading.current_thread() is not threading.main_thread():
        return None
    names = vars(sys.modules["__main__"])
    program = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is names:
            program = _Program(id(frame), frame.f_code)  # the outermost in the end
        frame = frame.f_back
    return program


# ---- one handler for all watches ----------------------------------------------------

_watches: list[Watch] = []
_previous: dict[int, Any] = {}
"""Signal number -> the previous handler."""
_handling = threading.local()


def _install() -> None:
    if threading.current_thread() is not threading.main_thread():
        if not _previous:
            _log.warning(
                "signals are not watched, because only the main thread can watch them:"
                " call restore_or_init there, or pass on_preemption=False"
            )
        return
    is_jaxs = _util.processes.has_preemption_service()
    for number in SIGNALS:
        if number == signal.SIGTERM and is_jaxs:
            continue  # jax's handler is not a Python handler, and would be lost
        current = signal.getsignal(number)
        if current not in (None, signal.SIG_IGN, _handle):
            _previous[number] = signal.signal(number, _handle)


def _uninstall() -> None:
    for number in tuple(_previous):
        # Our handler stays if a later handler may call it, and outside of the main
        # thread; it then only calls the previous handler.
        if signal.getsignal(number) is _handle:
            with contextlib.suppress(ValueError):
                signal.signal(number, _previous[number])
                del _previous[number]


def _handle(number: int, frame: FrameType | None) -> None:
    if getattr(_handling, "is_on", False):
        return  # the previous handler calls this handler
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
    """Restores the previous handlers in a forked child, which does not train."""
    _watches.clear()
    _uninstall()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
