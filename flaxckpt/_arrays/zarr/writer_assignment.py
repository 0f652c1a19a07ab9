"""Which replica writes a part of an array, so that all processes write equally much.

Every process decides alike, by itself: from shardings and sizes only.
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
"""For each replica, and each shard, the process that has it."""

Place: TypeAlias = Callable[[Sharding, Shape], Placement]


_FILE_BYTES = 2**15
"""What a file of its own costs, in terms of the bytes that are written meanwhile."""


class Task(NamedTuple):
    """An array to be written.

    Attributes:
        sharding: Of it; None if process 0 has it, and writes it.
        shape: Of the array.
        parts: In how many equal parts each shard is written, by as many replicas.
        part_bytes: Size of a part.
    """

    sharding: Sharding | None
    shape: Shape
    parts: int
    part_bytes: int


class Writers(NamedTuple):
    """Who writes the shards of an array.

    Of the replicas that hold a shard, equal groups of neighbours write a part each, and
    of each group the one in the same place. That is another one for each shard, so that
    an array whose shards are too small to be written in parts is divided, too.

    Attributes:
        replicas: How many hold each shard.
        parts: In how many parts it is written.
        place: Of the one that writes the first shard, in its group.
        shards: How many shards the array has.
    """

    replicas: int
    parts: int
    place: int = 0
    shards: int = 1

    def part(self, replica: int, shard: int = 0) -> int | None:
        """Which part of a shard a replica writes; None if it writes nothing.

        Args:
            replica: As `jax.Shard.replica_id` counts them.
            shard: The number of the shard, the last axis of the array fastest.
        """
        group = self.replicas // self.parts
        place = (self.place + _turn(shard, self.shards, group)) % group
        return replica // group if replica % group == place else None


def _turn(shard: Any, shards: int, group: int) -> Any:
    """By how many places the writer of a shard is beyond that of the first."""
    return shard * group // shards


def assign(
    tasks: Sequence[Task], processes: int, place: Place | None = None
) -> tuple[list[int], list[int]]:
    """Decides who writes what: the largest first, where least is to be done so far.

    That is bytes to write and files to make.

    Args:
        tasks: The arrays, in an order that all processes have in common.
        processes: How many there are.
        place: Says where shards are; by default, jax does.

    Returns:
        For each task, the place in its group of the replica that writes; and for each
        process, how many bytes it writes.
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
    """Who can write an array.

    Attributes:
        places: The places in a group that make a difference.
        processes: For each of them, the process of every part of every shard.
    """

    places: list[int]
    processes: Placement


_FIRST = _Choices([0], np.zeros((1, 1), np.int64))


def chosen(task: Task, place_in_group: int, place: Place) -> Placement:
    """The process of every part of every shard that is written."""
    rows = _choices(task, place)
    found: Placement = rows.processes[rows.places.index(place_in_group)]
    return found


def shards(task: Task, processes: int, place: Place) -> Placement:
    """How many different shards of an array with a sharding each process has."""
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
    """So that arrays of one sharding are seen to be alike."""
    return () if isinstance(task.sharding, NamedSharding) else task.shape


@functools.lru_cache(maxsize=1024)
def _groups(place: Place, sharding: Sharding, shape: Shape, parts: int) -> _Choices:
    processes = place(sharding, shape)
    replicas, count = processes.shape
    group = replicas // parts
    shard = np.arange(count)[None, :]
    turned = (np.arange(group)[:, None] + _turn(shard, count, group)) % group
    by_place = processes.reshape(parts, group, count)[:, turned, shard].swapaxes(0, 1)
    distinct, places = np.unique(
        by_place.reshape(group, parts * count), axis=0, return_index=True
    )
    return _Choices(places.tolist(), distinct)


# ---- where shards are -------------------------------------------------------------


def placement(sharding: Sharding, shape: Shape) -> Placement:
    """Which process has which shard, as `jax.Shard.replica_id` counts replicas.

    Shards are in the order of where they are in the array, the last axis fastest.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        devices = sharding.mesh.devices
        processes = np.array([device.process_index for device in devices.flat])
        return on_mesh(sharding, processes.reshape(devices.shape))
    holders: dict[tuple[int, ...], list[int]] = {}
    indices: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    for device, index in indices.items():
        starts = tuple(part.start or 0 for part in index)
        holders.setdefault(starts, []).append(device.process_index)
    return np.array([holders[key] for key in sorted(holders)], np.int64).T


def in_order(processes: int) -> Place:
    """Placement on an abstract mesh whose devices belong to processes in order."""

    def place(sharding: Sharding, shape: Shape) -> Placement:
        assert isinstance(sharding, NamedSharding)
        mesh = sharding.mesh
        assert isinstance(mesh, AbstractMesh)
        devices = np.arange(mesh.size) // (mesh.size // processes)
        return on_mesh(sharding, devices.reshape(mesh.axis_sizes))

    return place


def on_mesh(sharding: NamedSharding, processes: Placement) -> Placement:
    """Which process has which shard.

    Args:
        sharding: How an array is split.
        processes: For each device of its mesh, its process.
    """
    names = list(sharding.mesh.axis_names)
    split: list[int] = []
    for axes in sharding.spec:
        if axes is None:
            continue
        split += [names.index(name) for name in np.atleast_1d(np.array(axes)).tolist()]
    others = [axis for axis in range(len(names)) if axis not in split]
    replicas = math.prod(processes.shape[axis] for axis in others)
    return processes.transpose(*others, *split).reshape(replicas, -1).astype(np.int64)
