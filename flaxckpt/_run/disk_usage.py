"""Sizes of the files of a checkpoint on the disk."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _storage


class Usage(NamedTuple):
    """Bytes of all files, and of those not counted before; hard links count once."""

    bytes: int
    own: int


FileId = tuple[int, int]


def on_disk(path: Path, counted: set[FileId]) -> Usage | None:
    """Returns the sizes of files, and adds them to `counted`; None in object stores."""
    if _storage.of(path).costs_requests:
        return None
    sizes: dict[FileId, int] = {}
    entries = () if path.is_symlink() else _storage.of(path).walk(path)
    for file in (os.fspath(path), *[f"{path}/{entry.path}" for entry in entries]):
        with contextlib.suppress(OSError):
            status = os.lstat(file)
            if stat.S_ISREG(status.st_mode):
                sizes[status.st_dev, status.st_ino] = status.st_size
    own = sum(size for file, size in sizes.items() if file not in counted)
    counted.update(sizes)
    return Usage(sum(sizes.values()), own)
