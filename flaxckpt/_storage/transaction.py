"""Transactions on checkpoints: each appears whole, and goes whole, in any storage.

In a file system, a new checkpoint is a temporary directory until it is renamed. In an
object store, its objects have their final names and count once the commit marker
exists.
"""

from __future__ import annotations

import abc
import contextlib
import errno
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
    """A checkpoint that was committed.

    Attributes:
        size: Bytes of the written files, without hard-linked files.
        manifest: Stamp of the manifest if a later checkpoint may have hard links to the
            files, else None.
    """

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
        """Copies a checkpoint of this machine, or the files that `is_wanted` selects.

        Returns the content of its commit marker, which is not copied; None without one.
        """
        marker = source / MARKER
        found = [
            file.relative_to(source)
            for file in source.rglob("*")
            if file != marker and file.is_file()
        ]

        def copy(name: Path) -> None:
            files.make_parents(self.directory, name)
            storage.of(self.directory).copy_file(source / name, self.directory / name)

        _util.threads.each(copy, filter(is_wanted, found), threads=_COPYING_THREADS)
        return marker.read_bytes() if marker.is_file() else None

    @abc.abstractmethod
    def commit(
        self, marker: bytes | None, before: Callable[[], object] = lambda: None
    ) -> Committed:
        """Commits the checkpoint durably.

        Writes `marker` as the last file, if given. Calls `before` at the last moment;
        an error prevents the commit. Raises CheckpointExistsError if another process
        has written the checkpoint; OSError if the commit failed.
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


def replace(new: Path, final: Path, keep: Callable[[str], bool]) -> None:
    """Exchanges the directory `new` with the checkpoint `final`, some files excepted.

    `keep` selects the files that `final` keeps, by name. Raises SaveFailedError if it
    lost one that was added meanwhile.
    """
    aside = temporary.new_path(final, temporary.REPLACED)
    with temporary.claim(final):
        _carry(final, new, keep)  # a crash may follow the exchange at once
        rename.exchange(new, final, aside)
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

    Removes leftovers of crashed saves of `final`.

    Args:
        final: The checkpoint.
        overwrite: Whether to replace an existing checkpoint: in an object store at
            once, in a file system at the commit.
        keep: Selects files of the replaced checkpoint, by name, for the new one.
        check: Called with the checkpoint before it is replaced; raises to keep it.
        mode: The mode of all directories, from which the mode of all files follows;
            None for the umask's. Until the commit, only this user opens them.

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
    """Returns True for the objects of an uncommitted save.

    In a file system, an unfinished save has a temporary name.
    """
    return paths.is_remote(path) and commit_marker.is_unfinished(path)


def lists_committed(path: Path, names: Collection[str]) -> bool:
    """Returns True if a checkpoint with these names in it counts as committed.

    In an object store only with the commit marker, and not with the marker alone, which
    is a late write of an abandoned save. Nobody commits empty directories.
    """
    if paths.is_remote(path):
        return MARKER in names and len(names) > 1
    return bool(names)


# ---- deletion ---------------------------------------------------------------------


def delete(path: Path, check: Callable[[Path], object]) -> None:
    """Deletes a checkpoint: first the name or marker, durably, then the files.

    Files that cannot be removed are left to a later sweep. Calls `check` with the
    present path before and after the name or marker is gone. Raises SaveFailedError if
    the checkpoint is being read, or `check` raises it to keep it; OSError if the
    checkpoint still has its name, or may regain it in a crash.
    """
    if paths.is_remote(path):
        _delete_objects(path, check)
        return
    aside = temporary.new_path(path, temporary.DELETED)
    with temporary.claim(path):
        with leases.deletion(path):
            check(path)
            rename.withdraw(path, aside)
            try:
                # A reader or a pin may have come before the rename.
                _check_unread(path, aside)
                check(aside)
            except errors.SaveFailedError:
                aside.rename(path)
                files.sync_directory(path.parent)
                raise
        temporary.discard(aside)


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
    """Deletes the directory `name` of a checkpoint after calling `announce`.

    Raises OSError if the directory could not be deleted; SaveFailedError if the
    checkpoint is being read: the next deletion goes on here.
    """
    if paths.is_remote(path):
        with commit_marker.locked(path), leases.deletion(path):
            announce()
            _check_unread(path, path)
            storage.of(path).remove_tree(path / name)
        return
    aside = temporary.new_path(path, temporary.DELETED)
    with temporary.claim(path / name):
        with leases.deletion(path):
            announce()
            storage.LOCAL.withdraw_name(path / name, aside)
            try:
                _check_unread(path, path)
            except errors.SaveFailedError:
                aside.rename(path / name)
                files.sync_directory(path)
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
