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

from flaxckpt import _marked, _remote, _stores, _util

_BUCKET = "flaxckpt-staging-"
_THREADS = 32
_THREADS_OF_FILES = 8  # each holds a whole one


def is_needed(root: Path) -> bool:
    """Whether `root` is in a store, and TensorStore is not to write there."""
    return _remote.is_remote(root) and not root.store.url.startswith(
        f"memory://{_BUCKET}"
    )


@contextlib.contextmanager
def staged(root: Path) -> Iterator[Path]:
    """A place in memory, for what is in `root` when the `with` block has ended.

    Raises:
        StoreError: It could not be written there.
    """
    assert _remote.is_remote(root), root
    memory = _remote.parse(f"memory://{_BUCKET}{secrets.token_hex(8)}")
    assert _remote.is_remote(memory), memory
    try:
        yield memory
        move = functools.partial(_move, memory, root)
        _util.threads.each(move, memory.keys(), threads=_THREADS)
    finally:
        memory.store.delete_under("")
        _stores.forget(memory.store)


def upload(
    directory: Path,
    final: _remote.RemotePath,
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
    marker = (directory / _marked.MARKER).read_bytes()

    def write(file: Path) -> None:
        _marked.write_new(final / file.relative_to(directory), file.read_bytes())

    if files is None:
        files = [path for path in directory.rglob("*") if path.is_file()]
    with _marked.made(final, overwrite=overwrite, keep=keep):
        rest = [file for file in files if file != directory / _marked.MARKER]
        _util.threads.each(write, rest, threads=_THREADS_OF_FILES)
        for name, content in marks.items():
            _marked.write_new(final / name, content)
        return _marked.commit(final, marker)


def _move(staging: _remote.RemotePath, root: _remote.RemotePath, key: str) -> None:
    _marked.write_new(root / key, (staging / key).read_bytes())
    (staging / key).unlink()
