"""The chunks of arrays in host memory, as they are to be stored.

A raw chunk (see `_zarr.metadata`) has the layout of the memory. It is written
without a copy if possible.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from flaxckpt import _state, _util
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._arrays.written import Previous
from flaxckpt._util.pace import Pace
from flaxckpt._zarr import checksums as chunk_checksums
from flaxckpt._zarr import chunk_file
from flaxckpt._zarr import metadata as zarr_metadata
from flaxckpt._zarr.metadata import Array, Encoding, Region

DEFAULT_CONCURRENT_BYTES = 2 * 2**30
"""Default of the bytes in transfer between memory and storage at a time."""

THREADS = 8
"""Threads that write files. More than cores: threads mostly wait for the disk."""

THREADS_OF_STORES = 32
"""Threads that write objects; threads mostly wait for the network."""

COPIES_IN_REQUESTS = 3
"""Copies of an object in memory during a write: ours, and TensorStore's."""

Count: TypeAlias = Callable[[int], object]


class WriteOptions(NamedTuple):
    """How arrays are written.

    Attributes:
        encoding: Encoding of the chunks.
        max_concurrent_bytes: Bytes copied or passed to TensorStore and not yet written.
            A larger array is written alone.
        report: Called with the bytes of written values, as in memory.
        previous: An earlier checkpoint on the same file system. Equal files are linked
            instead of written.
        writer: Number of this process or call, if others write other chunks or arrays
            to the same database.
        with_metadata: Whether this writer writes the metadata of the arrays.
        segment_bytes: Bytes of the segments of chunks that are verified on their own.
        pace: The pace of the threads that write chunk files to a disk; None for full
            speed. Threads of TensorStore serve the whole program, so they have none.
        total_bytes: Bytes of all arrays of the checkpoint, by all calls and processes,
            which decide about the files.
    """

    encoding: Encoding
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES
    report: Count = _util.progress.ignore
    previous: Previous | None = None
    writer: int = 0
    with_metadata: bool = True
    segment_bytes: int = sys.maxsize
    pace: Pace | None = None
    total_bytes: int = 0


class ChunkToWrite(NamedTuple):
    """A chunk to write.

    `key` is its index; `bounds` is the region of its values in the array, without
    padding.
    """

    array: HostArray
    shard: HostShard
    key: str
    bounds: Region

    @property
    def size(self) -> int:
        """Stored bytes without the checksum."""
        bits = _state.dtypes.item_bits(self.array.dtype)
        return math.prod(self.array.chunk_shape) * bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the values in memory."""
        if self.bounds == self.shard.region:
            return int(self.shard.data.nbytes)
        itemsize: int = self.shard.data.dtype.itemsize
        return math.prod(zarr_metadata.extent(self.bounds)) * itemsize

    def needs_copy(self) -> bool:
        """Returns True if writing needs a copy of the values in storage layout."""
        data = self._data()
        return not (
            _state.numpy_dtypes.name(data.dtype) == self.array.dtype
            and data.dtype.isnative
            and data.flags.c_contiguous
        )

    def parts_and_checksums(
        self, encoding: Encoding, segment_bytes: int
    ) -> tuple[list[memoryview], bytes]:
        """Returns the bytes to store and the checksums of the segments.

        The bytes are the values, padding and checksum, as views where possible. The
        last checksum is that of the chunk.
        """
        parts = self._content()
        if not encoding.checksum:
            return parts, b""
        values = chunk_checksums.running_checksums(parts, segment_bytes)
        packed = chunk_checksums.to_bytes(values)
        tail = memoryview(packed)[-chunk_file.CHECKSUM_BYTES :]
        return [*parts, tail], packed

    def _content(self) -> list[memoryview]:
        array = self.array
        data = _state.numpy_dtypes.to_stored(
            _state.numpy_dtypes.convert(self._data(), array.dtype)
        )
        missing = self.size - data.nbytes
        if missing and data.shape[1:] != array.chunk_shape[1:]:
            # The chunk extends beyond the array along an axis after the first.
            padded = np.zeros(array.chunk_shape, data.dtype)
            padded[tuple(slice(size) for size in data.shape)] = data
            data, missing = padded, 0
        run = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return [run.data, memoryview(bytes(missing))] if missing else [run.data]

    def _data(self) -> Array:
        values = np.asarray(self.shard.data)
        if self.bounds == self.shard.region:  # as of most small arrays
            return values
        data: Array = values[zarr_metadata.within(self.bounds, self.shard.region)]
        return data


def chunks(array: HostArray) -> Iterator[ChunkToWrite]:
    """Yields the chunks of an array to be written by this process."""
    for shard in array.shards:
        for key, bounds in zarr_metadata.chunks(shard.region, array.chunk_shape):
            yield ChunkToWrite(array, shard, key, bounds)


def has_same_source(array: HostArray, previous: Previous) -> bool:
    """Returns True if the same jax object was saved before, in the same type."""
    source = array.source and array.source()
    saved, dtype = previous.sources.get(array.name, (None, ""))
    if source is None or saved is None or saved() is not source:
        return False
    return dtype == array.dtype
