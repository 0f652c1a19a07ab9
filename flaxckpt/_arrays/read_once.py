"""Splits replicated arrays: each process reads a part, and devices exchange them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxckpt._arrays.read_plan import ReadJob
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath

_MIN_PART_BYTES = 2**20
"""Smaller parts are read by all processes, which is faster than sending them."""


def divide(jobs: Sequence[ReadJob]) -> list[ReadJob]:
    """Returns the jobs with replicated leaves split into a part per device."""
    divided = []
    for job in jobs:
        sharding = divided_sharding(job.wanted)
        if sharding is not None:
            wanted = dataclasses.replace(job.wanted, sharding=sharding)
            job = ReadJob(job.stored, wanted)
        divided.append(job)
    return divided


def divided_sharding(info: LeafInfo) -> NamedSharding | None:
    """Returns a sharding with fewer replicas, or None if that would save nothing."""
    sharding = info.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    if info.kind != "array" or info.python_type != "jax.Array" or not info.shape:
        return None
    shard = sharding.shard_shape(info.shape)
    spare = _spare_axes(sharding)
    sizes = zip(info.shape, shard, strict=True)
    split = math.prod(whole // part for whole, part in sizes if part)
    for count in range(len(spare), 0, -1):
        names = spare[:count]  # the first axes span processes
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        if info.stored_bytes < _MIN_PART_BYTES * parts * split:
            continue
        for axis, size in enumerate(shard):
            if size % parts == 0:
                return NamedSharding(
                    sharding.mesh,
                    _split_axis(sharding.spec, axis, names, len(shard)),
                    memory_kind=sharding.memory_kind,
                )
    return None


def _spare_axes(sharding: NamedSharding) -> list[str]:
    """Returns the mesh axes that replicate an array."""
    used: set[Any] = set()
    for entry in sharding.spec:
        used |= set(entry) if isinstance(entry, tuple) else {entry}
    sizes = sharding.mesh.shape
    return [name for name in sizes if name not in used and sizes[name] > 1]


def _split_axis(
    spec: PartitionSpec, axis: int, names: Sequence[str], rank: int
) -> PartitionSpec:
    entries: list[Any] = [*spec, *[None] * (rank - len(spec))]
    before = entries[axis]
    current = before if isinstance(before, tuple) else (before,) if before else ()
    entries[axis] = (*current, *names)
    return PartitionSpec(*entries)


def gather(
    values: Mapping[LeafPath, Any], jobs: Sequence[ReadJob]
) -> dict[LeafPath, Any]:
    """Returns values with the caller's shardings, from values read in parts.

    All processes call this at the same point, with the `jobs` from before `divide`.
    """
    parts = {
        job.wanted.path: job.wanted.sharding
        for job in jobs
        if divided_sharding(job.wanted) is not None
    }
    paths = list(parts)
    whole = jax.device_put(
        [values[path] for path in paths], [parts[path] for path in paths]
    )
    return {**values, **dict(zip(paths, whole, strict=True))}
