"""Regions of stored arrays to read for the devices of this process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from flaxckpt import _state
from flaxckpt._arrays import layout
from flaxckpt._arrays.zarr import metadata
from flaxckpt._arrays.zarr.metadata import Array, Region
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import Shape


def to_read(found: LeafInfo, wanted: LeafInfo) -> dict[Region, list[Region]]:
    """Returns the regions to read -> the regions needed by devices.

    Reads each region separately if no chunk overlaps two regions. Otherwise reads their
    enclosing region, so that no chunk is read twice.

    Args:
        found: The stored leaf.
        wanted: The leaf with the requested sharding.
    """
    shape, _ = layout.stored_form(found)
    sharding = wanted.sharding
    if (
        sharding is None
        or wanted.kind != "array"
        or (len(sharding.device_set) == 1 and sharding.is_fully_addressable)
    ):
        whole = metadata.whole(shape)
        return {whole: [whole]}
    indices = sharding.addressable_devices_indices_map(shape).values()
    if not indices:
        return {}  # other processes have all parts
    regions = list(
        dict.fromkeys(metadata.region_of(index or (), shape) for index in indices)
    )
    chunk = found.chunk_shape
    if len(regions) == 1 or (
        chunk and all(_fits_chunks(r, chunk, shape) for r in regions)
    ):
        return {region: [region] for region in regions}
    box = tuple(
        (min(start for start, _ in bounds), max(stop for _, stop in bounds))
        for bounds in zip(*regions, strict=True)
    )
    return {box: regions}


def _fits_chunks(region: Region, chunk: Shape, shape: Shape) -> bool:
    return all(
        start % part == 0 and (stop % part == 0 or stop == size)
        for (start, stop), part, size in zip(region, chunk, shape, strict=True)
    )


def cut(
    reads: Mapping[Region, list[Region]], arrays: Mapping[Region, Array]
) -> dict[Region, Array]:
    """Returns each region needed by a device -> values."""
    return {
        region: arrays[read][metadata.within(region, read)]
        for read, regions in reads.items()
        for region in regions
    }


def nbytes(regions: Iterable[Region], dtype: str) -> int:
    """Returns the uncompressed size of regions of an array, in bytes."""
    elements = sum(math.prod(b - a for a, b in region) for region in regions)
    return elements * _state.dtypes.item_bits(dtype) // 8
