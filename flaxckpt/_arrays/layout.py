"""Storage layout of arrays: shape, type and chunks.

Works with integers and names only, without values or files.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
from jax.sharding import Sharding

from flaxckpt import _state
from flaxckpt._arrays.zarr import chunk_shape as zarr_chunk_shape
from flaxckpt._arrays.zarr import metadata, writer_assignment
from flaxckpt._arrays.zarr.array_layout import ArrayLayout
from flaxckpt._state.leaf import LeafInfo, Role
from flaxckpt._types import Shape

_MIN_REPLICA_BYTES = 2**20
"""Minimal size of a part of a shard with its own writer and chunk."""

_MIN_GROUP_BYTES = 16 * 2**20
"""Minimal size of a part if some replicas have no part."""


class Writing(NamedTuple):
    """Division of a shard among its writing replicas.

    Attributes:
        slices: Parts of the replicas; None if a single replica writes the shard.
        shape: Shape of a part.
        replicas: Number of replicas.
    """

    slices: zarr_chunk_shape.ReplicaSlices | None
    shape: Shape
    replicas: int

    @property
    def parts(self) -> int:
        """Number of replicas that write."""
        return len(self.slices.bounds) if self.slices else 1


def divide_writing(info: LeafInfo, shape: Shape) -> Writing:
    """Divides the shards of a leaf among the writing replicas.

    Args:
        info: The leaf.
        shape: Stored shape; for PRNG keys with one more axis than the leaf.
    """
    if info.sharding is None:
        return Writing(None, shape, 1)
    return _divide_writing(info.sharding, info.shape, shape, info.dtype or "")


@functools.lru_cache(maxsize=4096)
def _divide_writing(
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
    """Returns the task of writing a leaf, for division among processes."""
    shape, dtype = stored_form(info)
    part = divide_writing(info, shape)
    nbytes = math.prod(part.shape) * _state.dtypes.item_bits(dtype) // 8
    return writer_assignment.Task(info.sharding, info.shape, part.parts, nbytes)


def stored_form(info: LeafInfo) -> tuple[Shape, str]:
    """Returns the stored shape and type name of a leaf."""
    if info.kind == "prng_key":
        return (*info.shape, key_words(info.prng_impl or "")), "uint32"
    dtype = _state.dtypes.stored_name(info.dtype or "")
    assert dtype is not None, info
    return info.shape, dtype


@functools.cache
def key_words(impl: str) -> int:
    """Returns the number of 32-bit words of a PRNG key.

    Raises:
        ValueError: jax has no implementation `impl`.
    """
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return int(words.shape[0])


def check_keys(impl: str, shape: Shape, dtype: str) -> None:
    """Checks the shape and dtype of PRNG key data of the implementation `impl`.

    Raises:
        ValueError: Shape or dtype do not match, or jax has no implementation `impl`.
    """
    words = key_words(impl)
    if dtype != "uint32" or shape[-1:] != (words,):
        raise ValueError(f"{dtype}{list(shape)} is not an array of {impl[:40]} keys")


def write_shape(info: LeafInfo, shape: Shape) -> Shape:
    """Returns the shape of the part written by a device, at least 1 along each axis.

    The part is a shard, or a part of a replicated shard.

    Args:
        info: The leaf.
        shape: Stored shape; for PRNG keys with one more axis than the leaf.
    """
    return tuple([size or 1 for size in divide_writing(info, shape).shape])


def with_chunk_shape(
    info: LeafInfo, layout: ArrayLayout, *, role: Role | None = None
) -> LeafInfo:
    """Returns `info` with the chunk shape of the stored array.

    Args:
        info: A leaf.
        layout: Layout of the array.
        role: Role of the leaf in an optimizer.
    """
    chunk_shape = None
    if info.dtype is not None:
        shape, dtype = stored_form(info)
        written = write_shape(info, shape)
        cuts = tuple(
            [
                (axis, shape[axis] // written[axis])
                for axis in layout.axes_of(len(shape))
            ]
        )
        is_whole = written == shape
        chunk_shape = _chunk_shape(written, dtype, layout.chunk_bytes, is_whole, cuts)
    elif role is None:
        return info
    # Called for every leaf; dataclasses.replace would take twice as long.
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
def _chunk_shape(
    written: Shape,
    dtype: str,
    max_bytes: int,
    ragged: bool,
    cuts: tuple[tuple[int, int], ...],
) -> Shape:
    return zarr_chunk_shape.choose_chunk_shape(
        written,
        itemsize=_state.dtypes.item_bits(dtype) / 8,
        max_bytes=max_bytes,
        ragged=ragged,
        cuts=dict(cuts),
    )


def fault(info: LeafInfo) -> str | None:
    """Returns the reason for readers to reject the array of a leaf, or None."""
    return _fault(info.shape, info.chunk_shape or ())


@functools.lru_cache(maxsize=4096)
def _fault(shape: Shape, chunk_shape: Shape) -> str | None:
    axes = len(chunk_shape)  # a PRNG key has an axis more than its shape
    if axes > metadata.MAX_AXES:
        return f"{axes} axes; readers accept at most {metadata.MAX_AXES}"
    if max(shape, default=0) >= metadata.MAX_SIZE:
        return (
            f"{max(shape)} elements along an axis; readers accept at most"
            f" {metadata.MAX_SIZE - 1}"
        )
    chunks = zarr_chunk_shape.chunk_count(shape, chunk_shape[: len(shape)])
    if chunks > metadata.MAX_CHUNKS:
        return f"{chunks} chunks; readers accept at most {metadata.MAX_CHUNKS}"
    return None


def stored_bytes(info: LeafInfo) -> int:
    """Returns the uncompressed size of a leaf's values, in bytes."""
    if info.dtype is None:
        return 0
    shape, dtype = stored_form(info)
    return math.prod(shape) * _state.dtypes.item_bits(dtype) // 8
