"""Faults planted in the code, which the simulations must find."""

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from flaxckpt import _storage, errors, policies
from flaxckpt._checkpoint import verify
from flaxckpt._distributed import heartbeat, operation
from flaxckpt._run.tiers import part_copies, parts, upload_copies
from flaxckpt._steps import delete, markers
from flaxckpt._storage import (
    bucket,
    commit_marker,
    leases,
    locks,
    rename,
    temporary,
    transaction,
)
from flaxckpt._storage import files as storage_files
from flaxckpt._zarr import chunk_file
from verification.simulation import failures, files, jobs, network, pauses, pins, tier


class Fault(NamedTuple):
    """A fault.

    Attributes:
        histories: The module with the histories that find it.
        patches: Functions to replace, for `stand_ins.installed`.
    """

    histories: ModuleType
    patches: dict[tuple[Any, str], Any]


class _Stand:
    """Stands in for an object, with some other attributes."""

    def __init__(self, real: Any, **names: Any) -> None:
        self._real = real
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _replace_published(new: Path, final: Path) -> None:
    """Stands in for `rename.publish`: replaces a step of another writer."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(final)
    new.rename(final)


def _make_all_parents(root: Path, file: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)


_gather = operation.Operation.gather


def _gather_nothing_written(self, stage, mine=None):
    if stage != "written":
        return _gather(self, stage, mine)
    return [mine] + [{"digests": {}, "arrays": {}}] * (self.count - 1)


FAULTS_OF_FILES = {
    # Two checks hold this off: each alone is enough.
    "a writer makes its directory anew after a sweep": Fault(
        pauses,
        {
            (storage_files, "make_parents"): _make_all_parents,
            (temporary, "check_claim"): lambda path: None,
        },
    ),
    "a sweep locks no directory": Fault(
        files, {(temporary, "_lock"): lambda descriptor, patience_secs: True}
    ),
    "directories count as abandoned between two touches": Fault(
        files, {(temporary, "_ABANDONED_SECS"): 1.0}
    ),
    "a deletion looks for no readers": Fault(
        files, {(leases, "readers"): lambda path: []}
    ),
    "a deletion looks for no pin": Fault(
        pins, {(delete, "markers"): _Stand(markers, is_pinned=lambda path: False)}
    ),
    "a new step replaces the step of another writer": Fault(
        files, {(rename, "publish"): _replace_published}
    ),
    "process 0 commits before all have written": Fault(
        jobs, {(operation.Operation, "gather"): _gather_nothing_written}
    ),
    "the silence of a process is ignored": Fault(
        jobs, {(heartbeat.Heartbeats, "silent_secs"): lambda self, process: 0.0}
    ),
    "process 0 removes its directory at once after a failure": Fault(
        failures, {(operation.Operation, "_settle"): lambda self, stage, deadline: None}
    ),
}
"""What is wrong, with files and jobs -> the fault."""


# ---- the local tier ------------------------------------------------------------------

_Choice = tuple[list[parts.Whole], list[parts.Lost]]
_choose = parts.choose
_exchange_texts = operation.Operation.exchange


def _ask_first_only(
    held: Sequence[Mapping[int, parts.Held]], far: Mapping[int, str | None]
) -> _Choice:
    """Stands in for `parts.choose`: looks at what process 0 has."""
    return _choose([held[0], *({} for _ in held[1:])], far)


def _exchange_without(*stages: str) -> Callable[..., list[str]]:
    """Returns a stand-in for `Operation.exchange` that waits for nobody there."""

    def exchange(self: Any, stage: str, mine: str = "") -> list[str]:
        if stage in stages:
            return [mine] * int(self.count)
        return _exchange_texts(self, stage, mine)

    return exchange


def _unsynced_storage() -> _Stand:
    """Returns a stand-in for the package `_storage` that syncs nothing."""

    def of(path: Path) -> _Stand:
        return _Stand(
            _storage.of(path),
            sync_tree=lambda root: 0,
            sync_files=lambda paths, threads: None,
        )

    return _Stand(
        _storage, of=of, files=_Stand(_storage.files, sync_directory=lambda path: None)
    )


def _verify_nothing(
    path: Path,
    names: Collection[str],
    stream: Callable[[str], Iterable[memoryview]] | None = None,
    pace: Any = None,
) -> dict[str, str]:
    """Stands in for `verify.find_faults`: receives the files only."""
    for name in names if stream is not None else ():
        for _ in stream(name):
            pass
    return {}


def _identify_by_step(path: Path) -> str | None:
    """Stands in for `parts.identify`: takes each save of a step for the same."""
    return path.name if (path / parts.MARKER).exists() else None


FAULTS_OF_TIER = {  # some with the faults of the world that show them
    # Three checks hold this off: the first alone makes steps unreadable at most.
    "parts of several saves of a step are mixed": Fault(
        tier,
        {
            (parts, "identify"): _identify_by_step,
            (verify, "find_faults"): _verify_nothing,
            (chunk_file, "check"): lambda *args, **options: None,
        },
    ),
    "a restore takes the newest step of process 0": Fault(
        tier, {(parts, "choose"): _ask_first_only}
    ),
    "a copy is not verified": Fault(
        tier,
        {
            (verify, "find_faults"): _verify_nothing,
            (tier, "_FAULTS"): ("network",) * 3,
            (network, "_FAULTS"): ("wrong bytes",),
        },
    ),
    "other processes do not learn of uploads": Fault(
        tier, {(upload_copies, "tell_uploaded"): lambda *args: None}
    ),
    "a save is acknowledged before all parts are committed": Fault(
        tier,
        {
            (operation.Operation, "exchange"): _exchange_without("committed"),
            (tier, "_FAULTS"): ("outage",) * 3,
        },
    ),
}
"""What is wrong with the local tier -> the fault."""


# ---- buckets -------------------------------------------------------------------------


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


FAULTS_OF_BUCKETS: dict[str, dict[tuple[Any, str], Any]] = {
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
"""What is wrong with buckets -> the attributes to replace."""

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
    **{name: fault for name, fault in FAULTS_OF_BUCKETS.items() if name not in _RARE},
    "a policy forgets the best step": {(policies.BestN, "preserved"): _keep_newest},
    "a policy forgets the latest steps": {
        (policies.LatestN, "preserved"): _keep_nothing
    },
}
"""Like `FAULTS_OF_BUCKETS`, for histories of whole runs."""

UNSYNCED_COPIES = {(part_copies, "_storage"): _unsynced_storage()}
"""Copies at peers that a power cut takes away."""
