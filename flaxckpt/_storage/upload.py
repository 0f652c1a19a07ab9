"""What only TensorStore can write, on its way to an object store.

It is written into memory first, and then object by object, with our own deadlines: so
each is written whole or not at all, and what comes late is refused by the store.
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
_THREADS_OF_FILES = 8  # each holds a whole one


def is_needed(root: Path) -> bool:
    """Whether `root` is in a store, and TensorStore is not to write there."""
    return paths.is_remote(root) and not root.store.url.startswith(
        f"memory://{_BUCKET}"
    )


@contextlib.contextmanager
def staged(root: Path) -> Iterator[Path]:
    """A place in memory, for what is in `root` when the `with` block has ended.

    Raises:
        StoreError: It could not be written there.
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
    """Makes a checkpoint of the files in a directory, and commits it.

    Args:
        directory: Of a checkpoint of ours, on this machine.
        final: Where it shall be.
        overwrite: Whether to replace one that is there.
        files: Of the directory; by default all.
        marks: More files, by name.
        keep: What stays of a checkpoint that is replaced, by name.

    Returns:
        Bytes that were written.

    Raises:
        CheckpointExistsError: One is there, or somebody writes it.
        StoreError: It could not be written there.
    """
    marker = (directory / commit_marker.MARKER).read_bytes()

    def write(file: Path) -> None:
        commit_marker.write_new(final / file.relative_to(directory), file.read_bytes())

    if files is None:
        files = [path for path in directory.rglob("*") if path.is_file()]
    with commit_marker.made(final, overwrite=overwrite, keep=keep):
        rest = [file for file in files if file != directory / commit_marker.MARKER]
        _util.threads.each(write, rest, threads=_THREADS_OF_FILES)
        for name, content in marks.items():
            commit_marker.write_new(final / name, content)
        return commit_marker.commit(final, marker)


def _move(staging: paths.RemotePath, root: paths.RemotePath, key: str) -> None:
    commit_marker.write_new(root / key, (staging / key).read_bytes())
    (staging / key).unlink()
