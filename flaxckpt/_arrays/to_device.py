"""Places host arrays on the caller's devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from flaxckpt import _state
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import Shape
from flaxckpt._zarr.metadata import Array, Region, region_of, whole

_COPIED_BELOW = 2**16
"""Bytes below which a copy is faster for jax than sharing memory."""


@contextlib.contextmanager
def any_values() -> Iterator[None]:
    """Lets jax move and compute all values, whatever `jax.config` forbids a program.

    A state may have NaNs, and its transfers are asked for.
    """
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        yield


def make_keys(data: Array, wanted: LeafInfo) -> jax.Array:
    """Returns PRNG keys of the words `data`, on the caller's devices."""
    sharding, impl = wanted.sharding, wanted.prng_impl
    if sharding is not None and not sharding.is_fully_addressable:
        everywhere: jax.Array = _compile_wrap(impl, sharding)(data)
        return everywhere
    keys: jax.Array = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    return keys if sharding is None else _put(keys, sharding)


@functools.lru_cache(maxsize=64)
def _compile_wrap(impl: str | None, sharding: Sharding) -> Any:
    """Wraps key data as PRNG keys on devices of several processes."""
    wrap = functools.partial(jax.random.wrap_key_data, impl=impl)
    return jax.jit(wrap, out_shardings=sharding)


def to_devices(blocks: Mapping[Region, Array], wanted: LeafInfo) -> jax.Array:
    """Returns an array on the devices of `wanted`, given the values of each region."""
    sharding = wanted.sharding
    entire = blocks.get(whole(wanted.shape))
    if sharding is None:
        [array] = blocks.values()
        placed = _put(array, None)
    elif (
        sharding.is_fully_addressable
        and entire is not None
        and len(sharding.device_set) == 1
    ):
        placed = (
            # Three times as fast as device_put, for the thousands of small arrays.
            jax.make_array_from_callback(entire.shape, sharding, lambda _: entire)
            if 0 < entire.nbytes < _COPIED_BELOW
            else _put(entire, sharding)
        )
    else:
        indices = sharding.addressable_devices_indices_map(wanted.shape)
        placed = jax.make_array_from_single_device_arrays(
            wanted.shape,
            sharding,
            [
                _put(
                    blocks[region_of(index or (), wanted.shape)],
                    SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
                )
                for device, index in indices.items()
            ],
            dtype=_state.numpy_dtypes.to_numpy(wanted.dtype or ""),
        )
    return _make_weak(placed, sharding) if wanted.weak_type else placed


def place(value: Any, wanted: LeafInfo) -> Any:
    """Places a computed leaf on the caller's devices, in the caller's type."""
    if wanted.python_type != "jax.Array":
        # A copy: a view of jax's memory would be read-only.
        array = _state.numpy_dtypes.convert(np.array(value), wanted.dtype or "")
        if wanted.python_type == "numpy.generic":
            return array[()]
        return array if wanted.kind == "array" else array.item()
    if wanted.sharding is not None:
        value = _put_computed(value, wanted.sharding)
    elif wanted.kind == "array" and value.committed:
        # Committed to a device, unlike restored arrays.
        value = _put(np.asarray(value), None)
    return _make_weak(value, wanted.sharding) if wanted.weak_type else value


def _put_computed(value: jax.Array, sharding: Sharding) -> jax.Array:
    if sharding.is_fully_addressable or not value.is_fully_addressable:
        return _put(value, sharding)
    # All processes have the value; device_put would compare it across processes.
    array = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda i: array[i])


def _put(array: Array | jax.Array, sharding: Sharding | None) -> jax.Array:
    # For an empty array with a long axis, XLA would compile a loop over that axis.
    is_small = 0 < array.nbytes < _COPIED_BELOW
    is_computed = array.dtype.name not in _state.dtypes.NOT_COMPUTED
    if sharding is None and is_small and is_computed:
        return jnp.array(array)
    placed: jax.Array = jax.device_put(array, sharding)
    return placed


def _make_weak(array: jax.Array, sharding: Sharding | None) -> jax.Array:
    """Returns a weakly typed array with the same values."""
    if isinstance(array, jax.core.Tracer):
        return array  # of a traced function, where older jax gives no values
    is_local = sharding is None or sharding.is_fully_addressable
    if array.shape == () and is_local:
        # The common case, a step counter, without a compilation.
        value = np.asarray(array)
        scalar = jnp.asarray(value.item())
        if (
            scalar.dtype == array.dtype
            and np.asarray(scalar).tobytes() == value.tobytes()
        ):
            return scalar if sharding is None else jax.device_put(scalar, sharding)
    weak: jax.Array = _compile_weakening(array.shape, array.dtype, sharding)(array)
    return weak


@functools.lru_cache(maxsize=256)
def _compile_weakening(
    shape: Shape, dtype: np.dtype[Any], sharding: Sharding | None
) -> Any:
    """Compiles a function that returns its argument as a weakly typed array.

    On devices of several processes, all processes must call the function.
    """
    weak = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=True)
    lowered = jax.jit(lambda array: array, out_shardings=sharding).lower(weak)
    return lowered.compile()
