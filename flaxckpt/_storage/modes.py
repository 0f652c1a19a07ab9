"""Modes of the directories and files of a checkpoint: who may read and change them.

A mode is that of directories; files have the same without the bits to execute. Modes
are set with `chmod`, because the umask belongs to the whole process.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from flaxckpt import _util, errors
from flaxckpt._storage import files
from flaxckpt._storage.paths import RemotePath

PRIVATE = 0o700
"""Mode of an unfinished directory: nobody else opens a file before it has its mode."""

_FILE = 0o666
_ALL = 0o777


def check(permissions: object, path: Path | None = None) -> int | None:
    """Returns the mode that a user asks for at `path`; None for the umask's.

    Raises OptionError if the mode is no mode, its owner could not use the checkpoint,
    or `path` is in an object store.
    """
    if permissions is None:
        return None
    if isinstance(path, RemotePath):
        raise errors.OptionError(
            f"{path}: objects in a store have no modes, so permissions= has no effect"
            " there: leave it out, and set the access rules of the bucket"
        )
    if not isinstance(permissions, int) or isinstance(permissions, bool):
        found = _util.arguments.describe(permissions)
    elif 0 <= permissions <= _ALL and permissions & PRIVATE == PRIVATE:
        return permissions
    else:
        found = f"{permissions:#o}"
        if re.fullmatch("7[0-7]{2}", str(permissions)):
            # Python reads 750 as a decimal number.
            found = f"{permissions}, which is {found}: write 0o{permissions}"
        elif 0 <= permissions <= _ALL:
            found = f"{found}: write {permissions | PRIVATE:#o}"
    raise errors.OptionError(
        "permissions must be the mode of directories, such as 0o750, with all rights"
        f" for the owner; got {found}"
    )


def of_file(mode: int) -> int:
    return mode & _FILE


def of_directory(directory: Path) -> int | None:
    """Returns the mode of files added to a directory; None in a store."""
    if isinstance(directory, RemotePath):
        return None
    return stat.S_IMODE(os.stat(directory).st_mode) & _ALL  # noqa: PTH116


def set_on_file(file: Path | int, mode: int) -> None:
    """Sets the mode of a file in a directory with `mode`; changes nothing if equal."""
    _set(file, os.stat(file), of_file(mode))  # noqa: PTH116


def set_on_directory(directory: Path, mode: int) -> None:
    """Sets the mode, and keeps the bit of the group; raises OSError if not stored."""
    status = directory.stat()
    _set(directory, status, mode | stat.S_IMODE(status.st_mode) & ~_ALL)
    if of_directory(directory) != mode:
        raise OSError(
            errno.ENOTSUP,
            f"the file system does not store the mode {mode:#o}, so leave out"
            " permissions=",
            str(directory),
        )


def set_below(root: Path, mode: int) -> None:
    """Sets the mode of everything inside, then of `root`, or raises OSError."""
    for directory, names in files.walk_up(root):
        for name in names:
            set_on_file(Path(directory, name), mode)
        set_on_directory(Path(directory), mode)


def follow(path: Path, mode: int | None) -> None:
    """Sets `mode` on an added file or directory, if given, and where modes exist."""
    if mode is None:
        return
    try:
        if path.is_dir():
            set_below(path, mode)
        else:
            set_on_file(path, mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise


def _set(path: Path | int, status: os.stat_result, mode: int) -> None:
    if stat.S_IMODE(status.st_mode) != mode:
        os.chmod(path, mode)  # noqa: PTH101
