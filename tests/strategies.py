"""Hypothesis strategies for states, and how to compare two of them."""

import string

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

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
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.complex_numbers(),
)
leaves = st.one_of(arrays, numbers, st.text(), st.none())


def containers(children):
    """Dicts with str or with int keys, lists and tuples."""
    return st.one_of(
        st.dictionaries(names, children, max_size=4),
        st.dictionaries(st.integers(0, 20), children, max_size=4),
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
