"""NNX variables that items share: whole in each item, and shared again together."""

from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from orbax import checkpoint as ocp

import flaxckpt
from flaxckpt import errors
from tests.helpers import old_stores, strategies


class Network(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.arange(3.0))


def pair(seed=0):
    model = Network(seed)
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-3))
    optimizer.update(jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    return model, optimizer


class Both(nnx.Module):
    def __init__(self, seed=0):
        self.model, self.optimizer = pair(seed)


class Tuple(NamedTuple):
    model: Any
    optimizer: Any


@flax.struct.dataclass
class Struct:
    optimizer: Any
    model: Any


def backwards(seed=0):
    model, optimizer = pair(seed)
    return {"an_optimizer": optimizer, "model": model}


def nested(seed=0):
    model, optimizer = pair(seed)
    return {
        "model": {"network": model, "extra": jnp.arange(3.0)},
        "optimizer": [optimizer, {"count": jnp.array(3)}],
    }


def three(seed=0):
    model, optimizer = pair(seed)
    return FrozenDict(
        model=model, optimizer=optimizer, part={"first": model.first, "all": model}
    )


def variable(seed=0):
    model, optimizer = pair(seed)
    return {
        "model": model,
        "optimizer": optimizer,
        "best": {"kernel": model.first.kernel},
    }


STATES = {
    "dict": lambda seed=0: dict(zip(("model", "optimizer"), pair(seed), strict=True)),
    "optimizer first": backwards,
    "nested": nested,
    "module": Both,
    "named tuple": lambda seed=0: Tuple(*pair(seed)),
    "dataclass": lambda seed=0: Struct(*pair(seed)[::-1]),
    "three": three,
    "variable": variable,
}
states = pytest.mark.parametrize("name", STATES)


def branches(state):
    if isinstance(state, tuple):
        return state._asdict()
    if isinstance(state, nnx.Module | Struct):
        return {name: getattr(state, name) for name in ("model", "optimizer")}
    return dict(state)


def objects(state):
    """The model and the optimizer of a state."""
    nodes = jax.tree.leaves(
        branches(state), is_leaf=lambda x: isinstance(x, nnx.Pytree)
    )
    model = next(node for node in nodes if isinstance(node, Network))
    return model, next(n for n in nodes if isinstance(n, nnx.ModelAndOptimizer))


def saved(tmp_path, state, layout=None, **options):
    items = tuple(branches(state))
    flaxckpt.save(tmp_path / "c", state, items=items, layout=layout, **options)
    return tmp_path / "c"


@pytest.mark.sampled(3)
@states
@pytest.mark.parametrize("is_old", [False, True], ids=["database", "directories"])
def test_load_restores_sharing_between_items(tmp_path, name, is_old, caplog):
    state = STATES[name]()
    path = saved(tmp_path, state)
    if is_old:
        old_stores.make_directories(path, items=tuple(branches(state)))
    for wanted in (STATES[name](1), nnx.eval_shape(lambda: STATES[name](1))):
        found = flaxckpt.load(path, wanted)
        strategies.assert_same_state(state, found)
        model, optimizer = objects(found)
        assert optimizer.model is model
        assert model is not objects(state)[0]
    assert flaxckpt.verify(path).ok
    assert not caplog.text


@states
def test_restores_single_item(tmp_path, name, caplog):
    state = STATES[name]()
    path = saved(tmp_path, state)
    wanted = branches(STATES[name](1))
    for item, branch in branches(state).items():
        found = flaxckpt.load(path, {item: wanted[item]})
        strategies.assert_same_state({item: branch}, found)
    assert not caplog.text


@states
def test_restored_items_still_share_variables(tmp_path, name):
    state = STATES[name]()
    with flaxckpt.Checkpointer(tmp_path, items=tuple(branches(state))) as ckpt:
        ckpt.save(1, state)
        ckpt.save(2, state)
    with flaxckpt.Checkpointer(tmp_path, items=tuple(branches(state))) as ckpt:
        model, optimizer = objects(ckpt.restore(STATES[name](1), unused="error"))
    kernel = np.asarray(model.first.kernel[...])
    optimizer.update(jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    assert np.any(kernel != model.first.kernel[...])


@states
def test_orbax_restores_each_item_alone(tmp_path, name):
    state = STATES[name]()
    with flaxckpt.Checkpointer(tmp_path, items=tuple(branches(state))) as ckpt:
        ckpt.save(1, state)
    names = ("model", *(item for item in branches(state) if item != "model"))
    with ocp.CheckpointManager(tmp_path, item_names=names) as manager:
        for item in names:
            args = {item: ocp.args.StandardRestore()}
            found = manager.restore(1, args=ocp.args.Composite(**args))[item]
            flat = flaxckpt.load(tmp_path, step=1)[item]
            ours = jax.tree_util.tree_leaves_with_path(flat)
            theirs = jax.tree_util.tree_leaves_with_path(found)
            assert len(ours) == len(theirs)


def test_each_item_contains_all_variables(tmp_path):
    """An optimizer before its model has the model's variables, and so has the model."""
    path = saved(tmp_path, backwards())
    leaves = flaxckpt.metadata(path).leaves
    inside = {p.removeprefix("model/") for p in leaves if p.startswith("model/")}
    prefix = "an_optimizer/model/"
    assert inside == {p.removeprefix(prefix) for p in leaves if p.startswith(prefix)}
    assert {"first/kernel", "layers/1/bias", "mean"} < inside


def test_repeats_arrays_of_shared_modules(tmp_path):
    """Arrays that are no variables belong to their module."""

    def create(value):
        model, optimizer = pair()
        model.layers[1].scale = nnx.data(jnp.full(3, value))
        return {"model": model, "optimizer": optimizer}

    path = saved(tmp_path, create(2.0))
    for item in ("model", "optimizer"):
        found = flaxckpt.load(path, {item: create(0.0)[item]})
        strategies.assert_same_state({item: create(2.0)[item]}, found)
    found = flaxckpt.load(path, create(0.0))
    assert found["optimizer"].model.layers[1].scale[0] == 2
    assert found["optimizer"].model is found["model"]


def test_deletes_optimizer_from_old_steps(tmp_path):
    state = STATES["dict"]()
    options = {
        "items": ("model", "optimizer"),
        "keep_items": {"optimizer": [flaxckpt.policies.LatestN(1)]},
    }
    with flaxckpt.Checkpointer(tmp_path, **options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).wait()
        assert ckpt.metadata(1).deleted_items == ("optimizer",)
        found = ckpt.restore({"model": Network(1)}, step=1)
        strategies.assert_same_state({"model": state["model"]}, found)


def unequal(tmp_path):
    """A checkpoint whose items have other values of the variables that are shared."""
    state, other = STATES["dict"](), STATES["dict"](1)
    separate = {"model": state["model"], "optimizer": other["optimizer"]}
    return saved(tmp_path, separate), separate


def test_rejects_loading_items_with_unequal_shared_values(tmp_path):
    path, separate = unequal(tmp_path)
    with pytest.raises(errors.RestoreMismatchError) as info:
        flaxckpt.load(path, STATES["dict"](2))
    leaves = [mismatch.leaf for mismatch in info.value.mismatches]
    assert "optimizer/model/first/kernel" in leaves
    assert "optimizer/model/first/bias" not in leaves  # zeros in both
    text = str(info.value)
    assert "wanted the value of model/first/kernel" in text
    assert len(text.splitlines()) < 15
    for item, branch in separate.items():
        found = flaxckpt.load(path, {item: STATES["dict"](2)[item]})
        strategies.assert_same_state({item: branch}, found)
    with flaxckpt.Checkpointer(tmp_path, items=("model", "optimizer")) as ckpt:
        ckpt.save(1, separate)
        with pytest.raises(errors.RestoreMismatchError, match="which the state shares"):
            ckpt.restore(STATES["dict"](2))


def test_restores_sharing_between_orbax_items(tmp_path):
    """A program that saves the states of both objects has the variables twice."""
    model, optimizer = pair()
    with ocp.CheckpointManager(tmp_path, item_names=("model", "optimizer")) as manager:
        args = {
            "model": ocp.args.StandardSave(nnx.to_pure_dict(nnx.state(model))),
            "optimizer": ocp.args.StandardSave(nnx.to_pure_dict(nnx.state(optimizer))),
        }
        manager.save(1, args=ocp.args.Composite(**args))
        manager.wait_until_finished()
    found = flaxckpt.load(tmp_path, STATES["dict"](1))
    strategies.assert_same_state({"model": model, "optimizer": optimizer}, found)
    assert found["optimizer"].model is found["model"]


def test_restores_sharing_if_one_item_lacks_repeated_variables(tmp_path):
    """Another program may save the optimizer without the model's variables."""
    model, optimizer = pair()
    opt_state = nnx.state(optimizer, nnx.optimizer.OptState)
    tree = {"model": nnx.state(model), "optimizer": opt_state}
    path = saved(tmp_path, tree)
    found = flaxckpt.load(path, STATES["dict"](1), unused="error")
    strategies.assert_same_state({"model": model, "optimizer": optimizer}, found)
    assert found["optimizer"].model is found["model"]


def test_single_item_state_stores_variables_once(tmp_path):
    flaxckpt.save(tmp_path / "c", STATES["dict"]())
    leaves = flaxckpt.metadata(tmp_path / "c").leaves
    assert not any(path.startswith("optimizer/model") for path in leaves)


@pytest.mark.parametrize("pattern", ["model/.*kernel", "optimizer/model/.*kernel"])
def test_rejects_transform_of_only_one_item(tmp_path, pattern):
    state = STATES["dict"]()
    for change in (
        flaxckpt.transforms.cast(pattern, "bfloat16"),
        flaxckpt.transforms.map_leaf(pattern, lambda x: x * 2, inverse=lambda x: x / 2),
    ):
        with pytest.raises(errors.OptionError, match="in one item only") as info:
            saved(tmp_path, state, transforms=[change])
        assert len(str(info.value).splitlines()) < 15


def test_undoes_transform_of_all_items(tmp_path):
    state = STATES["dict"]()
    cast = flaxckpt.transforms.cast("(model|optimizer/model)/.*kernel", "bfloat16")
    options = {"items": ("model", "optimizer"), "transforms": [cast]}
    with flaxckpt.Checkpointer(tmp_path, **options) as ckpt:
        ckpt.save(1, state)
        found = ckpt.restore(STATES["dict"](1))
    kernel = state["model"].first.kernel[...].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(found["model"].first.kernel[...], kernel)
    assert found["optimizer"].model is found["model"]


def test_restores_sharing_of_sharded_variables(tmp_path):
    mesh = jax.make_mesh((4,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    model = Network()
    inner = model.layers[0]
    inner.kernel = nnx.Param(jax.device_put(inner.kernel[...], sharding))
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-3))
    state = {"model": model, "optimizer": optimizer}
    path = saved(tmp_path, state)
    found = flaxckpt.load(path, state)
    strategies.assert_same_state(state, found)
    assert found["model"].layers[0].kernel[...].sharding == sharding
    assert found["optimizer"].model is found["model"]
