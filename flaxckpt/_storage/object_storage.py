"""Storage of files as objects in buckets; see `_storage.storage`."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from flaxckpt import _util, errors
from flaxckpt._storage import commit_marker, paths
from flaxckpt._storage import files as storage_files
from flaxckpt._storage.paths import RemotePath
from flaxckpt._storage.stored_value import StoredValue, WalkedEntry, WrittenMarker
from flaxckpt._types import JSON

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_APPEND_TRIES = 20
_WRITING_THREADS = 8  # of small files
_UNKNOWN_BYTES = 2**62


class ObjectStorage:
    """Objects under keys; a checkpoint counts once the commit marker exists."""

    can_map = False
    can_rename = False
    costs_requests = True

    # ---- listing ------------------------------------------------------------------

    exists = staticmethod(RemotePath.exists)

    def names(self, directory: RemotePath, /) -> list[str]:
        return list(directory.names())

    def directories(self, directory: RemotePath, /) -> Iterator[str]:
        yield from [name for name, is_dir in directory.names().items() if is_dir]

    def identity(self, path: RemotePath, /) -> tuple[int, ...] | None:
        for key in (path.key, f"{path.prefix}{commit_marker.MARKER}"):
            stored = path.store.read(key, start=0, stop=0)
            if stored is not None:
                return tuple(stored.generation)
        return None

    is_taken = staticmethod(RemotePath.is_file)

    def contents(
        self, directory: RemotePath, select: Callable[[str], bool], /
    ) -> dict[str, Collection[str]]:
        return {
            name: inside for name, inside in directory.tree().items() if select(name)
        }

    def walk(
        self, directory: RemotePath, /, *, strict: bool = False
    ) -> Iterator[WalkedEntry]:
        for key in directory.keys():  # noqa: SIM118
            is_placeholder = key.endswith("/")
            yield WalkedEntry(key, is_placeholder, not is_placeholder, False)

    def known_size(self, file: RemotePath, within: RemotePath | None, /) -> int | None:
        return file.store.recorded_size(file.key)

    def fingerprint(self, file: RemotePath, /) -> tuple[tuple[int, ...], int]:
        content = file.read_bytes()
        return (zlib.crc32(content),), len(content)

    # Stores have no links; the sizes of objects would cost requests.

    def check_root(self, root: RemotePath, checkpoint: RemotePath, /) -> int:
        return _UNKNOWN_BYTES

    def check_array(
        self, root: RemotePath, name: str, checkpoint: RemotePath, /
    ) -> int:
        return _UNKNOWN_BYTES

    def check_file(self, path: RemotePath, checkpoint: RemotePath, /) -> None:
        return

    def kvstore(self, directory: RemotePath, below: str, /) -> dict[str, JSON]:
        return directory.store.connection.spec(directory.prefix + below)

    # ---- reading ------------------------------------------------------------------

    def read(self, file: RemotePath, /, *, max_bytes: int) -> bytes:
        content = file.read_bytes()
        if len(content) > max_bytes:
            raise errors.DamagedCheckpointError(
                f"{file}: wanted at most {max_bytes} bytes, found {len(content)}"
            )
        return content

    def open_file(
        self, file: RemotePath, /, *, buffer_bytes: int = 2**13
    ) -> io.BufferedReader:
        # BytesIO has all methods of a BufferedReader that callers use.
        return cast("io.BufferedReader", io.BytesIO(file.read_bytes()))

    def digest_file(self, file: RemotePath, /, *, max_bytes: int) -> str | None:
        content = file.read_bytes()
        return storage_files.digest(content) if len(content) <= max_bytes else None

    def stream(
        self, file: RemotePath, within: RemotePath, size: int, /
    ) -> Iterator[memoryview]:
        piece = None
        for piece in file.store.pieces(file.key, size):
            yield memoryview(piece)
        if piece is None:
            raise paths.missing_error(file)

    def read_small(
        self, file: RemotePath, max_bytes: int, within: RemotePath, /
    ) -> bytes:
        return file.read_bytes()

    def read_range(self, file: RemotePath, offset: int, size: int, /) -> bytes:
        return file.store.part(file.key, offset, offset + size) or b""

    def read_end(self, file: RemotePath, size: int, /) -> bytes:
        return _found(file, file.store.end(file.key, size))

    def read_into(
        self,
        file: RemotePath,
        views: Sequence[memoryview],
        /,
        *,
        offset: int,
        file_size: int | None,
    ) -> None:
        wanted = sum(view.nbytes for view in views)
        # A range that ends at the expected end is open, to notice a longer object.
        stop = None if offset + wanted == file_size else offset + wanted
        size = _found(
            file, file.store.read_into(file.key, views, start=offset, stop=stop)
        )
        if size != wanted:
            raise ValueError(f"{file.name} has {size} bytes instead of {wanted}")

    def last_lines(self, file: RemotePath, max_bytes: int, /) -> list[bytes]:
        return file.read_bytes().splitlines(keepends=True)

    # ---- writing ------------------------------------------------------------------

    def write(self, file: RemotePath, content: bytes, /) -> None:
        commit_marker.write_new(file, content)

    def replace(
        self, file: RemotePath, content: bytes, /, *, mode: int | None = None
    ) -> None:
        file.write_bytes(content)

    def write_marker(
        self, file: RemotePath, content: bytes, /, *, mode: int | None = None
    ) -> WrittenMarker:
        created = file.store.create(file.key, content)
        written = created or file.store.write(file.key, content)
        return WrittenMarker(
            created is not None, lambda: file.store.delete(file.key, written)
        )

    @contextlib.contextmanager
    def lock_file(self, file: RemotePath, checkpoint: RemotePath, /) -> Iterator[None]:
        with commit_marker.locked(checkpoint, patient=True):
            if not self.exists(file):  # the lock was that of a deletion
                raise FileNotFoundError(errno.ENOENT, "it was deleted", str(checkpoint))
            yield

    def make_directory(self, path: RemotePath, /, *, mode: int | None = None) -> None:
        # Stores have no directories, but no object may have the path of a directory.
        for above in (path, *path.parents):
            if len(above.parts) > 1 and above.is_file():
                raise NotADirectoryError(errno.ENOTDIR, "it is an object", str(above))

    def sync_directory(self, path: RemotePath, /) -> None:
        return  # the names of objects are durable

    def sync_tree(self, root: RemotePath, /) -> int:
        return root.store.recorded_bytes(root.prefix)

    def remove_tree(self, path: RemotePath, /) -> None:
        path.store.delete_under(path.prefix)

    def write_files(self, root: RemotePath, contents: Mapping[str, bytes], /) -> None:
        def write(name: str) -> None:
            self.write(root / name, contents[name])

        _util.threads.each(write, contents, threads=_WRITING_THREADS)

    def copy_file(self, source: Path, target: RemotePath, /) -> None:
        self.write(target, source.read_bytes())

    def write_parts(self, file: RemotePath, parts: Sequence[memoryview], /) -> None:
        self.write(file, b"".join(parts))

    def append_lines(
        self,
        file: RemotePath,
        lines: bytes,
        max_bytes: int,
        /,
        *,
        mode: int | None = None,
    ) -> None:
        appended = file.store.appended
        for _ in range(_APPEND_TRIES):
            # Unless others append, too, the object is as the last call has left it.
            present = appended.pop(file.key, None) or file.store.read(file.key)
            content = lines if present is None else present.value + lines
            if len(content) > max_bytes:
                content = content[-max_bytes // 2 :].partition(b"\n")[2]
            if present is None:
                generation = file.store.create(file.key, content)
            else:
                generation = file.store.exchange(file.key, content, present.generation)
            if generation is not None:
                appended[file.key] = StoredValue(content, generation)
                return
        raise OSError(errno.EAGAIN, "other processes keep writing to it", str(file))

    def sync_files(self, paths: Iterable[RemotePath], threads: int, /) -> None:
        return  # an object is durable when it is written

    def add_directory(self, path: RemotePath, files: Mapping[str, bytes], /) -> bool:
        for name, content in files.items():
            (path / name).write_bytes(content)
        return True


def _found(file: RemotePath, value: _T | None) -> _T:
    """Returns what was read of an object; raises FileNotFoundError for None."""
    if value is None:
        raise paths.missing_error(file)
    return value
