"""Assignment of array parts to replicas, to balance the bytes written by processes.

Each process computes the same assignment from shardings and sizes only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from flaxckpt._types import Shape

Placement: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""The process of each replica and shard: an array `[replica, shard]`."""

Holders: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
"""Whether a process holds a shard: an array `[shard, process]`."""

Place: TypeAlias = Callable[[Sharding, Shape], Placement]


_FILE_BYTES = 2**15
"""Cost of making a file, in bytes that could be written in the same time."""


class Task(NamedTuple):
    """An array to be written; process 0 holds and writes it if `sharding` is None.

    Each shard has equal `parts`, of `part_bytes`, written by as many replicas.
    """

    sharding: Sharding | None
    shape: Shape
    parts: int
    part_bytes: int


class Writers(NamedTuple):
    """The replicas that write the shards of an array.

    The replicas of a shard form equal groups of neighbours. Each group writes a part,
    by the replica at the same place in each group. The place changes from shard to
    shard, to also divide arrays with shards too small for parts. `place` is that for
    the first shard.
    """

    replicas: int
    parts: int
    place: int = 0
    shards: int = 1

    def part(self, replica: int, shard: int = 0) -> int | None:
        """Returns the part that a replica writes of a shard, by its number in C order.

        None stands for no part.
        """
        group = self.replicas // self.parts
        place = (self.place + _place_offset(shard, self.shards, group)) % group
        return replica // group if replica % group == place else None


def _place_offset(shard: Any, shards: int, group: int) -> Any:
    """Returns the offset of a shard's writer from the writer of the first shard."""
    return shard * group // shards


def assign(
    tasks: Sequence[Task], processes: int, place: Place | None = None
) -> tuple[list[int], list[int]]:
    """Returns the place of the writing replica for each task, and bytes per process.

    Assigns arrays, largest first, to the replicas with the least work so far. Work is
    bytes to write plus a cost per file. The places are those in a replica's group. The
    arrays have the same order in all processes; `place` returns the placement of
    shards, by default from jax.
    """
    place = place or placement
    loads = np.zeros(processes, np.int64)
    costs = np.zeros(processes, np.int64)
    choices = [_choices(task, place) for task in tasks]
    free = []
    for number, (task, rows) in enumerate(zip(tasks, choices, strict=True)):
        if len(rows.places) == 1:
            np.add.at(loads, rows.processes[0], task.part_bytes)
            np.add.at(costs, rows.processes[0], task.part_bytes + _FILE_BYTES)
        else:
            free.append(number)
    places = [0] * len(tasks)
    for number in sorted(free, key=lambda number: -tasks[number].part_bytes):
        rows = choices[number]
        best = int(np.argmin(costs[rows.processes].max(axis=1)))
        places[number] = rows.places[best]
        part_bytes = tasks[number].part_bytes
        np.add.at(loads, rows.processes[best], part_bytes)
        np.add.at(costs, rows.processes[best], part_bytes + _FILE_BYTES)
    return places, loads.tolist()


class _Choices(NamedTuple):
    """The possible writers of an array.

    Attributes:
        places: The places in a group with distinct processes.
        processes: For each place, the process of each part of each shard.
    """

    places: list[int]
    processes: Placement


_FIRST = _Choices([0], np.zeros((1, 1), np.int64))


def writing_processes(task: Task, place_in_group: int, place: Place) -> Placement:
    """Returns the process that writes each part of each shard."""
    rows = _choices(task, place)
    found: Placement = rows.processes[rows.places.index(place_in_group)]
    return found


def shards(task: Task, processes: int, place: Place) -> Placement:
    """Returns the number of distinct shards that each process holds."""
    assert task.sharding is not None
    return _shards(place, task.sharding, _shape_that_counts(task), processes)


@functools.lru_cache(maxsize=1024)
def _shards(
    place: Place, sharding: Sharding, shape: Shape, processes: int
) -> Placement:
    holders = place(sharding, shape)
    numbers = np.broadcast_to(np.arange(holders.shape[1]), holders.shape)
    pairs = np.unique(np.stack([holders.ravel(), numbers.ravel()]), axis=1)
    return np.bincount(pairs[0], minlength=processes)


def _choices(task: Task, place: Place) -> _Choices:
    if task.sharding is None:
        return _FIRST
    return _groups(place, task.sharding, _shape_that_counts(task), task.parts)


def _shape_that_counts(task: Task) -> Shape:
    """Returns the shape as a cache key, or () for named shardings."""
    return () if isinstance(task.sharding, NamedSharding) else task.shape


@functools.lru_cache(maxsize=1024)
def _groups(place: Place, sharding: Sharding, shape: Shape, parts: int) -> _Choices:
    processes = place(sharding, shape)
    replicas, count = processes.shape
    group = replicas // parts
    shard = np.arange(count)[None, :]
    turned = (np.arange(group)[:, None] + _place_offset(shard, count, group)) % group
    by_place = processes.reshape(parts, group, count)[:, turned, shard].swapaxes(0, 1)
    distinct, places = np.unique(
        by_place.reshape(group, parts * count), axis=0, return_index=True
    )
    return _Choices(places.tolist(), distinct)


# ---- placement of shards ---------------------------------------------------------


def holders(sharding: Sharding, shape: Shape, place: Place | None = None) -> Holders:
    """Returns whether each process holds each shard.

    Shards are ordered as by `placement`, the default of `place`.
    """
    grid = (place or placement)(sharding, shape)
    found = np.zeros((grid.shape[1], grid.max() + 1), bool)
    found[np.arange(grid.shape[1]), grid] = True
    return found


def placement(sharding: Sharding, shape: Shape) -> Placement:
    """Returns the process of each shard, with replicas as in `jax.Shard.replica_id`.

    Shards are ordered by their position in the array, in C order.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        devices = sharding.mesh.devices
        processes = np.array([device.process_index for device in devices.flat])
        return placement_on_mesh(sharding, processes.reshape(devices.shape))
    holders: dict[tuple[int, ...], list[int]] = {}
    indices: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    for device, index in indices.items():
        starts = tuple(part.start or 0 for part in index)
        holders.setdefault(starts, []).append(device.process_index)
    return np.array([holders[key] for key in sorted(holders)], np.int64).T


def placement_in_order(processes: int) -> Place:
    """Returns a placement on an abstract mesh with devices in process order."""

    def place(sharding: Sharding, shape: Shape) -> Placement:
        assert isinstance(sharding, NamedSharding)
        mesh = sharding.mesh
        assert isinstance(mesh, AbstractMesh)
        devices = np.arange(mesh.size) // (mesh.size // processes)
        return placement_on_mesh(sharding, devices.reshape(mesh.axis_sizes))

    return place


def placement_on_mesh(sharding: NamedSharding, processes: Placement) -> Placement:
    """Returns the process of each shard, from that of each device of the mesh."""
    names = list(sharding.mesh.axis_names)
    split: list[int] = []
    for axes in sharding.spec:
        if axes is None:
            continue
        split += [names.index(name) for name in np.atleast_1d(np.array(axes)).tolist()]
    others = [axis for axis in range(len(names)) if axis not in split]
    replicas = math.prod(processes.shape[axis] for axis in others)
    return processes.transpose(*others, *split).reshape(replicas, -1).astype(np.int64)
