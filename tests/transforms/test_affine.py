"""Leaves plus a number, and times a number, with their moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import offset, scale
from tests.transforms.states import round_trip, state_of, table_of, transformed

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "adabelief": optax.adabelief(1e-3),
    "rmsprop": optax.rmsprop(1e-3, centered=True),
    "adagrad": optax.adagrad(1e-3, initial_accumulator_value=0.0),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(
        1e-3, min_dim_size_to_factor=4, multiply_by_parameter_scale=False
    ),
}
PARAMS = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_those_of_the_scaled_parameters(name):
    """A model with parameters 4 times as large has gradients a quarter as large."""
    tx = OPTIMIZERS[name]

    def trained(factor):
        state = {"params": PARAMS, "opt_state": tx.init(PARAMS)}
        for step in range(3):
            grads = {
                "w": jax.random.normal(jax.random.key(step), (8, 4)) / factor,
                "b": jnp.full(4, step - 1.0),
            }
            new = tx.update(grads, state["opt_state"], state["params"])[1]
            state["opt_state"] = new
        return {**state, "params": {**PARAMS, "w": PARAMS["w"] * factor}}

    found = transformed([scale("params/w", 4)], trained(1))
    wanted = table_of(trained(4))
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_allclose(value, found[path], rtol=2e-5, err_msg=path)


@pytest.mark.parametrize("kind", ["dict", "FrozenDict", "nnx"])
def test_an_offset_leaves_the_moments_alone(tmp_path, kind):
    state = state_of(kind, PARAMS, OPTIMIZERS["adamw"])
    change = offset("params/(w|b)", -1.0)
    before, after = table_of(state), transformed([change], state)
    assert {p for p in before if np.any(before[p] != after[p])} == {
        p for p in before if p.startswith("params/")
    }
    np.testing.assert_array_equal(before["params/w"] - 1, after["params/w"])
    flaxckpt.save(tmp_path / "c", state, transforms=[change])
    found = flaxckpt.load(tmp_path / "c", state, transforms=[change.inverse()])
    for path, value in table_of(found).items():
        np.testing.assert_array_equal(before[path], value, err_msg=path)


def test_copies_of_parameters_change_as_the_parameters():
    tx = optax.contrib.schedule_free_adamw(1e-3)
    state = state_of("dict", PARAMS, tx)
    before = table_of(state)
    shifted = transformed([offset("params/w", 2)], state)
    scaled = transformed([scale("params/w", 2)], state)
    [path] = [p for p in before if p.endswith("z/w")]
    np.testing.assert_array_equal(before[path] + 2, shifted[path])
    np.testing.assert_array_equal(before[path] * 2, scaled[path])


def test_moments_of_unknown_meaning_start_afresh(tmp_path):
    """Nothing tells momentum of gradients from momentum of updates."""
    state = state_of("dict", PARAMS, optax.sgd(1e-2, momentum=0.9))
    flaxckpt.save(tmp_path / "c", state)
    found = transformed([scale("params/w", 2)], state)
    assert not [path for path in found if path.endswith("trace/w")]
    assert [path for path in found if path.endswith("trace/b")]


def test_moments_without_roles_are_known_by_their_fields():
    params = {"w": np.full(3, 8, np.float32)}
    state = {"params": params, "opt_state": {"0": {"mu": params, "nu": params}}}
    found = transformed([scale("params/w", 2)], state)
    assert found["opt_state/0/mu/w"].tolist() == [4.0] * 3
    assert found["opt_state/0/nu/w"].tolist() == [2.0] * 3


def test_sixteen_bits_are_rounded_once():
    small = np.array([2**-7, 3.0, 250.0], "bfloat16")
    state = {"a": jnp.asarray(small)}
    found = transformed([scale("a", 1 / 3)], state)["a"]
    wanted = (small.astype(np.float32) * np.float32(1 / 3)).astype(small.dtype)
    np.testing.assert_array_equal(wanted, found)
    assert found.dtype == jnp.bfloat16
    found = transformed([offset("a", 1)], state)["a"]
    np.testing.assert_array_equal((small.astype("f4") + 1).astype(small.dtype), found)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint16", "complex64", "float64"])
@pytest.mark.parametrize("x64", [False, True])
def test_types_are_kept(dtype, x64):
    with jax.enable_x64(x64):
        state = {"a": np.arange(5).astype(dtype), "n": np.float32(2), "i": 3, "f": 1.5}
        found = transformed([offset(".*", 2)], state)
        assert found["a"].dtype == dtype
        np.testing.assert_array_equal(state["a"] + np.array(2, dtype), found["a"])
        assert (found["n"], found["i"], found["f"]) == (4, 5, 3.5)
        assert type(found["n"]) is np.float32
        assert type(found["i"]) is int


def test_what_cannot_hold_the_result_is_refused():
    for name, value in (("i", jnp.ones(3, int)), ("b", jnp.ones(3, bool))):
        with pytest.raises(errors.OptionError, match=name):
            transformed([scale(name, 0.5)], {name: value})
    with pytest.raises(errors.OptionError, match="does not hold numbers"):
        transformed([offset("k", 1)], {"k": jax.random.key(0)})
    with pytest.raises(errors.OptionError, match="whole number"):
        round_trip([scale("i", 2)], {"i": jnp.ones(3, int)})


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1),
    power=st.integers(-8, 8),
)
def test_powers_of_two_are_undone_exactly(values, power):
    value = np.array(values, np.float32)
    value[np.abs(value) < 1e-30] = 0  # else subnormal on the way
    state = {"a": value}
    found = round_trip([scale("a", 2.0**power)], state)["a"]
    np.testing.assert_array_equal(value, found)
