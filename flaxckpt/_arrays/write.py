"""Writes arrays from host memory into a database, within a byte budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from flaxckpt._arrays import to_host
from flaxckpt._arrays.chunks_to_write import (
    DEFAULT_CONCURRENT_BYTES,
    Count,
    WriteOptions,
)
from flaxckpt._arrays.to_host import HostArray
from flaxckpt._arrays.write_database import (
    DatabaseWriter,
    choose_sizes,
    file_sizes,
    make_index,
    writer,
)
from flaxckpt._arrays.written import Checksums, Previous, Written

__all__ = [
    "DEFAULT_CONCURRENT_BYTES",
    "Checksums",
    "Count",
    "Previous",
    "WriteOptions",
    "Written",
    "choose_sizes",
    "file_sizes",
    "make_index",
    "write",
    "writer",
]


def write(
    root: Path,
    arrays: Iterable[HostArray],
    options: WriteOptions,
    *,
    observe: Callable[[list[HostArray]], object] | None = None,
) -> Written:
    """Writes the files of a database of zarr arrays, except its index.

    `make_index` makes the index after all processes have written. Arrays on devices are
    moved to the host in batches, and their memory is freed; `observe` is called with
    the arrays of each batch after the write, while they are in host memory. Raises
    OSError or ValueError if an array could not be written.
    """
    at_once = min(options.max_concurrent_bytes, to_host.STAGED_BYTES)
    with contextlib.closing(to_host.staged(arrays, at_once)) as staged:
        batches: Iterable[list[HostArray]]
        batches = staged if observe is None else _observed(staged, observe)
        return DatabaseWriter(root, options).write(batches)


def _observed(
    batches: Iterable[list[HostArray]], observe: Callable[[list[HostArray]], object]
) -> Iterator[list[HostArray]]:
    """Yields the batches; calls `observe` with each when the caller has written it."""
    for batch in batches:
        yield batch
        observe(batch)
