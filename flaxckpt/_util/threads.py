"""Parallel work on plain threads.

Thread pools refuse work while Python exits, when a save may still be running. If no
thread can be started, the calling thread does all the work.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import contextvars
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from flaxckpt._util.pace import Pace

T = TypeVar("T")


_BACKGROUND = "is_background_of_flaxckpt"


def background(work: Callable[[], object], name: str) -> threading.Thread:
    """Returns a thread that may not wait for a save, and that an exit waits for."""
    thread = threading.Thread(target=work, name=name, daemon=False)
    setattr(thread, _BACKGROUND, True)
    return thread


def is_background() -> bool:
    """Returns True on a thread that must not wait for a save."""
    return getattr(threading.current_thread(), _BACKGROUND, False)


def each(
    function: Callable[[T], object],
    items: Iterable[T],
    *,
    threads: int,
    pace: Pace | None = None,
) -> None:
    """Calls `function` once for every item, on up to `threads` threads.

    The threads of a `pace` have low priority until it is lifted. Raises the first
    exception, once all running calls have ended; items not yet started are skipped.
    Raises MemoryError if a thread ended in the middle of a call and could not say why.
    """
    waiting = collections.deque(items)
    total = len(waiting)
    done: list[None] = []  # one for each call that has returned
    raised: list[BaseException] = []

    def work() -> None:
        try:
            while not raised:
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                function(item)
                done.append(None)
        except BaseException as error:
            raised.append(error)

    helpers = [] if pace is None else pace.start(work, min(threads, total))
    count = min(threads, len(waiting)) - 1  # the calling thread also works
    helpers += [helper for _ in range(count) if (helper := _start(work))]
    work()
    for helper in helpers:
        helper.join()
    _check_done(raised, is_done=len(done) == total)


@contextlib.contextmanager
def beside(function: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Runs `function` beside the `with` block, and waits for both.

    Yields a check that raises if `function` has failed. The block's error comes first.
    Raises MemoryError if the thread ended before `function` did.
    """
    raised: list[BaseException] = []
    done: list[None] = []

    def work() -> None:
        try:
            function()
            done.append(None)
        except BaseException as error:
            raised.append(error)

    helper = _start(work)
    try:
        yield lambda: _check_done(raised, is_done=True)
    finally:
        if helper is not None:
            helper.join()
    if helper is None:
        work()
    _check_done(raised, is_done=bool(done))


def _check_done(raised: Sequence[BaseException], *, is_done: bool) -> None:
    """Raises what threads have raised, or MemoryError for work that is not done.

    Without memory, Python ends a thread before its work, or before it has told why.
    """
    if raised:
        raise raised[0]
    if not is_done:
        raise MemoryError("there was no memory for a thread to do its work")


def _start(work: Callable[[], None]) -> threading.Thread | None:
    run = contextvars.copy_context().run  # for what holds in the caller's block
    thread = threading.Thread(target=run, args=(work,), name="flaxckpt", daemon=False)
    try:
        thread.start()
    except RuntimeError:  # Python is exiting, or the system has no more threads
        return None
    return thread


class Latch:
    """A flag that is set once, and waited for; for waits that a signal may interrupt.

    An exception of a signal handler can leave a lock of `threading.Event` held for
    ever. Here, `set` takes no lock.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # released by another call
            self._lock.release()

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Waits for the flag, up to a time; returns whether it is set."""
        until = math.inf if timeout_secs is None else time.monotonic() + timeout_secs
        while not self._is_set and (left := until - time.monotonic()) > 0:
            # One that was interrupted may have kept the lock: look at the flag, too.
            if self._lock.acquire(timeout=min(left, _LOOK_SECS)):
                self.set()  # for the next that waits
        return self._is_set


def wait_for(
    latch: Latch, thread: threading.Thread, timeout_secs: float | None = None
) -> bool:
    """Waits for a thread's latch; returns False if the time or the thread ends first.

    Python ends a thread so if there is no memory to begin its work.
    """
    until = math.inf if timeout_secs is None else time.monotonic() + timeout_secs
    while not latch.wait(max(0.0, min(_LOOK_SECS, until - time.monotonic()))):
        if _has_ended(thread):
            return latch.is_set()  # perhaps just before its end
        if time.monotonic() >= until:
            return True
    return True


def _has_ended(thread: threading.Thread) -> bool:
    if thread.ident is None:
        return False  # it is about to start
    # Ctrl-C in Thread.join may mark a running thread as ended.
    return not thread.is_alive() and thread.ident not in sys._current_frames()


_LOOK_SECS = 1.0
"""Seconds between two looks at a thread that is waited for."""


class Heartbeat:
    """Calls a function again and again, on a thread that does not hold up an exit.

    Exit handlers of modules that import this one run before the calls end. The function
    handles its errors, and ends the calls with False; `secs` pass before each call.
    `end` is called after the last call, and handles its errors, too.
    Raises RuntimeError if the system has no more threads.
    """

    def __init__(
        self,
        beat: Callable[[], object],
        secs: float,
        name: str,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        self._beat, self._secs, self._end = beat, secs, end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _beating.add(self)
        try:
            while not self._stopped.wait(self._secs):
                if self._beat() is False:
                    break
            self._end()
        finally:
            _beating.discard(self)

    def is_stopped(self) -> bool:
        """Returns True if the call under way should end soon."""
        return self._stopped.is_set()

    def stop(self, timeout_secs: float | None = None) -> None:
        """Ends the calls, and waits for the one under way."""
        self._stopped.set()
        self._thread.join(timeout_secs)


_beating: set[Heartbeat] = set()
"""Heartbeats that have not ended."""

os.register_at_fork(after_in_child=_beating.clear)  # a fork has no other threads

_SECS_AT_EXIT = 5.0
"""Seconds for which an exit waits for a call under way."""


@atexit.register
def _stop_all() -> None:
    # Python ends daemon threads by unwinding them, which aborts inside C++ libraries.
    deadline = time.monotonic() + _SECS_AT_EXIT
    for heartbeat in list(_beating):
        heartbeat.stop(max(0.0, deadline - time.monotonic()))


class Budget:
    """A limit on the bytes held at the same time by all threads."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        # Enter the lock itself: Ctrl-C in Condition.__enter__ may leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Waits for `size` free bytes and holds them during the `with` block.

        A size above the whole budget waits until nothing else is held.
        """
        size = min(size, self._total)
        with self._lock:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._lock:
                self._free += size
                self._changed.notify_all()
