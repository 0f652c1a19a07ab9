"""System calls on files and directories: safe opening, checks, syncing, removal.

Opening a pipe never waits for its writer. Symbolic links within a checkpoint are
followed, links out of it are refused. Hard links look like any file.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import NoReturn

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_REMOVALS = 100

_LONG_BYTES = 64 * 2**20
_BEST_RATIO = 64
"""No file system compresses a long file to a smaller part than `1 / _BEST_RATIO`."""

_TEMPORARY = re.compile(r".+\.[0-9a-f]{8}\.tmp", re.DOTALL)


def open_regular_file(path: Path | str, *, within: Path | None = None) -> int:
    """Opens a file to read; raises ValueError if it is not regular, or a link out."""
    flags = _READ_FLAGS if within is None else _READ_FLAGS | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP or within is None:
            raise
        descriptor = -1
    if descriptor < 0 and within is not None:
        # Not in the handler: `is_unread` would take the error for one of the system.
        _check_link(str(path), within)
        descriptor = os.open(path, _READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return descriptor


# ---- links out of a checkpoint -------------------------------------------------------


def check_root(root: Path, checkpoint: Path) -> int:
    """Checks the directory of the arrays; see `Storage.check_root`."""
    status = root.stat()
    return _check_root(root, checkpoint, status.st_ino, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _check_root(root: Path, checkpoint: Path, inode: int, modified: int) -> int:
    del inode, modified  # only keys of the cache
    if root.is_symlink():
        _check_link(str(root), checkpoint)
    # A database may store its values anywhere below its directory.
    is_database = os.path.lexists(root / "manifest.ocdbt")
    return _checked_size(str(root), checkpoint, deep=is_database)


def check_array(root: Path, name: str, checkpoint: Path) -> int:
    """Checks the directory of an array; see `Storage.check_array`."""
    directory = f"{root}/{name}"
    if "/" in name:
        # `check_root` saw only the first part of `name`.
        _check_link(directory, checkpoint)
    return _checked_size(directory, checkpoint, deep=bool(name))


def check_file(path: Path, checkpoint: Path) -> None:
    """Raises ValueError for a pipe or a link outside: call this before opening."""
    parent = path
    while parent not in (checkpoint, parent.parent):
        if parent.is_symlink():
            _check_link(str(path), checkpoint)
            break
        parent = parent.parent
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")


def _checked_size(directory: str, checkpoint: Path, *, deep: bool) -> int:
    """Returns the size of the files in a directory, or also below if `deep`.

    Follows links to directories, and raises ValueError if any link leads out.
    """
    size = 0
    seen: set[tuple[int, int]] = set()
    waiting = [directory]
    while waiting:
        directory = waiting.pop()
        status = os.stat(directory)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_symlink():
                    _check_link(entry.path, checkpoint)
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    # A long file of almost nothing but holes: TensorStore would
                    # allocate memory for all of it.
                    most = max(_LONG_BYTES, status.st_blocks * 512 * _BEST_RATIO)
                    if status.st_size > most:
                        raise ValueError(
                            f"{entry.path} has {status.st_size} bytes, most of which"
                            " are holes"
                        )
                    size += status.st_size
                elif not stat.S_ISDIR(status.st_mode):
                    raise ValueError(f"{entry.path} is not a regular file")
                elif deep:
                    waiting.append(entry.path)
    return size


def _check_link(path: str, directory: Path) -> None:
    """Raises ValueError unless `path`, with links resolved, exists in `directory`."""
    target = Path(os.path.realpath(path))
    parent = os.path.realpath(directory)
    if not target.exists() or not f"{target}/".startswith(f"{parent}/"):
        raise ValueError(f"{path} is a symbolic link that leads out of the checkpoint")


# ---- changes -------------------------------------------------------------------------


def temporary_file(file: Path) -> Path:
    """Returns a new path beside `file`, which `sweep_files` removes after a crash."""
    return file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def sync_directory(path: Path) -> None:
    """Makes the names in the directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_if(old: Path, new: Path, is_equal: Callable[[], bool]) -> bool:
    """Links `new` to the regular file `old` if `is_equal`; returns True if done."""
    try:
        if not stat.S_ISREG(os.lstat(old).st_mode) or not is_equal():
            return False
        os.link(old, new, follow_symlinks=False)
    # No support of the file system or the platform, too many links, or `old` is gone.
    except (OSError, NotImplementedError, AttributeError):
        return False
    return True


def make_parents(root: Path, file: PurePath | str) -> None:
    """Makes directories below `root`, or raises FileNotFoundError if it was removed."""
    for parent in reversed(PurePath(file).parents[:-1]):
        (root / parent).mkdir(exist_ok=True)


def is_file(path: Path) -> bool:
    """Returns True for a file, or a link to one; raises OSError if that is unknown."""
    # `Path.is_file` of Python 3.14 returns False then.
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False


def walk_up(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each directory from the bottom up, with its files; raises OSError."""
    for directory, _, names in os.walk(root, topdown=False, onerror=_raise):
        yield directory, names


def _raise(error: OSError) -> NoReturn:
    raise error


def remove_tree(path: Path) -> None:
    """Removes a directory; raises OSError for a link or a file, and keeps it."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
    for _ in range(_REMOVALS):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
        else:
            return
    shutil.rmtree(path)  # raises the error, if no concurrent removal was the cause


def identity(status: os.stat_result) -> tuple[int, ...]:
    """Returns device, inode, size and mtime, to identify a file and the content."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def directories(path: Path) -> Iterator[str]:
    """Yields the names of the directories in `path`, except links to directories."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name


def digest(content: bytes) -> str:
    """Returns the checksum of `content`, as recorded in checkpoints."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def check_digest(name: object, digest: str | None, recorded: object) -> None:
    """Raises ValueError unless `digest` is the recorded one, which is not trusted."""
    if digest != recorded:
        pair = str(recorded) or "none", digest or "none"
        # Twelve hexadecimal digits tell files apart; a damaged record may share them.
        differ = (n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
        same = next(differ, min(map(len, pair)))
        first = same - 4 if same >= len("sha256:") + 12 else 0
        wanted, found = (("…" if first else "") + d[first : first + 19] for d in pair)
        raise ValueError(
            f"{name} has changed since it was saved: wanted {wanted}, found {found}"
        )
