"""Simulates a save to the local disks of many processes, and restores from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.sharding import Sharding

from flaxckpt import _arrays, _checkpoint, _run, _util, _zarr
from flaxckpt._zarr.writer_assignment import Place, Task

_Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_NONE = -1


class Rates(NamedTuple):
    """Bandwidths, in bytes per second, as the arguments of `simulate`."""

    write: float
    read: float
    storage: float
    disk: float
    peer: float


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedTier:
    """The plan of a save to local disks with copies at peers, and of its restores.

    Tuples have one number per process. If all disks are lost, a restore is the one of
    `Simulation`, from the run directory.

    Attributes:
        copies: Number of copies of each part at other processes.
        disk_bytes: A step on each local disk: the part, the copies, and the metadata.
        sent_bytes: What each process sends for copies.
        message_bytes: What process 0 sends to each other process: metadata.
        save_secs: Until the save is acknowledged: durable on all local disks.
        copy_secs: From then on, until all copies are durable.
        upload_secs: From then on, until the step is in the run directory.
        pulled_bytes: What each process copies from peers for a restore with all disks.
        restore_secs: Until all values are in memory.
        lost: The process whose machine and disk are lost; the one that reads most.
        lost_pulled_bytes: What each process copies from peers without this disk.
        lost_directory_bytes: What it copies from the run directory; 0 with a copy.
        lost_restore_secs: Until all values are in memory.
    """

    copies: int
    disk_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    message_bytes: int
    save_secs: float
    copy_secs: float
    upload_secs: float
    pulled_bytes: tuple[int, ...]
    restore_secs: float
    lost: int
    lost_pulled_bytes: tuple[int, ...]
    lost_directory_bytes: tuple[int, ...]
    lost_restore_secs: float

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields the names and values of a table."""

        def most(sizes: Sequence[int]) -> str:
            return _util.humanize.size(max(sizes))

        yield "on a local disk", f"{most(self.disk_bytes)} at most"
        yield "local save", f"{self.save_secs:.1f} s"
        sent = f"{most(self.sent_bytes)} sent by a process at most"
        yield "its copies", f"{self.copy_secs:.1f} s; {sent}"
        yield "its upload", f"{self.upload_secs:.1f} s"
        pulled = f"{most(self.pulled_bytes)} from peers at most"
        yield "local restore", f"{self.restore_secs:.1f} s; {pulled}"
        pulled = f"{most(self.lost_pulled_bytes)} from peers at most"
        yield "without one machine", f"{self.lost_restore_secs:.1f} s; {pulled}"
        yield "", f"{most(self.lost_directory_bytes)} from the run directory"


def simulate_tier(
    tasks: Sequence[Task],
    places: Sequence[int],
    written: Sequence[int],
    read: Sequence[int],
    place: Place,
    metadata: Mapping[str, bytes],
    describing_secs: float,
    exchanges: int,
    exchange_secs: float,
    copies: int,
    rates: Rates,
) -> SimulatedTier:
    """Plans a save to local disks, and its restores, from the plan of a save.

    Args:
        tasks: The arrays.
        places: The places of their writers, and
        written: the bytes that each process writes, as `assign` returns them.
        read: The bytes that each process needs.
        place: The placement of shards.
        metadata: The files other than arrays.
        describing_secs: Time of process 0 to describe the leaves.
        exchanges: Exchanges of messages in a save to one directory.
        exchange_secs: The time of one.
        copies: Number of copies of each part.
        rates: The bandwidths.
    """
    count, parts = len(written), np.array(written, np.int64)
    names = [str(process) for process in range(count)]  # a domain for each
    keepers = _run.tiers.parts.choose_copies(names, copies)
    kept_by = np.array([[n, *some] for n, some in enumerate(keepers)], np.int64)
    received = np.bincount(
        kept_by[:, 1:].ravel(), np.repeat(parts, copies), minlength=count
    )
    metadata_bytes = sum(map(len, metadata.values()))
    pieces = _checkpoint.save_distributed.pack_metadata(metadata, ({},) * count)
    message_bytes = sum(map(len, pieces))
    # The metadata are sent when all parts are written. The others need no path first,
    # but tell when their parts are durable.
    talking = (exchanges + 1 + len(pieces)) * exchange_secs
    sending = message_bytes * (count - 1) / rates.peer
    writing = max(describing_secs, max(written) / rates.disk)
    copying = max(copies * max(written), max(received)) / rates.peer
    upload = max(max(written) / rates.write, sum(written) / rates.storage)

    needed = _find_needed(tasks, places, written, place)
    lost = int(needed.sum(axis=1).argmax())
    reading = max(read) / rates.disk
    pulled, _, pull_secs = _copy_needed(needed, kept_by, _NONE, rates)
    lost_pulled, far, lost_secs = _copy_needed(needed, kept_by, lost, rates)
    return SimulatedTier(
        copies=copies,
        disk_bytes=_ints(parts + received + metadata_bytes),
        sent_bytes=_ints(parts * copies),
        message_bytes=message_bytes,
        save_secs=talking + writing + sending + metadata_bytes / rates.disk,
        copy_secs=max(copying, max(received) / rates.disk)
        + 2 * exchange_secs * (copies > 0),
        upload_secs=upload + metadata_bytes / rates.write,
        pulled_bytes=pulled,
        restore_secs=pull_secs + reading,
        lost=lost,
        lost_pulled_bytes=lost_pulled,
        lost_directory_bytes=far,
        lost_restore_secs=lost_secs + reading,
    )


def _ints(sizes: _Numbers) -> tuple[int, ...]:
    return tuple(map(int, sizes))


def _find_needed(
    tasks: Sequence[Task], places: Sequence[int], written: Sequence[int], place: Place
) -> _Numbers:
    """Returns the bytes that each process (row) needs of the part of each (column).

    A process copies whole files, also if it needs one chunk of many.
    """
    processes, sizes = len(written), _arrays.write.choose_sizes(sum(written))
    first: dict[Sharding | None, tuple[int, int]] = {}
    holders = [np.zeros((0, processes), bool)]  # of each shard of each sharding
    rows = [np.zeros((4, 0), np.int64)]  # writer, array (0: small), shard, bytes
    for number, (task, chosen) in enumerate(zip(tasks, places, strict=True), start=1):
        if task.sharding not in first:
            found = _find_holders(task, processes, place)
            first[task.sharding] = sum(map(len, holders)), len(found)
            holders.append(found)
        writers = _zarr.writer_assignment.writing_processes(task, chosen, place).ravel()
        start, shards = first[task.sharding]
        is_large = np.bincount(writers)[writers] * task.part_bytes >= sizes.own
        shard = start + np.arange(len(writers)) % shards
        bytes_ = np.full(len(writers), task.part_bytes)
        rows.append(np.stack([writers, is_large * number, shard, bytes_]))
    all_rows = np.concatenate(rows, axis=1)
    order = np.lexsort((all_rows[1], all_rows[0]))
    writer, array, shard, size = all_rows[:, order]
    is_first = np.diff(writer * (len(tasks) + 1) + array, prepend=-1) != 0
    starts = np.cumsum(size) - size
    starts -= np.maximum.accumulate(np.where(is_first, starts, 0))
    number = starts // np.where(array > 0, sizes.full, sizes.full_shared)
    file = np.cumsum(is_first | (np.diff(number, prepend=0) != 0))
    holds = np.concatenate(holders).astype(float)
    needed = np.zeros((processes, processes))
    edges = np.searchsorted(writer, np.arange(processes + 1))
    for process in np.flatnonzero(np.diff(edges)):
        own = slice(edges[process], edges[process + 1])
        files = file[own] - file[own][0]
        some, at = np.unique(shard[own], return_inverse=True)
        contains = np.zeros((files[-1] + 1, len(some)))
        contains[files, at] = 1
        needed[:, process] = np.bincount(files, size[own]) @ (
            contains @ holds[some] > 0
        )
    return needed


def _find_holders(task: Task, processes: int, place: Place) -> _Numbers:
    """Returns whether each process (column) holds each shard (row)."""
    if task.sharding is None:
        return np.ones((1, processes), bool)
    grid = place(task.sharding, task.shape)
    holders = np.zeros((grid.shape[1], processes), bool)
    holders[np.arange(grid.shape[1]), grid] = True
    return holders


def _copy_needed(
    needed: _Numbers, kept_by: _Numbers, lost: int, rates: Rates
) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """Returns what each process copies from peers and the run directory; seconds.

    Each part comes from the next process that has it, as in `Sources.others`.
    """
    count = len(needed)
    own = np.arange(count)[:, None]
    distance = np.full(needed.shape, count)
    for keeper in kept_by.T:
        found = np.where(keeper == lost, count, (keeper - own) % count)
        distance = np.minimum(distance, found)
    pulled = np.where((distance > 0) & (distance < count), needed, 0)
    far = np.where(distance == count, needed, 0).sum(axis=1)
    senders = ((own + distance) % count).ravel()
    sent = np.bincount(senders, pulled.ravel(), minlength=count)
    received = pulled.sum(axis=1)
    secs = max(
        max(received.max(), sent.max()) / rates.peer,
        (received + far).max() / rates.disk,
        far.max() / rates.read,
        far.sum() / rates.storage,
    )
    return _ints(received), _ints(far), float(secs)
