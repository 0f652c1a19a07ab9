"""Threads of low priority, for work that nobody waits for yet."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

_NICE = 10
"""Added to the nice value of the threads, which get a tenth of a core that is busy.

Not more: while such a thread holds the lock of the interpreter and waits for a core, no
Python thread runs.
"""

_CHECK_SECS = 1.0


class Pace:
    """Runs work at low priority until someone waits for it; thread-safe.

    Where threads have no priority of their own, all have the same.
    """

    def __init__(self) -> None:
        # Enter the lock itself: Ctrl-C in Condition.__enter__ may leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_lifted = False

    def lift(self) -> None:
        """Ends the low priority: someone waits for the work."""
        with self._lock:
            self._is_lifted = True
            self._changed.notify_all()

    def is_lifted(self) -> bool:
        return self._is_lifted

    def start(self, work: Callable[[], None], threads: int) -> list[threading.Thread]:
        """Calls `work` on new threads of low priority, unless lifted, and returns them.

        `work` does a share of the work, and raises no errors. Returns when all calls
        have ended, or earlier if someone waits: a thread cannot raise its priority
        again, so the caller then shares the work with them.
        """
        running: set[threading.Thread] = set()

        def run() -> None:
            try:
                _lower_priority()
                work()
            finally:
                with self._lock:
                    running.discard(threading.current_thread())
                    self._changed.notify_all()

        started: list[threading.Thread] = []
        with self._lock:
            while len(started) < threads and not self._is_lifted:
                thread = threading.Thread(target=run, name="flaxckpt", daemon=False)
                try:
                    thread.start()
                except RuntimeError:  # Python is exiting, or there are no more threads
                    break
                started.append(thread)
                running.add(thread)
            while (
                running and not self._is_lifted and threading.main_thread().is_alive()
            ):
                self._changed.wait(_CHECK_SECS)
                # One may have ended before its work, without memory.
                running -= {thread for thread in started if not thread.is_alive()}
        return started


def _lower_priority() -> None:
    """Lowers the priority of this thread for the rest of its life."""
    if sys.platform == "linux":  # elsewhere, this is the priority of the process
        os.nice(_NICE)
