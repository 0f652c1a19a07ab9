"""Heartbeats of the processes of a job.

Each process sends heartbeats on a separate thread, from the time a run is opened or
the first joint operation begins.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from flaxckpt._distributed import key_value
from flaxckpt._util import threads

_log = logging.getLogger(__name__)

SILENT_SECS = 60.0
"""Seconds without a heartbeat after which a process counts as dead. Less than the 100 s
after which jax ends the remaining processes, so that our error comes first."""

_BEATS = 6
"""Number of heartbeats in `SILENT_SECS`."""

_KEY = "flaxckpt/beat"


class Heartbeats:
    """Sends the heartbeats of this process, and monitors other processes.

    Process 0 monitors all processes; other processes monitor process 0. `poll` is
    called each second; it returns at once if no operation is in progress.
    """

    def __init__(
        self, store: key_value.KeyValueStore, index: int, poll: Callable[[], object]
    ) -> None:
        self._store = store
        self._index = index
        self._poll = poll
        self._heard: dict[int, tuple[str, float]] = {}
        self._listened = 0.0
        self._number, self._due = 0, 0.0
        self._has_started = False
        self._lock = threading.Lock()

    def has_heard(self, process: int) -> bool:
        return process in self._heard

    def silent_secs(self, process: int) -> float:
        """Returns the seconds since the last heartbeat of a process; 0 without any."""
        # Count from the last look at heartbeats: this process may have been suspended.
        heard = self._heard.get(process)
        return 0.0 if heard is None else self._listened - heard[1]

    def start(self) -> None:
        """Sends the first heartbeat, and begins the others; later calls do nothing."""
        with self._lock:
            if self._has_started:
                return
            self._has_started = True
        if not self._beat():
            return
        with contextlib.suppress(RuntimeError):  # no thread: losses go unnoticed
            secs = min(1.0, SILENT_SECS / _BEATS)
            threads.Heartbeat(self._beat, secs, "flaxckpt beat")

    def _beat(self) -> bool:
        """Sends a heartbeat if one is due, and polls; returns False as the job ends."""
        try:
            if time.monotonic() >= self._due:
                self._number += 1
                self._due = time.monotonic() + SILENT_SECS / _BEATS
                self._store.set(f"{_KEY}/{self._index}", str(self._number))
                self._listen()
            self._poll()
        except ConnectionError as error:
            _log.debug("heartbeats have ended: %s", error)
            return False
        except OSError as error:  # a file system may fail for a moment
            _log.debug("a heartbeat was skipped: %s", error)
        return True

    def _listen(self) -> None:
        beats = {}
        if self._index == 0:
            beats = self._store.list(_KEY)
        else:
            with contextlib.suppress(TimeoutError):
                beats["0"] = self._store.get(f"{_KEY}/0", 0)
        self._listened = time.monotonic()
        for process, beat in beats.items():
            heard = self._heard.get(int(process))
            if heard is None or heard[0] != beat:
                self._heard[int(process)] = beat, self._listened
