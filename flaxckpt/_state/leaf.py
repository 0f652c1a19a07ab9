"""Leaves, leaf infos and leaf tables; the leaf infos of states."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from flaxckpt import _util
from flaxckpt._state import dtypes, leaf_types, tree
from flaxckpt._types import LeafPath, Shape

if TYPE_CHECKING:
    import tensorstore as ts

    from flaxckpt._arrays.byte_ranges import Span
    from flaxckpt._arrays.zarr.metadata import RawArray


class Role(NamedTuple):
    """The role of an optimizer leaf, independent of its place in the optimizer.

    Attributes:
        state_class: Class of the innermost transform's state, `ScaleByAdamState`.
        field: Field of the state, `mu`.
        param: Path below the field: the parameter's path, or empty for a counter.
        optimizer: Path of the whole optimizer's state, `opt_state`.
    """

    state_class: str
    field: str
    param: LeafPath
    optimizer: LeafPath


class Box(NamedTuple):
    """A box around a leaf or its containers, absent from the leaf path.

    Attributes:
        depth: The number of keys of the leaf inside of the box.
        field: The field of the box with the value; jax and Orbax add it to the path.
    """

    depth: int
    field: str


@dataclasses.dataclass(frozen=True, slots=True)
class LeafInfo:
    """A leaf's properties without its values.

    Attributes:
        path: The leaf path, `params/Dense_0/kernel`.
        keys: The keys of the path.
        kind: `empty` is a container without children, which has a place but no data.
        python_type: `jax.Array`, `numpy.ndarray`, `numpy.generic`, `int`, `float`,
            `bool`, `complex` or `str`; of an empty container `None`, `dict`, `list`
            or `tuple`.
        shape: In elements; `()` for scalars. Of a PRNG key, the shape of the keys.
        dtype: Name of the element type; None for strings and empty containers.
        sharding: The sharding of the values, if known.
        chunk_shape: Shape of the stored chunks; None if not an array.
        weak_type: True if jax may promote the leaf like a Python number.
        prng_impl: The implementation of a PRNG key (`threefry2x32`).
        spec: The partition spec, current or at the save.
        shard_shape: The shape of the shard on a device, current or at the save; None
            if unknown, or if the shard is the whole leaf.
        role: The role of an optimizer leaf.
        boxes: The boxes around the leaf, the outermost first; only known to transforms.
    """

    path: LeafPath
    keys: tuple[tree.Key, ...]
    kind: Literal["array", "scalar", "string", "prng_key", "empty"]
    python_type: str
    shape: Shape = ()
    dtype: str | None = None
    sharding: Sharding | None = None
    chunk_shape: Shape | None = None
    weak_type: bool = False
    prng_impl: str | None = None
    spec: PartitionSpec | None = None
    shard_shape: Shape | None = None
    role: Role | None = None
    boxes: tuple[Box, ...] = ()

    @property
    def is_python_number(self) -> bool:
        """True for a Python number, which has no width."""
        return self.kind == "scalar" and self.python_type != "numpy.generic"

    def __str__(self) -> str:
        match self.kind:
            case "string":
                return "a str"
            case "empty":
                return (
                    "None"
                    if self.python_type == "None"
                    else f"an empty {self.python_type}"
                )
            case "scalar" if self.python_type == "numpy.generic":
                return f"a numpy {self.dtype}"
            case "scalar":
                return f"a Python {self.python_type}"
            case "prng_key":
                return f"{self.prng_impl} keys {list(self.shape)}"
            case _:
                return f"{self.dtype}{list(self.shape)}"


class Unsupported(NamedTuple):
    """The reason why a leaf is listed, but its values are not read.

    Attributes:
        form: The form of the values, `quantized as Q4_K`.
        advice: A sentence that says how to get a file with values that are read.
    """

    form: str
    advice: str


@dataclasses.dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A leaf in a checkpoint, not yet read.

    Attributes:
        root: The checkpoint, for messages.
        info: The leaf as stored.
        open: Opens the leaf as a read-only array. Arrays that are read together share
            the context.
        value: A string, which is read with the leaf table.
        raw: Locations of the chunks, if readable without `open`.
        span: Location of the values in a file, if readable without `open`.
        check: Compares files with their digests, for chunks without checksums. Raises
            ValueError and OSError.
        unsupported: The form of values that are not read; `open` is None then.
    """

    root: Path
    info: LeafInfo
    open: Callable[[ts.Context], ts.Future[ts.TensorStore]] | None = None
    value: str | None = None
    raw: RawArray | None = None
    span: Span | None = None
    check: Callable[[], None] | None = None
    unsupported: Unsupported | None = None


Value: TypeAlias = (
    "jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic"
    " | bool | int | float | complex | str | None"
)

Source: TypeAlias = "Value | StoredLeaf"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A row of a leaf table.

    Attributes:
        info: The properties of the leaf.
        sources: The value, or the stored leaf; several for a computed leaf. The source
            of an empty container is None.
        fn: Computes the leaf from its sources, as jax arrays of their stored shapes and
            types. It is traced. If None, the leaf is its only source, cast.
    """

    info: LeafInfo
    sources: tuple[Source, ...]
    fn: Callable[..., jax.Array] | None = None

    @property
    def source(self) -> Source:
        """The only source of the leaf."""
        [source] = self.sources
        return source

    @property
    def unsupported(self) -> Unsupported | None:
        """The reason why the leaf cannot be read or computed, or None."""
        reasons = (s.unsupported for s in self.sources if isinstance(s, StoredLeaf))
        return next(filter(None, reasons), None)


LeafTable: TypeAlias = dict[LeafPath, Leaf]


# ---- leaves of a state ------------------------------------------------------------

_JAX_TYPES = (jax.Array, jax.ShapeDtypeStruct)
_ARRAYS = (np.ndarray, np.memmap)
"""Classes of numpy arrays without data beside their values."""

_PYTHON_NUMBERS: dict[type, str] = {
    bool: "bool",
    int: "int64",
    float: "float64",
    complex: "complex128",
}

_SURROGATES = (
    "a str with two surrogates that would be restored as one character: write that"
    " character, or keep the text as bytes in a numpy array"
)


def describe(path: LeafPath, leaf: tree.TreeLeaf) -> LeafInfo | str:
    """Returns the leaf info of a leaf of a concrete or abstract state.

    Returns:
        The leaf info, or a description of a value that cannot be stored.
    """
    keys, value, is_empty = leaf
    if is_empty:
        return LeafInfo(path, keys, "empty", _empty_type(value))
    if isinstance(value, leaf_types.BrokenLeaf):
        return value.reason
    if isinstance(value, jax.core.Tracer):
        return "a traced value, which exists only inside a jax transformation"
    if isinstance(value, _JAX_TYPES):
        return _describe_jax(path, keys, value)
    if isinstance(value, np.ndarray | np.generic):
        if type(value) not in _ARRAYS and type(value) is not value.dtype.type:
            return _describe_subclass(value)
        dtype = dtypes.name(value.dtype)
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
        return f"the int {value}, which needs more than 64 bits"
    if number := _PYTHON_NUMBERS.get(type(value)):
        return LeafInfo(
            path, keys, "scalar", type(value).__name__, (), number, weak_type=True
        )
    if callable(value) and (isinstance(value, type) or hasattr(value, "__name__")):
        return _util.arguments.describe(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def describe_value(value: Any) -> str:
    """Returns a short description of any value, for messages."""
    info = describe("", tree.TreeLeaf((), value, False))
    return str(info)


def _describe_subclass(value: np.ndarray[Any, Any] | np.generic) -> str:
    """Describes a value of a subclass of numpy's arrays or scalars.

    Data of the instance beside its values would be lost.
    """
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
    path: LeafPath,
    keys: tuple[tree.Key, ...],
    value: jax.Array | jax.ShapeDtypeStruct,
) -> LeafInfo | str:
    sharding = value.sharding
    if isinstance(value, jax.Array) and not value.committed:
        sharding = None
    shape = value.shape
    is_key, dtype, is_stored = _element_type(value.dtype)
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
        sharding.spec if isinstance(sharding, NamedSharding) else None,
        None if sharding is None else _shard_shape(sharding, shape),
    )


@functools.cache
def _element_type(dtype: Any) -> tuple[bool, str, bool]:
    """Returns for a dtype: is a PRNG key, name of the element type, can be stored."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    name = "uint32" if is_key else dtypes.name(dtype)
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
