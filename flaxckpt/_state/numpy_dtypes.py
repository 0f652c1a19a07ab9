"""Conversions between names of element types and numpy, and arrays as stored."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from flaxckpt._state import dtypes


@functools.lru_cache(maxsize=256)
def name(dtype: Any) -> str:
    """Returns the name of a numpy or jax element type: `bfloat16`, `float32`."""
    return str(np.dtype(dtype).name)


@functools.cache
def to_numpy(dtype_name: str) -> np.dtype[Any]:
    dtypes.check(dtype_name)
    return np.dtype(getattr(ml_dtypes, dtype_name, dtype_name))


@functools.cache
def zarr_2_name(dtype_name: str) -> str:
    """Returns the zarr 2 name of a stored type: `<f4`, or our name if not in numpy."""
    dtype = to_numpy(dtype_name)
    return dtype_name if dtype.isbuiltin != 1 else dtype.newbyteorder("<").str


def to_stored(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns `array` in its storage type; copies only to swap bytes."""
    if name(array.dtype) in dtypes.STORED_AS_BYTES:
        return array.view(np.uint8)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder())


def from_stored(array: np.ndarray[Any, Any], dtype_name: str) -> np.ndarray[Any, Any]:
    wanted = to_numpy(dtype_name)
    return array.view(wanted) if dtype_name in dtypes.STORED_AS_BYTES else array


def check_bools(array: np.ndarray[Any, Any]) -> None:
    """Raises ValueError for bools of other bytes than 0 and 1, undefined for jax."""
    if array.dtype == np.bool_ and array.size:
        largest = int(array.view(np.uint8).max())
        if largest > 1:
            raise ValueError(f"an array of bools has the byte {largest}, wanted 0 or 1")


def convert(array: np.ndarray[Any, Any], dtype_name: str) -> np.ndarray[Any, Any]:
    """Casts `array`, if need be; values beyond a narrower float become infinite."""
    dtype = to_numpy(dtype_name)
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(array, dtype)


def cast_into(target: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """Fills `target` with `values`, cast to its type as by `convert`."""
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = values
