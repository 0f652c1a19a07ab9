"""Compares leaves bit by bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxckpt._arrays.zarr.metadata import Array
from flaxckpt._types import Shape


@dataclasses.dataclass(frozen=True, slots=True)
class BitDiff:
    """The difference of two leaves of equal shape and dtype, bit by bit.

    Unlike in `LeafDiff`, NaNs with different payloads differ, and so do 0.0 and -0.0.

    Attributes:
        different: The number of different elements.
        size: The number of elements of the leaf.
        bits: The number of different bits in all elements.
        max_abs: The largest difference of two elements; infinite if only one of them
            is finite, or if the leaf has no numbers.
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

    Args:
        value: A leaf: a jax or numpy array, a number, a string, None.
        stored: A leaf of the same shape and dtype, in the memory of this host.
    """
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        is_equal = type(value) is type(stored) and repr(value) == repr(stored)
        return None if is_equal else BitDiff(1, 1, 0, math.inf)
    reference = np.asarray(key_data(stored))
    flips: Array | None = None
    largest = 0.0
    devices: dict[str, bool] = {}  # device -> whether elements differ there
    for device, index, part in _shards(key_data(value)):
        wanted = reference[index]
        flipped = _count_flips(part, wanted)
        if device is not None:
            devices[device] = devices.get(device, False) or flipped is not None
        if flipped is None:
            continue
        if flips is None:
            flips = np.zeros(reference.shape, np.uint8)
        flips[index] = np.maximum(flips[index], flipped)
        largest = max(largest, _largest_change(part, wanted, flipped > 0))
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


def key_data(value: Any) -> Any:
    """Returns the key data of random keys; other values unchanged."""
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
    return jax.random.key_data(value) if is_key else value


def _shards(value: Any) -> Iterator[tuple[str | None, Any, Array]]:
    """Yields the device, the place and the values of each shard, one at a time."""
    if not isinstance(value, jax.Array):
        yield None, ..., np.asarray(value)
        return
    for shard in value.addressable_shards:
        yield str(shard.device), shard.index or ..., np.asarray(shard.data)


def _count_flips(a: Array, b: Array) -> Array | None:
    """Returns the number of different bits of each element; None if all are equal."""
    x, y = _as_bytes(a), _as_bytes(b)
    if np.array_equal(x, y):
        return None
    flips = np.bitwise_count(x ^ y).sum(axis=-1, dtype=np.uint8)
    return np.asarray(flips).reshape(a.shape)


def _as_bytes(array: Array) -> Array:
    """Returns the bytes of each element, along a new last axis."""
    if array.dtype.name.startswith(("int2", "int4", "uint2", "uint4")):
        array = array.astype(np.int8)  # the other bits of their bytes mean nothing
    flat = np.ascontiguousarray(array).reshape(-1, 1)
    return flat.view(np.uint8)


def _largest_change(a: Array, b: Array, differs: Array) -> float:
    wide: Any = np.complex128 if np.iscomplexobj(a) else np.float64
    x, y = a[differs].astype(wide), b[differs].astype(wide)
    with np.errstate(all="ignore"):
        change = np.abs(x - y)
    # Equal infinities, and NaNs with different payloads, do not differ as numbers.
    change = np.where((x == y) | ((x != x) & (y != y)), 0.0, change)
    return float(np.where(np.isnan(change), math.inf, change).max(initial=0.0))
