"""Conversion of stored values to the caller's types; jax is imported only if needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxckpt import _state
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._zarr.metadata import Array, Region


def assemble(blocks: Mapping[Region, Array], found: LeafInfo, wanted: LeafInfo) -> Any:
    """Makes a leaf as `wanted`; raises OverflowError if a number is too large."""
    if wanted.kind == "prng_key":
        from flaxckpt._arrays import to_device

        [data] = blocks.values()
        return to_device.make_keys(data, wanted)
    typed = {r: _as_wanted(block, found, wanted) for r, block in blocks.items()}
    is_in_jax = _state.dtypes.is_in_jax(wanted.dtype or "")
    if wanted.python_type == "jax.Array" and is_in_jax:
        from flaxckpt._arrays import to_device

        return to_device.to_devices(typed, wanted)
    [array] = typed.values()
    if wanted.python_type == "numpy.generic":
        return array[()]
    if wanted.kind == "array":
        return array if array.flags.writeable else array.copy()
    return array.item()


def _as_wanted(array: Array, found: LeafInfo, wanted: LeafInfo) -> Array:
    """Converts stored values, which may have been cast while they were read."""
    dtype_name, stored = wanted.dtype or "", found.dtype or ""
    is_wanted = _state.numpy_dtypes.name(array.dtype) == dtype_name
    if not is_wanted or _state.dtypes.stored_name(stored) == dtype_name:
        array = _state.numpy_dtypes.from_stored(array, stored)
    if _state.numpy_dtypes.name(array.dtype) == dtype_name:
        return array
    # A Python number has no width: check the range now.
    is_number = wanted.is_python_number or found.is_python_number
    if is_number and _state.dtypes.kind(dtype_name) in ("int", "uint"):
        low, high = _state.dtypes.bounds(dtype_name)
        if not low <= array.item() <= high:
            raise OverflowError(str(array))
    converted = _state.numpy_dtypes.convert(array, dtype_name)
    is_float = _state.dtypes.kind(dtype_name) in ("float", "complex")
    if is_number and is_float and np.isfinite(array) and not np.isfinite(converted):
        raise OverflowError(str(array))
    return converted
