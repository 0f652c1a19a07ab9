"""Commit markers, for object stores without renames.

Objects have their final names from the start; the checkpoint exists when its marker
does. Who writes or deletes it holds its lock; who takes over the lock of a dead process
removes objects without a marker.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterator

from flaxckpt import errors
from flaxckpt._storage import files, leases, locks, store_options
from flaxckpt._storage.paths import RemotePath

_log = logging.getLogger(__name__)

MARKER = "commit_success.txt"
"""The commit marker, named by Orbax's convention for buckets."""

MANIFEST = "flaxckpt.json"
"""The object whose digest is in the commit marker."""

_LATE_TRIES = 8

_locks: dict[RemotePath, locks.Lock] = {}
"""The locks of the checkpoints that this process writes."""


# ---- locking ----------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: RemotePath, *, patient: bool = False) -> Iterator[locks.Lock]:
    """Holds the lock of a checkpoint in the `with` block; see `locks.lock`.

    A lock that was taken over is left to a sweep, unless its dead holder left a whole
    checkpoint, or none.
    """
    with locks.lock(path, patient=patient) as lock:
        if lock.is_inherited:
            lock.is_left = bool(_keys(path)) and not _is_sealed(path)
        yield lock


def _keys(path: RemotePath) -> list[str]:
    """Returns the objects of a checkpoint, without those of readers and deletions."""
    return [key for key in path.keys() if not leases.is_lease(key)]  # noqa: SIM118


# ---- writing ----------------------------------------------------------------------


def is_committed(path: RemotePath) -> bool:
    return (path / MARKER).is_file()


def is_unfinished(path: RemotePath) -> bool:
    """Returns True for a checkpoint that is still locked, or has only a marker."""
    keys = path.keys()
    return keys == [MARKER] or (MARKER not in keys and locks.is_locked(path))


@contextlib.contextmanager
def new_checkpoint(
    final: RemotePath, *, overwrite: bool, keep: Callable[[str], bool]
) -> Iterator[RemotePath]:
    """Locks a checkpoint for writing in the `with` block; see `commit`.

    With `overwrite`, first removes existing objects that `keep` does not select.
    Removes all at the end without a commit marker. Raises CheckpointExistsError if it
    exists, or another process writes it.
    """
    with locked(final) as lock:
        _make_room(lock, overwrite=overwrite, keep=keep)
        _locks[final] = lock
        try:
            with final.store.recorded(final.prefix):
                yield final
        except BaseException:
            if not lock.is_left:
                _clear(lock)
            raise
        finally:
            del _locks[final]


def _make_room(
    lock: locks.Lock, *, overwrite: bool, keep: Callable[[str], bool]
) -> None:
    final = lock.path
    keys = _keys(final)
    if not keys:
        return
    is_late = keys == [MARKER]
    is_checkpoint = MARKER in keys and not is_late
    if is_checkpoint and not overwrite:
        raise errors.CheckpointExistsError(
            f"{final} was created by another writer in the meantime: give each run its"
            " own directory"
        )
    if not (is_checkpoint or lock.is_inherited or is_late):
        raise errors.CheckpointExistsError(
            f"{final} exists but is not a checkpoint, so it is not overwritten:"
            " remove it yourself, or choose another path"
        )
    lock.is_left = True  # until removal is complete: a sweep continues after a failure
    withdraw(lock)
    lock.confirm()
    _remove_objects(lock, [key for key in keys if key != MARKER and not keep(key)])
    lock.is_left = False


@store_options.cleanup()
def _clear(lock: locks.Lock) -> None:
    """Removes an unfinished checkpoint, unless another process holds the lock."""
    try:
        lock.confirm()
        if not is_committed(lock.path):
            _remove_objects(lock, lock.path.keys())
    except errors.CheckpointExistsError:
        lock.is_left = True  # our last objects may have come after the other's removal
    except errors.StoreError as error:
        lock.leave()
        _log.warning("could not remove %s for now: %s", lock.path, error)


def commit(final: RemotePath, marker: bytes) -> int:
    """Commits what `new_checkpoint` wrote; returns its bytes.

    Raises CheckpointExistsError if another process took over the lock; StoreError if
    the result of the commit is unknown.
    """
    lock = _locks[final]
    lock.confirm()
    lock.is_left = True  # without an answer, the marker may still arrive
    write_new(final / MARKER, marker)
    # A process that took over the lock before the marker arrived removed the objects.
    lock.confirm()
    lock.is_left = False
    return final.store.recorded_bytes(final.prefix)


def _is_sealed(path: RemotePath) -> bool:
    """Returns True for a marker with intact objects; others are late writes."""
    marker = path.store.read((path / MARKER).key)
    if marker is None:
        return False
    try:
        digests = dict(json.loads(marker.value))
    except (ValueError, TypeError, RecursionError):
        return path.keys() != [MARKER]  # of Orbax, without digests
    return all(_digest(path / name) == digest for name, digest in digests.items())


def _digest(file: RemotePath) -> str | None:
    stored = file.store.read(file.key)
    return None if stored is None else files.digest(stored.value)


def write_new(path: RemotePath, content: bytes, lock: locks.Lock | None = None) -> None:
    """Writes a new object, by default under the lock that this process holds around it.

    Replaces a late write of an abandoned attempt; the store refuses later ones. Raises
    CheckpointExistsError if another process has the lock.
    """
    store, key = path.store, path.key
    lock = lock or _lock_around(path)
    if lock is not None:
        lock.check()
    for _ in range(_LATE_TRIES):
        if store.create(key, content) is not None:
            return
        present = store.read(key)
        if present is None:
            continue
        # After the read: a process that took over the lock wrote no part of `present`.
        if lock is not None:
            lock.confirm()
        if store.exchange(key, content, present.generation) is not None:
            return
    raise errors.CheckpointExistsError(
        f"{path} is also being written by another process"
    )


def _lock_around(path: RemotePath) -> locks.Lock | None:
    """Returns the lock of the checkpoint with `path`, if this process writes it."""
    return next((_locks[above] for above in path.parents if above in _locks), None)


# ---- deleting ---------------------------------------------------------------------


def withdraw(lock: locks.Lock) -> bytes | None:
    """Removes the marker; raises CheckpointExistsError if the lock is lost."""
    store, key = lock.path.store, (lock.path / MARKER).key
    marker = store.read(key)
    if marker is None:
        return None
    lock.confirm()
    store.delete(key, marker.generation)
    return marker.value


def restore(lock: locks.Lock, marker: bytes | None) -> None:
    """Restores the commit marker; raises CheckpointExistsError if the lock is lost."""
    lock.confirm()
    if marker is not None:
        write_new(lock.path / MARKER, marker, lock)


@store_options.cleanup()
def remove(lock: locks.Lock) -> None:
    """Removes an uncommitted checkpoint; a later sweep removes what is left."""
    lock.is_left = True  # until all is removed
    try:
        lock.confirm()
        _remove_objects(lock, lock.path.keys())
    except errors.CheckpointExistsError:
        return  # the other process may have looked before the marker was removed
    except errors.StoreError as error:
        lock.leave()
        _log.warning("could not remove %s for now: %s", lock.path, error)
        return
    lock.is_left = False


def _remove_objects(lock: locks.Lock, keys: Collection[str]) -> None:
    """Removes objects, the manifest first: a late marker does not count without it."""
    final = lock.path
    first = {MARKER, MANIFEST}.intersection(keys)
    for some in (first, {*keys} - first):
        objects = [final.prefix + key for key in sorted(some)]
        final.store.delete_all(objects, lock.check)


# ---- leftovers of crashes ---------------------------------------------------------


def sweep(root: RemotePath, is_ours: Callable[[str], bool]) -> None:
    """Removes uncommitted checkpoints without a writer, or raises StoreError."""
    for name, is_directory in root.names().items():
        if is_directory or not name.endswith(locks.LOCK):
            continue
        path = root / name.removesuffix(locks.LOCK)
        if not is_ours(path.name) or (lock := locks.take_over(path)) is None:
            continue
        try:
            if leases.readers(path):
                continue  # until they have ended, or their leases expire
            if _is_sealed(path):
                lock.is_left = False
            else:
                remove(lock)
                _log.info("removed %s, left by a crash", path)
        finally:
            lock.release()
