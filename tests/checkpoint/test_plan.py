"""A plan says what a restore will do, before it reads a byte."""

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from tests.helpers import old_stores


def state(tx=None, **params):
    params = params or {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    return train_state.TrainState.create(
        apply_fn=None, params=params, tx=tx or optax.adam(1e-3)
    )


@pytest.fixture
def path(tmp_path):
    flaxckpt.save(tmp_path / "c", state())
    return tmp_path / "c"


def actions(plan):
    return {path: leaf.actions for path, leaf in plan.leaves.items()}


def test_perfect_fit_loads_all_leaves(path):
    plan = flaxckpt.plan(path, state())
    assert set(actions(plan).values()) == {("loaded",)}
    assert plan.bytes_to_read == flaxckpt.metadata(path).total_bytes
    assert plan.bytes_here == plan.bytes_to_read
    assert plan.problems == ()
    assert len(str(plan).splitlines()) == 1


def test_names_every_action(path):
    wanted = {
        "params": {
            "w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16),
            "new": jnp.ones(2),
            "b": jnp.ones(5),
        },
        "step": 0,
    }
    plan = flaxckpt.plan(path, wanted, missing="init")
    found = actions(plan)
    assert found["params/w"] == ("loaded", "cast")
    assert found["params/new"] == ("init",)
    assert found["params/b"] == ("conflict",)
    assert found["step"] == ("loaded",)
    assert found["opt_state/0/count"] == ("dropped",)
    assert [p.leaf for p in plan.problems] == ["params/b"]
    assert plan.bytes_to_read == 8 * 4 * 4 + 8
    assert plan.count("dropped") == 5  # count, and mu and nu of two parameters
    with pytest.raises(errors.RestoreMismatchError) as info:
        flaxckpt.load(path, wanted, missing="init")
    assert info.value.mismatches == plan.problems


def test_matches_leaves_by_role(path):
    plan = flaxckpt.plan(path, state(optax.chain(optax.clip(1.0), optax.adam(1e-3))))
    leaf = plan.leaves["opt_state/1/0/mu/w"]
    assert leaf.actions == ("loaded", "matched")
    assert leaf.sources == ("opt_state/0/mu/w",)


def test_reports_resharding_and_local_bytes(path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    wanted = {
        "params": {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}
    }
    plan = flaxckpt.plan(path, wanted)
    assert plan.leaves["params/w"].actions == ("loaded", "resharded")
    assert plan.bytes_here == 8 * 4 * 4
    flaxckpt.save(path.parent / "split", flaxckpt.load(path, wanted))
    again = flaxckpt.plan(path.parent / "split", wanted)
    assert again.leaves["params/w"].actions == ("loaded",)
    whole = {"params": {"w": jnp.ones((8, 4))}}
    again = flaxckpt.plan(path.parent / "split", whole)
    assert again.leaves["params/w"].actions == ("loaded", "resharded")


@pytest.mark.parametrize("is_old", [False, True])
def test_plan_reads_no_arrays(path, is_old):
    if is_old:
        old_stores.make_directories(path)
    files = [*(path / "state").glob("*/c*" if is_old else "d/0*")]
    assert files
    for file in files:
        file.unlink()
    assert flaxckpt.plan(path, state()).problems == ()
    with pytest.raises(errors.DamagedCheckpointError):
        flaxckpt.load(path, state())


def test_printed_plan_lists_cast_and_initialized_leaves(path):
    wanted = {"params": {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}, "head": 1}
    plan = flaxckpt.plan(path, wanted, missing="init")
    for text in (str(plan), rich_text(plan)):
        assert "1 cast" in text
        assert "params/w" in text
        assert "bfloat16[8, 4]" in text
        assert "head" in text
        assert str(path) in "".join(text.split())


def rich_text(plan):
    console = rich.console.Console(width=200)
    with console.capture() as captured:
        console.print(plan)
    return captured.get()


def test_plan_of_many_leaves_stays_short(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": 1})
    plan = flaxckpt.plan(tmp_path / "c", {f"w{i}": jnp.ones(2) for i in range(1000)})
    assert len(plan.problems) == 1000
    assert len(str(plan).splitlines()) < 70


def test_opens_one_leaf_without_reading_others(path):
    store = flaxckpt.open_leaf(path, "params/w")
    assert store.shape == (8, 4)
    np.testing.assert_array_equal(store[2:4].read().result(), np.ones((2, 4)))
    with pytest.raises(ValueError, match=r"[Ww]rit"):
        store[0, 0].write(0).result()
    with pytest.raises(errors.RestoreMismatchError, match="params/w"):
        flaxckpt.open_leaf(path, "params/ww")
    with pytest.raises(errors.RestoreMismatchError, match="None"):
        flaxckpt.open_leaf(path, "opt_state/1")


@pytest.mark.parametrize("make", [dict, flax.core.FrozenDict])
def test_plan_ends_with_advice_of_error(tmp_path, make):
    layer = {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}
    flaxckpt.save(tmp_path / "c", state(**{"dense": layer}))
    wanted = make({"params": {"layer": layer}})
    plan = flaxckpt.plan(tmp_path / "c", wanted)
    with pytest.raises(errors.RestoreMismatchError) as raised:
        flaxckpt.load(tmp_path / "c", wanted)
    assert plan.advice == str(raised.value).splitlines()[-1]
    rename = r'transforms=[rename(r"params/dense/(.*)", r"params/layer/\1")]'
    assert str(plan).splitlines()[-1] == f"Pass {rename}."
    assert rename in rich_text(plan)
    renamed = flaxckpt.transforms.rename(r"params/dense/(.*)", r"params/layer/\1")
    fits = flaxckpt.plan(tmp_path / "c", wanted, transforms=[renamed])
    assert fits.advice == ""


def test_plan_names_leaves_missing_from_state(path):
    wanted = {"params": {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}}
    plan = flaxckpt.plan(path, wanted, unused="error")
    lines = str(plan).splitlines()
    assert any(line.startswith("6 leaves cannot be restored:") for line in lines)
    assert lines[-1].startswith("Add these leaves to the state")
