"""Storage in a file system; see `_storage.storage`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import operator
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from flaxckpt import _util, errors
from flaxckpt._storage import files, modes, temporary
from flaxckpt._storage.stored_value import WalkedEntry, WrittenMarker
from flaxckpt._types import JSON

_STREAM_BYTES = 2**20
_CALL_BYTES = 2**30
"""Maximal number of bytes that a single system call reads."""

_WRITTEN_AT_ONCE = 2**18
"""Maximal number of bytes that a single system call writes. For larger writes, Linux
takes larger pieces of fresh memory into the page cache, which cost it more time."""

_SMALL_BYTES = 2**14
"""A smaller part is copied, to be written with others by one system call."""

_SYNCED_AT_ONCE = 2**20
_SYNCING_THREADS = 8
_COPYING_THREADS = 8


class LocalStorage:
    """Files and directories; a checkpoint counts when renamed to the final name.

    A write is complete when the file, its directory and all new parents are synced.
    Deletion and replacement never follow symbolic links.
    """

    can_map = True
    can_rename = True
    costs_requests = False

    # ---- listing ------------------------------------------------------------------

    def exists(self, path: Path, /) -> bool:
        return os.path.lexists(path)

    def names(self, directory: Path, /) -> list[str]:
        return os.listdir(directory)  # noqa: PTH208

    directories = staticmethod(files.directories)

    def identity(self, path: Path, /) -> tuple[int, ...] | None:
        try:
            return files.identity(path.stat())
        except OSError:
            return None

    is_taken = exists

    def contents(
        self, directory: Path, select: Callable[[str], bool], /
    ) -> dict[str, Collection[str] | None]:
        contents: dict[str, Collection[str] | None] = {}
        for name in filter(select, list(self.directories(directory))):
            try:
                contents[name] = os.listdir(directory / name)  # noqa: PTH208
            except FileNotFoundError:  # just deleted
                continue
            except OSError:  # one unreadable directory does not hide the others
                contents[name] = None
        return contents

    def walk(
        self, directory: Path, /, *, strict: bool = False
    ) -> Iterator[WalkedEntry]:
        waiting = [""]
        while waiting:
            inside = waiting.pop()
            try:
                with os.scandir(f"{directory}/{inside}") as found:
                    entries = sorted(found, key=operator.attrgetter("name"))
            except OSError:
                if strict:
                    raise
                continue
            rows = [_entry(inside, entry) for entry in entries]
            yield from rows
            waiting += [
                f"{row.path}/"
                for row in reversed(rows)
                if row.is_directory and not row.is_link
            ]

    def known_size(self, file: Path, within: Path | None, /) -> int | None:
        descriptor = files.open_regular_file(file, within=within)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def fingerprint(self, file: Path, /) -> tuple[tuple[int, ...], int]:
        status = file.stat()
        return (status.st_ino, status.st_mtime_ns), status.st_size

    check_root = staticmethod(files.check_root)
    check_array = staticmethod(files.check_array)
    check_file = staticmethod(files.check_file)

    def kvstore(self, directory: Path, below: str, /) -> dict[str, JSON]:
        return {"driver": "file", "path": f"{directory}/{below}"}

    # ---- reading ------------------------------------------------------------------

    def read(self, file: Path, /, *, max_bytes: int) -> bytes:
        with self.open_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size <= max_bytes:
                content = opened.read(max_bytes + 1)
                size = len(content)
            if size > max_bytes:  # the file may have grown since it was opened
                raise errors.DamagedCheckpointError(
                    f"{file}: wanted a file of at most {max_bytes} bytes, found {size}"
                )
            return content

    def open_file(
        self, file: Path, /, *, buffer_bytes: int = 2**13
    ) -> io.BufferedReader:
        try:
            descriptor = files.open_regular_file(file)
        except ValueError as error:
            raise errors.DamagedCheckpointError(str(error)) from None
        return io.BufferedReader(io.FileIO(descriptor), buffer_bytes)

    def digest_file(self, file: Path, /, *, max_bytes: int) -> str | None:
        with self.open_file(file) as opened:
            if os.fstat(opened.fileno()).st_size > max_bytes:
                return None
            return "sha256:" + hashlib.file_digest(opened, "sha256").hexdigest()

    def stream(self, file: Path, within: Path, size: int, /) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(_STREAM_BYTES))
        descriptor = files.open_regular_file(file, within=within)
        try:
            while count := os.readv(descriptor, [buffer]):
                yield buffer[:count]
        finally:
            os.close(descriptor)

    def read_small(self, file: Path, max_bytes: int, within: Path, /) -> bytes:
        return self.read_range(file, 0, max_bytes, within=within)

    def read_range(
        self, file: Path, offset: int, size: int, /, *, within: Path | None = None
    ) -> bytes:
        descriptor = files.open_regular_file(file, within=within)
        parts: list[bytes] = []
        read = 0
        try:
            # A call may read less than it was asked for.
            while part := os.pread(descriptor, size - read, offset + read):
                parts.append(part)
                read += len(part)
            return b"".join(parts)  # no copy of a single part
        finally:
            os.close(descriptor)

    def read_end(self, file: Path, size: int, /) -> bytes:
        with self.open_file(file) as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - size))
            return opened.read(size)

    def read_into(
        self,
        file: Path,
        views: Sequence[memoryview],
        /,
        *,
        offset: int,
        file_size: int | None,
    ) -> None:
        descriptor = files.open_regular_file(file, within=file.parent.parent)
        try:
            size = os.fstat(descriptor).st_size
            if size != file_size and file_size is not None:
                raise ValueError(f"{file.name} has {size} bytes instead of {file_size}")
            for view in views:
                while view:
                    count = os.preadv(descriptor, [view[:_CALL_BYTES]], offset)
                    if count == 0:
                        raise ValueError(f"{file.name} was truncated during the read")
                    view = view[count:]
                    offset += count
        finally:
            os.close(descriptor)

    def last_lines(self, file: Path, max_bytes: int, /) -> list[bytes]:
        with self.open_file(file) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - max_bytes))
            content = opened.read()
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        return lines[1:] if size > max_bytes else lines

    # ---- writing ------------------------------------------------------------------

    def write(self, file: Path, content: bytes, /) -> None:
        _write_new(file, content, None)

    def replace(
        self, file: Path, content: bytes, /, *, mode: int | None = None
    ) -> None:
        new = files.temporary_file(file)
        try:
            _write_new(new, content, mode)
            new.replace(file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        self.sync_directory(file.parent)

    def write_marker(
        self, file: Path, content: bytes, /, *, mode: int | None = None
    ) -> WrittenMarker:
        self.replace(file, content, mode=mode)

        def undo() -> None:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
                self.sync_directory(file.parent)

        return WrittenMarker(is_new=True, undo=undo)

    @contextlib.contextmanager
    def lock_file(self, file: Path, checkpoint: Path, /) -> Iterator[None]:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_NONBLOCK)  # NFS needs O_RDWR
        except (PermissionError, IsADirectoryError):
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path, /, *, mode: int | None = None) -> None:
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            _make(directory, mode)
            self.sync_directory(directory.parent)

    sync_directory = staticmethod(files.sync_directory)
    remove_tree = staticmethod(files.remove_tree)

    def sync_tree(self, root: Path, /) -> int:
        sizes: list[int] = []
        sync = functools.partial(_sync, sizes=sizes)
        paths = [
            os.path.join(directory, name)  # noqa: PTH118
            for directory, names in files.walk_up(root)
            for name in (*names, "")
        ]
        # Several at a time, so that the disk writes them together.
        _util.threads.each(sync, paths, threads=_SYNCING_THREADS)
        return sum(sizes)

    def write_files(self, root: Path, contents: Mapping[str, bytes], /) -> None:
        # One file of each directory stands for all.
        inside = {name.rpartition("/")[0]: name for name in contents if "/" in name}
        for name in inside.values():
            files.make_parents(root, name)
        for name, content in contents.items():
            self.write_parts(root / name, [memoryview(content)])

    def copy_file(self, source: Path, target: Path, /) -> None:
        shutil.copyfile(source, target)

    def write_parts(self, file: Path, parts: Sequence[memoryview], /) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(file, flags, 0o666)
        try:
            size = 0
            for view in parts if len(parts) == 1 else _join_small(parts):
                while view:
                    written = os.write(descriptor, view[:_WRITTEN_AT_ONCE])
                    view = view[written:]
                    size += written
            # Syncing a large file now lets the disk work while others are written.
            if size >= _SYNCED_AT_ONCE:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def append_lines(
        self, file: Path, lines: bytes, max_bytes: int, /, *, mode: int | None = None
    ) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        bits = 0o666 if mode is None else modes.of_file(modes.PRIVATE)
        descriptor = os.open(file, flags | os.O_NOFOLLOW, bits)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(file))
            if mode is not None and status.st_uid == os.geteuid():
                modes.set_on_file(descriptor, mode)
            size = status.st_size
            end = os.pread(descriptor, 1, size - 1) if size else b"\n"
            # A crash or a full disk may have cut off the last line.
            content = lines if end == b"\n" else b"\n" + lines
            # In a single write: concurrent lines do not mix.
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, "no space left", str(file))
        finally:
            os.close(descriptor)

    def sync_files(self, paths: Iterable[Path], threads: int, /) -> None:
        sync = functools.partial(_sync, sizes=[])
        _util.threads.each(sync, paths, threads=threads)

    def add_directory(self, path: Path, files: Mapping[str, bytes], /) -> bool:
        is_first = True
        mode = modes.of_directory(path.parent)
        with temporary.new_directory(path.parent, mode) as new:
            for name, content in files.items():
                self.write(new / name, content)
            modes.follow(new, mode)
            self.sync_directory(new)
            try:
                new.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                is_first = False
        self.sync_directory(path.parent)
        return is_first


def _entry(inside: str, entry: os.DirEntry[str]) -> WalkedEntry:
    path, is_link = inside + entry.name, entry.is_symlink()
    try:
        return WalkedEntry(path, entry.is_dir(), entry.is_file(), is_link)
    except OSError:  # such as a link to itself
        return WalkedEntry(path, False, False, is_link)


def _join_small(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yields parts of a file, small ones together: each call of `write` costs."""
    waiting: list[memoryview] = []
    size = 0
    for part in parts:
        if len(part) >= _SMALL_BYTES or size >= _WRITTEN_AT_ONCE:
            yield memoryview(b"".join(waiting))
            waiting, size = [], 0
        if len(part) >= _SMALL_BYTES:
            yield part
        else:
            waiting.append(part)
            size += len(part)
    yield memoryview(b"".join(waiting))


def _write_new(file: Path, content: bytes, mode: int | None) -> None:
    """Writes and syncs a new file; sets its mode before it writes the content."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    bits = 0o666 if mode is None else modes.of_file(modes.PRIVATE)
    with open(os.open(file, flags, bits), "wb") as opened:  # noqa: PTH123
        modes.follow(file, mode)
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _make(directory: Path, mode: int | None) -> None:
    """Makes a directory; one that another process made meanwhile keeps its mode."""
    if mode is None:
        directory.mkdir(exist_ok=True)
        return
    try:
        directory.mkdir(modes.PRIVATE)
    except FileExistsError:
        if not directory.is_dir():
            raise
    else:
        modes.set_on_directory(directory, mode)


def _sync(path: Path | str, *, sizes: list[int]) -> None:
    """Syncs a file or a directory; adds the size of a file without other hard links."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        sizes.append(status.st_size)
