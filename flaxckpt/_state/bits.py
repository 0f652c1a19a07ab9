"""Compares values: all of their bits, and the distances of their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flaxckpt._state import dtypes, numpy_dtypes

if TYPE_CHECKING:
    import jax

_Array: TypeAlias = np.ndarray[Any, Any]

_INTEGERS = frozenset(("int", "uint", "bool"))


def key_data(value: Any) -> Any:
    """Returns the key data of random keys; other values unchanged."""
    import jax

    is_key = isinstance(value, jax.Array) and jax.numpy.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
    return jax.random.key_data(value) if is_key else value


def is_same(one: Any, other: Any) -> bool:
    """Returns True for equal types and bits; of other objects, for equal classes."""
    import jax

    arrays = (jax.Array, np.ndarray, np.generic)
    if not (isinstance(one, arrays) and isinstance(other, arrays)):
        is_plain = isinstance(one, str | bytes | int | float | complex)
        return type(one) is type(other) and (not is_plain or repr(one) == repr(other))
    if str(one.dtype) != str(other.dtype) or one.shape != other.shape:
        return False
    x, y = key_data(one), key_data(other)
    if isinstance(x, jax.Array) and isinstance(y, jax.Array) and not _is_at_hand(x, y):
        return bool(jax.jit(_is_same_on_devices)(x, y))
    return count_flips(np.asarray(x), np.asarray(y)) is None


def _is_at_hand(*arrays: jax.Array) -> bool:
    """Returns True if this process has all values of some arrays in its memory."""
    return all(
        array.is_fully_addressable and {d.platform for d in array.devices()} == {"cpu"}
        for array in arrays
    )


def _is_same_on_devices(one: jax.Array, other: jax.Array) -> jax.Array:
    import jax

    return jax.numpy.array_equal(as_words(one), as_words(other))


def as_words(array: jax.Array) -> jax.Array:
    """Returns the bits of an array as uint32; parts of a number along another axis."""
    import jax.numpy as jnp
    from jax import lax

    if jnp.iscomplexobj(array):
        array = jnp.stack([jnp.real(array), jnp.imag(array)])
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    is_integer = jnp.issubdtype(array.dtype, jnp.integer)
    width = (jnp.iinfo if is_integer else jnp.finfo)(array.dtype).bits
    unsigned = jnp.dtype(f"uint{min(width, 32)}")
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def count_flips(a: _Array, b: _Array) -> _Array | None:
    """Returns the number of different bits by element; None if all are equal."""
    x, y = _as_bytes(a), _as_bytes(b)
    if np.array_equal(x, y):
        return None
    flips = np.bitwise_count(x ^ y).sum(axis=-1, dtype=np.uint8)
    return np.asarray(flips).reshape(a.shape)


def _as_bytes(array: _Array) -> _Array:
    """Returns the bytes of each element, along a new last axis."""
    if array.dtype.name.startswith(("int2", "int4", "uint2", "uint4")):
        array = array.astype(np.int8)  # the other bits of their bytes mean nothing
    flat = np.ascontiguousarray(array).reshape(-1, 1)
    return flat.view(np.uint8)


def distances(a: _Array, b: _Array) -> _Array:
    """Returns the distances of numbers in two arrays of the same shape.

    Distances of integers are exact. Others are float64: infinite if only one of two is
    a number, or finite; 0 for two NaNs.
    """
    if _kind(a) in _INTEGERS and _kind(b) in _INTEGERS:
        x, y = _as_integers(a.ravel(), b.ravel())
        low, high = np.minimum(x, y), np.maximum(x, y)
        if low.dtype != object:  # modulo 2^64, as the distance is below
            low, high = low.astype(np.uint64), high.astype(np.uint64)
        return np.asarray(high - low).reshape(a.shape)
    x, y = as_wide(a), as_wide(b)
    with np.errstate(all="ignore"):
        change = np.abs(x - y)
    change = np.where((x == y) | ((x != x) & (y != y)), 0.0, change)
    return np.where(np.isnan(change), np.inf, change)


def largest(distances: _Array) -> int | float:
    """Returns the largest of some distances, 0 of none; exact for integers."""
    found = distances.max() if distances.size else 0
    return found if isinstance(found, int) else found.item()


def as_wide(array: _Array) -> _Array:
    kind: Any = np.complex128 if np.iscomplexobj(array) else np.float64
    return np.asarray(array).astype(kind)


def _as_integers(a: _Array, b: _Array) -> tuple[_Array, _Array]:
    """Returns integers in a common type, which holds all of both."""
    kinds = {_kind(a), _kind(b)}
    common: Any = np.uint64
    if "int" in kinds:
        wide = any(array.dtype == np.uint64 for array in (a, b))
        common = object if wide else np.int64
    return a.astype(common), b.astype(common)


def _kind(array: _Array) -> str:
    return dtypes.kind(numpy_dtypes.name(array.dtype))
