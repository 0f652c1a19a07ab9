"""Host arrays of a checkpoint, as and where the caller wants them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from flaxckpt import _dtypes
from flaxckpt._info import LeafInfo
from flaxckpt._types import Shape
from flaxckpt._zarr import Array, Region, region_of, whole

_COPIED_BELOW = 2**16
"""Bytes below which jax copies an array faster than it takes its memory over."""

_WEAK_LIMIT = 4096
"""Elements up to which a weakly typed array is built anew as one."""


def assemble(blocks: Mapping[Region, Array], found: LeafInfo, wanted: LeafInfo) -> Any:
    """Makes a leaf of its values.

    Args:
        blocks: What each local device needs -> the values there, as stored.
        found: How the leaf is stored.
        wanted: What the caller asked for.

    Returns:
        A `jax.Array`, a `numpy.ndarray`, or a number.

    Raises:
        OverflowError: A number is too large for the wanted type.
    """
    if wanted.kind == "prng_key":
        [data] = blocks.values()
        return _keys(data, wanted)
    dtype = wanted.dtype or ""
    # A Python number has no width: whether it fits is seen only now.
    is_number = wanted.is_python_number or found.is_python_number
    typed = {
        region: _as_dtype(_values(block, found.dtype or "", dtype), dtype, is_number)
        for region, block in blocks.items()
    }
    if wanted.python_type == "jax.Array":
        return _to_devices(typed, wanted)
    [array] = typed.values()
    if wanted.python_type == "numpy.generic":
        return array[()]
    if wanted.python_type == "numpy.ndarray":
        return array if array.flags.writeable else array.copy()
    return array.item()


def _keys(data: Array, wanted: LeafInfo) -> jax.Array:
    sharding, impl = wanted.sharding, wanted.prng_impl
    if sharding is not None and not sharding.is_fully_addressable:
        everywhere: jax.Array = _wrapping(impl, sharding)(data)
        return everywhere
    keys: jax.Array = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    return keys if sharding is None else _put(keys, sharding)


@functools.lru_cache(maxsize=64)
def _wrapping(impl: str | None, sharding: Sharding) -> Any:
    """Makes keys on devices of several processes, which all do so."""
    wrap = functools.partial(jax.random.wrap_key_data, impl=impl)
    return jax.jit(wrap, out_shardings=sharding)


def _values(block: Array, found: str, wanted: str) -> Array:
    """What was stored, in the type it has; or in the wanted one, if read as that."""
    is_cast = _dtypes.name(block.dtype) == wanted != _dtypes.stored_name(found)
    return block if is_cast else _dtypes.from_stored(block, found)


def _as_dtype(array: Array, dtype_name: str, is_number: bool) -> Array:
    if _dtypes.name(array.dtype) == dtype_name:
        return array
    if is_number and _dtypes.kind(dtype_name) in ("int", "uint"):
        low, high = _dtypes.bounds(dtype_name)
        if not low <= array.item() <= high:
            raise OverflowError(str(array))
    converted = _dtypes.convert(array, dtype_name)
    is_float = _dtypes.kind(dtype_name) in ("float", "complex")
    if is_number and is_float and np.isfinite(array) and not np.isfinite(converted):
        raise OverflowError(str(array))
    return converted


def _to_devices(blocks: Mapping[Region, Array], wanted: LeafInfo) -> jax.Array:
    if wanted.sharding is None:
        [array] = blocks.values()
        return _weak(array) if wanted.weak_type else _put(array, None)
    sharding = wanted.sharding
    entire = blocks.get(whole(wanted.shape))
    if sharding.is_fully_addressable and entire is not None:
        if wanted.weak_type:
            return _put(_weak(entire), sharding)
        if len(sharding.device_set) == 1:
            return _put(entire, sharding)
    elif wanted.weak_type and entire is not None and _can_be_weak(entire):
        everywhere: jax.Array = _joining(entire.shape, sharding)(
            entire.ravel().tolist()
        )
        return everywhere
    placed = [
        _put(blocks[region_of(index or (), wanted.shape)], _single(device, sharding))
        for device, index in sharding.addressable_devices_indices_map(
            wanted.shape
        ).items()
    ]
    whole_array: jax.Array = jax.make_array_from_single_device_arrays(
        wanted.shape, sharding, placed, dtype=_dtypes.to_numpy(wanted.dtype or "")
    )
    return whole_array


def place(value: Any, wanted: LeafInfo) -> Any:
    """A computed leaf, where and as the caller wants it."""
    if wanted.python_type != "jax.Array":
        # A copy, because a view of jax's could not be written to.
        array = _dtypes.convert(np.array(value), wanted.dtype or "")
        if wanted.python_type == "numpy.generic":
            return array[()]
        return array if wanted.kind == "array" else array.item()
    if wanted.weak_type:
        value = _weak(np.asarray(value))
    if wanted.sharding is not None:
        return _put_computed(value, wanted.sharding)
    if wanted.kind == "array" and value.committed:
        # Tied to a device, unlike what is restored.
        return _put(np.asarray(value), None)
    return value


def _put_computed(value: jax.Array, sharding: Sharding) -> jax.Array:
    if sharding.is_fully_addressable or not value.is_fully_addressable:
        return _put(value, sharding)
    # All processes have computed it: to put it there, jax would compare them all.
    array = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda i: array[i])


def _put(array: Array | jax.Array, sharding: Sharding | None) -> jax.Array:
    if sharding is None and array.nbytes < _COPIED_BELOW:
        return jnp.array(array)
    placed: jax.Array = jax.device_put(array, sharding)
    return placed


def _single(device: jax.Device, sharding: Sharding) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)


def _weak(array: Array) -> jax.Array:
    """A jax array that promotes like a Python number, as only those can be built."""
    if not _can_be_weak(array):
        return _put(array, None)
    return _weakly(array.ravel().tolist(), array.shape)


def _can_be_weak(array: Array) -> bool:
    if array.size > _WEAK_LIMIT or array.size == 0:
        return False
    return bool(jnp.asarray(array.flat[0].item()).dtype == array.dtype)


def _weakly(numbers: Sequence[float], shape: Shape) -> jax.Array:
    arrays = [jnp.asarray(number) for number in numbers]
    return arrays[0] if shape == () else jnp.stack(arrays).reshape(shape)


@functools.lru_cache(maxsize=64)
def _joining(shape: Shape, sharding: Sharding) -> Any:
    """The same on devices of several processes, which all do so."""
    return jax.jit(functools.partial(_weakly, shape=shape), out_shardings=sharding)
