"""Commit by marker, for object stores, which rename nothing.

A checkpoint's objects have their final names from the start, and it counts as soon as
its marker is there. Whoever writes or deletes one holds its lock; when that is taken
over from somebody who is gone, whatever has no marker is removed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from flaxckpt import errors
from flaxckpt._storage import locks
from flaxckpt._storage.paths import RemotePath

_log = logging.getLogger(__name__)

MARKER = "commit_success.txt"
"""The object by which a checkpoint counts; Orbax's convention for buckets."""


# ---- writing ----------------------------------------------------------------------


_making: dict[RemotePath, locks.Lock] = {}


def is_committed(path: RemotePath) -> bool:
    """Whether the checkpoint `path` counts."""
    return (path / MARKER).is_file()


def is_unfinished(path: RemotePath) -> bool:
    """Whether what is at `path` does not count, and is locked by whoever wrote it.

    Or all that is there is a marker that came after its writer had given up.
    """
    there = path.keys()
    return _is_late(there) or (MARKER not in there and locks.is_locked(path))


def _is_late(there: Sequence[str]) -> bool:
    return list(there) == [MARKER]


@contextlib.contextmanager
def made(
    final: RemotePath, *, overwrite: bool, keep: Callable[[str], bool]
) -> Iterator[RemotePath]:
    """Lets a checkpoint be written in the `with` block; `commit` makes it count.

    What has no marker at the end is removed.

    Args:
        final: The checkpoint.
        overwrite: Whether one that is there is removed first.
        keep: Which of its objects stay all the same, by name.

    Raises:
        CheckpointExistsError: It is there, or somebody writes it.
    """
    with locks.held(final) as lock:
        _make_room(lock, overwrite=overwrite, keep=keep)
        _making[final] = lock
        try:
            with final.store.counted(final.prefix):
                yield final
        except BaseException as error:
            _clear(lock)
            # What was given up may still arrive: then it is somebody's who swept.
            lock.is_left = lock.is_left or isinstance(error, errors.StoreError)
            raise
        finally:
            del _making[final]


def _make_room(
    lock: locks.Lock, *, overwrite: bool, keep: Callable[[str], bool]
) -> None:
    final = lock.path
    there = final.keys()
    if not there:
        return
    is_there = MARKER in there and not _is_late(there)
    if is_there and not overwrite:
        raise errors.CheckpointExistsError(
            f"{final} was created by another writer meanwhile"
        )
    if not (is_there or lock.is_inherited or _is_late(there)):
        raise errors.CheckpointExistsError(
            f"{final} exists and is no checkpoint, so it is not overwritten:"
            " remove it yourself, or choose another path"
        )
    lock.is_left = True  # until it is empty: a sweep goes on where this is cut off
    (final / MARKER).unlink(missing_ok=True)
    final.store.delete_all(final.prefix + key for key in there if not keep(key))
    lock.is_left = False


def _clear(lock: locks.Lock) -> None:
    """Removes what was not finished, unless it is somebody else's by now."""
    try:
        lock.confirm()
        if not is_committed(lock.path):
            lock.path.store.delete_under(lock.path.prefix)
    except errors.CheckpointExistsError:
        return
    except errors.StoreError as error:
        lock.is_left = True
        _log.warning("%s is left for now: %s", lock.path, error)


def commit(final: RemotePath, marker: bytes) -> int:
    """Makes what was written in `made` count.

    Returns:
        Bytes that were written.

    Raises:
        CheckpointExistsError: Somebody else took it over.
        StoreError: Nobody knows whether it counts.
    """
    _making[final].confirm()
    write_new(final / MARKER, marker)
    return final.store.counted_bytes(final.prefix)


def write_new(path: RemotePath, content: bytes) -> None:
    """Writes an object that is not there yet.

    What is there all the same came late, from a try that was given up: it is replaced.
    Whatever comes later still finds this one, and is refused by the store.

    Raises:
        CheckpointExistsError: Somebody else writes there.
    """
    if path.store.create(path.key, content) is not None:
        return
    for _ in range(_LATE_TRIES):
        found = path.store.read(path.key)
        if found is None:
            generation = path.store.create(path.key, content)
        else:
            generation = path.store.exchange(path.key, content, found.generation)
        if generation is not None:
            return
    raise errors.CheckpointExistsError(f"{path} is written by somebody else, too")


_LATE_TRIES = 8


# ---- deleting ---------------------------------------------------------------------


def withdraw(path: RemotePath) -> bytes | None:
    """Has a checkpoint count no more; returns its marker, to put it back."""
    found = path.store.read((path / MARKER).key)
    if found is None:
        return None
    path.store.delete((path / MARKER).key)
    return found.value


def put_back(path: RemotePath, marker: bytes | None) -> None:
    """Has a checkpoint count again."""
    if marker is not None:
        write_new(path / MARKER, marker)


def remove(lock: locks.Lock) -> None:
    """Removes a checkpoint that does not count; what is left is swept another time."""
    try:
        lock.path.store.delete_under(lock.path.prefix)
    except errors.StoreError as error:
        lock.is_left = True
        _log.warning("%s is left for now: %s", lock.path, error)


# ---- what crashes have left -------------------------------------------------------


def sweep(root: RemotePath, is_ours: Callable[[str], bool]) -> None:
    """Removes what is locked by nobody who lives, and does not count.

    Args:
        root: Where checkpoints are.
        is_ours: Whether they are called so.

    Raises:
        StoreError: The store cannot be reached.
    """
    for name, is_directory in root.names().items():
        if is_directory or not name.endswith(locks.LOCK):
            continue
        path = root / name.removesuffix(locks.LOCK)
        if is_ours(path.name):
            _sweep(path)


def _sweep(path: RemotePath) -> None:
    lock = locks.inherited(path)
    if lock is None:
        return
    try:
        if not is_committed(path):
            remove(lock)
            _log.info("removed %s, which a crash had left", path)
    finally:
        lock.release()
