"""Snapshots of array values on the host, safe from later changes."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding

from flaxckpt import _state, errors
from flaxckpt._arrays import forms, layout
from flaxckpt._arrays.zarr import chunk_shape as zarr_chunk_shape
from flaxckpt._arrays.zarr import writer_assignment
from flaxckpt._arrays.zarr.metadata import Array, Region, region_of, whole
from flaxckpt._state.leaf import Leaf, LeafInfo
from flaxckpt._types import Shape

_log = logging.getLogger(__name__)

_PINNED = "pinned_host"


class HostShard(NamedTuple):
    """A part of an array that this process writes.

    Attributes:
        region: Region in the whole array.
        data: The values, in the type in memory. Never modified; a jax array is in host
            memory, or being transferred there.
    """

    region: Region
    data: Array | jax.Array


class HostArray(NamedTuple):
    """A snapshot of an array at the call of `save`, safe from later changes.

    Attributes:
        name: Name in the checkpoint.
        shape: Stored shape of the whole array.
        dtype: Name of the type to save; values are converted while written.
        chunk_shape: Shape of the stored chunks.
        shards: The parts that this process writes; none for an array of size 0.
        source: The jax array of the snapshot; None for mutable sources.
    """

    name: str
    shape: Shape
    dtype: str
    chunk_shape: Shape
    shards: tuple[HostShard, ...]
    source: weakref.ref[jax.Array] | None = None

    @property
    def stored_dtype(self) -> str:
        """Name of the type in storage."""
        name = _state.dtypes.stored_name(self.dtype)
        assert name is not None, self.name
        return name

    @property
    def nbytes(self) -> int:
        """Bytes in memory of the parts that this process writes."""
        return sum([shard.data.nbytes for shard in self.shards])


Named: TypeAlias = tuple[str, Shape, Leaf]
"""Name on disk, chunk shape and leaf."""


def to_host(
    leaves: Sequence[Named], places: Mapping[str, int] = MappingProxyType({})
) -> list[HostArray]:
    """Returns snapshots of the current values of `leaves`.

    A jax array on the CPU is viewed, not copied: while the view exists, jax gives a
    donated array new memory instead of overwriting the old. Arrays on accelerators are
    copied, all at once; see `_from_devices`. A numpy array is copied, because its owner
    may change the array in place.

    Args:
        leaves: Arrays with parts that this process may write.
        places: Name -> place of the writing replicas, if not 0; see `places`.

    Raises:
        UnsupportedLeafError: A leaf is abstract, donated or deleted.
    """
    faults = {
        leaf.info.path: reason
        for _, _, leaf in leaves
        if (reason := _missing_values(leaf))
    }
    if faults:
        raise errors.UnsupportedLeafError(faults)
    parts = [
        _view(leaf) or _parts_to_write(leaf, places.get(name, 0))
        for name, _, leaf in leaves
    ]
    on_devices = [
        shard.data
        for shards in parts
        for shard in shards
        if not isinstance(shard.data, np.ndarray)
    ]
    copies = iter(_from_devices(on_devices) if on_devices else ())
    return [
        HostArray(
            name,
            forms.stored_form(leaf.info)[0],
            leaf.info.dtype or "",
            chunk_shape,
            tuple(
                [
                    shard
                    if isinstance(shard.data, np.ndarray)
                    else shard._replace(data=next(copies))
                    for shard in shards
                ]
            ),
            weakref.ref(leaf.source) if isinstance(leaf.source, jax.Array) else None,
        )
        for (name, chunk_shape, leaf), shards in zip(leaves, parts, strict=True)
    ]


def places(leaves: Sequence[Named], processes: int) -> dict[str, int]:
    """Assigns replicated arrays to replicas, to balance bytes among processes.

    Args:
        leaves: All arrays of a state, the same in all processes.
        processes: Number of processes.

    Returns:
        Name of an array -> place of the writing replicas in their groups, if not 0; see
        `_arrays.zarr.writer_assignment`.
    """
    tasks = tuple([_task(leaf.info) for _, _, leaf in leaves])
    assigned = _assign(tasks, processes)
    return {
        name: place
        for (name, _, _), place in zip(leaves, assigned, strict=True)
        if place
    }


@functools.lru_cache(maxsize=4)
def _assign(tasks: tuple[writer_assignment.Task, ...], processes: int) -> Sequence[int]:
    return writer_assignment.assign(tasks, processes)[0]


def _task(info: LeafInfo) -> writer_assignment.Task:
    task = layout.task(info)
    is_shared = task.sharding is not None and is_of_several(task.sharding)
    return task if is_shared else task._replace(sharding=None)


@functools.lru_cache(maxsize=1024)
def is_of_several(sharding: Sharding) -> bool:
    """Returns True if several processes hold parts of an array."""
    devices: set[Any] = sharding.device_set
    return len({device.process_index for device in devices}) > 1


def _missing_values(leaf: Leaf) -> str | None:
    """Returns the reason why a leaf lacks values, or None."""
    if isinstance(leaf.source, jax.ShapeDtypeStruct):
        return "an abstract leaf, which has no values"
    if isinstance(leaf.source, jax.Array) and leaf.source.is_deleted():
        return "an array that was donated or deleted"
    return None


def _view(leaf: Leaf) -> list[HostShard] | None:
    """Returns a view of an array held whole on the CPU; None for other arrays.

    A fast path for the most common kind of leaf.
    """
    value = leaf.source
    if (
        not isinstance(value, jax.Array)
        or leaf.info.kind == "prng_key"
        or not _is_one_cpu(value.sharding)
    ):
        return None
    array = np.asarray(value)
    return [HostShard(whole(array.shape), array)] if array.size else None


@functools.lru_cache(maxsize=1024)
def _is_one_cpu(sharding: Sharding) -> bool:
    is_one = len(sharding.device_set) == 1 and sharding.is_fully_addressable
    return is_one and _is_on_cpu(sharding)


def _from_devices(arrays: Sequence[jax.Array]) -> list[Array | jax.Array]:
    """Copies arrays from accelerators to the host, all transfers concurrently.

    Copies to pinned host memory if the backend has any, which is fastest. Such a copy
    is a separate jax array: this function returns immediately, and jax delays a
    donation of the original until the transfer is done.
    """
    pinned = [_pinned(array.sharding) for array in arrays]
    if all(pinned):
        try:
            return list(jax.device_put(list(arrays), pinned, may_alias=False))
        except jax.errors.JaxRuntimeError as error:
            _log.warning("no pinned memory for %d arrays: %s", len(arrays), error)
    for array in arrays:
        array.copy_to_host_async()
    return [np.asarray(array) for array in arrays]


@functools.lru_cache(maxsize=1024)
def _pinned(sharding: Sharding) -> Sharding | None:
    """Returns the sharding in pinned host memory of the same devices, or None."""
    devices: set[Any] = sharding.device_set
    for device in devices:
        if _PINNED not in {memory.kind for memory in device.addressable_memories()}:
            return None
    return sharding.with_memory_kind(_PINNED)


@functools.lru_cache(maxsize=1024)
def _is_on_cpu(sharding: Sharding) -> bool:
    devices: set[Any] = sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def _parts_to_write(leaf: Leaf, place: int) -> list[HostShard]:
    """Returns the parts of an array that this process writes; none for size 0.

    The values of arrays on accelerators stay there.

    Args:
        leaf: The array.
        place: Place of the writing replicas in their groups.
    """
    value = leaf.source
    if not isinstance(value, jax.Array):
        array = np.array(value)
        if leaf.info.kind == "scalar":
            array = array.astype(_state.numpy_dtypes.to_numpy(leaf.info.dtype or ""))
        return [HostShard(whole(array.shape), array)] if array.size else []
    if leaf.info.kind == "prng_key":
        value = jax.random.key_data(value)
    writing = layout.divide_writing(leaf.info, value.shape)
    if not value.size:
        return []
    grid = [
        size // part
        for size, part in zip(
            value.shape, value.sharding.shard_shape(value.shape), strict=True
        )
    ]
    writers = writer_assignment.Writers(
        writing.replicas, writing.parts, place, math.prod(grid)
    )
    return [
        _part(shard, value.shape, writing.slices, part)
        for shard in value.addressable_shards
        if (part := writers.part(shard.replica_id, _number(shard, value.shape, grid)))
        is not None
    ]


def _number(shard: jax.Shard, shape: Shape, grid: Sequence[int]) -> int:
    """Returns the number of a shard in its array, in C order.

    Args:
        shard: The shard.
        shape: Shape of the array.
        grid: Number of shards along each axis.
    """
    number = 0
    for (start, _), size, count in zip(
        region_of(shard.index, shape), shape, grid, strict=True
    ):
        number = number * count + start * count // size
    return number


def _part(
    shard: jax.Shard,
    shape: Shape,
    slices: zarr_chunk_shape.ReplicaSlices | None,
    part: int,
) -> HostShard:
    region = region_of(shard.index, shape)
    data = shard.data
    if _is_on_cpu(data.sharding):
        data = np.asarray(data)
    if slices is not None:
        start, stop = slices.bounds[part]
        origin = region[slices.axis][0]
        bounds = (origin + start, origin + stop)
        region = (*region[: slices.axis], bounds, *region[slices.axis + 1 :])
        # On an accelerator, cut there: only this part is transferred.
        data = data[(*[slice(None)] * slices.axis, slice(start, stop))]
    return HostShard(region, data)
