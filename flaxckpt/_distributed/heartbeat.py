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

_log = logging.getLogger(__name__)

SILENT_SECS = 60.0
"""Seconds without a heartbeat after which a process counts as dead. Less than the 100 s
after which jax ends the remaining processes, so that our error comes first."""

_BEATS = 6
"""Number of heartbeats in `SILENT_SECS`."""

_KEY = "flaxckpt/beat"


class Heartbeats:
    """Sends the heartbeats of this process, and monitors other processes.

    Process 0 monitors all processes; other processes monitor process 0.

    Args:
        store: Key-value store for the heartbeats.
        index: Index of this process.
        poll: Called each second until it reports that no operation is in progress.
    """

    def __init__(
        self, store: key_value.KeyValueStore, index: int, poll: Callable[[], bool]
    ) -> None:
        self._store = store
        self._index = index
        self._poll = poll
        self._heard: dict[int, tuple[str, float]] = {}
        self._listened = 0.0
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._lock = threading.Lock()

    def has_heard(self, process: int) -> bool:
        """Returns True if a process has sent a heartbeat."""
        return process in self._heard

    def silent_secs(self, process: int) -> float:
        """Returns the seconds since the last heartbeat of a process; 0 without any."""
        # Count from the last look at heartbeats: this process may have been suspended.
        heard = self._heard.get(process)
        return 0.0 if heard is None else self._listened - heard[1]

    def resume(self) -> None:
        """Starts heartbeats, and calls `poll` again."""
        self._wake.set()
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._run, name="flaxckpt beat", daemon=True
            )
        with contextlib.suppress(RuntimeError):  # no thread: losses go unnoticed
            self._thread.start()

    def _run(self) -> None:
        every = SILENT_SECS / _BEATS
        number, due = 0, 0.0
        while True:
            try:
                if time.monotonic() >= due:
                    number, due = number + 1, time.monotonic() + every
                    self._store.set(f"{_KEY}/{self._index}", str(number))
                    self._listen()
                is_busy = self._poll()
            except ConnectionError as error:
                _log.debug("heartbeats have ended: %s", error)
                return
            except OSError as error:  # a file system may fail for a moment
                _log.debug("a heartbeat was skipped: %s", error)
                is_busy = True
            # Without an operation in progress, only heartbeats are sent.
            self._wake.wait(max(0.0, due - time.monotonic()))
            if is_busy:
                time.sleep(min(1.0, every))
            else:
                self._wake.clear()

    def _listen(self) -> None:
        beats = {}
        if self._index == 0:
            beats = self._store.list(_KEY)
        else:
            with contextlib.suppress(TimeoutError):
                beats["0"] = self._store.get(f"{_KEY}/0", 0.001)
        self._listened = time.monotonic()
        for process, beat in beats.items():
            heard = self._heard.get(int(process))
            if heard is None or heard[0] != beat:
                self._heard[int(process)] = beat, self._listened
