"""What the package asks of storage: one protocol, and an implementation for each kind.

`of(path)` returns the storage that holds `path`. An implementation has no state: every
method takes the path, as zarr's stores take the key. So `of` costs one `isinstance`,
and a caller may use the storage of a directory for all that is below it.

Callers do not ask which kind of storage they have. Where behaviour differs, a method
does the thing in both ways; the few attributes say what a storage can do, for callers
that choose between two ways of their own.
"""

from __future__ import annotations

import io
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar, cast

from flaxckpt._storage import rename
from flaxckpt._storage.local_storage import LocalStorage
from flaxckpt._storage.object_storage import ObjectStorage
from flaxckpt._storage.paths import RemotePath
from flaxckpt._types import JSON

_Path = TypeVar("_Path", bound=Path, contravariant=True)


class Storage(Protocol[_Path]):
    """Reads, writes, lists, commits and deletes what is under paths.

    Attributes:
        has_directories: A directory exists by itself, not because files are in it.
        has_hard_links: A file may have several names.
        can_rename: A file or directory can get another name.
        can_map: Files can be mapped into memory.
        costs_requests: Each look at a file takes a request to another machine.
        commits_by_marker: A checkpoint counts when its marker is written, not when it
            gets its name.
    """

    has_directories: bool
    has_hard_links: bool
    can_rename: bool
    can_map: bool
    costs_requests: bool
    commits_by_marker: bool

    # ---- what is there ------------------------------------------------------------

    def exists(self, path: _Path, /) -> bool:
        """Whether there is a file or directory `path`, or a link, even to nothing."""

    def names(self, directory: _Path, /) -> list[str]:
        """The names in a directory.

        Raises:
            FileNotFoundError: There is none.
        """

    def directories(self, directory: _Path, /) -> Iterator[str]:
        """Yields the names of the directories in one, but not of links to any."""

    def identity(self, path: _Path, /) -> tuple[int, ...] | None:
        """Numbers of a file and its content; None if there is none.

        Of a checkpoint in an object store, those of its commit marker.
        """

    def is_taken(self, path: _Path, /) -> bool:
        """Whether a file written to `path` would replace something."""

    def contents(
        self, directory: _Path, wanted: Callable[[str], bool], /
    ) -> dict[str, Collection[str]]:
        """Maps each directory in `directory` with a `wanted` name to the names in it.

        Raises:
            FileNotFoundError: There is no such directory.
        """

    def files_below(self, directory: _Path, /) -> Iterator[str]:
        """Yields the path of each file below `directory`, relative to it, with `/`.

        Links to files are files; links to directories are left out.
        """

    def entries_below(self, directory: _Path, /) -> Iterator[tuple[str, bool]]:
        """Yields the path of all that is below `directory`, and whether it is a file.

        Raises:
            ValueError: A link to a directory is there.
            OSError: It cannot be listed.
        """

    def files_and_links(self, directory: _Path, /) -> dict[str, bool]:
        """Maps the path of each file or link below `directory` to True for a link."""

    def all_files(self, path: _Path, /) -> Iterator[Path]:
        """Yields `path`, if it is a file, and each file below it.

        Raises:
            OSError: A directory cannot be listed.
        """

    def known_size(self, file: _Path, within: _Path | None, /) -> int | None:
        """The size of a file; None if only reading the file shows it.

        Args:
            file: The file.
            within: A directory that a link must not lead out of; None: it may.

        Raises:
            ValueError: It is no regular file, or is a link out of `within`.
            OSError: It cannot be opened.
        """

    def known_size_below(self, directory: _Path, /) -> int:
        """The size of all files below `directory`; 0 if only reading them shows it."""

    def disk_files(self, path: _Path, /) -> dict[tuple[int, int], int] | None:
        """Maps device and inode of each file at or below `path` to its size.

        None where storage does not say. Links are not followed.
        """

    def fingerprint(self, file: _Path, /) -> tuple[tuple[int, ...], int]:
        """Numbers that change with the content of a file, and its size.

        Raises:
            OSError: It cannot be looked at.
        """

    def real_path(self, path: _Path, /) -> str:
        """`path` with all symbolic links resolved."""

    def kind(self, path: _Path, /) -> str:
        """The kind of file system, or `object store`; empty if it is not known."""

    def is_local(self, path: _Path, /) -> bool:
        """Whether `path` is in a file system of this machine, where mapping is safe."""

    def free_bytes(self, path: _Path, /) -> int | None:
        """Bytes that may be written where `path` is; None where there is no end."""

    def check_root(self, root: _Path, checkpoint: _Path, /) -> int:
        """Refuses links out of a checkpoint right in the directory of its arrays.

        What is in the directories of arrays is left to `check_array`. It costs one
        listing for all arrays that are read before the directory changes.

        Args:
            root: The directory that holds the arrays, or the database of them.
            checkpoint: What no link may lead out of.

        Returns:
            The size of the database, if it is one; of other files, there are few.

        Raises:
            ValueError: A link leads out of `checkpoint`.
            OSError: There is no such directory.
        """

    def check_array(self, root: _Path, name: str, checkpoint: _Path, /) -> int:
        """Refuses links out of a checkpoint in the directory of an array.

        Returns:
            The size of all files there.

        Raises:
            ValueError: A link leads out of `checkpoint`.
            OSError: There is no such directory.
        """

    def check_file(self, path: _Path, checkpoint: _Path, /) -> None:
        """Refuses a file that is behind a link out of a checkpoint, or not regular.

        Raises:
            ValueError: It is refused.
        """

    def kvstore(self, directory: _Path, below: str, /) -> dict[str, JSON]:
        """TensorStore's spec of the key-value store at `below` in `directory`."""

    # ---- reading ------------------------------------------------------------------

    def read(self, file: _Path, /, *, max_bytes: int) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: There is none.
            DamagedCheckpointError: It is larger than `max_bytes`, or not regular.
        """

    def opened(
        self, file: _Path, /, *, buffer_bytes: int = 2**13
    ) -> AbstractContextManager[io.BufferedReader]:
        """Opens a regular file for reading, `buffer_bytes` at a time.

        Raises:
            FileNotFoundError: There is none.
            DamagedCheckpointError: It is not regular.
        """

    def digest_file(self, file: _Path, /, *, max_bytes: int) -> str | None:
        """The checksum of a file's content; None if it is larger than `max_bytes`.

        Raises:
            FileNotFoundError: There is none.
            DamagedCheckpointError: It is not regular.
        """

    def stream(self, file: _Path, within: _Path, size: int, /) -> Iterator[memoryview]:
        """Yields the content of a file in `within`, in parts that last until the next.

        Args:
            file: The file.
            within: A directory that a link must not lead out of.
            size: The expected size, which saves a request; 0 if it may be small.

        Raises:
            ValueError: It is no regular file, or is a link out of `within`.
            OSError: It cannot be read.
        """

    def read_small(self, file: _Path, max_bytes: int, within: _Path, /) -> bytes:
        """Returns the content of a small file in `within`, or its beginning.

        Raises:
            ValueError: It is no regular file, or is a link out of `within`.
            OSError: It cannot be read.
        """

    def read_range(self, file: _Path, offset: int, size: int, /) -> bytes:
        """Returns `size` bytes of a file from `offset`, or fewer where the file ends.

        Raises:
            ValueError: It is no regular file.
            OSError: It cannot be read.
        """

    def read_into(self, file: _Path, views: Sequence[memoryview], /) -> None:
        """Fills `views` with an array's file, which must have exactly their size.

        Raises:
            ValueError: It has another size, or is a link out of the array's parent.
            OSError: It is missing, or cannot be read.
        """

    def last_lines(self, file: _Path, max_bytes: int, /) -> list[bytes]:
        """The last lines of a file, as many as fit into `max_bytes`.

        Raises:
            OSError: It cannot be read; FileNotFoundError if it is not there.
        """

    def forget_cached(self, file: _Path, /) -> None:
        """Drops a file from the page cache of this machine, if it is in one."""

    # ---- writing ------------------------------------------------------------------

    def write(self, file: _Path, content: bytes, /) -> None:
        """Writes a new file and syncs it; its directory is the caller's to sync."""

    def replace(self, file: _Path, content: bytes, /) -> None:
        """Writes a file anew in one step: readers see the old content or the new.

        Several may do so at a time: one of them is the last.
        """

    def locked(self, file: _Path, /) -> AbstractContextManager[None]:
        """Has whoever locks the file, too, wait until the `with` block ends.

        Where the file system has no such locks, nobody waits. In an object store, the
        file's checkpoint is locked.

        Raises:
            OSError: The file cannot be opened.
        """

    def make_directory(self, path: _Path, /) -> None:
        """Makes a directory and its parents, each of them durable.

        Raises:
            OSError: One cannot be made, or is a file.
        """

    def sync_directory(self, path: _Path, /) -> None:
        """Makes the names in a directory durable."""

    def sync_tree(self, root: _Path, /) -> int:
        """Syncs every file and directory under `root`, whoever wrote them.

        Returns:
            The size of all files that have no other name elsewhere, in bytes. In an
            object store, what was written there since the checkpoint was begun.
        """

    def remove_tree(self, path: _Path, /) -> None:
        """Removes a directory and all in it, if it is there.

        Raises:
            OSError: It is a link or a file, which are never followed or removed.
        """

    def write_parts(self, file: _Path, parts: Sequence[memoryview], /) -> None:
        """Writes a new file of `parts`; a small one is durable after a later sync.

        Raises:
            OSError: It exists, or cannot be written.
        """

    def append_lines(self, file: _Path, lines: bytes, max_bytes: int, /) -> None:
        """Appends whole lines, whoever else appends to the file.

        Where appending means writing all anew, the oldest lines go from `max_bytes` on.

        Raises:
            OSError: They cannot be written.
        """

    def sync_files(self, paths: Iterable[_Path], threads: int, /) -> None:
        """Makes files and directories durable, `threads` at a time."""

    def add_directory(self, path: _Path, files: Mapping[str, bytes], /) -> bool:
        """Makes a directory with `files` in it, durably, in a single step if possible.

        Where it takes several steps, the files appear in their order.

        Returns:
            False if another process was first; nothing was changed then.
        """

    def withdraw_name(self, directory: _Path, aside: _Path, /) -> Path:
        """Renames a directory to `aside`, durably, where that is how deletion begins.

        Returns:
            Where the directory is now.
        """

    # ---- checkpoints --------------------------------------------------------------

    def is_committed(self, path: _Path, /) -> bool:
        """Whether the checkpoint `path` is there and counts."""

    def is_unfinished(self, path: _Path, /) -> bool:
        """Whether what is at `path` is left of a save that did not commit it."""

    def lists_committed(
        self, names: Collection[str], unmarked: Collection[str], /
    ) -> bool:
        """Whether a checkpoint that holds `names` counts.

        Args:
            names: Of the files and directories in it.
            unmarked: Names that no checkpoint has without its commit marker.
        """

    def temporary_directory(self, final: _Path, /) -> AbstractContextManager[Path]:
        """A new directory that is to be called `final`; what is left of it is removed.

        In an object store, it is `final` itself.

        Raises:
            CheckpointExistsError: In a store, it is there, or is being written.
            OSError: It cannot be made.
        """

    def discard(self, directory: _Path, /) -> None:
        """Removes a directory; what cannot be removed is swept another time."""

    def sweep(self, directory: _Path, is_ours: Callable[[str], bool], /) -> None:
        """Removes what crashes have left in `directory`, and nothing that is in use.

        Args:
            directory: The directory.
            is_ours: Whether a name is a checkpoint's.

        Raises:
            OSError: Something could not be removed.
        """

    def sweep_files(self, directory: _Path, /) -> None:
        """Removes files that crashes have left: of replaced files, and of readers.

        Raises:
            OSError: Something could not be removed.
        """

    def new_checkpoint(
        self,
        final: _Path,
        /,
        *,
        overwrite: bool,
        keep: Callable[[str], bool],
        check: Callable[[Path], object],
    ) -> AbstractContextManager[Path]:
        """A new directory for the checkpoint `final`; removed if it is not committed.

        What crashes have left of earlier saves of `final` is removed.

        Args:
            final: The checkpoint.
            overwrite: Whether to replace one that is there.
            keep: Which of its files stay, by name.
            check: Called with one that is about to be removed; raises to keep it.
        """

    def commit(
        self,
        made: _Path,
        final: _Path,
        marker: bytes,
        publish: Callable[[Path, Path], object],
        /,
    ) -> int:
        """Commits the checkpoint written in `made`, durably; returns its bytes.

        Args:
            made: The directory that `new_checkpoint` made.
            final: The checkpoint.
            marker: The content of the commit marker, the last file.
            publish: Called with `made` and `final` to give the directory its name,
                where that is how a checkpoint is committed.

        Raises:
            CheckpointExistsError: Another process has written `final`.
            OSError: It could not be committed.
        """

    def copy_checkpoint(
        self,
        source: Path,
        final: _Path,
        /,
        *,
        files: Sequence[Path] | None = None,
        marks: Mapping[str, bytes] = MappingProxyType({}),
        overwrite: bool,
        keep: Callable[[str], bool] = lambda name: False,
        publish: Callable[[Path, Path], object] = rename.publish,
    ) -> int:
        """Copies a checkpoint of this machine to `final` and commits it there.

        Args:
            source: The checkpoint.
            final: Where the copy shall be.
            files: The files to copy; by default all.
            marks: More files, by name.
            overwrite: Whether to replace a checkpoint that is there.
            keep: Which of its files stay, by name.
            publish: Called with a copied directory and `final` to give the directory
                its name, where that is how a checkpoint is committed.

        Returns:
            Bytes that were written.

        Raises:
            CheckpointExistsError: One is there, or another process writes it.
            OSError: It could not be written.
        """

    def delete(self, path: _Path, check: Callable[[Path], object], /) -> None:
        """Deletes a checkpoint: it first stops to count, durably, then its files go.

        Files that cannot be removed are swept another time.

        Args:
            path: The checkpoint.
            check: Called with its present path before and after it stops to count;
                raises SaveFailedError to keep the checkpoint.

        Raises:
            SaveFailedError: It is being read, or `check` keeps it.
            OSError: It has its name still, or the loss of its name may not last.
        """

    def delete_part(
        self, path: _Path, name: str, announce: Callable[[], object], /
    ) -> None:
        """Deletes the directory `name` of a checkpoint after calling `announce`.

        Raises:
            SaveFailedError: The checkpoint is being read.
            OSError: It could not be deleted.
        """


_LOCAL: Storage[Path] = LocalStorage()
# Typed for all paths: `of` returns it for its own only.
_OBJECTS = cast("Storage[Path]", ObjectStorage())


def of(path: Path) -> Storage[Path]:
    """The storage that holds `path`: a file system, or an object store."""
    return _OBJECTS if isinstance(path, RemotePath) else _LOCAL


class Stamp(NamedTuple):
    """Which file was found under a name, and as of when.

    Attributes:
        path: The name.
        identity: Of the file and its content; None if there was none.
    """

    path: Path
    identity: tuple[int, ...] | None

    def is_current(self) -> bool:
        """Whether it is still that file, as it was."""
        return stamp(self.path) == self


def stamp(path: Path) -> Stamp:
    """Notes which file `path` is now; of a checkpoint in a store, its marker."""
    return Stamp(path, of(path).identity(path))
