"""A store in memory whose writes fail, come late, twice, torn or without an answer."""

import contextlib
import random
import threading

from flaxckpt import _storage
from flaxckpt._storage import locks as storage_locks
from flaxckpt._storage import paths as storage_paths
from flaxckpt._storage import store_settings as storage_store_settings
from flaxckpt._storage.client import StoreOptions

FAULTS = ("refused", "unanswered", "late", "twice", "torn")


class Faulty:
    """Stands in for the `ts.KvStore` of a store.

    Args:
        real: The store itself.
        seed: Of the faults.
        rate: How many of 100 writes are faulty.
        last: The request from which on nothing is answered any more; None: all are.
    """

    def __init__(self, real, *, seed=0, rate=0, last=None):
        self.requests = 0
        self._real = real
        self._random = random.Random(seed)
        self._rate = rate
        self._last = last
        self._late = []
        self._lock = threading.Lock()

    def _arrive(self):
        """Counts a request, and lets in what is late."""
        with self._lock:
            self.requests += 1
            if self._last is not None and self.requests > self._last:
                raise ValueError("PERMISSION_DENIED: the network is gone")
            while self._late and self._random.randrange(6) == 0:
                self._write(*self._late.pop(0))

    def _write(self, key, value, if_equal):
        return self._real.write(key, value, if_equal=if_equal)

    def let_in(self):
        """Lets in all that is late."""
        for given in self._late:
            self._write(*given).result()
        self._late.clear()

    def read(self, key, byte_range=None):
        self._arrive()
        return self._real.read(key, byte_range=byte_range)

    def list(self, *given):
        self._arrive()
        return self._real.list(*given)

    def write(self, key, value, if_equal=None):
        self._arrive()
        with self._lock:
            # What overwrites without a condition must not come late: see the docs.
            is_safe = if_equal is not None and value is not None
            if not is_safe or self._random.randrange(100) >= self._rate:
                return self._write(key, value, if_equal)
            fault = self._random.choice(FAULTS)
            if fault == "torn" and key.endswith(storage_locks.LOCK):
                fault = "refused"  # half a lock is nobody's, and is watched for long
            if fault == "unanswered":
                self._write(key, value, if_equal).result()
            elif fault == "late":
                self._late.append((key, value, if_equal))
            elif fault == "torn":
                self._write(key, value[: len(value) // 2], if_equal).result()
            elif fault == "twice":
                self._late.append((key, value, if_equal))
                return self._write(key, value, if_equal)
            raise ValueError(f"UNAVAILABLE: {fault}")


@contextlib.contextmanager
def faulty(path, **given):
    """Has the store of a path be faulty while the `with` block lasts."""
    connection = path.store.connection
    real = connection.kv()
    kv = connection._opened = Faulty(real, **given)
    try:
        yield kv
    finally:
        connection._opened = real
        kv._last = None
        kv.let_in()


def new_path(name):
    """A bucket of its own in memory, whose requests are repeated at once."""
    url = f"memory://{name}"
    storage_store_settings.set_store_options(url, StoreOptions(retries=6))
    path = _storage.paths.resolve(f"{url}/run")
    assert storage_paths.is_remote(path)
    path.store.delete_under("")
    return path
