"""Values of arrays as they are now: on the host, and safe from any change."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from flaxckpt import _chunks, _dtypes, _layout, errors
from flaxckpt._info import Leaf
from flaxckpt._types import Shape
from flaxckpt._zarr import Array, Region, region_of, whole

_log = logging.getLogger(__name__)

_PINNED = "pinned_host"


class HostShard(NamedTuple):
    """A part of an array that this process writes.

    Attributes:
        region: Where it lies in the whole array.
        data: Its values, in the type that they have in memory. Never written again; a
            jax array is in host memory, or on its way there.
    """

    region: Region
    data: Array | jax.Array


class HostArray(NamedTuple):
    """An array as it was at the call of `save`, safe from whatever happens to it.

    Attributes:
        name: What the checkpoint calls it.
        shape: Of the whole array, as stored.
        dtype: Name of the type to save, which the values get while they are written.
        chunk_shape: Extent of the stored chunks.
        shards: The parts that this process writes; none for an array of size 0.
        source: The jax array that it was taken from, if that cannot change.
    """

    name: str
    shape: Shape
    dtype: str
    chunk_shape: Shape
    shards: tuple[HostShard, ...]
    source: weakref.ref[jax.Array] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all that this process writes, in memory."""
        return sum(shard.data.nbytes for shard in self.shards)


def to_host(leaves: Sequence[tuple[str, Shape, Leaf]]) -> list[HostArray]:
    """Takes the values of `leaves` as they are now.

    A jax array on the CPU is viewed, not copied: while the view lives, jax gives a
    donated array new memory instead of overwriting it. From an accelerator the
    values are copied, all at once; see `_from_devices`. A numpy array is copied,
    because its owner may change it in place.

    Args:
        leaves: For each leaf its name on disk, its chunk shape, and the leaf.

    Raises:
        UnsupportedLeafError: A leaf is abstract, or was donated or deleted already.
    """
    faults = {}
    for _, _, leaf in leaves:
        if isinstance(leaf.source, jax.ShapeDtypeStruct):
            faults[leaf.info.path] = "an abstract leaf, which has no values"
        elif isinstance(leaf.source, jax.Array) and leaf.source.is_deleted():
            faults[leaf.info.path] = "an array that was donated or deleted"
    if faults:
        raise errors.UnsupportedLeafError(faults)
    sources = [_sources(leaf) for _, _, leaf in leaves]
    elsewhere = [
        part.data
        for parts in sources
        for part in parts
        if part.data.size
        and isinstance(part.data, jax.Array)
        and not _is_on_cpu(part.data.sharding)
    ]
    copies = iter(_from_devices(elsewhere) if elsewhere else ())
    return [
        HostArray(
            name,
            _layout.stored_form(leaf.info)[0],
            leaf.info.dtype or "",
            chunk_shape,
            tuple(part.on_host(copies) for part in parts if part.data.size),
            weakref.ref(leaf.source) if isinstance(leaf.source, jax.Array) else None,
        )
        for (name, chunk_shape, leaf), parts in zip(leaves, sources, strict=True)
    ]


def _from_devices(arrays: Sequence[jax.Array]) -> list[Array | jax.Array]:
    """Copies arrays from accelerators to the host, all transfers side by side.

    Where the backend has pinned host memory, they are copied there, which is the
    fastest. Such a copy is an array of its own: whoever donates the first one is kept
    waiting by jax until it is read, and nobody has to wait here.
    """
    pinned = [_pinned(array.sharding) for array in arrays]
    if all(pinned):
        try:
            return list(jax.device_put(list(arrays), pinned))
        except jax.errors.JaxRuntimeError as error:
            _log.warning("no pinned memory for %d arrays: %s", len(arrays), error)
    for array in arrays:
        array.copy_to_host_async()
    return [np.asarray(array) for array in arrays]


@functools.lru_cache(maxsize=1024)
def _pinned(sharding: Sharding) -> Sharding | None:
    """The same devices' pinned host memory; None if they have none."""
    devices: set[Any] = sharding.device_set
    for device in devices:
        if _PINNED not in {memory.kind for memory in device.addressable_memories()}:
            return None
    return sharding.with_memory_kind(_PINNED)


@functools.lru_cache(maxsize=1024)
def _is_on_cpu(sharding: Sharding) -> bool:
    devices: set[Any] = sharding.device_set
    return all(device.platform == "cpu" for device in devices)


class _Part(NamedTuple):
    """What this process writes of an array, not yet on the host.

    Attributes:
        region: Where it lies in the whole array.
        data: Values on a device or on the host.
        within: The part of `data` that counts, cut on the host; None for all.
    """

    region: Region
    data: jax.Array | Array
    within: tuple[slice, ...] | None = None

    def on_host(self, copies: Iterator[Array | jax.Array]) -> HostShard:
        """This part, of the host's memory; what is not there is the next copy."""
        if isinstance(self.data, jax.Array) and not _is_on_cpu(self.data.sharding):
            return HostShard(self.region, next(copies))
        values = np.asarray(self.data)
        return HostShard(
            self.region, values if self.within is None else values[self.within]
        )


def _sources(leaf: Leaf) -> list[_Part]:
    value = leaf.source
    if not isinstance(value, jax.Array):
        array = np.array(value)
        if leaf.info.kind == "scalar":
            array = array.astype(_dtypes.to_numpy(leaf.info.dtype or ""))
        return [_Part(whole(array.shape), array)]
    if leaf.info.kind == "prng_key":
        value = jax.random.key_data(value)
    if len(value.sharding.device_set) == 1:
        return [_Part(whole(value.shape), value)]
    slices = _layout.replica_slices(leaf.info, value.shape)
    return [
        _part(shard, value.shape, slices)
        for shard in value.addressable_shards
        if slices is not None or shard.replica_id == 0
    ]


def _part(
    shard: jax.Shard, shape: Shape, slices: _chunks.ReplicaSlices | None
) -> _Part:
    region = region_of(shard.index, shape)
    if slices is None:
        return _Part(region, shard.data)
    start, stop = slices.bounds[shard.replica_id]
    origin = region[slices.axis][0]
    bounds = (origin + start, origin + stop)
    region = (*region[: slices.axis], bounds, *region[slices.axis + 1 :])
    within = (*[slice(None)] * slices.axis, slice(start, stop))
    if _is_on_cpu(shard.data.sharding):
        return _Part(region, shard.data, within)
    # Cut on the device, so that only this part is copied from it.
    return _Part(region, shard.data[within])
