"""Simulates a save by many processes, without running them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from flaxckpt import _arrays, _checkpoint, _formats, _state, _util, _zarr, errors
from flaxckpt._inspect.simulate_tier import (
    Holders,
    Numbers,
    Rates,
    SimulatedTier,
    simulate_tier,
)
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import PyTree
from flaxckpt._zarr.array_layout import ArrayLayout, check_layout

EXCHANGES = 5
"""The number of message exchanges in a save; see `_distributed.agreement`: start, path,
all data written, committed, steps deleted.
"""

_NOWHERE = Path(os.devnull, "simulated")

_DATABASE_FILES = 2
"""The files of a database without values: its manifest, and the nodes of its tree."""

_GOOD_BALANCE = 1.1

_SECS_PER_LEAF = 60e-6
"""Time of process 0 to describe a leaf; measured with 100,000 leaves."""


@dataclasses.dataclass(frozen=True, slots=True)
class Simulation:
    """The plan of a save by many processes, and of its restore.

    Attributes:
        processes: The number of processes.
        leaves: Of the state, including containers without leaves.
        written_bytes: Array bytes that each process writes, before compression.
        written_files: The number of files that each process writes.
        read_bytes: Bytes that each process reads to restore the same state.
        metadata_bytes: Size of all files other than arrays; process 0 writes them.
        exchanges: How often all processes wait for each other.
        save_secs: Until the save is durable, from the bandwidths.
        restore_secs: Until all values are in memory.
        tier: The same with a local disk for each process; None without
            `staging_copies`.
    """

    processes: int
    leaves: int
    written_bytes: tuple[int, ...]
    written_files: tuple[int, ...]
    read_bytes: tuple[int, ...]
    metadata_bytes: int
    exchanges: int
    save_secs: float
    restore_secs: float
    tier: SimulatedTier | None = None

    @property
    def total_bytes(self) -> int:
        """Size of all arrays, before compression."""
        return sum(self.written_bytes)

    @property
    def balance(self) -> float:
        """The largest size that a process writes relative to the mean; 1 is best."""
        return max(self.written_bytes) * self.processes / (self.total_bytes or 1)

    _repr_pretty_ = _util.card.show_printed

    def __str__(self) -> str:
        mean = self.total_bytes / self.processes
        files, size = self.written_files, _util.humanize.size
        why = "shards under 1 MiB, or without a divisible axis, are not divided"
        rows = (
            ("processes", f"{self.processes:,}"),
            ("leaves", f"{self.leaves:,}"),
            ("arrays", size(self.total_bytes)),
            ("written by a process", f"{size(mean)} on average"),
            ("", f"{size(max(self.written_bytes))} at most ({self.balance:.3f} x)"),
            *([("", why)] if self.balance > _GOOD_BALANCE else []),
            ("files of a process", f"{sum(files) / len(files):,.0f} on average"),
            ("", f"{max(files):,} at most"),
            ("metadata", size(self.metadata_bytes)),
            ("exchanges", f"{self.exchanges}"),
            ("read by a process", f"{size(max(self.read_bytes))} at most"),
            ("save", f"{self.save_secs:.1f} s"),
            ("restore", f"{self.restore_secs:.1f} s"),
            *(self.tier.rows() if self.tier is not None else ()),
        )
        return "\n".join(f"{name:21} {value}" for name, value in rows)


@_util.gc_pause.pause()
@_util.guessed_names.explain
def simulate(
    abstract_state: PyTree,
    *,
    processes: int,
    layout: ArrayLayout | None = None,
    write_bytes_per_sec: float = 1e9,
    read_bytes_per_sec: float = 2e9,
    storage_bytes_per_sec: float = math.inf,
    message_secs: float = 2e-4,
    staging_copies: int | None = None,
    disk_bytes_per_sec: float = 2e9,
    peer_bytes_per_sec: float = 1e9,
) -> Simulation:
    """Plans a save by many processes, and its restore, without any devices.

    ```python
    import jax
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    mesh = AbstractMesh((64, 4), ("data", "model"))
    split = NamedSharding(mesh, PartitionSpec("data", "model"))
    state = {"kernel": jax.ShapeDtypeStruct((8192, 8192), "float32", sharding=split)}
    print(flaxckpt.simulate(state, processes=64))
    ```

    Args:
        abstract_state: The state, of `jax.ShapeDtypeStruct`s with `NamedSharding`s over
            a common `AbstractMesh`. Its devices are assigned to processes in order,
            with equal numbers.
        processes: The number of processes.
        layout: How arrays are cut and encoded.
        write_bytes_per_sec: Write bandwidth of a process.
        read_bytes_per_sec: Read bandwidth of a process.
        storage_bytes_per_sec: Total bandwidth of the storage.
        message_secs: The time of a message between two processes.
        staging_copies: As for `Checkpointer`, to also plan saves to local disks, one
            for each process, and restores from them. None plans without them.
        disk_bytes_per_sec: Bandwidth of a local disk, of reads and of writes.
        peer_bytes_per_sec: Bandwidth of the network of a process, in each direction.

    Raises:
        OptionError: The shardings have no common AbstractMesh, or its devices cannot be
            divided among the processes, or as many copies as processes.
        UnsupportedLeafError, LeafNameError: As for `save`.
    """
    options = _checkpoint.commit.SaveOptions(layout=check_layout(layout))
    table, structure = _checkpoint.save.plan_leaves(
        _state.flax_state.flatten(abstract_state), options
    )
    infos = tuple([leaf.info for leaf in table.values()])
    _check_meshes(infos, processes)
    if staging_copies is not None:
        _check_copies(staging_copies, processes)
    names = _checkpoint.save.check_names(infos, options.items)
    manifest = _formats.native_manifest.Manifest(
        infos, structure, options.layout.encoding
    )
    contents = _formats.native_contents.Contents(
        manifest=manifest, names=names, segment_bytes=manifest.segment_bytes()
    )
    metadata = _checkpoint.commit.metadata_files(contents, _NOWHERE)

    stored = [info for info in infos if info.chunk_shape is not None]
    tasks = [_arrays.layout.task(info) for info in stored]
    place = _zarr.writer_assignment.placement_in_order(processes)
    places, written = _zarr.writer_assignment.assign(tasks, processes, place)
    files, by_holders = _plan_files(tasks, places, written, place)
    files[0] += len(metadata)
    read = _read_bytes(tasks, processes, place)
    metadata_bytes = sum(map(len, metadata.values()))
    describing = len(infos) * _SECS_PER_LEAF + metadata_bytes / write_bytes_per_sec
    exchange_secs = (processes + 1) * message_secs
    save_secs = EXCHANGES * exchange_secs + max(
        describing,
        max(written) / write_bytes_per_sec,
        sum(written) / storage_bytes_per_sec,
    )
    tier = None
    if staging_copies is not None:
        tier = simulate_tier(
            by_holders,
            read,
            metadata,
            len(infos) * _SECS_PER_LEAF,
            EXCHANGES,
            exchange_secs,
            staging_copies,
            Rates(
                write_bytes_per_sec,
                read_bytes_per_sec,
                storage_bytes_per_sec,
                disk_bytes_per_sec,
                peer_bytes_per_sec,
            ),
        )
    return Simulation(
        processes,
        len(infos),
        tuple(written),
        tuple(files),
        tuple(read),
        metadata_bytes,
        EXCHANGES,
        save_secs,
        max(max(read) / read_bytes_per_sec, sum(read) / storage_bytes_per_sec),
        tier,
    )


def _check_copies(copies: int, processes: int) -> None:
    _util.arguments.check_int("staging_copies", copies, least=0)
    if copies >= processes:
        raise errors.OptionError(
            f"staging_copies={copies}, but a part is copied to other processes, and of"
            f" {processes} there are {processes - 1}: pass at most {processes - 1}"
        )


def _check_meshes(infos: Sequence[LeafInfo], processes: int) -> None:
    shardings = {info.sharding for info in infos if info.sharding is not None}
    meshes = {s.mesh if isinstance(s, NamedSharding) else s for s in shardings}
    [mesh] = meshes if len(meshes) == 1 else [None]
    if not isinstance(mesh, AbstractMesh):
        raise errors.OptionError(
            "all shardings must be NamedShardings over one jax.sharding.AbstractMesh,"
            f" found {len(meshes)} meshes:"
            f" {', '.join(sorted({_kind(mesh) for mesh in meshes})) or 'none'}"
        )
    if processes < 1 or mesh.size % processes:
        raise errors.OptionError(
            f"the {mesh.size} devices of the mesh cannot be divided among {processes}"
            " processes: choose a number that divides them"
        )


def _kind(mesh: object) -> str:
    return "a Mesh of devices" if isinstance(mesh, Mesh) else type(mesh).__name__


def _plan_files(
    tasks: Sequence[_zarr.writer_assignment.Task],
    places: Sequence[int],
    written: Sequence[int],
    place: _zarr.writer_assignment.Place,
) -> tuple[list[int], dict[Holders, Numbers]]:
    """Returns how many files each process writes, and bytes by sets of holders."""
    counts = np.zeros(len(written), np.int64)
    counts[0] = _DATABASE_FILES
    small: dict[Holders, Numbers] = {}
    total: dict[Holders, Numbers] = {}
    sizes = _arrays.write.choose_sizes(sum(written))
    kinds = collections.Counter(zip(tasks, places, strict=True))  # most are alike
    for (task, chosen), repeats in kinds.items():
        writers = _zarr.writer_assignment.writing_processes(task, chosen, place).ravel()
        mine = np.bincount(writers, minlength=len(counts)) * task.part_bytes
        is_large = mine >= sizes.own
        groups = _group_shards(place, task.sharding, len(written))
        for holders, mask in groups.items():
            own = writers[np.resize(mask, len(writers))]
            some = np.bincount(own, minlength=len(counts)) * task.part_bytes
            counts += np.where(is_large, -(-some // sizes.full), 0) * repeats
            for of, more in (total, some), (small, np.where(is_large, 0, some)):
                of[holders] = of.get(holders, 0) + more * repeats
    for some in small.values():
        counts += -(-some // sizes.full_shared)
    return [int(count) for count in counts], total


@functools.lru_cache(maxsize=64)
def _group_shards(
    place: _zarr.writer_assignment.Place, sharding: Sharding | None, processes: int
) -> Mapping[Holders, Numbers]:
    """Returns the holders -> whether they hold each shard of an array."""
    if sharding is None:
        return {np.ones(processes, bool).tobytes(): np.ones(1, bool)}
    holds = _zarr.writer_assignment.holders(sharding, (), place)
    rows = [row.tobytes() for row in holds]
    return {found: np.array([row == found for row in rows]) for found in {*rows}}


def _read_bytes(
    tasks: Sequence[_zarr.writer_assignment.Task],
    processes: int,
    place: _zarr.writer_assignment.Place,
) -> list[int]:
    """Returns the bytes each process reads: every shard of its devices, once."""
    sizes = np.zeros(processes, np.int64)
    for task in tasks:
        if task.sharding is None:
            sizes += task.part_bytes
        else:
            shards = _zarr.writer_assignment.shards(task, processes, place)
            sizes += shards * (task.part_bytes * task.parts)
    return [int(size) for size in sizes]
