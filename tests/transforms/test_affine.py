"""Leaves plus a number, and times a number, with their moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    "adafactor, not factored": optax.adafactor(1e-3, multiply_by_parameter_scale=False),
    "adamax": optax.adamax(1e-3, eps=0.0),
    "radam": optax.radam(1e-3),
    "adan": optax.adan(1e-3),
    "ademamix": optax.contrib.ademamix(1e-3),
    "simplified ademamix": optax.contrib.simplified_ademamix(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "lbfgs": optax.scale_by_lbfgs(memory_size=2),
}
if hasattr(optax.contrib, "madgrad"):  # optax 0.2.6 lacks it
    OPTIMIZERS["madgrad"] = optax.contrib.madgrad(1e-3)
PARAMS = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("factor", [4, -0.5])
def test_scaled_moments_match_training_of_scaled_parameters(name, factor):
    """A model with parameters 4 times as large has gradients a quarter as large."""
    tx = OPTIMIZERS[name]

    def trained(factor):
        params = {**PARAMS, "w": PARAMS["w"] * factor}
        state = {"params": params, "opt_state": tx.init(params)}
        for step in range(3):
            grads = {
                "w": jax.random.normal(jax.random.key(step), (8, 4)) / factor,
                "b": jnp.full(4, step - 1.0),
            }
            new = tx.update(grads, state["opt_state"], state["params"])[1]
            params = jax.tree.map(lambda x: x * 1.5, state["params"])
            state = {"params": params, "opt_state": new}
        return state

    nu = "norms" if name == "adamax" else "squares"
    found = transformed([scale("params/w", factor, nu=nu)], trained(1))
    wanted = table_of(trained(factor))
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_allclose(value, found[path], rtol=2e-5, err_msg=path)


def test_copies_of_parameters_change_like_parameters():
    tx = optax.contrib.schedule_free_adamw(1e-3)
    state = state_of("dict", PARAMS, tx)
    before = table_of(state)
    shifted = transformed([offset("params/w", 2)], state)
    scaled = transformed([scale("params/w", 2)], state)
    [path] = [p for p in before if p.endswith("z/w")]
    np.testing.assert_array_equal(before[path] + 2, shifted[path])
    np.testing.assert_array_equal(before[path] * 2, scaled[path])


UNKNOWN = {
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "rmsprop with momentum": optax.rmsprop(1e-3, momentum=0.9),
    "adadelta": optax.adadelta(1e-3),
    "novograd": optax.novograd(1e-3),
    "sm3": optax.sm3(1e-3),
    "rprop": optax.rprop(1e-3),
    "optimistic": optax.optimistic_adam_v2(1e-3),
    "prodigy": optax.contrib.prodigy(1e-3),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_leaves_out_and_names_moments_of_unknown_meaning(name, caplog):
    """Nothing tells momentum of gradients from momentum of updates."""
    state = state_of("dict", PARAMS, UNKNOWN[name])
    before = table_of(state)
    found = transformed([scale("params/w", 2, nu="squares")], state)
    gone = [path for path in before if path not in found]
    assert gone
    assert all("opt_state" in path and "w" in path.split("/") for path in gone)
    [record] = caplog.records
    assert f"leaves out {len(gone)} moments" in record.getMessage()
    assert gone[0] in record.getMessage()
    stays = [path for path in before if "b" in path.split("/")]
    assert stays
    for path in stays:
        np.testing.assert_array_equal(before[path], found[path])


@pytest.mark.parametrize("make", [optax.adam, optax.adamax])
def test_warns_about_scaling_nu_as_squares(make, caplog):
    state = state_of("dict", PARAMS, make(1e-3))
    before = table_of(state)
    found = transformed([scale("params/w", -2)], state)
    [record] = caplog.records
    assert "opt_state/0/nu/w" in record.getMessage()
    assert "nu='norms'" in record.getMessage()
    np.testing.assert_array_equal(
        before["opt_state/0/nu/w"] / 4, found["opt_state/0/nu/w"]
    )
    caplog.clear()
    change = scale("params/w", -2, nu="norms")
    found = transformed([change], state)
    np.testing.assert_array_equal(
        before["opt_state/0/nu/w"] / 2, found["opt_state/0/nu/w"]
    )
    assert str(change) == "scale('params/w', -2, nu='norms')"
    assert str(change.inverse()) == "scale('params/w', -0.5, nu='norms')"
    assert not caplog.records
    transformed([offset("params/w", 1.0)], state)
    assert not caplog.records
    with pytest.raises(errors.OptionError, match="'squares' or 'norms'"):
        scale("params/w", 2, nu="norm")


def test_recognizes_moments_without_roles_by_fields():
    params = {"w": np.full(3, 8, np.float32)}
    state = {"params": params, "opt_state": {"0": {"mu": params, "nu": params}}}
    found = transformed([scale("params/w", 2)], state)
    assert found["opt_state/0/mu/w"].tolist() == [4.0] * 3
    assert found["opt_state/0/nu/w"].tolist() == [2.0] * 3
    state["opt_state"]["0"].pop("nu")  # as Lion
    found = transformed([scale("params/w", 2)], state)
    assert found["opt_state/0/mu/w"].tolist() == [4.0] * 3


OTHERS = {
    "novograd": {"mu": {"w": np.ones((4, 3))}, "nu": {"w": np.ones(())}},
    "sm3": {"mu": {"w": [np.ones(4), np.ones(3)]}, "nu": {"w": np.ones((4, 3))}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_leaves_out_other_moments_with_same_names(name):
    state = {"params": {"w": np.ones((4, 3))}, "opt_state": {"0": OTHERS[name]}}
    found = transformed([scale("params/w", 2)], state)
    kept = [path for path in found if path.startswith("opt_state")]
    # Leaves that are no moments by their names stay as they are.
    assert all(np.all(found[path] == 1) for path in kept)
    assert not {"opt_state/0/mu/w", "opt_state/0/nu/w"} & {*kept}


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint16", "complex64", "float64"])
@pytest.mark.parametrize("x64", [False, True])
def test_offset_keeps_dtypes(dtype, x64):
    with jax.enable_x64(x64):
        state = {"a": np.arange(5).astype(dtype), "n": np.float32(2), "i": 3, "f": 1.5}
        found = transformed([offset(".*", 2)], state)
        assert found["a"].dtype == dtype
        np.testing.assert_array_equal(state["a"] + np.array(2, dtype), found["a"])
        assert (found["n"], found["i"], found["f"]) == (4, 5, 3.5)
        assert type(found["n"]) is np.float32
        assert type(found["i"]) is int


def test_scale_and_offset_reject_unsuitable_dtypes():
    for name, value in (("i", jnp.ones(3, int)), ("b", jnp.ones(3, bool))):
        with pytest.raises(errors.OptionError, match=name):
            transformed([scale(name, 0.5)], {name: value})
    with pytest.raises(errors.OptionError, match="does not hold numbers"):
        transformed([offset("k", 1)], {"k": jax.random.key(0)})
    with pytest.raises(errors.OptionError, match="whole number"):
        round_trip([scale("i", 2)], {"i": jnp.ones(3, int)})


@pytest.mark.slow
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1),
    power=st.integers(-8, 8),
)
def test_inverse_undoes_powers_of_two_exactly(values, power):
    value = np.array(values, np.float32)
    value[np.abs(value) < 1e-30] = 0  # else subnormal on the way
    state = {"a": value}
    found = round_trip([scale("a", 2.0**power)], state)["a"]
    np.testing.assert_array_equal(value, found)
