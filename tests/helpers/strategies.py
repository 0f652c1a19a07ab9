"""Hypothesis strategies for states, and comparisons of states."""

import dataclasses
import string
import struct as binary
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import linen, nnx, struct
from flax.core import FrozenDict
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flaxckpt

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)

names = st.text(
    string.ascii_letters + string.digits + "_-/%. é", min_size=1, max_size=8
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
arrays = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, shapes))
numbers = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.complex_numbers()
)
leaves = st.one_of(arrays, numbers, st.text(), st.none())


def containers(children):
    """Returns a strategy of dicts with str, int or tuple keys, lists and tuples."""
    return st.one_of(
        st.dictionaries(names, children, max_size=4),
        st.dictionaries(st.integers(0, 20), children, max_size=4),
        st.dictionaries(st.tuples(names, st.integers(0, 9)), children, max_size=4),
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
    )


trees = st.recursive(leaves, containers, max_leaves=12)


def assert_same(wanted, found, path="state"):
    """Compares types and bits, NaN payloads included."""
    assert type(found) is type(wanted), f"{path}: {type(wanted)}, {type(found)}"
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key in wanted:
            assert_same(wanted[key], found[key], f"{path}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), path
        for i, (one, other) in enumerate(zip(wanted, found, strict=True)):
            assert_same(one, other, f"{path}/{i}")
    elif wanted is not None and not isinstance(wanted, str):
        assert_same_bits(wanted, found, path)


def assert_same_bits(wanted, found, path=""):
    """Compares dtype, shape and every bit of two arrays, numbers or PRNG keys."""
    if isinstance(wanted, jax.Array):
        if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            assert found.dtype == wanted.dtype, path
            wanted, found = jax.random.key_data(wanted), jax.random.key_data(found)
        assert found.weak_type == wanted.weak_type, path
    wanted, found = np.asarray(wanted), np.asarray(found)
    assert found.dtype == wanted.dtype, path
    assert found.shape == wanted.shape, path
    assert found.tobytes() == wanted.tobytes(), path


def assert_same_state(wanted, found):
    """Compares two states of any classes, leaf by leaf."""
    ours = jax.tree_util.tree_leaves_with_path(wanted)
    theirs = jax.tree_util.tree_leaves_with_path(found)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        name = jax.tree_util.keystr(path)
        assert type(one) is type(other), f"{name}: {type(one)}, {type(other)}"
        if not isinstance(one, str):
            assert_same_bits(one, other, name)


# ---- any state of a user ------------------------------------------------------------

ML_DTYPES = (
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4", "float8_e4m3"),
    *("float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
    *("int2", "int4", "uint2", "uint4"),
)
_BITS = {"float6": 6, "float4": 4, "uint4": 4, "uint2": 2, "bool": 1}
ON_JAX = tuple(
    name
    for name in (*DTYPES, *ML_DTYPES)
    if not name.startswith("float6") and name != "complex128"
)
WIDE = ("int64", "uint64", "float64")

RESERVED = (
    *("_METADATA", "_sharding", "_strings.json", "array_metadatas", "d", "c", "c.0"),
    *("manifest.ocdbt", "zarr.json", ".zarray", ".", "..", "", " ", "value", "~"),
    *("a/b", "a.b", "a%2Fb", "\\", "\n", "\0", "é" * 130, "x" * 300, "x" * 40_000),
)

any_text = st.text(st.characters(exclude_categories=()), max_size=6)
"""Includes unpaired surrogates, which no encoder accepts."""

any_names = st.one_of(names, names, names, any_text, st.sampled_from(RESERVED))
int_keys = st.one_of(
    st.integers(-3, 20), st.sampled_from((2**63 - 1, -(2**63), 2**63, 10**30))
)
many_axes = st.integers(4, 34).map(lambda n: (1,) * n)
any_shapes = st.one_of(shapes, shapes, shapes, many_axes)


class Dtype(NamedTuple):
    """An element type with a readable name."""

    name: str

    @property
    def numpy(self):
        """The numpy type."""
        return np.dtype(getattr(ml_dtypes, self.name, self.name))


@st.composite
def any_arrays(draw, dtype_names, shapes=any_shapes):
    """Draws arrays with any valid bits."""
    dtype = Dtype(draw(st.sampled_from(dtype_names)))
    shape = draw(shapes)
    if dtype.name in ("int2", "int4"):
        most = 2 if dtype.name == "int2" else 8
        values = draw(hnp.arrays(np.int8, shape, elements=st.integers(-most, most - 1)))
        return values.astype(dtype.numpy)
    raw = draw(hnp.arrays(np.uint8, (*shape, dtype.numpy.itemsize)))
    for prefix, bits in _BITS.items():
        if dtype.name.startswith(prefix):
            raw = raw & ((1 << bits) - 1)
    return np.frombuffer(raw.tobytes(), dtype.numpy).reshape(shape).copy()


def jax_arrays(*, x64):
    """Draws jax arrays with strong and weak types, and PRNG keys."""
    known = [n for n in ON_JAX if x64 or n not in WIDE]
    weak = st.one_of(
        st.integers(-100, 100), st.floats(width=32), st.booleans()
    ).flatmap(lambda v: shapes.map(lambda shape: jnp.full(shape, v)))
    keys = st.tuples(
        st.integers(0, 9),
        st.sampled_from(("threefry2x32", "rbg")),
        st.one_of(hnp.array_shapes(max_dims=2, max_side=3), many_axes, st.just(None)),
    ).map(_prng_keys)
    return st.one_of(any_arrays(known).map(jnp.asarray), weak, keys)


def _prng_keys(drawn):
    seed, impl, shape = drawn
    key = jax.random.key(seed, impl=impl)
    return key if shape is None else jax.random.split(key, shape)


any_numbers = st.one_of(
    numbers, st.sampled_from((2**63, -(2**63) - 1, 10**400, float("nan"), -0.0))
)
numpy_scalars = any_arrays((*DTYPES, *ML_DTYPES), st.just(())).map(lambda a: a[()])


def any_leaves(*, x64):
    """Returns a strategy of all valid leaves, and some invalid ones."""
    return st.one_of(
        any_arrays((*DTYPES, *ML_DTYPES)),
        jax_arrays(x64=x64),
        any_numbers,
        numpy_scalars,
        any_text,
        st.none(),
        st.sampled_from((b"bytes", {1, 2})),
    )


class Pair(NamedTuple):
    """A container with named children."""

    first: Any
    second: Any


@struct.dataclass
class Record:
    """A container with static fields."""

    child: Any
    other: Any
    name: Any = struct.field(pytree_node=False, default="")
    sizes: Any = struct.field(pytree_node=False, default=())


class Inner(nnx.Module):
    """A module inside a module."""

    def __init__(self, weight):
        self.weight = weight


class Module(nnx.Module):
    """A module whose parts may be shared."""

    def __init__(self, weight, mean, tied):
        self.weight = nnx.Param(weight)
        self.mean = nnx.BatchStat(mean)
        self.inner = Inner(self.weight if tied else nnx.Param(mean))
        self.rngs = nnx.Rngs(3)
        self.width = 7


OWN_TYPES = (Pair, Record)
static_fields = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    any_text,
    st.lists(st.booleans(), max_size=2).map(tuple),  # hashable, as jax requires
)


def any_containers(children):
    """Returns a strategy of dicts with any keys, and containers of all classes."""
    names_of_one_type = st.one_of(any_names, int_keys)
    return st.one_of(
        st.dictionaries(any_names, children, max_size=4),
        st.dictionaries(names, children, max_size=4),
        st.dictionaries(int_keys, children, max_size=3),
        st.dictionaries(names_of_one_type, children, max_size=3),
        st.dictionaries(names, children, max_size=3).map(FrozenDict),
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.builds(Pair, children, children),
        st.builds(
            Record,
            children,
            children,
            static_fields,
            st.lists(st.integers(), max_size=2).map(tuple),
        ),
        children.map(lambda value: linen.Partitioned(value, names=("x", None))),
    )


def modules(*, x64):
    """NNX modules."""
    values = jax_arrays(x64=x64)
    return st.builds(Module, values, values, st.booleans())


def any_states(*, x64):
    """States of all kinds."""
    plain = st.recursive(any_leaves(x64=x64), any_containers, max_leaves=8)
    with_module = st.builds(
        lambda module, rest: {"model": module, "rest": rest}, modules(x64=x64), plain
    )
    return st.one_of(plain, plain, plain, with_module)


any_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), any_text),
    lambda values: st.one_of(
        st.lists(values, max_size=3), st.dictionaries(any_text, values, max_size=3)
    ),
    max_leaves=6,
)
any_metadata = st.dictionaries(any_text, any_json, max_size=3)
any_metrics = st.recursive(
    st.one_of(st.floats(), st.integers(-(10**6), 10**6), st.booleans()),
    lambda values: st.dictionaries(any_text, values, max_size=3),
    max_leaves=5,
).filter(lambda metrics: isinstance(metrics, dict))
layouts = st.builds(
    flaxckpt.ArrayLayout,
    chunk_bytes=st.sampled_from((1, 16, 2**26)),
    codec=st.sampled_from(("none", "compact", "zstd")),
    checksum=st.booleans(),
    zarr_version=st.sampled_from((3, 3, 2)),
)


def assert_equal(wanted, found, path="state"):
    """Like `assert_same`, for every container that `any_states` draws.

    In any order of dictionaries: beside NNX objects, jax sorts their keys.
    """
    assert type(found) is type(wanted), f"{path}: {type(wanted)}, {type(found)}"
    if isinstance(wanted, dict | FrozenDict):
        assert set(found) == set(wanted), path
        types = {key: type(key) for key in found}
        for key in wanted:
            assert types[key] is type(key), path
            assert_equal(wanted[key], found[key], f"{path}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), path
        for i, (one, other) in enumerate(zip(wanted, found, strict=True)):
            assert_equal(one, other, f"{path}/{i}")
    elif isinstance(wanted, nnx.Module):
        assert_equal_modules(wanted, found, path)
    elif dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            one, other = getattr(wanted, field.name), getattr(found, field.name)
            assert_equal(one, other, f"{path}/{field.name}")
    elif isinstance(wanted, str) or wanted is None:
        assert found == wanted, path
    elif isinstance(wanted, float):
        is_nan = found != found and wanted != wanted  # JSON has only one NaN
        assert is_nan or binary.pack("<d", found) == binary.pack("<d", wanted), path
    else:
        assert isinstance(wanted, int) is isinstance(found, int), path
        if type(wanted) is int:
            assert found == wanted, path
        else:
            assert_same_bits(wanted, found, path)


def assert_equal_modules(wanted, found, path):
    """Compares values and shared references."""
    assert found.width == wanted.width
    is_tied = wanted.inner.weight is wanted.weight
    assert (found.inner.weight is found.weight) is is_tied, path
    ours, theirs = (
        [(path, variable[...]) for path, variable in nnx.to_flat_state(nnx.state(m))]
        for m in (wanted, found)
    )
    assert [at for at, _ in ours] == [at for at, _ in theirs]
    for (at, one), (_, other) in zip(ours, theirs, strict=True):
        assert_equal(one, other, f"{path}/{at}")
