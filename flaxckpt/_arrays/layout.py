"""How an array is laid out in storage: its shape, its type, its chunks.

Integers and names only; nothing here touches a value or a file.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
from jax.sharding import Sharding

from flaxckpt import _state
from flaxckpt._arrays.zarr import chunk_shape as zarr_chunk_shape
from flaxckpt._arrays.zarr import limits, writer_assignment
from flaxckpt._arrays.zarr.array_layout import ArrayLayout
from flaxckpt._state.leaf import LeafInfo, Role
from flaxckpt._types import Shape

_MIN_REPLICA_BYTES = 2**20
"""A part of a shard smaller than this is not worth a writer and a chunk of its own."""

_MIN_GROUP_BYTES = 16 * 2**20
"""The same, if some replicas have no part. Much less than a process has to write."""


class Writing(NamedTuple):
    """How the devices that hold the same shard divide the writing of it.

    Attributes:
        slices: Their parts; None if one of them writes all.
        shape: What one of them writes.
        replicas: How many they are.
    """

    slices: zarr_chunk_shape.ReplicaSlices | None
    shape: Shape
    replicas: int

    @property
    def parts(self) -> int:
        """How many of them write."""
        return len(self.slices.bounds) if self.slices else 1


def writing(info: LeafInfo, shape: Shape) -> Writing:
    """How the devices that hold the same shard of a leaf divide the writing of it.

    Args:
        info: The leaf.
        shape: As stored; of PRNG keys that is one axis more than the leaf has.
    """
    if info.sharding is None:
        return Writing(None, shape, 1)
    return _shared_writing(info.sharding, info.shape, shape, info.dtype or "")


@functools.lru_cache(maxsize=4096)
def _shared_writing(
    sharding: Sharding, leaf_shape: Shape, shape: Shape, dtype: str
) -> Writing:
    shard = sharding.shard_shape(leaf_shape)
    copies = math.prod(
        whole // part for whole, part in zip(leaf_shape, shard, strict=True) if part
    )
    replicas = sharding.num_devices // copies
    stored_shard = (*shard, *shape[len(shard) :])
    slices = zarr_chunk_shape.replica_slices(
        stored_shard,
        replicas,
        itemsize=_state.dtypes.item_bits(dtype) / 8,
        min_bytes=_MIN_REPLICA_BYTES,
        min_group_bytes=_MIN_GROUP_BYTES,
    )
    return Writing(slices, slices.shape if slices else stored_shard, replicas)


def task(info: LeafInfo) -> writer_assignment.Task:
    """What is to be written of a leaf, to be divided among processes."""
    shape, dtype = stored_form(info)
    part = writing(info, shape)
    nbytes = math.prod(part.shape) * _state.dtypes.item_bits(dtype) // 8
    return writer_assignment.Task(info.sharding, info.shape, part.parts, nbytes)


def stored_form(info: LeafInfo) -> tuple[Shape, str]:
    """Shape and type name under which the values of a leaf are stored."""
    if info.kind == "prng_key":
        return (*info.shape, key_words(info.prng_impl or "")), "uint32"
    dtype = _state.dtypes.stored_name(info.dtype or "")
    assert dtype is not None, info
    return info.shape, dtype


@functools.cache
def key_words(impl: str) -> int:
    """How many numbers of 32 bits a key of the implementation `impl` has.

    Raises:
        ValueError: jax has no such implementation.
    """
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return int(words.shape[0])


def check_keys(impl: str, shape: Shape, dtype: str) -> None:
    """Asserts that an array can be PRNG keys of the implementation `impl`.

    Raises:
        ValueError: It cannot, or there is no such implementation.
    """
    words = key_words(impl)
    if dtype != "uint32" or shape[-1:] != (words,):
        raise ValueError(f"{dtype}{list(shape)} is no array of {impl[:40]} keys")


def write_shape(info: LeafInfo, shape: Shape) -> Shape:
    """What one device writes of an array, at least 1 along each axis.

    That is a shard, or a part of one if others hold the same.

    Args:
        info: The leaf.
        shape: As stored; of PRNG keys that is one axis more than the leaf has.
    """
    return tuple([size or 1 for size in writing(info, shape).shape])


def with_chunk_shape(
    info: LeafInfo, layout: ArrayLayout, *, role: Role | None = None
) -> LeafInfo:
    """`info` with the chunk shape that its values are stored in, if it has any.

    Args:
        info: A leaf.
        layout: How its array shall be cut.
        role: What it is in an optimizer.
    """
    chunk_shape = None
    if info.dtype is not None:
        shape, dtype = stored_form(info)
        written = write_shape(info, shape)
        chunk_shape = _chunk_shape(written, dtype, layout.chunk_bytes, written == shape)
    elif role is None:
        return info
    # Every leaf passes here, and dataclasses.replace takes twice as long.
    return LeafInfo(
        info.path,
        info.keys,
        info.kind,
        info.python_type,
        info.shape,
        info.dtype,
        info.sharding,
        chunk_shape,
        info.weak_type,
        info.prng_impl,
        info.spec,
        info.shard_shape,
        role or info.role,
    )


@functools.lru_cache(maxsize=4096)
def _chunk_shape(written: Shape, dtype: str, max_bytes: int, ragged: bool) -> Shape:
    return zarr_chunk_shape.choose_chunk_shape(
        written,
        itemsize=_state.dtypes.item_bits(dtype) / 8,
        max_bytes=max_bytes,
        ragged=ragged,
    )


def fault(info: LeafInfo) -> str | None:
    """The reason why readers refuse the array of a leaf; None if they accept it."""
    return _fault(info.shape, info.chunk_shape or ())


@functools.lru_cache(maxsize=4096)
def _fault(shape: Shape, chunk_shape: Shape) -> str | None:
    axes = len(chunk_shape)  # a PRNG key has one more than its shape
    if axes > limits.MAX_AXES:
        return f"{axes} axes, and readers take {limits.MAX_AXES}"
    if max(shape, default=0) >= limits.MAX_SIZE:
        return (
            f"{max(shape)} elements along an axis, and readers take"
            f" {limits.MAX_SIZE - 1}"
        )
    chunks = zarr_chunk_shape.chunk_count(shape, chunk_shape[: len(shape)])
    if chunks > limits.MAX_CHUNKS:
        return f"{chunks} chunks, and readers take {limits.MAX_CHUNKS}"
    return None


def stored_bytes(info: LeafInfo) -> int:
    """Uncompressed size of a leaf's values."""
    if info.dtype is None:
        return 0
    shape, dtype = stored_form(info)
    return math.prod(shape) * _state.dtypes.item_bits(dtype) // 8
