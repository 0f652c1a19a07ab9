"""The table of all transforms: values, moments, texts, inverses, runs and mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors, transforms
from flaxckpt.transforms import tie
from tests.helpers import seams
from tests.transforms.cases import (
    CASES,
    MISFITS,
    OTHERS,
    UNNAMED,
    misfit_state,
    name_of,
)
from tests.transforms.states import round_trip, state_of, table_of, transformed

UNDONE = [name for name, case in CASES.items() if case.is_undone]


def state_for(names, kind="dict", dtype=jnp.float32):
    """Returns a filled state with the leaves of cases, and moments of Adam."""
    shapes = {leaf: s for name in names for leaf, s in CASES[name].leaves.items()}
    params = {leaf: jnp.ones(shape, dtype) for leaf, shape in shapes.items()}
    return state_of(kind, params, optax.adamw(1e-3))


def assert_equal(wanted, found):
    assert wanted.keys() == found.keys()
    for path, value in wanted.items():
        assert value.dtype == found[path].dtype, path
        np.testing.assert_array_equal(value, found[path], err_msg=path)


@pytest.mark.parametrize("kind", ["dict", "FrozenDict", "nnx"])
@pytest.mark.parametrize("name", CASES)
def test_transforms_change_values_and_moments(name, kind):
    case, state = CASES[name], state_for([name], kind)
    before, after = table_of(state), transformed([case.change], state)

    def below(table, container):
        """Returns name -> value of the leaves in a container."""
        paths = (path.removesuffix("/value") for path in table)
        split = zip(paths, table.values(), strict=True)
        return {
            path.rpartition("/")[2]: value
            for path, value in split
            if path.rpartition("/")[0].endswith(container)
        }

    old = [[below(before, slot)[leaf] for leaf in case.leaves] for slot in SLOTS]
    moments = case.moments or case.effect
    effects = case.effect, moments, case.squares or moments
    for slot, effect, values in zip(SLOTS, effects, old, strict=True):
        assert_equal(effect(*map(np.asarray, values)), below(after, slot))


SLOTS = ("params", "mu", "nu")


FACTORING = optax.adafactor(1e-3, min_dim_size_to_factor=2), optax.sm3(1e-3)


@pytest.mark.parametrize("name", CASES)
def test_factored_moments_that_follow_are_those_of_the_new_gradients(name):
    case, random = CASES[name], np.random.default_rng(0)
    grads = {
        leaf: random.standard_normal(shape).astype(np.float32)
        for leaf, shape in case.leaves.items()
    }

    @jax.jit
    def trained(grads):
        own = jax.tree.map(jnp.ones_like, grads)
        moments = [tx.update(grads, tx.init(own), own)[1] for tx in FACTORING]
        return {"params": own, "moments": moments}

    found = transformed([case.change], trained(grads))
    new_grads = (case.moments or case.effect)(*grads.values())
    for path, value in table_of(trained(new_grads)).items():
        if path.startswith("moments/") and path in found:
            np.testing.assert_allclose(value, found[path], rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("name", CASES)
def test_inverse_restores_everything_or_is_rejected(name):
    state = state_for([name])
    if CASES[name].is_undone:
        assert_equal(table_of(state), round_trip([CASES[name].change], state))
    else:
        with pytest.raises(errors.OptionError, match="cannot be inverted"):
            transforms.inverse([CASES[name].change])


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@given(
    kind=st.sampled_from(["dict", "FrozenDict", "nnx"]),
    names=st.permutations(UNDONE),
    count=st.integers(2, len(UNDONE)),
)
def test_inverse_undoes_any_sequence_of_transforms(x64, kind, names, count):
    with jax.enable_x64(x64):
        state = state_for(names[:count], kind, jnp.float64 if x64 else jnp.float32)
        changes = [CASES[name].change for name in names[:count]]
        assert_equal(table_of(state), round_trip(changes, state))


def test_inverse_of_tie_restores_copies():
    params = {name: jnp.ones((3, 2)) for name in ("embed", "head")}
    state = state_of("dict", params, optax.adamw(1e-3))
    state["params"]["head"] = state["params"]["embed"]
    back = round_trip([tie("params/head", "params/embed")], state)
    assert back.keys() == table_of(state).keys()
    np.testing.assert_array_equal(back["params/head"], back["params/embed"])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["dict", "FrozenDict", "nnx"])
@pytest.mark.parametrize("name", UNDONE)
def test_run_restores_its_own_form_from_transformed_steps(tmp_path, name, kind):
    state, changes = state_for([name], kind), [CASES[name].change]
    with flaxckpt.Checkpointer(tmp_path, transforms=changes) as run:
        run.save(1, state)
        before = table_of(state)
        found = run.restore(jax.tree.map(jnp.zeros_like, state))
    assert_equal(before, table_of(found))


ALL = [*(case.change for case in CASES.values()), *OTHERS]


@pytest.mark.parametrize("change", ALL, ids=str)
def test_str_of_transform_is_call_creating_it(change):
    if name_of(change) != "map_leaf":  # whose function has no text
        again = eval(str(change), vars(transforms).copy())
        assert str(again) == str(change)


def test_the_table_has_all_transforms_on_leaves_of_their_own():
    assert {*map(name_of, ALL)} | UNNAMED == {*transforms.__all__}
    leaves = [leaf for case in CASES.values() for leaf in case.leaves]
    assert len(leaves) == len({*leaves})


@pytest.mark.parametrize(("changes", "says"), MISFITS)
def test_rejects_misfits_before_reading(tmp_path, monkeypatch, changes, says):
    flaxckpt.save(tmp_path / "c", misfit_state())
    seams.replace(monkeypatch, "arrays.read", None)
    with pytest.raises(errors.OptionError) as caught:
        flaxckpt.load(tmp_path / "c", transforms=changes)
    message = str(caught.value)
    assert says in message
    assert message.count("\n") < 15
    if "'w/.*'" in message:
        assert "10 leaves" in message
        assert "w/a1" in message
        assert "… and 2 more" in message
