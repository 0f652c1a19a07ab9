"""Storage in a file system; see `_storage.storage`."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
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

from flaxckpt import _util, errors
from flaxckpt._storage import (
    commit_marker,
    filesystem,
    leases,
    rename,
    symlinks,
    temporary,
)
from flaxckpt._storage import files as storage_files
from flaxckpt._types import JSON

_COPYING_THREADS = 8


class LocalStorage:
    """Files and directories; a checkpoint counts when renamed to the final name."""

    has_directories = True
    has_hard_links = True
    can_rename = True
    can_map = True
    costs_requests = False

    # ---- listing ------------------------------------------------------------------

    def exists(self, path: Path, /) -> bool:
        return os.path.lexists(path)

    def names(self, directory: Path, /) -> list[str]:
        return os.listdir(directory)  # noqa: PTH208

    def directories(self, directory: Path, /) -> Iterator[str]:
        return storage_files.directories(directory)

    def identity(self, path: Path, /) -> tuple[int, ...] | None:
        try:
            return storage_files.identity(path.stat())
        except OSError:
            return None

    def is_taken(self, path: Path, /) -> bool:
        return os.path.lexists(path)

    def contents(
        self, directory: Path, wanted: Callable[[str], bool], /
    ) -> dict[str, Collection[str]]:
        found: dict[str, Collection[str]] = {}
        for name in filter(wanted, list(storage_files.directories(directory))):
            try:
                found[name] = os.listdir(directory / name)  # noqa: PTH208
            except FileNotFoundError:  # just deleted
                continue
        return found

    def files_below(self, directory: Path, /) -> Iterator[str]:
        root = str(directory)
        for path, directories, names in os.walk(root):
            directories.sort()
            inside = f"{path[len(root) :].strip('/')}/".lstrip("/")
            for name in sorted(names):
                yield inside + name

    def entries_below(self, directory: Path, /) -> Iterator[tuple[str, bool]]:
        return storage_files.entries_below(str(directory), "")

    def files_and_links(self, directory: Path, /) -> dict[str, bool]:
        return storage_files.files_and_links(str(directory))

    def all_files(self, path: Path, /) -> Iterator[Path]:
        return storage_files.all_files(path)

    def known_size(self, file: Path, within: Path | None, /) -> int | None:
        descriptor = storage_files.open_regular_file(file, within=within)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def known_size_below(self, directory: Path, /) -> int:
        total = 0
        for name in self.files_below(directory):
            with contextlib.suppress(OSError):
                total += os.lstat(directory / name).st_size
        return total

    def disk_files(self, path: Path, /) -> dict[tuple[int, int], int] | None:
        return storage_files.disk_files(os.fspath(path))

    def fingerprint(self, file: Path, /) -> tuple[tuple[int, ...], int]:
        found = file.stat()
        return (found.st_ino, found.st_mtime_ns), found.st_size

    def real_path(self, path: Path, /) -> str:
        return os.path.realpath(path)

    def kind(self, path: Path, /) -> str:
        return filesystem.kind(os.fspath(path))

    def is_local(self, path: Path, /) -> bool:
        return filesystem.is_local(path)

    def free_bytes(self, path: Path, /) -> int | None:
        return shutil.disk_usage(path).free

    def check_root(self, root: Path, checkpoint: Path, /) -> int:
        return symlinks.check_root(root, checkpoint)

    def check_array(self, root: Path, name: str, checkpoint: Path, /) -> int:
        return symlinks.check_array(root, name, checkpoint)

    def check_file(self, path: Path, checkpoint: Path, /) -> None:
        symlinks.check_file(path, checkpoint)

    def kvstore(self, directory: Path, below: str, /) -> dict[str, JSON]:
        return {"driver": "file", "path": f"{directory}/{below}"}

    # ---- reading ------------------------------------------------------------------

    def read(self, file: Path, /, *, max_bytes: int) -> bytes:
        return storage_files.read(file, max_bytes=max_bytes)

    def open_file(
        self, file: Path, /, *, buffer_bytes: int = 2**13
    ) -> contextlib.AbstractContextManager[io.BufferedReader]:
        return storage_files.open_file(file, buffer_bytes=buffer_bytes)

    def digest_file(self, file: Path, /, *, max_bytes: int) -> str | None:
        return storage_files.digest_file(file, max_bytes=max_bytes)

    def stream(self, file: Path, within: Path, size: int, /) -> Iterator[memoryview]:
        return storage_files.stream(file, within)

    def read_small(self, file: Path, max_bytes: int, within: Path, /) -> bytes:
        return storage_files.read_range(file, 0, max_bytes, within=within)

    def read_range(self, file: Path, offset: int, size: int, /) -> bytes:
        return storage_files.read_range(file, offset, size)

    def read_into(self, file: Path, views: Sequence[memoryview], /) -> None:
        storage_files.read_into(file, views, within=file.parent.parent)

    def last_lines(self, file: Path, max_bytes: int, /) -> list[bytes]:
        with storage_files.open_file(file) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - max_bytes))
            found = opened.read()
        is_cut = size > max_bytes
        whole = found[: found.rfind(b"\n") + 1]
        return whole.splitlines(keepends=True)[1 if is_cut else 0 :]

    def forget_cached(self, file: Path, /) -> None:
        storage_files.forget_cached(file)

    # ---- writing ------------------------------------------------------------------

    def write(self, file: Path, content: bytes, /) -> None:
        storage_files.write(file, content)

    def replace(self, file: Path, content: bytes, /) -> None:
        storage_files.replace(file, content)

    def lock_file(self, file: Path, /) -> contextlib.AbstractContextManager[None]:
        return storage_files.lock_file(file)

    def make_directory(self, path: Path, /) -> None:
        storage_files.make_directory(path)

    def sync_directory(self, path: Path, /) -> None:
        storage_files.sync_directory(path)

    def sync_tree(self, root: Path, /) -> int:
        return storage_files.sync_tree(root)

    def remove_tree(self, path: Path, /) -> None:
        storage_files.remove_tree(path)

    def write_parts(self, file: Path, parts: Sequence[memoryview], /) -> None:
        storage_files.write_parts(file, parts)

    def append_lines(self, file: Path, lines: bytes, max_bytes: int, /) -> None:
        storage_files.append_lines(file, lines)

    def sync_files(self, paths: Iterable[Path], threads: int, /) -> None:
        _util.threads.each(storage_files.sync, list(paths), threads=threads)

    def add_directory(self, path: Path, files: Mapping[str, bytes], /) -> bool:
        is_first = True
        with temporary.new_directory(path.parent) as made:
            for name, content in files.items():
                storage_files.write(made / name, content)
            storage_files.sync_directory(made)
            try:
                made.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                is_first = False
        storage_files.sync_directory(path.parent)
        return is_first

    def withdraw_name(self, directory: Path, aside: Path, /) -> Path:
        directory.rename(aside)
        storage_files.sync_directory(directory.parent)
        return aside

    # ---- checkpoints --------------------------------------------------------------

    def is_committed(self, path: Path, /) -> bool:
        return os.path.exists(path)  # noqa: PTH110

    def is_unfinished(self, path: Path, /) -> bool:
        return False  # an unfinished save has a temporary name

    def lists_committed(
        self, names: Collection[str], unmarked: Collection[str], /
    ) -> bool:
        return True

    def temporary_directory(
        self, final: Path, /
    ) -> contextlib.AbstractContextManager[Path]:
        return temporary.new_directory(final)

    def discard(self, directory: Path, /) -> None:
        temporary.discard(directory, self.remove_tree)

    def sweep(self, directory: Path, is_ours: Callable[[str], bool], /) -> None:
        temporary.sweep(directory, is_ours)

    def sweep_files(self, directory: Path, /) -> None:
        temporary.sweep_files(directory)

    @contextlib.contextmanager
    def new_checkpoint(
        self,
        final: Path,
        /,
        *,
        overwrite: bool,
        keep: Callable[[str], bool],
        check: Callable[[Path], object],
    ) -> Iterator[Path]:
        temporary.sweep(final.parent, lambda name: name == final.name)
        with temporary.new_directory(final) as made:
            yield made

    def commit(
        self,
        made: Path,
        final: Path,
        marker: bytes,
        publish: Callable[[Path, Path], object],
        /,
    ) -> int:
        storage_files.write(made / commit_marker.MARKER, marker)
        size = storage_files.sync_tree(made)
        publish(made, final)
        return size

    def copy_checkpoint(
        self,
        source: Path,
        final: Path,
        /,
        *,
        files: Sequence[Path] | None = None,
        marks: Mapping[str, bytes] = MappingProxyType({}),
        overwrite: bool,
        keep: Callable[[str], bool] = lambda name: False,
        publish: Callable[[Path, Path], object] = rename.publish,
    ) -> int:
        if files is None:
            files = [path for path in source.rglob("*") if path.is_file()]
        with temporary.new_directory(final) as made:
            for directory in sorted({file.parent for file in files}):
                copied = made / directory.relative_to(source)
                copied.mkdir(parents=True, exist_ok=True)

            def copy(file: Path) -> None:
                shutil.copyfile(file, made / file.relative_to(source))

            _util.threads.each(copy, files, threads=_COPYING_THREADS)
            for name, content in marks.items():
                storage_files.write(made / name, content)
            size = storage_files.sync_tree(made)
            publish(made, final)
            return size

    def delete(self, path: Path, check: Callable[[Path], object], /) -> None:
        aside = temporary.new_path(path, temporary.DELETED)
        with temporary.claim(path):
            with leases.deletion(path):
                check(path)
                rename.withdraw(path, aside)
                try:
                    # A reader or a pin may have come before the rename.
                    if late := leases.readers(aside):
                        raise leases.in_use_error(path, late)
                    check(aside)
                except errors.SaveFailedError:
                    aside.rename(path)
                    storage_files.sync_directory(path.parent)
                    raise
            self.discard(aside)

    def delete_part(
        self, path: Path, name: str, announce: Callable[[], object], /
    ) -> None:
        aside = temporary.new_path(path, temporary.DELETED)
        with temporary.claim(path / name):
            with leases.deletion(path):
                announce()
                self.withdraw_name(path / name, aside)
            self.discard(aside)
