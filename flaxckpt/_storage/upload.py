"""Uploads of TensorStore output to an object store.

TensorStore writes to memory first. The objects are then written one by one, with our
own deadlines: each is written completely or not at all, and the store refuses late
writes.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from flaxckpt import _util
from flaxckpt._storage import commit_marker, paths, store_settings

_BUCKET = "flaxckpt-staging-"
_THREADS = 32
_THREADS_OF_FILES = 8  # each holds a whole file


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
        move = functools.partial(_move, memory, root)
        _util.threads.each(move, memory.keys(), threads=_THREADS)
    finally:
        memory.store.delete_under("")
        store_settings.forget(memory.store)


def upload(
    directory: Path,
    final: paths.RemotePath,
    *,
    overwrite: bool,
    files: Sequence[Path] | None = None,
    marks: Mapping[str, bytes] = MappingProxyType({}),
    keep: Callable[[str], bool] = lambda name: False,
) -> int:
    """Uploads a local checkpoint to an object store and commits the upload.

    Args:
        directory: The local checkpoint.
        final: The uploaded checkpoint.
        overwrite: Whether to replace an existing checkpoint.
        files: Files of the directory to upload; by default all.
        marks: Additional files, by name.
        keep: Selects files of the replaced checkpoint to keep, by name.

    Returns:
        Number of bytes written.

    Raises:
        CheckpointExistsError: The checkpoint exists, or another process writes it.
        StoreError: The upload failed.
    """
    marker = (directory / commit_marker.MARKER).read_bytes()

    def write(file: Path) -> None:
        commit_marker.write_new(final / file.relative_to(directory), file.read_bytes())

    if files is None:
        files = [path for path in directory.rglob("*") if path.is_file()]
    with commit_marker.new_checkpoint(final, overwrite=overwrite, keep=keep):
        rest = [file for file in files if file != directory / commit_marker.MARKER]
        _util.threads.each(write, rest, threads=_THREADS_OF_FILES)
        for name, content in marks.items():
            commit_marker.write_new(final / name, content)
        return commit_marker.commit(final, marker)


def _move(staging: paths.RemotePath, root: paths.RemotePath, key: str) -> None:
    commit_marker.write_new(root / key, (staging / key).read_bytes())
    (staging / key).unlink()
