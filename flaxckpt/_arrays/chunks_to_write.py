"""Zarr metadata and raw chunks of host arrays.

Raw chunks (see `_arrays.zarr.metadata`) have the layout of the memory, and are written
without a copy if possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxckpt import _state
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._arrays.zarr import chunk_file
from flaxckpt._arrays.zarr import metadata as zarr_metadata
from flaxckpt._arrays.zarr.metadata import Array, Encoding, Region
from flaxckpt._types import JSON


def is_raw(array: HostArray, encoding: Encoding) -> bool:
    """Returns True if an array is written without TensorStore."""
    return zarr_metadata.is_raw(encoding, array.shape, _stored_name(array))


def metadata(array: HostArray, encoding: Encoding) -> dict[str, JSON]:
    """Returns the zarr metadata of an array, for TensorStore."""
    return zarr_metadata.metadata(
        encoding, array.shape, _stored_name(array), array.chunk_shape
    )


def metadata_text(array: HostArray, encoding: Encoding) -> bytes:
    """Returns the zarr metadata of an array as file content."""
    return zarr_metadata.metadata_text(
        encoding, array.shape, _stored_name(array), array.chunk_shape
    )


def _stored_name(array: HostArray) -> str:
    name = _state.dtypes.stored_name(array.dtype)
    assert name is not None, array.name
    return name


# ---- chunks ----------------------------------------------------------------------


class ChunkToWrite(NamedTuple):
    """A chunk to write.

    Attributes:
        array: The array of the chunk.
        shard: The shard with the values.
        key: Index of the chunk.
        bounds: Region of the values in the whole array, without padding.
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
        itemsize: int = self.shard.data.dtype.itemsize
        return math.prod(zarr_metadata.extent(self.bounds)) * itemsize

    def has_to_be_copied(self) -> bool:
        """Returns True if writing needs a copy of the values in storage layout."""
        data = self._data()
        return not (
            data.dtype.name == self.array.dtype
            and data.dtype.isnative
            and data.flags.c_contiguous
        )

    def parts(self, encoding: Encoding) -> list[memoryview]:
        """Returns the values, padding and checksum, as views where possible."""
        parts = self._content()
        if encoding.checksum:
            parts.append(memoryview(chunk_file.checksum(parts)))
        return parts

    def _content(self) -> list[memoryview]:
        array = self.array
        data = _state.dtypes.to_stored(_state.dtypes.convert(self._data(), array.dtype))
        missing = self.size - data.nbytes
        if missing and data.shape[1:] != array.chunk_shape[1:]:
            # The chunk extends beyond the array along an axis after the first.
            padded = np.zeros(array.chunk_shape, data.dtype)
            padded[tuple(slice(size) for size in data.shape)] = data
            data, missing = padded, 0
        run = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return [run.data, memoryview(bytes(missing))]

    def _data(self) -> Array:
        values = np.asarray(self.shard.data)
        data: Array = values[zarr_metadata.within(self.bounds, self.shard.region)]
        return data


def chunks(array: HostArray) -> Iterator[ChunkToWrite]:
    """Yields the chunks of an array to be written by this process."""
    for shard in array.shards:
        for key, bounds in zarr_metadata.chunks(shard.region, array.chunk_shape):
            yield ChunkToWrite(array, shard, key, bounds)


def files_of(root: Path, array: HostArray) -> Iterator[Path]:
    """Yields the chunk files of a raw array to be written by this process."""
    for chunk in chunks(array):
        yield root / array.name / chunk.key
