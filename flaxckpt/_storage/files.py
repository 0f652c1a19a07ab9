"""System calls on files and directories: safe opening, syncing, removal.

Checkpoint files are opened for reading by `open_regular_file`: opening a pipe never
waits for its writer, and symbolic links may be restricted to the checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from flaxckpt._storage import symlinks

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_REMOVALS = 100

REPLACING = ".tmp"
"""Suffix of the temporary files of `Storage.replace`, after a random part."""

_REPLACING_NAME = re.compile(rf".+\.[0-9a-f]{{8}}{re.escape(REPLACING)}", re.DOTALL)


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
        raise ValueError(f"{path} is not a regular file")
    return descriptor


def is_replacing(name: str) -> bool:
    """Returns True for the name of a temporary file of `Storage.replace`."""
    return _REPLACING_NAME.fullmatch(name) is not None


def sync_directory(path: Path) -> None:
    """Makes the names in the directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
