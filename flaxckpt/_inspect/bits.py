"""Compares leaves bit by bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from flaxckpt import _state
from flaxckpt._types import Shape
from flaxckpt._zarr.metadata import Array


@dataclasses.dataclass(frozen=True, slots=True)
class BitDiff:
    """The difference of two leaves of equal shape and dtype, bit by bit.

    Attributes:
        different: The number of different elements.
        size: The number of elements of the leaf.
        bits: The number of different bits in all elements.
        max_abs: The largest difference of two elements, exact for integers; infinite
            if only one of them is finite, or if the leaf has no numbers.
        first: The index of the first different element.
        devices: The devices that hold different elements, of those that hold the
            leaf; empty for leaves that are no jax arrays.
        all_devices: True if all devices of the leaf hold different elements.
    """

    different: int
    size: int
    bits: int
    max_abs: float
    first: Shape = ()
    devices: tuple[str, ...] = ()
    all_devices: bool = True

    def __str__(self) -> str:
        bits = f"{self.bits} bit{'' if self.bits == 1 else 's'}"
        text = (
            f"{self.different} of {self.size} elements ({bits}), by"
            f" {self.max_abs:.3g} at most, first at {list(self.first)}"
        )
        return text if self.all_devices else f"{text}, on {', '.join(self.devices)}"


def compare(value: Any, stored: Any) -> BitDiff | None:
    """Returns the difference of a leaf and a stored leaf; None if all bits are equal.

    All replicas of a jax array are compared.
    """
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        is_same = _state.bits.is_same(value, stored)
        return None if is_same else BitDiff(1, 1, 0, math.inf)
    reference = np.asarray(_state.bits.key_data(stored))
    flips: Array | None = None
    largest: float = 0
    devices: dict[str, bool] = {}  # device -> whether elements differ there
    for device, index, part in _shards(_state.bits.key_data(value)):
        wanted = reference[index]
        flipped = _state.bits.count_flips(part, wanted)
        if device is not None:
            devices[device] = devices.get(device, False) or flipped is not None
        if flipped is None:
            continue
        if flips is None:
            flips = np.zeros(reference.shape, np.uint8)
        flips[index] = np.maximum(flips[index], flipped)
        change = _state.bits.distances(part[flipped > 0], wanted[flipped > 0])
        largest = max(largest, _state.bits.largest(change))
    if flips is None:
        return None
    differs = np.flatnonzero(flips)
    return BitDiff(
        different=len(differs),
        size=reference.size,
        bits=int(flips.sum(dtype=np.int64)),
        max_abs=largest,
        first=tuple(int(i) for i in np.unravel_index(differs[0], reference.shape)),
        devices=tuple(
            device for device, differs_there in devices.items() if differs_there
        ),
        all_devices=all(devices.values()),
    )


def _shards(value: Any) -> Iterator[tuple[str | None, Any, Array]]:
    """Yields the device, the place and the values of each shard, one at a time."""
    if not isinstance(value, jax.Array):
        yield None, ..., np.asarray(value)
        return
    for shard in value.addressable_shards:
        yield str(shard.device), shard.index or ..., np.asarray(shard.data)
