"""Simulates a save to the local disks of many processes, and restores from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flaxckpt import _checkpoint, _run, _util

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

Holders: TypeAlias = bytes
"""Processes: for each a byte, 1 for those among them."""

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
    written: Mapping[Holders, Numbers],
    read: Sequence[int],
    metadata: Mapping[str, bytes],
    describing_secs: float,
    exchanges: int,
    exchange_secs: float,
    copies: int,
    rates: Rates,
) -> SimulatedTier:
    """Plans saves to local disks and restores; `written` and `read` are per process."""
    holds = np.array([np.frombuffer(holders, bool) for holders in written], float)
    by_holders = np.array([*written.values()])
    parts = by_holders.sum(axis=0)
    count, total, most = len(parts), int(parts.sum()), int(parts.max())
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
    writing = max(describing_secs, most / rates.disk)
    copying = max(copies * most, max(received)) / rates.peer
    upload = max(most / rates.write, total / rates.storage)

    # What a process (row) needs of each part (column): files have the same holders.
    needed = holds.T @ by_holders
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


def _ints(sizes: Numbers) -> tuple[int, ...]:
    return tuple(map(int, sizes))


def _copy_needed(
    needed: Numbers, kept_by: Numbers, lost: int, rates: Rates
) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """Returns what each process copies from peers and the run directory; seconds.

    Each part comes from the first process that has it, as in `Sources.others`.
    """
    count = len(needed)
    part = np.arange(count)
    holders = np.sort(np.where(kept_by == lost, count, kept_by))  # the lost last
    remaining = (holders < count).sum(axis=1)
    source = holders[
        part, _run.tiers.parts.first_source(part[:, None], part, remaining)
    ]
    is_here = np.zeros((count + 1, count), bool)
    is_here[holders.T, part] = True
    pulled = np.where(is_here[:count] | (remaining == 0), 0, needed)
    far = np.where(remaining == 0, needed, 0).sum(axis=1)
    senders = np.minimum(source, count - 1).ravel()  # without bytes if there is none
    sent = np.bincount(senders.ravel(), pulled.ravel(), minlength=count)
    received = pulled.sum(axis=1)
    secs = max(
        max(received.max(), sent.max()) / rates.peer,
        (received + far).max() / rates.disk,
        far.max() / rates.read,
        far.sum() / rates.storage,
    )
    return _ints(received), _ints(far), float(secs)
