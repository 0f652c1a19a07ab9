"""Storage in an object store; see `_storage.storage`."""

from __future__ import annotations

import contextlib
import errno
import zlib
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from types import MappingProxyType

from flaxckpt import errors
from flaxckpt._storage import commit_marker, leases, local, locks, rename, upload
from flaxckpt._storage.paths import RemotePath
from flaxckpt._types import JSON

_APPEND_TRIES = 20


class ObjectStorage:
    """Objects under keys: a checkpoint counts when its commit marker is written."""

    has_directories = False
    has_hard_links = False
    can_rename = False
    can_map = False
    costs_requests = True
    commits_by_marker = True

    # ---- what is there ------------------------------------------------------------

    def is_taken(self, path: RemotePath, /) -> bool:
        return path.is_file()

    def contents(
        self, directory: RemotePath, wanted: Callable[[str], bool], /
    ) -> dict[str, Collection[str]]:
        return {name: found for name, found in directory.tree().items() if wanted(name)}

    def files_below(self, directory: RemotePath, /) -> Iterator[str]:
        return iter(directory.keys())

    def entries_below(self, directory: RemotePath, /) -> Iterator[tuple[str, bool]]:
        return ((key, True) for key in self.files_below(directory))

    def files_and_links(self, directory: RemotePath, /) -> dict[str, bool]:
        keys = self.files_below(directory)
        return {key: False for key in sorted(keys) if not key.endswith("/")}

    def all_files(self, path: RemotePath, /) -> Iterator[Path]:
        yield path
        yield from (path / key for key in self.files_below(path))

    def known_size(self, file: RemotePath, within: RemotePath | None, /) -> int | None:
        return None

    def known_size_below(self, directory: RemotePath, /) -> int:
        return 0

    def disk_files(self, path: RemotePath, /) -> dict[tuple[int, int], int] | None:
        return None

    def fingerprint(self, file: RemotePath, /) -> tuple[tuple[int, ...], int]:
        content = file.read_bytes()
        return (zlib.crc32(content),), len(content)

    def real_path(self, path: RemotePath, /) -> str:
        return str(path)

    def kind(self, path: RemotePath, /) -> str:
        return "object store"

    def kvstore(self, directory: RemotePath, below: str, /) -> dict[str, JSON]:
        return directory.store.connection.spec(directory.prefix + below)

    # ---- reading ------------------------------------------------------------------

    def stream(
        self, file: RemotePath, within: RemotePath, size: int, /
    ) -> Iterator[memoryview]:
        return map(memoryview, file.pieces(size))

    def read_small(
        self, file: RemotePath, max_bytes: int, within: RemotePath, /
    ) -> bytes:
        return file.read_bytes()

    def read_range(self, file: RemotePath, offset: int, size: int, /) -> bytes:
        return file.store.part(file.key, offset, offset + size) or b""

    def read_into(self, file: RemotePath, views: Sequence[memoryview], /) -> None:
        size, found = sum(view.nbytes for view in views), 0
        views = [view for view in views if view]
        for part in file.pieces(size):
            found += len(part)
            left = memoryview(part)
            while views and left:
                count = min(len(left), len(views[0]))
                views[0][:count] = left[:count]
                left, views[0] = left[count:], views[0][count:]
                views = views if views[0] else views[1:]
        if found != size:
            raise ValueError(f"{file.name} has {found} bytes instead of {size}")

    def last_lines(self, file: RemotePath, max_bytes: int, /) -> list[bytes]:
        return file.read_bytes().splitlines(keepends=True)

    def forget_cached(self, file: RemotePath, /) -> None:
        return

    # ---- writing ------------------------------------------------------------------

    def write_parts(self, file: RemotePath, parts: Sequence[memoryview], /) -> None:
        commit_marker.write_new(file, b"".join(parts))

    def append_lines(self, file: RemotePath, lines: bytes, max_bytes: int, /) -> None:
        for _ in range(_APPEND_TRIES):
            found = file.store.read(file.key)
            if found is None:
                if file.store.create(file.key, lines) is not None:
                    return
                continue
            content = found.value + lines
            if len(content) > max_bytes:
                content = content[-max_bytes // 2 :].partition(b"\n")[2]
            if file.store.exchange(file.key, content, found.generation) is not None:
                return
        raise OSError(errno.EAGAIN, "others write all the time", str(file))

    def sync_files(self, paths: Iterable[RemotePath], threads: int, /) -> None:
        return  # an object is durable when it is written

    def add_directory(self, path: RemotePath, files: Mapping[str, bytes], /) -> bool:
        for name, content in files.items():
            (path / name).write_bytes(content)
        return True

    def withdraw_name(self, directory: RemotePath, aside: RemotePath, /) -> RemotePath:
        return directory

    # ---- checkpoints --------------------------------------------------------------

    def is_committed(self, path: RemotePath, /) -> bool:
        return commit_marker.is_committed(path)

    def is_unfinished(self, path: RemotePath, /) -> bool:
        return commit_marker.is_unfinished(path)

    def lists_committed(
        self, names: Collection[str], unmarked: Collection[str], /
    ) -> bool:
        if commit_marker.MARKER in names:
            return len(names) > 1  # it came late, and alone
        return not any(name in names for name in unmarked)

    @contextlib.contextmanager
    def new_checkpoint(
        self,
        final: RemotePath,
        /,
        *,
        overwrite: bool,
        keep: Callable[[str], bool],
        check: Callable[[Path], object],
    ) -> Iterator[Path]:
        if overwrite and commit_marker.is_committed(final):
            check(final)  # which is removed at once
        with commit_marker.made(final, overwrite=overwrite, keep=keep) as made:
            yield made

    def commit(
        self,
        made: RemotePath,
        final: RemotePath,
        marker: bytes,
        publish: Callable[[Path, Path], object],
        /,
    ) -> int:
        return commit_marker.commit(made, marker)

    def copy_checkpoint(
        self,
        source: Path,
        final: RemotePath,
        /,
        *,
        files: Sequence[Path] | None = None,
        marks: Mapping[str, bytes] = MappingProxyType({}),
        overwrite: bool,
        keep: Callable[[str], bool] = lambda name: False,
        publish: Callable[[Path, Path], object] = rename.publish,
    ) -> int:
        return upload.upload(
            source, final, files=files, marks=marks, overwrite=overwrite, keep=keep
        )

    def delete(self, path: RemotePath, check: Callable[[Path], object], /) -> None:
        with locks.held(path) as lock, leases.deletion(path):
            check(path)
            marker = commit_marker.withdraw(path)
            try:
                # Whoever came before it lost its marker is seen now.
                if late := leases.readers(path):
                    raise leases.in_use(path, late)
                check(path)
            except errors.SaveFailedError:
                commit_marker.put_back(path, marker)
                raise
            commit_marker.remove(lock)

    def delete_part(
        self, path: RemotePath, name: str, announce: Callable[[], object], /
    ) -> None:
        with leases.deletion(path):
            announce()
            local.remove_tree(path / name)
