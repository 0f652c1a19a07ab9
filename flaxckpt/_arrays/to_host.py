"""Snapshots of array values on the host, safe from later changes."""

from __future__ import annotations

import collections
import functools
import logging
import math
import operator
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import numpy as np
from jax.sharding import Sharding

from flaxckpt import _state, _util, errors
from flaxckpt._arrays import device_copy, layout
from flaxckpt._arrays.device_copy import DeviceCopy
from flaxckpt._state.leaf import Leaf, LeafInfo
from flaxckpt._types import LeafPath, Shape
from flaxckpt._zarr import chunk_shape as zarr_chunk_shape
from flaxckpt._zarr import writer_assignment
from flaxckpt._zarr.metadata import Array, ArrayForm, Region, region_of, whole

_log = logging.getLogger(__name__)

_PINNED = "pinned_host"

SnapshotMemory: TypeAlias = Literal["host", "device", "auto"]
"""The memory of copies of arrays on accelerators until they are written."""

SNAPSHOTS: Sequence[SnapshotMemory] = get_args(SnapshotMemory)

STAGED_BYTES = 256 * 2**20
"""Bytes moved from devices to the host at a time, while as many are written."""


class HostShard(NamedTuple):
    """A part of an array that this process writes: a region, and its values.

    Attributes:
        data: The values, in the type in memory, never modified. A jax array belongs to
            the snapshot alone; it is in host memory, or being transferred there. A copy
            on a device is moved by `staged`.
        holders: The processes that hold the values, and need them in a restore: equal
            sets are equal bytes; b"" for all processes.
    """

    region: Region
    data: Array | jax.Array | DeviceCopy
    holders: bytes = b""


class HostArray(NamedTuple):
    """A snapshot of an array at the call of `save`, safe from later changes.

    Values are converted to `dtype` while written. `source` is the jax array, to notice
    that it is unchanged; None for mutable sources.
    """

    name: str
    shape: Shape
    dtype: str
    chunk_shape: Shape
    shards: tuple[HostShard, ...]
    source: weakref.ref[jax.Array] | None = None

    @property
    def form(self) -> ArrayForm:
        dtype = _state.dtypes.stored_name(self.dtype)
        assert dtype is not None, self.name
        return ArrayForm(self.shape, dtype, self.chunk_shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory of the parts that this process writes."""
        return sum(map(_NBYTES, self.shards))


_NBYTES: Callable[[HostShard], int] = operator.attrgetter("data.nbytes")

Named: TypeAlias = tuple[str, Shape, Leaf]
"""Name on disk, chunk shape and leaf."""


def to_host(
    leaves: Sequence[Named],
    places: Mapping[str, int] = MappingProxyType({}),
    memory: SnapshotMemory = "host",
) -> list[HostArray]:
    """Returns snapshots of the current values of `leaves`.

    A jax array on the CPU is viewed, not copied: while the view exists, jax gives a
    donated array new memory. Arrays on accelerators are copied, all at once; see
    `_copy`. A numpy array is copied, because its owner may change it. `places` are
    those of the writing replicas; `memory` is the `snapshot` of a `Checkpointer`.
    Raises UnsupportedLeafError for a leaf that is abstract, donated or deleted.
    """
    views = memory != "device"
    faults: dict[LeafPath, str] = {}
    arrays: list[HostArray] = []
    on_devices: list[jax.Array] = []
    for name, chunk_shape, leaf in leaves:
        info, value = leaf.info, leaf.source
        if isinstance(value, jax.ShapeDtypeStruct):
            faults[info.path] = "an abstract leaf, which has no values"
            continue
        reference = None
        if isinstance(value, jax.Array):
            if value.is_deleted():
                faults[info.path] = "an array that was donated or deleted"
                continue
            shards = _parts_to_write(info, value, places.get(name, 0), views)
            reference = weakref.ref(value)
        else:
            shards = _copied_part(info, value)
        on_devices += [s.data for s in shards if isinstance(s.data, jax.Array)]
        shape = info.stored_shape
        dtype = info.dtype or ""
        arrays.append(HostArray(name, shape, dtype, chunk_shape, shards, reference))
    if faults:
        raise errors.UnsupportedLeafError(
            faults,
            "Pass a state with values, such as the last one that the training step"
            " returned, before it is donated to the next step.",
        )
    if not on_devices:
        return arrays
    copies = iter(_copy(on_devices, memory))
    return [_with_next(array, jax.Array, copies) for array in arrays]


def staged(
    arrays: Iterable[HostArray], max_bytes: int = STAGED_BYTES
) -> Generator[list[HostArray], None, None]:
    """Yields all arrays in batches, in host memory until the next batch is asked for.

    Arrays on devices come in batches of `max_bytes`, moved while the caller works.
    Raises RuntimeError if the values are the result of a failed computation.
    """
    arrays = list(arrays)
    values = [shard.data for array in arrays for shard in array.shards]
    copies = [data for data in values if isinstance(data, DeviceCopy)]
    if not copies:
        yield arrays
        return
    for copy in copies:
        copy.wait()
    moving: collections.deque[list[HostArray]] = collections.deque()
    sized = ((array, array.nbytes) for array in arrays)
    try:
        for batch in _util.memory.batches(sized, max_bytes):
            moving.append(_start_moves(batch))
            if len(moving) > 1:
                yield from _end_moves(moving.popleft())
        yield from _end_moves(moving.popleft())
    finally:
        for batch in moving:
            release(batch)


def release(arrays: Iterable[HostArray]) -> None:
    """Frees the memory of a snapshot on devices, and its pinned memory."""
    for array in arrays:
        for shard in array.shards:
            # jax waits for transfers in progress, and for views.
            if isinstance(shard.data, DeviceCopy) or (
                isinstance(shard.data, jax.Array) and not shard.data.is_deleted()
            ):
                shard.data.delete()


def places(leaves: Sequence[Named], processes: int) -> dict[str, int]:
    """Assigns all replicated arrays to replicas, to balance bytes among processes.

    Returns the places, if not 0, of writing replicas; see `_zarr.writer_assignment`.
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
    devices: set[Any] = sharding.device_set
    return len({device.process_index for device in devices}) > 1


@functools.lru_cache(maxsize=1024)
def _is_on_one(sharding: Sharding) -> bool:
    return len(sharding.device_set) == 1 and sharding.is_fully_addressable


def _copy(
    arrays: Sequence[jax.Array], memory: SnapshotMemory
) -> Sequence[DeviceCopy | Array | jax.Array]:
    """Copies jax arrays of one device each; the originals may then be donated.

    Returns immediately: jax delays a donation of the original until the copy is made.
    Without pinned memory, waits for the transfers.
    """
    if memory != "host":
        copies = device_copy.copy(arrays, needs_room=memory == "auto")
        if copies is not None:
            return copies
    transfers, are_pinned = _start_transfers(arrays)
    return transfers if are_pinned else list(map(_own_values, transfers))


def _start_transfers(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], bool]:
    """Starts transfers of arrays of one device each to the host, all concurrently.

    Returns copies in pinned host memory, and True; or, without such memory, the arrays,
    and False. `np.asarray` waits in both cases.
    """
    pinned = [_pinned(array.sharding) for array in arrays]
    if all(pinned):
        try:
            copies = jax.device_put(list(arrays), pinned, may_alias=False)
            return list(copies), True
        except jax.errors.JaxRuntimeError as error:
            _log.warning(
                "no pinned memory for %d arrays: %s",
                len(arrays),
                errors.one_line(error),
            )
    # jax keeps a transferred value as long as the array, which may be a parameter.
    aliases: list[jax.Array] = [
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
        for array in arrays
    ]
    for alias in aliases:
        alias.copy_to_host_async()
    return aliases, False


def _own_values(array: jax.Array) -> Array:
    """Returns a view on the CPU, else a copy: views of pinned memory bar a donation."""
    if device_copy.is_beside(array) and not _is_on_cpu(array.sharding):
        return np.array(array)
    return np.asarray(array)


def _start_moves(batch: Sequence[HostArray]) -> list[HostArray]:
    values = [shard.data for array in batch for shard in array.shards]
    copies = [data for data in values if isinstance(data, DeviceCopy)]
    transfers, are_pinned = _start_transfers([copy.value for copy in copies])
    if not are_pinned:
        for copy, transfer in zip(copies, transfers, strict=True):
            copy.value = transfer
        return list(batch)
    for copy in copies:
        copy.delete()  # jax frees the memory at the end of the transfer
    moved = iter(transfers)
    return [_with_next(array, DeviceCopy, moved) for array in batch]


def _end_moves(batch: Sequence[HostArray]) -> Iterator[list[HostArray]]:
    """Yields the arrays on the host; then frees their memory."""
    moved = [
        _with_values(array, [_end_move(shard.data) for shard in array.shards])
        for array in batch
    ]
    try:
        yield moved
    finally:
        release(moved)
        moved.clear()  # the caller has the list, too


def _end_move(data: Array | jax.Array | DeviceCopy) -> Array | jax.Array:
    if not isinstance(data, DeviceCopy):
        return data
    values = np.asarray(data.value)
    data.delete()
    return values


def _with_next(array: HostArray, kind: type, values: Iterator[Any]) -> HostArray:
    """Returns the array with the next of `values` in place of each of a kind."""
    return _with_values(
        array,
        [
            next(values) if isinstance(shard.data, kind) else shard.data
            for shard in array.shards
        ],
    )


def _with_values(
    array: HostArray, values: Sequence[Array | jax.Array | DeviceCopy]
) -> HostArray:
    shards = [
        shard._replace(data=value)
        for shard, value in zip(array.shards, values, strict=True)
    ]
    return array._replace(shards=tuple(shards))


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


def _copied_part(info: LeafInfo, value: Any) -> tuple[HostShard, ...]:
    """Returns a copy of a numpy array or a number as the only part; none for size 0."""
    array = np.array(value)
    if info.kind == "scalar":
        array = array.astype(_state.numpy_dtypes.to_numpy(info.dtype or ""))
    return (HostShard(whole(array.shape), array),) if array.size else ()


def _parts_to_write(
    info: LeafInfo, value: jax.Array, place: int, views: bool
) -> tuple[HostShard, ...]:
    """Returns the parts that this process writes; those on accelerators stay there."""
    if info.kind == "prng_key":
        value = jax.random.key_data(value)
    shape = value.shape
    if 0 in shape:
        return ()
    if _is_on_one(value.sharding):  # a fast path for most leaves
        is_viewed = views and _is_on_cpu(value.sharding)
        return (HostShard(whole(shape), np.asarray(value) if is_viewed else value),)
    writing = layout.divide_writing(info, shape)
    grid = [
        size // part
        for size, part in zip(shape, value.sharding.shard_shape(shape), strict=True)
    ]
    writers = writer_assignment.Writers(
        writing.replicas, writing.parts, place, math.prod(grid)
    )
    assert info.sharding is not None, info.path
    holders = _find_holders(info.sharding, info.shape)
    return tuple(
        _part(shard, shape, writing.slices, part, views, holders[number])
        for shard in value.addressable_shards
        for number in [_number(shard, shape, grid)]
        if (part := writers.part(shard.replica_id, number)) is not None
    )


@functools.lru_cache(maxsize=1024)
def _find_holders(sharding: Sharding, shape: Shape) -> Sequence[bytes]:
    found = writer_assignment.holders(sharding, shape)
    processes = found.any(axis=0).sum()
    return [
        b"" if row.sum() == processes else np.packbits(row).tobytes() for row in found
    ]


def _number(shard: jax.Shard, shape: Shape, grid: Sequence[int]) -> int:
    """Returns the number of a shard in its array, in C order, on a grid of shards."""
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
    views: bool,
    holders: bytes,
) -> HostShard:
    region = region_of(shard.index, shape)
    data: Array | jax.Array = shard.data
    if views and _is_on_cpu(shard.data.sharding):
        data = np.asarray(data)
    if slices is not None:
        axis, (start, stop) = slices.axis, slices.bounds[part]
        origin = region[axis][0]
        bounds = (origin + start, origin + stop)
        region = (*region[:axis], bounds, *region[axis + 1 :])
        data = _cut(data, axis, start, stop)
    return HostShard(region, data, holders)


def _cut(data: Array | jax.Array, axis: int, start: int, stop: int) -> Any:
    """Returns a part of an array; on an accelerator, so that only it is transferred."""
    part = (*[slice(None)] * axis, slice(start, stop))
    if isinstance(data, jax.Array) and device_copy.is_beside(data):
        # Accelerators do not compute in host memory.
        return np.array(np.asarray(data)[part])
    return data[part]
