"""Chunks that TensorStore encodes: compressed ones, zarr 2, and types of a few bits."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from flaxckpt import _state, _storage
from flaxckpt._arrays.stored_chunks import Target
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._arrays.zarr import metadata as zarr_metadata

ENCODED_AT_ONCE = 64 * 2**20
"""Bytes that TensorStore compresses at a time, and holds until written."""

_ENCODED_PART = 16 * 2**20
"""Bytes of the parts of an array that TensorStore gets one by one."""


def sized(arrays: Iterable[HostArray]) -> Iterator[tuple[HostArray, int]]:
    return ((array, array.nbytes) for array in arrays)


def write_encoded(
    target: Target, arrays: Sequence[HostArray], bytes_at_once: int
) -> None:
    """Writes arrays, or parts of arrays that exist, by TensorStore."""
    encoding = target.encoding
    if arrays:
        _storage.store_requests.use_threads()
    opened = [
        ts.open(
            {
                "driver": "zarr3" if encoding.version == 3 else "zarr",
                "kvstore": zarr_metadata.kvstore(target.root, array.name, ocdbt=False),
                # Orbax treats a missing chunk as damage, so write zeros too.
                "store_data_equal_to_fill_value": True,
                "metadata": zarr_metadata.metadata(
                    encoding, array.shape, array.stored_dtype, array.chunk_shape
                ),
            },
            create=True,
            open=True,
            context=target.context,
        )
        for array in arrays
    ]
    started: list[ts.Future[Any]] = []
    pending: collections.deque[tuple[ts.Future[Any], int]] = collections.deque()
    in_flight = 0
    try:
        for array, future in zip(arrays, opened, strict=True):
            store = future.result()
            for part in parts(array):
                while pending and in_flight + part.data.nbytes > bytes_at_once:
                    oldest, size = pending.popleft()
                    oldest.result()
                    in_flight -= size
                    target.report(size)
                write = _start_write(array, part, store)
                started.append(write)
                pending.append((write, part.data.nbytes))
                in_flight += part.data.nbytes
        for write, size in pending:
            write.result()
            target.report(size)
    finally:
        # After a failure, wait for all writes before the caller cleans up.
        for future in (*opened, *started):
            future.exception()


def parts(array: HostArray) -> Iterator[HostShard]:
    """Yields the shards of an array, large ones in parts of whole rows of chunks."""
    for shard in array.shards:
        if shard.data.nbytes <= _ENCODED_PART:
            yield shard
            continue
        data = np.asarray(shard.data)
        (start, stop), *others = shard.region
        rows_at_once = _ENCODED_PART * (stop - start) // data.nbytes
        step = max(rows_at_once // array.chunk_shape[0], 1) * array.chunk_shape[0]
        cuts = [start, *range((start // step + 1) * step, stop, step), stop]
        for low, high in itertools.pairwise(cuts):
            region = ((low, high), *others)
            yield HostShard(region, data[low - start : high - start])


def _start_write(
    array: HostArray, shard: HostShard, store: ts.TensorStore
) -> ts.Future[Any]:
    part = store[tuple(slice(*bounds) for bounds in shard.region)]
    data = _state.numpy_dtypes.to_stored(
        _state.numpy_dtypes.convert(np.asarray(shard.data), array.dtype)
    )
    return part.write(data, can_reference_source_data_indefinitely=True).commit
