"""Chunks that TensorStore encodes: compressed ones, zarr 2, and types of a few bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from flaxckpt import _state, _storage, _util
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._zarr import metadata as zarr_metadata
from flaxckpt._zarr.metadata import Encoding

ENCODED_AT_ONCE = 48 * 2**20
"""Bytes that TensorStore compresses at a time, and holds until written."""

_ENCODED_PART = 16 * 2**20
"""Bytes of the parts of an array that TensorStore gets one by one."""


def write_encoded(
    root: Path,
    arrays: Sequence[HostArray],
    encoding: Encoding,
    report: _util.progress.Count,
) -> None:
    """Writes arrays or their parts, at most `ENCODED_AT_ONCE` bytes, by TensorStore."""
    if arrays:
        _storage.store_requests.use_threads()
    context = _storage.store_requests.context()
    opened = [
        ts.open(
            {
                "driver": "zarr3" if encoding.version == 3 else "zarr",
                "kvstore": zarr_metadata.kvstore(root, array.name, ocdbt=False),
                # Orbax treats a missing chunk as damage, so write zeros too.
                "store_data_equal_to_fill_value": True,
                "metadata": zarr_metadata.metadata(encoding, array.form),
            },
            create=True,
            open=True,
            context=context,
        )
        for array in arrays
    ]
    started: list[tuple[ts.Future[Any], int]] = []
    try:
        for array, future in zip(arrays, opened, strict=True):
            store = future.result()
            for shard in array.shards:
                write = _start_write(array, shard, store)
                started.append((write, shard.data.nbytes))
        for write, size in started:
            write.result()
            report(size)
    finally:
        # After a failure, wait for all writes before the caller cleans up.
        for future in (*opened, *(write for write, _ in started)):
            future.exception()


def parts(array: HostArray, shard: HostShard) -> Iterator[HostShard]:
    """Yields a shard of an array; a large one in parts of whole rows of chunks."""
    if shard.data.nbytes <= _ENCODED_PART:
        yield shard
        return
    data = np.asarray(shard.data)
    (start, stop), *others = shard.region
    rows_at_once = _ENCODED_PART * (stop - start) // data.nbytes
    step = max(rows_at_once // array.chunk_shape[0], 1) * array.chunk_shape[0]
    cuts = [start, *range((start // step + 1) * step, stop, step), stop]
    for low, high in itertools.pairwise(cuts):
        region = ((low, high), *others)
        yield shard._replace(region=region, data=data[low - start : high - start])


def _start_write(
    array: HostArray, shard: HostShard, store: ts.TensorStore
) -> ts.Future[Any]:
    part = store[tuple(slice(*bounds) for bounds in shard.region)]
    data = _state.numpy_dtypes.to_stored(
        _state.numpy_dtypes.convert(np.asarray(shard.data), array.dtype)
    )
    return part.write(data, can_reference_source_data_indefinitely=True).commit
