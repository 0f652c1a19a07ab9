"""Whether accelerators have memory for copies of the arrays that are saved."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

_MARGIN = 0.05
"""Part of the memory of a device that stays free, because it may be fragmented."""

_largest: collections.defaultdict[jax.Device, int] = collections.defaultdict(int)
"""Device -> bytes of the largest copies so far, which the peak of its memory includes.
"""


def has_room(arrays: Sequence[jax.Array]) -> bool:
    """Returns True if all devices have memory for copies of `arrays` beside a step.

    The peak counts, less copies of earlier saves, as memory is less full between steps.
    Returns False if a device does not report its memory, as CPUs.
    """
    return all(
        _has_room(device.memory_stats() or {}, size, _largest[device])
        for device, size in _sizes(arrays).items()
    )


def _has_room(stats: Mapping[str, int], size: int, largest: int) -> bool:
    """Returns True if `size` bytes fit; `largest` is the size of earlier copies."""
    if "bytes_limit" not in stats or "bytes_in_use" not in stats:
        return False
    peak = stats.get("peak_bytes_in_use", 0)
    used = max(stats["bytes_in_use"], peak - largest)
    return used + size <= (1 - _MARGIN) * stats["bytes_limit"]


def note_copies(arrays: Sequence[jax.Array]) -> None:
    """Notes that `arrays`, of one device each, were copied on their devices."""
    for device, size in _sizes(arrays).items():
        _largest[device] = max(_largest[device], size)


def _sizes(arrays: Sequence[jax.Array]) -> dict[jax.Device, int]:
    """Returns the bytes of arrays on each device, without those in host memory."""
    sizes: dict[jax.Device, int] = {}
    for array in arrays:
        device = device_of(array.sharding)
        if device is not None:
            sizes[device] = sizes.get(device, 0) + array.nbytes
    return sizes


def is_beside(array: jax.Array) -> bool:
    """Returns True if an array of one device is in host memory beside the device."""
    return device_of(array.sharding) is None


@functools.lru_cache(maxsize=1024)
def device_of(sharding: Sharding) -> jax.Device | None:
    """Returns the single device of a sharding; None if it is in host memory beside."""
    devices: set[Any] = sharding.device_set
    (device,) = devices
    is_there = sharding.memory_kind in (None, device.default_memory().kind)
    return device if is_there else None
