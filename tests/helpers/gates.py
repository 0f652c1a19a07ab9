"""Holds up a save at a chosen place, until somebody waits for it."""

import threading
import time

from tests.helpers import seams

# Places in a save, by time. A "chunk" is a file with values.
PLACES = {
    "metadata": "commit.write_files",
    "chunk": "chunk_file.write",
    "sync": "disk.sync_tree",
    "rename": "rename.publish",
}


class Gate:
    """Holds up every call of a function while nobody waits for the save.

    Attributes:
        handle: The handle of the save; without, nothing is held up.
        reached: Set when a call is held up.
        calls: The calls that were made.
    """

    def __init__(self, monkeypatch, place):
        self.handle = None
        self.reached = threading.Event()
        self.calls = 0
        self._real = seams.current(PLACES[place])
        self._begins = threading.Event()
        seams.replace(monkeypatch, PLACES[place], self._call)

    def hold(self, begin):
        """Begins a save by `begin()` and returns when it is held up."""
        self.reached.clear()
        self._begins.clear()
        self.handle = True
        self.handle = begin()
        self._begins.set()
        assert self.reached.wait(60)
        return self.handle

    def _call(self, *args, **options):
        if self.handle is not None:
            self.reached.set()
            assert self._begins.wait(60)
            while not self.handle.is_awaited():
                time.sleep(0.001)
        self.calls += 1
        return self._real(*args, **options)
