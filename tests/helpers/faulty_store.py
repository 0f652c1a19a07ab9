"""A store in memory whose writes fail, arrive late, twice, torn or unanswered."""

import contextlib
import random
import threading

import flaxckpt
from tests.helpers import run_files

FAULTS = ("refused", "unanswered", "late", "twice", "torn")


class Faulty:
    """Replaces the `ts.KvStore` of a store.

    Args:
        real: The real store.
        seed: The seed of the faults.
        rate: The percentage of faulty writes.
        last: The last answered request; None to answer all.

    Attributes:
        after: Name of an object -> a function to call once, after a write of it.
    """

    def __init__(self, real, *, seed=0, rate=0, last=None):
        self.requests = self.faults = 0
        self._real = real
        self._random = random.Random(seed)
        self._rate = rate
        self._last = last
        self._late = []
        self._lock = threading.RLock()
        self.after = {}

    def _arrive(self):
        """Counts a request, and delivers some late writes."""
        with self._lock:
            self.requests += 1
            if self._last is not None and self.requests > self._last:
                raise ValueError("PERMISSION_DENIED: the network is gone")
            while self._late and self._random.randrange(6) == 0:
                self._write(*self._late.pop(0))

    def _write(self, key, value, if_equal):
        written = self._real.write(key, value, if_equal=if_equal)
        if act := self.after.pop(key.rpartition("/")[2], None):
            written.result()
            act()
        return written

    def deliver(self):
        """Delivers all late writes."""
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
            # Unconditional overwrites must not arrive late: see the docs.
            is_safe = if_equal is not None and value is not None
            if not is_safe or self._random.randrange(100) >= self._rate:
                return self._write(key, value, if_equal)
            self.faults += 1
            fault = self._random.choice(FAULTS)
            if fault == "torn" and key.endswith(run_files.LOCK):
                fault = "refused"  # half a lock has no owner, and delays everybody
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
    """The store of a path is faulty in the block."""
    connection = path.store.connection
    real = connection.kv()
    kv = connection._opened = Faulty(real, **given)
    try:
        yield kv
    finally:
        connection._opened = real
        kv._last = None
        kv.deliver()


def new_path(name, retries=6):
    """Returns a path in a new bucket in memory, with immediate retries."""
    url = f"memory://{name}"
    flaxckpt.set_store_options(url, flaxckpt.StoreOptions(retries=retries))
    path = flaxckpt.Checkpointer(f"{url}/run", read_only=True).directory
    path.store.delete_under("")
    return path
