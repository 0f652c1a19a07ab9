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
from flaxckpt._storage import commit_marker, paths, store_settings

_BUCKET = "flaxckpt-staging-"
_THREADS = 32


def is_needed(root: Path) -> bool:
    """Returns True for a path in a store, except in the store for `memory_directory`.

    TensorStore must not write to such a path directly.
    """
    return paths.is_remote(root) and not root.store.url.startswith(
        f"memory://{_BUCKET}"
    )


@contextlib.contextmanager
def memory_directory(root: Path) -> Iterator[Path]:
    """Yields a directory in memory, uploaded to `root` when the `with` block ends.

    Raises:
        StoreError: The upload failed.
    """
    assert paths.is_remote(root), root
    memory = paths.parse(f"memory://{_BUCKET}{secrets.token_hex(8)}")
    assert paths.is_remote(memory), memory
    try:
        yield memory

        def move(key: str) -> None:
            commit_marker.write_new(root / key, (memory / key).read_bytes())
            (memory / key).unlink()

        _util.threads.each(move, memory.keys(), threads=_THREADS)
    finally:
        memory.store.delete_under("")
        store_settings.forget(memory.store)
