"""Files and directories of a file system: safe opening, durable writing.

A write is complete when the file, its directory, and all new parent directories are
synced. Deletion and replacement never follow symbolic links.

Checkpoint files are opened for reading by `open_regular_file`: opening a pipe never
waits for its writer, and symbolic links may be restricted to the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from flaxckpt import _util, errors
from flaxckpt._storage import symlinks

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_STREAM_BYTES = 2**20
_SYNCED_AT_ONCE = 2**20
_CALL_BYTES = 2**30
"""Maximal number of bytes that a single system call reads or writes."""

_SYNCING_THREADS = 8
_REMOVALS = 100
_REPLACING = ".tmp"
_REPLACING_NAME = re.compile(rf".+\.[0-9a-f]{{8}}{re.escape(_REPLACING)}", re.DOTALL)


def open_regular_file(path: Path | str, *, within: Path | None = None) -> int:
    """Returns the descriptor of a regular file, open for reading.

    Args:
        path: The file.
        within: Directory that must contain the target if `path` is a symbolic link.

    Raises:
        ValueError: The file is not regular, or is a link out of `within`.
        OSError: The file cannot be opened.
    """
    flags = _READ_FLAGS if within is None else _READ_FLAGS | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP or within is None:
            raise
        descriptor = -1
    if descriptor < 0 and within is not None:
        # Not in the handler: `is_unread` would take the error for one of the system.
        if not symlinks.is_inside(str(path), within):
            raise ValueError(
                f"{path} is a symbolic link that leads out of the checkpoint"
            )
        descriptor = os.open(path, _READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no plain file")
    return descriptor


def read(path: Path, *, max_bytes: int) -> bytes:
    """Returns the content of the file `path`.

    Raises:
        FileNotFoundError: The file is missing.
        DamagedCheckpointError: The file is larger than `max_bytes`, or not regular.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= max_bytes:
            content = file.read(max_bytes + 1)
            size = len(content)
        if size > max_bytes:  # the file may have grown since it was opened
            raise errors.DamagedCheckpointError(
                f"{path}: wanted a file of at most {max_bytes} bytes, found {size}"
            )
        return content


@contextlib.contextmanager
def open_file(path: Path, *, buffer_bytes: int = 2**13) -> Iterator[io.BufferedReader]:
    """Opens a regular file for reading, `buffer_bytes` at a time.

    Raises:
        FileNotFoundError: The file is missing.
        DamagedCheckpointError: The file is not regular.
    """
    try:
        descriptor = open_regular_file(path)
    except ValueError as error:
        raise errors.DamagedCheckpointError(str(error)) from None
    try:
        with io.FileIO(descriptor, closefd=False) as file:
            yield io.BufferedReader(file, buffer_bytes)
    finally:
        os.close(descriptor)


def digest_file(path: Path, *, max_bytes: int) -> str | None:
    """Returns the checksum of a file; None for a file larger than `max_bytes`.

    Raises:
        FileNotFoundError: The file is missing.
        DamagedCheckpointError: The file is not regular.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            return None
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def stream(path: Path, within: Path) -> Iterator[memoryview]:
    """Yields the content of a file in parts, each valid until the next.

    Raises:
        ValueError: The file is not regular, or is a link out of `within`.
        OSError: The file cannot be read.
    """
    buffer = memoryview(bytearray(_STREAM_BYTES))
    descriptor = open_regular_file(path, within=within)
    try:
        while size := os.readv(descriptor, [buffer]):
            yield buffer[:size]
    finally:
        os.close(descriptor)


def read_range(
    path: Path, offset: int, size: int, *, within: Path | None = None
) -> bytes:
    """Returns `size` bytes of a file from `offset`, or fewer where the file ends.

    Raises:
        ValueError: The file is not regular, or is a link out of `within`.
        OSError: The file cannot be read.
    """
    descriptor = open_regular_file(path, within=within)
    content = bytearray()
    try:
        # A call may read less than it was asked for.
        while part := os.pread(descriptor, size - len(content), offset + len(content)):
            content += part
        return bytes(content)
    finally:
        os.close(descriptor)


def read_into(path: Path, views: Sequence[memoryview], *, within: Path) -> None:
    """Fills `views` with the content of a file; the sizes must be equal.

    Raises:
        ValueError: The sizes differ, or the file is a link out of `within`.
        OSError: The file is missing, or cannot be read.
    """
    size = sum(view.nbytes for view in views)
    descriptor = open_regular_file(path, within=within)
    try:
        found = os.fstat(descriptor).st_size
        if found != size:
            raise ValueError(f"{path.name} has {found} bytes instead of {size}")
        at = 0
        for view in views:
            while view:
                count = os.preadv(descriptor, [view[:_CALL_BYTES]], at)
                if count == 0:
                    raise ValueError(f"{path.name} was cut short meanwhile")
                view = view[count:]
                at += count
    finally:
        os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    """Writes and syncs a new file; the caller syncs the directory."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """Writes `path` atomically: readers see the old content or the new.

    If several processes write at a time, the last write counts.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_REPLACING}")
    try:
        write(temporary, content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def is_replacing(name: str) -> bool:
    """Returns True for the names of temporary files of `replace`."""
    return _REPLACING_NAME.fullmatch(name) is not None


@contextlib.contextmanager
def lock_file(file: Path) -> Iterator[None]:
    """Locks a file against concurrent callers during the `with` block.

    Does nothing on a file system without file locks.

    Raises:
        OSError: The file cannot be opened.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NONBLOCK)  # NFS locks need O_RDWR
    except (PermissionError, IsADirectoryError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes `path` and the missing parents durably.

    Raises:
        OSError: A directory cannot be made, or its path is a file.
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in the directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> int:
    """Syncs every file and directory under `root`, by any writer.

    Syncs several at a time, so that the disk writes them together.

    Returns:
        The size in bytes of all files without other hard links.
    """
    sizes: list[int] = []

    def sync(path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            sizes.append(status.st_size)

    paths = [
        os.path.join(directory, name)  # noqa: PTH118
        for directory, _, files in os.walk(root, topdown=False)
        for name in (*files, "")
    ]
    _util.threads.each(sync, paths, threads=_SYNCING_THREADS)
    return sum(sizes)


def remove_tree(path: Path) -> None:
    """Removes an existing directory and everything inside.

    Raises:
        OSError: The path is a link or a file, which are never followed or removed.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a directory of ours", str(path))
    for _ in range(_REMOVALS):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
        else:
            return
    shutil.rmtree(path)  # raises the error, if no concurrent removal was the cause


def write_parts(path: Path, parts: Sequence[memoryview]) -> None:
    """Writes a new file from `parts`; syncs large files only.

    Syncing a large file here lets the disk work while other files are written. The
    caller makes the name durable, by syncing the directory.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        size = 0
        for view in parts:
            while view:
                written = os.write(descriptor, view[:_CALL_BYTES])
                view = view[written:]
                size += written
        if size >= _SYNCED_AT_ONCE:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, lines: bytes) -> None:
    """Appends whole lines in a single write; concurrent lines do not mix.

    Raises:
        OSError: `path` is not a regular file, or the lines cannot be written.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        end = os.pread(descriptor, 1, status.st_size - 1) if status.st_size else b"\n"
        # A crash or a full disk may have cut off the last line.
        content = lines if end == b"\n" else b"\n" + lines
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, "no space left", str(path))
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Syncs a file or a directory written by this process."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_cached(path: Path) -> None:
    """Drops a file from the page cache, where the system supports this."""
    if not hasattr(os, "posix_fadvise"):
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Returns device, inode, size and mtime, to identify a file and the content."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def directories(path: Path) -> Iterator[str]:
    """Yields the names of the directories in `path`, except links to directories."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name


def entries_below(directory: str, before: str) -> Iterator[tuple[str, bool]]:
    """Yields the path of each entry below `directory`, and True for files.

    Paths are relative, with `before` in front.

    Raises:
        ValueError: An entry is a link to a directory, which may lead in circles.
        OSError: A directory cannot be listed.
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            path = before + entry.name
            yield path, entry.is_file()
            if not entry.is_dir():
                continue
            if entry.is_symlink():
                raise ValueError(f"{path} is a link to a directory")
            yield from entries_below(entry.path, path + "/")


def files_and_links(root: str) -> dict[str, bool]:
    """Maps the path of each file or link below `root` to True for a link, in order."""
    found: dict[str, bool] = {}
    for path, directories, names in os.walk(root):
        inside = f"{path[len(root) :].strip('/')}/".lstrip("/")
        for name in directories + names:
            is_link = os.path.islink(f"{path}/{name}")  # noqa: PTH114
            if is_link or name not in directories:
                found[inside + name] = is_link
    return dict(sorted(found.items()))


def all_files(path: Path) -> Iterator[Path]:
    """Yields each file at or below `path`.

    Raises:
        OSError: A directory cannot be listed.
    """
    if path.is_file():
        yield path
        return
    for directory, _, names in os.walk(path, onerror=_raise):
        yield from (Path(directory, name) for name in names)


def _raise(error: OSError) -> NoReturn:
    raise error


def disk_files(root: str) -> dict[tuple[int, int], int]:
    """Maps device and inode of each regular file at or below `root` to the size.

    Does not follow links; leaves out inaccessible files.
    """
    found: dict[tuple[int, int], int] = {}
    waiting = [root]
    while waiting:
        path = waiting.pop()
        try:
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                found[status.st_dev, status.st_ino] = status.st_size
            elif stat.S_ISDIR(status.st_mode):
                waiting += [f"{path}/{name}" for name in os.listdir(path)]  # noqa: PTH208
        except OSError:
            continue
    return found


def digest(content: bytes) -> str:
    """Returns the checksum of `content`, as recorded in checkpoints."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def check_digest(name: object, found: str | None, recorded: object) -> None:
    """Compares the digest of a file with the recorded digest.

    Args:
        name: The file, for the message.
        found: Digest of the file; None if missing or too large.
        recorded: The recorded digest, not trusted.

    Raises:
        ValueError: The digests differ.
    """
    if found != recorded:
        # Twelve hexadecimal digits are enough to tell digests apart.
        wanted, have = (str(digest)[:19] for digest in (recorded, found or "none"))
        raise ValueError(
            f"{name} has changed since it was saved: wanted {wanted}, found {have}"
        )
