"""Directories in memory, for TensorStore to write to."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from flaxckpt._storage import paths, store_settings
from flaxckpt._storage.paths import RemotePath


@contextlib.contextmanager
def new() -> Iterator[RemotePath]:
    """Yields an empty directory in memory, which is freed in the end."""
    memory = paths.parse(f"memory://flaxckpt-{secrets.token_hex(8)}")
    assert paths.is_remote(memory), memory
    try:
        yield memory
    finally:
        memory.store.delete_under("")
        store_settings.forget(memory.store)


def take_files(directory: RemotePath) -> Iterator[tuple[str, bytes]]:
    """Yields the files of a directory in memory, name and content, and removes each."""
    for name in directory.store.keys(""):
        content = (directory / name).read_bytes()
        directory.store.delete((directory / name).key)
        yield name, content
