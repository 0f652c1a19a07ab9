"""Transactions on checkpoints: each appears whole, and goes whole, in any storage.

In a file system, a new checkpoint is a temporary directory until it is renamed; in an
object store, its objects count once the commit marker exists.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _util, errors
from flaxckpt._storage import (
    commit_marker,
    files,
    leases,
    modes,
    paths,
    rename,
    storage,
    temporary,
)
from flaxckpt._storage.paths import RemotePath

MARKER: str = commit_marker.MARKER
MANIFEST: str = commit_marker.MANIFEST

_COPYING_THREADS = 8


class Committed(NamedTuple):
    """A committed checkpoint; `manifest` is None if its files cannot be hard-linked."""

    size: int
    manifest: storage.Stamp | None = None


class Transaction(abc.ABC):
    """A new checkpoint, which does not exist for others until `commit`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Writes new files; `commit` makes them durable."""
        storage.of(self.directory).write_files(self.directory, contents)

    def copy(
        self, source: Path, is_wanted: Callable[[Path], bool] = lambda name: True
    ) -> bytes | None:
        """Copies wanted files of a local checkpoint; returns its marker, or None."""
        marker = source / MARKER
        found = [
            Path(entry.path)
            for entry in storage.of(source).walk(source, strict=True)
            if entry.is_file and entry.path != MARKER
        ]

        def copy(name: Path) -> None:
            files.make_parents(self.directory, name)
            storage.of(self.directory).copy_file(source / name, self.directory / name)

        _util.threads.each(copy, filter(is_wanted, found), threads=_COPYING_THREADS)
        return marker.read_bytes() if files.is_file(marker) else None

    @abc.abstractmethod
    def commit(
        self, marker: bytes | None, before: Callable[[], object] = lambda: None
    ) -> Committed:
        """Commits the checkpoint durably, with `marker` as the last file, if given.

        An error of `before`, called at the last moment, prevents it. Raises
        CheckpointExistsError if another process has written it; OSError if it failed.
        """


class ItemTransaction(Transaction):
    """A part of a checkpoint that another program commits: only becomes durable."""

    def commit(
        self, marker: bytes | None, before: Callable[[], object] = lambda: None
    ) -> Committed:
        before()
        return Committed(storage.of(self.directory).sync_tree(self.directory))


class _Renamed(Transaction):
    def __init__(
        self,
        directory: Path,
        final: Path,
        mode: int | None,
        keep: Callable[[str], bool] | None,
        check: Callable[[Path], object],
    ) -> None:
        super().__init__(directory)
        self._final = final
        self._mode = mode
        self._keep = keep
        self._check = check

    def commit(
        self, marker: bytes | None, before: Callable[[], object] = lambda: None
    ) -> Committed:
        directory, final = self.directory, self._final
        if marker is not None:
            storage.LOCAL.write(directory / MARKER, marker)
        if self._mode is not None:
            modes.set_below(directory, self._mode)
        size = storage.LOCAL.sync_tree(directory)
        manifest = storage.stamp(directory / MANIFEST)
        before()
        temporary.check_claim(directory)
        if self._keep is not None and final.exists():
            self._check(final)  # again: files may have appeared since the save began
            replace(directory, final, self._keep)
        else:
            rename.publish(directory, final)
        return Committed(size, manifest._replace(path=final / MANIFEST))


def replace(
    new: Path,
    final: Path,
    keep: Callable[[str], bool],
    check: Callable[[Path], object] = lambda path: None,
) -> None:
    """Exchanges `new` with `final`, which keeps the files that `keep` selects.

    Calls `check` with what has the name before, and with the same once it has lost it.
    Raises SaveFailedError if it lost a file that was added meanwhile.
    """
    aside = temporary.new_path(final, temporary.REPLACED)
    with temporary.claim(final):
        check(final)
        _carry(final, new, keep)  # a crash may follow the exchange at once
        rename.exchange(new, final, aside)
        try:
            check(new)
        except (errors.CheckpointError, OSError):
            rename.exchange(new, final, aside)
            raise
    try:
        _carry(new, final, keep)
    except OSError as error:
        raise errors.SaveFailedError(
            f"{final} was saved, but its pin was lost: {error}; pin the step again"
        ) from error


def _carry(replaced: Path, new: Path, keep: Callable[[str], bool]) -> None:
    """Copies files of a replaced checkpoint that the new one has to keep."""
    for name in filter(keep, storage.LOCAL.names(replaced)):
        if not (new / name).exists():
            content = (replaced / name).read_bytes()
            mode = modes.of_directory(new)
            storage.LOCAL.replace(new / name, content, mode=mode)


class _Marked(Transaction):
    directory: RemotePath

    def commit(
        self, marker: bytes | None, before: Callable[[], object] = lambda: None
    ) -> Committed:
        if marker is None:
            raise FileNotFoundError(errno.ENOENT, "no marker", str(self.directory))
        before()
        return Committed(commit_marker.commit(self.directory, marker))


@contextlib.contextmanager
def begin(
    final: Path,
    *,
    overwrite: bool = False,
    keep: Callable[[str], bool] = lambda name: False,
    check: Callable[[Path], object] = lambda path: None,
    mode: int | None = None,
) -> Iterator[Transaction]:
    """Begins the checkpoint `final`; rolls it back at the end unless committed.

    Args:
        final: The checkpoint; leftovers of its crashed saves are removed.
        overwrite: Whether to replace an existing checkpoint: in an object store at
            once, in a file system at the commit.
        keep: Selects files of the replaced checkpoint, by name, for the new one.
        check: Called with the checkpoint before it is replaced; raises to keep it.
        mode: See `modes`. Until the commit, only this user opens the files.

    Raises:
        CheckpointExistsError: Only in an object store: `final` exists, or another
            process writes it.
        OSError: The directory cannot be made.
    """
    if paths.is_remote(final):
        if overwrite and commit_marker.is_committed(final):
            check(final)
        with commit_marker.new_checkpoint(final, overwrite=overwrite, keep=keep):
            yield _Marked(final)
        return
    temporary.sweep(final.parent, lambda name: name == final.name)
    with temporary.new_directory(final, mode) as directory:
        yield _Renamed(directory, final, mode, keep if overwrite else None, check)


# ---- checkpoints that exist -------------------------------------------------------


def is_committed(path: Path) -> bool:
    """Returns True for an existing, committed checkpoint."""
    if paths.is_remote(path):
        return commit_marker.is_committed(path)
    return os.path.exists(path)  # noqa: PTH110


def is_unfinished(path: Path) -> bool:
    """Returns True for an uncommitted save that has its final name, in a store."""
    return paths.is_remote(path) and commit_marker.is_unfinished(path)


def lists_committed(path: Path, names: Collection[str]) -> bool:
    """Returns True if a checkpoint with these names in it counts as committed.

    In an object store only with the marker, and not with the marker alone, a late
    write.
    """
    if paths.is_remote(path):
        return MARKER in names and len(names) > 1
    return bool(names)


# ---- deletion ---------------------------------------------------------------------


def delete(path: Path, check: Callable[[Path], object]) -> None:
    """Deletes a checkpoint: first the name or marker, durably, then the files.

    A sweep removes files that are left. Calls `check` before and after the name or
    marker is gone. Raises SaveFailedError if it is being read, or kept by `check`;
    OSError if it still has its name, or may regain it in a crash.
    """
    if paths.is_remote(path):
        _delete_objects(path, check)
        return

    def check_again(aside: Path) -> None:
        _check_unread(path, aside)
        check(aside)

    _take_away(path, path, functools.partial(check, path), check_again)


def _delete_objects(path: RemotePath, check: Callable[[Path], object]) -> None:
    with commit_marker.locked(path) as lock, leases.deletion(path):
        check(path)
        was_left = lock.is_left
        lock.is_left = True  # until the objects are removed, or the marker is back
        marker = commit_marker.withdraw(lock)
        try:
            # A reader may have come before the marker was removed.
            _check_unread(path, path)
            check(path)
        except errors.CheckpointError:
            commit_marker.restore(lock, marker)
            lock.is_left = was_left
            raise
        commit_marker.remove(lock)


def delete_part(path: Path, name: str, announce: Callable[[], object]) -> None:
    """Deletes a directory of a checkpoint, or raises SaveFailedError if it is read."""
    if paths.is_remote(path):
        with commit_marker.locked(path), leases.deletion(path):
            announce()
            _check_unread(path, path)
            storage.of(path).remove_tree(path / name)
        return
    _take_away(path, path / name, announce, lambda _: _check_unread(path, path))


def _take_away(
    path: Path,
    target: Path,
    begin: Callable[[], object],
    check: Callable[[Path], object],
) -> None:
    """Removes a checkpoint, or a directory in it: first the name, then the files.

    `check` gets the present path, and raises SaveFailedError for a reader or a pin that
    has come before the rename.
    """
    aside = temporary.new_path(path, temporary.DELETED)
    with temporary.claim(target):
        with leases.deletion(path):
            begin()
            rename.withdraw(target, aside)
            try:
                check(aside)
            except (errors.CheckpointError, OSError):
                aside.rename(target)
                files.sync_directory(target.parent)
                raise
        temporary.discard(aside)


def _check_unread(path: Path, now: Path) -> None:
    """Raises SaveFailedError if the checkpoint, at another path now, has readers."""
    if late := leases.readers(now):
        raise leases.in_use_error(path, late)


# ---- leftovers of crashes ---------------------------------------------------------


def sweep(root: Path, is_ours: Callable[[str], bool]) -> None:
    """Removes unused leftovers that `is_ours` knows, or raises OSError."""
    if not paths.is_remote(root):
        temporary.sweep(root, is_ours)
        return
    commit_marker.sweep(root, is_ours)
    # From a copied run: an object store makes no temporary directories itself.
    for name in temporary.leftovers(storage.of(root).directories(root), is_ours):
        storage.of(root).remove_tree(root / name)


def sweep_files(directory: Path) -> None:
    """Removes temporary files and leases left by crashes, or raises OSError."""
    if paths.is_remote(directory):
        leases.sweep(directory)
    else:
        temporary.sweep_files(directory)
