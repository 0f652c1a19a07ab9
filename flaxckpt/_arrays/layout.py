"""Chunks of arrays, and the parts that each device writes, by shapes and shardings."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Sharding

from flaxckpt import _state
from flaxckpt._state.leaf import LeafInfo, Role
from flaxckpt._types import Shape
from flaxckpt._zarr import chunk_shape as zarr_chunk_shape
from flaxckpt._zarr import writer_assignment
from flaxckpt._zarr.array_layout import ArrayLayout

_MIN_REPLICA_BYTES = 2**20
"""Minimal size of a part of a shard with its own writer and chunk."""

_MIN_GROUP_BYTES = 16 * 2**20
"""Minimal size of a part if some replicas have no part."""


class Writing(NamedTuple):
    """Division of a shard among its replicas; `slices` is None if one writes it."""

    slices: zarr_chunk_shape.ReplicaSlices | None
    shape: Shape
    replicas: int

    @property
    def parts(self) -> int:
        """Number of replicas that write."""
        return len(self.slices.bounds) if self.slices else 1


def divide_writing(info: LeafInfo, shape: Shape) -> Writing:
    """Divides the shards of a leaf, of the stored `shape`, among the replicas."""
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
    shape, dtype = info.stored_shape, info.stored_dtype
    part = divide_writing(info, shape)
    nbytes = math.prod(part.shape) * _state.dtypes.item_bits(dtype) // 8
    return writer_assignment.Task(info.sharding, info.shape, part.parts, nbytes)


def write_shape(info: LeafInfo, shape: Shape) -> Shape:
    """Returns the shape of the part written by a device, at least 1 along each axis."""
    if info.sharding is None:
        return _at_least_one(shape)
    return _at_least_one(
        _divide_writing(info.sharding, info.shape, shape, info.dtype or "").shape
    )


@functools.lru_cache(maxsize=4096)
def _at_least_one(shape: Shape) -> Shape:
    return tuple([size or 1 for size in shape])


def with_chunk_shape(
    info: LeafInfo, layout: ArrayLayout, *, role: Role | None = None
) -> LeafInfo:
    chunk_shape = None
    if info.dtype is not None:
        shape, dtype = info.stored_shape, info.stored_dtype
        chunk_shape = _choose_chunk_shape(
            shape,
            dtype,
            write_shape(info, shape),
            layout.shard_axes,
            layout.max_chunk_bytes,
        )
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
        info.mesh_axes,
        info.shard_shape,
        role or info.role,
    )


@functools.lru_cache(maxsize=4096)  # most leaves are like another one
def _choose_chunk_shape(
    shape: Shape,
    dtype: str,
    written: Shape,
    shard_axes: int | Sequence[int],
    max_bytes: int,
) -> Shape:
    assert not isinstance(shard_axes, int), shard_axes
    rank = len(shape)
    axes = [axis % rank for axis in shard_axes if -rank <= axis < rank]
    return zarr_chunk_shape.choose_chunk_shape(
        written,
        itemsize=_state.dtypes.item_bits(dtype) / 8,
        max_bytes=max_bytes,
        ragged=written == shape,
        cuts={axis: shape[axis] // written[axis] for axis in axes},
    )
