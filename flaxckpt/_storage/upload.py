"""Uploads of TensorStore output to an object store.

TensorStore writes to memory first. The objects are then written one by one, with our
own deadlines: each is written completely or not at all, and the store refuses late
writes.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from flaxckpt import _util
from flaxckpt._storage import commit_marker, files, paths, store_settings
from flaxckpt._storage.paths import RemotePath

_BUCKET = "flaxckpt-staging-"
_THREADS = 32

_DIGESTED_BYTES = 64 * 2**20
"""Bytes up to which an upload records digests, so that nobody has to read the objects
again. Larger databases have none: they are verified value by value."""


def is_needed(root: Path) -> bool:
    """Returns True for a path in a store, except in the store for `memory_directory`.

    TensorStore must not write to such a path directly.
    """
    return paths.is_remote(root) and not root.store.url.startswith(
        f"memory://{_BUCKET}"
    )


class MemoryDirectory:
    """A directory in memory, whose files move to an object store.

    Args:
        root: The directory in the object store; None if the files are only taken.

    Attributes:
        path: The directory in memory.
    """

    def __init__(self, root: Path | None = None) -> None:
        memory = paths.parse(f"memory://{_BUCKET}{secrets.token_hex(8)}")
        assert paths.is_remote(memory), memory
        self.path: RemotePath = memory
        self._root = root
        self._taken_bytes = 0

    def take(self, prefix: str = "") -> dict[str, bytes]:
        """Removes the files whose names start with `prefix`; returns their content.

        One thread at a time may take files.
        """
        store = self.path.store
        contents = {key: (self.path / key).read_bytes() for key in store.keys(prefix)}
        store.delete_all(contents)
        self._taken_bytes += sum(map(len, contents.values()))
        return contents

    def send(self, contents: dict[str, bytes]) -> None:
        """Writes files to the object store, several at a time.

        Raises:
            StoreError: A file could not be written.
        """
        is_small = self._taken_bytes <= _DIGESTED_BYTES
        root = self._root
        assert paths.is_remote(root), root

        def write(name: str) -> None:
            content, target = contents[name], root / name
            commit_marker.write_new(target, content)
            if is_small:
                target.store.record_digest(target.key, files.digest(content))

        _util.threads.each(write, contents, threads=_THREADS)

    def clear(self) -> None:
        """Frees the memory of all files."""
        self.path.store.delete_under("")
        store_settings.forget(self.path.store)


@contextlib.contextmanager
def in_memory() -> Iterator[MemoryDirectory]:
    """Yields a directory in memory, whose files are to be taken."""
    memory = MemoryDirectory()
    try:
        yield memory
    finally:
        memory.clear()


@contextlib.contextmanager
def memory_directory(root: Path) -> Iterator[MemoryDirectory]:
    """Yields a directory in memory, uploaded to `root` when the `with` block ends.

    Raises:
        StoreError: The upload failed.
    """
    memory = MemoryDirectory(root)
    try:
        yield memory
        memory.send(memory.take())
    finally:
        memory.clear()
