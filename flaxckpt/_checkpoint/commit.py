"""Writes a snapshot to a temporary directory, then renames the directory."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _arrays, _steps, _storage, _util, errors
from flaxckpt._checkpoint import overwrite as checkpoint_overwrite
from flaxckpt._checkpoint.request import Snapshot
from flaxckpt.formats import _native


class Written(NamedTuple):
    """Result of writing a snapshot.

    Attributes:
        size: Bytes of all written files, without hard-linked files.
        arrays: The written arrays, which the next save may link.
    """

    size: int
    arrays: _arrays.write.Previous


_locks: weakref.WeakValueDictionary[Path, threading.Lock] = (
    weakref.WeakValueDictionary()
)
"""Path -> lock that admits one writer at a time within this process.

Locks disappear when no thread uses them.
"""

_guard = _util.forks.PerProcess(threading.Lock)


def _lock(final: Path) -> threading.Lock:
    """Returns the lock that all threads share while they write `final`."""
    with _guard.get():
        return _locks.setdefault(final, threading.Lock())


def _forget_locks() -> None:
    """Drops all locks in a forked child: the threads with the locks do not exist."""
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


@contextlib.contextmanager
def beginning(final: Path) -> Iterator[None]:
    """Converts errors of an object store before the first write to SaveFailedError.

    Raises:
        SaveFailedError: The store is not reachable.
    """
    try:
        yield
    except errors.StoreError as error:
        raise _of_store(final, error, "Nothing of it was written") from error


def _of_store(
    final: Path, error: errors.StoreError, left: str
) -> errors.SaveFailedError:
    """Returns the error of a save to a store; `left` describes the rest of the save."""
    told = f"{final} could not be saved: {error}"
    if isinstance(error, _storage.client.ForkedError):
        return errors.SaveFailedError(told)
    return errors.SaveFailedError(
        f"{told}\n{left}; see that the store can be reached, then save again."
    )


@contextlib.contextmanager
def alone(final: Path) -> Iterator[None]:
    """Locks `final` for one thread at a time, and converts errors to SaveFailedError.

    Raises:
        SaveFailedError: The disk, a store, or a library raised an error.
    """
    try:
        with _lock(final):
            yield
    except errors.CheckpointError as error:
        if not isinstance(error, errors.StoreError):
            raise
        left = "Nothing of it counts, unless it was its marker that was not written"
        raise _of_store(final, error, left) from error
    except _storage.rename.NotDurableError as error:
        raise errors.SaveFailedError(
            f"{final} was written, but the disk did not confirm its name: {error}\n"
            "Whether it stays, or what was there before, is not known; see that the"
            " disk is sound, then save again."
        ) from error
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise errors.SaveFailedError(
            f"{final} could not be saved: {' '.join(str(error).split())[:300]}\n"
            "Nothing of it is kept and earlier checkpoints are untouched; see that the"
            " directory is writable and has space, then save again."
        ) from error


def execute(
    snapshot: Snapshot, previous: _arrays.write.Previous | None = None
) -> Written:
    """Writes a snapshot from a single process, and commits the checkpoint durably.

    Args:
        snapshot: The snapshot to write.
        previous: Arrays of an earlier step; equal arrays are hard-linked.

    Raises:
        SaveFailedError: The write failed. Written files are removed; if the disk did
            not confirm the rename, the message says so.
    """
    with alone(snapshot.request.path), made(snapshot) as temporary:
        files = fill(snapshot, temporary, previous)
        return finish(snapshot, temporary, files)


@contextlib.contextmanager
def made(snapshot: Snapshot) -> Iterator[Path]:
    """Creates a temporary directory for a checkpoint; removes leftovers at the end."""
    final = snapshot.request.path
    _storage.of(final.parent).make_directory(final.parent)
    with _storage.of(final).new_checkpoint(
        final,
        overwrite=snapshot.request.overwrite,
        keep=lambda name: name == _steps.markers.PIN,
        check=checkpoint_overwrite.check_replaceable,
    ) as temporary:
        (temporary / _native.items.STATE).mkdir()
        yield temporary


def fill(
    snapshot: Snapshot, temporary: Path, previous: _arrays.write.Previous | None
) -> dict[str, bytes]:
    """Writes the arrays and metadata files of this process, without the manifest.

    Returns:
        The files other than arrays: name -> content.
    """
    files: dict[str, bytes] = {}

    @_util.gc_pause.paused()
    def describe() -> None:
        files.update(_native.checkpoint.make_files(snapshot.contents))
        write_new(temporary, files)

    with _util.threads.beside(describe) as check:
        root = temporary / _native.items.STATE
        write_arrays(snapshot, root, previous, check)
    return files


def write_arrays(
    snapshot: Snapshot,
    root: Path,
    previous: _arrays.write.Previous | None,
    check: Callable[[], object],
) -> None:
    """Writes the arrays of this process; an error from `check` stops the write."""
    together = snapshot.request.together

    def count(size: int) -> None:
        check()
        snapshot.request.count(size)

    _arrays.write.write(
        root,
        snapshot.arrays,
        encoding=snapshot.contents.encoding,
        ocdbt=snapshot.contents.ocdbt,
        previous=previous,
        max_concurrent_bytes=snapshot.request.options.max_concurrent_bytes,
        count=count,
        writer=None if together is None else together.index,
    )


def finish(
    snapshot: Snapshot,
    temporary: Path,
    files: Mapping[str, bytes],
    digests: Mapping[str, str] | None = None,
) -> Written:
    """Writes the manifest and commits the checkpoint.

    Args:
        snapshot: The written snapshot.
        temporary: The directory with its files.
        files: Files other than arrays: name -> content.
        digests: Digests of files written by other processes: name -> digest.
    """
    contents, request = snapshot.contents, snapshot.request
    sealed = _native.checkpoint.seal(contents, files, temporary, digests or {})
    marker = sealed.pop(_storage.commit_marker.MARKER)
    write_new(temporary, sealed)
    marks = _steps.markers.of_new(request.path, temporary=request.temporary)
    write_new(temporary, {**marks, **request.marks})
    manifest = _storage.stamp(temporary / _native.orbax_json.MANIFEST)
    publish = functools.partial(name, overwrite=request.overwrite)
    size = _storage.of(temporary).commit(temporary, request.path, marker, publish)
    stamp = manifest._replace(path=request.path / _native.orbax_json.MANIFEST)
    return Written(size, for_next(snapshot, stamp))


def name(temporary: Path, final: Path, *, overwrite: bool) -> None:
    """Renames the finished directory `temporary` to `final`, durably."""
    if overwrite and final.exists():
        # Other files may have appeared there since the save began.
        checkpoint_overwrite.check_replaceable(final)
        aside = _storage.temporary.beside(final, _storage.temporary.REPLACED)
        with _storage.temporary.claimed(final):
            _storage.rename.exchange(temporary, final, aside)
    else:
        _storage.rename.publish(temporary, final)


def for_next(snapshot: Snapshot, stamp: _storage.Stamp) -> _arrays.write.Previous:
    """Returns the arrays that the next save may hard-link."""
    sources = {
        array.name: (array.source, array.dtype)
        for array in snapshot.arrays
        if array.source is not None
    }
    return _arrays.write.Previous(
        snapshot.request.path / _native.items.STATE, sources, stamp
    )


def metadata_files(
    contents: _native.checkpoint.Contents, path: Path
) -> dict[str, bytes]:
    """Returns the files of the checkpoint `path` without arrays, for size checks."""
    made = _native.checkpoint.make_files(contents)
    return made | _native.checkpoint.seal(contents, made, path)


def write_new(root: Path, files: Mapping[str, bytes]) -> None:
    """Writes new files and syncs each file, but not their directories."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _storage.of(path).write(path, content)
