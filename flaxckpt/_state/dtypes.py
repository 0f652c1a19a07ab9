"""Names of element types, their storage types, and the allowed casts; without numpy."""

from __future__ import annotations

import functools
import re

from flaxckpt import errors
from flaxckpt._types import Shape

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

STORED_AS_BYTES = frozenset(
    {"uint2", "uint4", "int1", "uint1", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"}
)
"""One byte per element in numpy, unknown to TensorStore: stored as uint8 bits."""

NOT_COMPUTED = frozenset(("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"))
"""Types that jax compiles no function of; some versions have no arrays of them."""

PYTHON_NUMBERS: dict[type, str] = {
    bool: "bool",
    int: "int64",
    float: "float64",
    complex: "complex128",
}
"""Class of a Python number -> its type in numpy."""

_KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
"""PRNG implementation of jax -> number of 32-bit words of a key."""

_NUMBER = re.compile("[a-z]+([0-9]+)")
"""The bits of a value, in the name of any type but bool."""

_LONG_NAMES = {"bf": "bfloat", "fp": "float", "f": "float", "i": "int", "u": "uint"}
_SHORT_NAME = re.compile(f"({'|'.join(_LONG_NAMES)})([0-9]+)")
"""Names of types in safetensors and torch: bf16, fp32, F32."""

_ZARR_2_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}

WIDE = frozenset(("int64", "uint64", "float64", "complex128"))
"""The types that jax truncates without 64-bit mode."""


def check(dtype_name: str) -> str:
    """Returns `dtype_name`; raises OptionError if such leaves cannot be stored."""
    if dtype_name not in _STORED_AS_IS and dtype_name not in STORED_AS_BYTES:
        short = _SHORT_NAME.fullmatch(dtype_name.lower())
        name = f"{_LONG_NAMES[short[1]]}{short[2]}" if short else ""
        advice = f": write {name!r}" if name in _STORED_AS_IS else ""
        raise errors.OptionError(
            f"{dtype_name!r} is not a supported element type{advice}"
        )
    return dtype_name


def of_zarr_2(name: str) -> str:
    """Returns the type with zarr 2's name of a simple type: `<f4` is `float32`."""
    kind, bits = _ZARR_2_KINDS[name[1]], 8 * int(name[2:])
    return "bool" if (kind, bits) == ("bool", 8) else f"{kind}{bits}"


@functools.lru_cache(maxsize=256)
def stored_name(dtype_name: str) -> str | None:
    if dtype_name in _STORED_AS_IS:
        return dtype_name
    return "uint8" if dtype_name in STORED_AS_BYTES else None


def item_size(dtype_name: str) -> int:
    """Returns the bytes per element in memory."""
    return max(8, _value_bits(check(dtype_name))) // 8


@functools.cache
def item_bits(dtype_name: str) -> int:
    """Returns the bits per element on disk."""
    stored = stored_name(dtype_name)
    assert stored is not None, dtype_name
    return 8 * item_size(stored)


def _value_bits(dtype_name: str) -> int:
    """Returns the bits of an element's value: 4 for int4, although stored in a byte."""
    match = _NUMBER.match(dtype_name)
    return 8 if match is None else int(match[1])


def bounds(dtype_name: str) -> tuple[int, int]:
    """Returns the smallest and the largest value of an integer type."""
    bits = _value_bits(check(dtype_name))
    if kind(dtype_name) == "uint":
        return 0, 2**bits - 1
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def kind(dtype_name: str) -> str:
    """Returns the kind of a type: `float`, `int`, `uint`, `complex` or `bool`."""
    for prefix in ("bfloat", "float", "uint", "int", "complex", "bool"):
        if dtype_name.startswith(prefix):
            return prefix.removeprefix("b") if prefix == "bfloat" else prefix
    raise errors.OptionError(f"{dtype_name!r} is not a supported element type")


@functools.cache
def is_in_jax(dtype_name: str) -> bool:
    """Returns True if the installed jax has arrays of a type."""
    if dtype_name not in NOT_COMPUTED:
        return True
    import jax
    import ml_dtypes
    import numpy as np

    try:
        jax.device_put(np.zeros((), getattr(ml_dtypes, dtype_name)))
    except (TypeError, RuntimeError):
        return False
    return True


def array_type(dtype_name: str | None) -> str:
    """Returns the type of arrays that hold all values, as in `LeafInfo`."""
    is_exact = dtype_name is None or (dtype_name not in WIDE and is_in_jax(dtype_name))
    return "jax.Array" if is_exact else "numpy.ndarray"


def restores_as(found: str, wanted: str) -> bool:
    """Returns True if a leaf stored as `found` restores as `wanted` by default.

    Any floating type restores as any other; integers and complex numbers only grow.
    """
    if found == wanted:
        return True
    if kind(found) != kind(wanted):
        return False
    if kind(found) == "float":
        return True
    return _value_bits(wanted) > _value_bits(found)


@functools.cache
def key_words(impl: str) -> int:
    """Returns how many 32-bit words a PRNG key has; raises ValueError if unknown."""
    if words := _KEY_WORDS.get(impl):
        return words
    import jax  # only jax knows the implementations that a program registers

    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return int(key.shape[0])


def check_keys(impl: str, shape: Shape, dtype: str) -> None:
    """Raises ValueError unless an array can be the data of PRNG keys of `impl`."""
    words = key_words(impl)
    if dtype != "uint32" or shape[-1:] != (words,):
        raise ValueError(f"{dtype}{list(shape)} is not an array of {impl[:40]} keys")
