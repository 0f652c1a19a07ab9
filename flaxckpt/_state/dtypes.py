"""Names of element types, their storage types, and the allowed casts."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from flaxckpt import errors

_STORED_AS_IS = frozenset(
    {
        "bool",
        "int2",
        "int4",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e3m4",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn",
    }
)
"""Types supported by TensorStore's zarr3 driver and restored by stock Orbax."""

_STORED_AS_BYTES = frozenset(
    {
        "uint2",
        "uint4",
        "int1",
        "uint1",
        "float8_e4m3",
        "float6_e2m3fn",
        "float6_e3m2fn",
    }
)
"""One byte per element in numpy, unknown to TensorStore: stored as uint8 bits."""

_WIDE = frozenset(("int64", "uint64", "float64", "complex128"))


@functools.lru_cache(maxsize=256)
def name(dtype: Any) -> str:
    """Returns the name of a numpy or jax element type: `bfloat16`, `float32`."""
    return str(np.dtype(dtype).name)


@functools.cache
def to_numpy(dtype_name: str) -> np.dtype[Any]:
    """Returns the numpy dtype called `dtype_name`.

    Raises:
        OptionError: Leaves of such a type cannot be stored.
    """
    if dtype_name not in _STORED_AS_IS and dtype_name not in _STORED_AS_BYTES:
        raise errors.OptionError(f"{dtype_name!r} is not a supported element type")
    return np.dtype(getattr(ml_dtypes, dtype_name, dtype_name))


@functools.lru_cache(maxsize=256)
def stored_name(dtype_name: str) -> str | None:
    """Returns the type that stores `dtype_name` on disk, or None."""
    if dtype_name in _STORED_AS_IS:
        return dtype_name
    return "uint8" if dtype_name in _STORED_AS_BYTES else None


@functools.cache
def zarr_2_name(dtype_name: str) -> str:
    """Returns the zarr 2 name of a stored type: `<f4`, or our name if not in numpy."""
    dtype = to_numpy(dtype_name)
    return dtype_name if dtype.isbuiltin != 1 else dtype.newbyteorder("<").str


def to_stored(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns `array` in its storage type; copies only to swap bytes."""
    if array.dtype.name in _STORED_AS_BYTES:
        return array.view(np.uint8)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder())


def from_stored(array: np.ndarray[Any, Any], dtype_name: str) -> np.ndarray[Any, Any]:
    """Undoes `to_stored`, without a copy."""
    wanted = to_numpy(dtype_name)
    return array.view(wanted) if dtype_name in _STORED_AS_BYTES else array


def check_bools(array: np.ndarray[Any, Any]) -> None:
    """Raises ValueError for bytes other than 0 and 1 in an array of bools.

    numpy treats other bytes as true; the behaviour of jax depends on the compiled code.

    Raises:
        ValueError: The array holds such bytes.
    """
    if array.dtype == np.bool_ and array.size:
        largest = int(array.view(np.uint8).max())
        if largest > 1:
            raise ValueError(f"an array of bools has the byte {largest}, wanted 0 or 1")


def convert(array: np.ndarray[Any, Any], dtype_name: str) -> np.ndarray[Any, Any]:
    """Casts `array` to `dtype_name`; returns `array` itself without a change of type.

    Values beyond the range of a narrower float become infinite, as in TensorStore.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(array, to_numpy(dtype_name))


def cast_into(target: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """Fills `target` with `values`, cast to its type as by `convert`."""
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = values


@functools.cache
def item_bits(dtype_name: str) -> int:
    """Returns the bits per element on disk."""
    stored = stored_name(dtype_name)
    assert stored is not None, dtype_name
    return 8 * to_numpy(stored).itemsize


@functools.cache
def _value_bits(dtype_name: str) -> int:
    """Returns the bits of an element's value: 4 for int4, although stored in a byte."""
    if kind(dtype_name) in ("int", "uint"):
        return int(ml_dtypes.iinfo(to_numpy(dtype_name)).bits)  # type: ignore[no-untyped-call]
    return 8 * to_numpy(dtype_name).itemsize


def bounds(dtype_name: str) -> tuple[int, int]:
    """Returns the smallest and the largest value of an integer type."""
    info = ml_dtypes.iinfo(to_numpy(dtype_name))  # type: ignore[no-untyped-call]
    return int(info.min), int(info.max)


def kind(dtype_name: str) -> str:
    """Returns the kind of a type: `float`, `int`, `uint`, `complex` or `bool`."""
    for prefix in ("bfloat", "float", "uint", "int", "complex", "bool"):
        if dtype_name.startswith(prefix):
            return prefix.removeprefix("b") if prefix == "bfloat" else prefix
    raise errors.OptionError(f"{dtype_name!r} is not a supported element type")


def is_wide(dtype_name: str | None) -> bool:
    """Returns True if jax truncates values of this type without 64-bit mode."""
    return dtype_name in _WIDE


def restores_as(found: str, wanted: str) -> bool:
    """Returns True if a leaf stored as `found` restores as `wanted` by default.

    Any floating type restores as any other: the caller chose the wanted type. Integers
    and complex numbers may only grow, within their kind.
    """
    if found == wanted:
        return True
    if kind(found) != kind(wanted):
        return False
    if kind(found) == "float":
        return True
    return _value_bits(wanted) > _value_bits(found)
