"""The files below a directory, in any storage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from flaxckpt._storage import paths, storage


def files_below(directory: Path) -> list[str]:
    """Returns the relative path, with `/`, of each file or link to a file below."""
    entries = storage.of(directory).walk(directory)
    return [entry.path for entry in entries if not entry.is_directory]


def all_files(path: Path) -> Iterator[Path]:
    """Yields files at or below `path`; raises OSError for an unreadable directory."""
    if path.is_file():
        yield path
        return
    for entry in storage.of(path).walk(path, strict=True):
        if not entry.is_directory:
            yield path / entry.path


def known_size_below(directory: Path) -> int:
    """Returns the size of all files below `directory`; 0 in an object store."""
    total = 0
    if not paths.is_remote(directory):
        for name in files_below(directory):
            with contextlib.suppress(OSError):
                total += os.lstat(directory / name).st_size
    return total
