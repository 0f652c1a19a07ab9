"""Copies of arrays within the memory of their devices."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from flaxckpt import errors

_log = logging.getLogger(__name__)


class DeviceCopy:
    """A copy of an array within its device, perhaps in progress.

    Keeps the original until the copy is whole: a device may report a lack of memory
    late. `value` is the copy, an array in its memory, or, after a failure, the
    original.
    """

    __slots__ = ("_copy", "_original", "value")

    def __init__(self, original: jax.Array, copy: jax.Array) -> None:
        self.value = self._copy = copy
        self._original: jax.Array | None = original

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._copy.dtype

    @property
    def nbytes(self) -> int:
        """Size of the array, in bytes."""
        return self._copy.nbytes

    def wait(self) -> None:
        """Waits; raises RuntimeError if the copy failed and the original is gone."""
        try:
            jax.block_until_ready(self.value)
        except RuntimeError as error:
            if self._original is None or self._original.is_deleted():
                raise
            _warn(error)
            self.value = self._original
        self._original = None

    def delete(self) -> None:
        """Frees the memory of the copy, once transfers from it have ended."""
        if not self._copy.is_deleted():
            self._copy.delete()
        self._original = None


def copy(
    arrays: Sequence[jax.Array], *, needs_room: bool
) -> list[DeviceCopy | jax.Array] | None:
    """Copies arrays of one device each within their memory, without waiting.

    Runs a program on each device alone, so that processes need not agree on an order.
    The arrays may be donated after the call. Returns None if the memory does not
    suffice; with `needs_room`, a training step must have enough beside the copies.
    """
    if needs_room and not has_room(arrays):
        _log.debug("no memory on devices for a snapshot of %d arrays", len(arrays))
        return None
    by_device: dict[jax.Device | None, list[int]] = {}
    for index, array in enumerate(arrays):
        device = _device_of(array.sharding)
        by_device.setdefault(device, []).append(index)
    copies: dict[int, DeviceCopy | jax.Array] = {}
    try:
        for device, indices in by_device.items():
            originals = [arrays[index] for index in indices]
            if device is None:
                copies |= zip(indices, _copy_beside(originals), strict=True)
                continue
            values = _program(device)(originals)
            copies |= zip(indices, map(DeviceCopy, originals, values), strict=True)
    except jax.errors.JaxRuntimeError as error:
        _warn(error)
        return None
    _note_copies(arrays)
    return [copies[index] for index in range(len(arrays))]


def _warn(error: RuntimeError) -> None:
    _log.warning(
        "a snapshot on the devices failed, so arrays are copied to the host: %s",
        errors.one_line(error),
    )


def _copy_beside(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies arrays in host memory, where accelerators do not compute."""
    places = [array.sharding for array in arrays]
    return list(jax.device_put(list(arrays), places, may_alias=False))


@functools.cache
def _program(device: jax.Device) -> Any:
    """Returns a compiled function that copies a list of arrays on a device.

    A call takes a tenth of the time of `device_put`. Without the device, arrays that
    are not committed would move to the default device.
    """
    return jax.jit(
        lambda arrays: [jnp.copy(array) for array in arrays],
        out_shardings=SingleDeviceSharding(device),
    )


# ---- the memory of devices ------------------------------------------------------

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


def _note_copies(arrays: Sequence[jax.Array]) -> None:
    """Notes that `arrays`, of one device each, were copied on their devices."""
    for device, size in _sizes(arrays).items():
        _largest[device] = max(_largest[device], size)


def _sizes(arrays: Sequence[jax.Array]) -> dict[jax.Device, int]:
    """Returns the bytes of arrays on each device, without those in host memory."""
    sizes: dict[jax.Device, int] = {}
    for array in arrays:
        device = _device_of(array.sharding)
        if device is not None:
            sizes[device] = sizes.get(device, 0) + array.nbytes
    return sizes


def is_beside(array: jax.Array) -> bool:
    """Returns True if an array of one device is in host memory beside the device."""
    return _device_of(array.sharding) is None


@functools.lru_cache(maxsize=1024)
def _device_of(sharding: Sharding) -> jax.Device | None:
    """Returns the single device of a sharding; None if it is in host memory beside."""
    devices: set[Any] = sharding.device_set
    (device,) = devices
    is_there = sharding.memory_kind in (None, device.default_memory().kind)
    return device if is_there else None
