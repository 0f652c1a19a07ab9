"""How an array is laid out in storage: its shape, its type, its chunks.

Integers and names only; nothing here touches a value or a file.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from flaxckpt import _chunks, _dtypes
from flaxckpt._info import ArrayLayout, LeafInfo
from flaxckpt._types import Shape

_MIN_REPLICA_BYTES = 2**20
"""A part of a shard smaller than this is not worth a writer and a chunk of its own."""


def replica_slices(info: LeafInfo, shape: Shape) -> _chunks.ReplicaSlices | None:
    """How the devices that hold the same shard divide the writing of it."""
    if info.sharding is None:
        return None
    shard = info.sharding.shard_shape(info.shape)
    copies = math.prod(
        whole // part for whole, part in zip(info.shape, shard, strict=True) if part
    )
    return _chunks.replica_slices(
        (*shard, *shape[len(shard) :]),
        info.sharding.num_devices // copies,
        itemsize=_dtypes.item_bits(info.dtype or "") / 8,
        min_bytes=_MIN_REPLICA_BYTES,
    )


def stored_form(info: LeafInfo) -> tuple[Shape, str]:
    """Shape and type name under which the values of a leaf are stored."""
    if info.kind == "prng_key":
        return (*info.shape, _key_words(info.prng_impl or "")), "uint32"
    dtype = _dtypes.stored_name(info.dtype or "")
    assert dtype is not None, info
    return info.shape, dtype


def _key_words(impl: str) -> int:
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return int(words.shape[0])


def write_shape(info: LeafInfo, shape: Shape) -> Shape:
    """What one device writes of an array, at least 1 along each axis.

    That is a shard, or a part of one if others hold the same.

    Args:
        info: The leaf.
        shape: As stored; of PRNG keys that is one axis more than the leaf has.
    """
    if info.sharding is not None:
        shard = info.sharding.shard_shape(info.shape)
        slices = replica_slices(info, shape)
        shape = slices.shape if slices else (*shard, *shape[len(shard) :])
    return tuple(max(1, size) for size in shape)


def with_chunk_shape(info: LeafInfo, layout: ArrayLayout) -> LeafInfo:
    """`info` with the chunk shape that its values are stored in, if it has any."""
    if info.dtype is None:
        return info
    shape, dtype = stored_form(info)
    written = write_shape(info, shape)
    chunk_shape = _chunks.choose_chunk_shape(
        written,
        itemsize=_dtypes.item_bits(dtype) / 8,
        max_bytes=layout.chunk_bytes,
        ragged=written == shape,
    )
    return dataclasses.replace(info, chunk_shape=chunk_shape)


def stored_bytes(info: LeafInfo) -> int:
    """Uncompressed size of a leaf's values."""
    if info.dtype is None:
        return 0
    shape, dtype = stored_form(info)
    return math.prod(shape) * _dtypes.item_bits(dtype) // 8
