"""Writes arrays from host memory into a database, within a byte budget."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from flaxckpt import _storage, _util
from flaxckpt._arrays import to_host
from flaxckpt._arrays.stored_chunks import (
    DEFAULT_CONCURRENT_BYTES,
    Count,
    Target,
    is_raw,
)
from flaxckpt._arrays.to_host import HostArray
from flaxckpt._arrays.write_database import (
    DatabaseWriter,
    choose_sizes,
    make_index,
)
from flaxckpt._arrays.written import Checksums, Previous, Written
from flaxckpt._arrays.zarr.metadata import Encoding
from flaxckpt._util.pace import Pace

__all__ = [
    "DEFAULT_CONCURRENT_BYTES",
    "Checksums",
    "Count",
    "Previous",
    "Written",
    "choose_sizes",
    "is_raw",
    "make_index",
    "write",
]


def write(
    root: Path,
    arrays: Iterable[HostArray],
    *,
    encoding: Encoding,
    previous: Previous | None = None,
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES,
    count: Count = _util.progress.ignore,
    writer: int | None = None,
    segment_bytes: int = sys.maxsize,
    pace: Pace | None = None,
    observe: Callable[[list[HostArray]], object] | None = None,
    batch: int | None = None,
    total_bytes: int = 0,
) -> Written:
    """Writes the files of a database of zarr arrays, except its index.

    `make_index` makes the index after all processes have written.

    Args:
        root: A directory without arrays of these names.
        arrays: The arrays to write. Arrays on devices are moved to the host in batches,
            and their memory is freed.
        encoding: Encoding of the chunks.
        previous: An earlier checkpoint on the same file system. Equal files are linked
            instead of written.
        max_concurrent_bytes: Bytes copied or passed to TensorStore and not yet written.
            A larger array is written alone.
        count: Called with the bytes of written values, as in memory.
        writer: Index of this process, if other processes write other chunks or arrays
            to the same `root`; otherwise None. Process 0 writes the metadata of all
            arrays.
        segment_bytes: Bytes of the segments of chunks that are verified on their own.
        pace: The pace of the threads that write chunk files to a disk; None for full
            speed. Threads of TensorStore serve the whole program, so they have none.
        observe: Called with the arrays of each batch after the write, while they are in
            host memory; None for no call.
        batch: Number of these parts of the arrays, if other calls write others; None
            for whole arrays.
        total_bytes: Bytes of all arrays of the checkpoint, by all calls and processes,
            which decide about the files.

    Raises:
        OSError, ValueError: An array could not be written.
    """
    context = _storage.store_requests.context()
    if not _storage.of(root).has_hard_links:
        previous = None
    target = Target(
        root,
        encoding,
        context,
        max_concurrent_bytes,
        count,
        previous,
        writer,
        segment_bytes,
        pace,
        batch,
        total_bytes,
    )
    at_once = min(max_concurrent_bytes, to_host.STAGED_BYTES)
    with contextlib.closing(to_host.staged(arrays, at_once)) as staged:
        batches: Iterable[list[HostArray]]
        batches = staged if observe is None else _observed(staged, observe)
        return DatabaseWriter(target).write(batches)


def _observed(
    batches: Iterable[list[HostArray]], observe: Callable[[list[HostArray]], object]
) -> Iterator[list[HostArray]]:
    """Yields the batches; calls `observe` with each when the caller has written it."""
    for batch in batches:
        yield batch
        observe(batch)
