"""What lies in a checkpoint, and whether symbolic links lead out of it.

Links within a checkpoint are followed, and so are hard links, which nobody can tell
from the file itself.
"""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

_LONG_BYTES = 64 * 2**20
_BEST_RATIO = 64


def check_root(root: Path, checkpoint: Path) -> int:
    """Refuses links out of a checkpoint right in the directory of its arrays.

    What is in the directories of arrays is left to `check_array`. It costs one listing
    for all arrays that are read before the directory changes.

    Args:
        root: The directory that holds the arrays, or the database of them.
        checkpoint: What no link may lead out of.

    Returns:
        The size of the database, if it is one; of other files, there are few.

    Raises:
        ValueError: A link leads out of `checkpoint`.
        OSError: There is no such directory.
    """
    status = root.stat()
    return _checked(root, checkpoint, status.st_ino, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _checked(root: Path, checkpoint: Path, inode: int, modified: int) -> int:
    del inode, modified  # keys only
    if root.is_symlink():
        _check(str(root), checkpoint)
    # The tree of a database may say that its values are anywhere below it.
    is_database = os.path.lexists(root / "manifest.ocdbt")
    return _size(str(root), checkpoint, deep=is_database)


def check_array(root: Path, name: str, checkpoint: Path) -> int:
    """Refuses links out of a checkpoint in the directory of an array.

    Returns:
        The size of all files there.

    Raises:
        ValueError: A link leads out of `checkpoint`.
        OSError: There is no such directory.
    """
    directory = f"{root}/{name}"
    if "/" in name:
        _check(directory, checkpoint)  # the listing of `root` has only the first part
    return _size(directory, checkpoint, deep=bool(name))


def check_file(path: Path, checkpoint: Path) -> None:
    """Refuses a file that is behind a link out of a checkpoint, or is no plain one.

    To open a pipe would wait for whoever writes into it.

    Raises:
        ValueError: It is refused.
    """
    at = path
    while at != checkpoint and at != at.parent:
        if at.is_symlink():
            _check(str(path), checkpoint)
            break
        at = at.parent
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no plain file")


def _size(directory: str, checkpoint: Path, *, deep: bool) -> int:
    """The size of all files in a directory, and in those below it.

    Directories behind links are looked through, too: what is in them may be a link that
    leads out.

    Raises:
        ValueError: A link leads out, or something is neither file nor directory.
    """
    size = 0
    seen: set[tuple[int, int]] = set()
    waiting = [directory]
    while waiting:
        directory = waiting.pop()
        found = os.stat(directory)  # noqa: PTH116
        if (found.st_dev, found.st_ino) in seen:
            continue
        seen.add((found.st_dev, found.st_ino))
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_symlink():
                    _check(entry.path, checkpoint)
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    _check_holes(entry.path, status)
                    size += status.st_size
                elif not stat.S_ISDIR(status.st_mode):
                    raise ValueError(f"{entry.path} is no plain file")
                elif deep:
                    waiting.append(entry.path)
    return size


def _check_holes(path: str, status: os.stat_result) -> None:
    """Refuses a long file of which next to nothing is there.

    TensorStore takes memory for all of it; no file system compresses that much.
    """
    if status.st_size > max(_LONG_BYTES, status.st_blocks * 512 * _BEST_RATIO):
        raise ValueError(f"{path} has {status.st_size} bytes, most of which are holes")


def _check(path: str, checkpoint: Path) -> None:
    if not is_inside(path, checkpoint):
        raise ValueError(f"{path} is a symbolic link that leads out of the checkpoint")


def is_inside(path: str, directory: Path) -> bool:
    """Whether `path` is in `directory` when links are followed.

    A link to itself, or to nothing, is nowhere.
    """
    found = Path(os.path.realpath(path))
    return found.exists() and f"{found}/".startswith(f"{os.path.realpath(directory)}/")
