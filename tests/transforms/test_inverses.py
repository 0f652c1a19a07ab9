"""Transforms, one after another, and their inverses: all values come back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.transforms import (
    fuse,
    offset,
    permute,
    rename,
    reshape,
    scale,
    split,
    stack,
    tie,
    transpose,
    unstack,
    untie,
)
from tests.transforms.states import round_trip, state_of, table_of, transformed

SHAPES = {
    "embed": (7, 6),
    "qkv": (24, 6),
    "norm": (6,),
    "stacked": (3, 2, 4),
    **{f"l_{i}": (2, 3) for i in range(4)},
}

CHANGES = {
    "embed": [
        untie("params/embed", "params/head"),
        transpose("params/embed"),
        permute("params/embed", [6, 0, 5, 1, 4, 2, 3]),
        reshape("params/embed", "v e -> (e v)", e=6),
        scale("params/embed", 4.0),
    ],
    "qkv": [
        split("params/qkv", ["params/q", "params/k"], axis=0, sizes=[16, 8]),
        reshape("params/qkv", "(n h d) e -> e n h d", n=2, h=3),
        permute("params/qkv", [3, 2, 1, 0, 5, 4], axis=1),
        rename("params/(qkv)", r"params/\1_proj"),
    ],
    "norm": [
        offset("params/norm", -1.0),
        scale("params/norm", 0.5),
        reshape("params/norm", (2, -1), from_shape=(6,)),
    ],
    "stacked": [
        unstack("params/stacked", "params/s_{i}", start=2, stride=3),
        reshape("params/stacked", "l ... -> ... l"),
    ],
    "layers": [
        stack(r"params/l_(\d)", "params/odd", start=1, stride=2),
        stack(r"params/l_(\d)", "params/first", axis=-1, stop=2),
        fuse(["params/l_0", "params/l_3"], "params/both", axis=0),
    ],
}
"""Transforms of one leaf, or of four; only one of each group applies."""


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@given(
    kind=st.sampled_from(["dict", "FrozenDict", "nnx"]),
    picked=st.permutations(list(CHANGES)).flatmap(
        lambda names: st.tuples(*(st.sampled_from(CHANGES[name]) for name in names))
    ),
)
def test_all_values_and_moments_come_back(x64, kind, picked):
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        params = {name: jnp.ones(shape, dtype) for name, shape in SHAPES.items()}
        state = state_of(kind, params, optax.adamw(1e-3))
        before, back = table_of(state), round_trip(picked, state)
        forms = {
            path: value.shape for path, value in transformed(picked, state).items()
        }
    assert before.keys() == back.keys()
    for path, value in before.items():
        assert value.dtype == back[path].dtype
        np.testing.assert_array_equal(value, back[path], err_msg=path)
    for path, shape in forms.items():
        slots = {p for p in forms if p != path and p.endswith(path[len("params") :])}
        if path.startswith("params/"):
            assert len(slots) >= 2, path
            assert {forms[slot] for slot in slots} == {shape}


def test_ties_come_back_as_copies():
    shared = tie("params/head", "params/embed")
    params = {name: jnp.ones((3, 2)) for name in ("embed", "head")}
    state = state_of("dict", params, optax.adamw(1e-3))
    state["params"]["head"] = state["params"]["embed"]
    back = round_trip([shared], state)
    assert back.keys() == table_of(state).keys()
    np.testing.assert_array_equal(back["params/head"], back["params/embed"])
