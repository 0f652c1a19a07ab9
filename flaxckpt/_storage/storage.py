"""Protocol for storage, with an implementation for each kind, which has no state.

Where behaviour differs, a method handles both cases; the attributes are for callers
that choose between two ways of their own. `transaction` has what writes and deletes
whole checkpoints, and `listing` what can be said of all files below a directory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

from flaxckpt._storage.local_storage import LocalStorage
from flaxckpt._storage.object_storage import ObjectStorage
from flaxckpt._storage.paths import RemotePath
from flaxckpt._storage.stored_value import WalkedEntry, WrittenMarker
from flaxckpt._types import JSON

_Path = TypeVar("_Path", bound=Path, contravariant=True)


class Storage(Protocol[_Path]):
    """Reads, writes, lists, commits and deletes files and checkpoints.

    Of methods that read, a missing file is a FileNotFoundError, and another failure an
    OSError; a file that is not regular, and a link out of `within` or the checkpoint,
    is a ValueError, or, of `read`, `open_file` and `digest_file`, a
    DamagedCheckpointError.

    Attributes:
        can_map: Files can be mapped into memory.
        can_rename: Files and directories can be renamed and hard-linked. Without, a
            checkpoint is replaced and deleted file by file under its own name.
        costs_requests: Each access to a file takes a request to another machine.
    """

    can_map: bool
    can_rename: bool
    costs_requests: bool

    # ---- listing ------------------------------------------------------------------

    def exists(self, path: _Path, /) -> bool:
        """Returns True if `path` exists, even as a dangling link."""

    def names(self, directory: _Path, /) -> list[str]:
        """Returns names in a directory; raises FileNotFoundError if missing."""

    def directories(self, directory: _Path, /) -> Iterator[str]:
        """Yields the names of the subdirectories, except links to directories."""

    def identity(self, path: _Path, /) -> tuple[int, ...] | None:
        """Returns numbers to identify a file and the content; None if missing."""

    def is_taken(self, path: _Path, /) -> bool:
        """Returns True if a file written to `path` would replace an existing entry."""

    def contents(
        self, directory: _Path, select: Callable[[str], bool], /
    ) -> Mapping[str, Collection[str] | None]:
        """Maps subdirectories to the names inside, or None if they cannot be read."""

    def walk(
        self, directory: _Path, /, *, strict: bool = False
    ) -> Iterator[WalkedEntry]:
        """Yields each entry below `directory`, in order; does not follow links.

        Leaves out directories that cannot be listed, or raises OSError if `strict`.
        """

    def known_size(self, file: _Path, within: _Path | None, /) -> int | None:
        """Returns the size of a file; None if unknown without reading the file."""

    def fingerprint(self, file: _Path, /) -> tuple[tuple[int, ...], int]:
        """Returns numbers to detect changes, and the size, or raises OSError."""

    def check_root(self, root: _Path, checkpoint: _Path, /) -> int:
        """Checks the place of the arrays for links that lead out; returns its size.

        One listing serves all arrays that are read before the directory changes; see
        `check_array` for their own. The size is that of the database, or of few files.
        """

    def check_array(self, root: _Path, name: str, checkpoint: _Path, /) -> int:
        """Checks the directory of an array for links out; returns its size."""

    def check_file(self, path: _Path, checkpoint: _Path, /) -> None:
        """Raises ValueError for a non-regular file, or a link out of the checkpoint."""

    def kvstore(self, directory: _Path, below: str, /) -> dict[str, JSON]:
        """Returns TensorStore's spec of the key-value store `below` in `directory`."""

    # ---- reading ------------------------------------------------------------------

    def read(self, file: _Path, /, *, max_bytes: int) -> bytes:
        """Returns a file's content; raises DamagedCheckpointError above `max_bytes`."""

    def open_file(
        self, file: _Path, /, *, buffer_bytes: int = 2**13
    ) -> io.BufferedReader:
        """Opens a regular file for reading, `buffer_bytes` at a time."""

    def digest_file(self, file: _Path, /, *, max_bytes: int) -> str | None:
        """Returns the checksum of a file; None for one larger than `max_bytes`."""

    def stream(self, file: _Path, within: _Path, size: int, /) -> Iterator[memoryview]:
        """Yields the content of a file in parts, each valid until the next.

        The expected `size` saves a request; it is 0 if unknown and perhaps small.
        """

    def read_small(self, file: _Path, max_bytes: int, within: _Path, /) -> bytes:
        """Returns the content of a small file, at least the first `max_bytes`."""

    def read_range(self, file: _Path, offset: int, size: int, /) -> bytes:
        """Returns `size` bytes from `offset`, or fewer where the file ends."""

    def read_end(self, file: _Path, size: int, /) -> bytes:
        """Returns the last `size` bytes of a file, or all of a shorter one."""

    def read_into(
        self,
        file: _Path,
        views: Sequence[memoryview],
        /,
        *,
        offset: int,
        file_size: int | None,
    ) -> None:
        """Fills `views` with the bytes from `offset` of a file of an array.

        A store that is asked for a part of an object does not learn its size. Raises
        ValueError for another size than `file_size`, if given, or an early end.
        """

    def last_lines(self, file: _Path, max_bytes: int, /) -> list[bytes]:
        """Returns the last lines of a file, as many as fit into `max_bytes`."""

    # ---- writing ------------------------------------------------------------------

    def write(self, file: _Path, content: bytes, /) -> None:
        """Writes and syncs a new file; the caller syncs the directory."""

    def replace(
        self, file: _Path, content: bytes, /, *, mode: int | None = None
    ) -> None:
        """Writes a file atomically, with a mode of `modes`; the last write counts."""

    def write_marker(
        self, file: _Path, content: bytes, /, *, mode: int | None = None
    ) -> WrittenMarker:
        """Writes a file, of this process only, like `replace`; returns its undo."""

    def lock_file(
        self, file: _Path, checkpoint: _Path, /
    ) -> AbstractContextManager[None]:
        """Locks a file in the block, where locks exist; in a store, its checkpoint."""

    def make_directory(self, path: _Path, /, *, mode: int | None = None) -> None:
        """Makes a directory and its parents durably, with `mode`, or raises OSError."""

    def sync_directory(self, path: _Path, /) -> None:
        """Makes the names in a directory durable."""

    def sync_tree(self, root: _Path, /) -> int:
        """Syncs all files and directories; returns the bytes not linked elsewhere."""

    def remove_tree(self, path: _Path, /) -> None:
        """Removes a directory; raises OSError for a link or a file, and keeps it."""

    def write_files(self, root: _Path, contents: Mapping[str, bytes], /) -> None:
        """Writes new files below `root`, synced later; raises OSError if one exists."""

    def copy_file(self, source: Path, target: _Path, /) -> None:
        """Copies a file of this machine to a new file."""
        ...

    def write_parts(self, file: _Path, parts: Sequence[memoryview], /) -> None:
        """Writes a new file, synced later if small; raises OSError if one exists."""

    def append_lines(
        self, file: _Path, lines: bytes, max_bytes: int, /, *, mode: int | None = None
    ) -> None:
        """Appends whole lines; concurrent writers may append to the same file.

        Storage that has to rewrite it drops the oldest lines beyond `max_bytes`.
        """

    def sync_files(self, paths: Iterable[_Path], threads: int, /) -> None:
        """Makes files and directories durable, `threads` at a time."""

    def add_directory(self, path: _Path, files: Mapping[str, bytes], /) -> bool:
        """Makes a directory with `files` durably, at once or in their order.

        Returns False, without any change, if another process was first.
        """


LOCAL: Storage[Path] = LocalStorage()
# Typed for all paths, but `of` returns it for a `RemotePath` only.
_OBJECTS = cast("Storage[Path]", ObjectStorage())


def of(path: Path) -> Storage[Path]:
    """Returns the storage of `path`: a file system, or an object store."""
    return _OBJECTS if isinstance(path, RemotePath) else LOCAL


class Stamp(NamedTuple):
    """Identity of the file at a path, to detect later changes; None if missing."""

    path: Path
    identity: tuple[int, ...] | None

    def is_current(self) -> bool:
        return of(self.path).identity(self.path) == self.identity


def stamp(path: Path) -> Stamp:
    """Returns the stamp of a file, or of the marker of a checkpoint in a store."""
    return Stamp(path, of(path).identity(path))
