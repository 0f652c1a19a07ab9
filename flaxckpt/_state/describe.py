"""Leaf infos of the leaves of concrete and abstract states."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from flaxckpt import _util
from flaxckpt._state import dtypes, leaf_types, numpy_dtypes, tree
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath, Shape

_ARRAYS = (np.ndarray, np.memmap)
"""Classes of numpy arrays without data beside their values."""

_SURROGATES = (
    "a str with two surrogates that would be restored as one character: write that"
    " character, or keep the text as bytes in a numpy array"
)


def describe(path: LeafPath, leaf: tree.TreeLeaf) -> LeafInfo | str:
    """Returns the info of a leaf; a description of a value that is not storable."""
    keys, value, is_empty = leaf
    if is_empty:
        return LeafInfo(path, keys, "empty", _empty_type(value))
    cls: Any = type(value)
    if _is_jax_class(cls):
        return _describe_jax(path, keys, value)
    if isinstance(value, leaf_types.BrokenLeaf):
        return value.reason
    if isinstance(value, jax.core.Tracer):
        return (
            "a traced value, which exists only inside a jax transformation: save"
            " outside of jit what the function returns"
        )
    if isinstance(value, np.ndarray | np.generic):
        if type(value) not in _ARRAYS and type(value) is not value.dtype.type:
            return _describe_subclass(value)
        dtype = numpy_dtypes.name(value.dtype)
        if dtypes.stored_name(dtype) is None:
            return f"a numpy array of dtype {dtype}"
        is_array = isinstance(value, np.ndarray)
        return LeafInfo(
            path,
            keys,
            "array" if is_array else "scalar",
            "numpy.ndarray" if is_array else "numpy.generic",
            value.shape,
            dtype,
        )
    if type(value) is str:
        try:
            _util.json_limits.check_text(value, "it")
        except ValueError:
            return _SURROGATES
        return LeafInfo(path, keys, "string", "str")
    if type(value) is int and not -(2**63) <= value < 2**63:
        return (
            f"the int {value}, which needs more than 64 bits: save it as str(value),"
            " or in metadata="
        )
    if number := dtypes.PYTHON_NUMBERS.get(type(value)):
        return LeafInfo(
            path, keys, "scalar", type(value).__name__, (), number, weak_type=True
        )
    if callable(value) and (isinstance(value, type) or hasattr(value, "__name__")):
        return _util.arguments.describe(value)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    advice = _util.json_limits.advise_on_generator(value)
    return f"a {name}: {advice}" if advice else f"a {name}"


def describe_value(value: Any) -> str:
    """Returns a short description of any value, for messages."""
    info = describe("", tree.TreeLeaf((), value, False))
    return str(info)


@functools.lru_cache(maxsize=1024)  # `isinstance` of a jax array is slow
def _is_jax_class(cls: type) -> bool:
    """Returns True for a class of concrete or abstract jax arrays."""
    is_tracer = issubclass(cls, jax.core.Tracer)
    return issubclass(cls, (jax.Array, jax.ShapeDtypeStruct)) and not is_tracer


def _describe_subclass(value: np.ndarray[Any, Any] | np.generic) -> str:
    """Describes a subclass of numpy's: its data beside the values would be lost."""
    if isinstance(value, np.ma.MaskedArray):
        return (
            "a masked array, whose mask would be lost: save x.data and"
            " np.ma.getmaskarray(x) as two leaves, or x.filled()"
        )
    cls = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.generic):
        return f"a {cls}, which would be restored as a plain numpy {value.dtype}"
    return f"a {cls}, which would be restored as a plain array: save np.asarray(x)"


def _describe_jax(
    path: LeafPath, keys: tuple[tree.Key, ...], value: jax.Array | jax.ShapeDtypeStruct
) -> LeafInfo | str:
    # An abstract array is where its sharding says.
    sharding = value.sharding if getattr(value, "committed", True) else None
    shape = value.shape
    is_key, dtype, is_stored = _element_type(value.dtype)
    if not dtypes.is_in_jax(dtype):
        return f"a jax array of dtype {dtype}, which jax cannot hold: use a numpy array"
    if not is_stored:
        return f"a jax array of dtype {dtype}"
    return LeafInfo(
        path,
        keys,
        "prng_key" if is_key else "array",
        "jax.Array",
        shape,
        dtype,
        sharding,
        None,
        not is_key and bool(value.weak_type),
        _prng_impl(value) if is_key else None,
        tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None,
        None if sharding is None else _shard_shape(sharding, shape),
    )


@functools.cache
def _element_type(dtype: Any) -> tuple[bool, str, bool]:
    """Returns for a dtype: is a PRNG key, name of the element type, can be stored."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    name = "uint32" if is_key else numpy_dtypes.name(dtype)
    return is_key, name, dtypes.stored_name(name) is not None


def _shard_shape(sharding: Sharding, shape: Shape) -> Shape | None:
    """Returns the shape of a shard; None for a whole leaf or an invalid sharding."""
    try:
        shard = sharding.shard_shape(shape)
    except ValueError:
        return None
    return None if shard == shape else shard


def _prng_impl(value: jax.Array | jax.ShapeDtypeStruct) -> str:
    if isinstance(value, jax.ShapeDtypeStruct):
        # jax.random.key_impl rejects abstract keys; their dtype has the name.
        return str(value.dtype._impl.name)
    return str(jax.random.key_impl(value))


def _empty_type(value: object) -> str:
    """Returns stock Orbax's name of an empty container, in lower case."""
    return type(value).__name__ if type(value) in (dict, list, tuple) else "None"
