"""NNX variables that stand beside the objects that have them stay shared."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from tests.helpers import strategies


class Model(nnx.Module):
    def __init__(self, variable):
        self.variable = variable
        self.inner = nnx.Dict(linear=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def beside(first):
    model = Model(nnx.Param(jnp.arange(3.0)))
    pair = {"a": model.variable, "z": model} if first else [model, model.variable]
    return pair, lambda s: (s["a"], s["z"].variable) if first else (s[1], s[0].variable)


def of_state():
    model = Model(nnx.Param(jnp.arange(3.0)))
    state = FrozenDict(model=model, params=nnx.state(model))
    return state, lambda s: (
        s["model"].inner["linear"].kernel,
        s["params"]["inner"]["linear"]["kernel"],
    )


def twice():
    variable = nnx.BatchStat(np.array([1, np.nan], np.float32))
    return (variable, {"b": [variable]}), lambda s: (s[0], s[1]["b"][0])


def keys():
    rngs = nnx.Rngs(0)
    return {"rngs": rngs, "key": rngs.default.key}, lambda s: (
        s["rngs"].default.key,
        s["key"],
    )


def trained():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    return {"m": model, "opt": optimizer, "step": optimizer.step}, lambda s: (
        s["opt"].step,
        s["step"],
    )


STATES = {
    "before": lambda: beside(True),
    "after": lambda: beside(False),
    "of a State": of_state,
    "without an object": twice,
    "keys": keys,
    "optimizer": trained,
}
states = pytest.mark.parametrize("name", STATES)


@states
def test_load_keeps_variables_shared(tmp_path, name):
    state, both = STATES[name]()
    one, other = both(state)
    assert one is other
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", state)
    one, other = both(found)
    assert one is other
    assert one is not both(state)[0]
    strategies.assert_same_state(state, found)


@states
def test_restored_state_still_shares_variables(tmp_path, name):
    state, both = STATES[name]()
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state)
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        abstract = nnx.eval_shape(lambda: state)
        one, other = both(ckpt.restore(abstract))
        assert one is other


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: -x])
def test_does_not_share_variables_with_unequal_values(tmp_path, change):
    """A state may begin with an average that is a view of the parameters."""

    def create():
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        return {"model": model, "average": nnx.state(model)}

    state = create()
    state["average"] = jax.tree.map(change, state["average"])
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", create())
    strategies.assert_same_state(state, found)
    assert found["average"]["bias"] is not found["model"].bias  # 0.0 is not -0.0


def test_sharded_variables_stay_shared(tmp_path):
    mesh = jax.make_mesh((4,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    model = Model(nnx.Param(jax.device_put(jnp.arange(8.0), sharding)))
    state = {"model": model, "own": model.variable}
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", state)
    assert found["own"] is found["model"].variable
    assert found["own"][...].sharding == sharding


def test_loads_part_of_state_with_shared_variables(tmp_path):
    state, _ = STATES["before"]()
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", {"a": state["a"]})
    strategies.assert_same_state({"a": state["a"]}, found)
    found = flaxckpt.load(tmp_path / "c", {"z": state["z"]})
    strategies.assert_same_state({"z": state["z"]}, found)


def test_load_warns_about_the_graph_of_a_split_module(tmp_path, caplog):
    """A graph names classes and functions, which a checkpoint does not record."""
    graph, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    flaxckpt.save(tmp_path / "c", (graph, state))
    assert flaxckpt.load(tmp_path / "c")[0].nodes is None
    told = [record.getMessage() for record in caplog.records]
    assert any("GraphDef.nodes is not in the checkpoint" in text for text in told)
    assert all("Pass a state that has the value" in text for text in told)
    caplog.clear()
    merged = nnx.merge(*flaxckpt.load(tmp_path / "c", (graph, state)))
    strategies.assert_same(state, nnx.state(merged))
    assert not caplog.records


def test_load_says_nothing_about_the_functions_of_a_train_state(tmp_path, caplog):
    params = {"w": jnp.ones(2)}
    made = TrainState.create(apply_fn=jnp.dot, params=params, tx=optax.sgd(1.0))
    boxed = nn.LogicallyPartitioned(jnp.ones(2), ("model",), mesh=object(), rules={1})
    flaxckpt.save(tmp_path / "c", {"state": made, "boxed": boxed})
    found = flaxckpt.load(tmp_path / "c")
    assert found["state"].tx is None
    assert found["boxed"].names == ("model",)
    assert not caplog.records
