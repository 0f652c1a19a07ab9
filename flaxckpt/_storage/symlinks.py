"""Checks of a checkpoint for symbolic links to the outside.

Links within a checkpoint are followed. So are hard links, which look like any file.
"""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

_LONG_BYTES = 64 * 2**20
_BEST_RATIO = 64


def check_root(root: Path, checkpoint: Path) -> int:
    """Checks the directory of the arrays; see `Storage.check_root`."""
    status = root.stat()
    return _check_root(root, checkpoint, status.st_ino, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _check_root(root: Path, checkpoint: Path, inode: int, modified: int) -> int:
    del inode, modified  # only keys of the cache
    if root.is_symlink():
        _check(str(root), checkpoint)
    # A database may store its values anywhere below its directory.
    is_database = os.path.lexists(root / "manifest.ocdbt")
    return _size(str(root), checkpoint, deep=is_database)


def check_array(root: Path, name: str, checkpoint: Path) -> int:
    """Checks the directory of an array; see `Storage.check_array`."""
    directory = f"{root}/{name}"
    if "/" in name:
        _check(directory, checkpoint)  # `check_root` saw only the first part of `name`
    return _size(directory, checkpoint, deep=bool(name))


def check_file(path: Path, checkpoint: Path) -> None:
    """Raises ValueError for a non-regular file, or a link out of the checkpoint.

    Call this before opening: opening a pipe would wait for its writer.
    """
    parent = path
    while parent not in (checkpoint, parent.parent):
        if parent.is_symlink():
            _check(str(path), checkpoint)
            break
        parent = parent.parent
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")


def _size(directory: str, checkpoint: Path, *, deep: bool) -> int:
    """Returns the size of the files in a directory, or also below if `deep`.

    Follows links to directories, too: these may contain links that lead out.

    Raises:
        ValueError: A link leads out, or an entry is neither file nor directory.
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
                    _check(entry.path, checkpoint)
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    _check_holes(entry.path, status)
                    size += status.st_size
                elif not stat.S_ISDIR(status.st_mode):
                    raise ValueError(f"{entry.path} is not a regular file")
                elif deep:
                    waiting.append(entry.path)
    return size


def _check_holes(path: str, status: os.stat_result) -> None:
    """Raises ValueError for a long file of almost nothing but holes.

    TensorStore would allocate memory for all of it; no file system compresses so well.
    """
    if status.st_size > max(_LONG_BYTES, status.st_blocks * 512 * _BEST_RATIO):
        raise ValueError(f"{path} has {status.st_size} bytes, most of which are holes")


def _check(path: str, checkpoint: Path) -> None:
    if not is_inside(path, checkpoint):
        raise ValueError(f"{path} is a symbolic link that leads out of the checkpoint")


def is_inside(path: str, directory: Path) -> bool:
    """Returns True if `path`, with links resolved, exists in `directory`.

    False for a link to itself, or to a missing target.
    """
    target = Path(os.path.realpath(path))
    parent = os.path.realpath(directory)
    return target.exists() and f"{target}/".startswith(f"{parent}/")
