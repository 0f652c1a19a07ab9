"""Comparison of two states, bit by bit."""

from typing import Any

import jax
import numpy as np


def assert_equal(found: Any, wanted: Any) -> None:
    """Compares structures, dtypes, and all bits of two states."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for leaf, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
    ):
        assert np.shape(leaf) == np.shape(other)
        assert as_bytes(leaf) == as_bytes(other)


def as_bytes(leaf: Any) -> tuple[str, bytes]:
    """Returns the dtype and the bytes of a leaf, also of a typed PRNG key."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    value = np.asarray(leaf)
    return str(value.dtype), value.tobytes()
