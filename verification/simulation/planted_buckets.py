"""Faults planted in the code for buckets, which the simulation must find."""

import contextlib
from typing import Any

from flaxckpt import errors, policies
from flaxckpt._storage import bucket, commit_marker, leases, locks, transaction


class _NoLock:
    """Stands in for `locks.Lock`: no other process sees it."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self._holder = locks._self()
        self.is_inherited = True
        self.is_left = False

    def check(self) -> None:
        """Does nothing."""

    confirm = release = leave = check


@contextlib.contextmanager
def _lock_nothing(path, *, patient=False):
    yield _NoLock(path)


def _release_always(self):
    self.is_left = False
    _release(self)


_release = locks.Lock.release


def _delete_files_first(path, check):
    with locks.lock(path) as lock, leases.deletion(path):
        check(path)
        parts = [key for key in path.store.keys(path.prefix) if "/state/" in key]
        path.store.delete_all(parts)
        commit_marker.withdraw(lock)


def _exchange_always(self, key, value, generation):
    if generation == bucket._nothing():
        return _exchange(self, key, value, generation)
    return _exchange(self, key, value, None)


_exchange = bucket.Bucket.exchange


def _write_over(path, content, lock=None):
    for _ in range(8):
        if path.store.create(path.key, content) is not None:
            return
        present = path.store.read(path.key)
        if present and path.store.exchange(path.key, content, present.generation):
            return
    raise errors.CheckpointExistsError(f"{path}")


def _remove_in_any_order(lock, keys):
    keys = sorted(keys, key=commit_marker.MANIFEST.__eq__)
    lock.path.store.delete_all(lock.path.prefix + key for key in keys)


def _do_nothing(self):
    """Stands in for a method of a lock."""


FAULTS: dict[str, dict[tuple[Any, str], Any]] = {
    "no lock": {(locks, "lock"): _lock_nothing},
    "a lock counts as abandoned between two renewals": {(locks, "_ABANDONED_SECS"): 5},
    "every holder of a lock counts as dead": {(locks, "_status"): lambda lock: "dead"},
    "a lock is replaced without a condition": {
        (bucket.Bucket, "exchange"): _exchange_always
    },
    "a writer replaces objects after a pause": {
        (commit_marker, "write_new"): _write_over
    },
    "a process that has lost its lock goes on": {
        (locks.Lock, "check"): _do_nothing,
        (locks.Lock, "confirm"): _do_nothing,
    },
    "a deletion removes the commit marker last": {
        (transaction, "_delete_objects"): _delete_files_first
    },
    "a deletion looks for no readers": {(leases, "readers"): lambda path: []},
    "a lease expires between two renewals": {(leases, "_MACHINES_DIFFER_SECS"): -50},
    "the manifest is not removed first": {
        (commit_marker, "_remove_objects"): _remove_in_any_order
    },
    "a lock is released after an unknown result": {
        (locks.Lock, "release"): _release_always
    },
    "requests of a dead process are not waited for": {
        (locks, "_until"): lambda lock: 0.0
    },
}
"""Name of a fault -> the attributes to replace, for `stand_ins.installed`."""

_RARE = (
    "a lock counts as abandoned between two renewals",
    "every holder of a lock counts as dead",
    "a writer replaces objects after a pause",
    "the manifest is not removed first",
)
"""Faults that histories of whole runs seldom show: these have fewer collisions."""


def _keep_nothing(self, steps):
    return set()


def _keep_newest(self, steps):
    return {step.step for step in steps[-1:]}


FAULTS_OF_RUNS: dict[str, dict[tuple[Any, str], Any]] = {
    **{name: fault for name, fault in FAULTS.items() if name not in _RARE},
    "a policy forgets the best step": {(policies.BestN, "preserved"): _keep_newest},
    "a policy forgets the latest steps": {
        (policies.LatestN, "preserved"): _keep_nothing
    },
}
"""Like `FAULTS`, for histories of whole runs."""
