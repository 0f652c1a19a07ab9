"""How far a long operation is, in bytes."""

from __future__ import annotations

import threading


class Counter:
    """Bytes of an operation; any thread may add to them.

    Attributes:
        total: All of them; 0 as long as that is not known.
        done: Those that are through.
    """

    def __init__(self) -> None:
        self.total = 0
        self.done = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """Counts `size` bytes as done."""
        with self._lock:
            self.done += size
