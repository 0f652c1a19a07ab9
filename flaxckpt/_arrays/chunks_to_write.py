"""Prepares chunks of arrays in host memory for writing, without copies if possible."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flaxckpt import _state
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._arrays.written import Previous
from flaxckpt._zarr import checksums as chunk_checksums
from flaxckpt._zarr import chunk_file
from flaxckpt._zarr import metadata as zarr_metadata
from flaxckpt._zarr.metadata import Array, Encoding

THREADS = 8
"""Threads that write files. More than cores: threads mostly wait for the disk."""

THREADS_OF_STORES = 32
"""Threads that write objects; threads mostly wait for the network."""

COPIES_IN_REQUESTS = 3
"""Copies of an object in memory during a write: ours, and TensorStore's."""


class ChunkToWrite(NamedTuple):
    """A chunk to write: `data` lacks its padding, and `size` (bytes) its checksum."""

    array: HostArray
    shard: HostShard
    key: str
    data: Array
    size: int

    def needs_copy(self) -> bool:
        """Returns True if writing needs a copy of the values in storage layout."""
        data = self.data
        return not (
            _state.numpy_dtypes.name(data.dtype) == self.array.dtype
            and data.dtype.isnative
            and data.flags.c_contiguous
        )

    def parts_and_checksums(
        self, encoding: Encoding, segment_bytes: int
    ) -> tuple[list[memoryview], bytes]:
        """Returns the bytes to store, and the packed checksums of the segments."""
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
            _state.numpy_dtypes.convert(self.data, array.dtype)
        )
        missing = self.size - data.nbytes
        if missing and data.shape[1:] != array.chunk_shape[1:]:
            # The chunk extends beyond the array along an axis after the first.
            padded = np.zeros(array.chunk_shape, data.dtype)
            padded[tuple(slice(size) for size in data.shape)] = data
            data, missing = padded, 0
        run = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return [run.data, memoryview(bytes(missing))] if missing else [run.data]


def chunks(array: HostArray) -> Iterator[ChunkToWrite]:
    size = math.prod(array.chunk_shape) * _state.dtypes.item_bits(array.dtype) // 8
    for shard in array.shards:
        values = np.asarray(shard.data)
        for key, bounds in zarr_metadata.chunks(shard.region, array.chunk_shape):
            is_whole = bounds == shard.region  # as of most small arrays
            inside = ... if is_whole else zarr_metadata.within(bounds, shard.region)
            yield ChunkToWrite(array, shard, key, values[inside], size)


def has_same_source(array: HostArray, previous: Previous) -> bool:
    """Returns True if the same jax object was saved before, in the same type."""
    source = array.source and array.source()
    saved, dtype = previous.sources.get(array.name, (None, ""))
    if source is None or saved is None or saved() is not source:
        return False
    return dtype == array.dtype
