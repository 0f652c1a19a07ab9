"""Steps of several items with arrays, JSON items, and items deleted later."""

import dataclasses
import json
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax import checkpoint as ocp
from orbax.checkpoint import v1 as ocp_v1

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import EveryNSteps, LatestN
from tests.helpers import strategies

ITEMS = ("model_params", "optimizer_state")
STORES = [
    flaxckpt.ArrayLayout(store="files"),
    flaxckpt.ArrayLayout(store="ocdbt"),
    flaxckpt.ArrayLayout(store="files", codec="zstd"),
    flaxckpt.ArrayLayout(store="files", zarr_version=2),
]


def state(step=0):
    params = {"dense": {"kernel": jnp.full((4, 8), step, jnp.bfloat16)}}
    params["dense"]["bias"] = jnp.arange(8.0) + step
    return {
        "model_params": params,
        "optimizer_state": optax.adam(1e-3).init(params),
    }


def batches(step):
    found = StepIndexed(lambda i: i)
    for _ in range(step):
        next(found)
    return found


class Pair(NamedTuple):
    model_params: Any
    optimizer_state: Any


@flax.struct.dataclass
class Struct:
    model_params: Any
    optimizer_state: Any
    name: str = flax.struct.field(pytree_node=False, default="static")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    model_params: Any
    optimizer_state: Any


def nnx_state():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return {"model_params": nnx.state(model), "optimizer_state": nnx.state(optimizer)}


STATES = {
    "dict": state,
    "FrozenDict": lambda: FrozenDict(state()),
    "NamedTuple": lambda: Pair(**state()),
    "struct": lambda: Struct(**state()),
    "registered": lambda: Registered(**state()),
    "nnx": nnx_state,
}


@pytest.mark.parametrize(
    "layout",
    STORES,
    ids=lambda layout: f"{layout.store}-{layout.codec}-{layout.zarr_version}",
)
@pytest.mark.parametrize("kind", STATES)
def test_branches_come_back_whatever_holds_them(tmp_path, kind, layout):
    wanted = STATES[kind]()
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS, layout=layout) as ckpt:
        ckpt.save(1, wanted)
    path = tmp_path / "1"
    assert {*ITEMS} <= {child.name for child in path.iterdir()}
    assert not (path / "state").exists()
    assert ckpt.metadata(1).items == ITEMS
    strategies.assert_same_state(wanted, ckpt.restore(wanted))
    strategies.assert_same_state(
        jax.tree.map(lambda x: x, wanted),
        flaxckpt.load(path, types=[*map(type, [wanted])]),
    )
    report = ckpt.verify(1)
    assert report.ok, report
    assert not report.extra
    assert not report.unchecked


branches = st.dictionaries(
    strategies.names, st.recursive(strategies.arrays, strategies.containers), min_size=1
)


@settings(max_examples=30, deadline=None)
@given(
    tree=st.fixed_dictionaries({"a": branches, "b": branches, "c-1": branches}),
    store=st.sampled_from(("auto", "ocdbt")),
)
def test_any_branches_come_back_without_a_template(tmp_path_factory, tree, store):
    path = tmp_path_factory.mktemp("items") / "c"
    layout = flaxckpt.ArrayLayout(store=store)
    try:
        flaxckpt.save(path, tree, items=("a", "b", "c-1"), layout=layout)
    except (errors.LeafNameError, errors.UnsupportedLeafError):
        return
    strategies.assert_same(tree, flaxckpt.load(path))
    one = flaxckpt.load(path, {"b": tree["b"]})
    strategies.assert_same(tree["b"], one["b"])
    assert flaxckpt.verify(path).ok


def test_one_item_of_another_name_holds_the_state_itself(tmp_path):
    wanted = state()
    with flaxckpt.Checkpointer(tmp_path, items="items", dataset_item="iter") as ckpt:
        ckpt.save(7, wanted, dataset=batches(3))
    assert next(iter(ckpt.metadata(7).leaves)).startswith("model_params/dense")
    assert {"items", "iter"} <= {child.name for child in (tmp_path / "7").iterdir()}
    data = batches(0)
    strategies.assert_same_state(wanted, ckpt.restore(wanted, dataset=data))
    assert data.get_state() == batches(3).get_state()
    with ocp.CheckpointManager(tmp_path, item_names=("items",)) as theirs:
        found = theirs.restore(
            7, args=ocp.args.Composite(items=ocp.args.StandardRestore(wanted))
        )
    strategies.assert_same_state(wanted, found["items"])


@pytest.mark.parametrize(
    "layout",
    STORES,
    ids=lambda layout: f"{layout.store}-{layout.codec}-{layout.zarr_version}",
)
def test_stock_orbax_restores_each_item(tmp_path, layout):
    wanted = state(3)
    config = {"depth": 2, "names": ["a", None], "rate": 0.5}
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS, layout=layout) as ckpt:
        ckpt.save(3, wanted, json={"config": config}, metrics={"loss": 1.0})
    with ocp.CheckpointManager(tmp_path, item_names=(*ITEMS, "config")) as theirs:
        assert theirs.all_steps() == [3]
        args = {item: ocp.args.StandardRestore(wanted[item]) for item in ITEMS}
        found = theirs.restore(
            3, args=ocp.args.Composite(config=ocp.args.JsonRestore(), **args)
        )
    assert found["config"] == config
    for item in ITEMS:
        strategies.assert_same_state(wanted[item], found[item])
    loaded = ocp_v1.load_checkpointables(tmp_path / "3", wanted)
    for item in ITEMS:
        bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(loaded[item])]
        assert bits == [np.asarray(x).tobytes() for x in jax.tree.leaves(wanted[item])]


def test_json_items_come_back_as_json(tmp_path):
    values = {"config": {"a": [1, 2.5, None, True]}, "list": [1], "big": 2**100}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": np.ones(2)}, json=values)
    assert ckpt.metadata(1).json == values
    assert flaxckpt.metadata(tmp_path).json == values
    np.testing.assert_array_equal(ckpt.restore()["w"], np.ones(2))
    file = tmp_path / "1/config/metadata"
    assert json.loads(file.read_text()) == values["config"]
    file.write_text('{"a": 1}')
    assert not ckpt.verify(1).ok
    with pytest.raises(errors.DamagedCheckpointError, match=r"config/metadata"):
        ckpt.metadata(1)


# ---- bad input --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"items": ("a", "a")}, "'a' in items: the name is also in items"),
        ({"items": ("a/b",)}, "'a/b' in items: wanted the name of a directory"),
        ({"items": ".."}, "'..' in items: wanted the name of a directory"),
        ({"items": "3"}, "'3' in items: wanted the name of a directory"),
        ({"items": ()}, "wanted at least one name"),
        ({"items": 5}, "items must be the name of the item"),
        ({"items": ("a", 5)}, "5 in items: wanted the name of a directory"),
        ({"items": "metrics"}, "'metrics' in items: this name has another use"),
        ({"items": ""}, "items is an empty text"),
        ({"items": "DAMAGED"}, "'DAMAGED' in items: this name has another use"),
        ({"items": ("a", "ITEM_DELETED.a")}, "this name has another use"),
        ({"dataset_item": "flaxckpt.json"}, "this name has another use"),
        ({"items": "_CHECKPOINT_METADATA"}, "this name has another use"),
        ({"items": "dataset"}, "'dataset' in items: this name has another use"),
        ({"items": "a", "dataset_item": "a"}, "dataset_item: the name is also in"),
        ({"dataset_item": "metrics"}, "this name has another use"),
        ({"keep_items": {"state": [LatestN(1)]}}, "a step could lose them all"),
        ({"keep_items": [LatestN(1)]}, "keep_items must be a dict"),
        (
            {"keep_items": {"dataset": [LatestN(1)]}, "keep_dataset": [LatestN(1)]},
            "pass one of both",
        ),
        ({"keep_items": {"metrics": [LatestN(1)]}}, "this name has another use"),
        ({"keep_items": {"flaxckpt.json": [LatestN(1)]}}, "this name has another use"),
        ({"keep_items": {"a/b": [LatestN(1)]}}, "wanted the name of a directory"),
        ({"keep_items": {3: [LatestN(1)]}}, "policies for 3, which cannot be an item"),
    ],
    ids=str,
)
def test_impossible_items_are_refused_at_once(tmp_path, options, wanted):
    with pytest.raises(errors.OptionError) as info:
        flaxckpt.Checkpointer(tmp_path / "run", **options)
    assert wanted in str(info.value)
    assert len(str(info.value).splitlines()) < 15
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        ({"a": {"x": np.ones(1)}}, "b: is an item, but not a branch of the state"),
        (
            {"a": {"x": np.ones(1)}, "b": {"x": np.ones(1)}, "c": np.ones(1)},
            "c: is a branch of the state, but not an item",
        ),
        ({"a": {"x": np.ones(1)}, "b": np.ones(1)}, "b: is a single leaf"),
        ({"a": {"x": np.ones(1)}, "b": {}}, "b: is empty"),
        (np.ones(2), "a: is an item, but not a branch"),
    ],
    ids=str,
)
def test_a_state_without_these_branches_is_refused(tmp_path, tree, wanted):
    with flaxckpt.Checkpointer(tmp_path, items=("a", "b")) as ckpt:
        with pytest.raises(errors.LeafNameError) as info:
            ckpt.save(1, tree)
        assert wanted in str(info.value)
        assert not ckpt.steps()
    assert [path.name for path in tmp_path.iterdir()] in ([], ["events.jsonl"])


@pytest.mark.parametrize(
    ("items", "wanted"),
    [
        ({"state": {}}, "the name is also in items"),
        ({"metrics": {}}, "this name has another use"),
        ({"PINNED": {}}, "this name has another use"),
        ({"x/y": {}}, "wanted the name of a directory"),
        ({"config": {"a": {1}}}, "json['config']['a'] is a builtins.set"),
        ({"config": np.ones(2)}, "json['config'] is a numpy.ndarray"),
        ("text", "json is a str"),
    ],
    ids=str,
)
def test_json_that_is_none_is_refused(tmp_path, items, wanted):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(errors.OptionError) as info:
            ckpt.save(1, {"w": np.ones(2)}, json=items)
        assert wanted in str(info.value)
        assert not ckpt.steps()


# ---- items deleted later ----------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    STORES,
    ids=lambda layout: f"{layout.store}-{layout.codec}-{layout.zarr_version}",
)
def test_policies_of_an_item_delete_the_item_of_old_steps(tmp_path, layout):
    keep_items = {"optimizer_state": [LatestN(2), EveryNSteps(4)]}
    with flaxckpt.Checkpointer(
        tmp_path, items=ITEMS, keep_items=keep_items, layout=layout
    ) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, state(step))
    assert ckpt.steps() == [*range(1, 8)]
    with_optimizer = {4, 6, 7}
    for step in ckpt.steps():
        has_item = step in with_optimizer
        metadata = ckpt.metadata(step)
        assert metadata.items == (ITEMS if has_item else ITEMS[:1])
        assert metadata.deleted_items == (() if has_item else ITEMS[1:])
        assert (tmp_path / str(step) / "optimizer_state").exists() == has_item
        report = ckpt.verify(step)
        assert report.ok, report
        assert not report.extra
        assert not report.unchecked
        wanted = state(step)
        params = {"model_params": wanted["model_params"]}
        strategies.assert_same_state(params, ckpt.restore(params, step=step))
        if not has_item:
            assert "item optimizer_state deleted" in ckpt.explain()[step]
            strategies.assert_same_state(params, ckpt.restore(step=step))


@pytest.mark.parametrize("items", [ITEMS, "state"], ids=str)
def test_policies_of_an_item_that_no_step_has_are_a_warning(tmp_path, items, caplog):
    keep_items = {"optimiser_state": [LatestN(1)], "config": [LatestN(1)]}
    with flaxckpt.Checkpointer(tmp_path, items=items, keep_items=keep_items) as ckpt:
        ckpt.save(1, state(1), json={"config": {"a": 1}}).wait()
        assert "policies for 'optimiser_state', but no step" in caplog.text
        assert "'config'" not in caplog.text
        caplog.clear()
        ckpt.save(2, state(2), json={"config": {"a": 2}}).wait()
    assert not caplog.text
    assert ckpt.metadata(1).deleted_items == ("config",)


def test_policies_of_items_that_steps_have_are_no_warning(tmp_path, caplog):
    """JSON items, an item of steps saved otherwise, and a dataset that comes later."""
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS) as ckpt:
        ckpt.save(1, state(1), json={"config": {}}).wait()
    options = {
        "keep_items": {"optimizer_state": [LatestN(1)], "config": [LatestN(1)]},
        "keep_dataset": [LatestN(1)],
    }
    for step in (2, 3):
        with flaxckpt.Checkpointer(tmp_path, **options) as ckpt:
            ckpt.save(step, state(step)).wait()
    assert not caplog.text
    assert ckpt.metadata(1).deleted_items == ()


def test_a_deleted_item_is_an_error_unless_it_begins_anew(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS) as ckpt:
        ckpt.save(1, state(1)).wait()
        ckpt.delete(1, item="optimizer_state")
        with pytest.raises(errors.RestoreMismatchError) as info:
            ckpt.restore(state(), step=1)
        assert "the item optimizer_state was deleted from this step" in str(info.value)
        assert len(str(info.value).splitlines()) < 15
        plan = flaxckpt.plan(tmp_path, state())
        assert len(plan.problems) == 5
        found = ckpt.restore(state(), step=1, optimizer="reinit")
    strategies.assert_same_state(state(1)["model_params"], found["model_params"])
    fresh = optax.adam(1e-3).init(state(1)["model_params"])
    strategies.assert_same_state(fresh, found["optimizer_state"])


def test_parameters_alone_are_saved_without_the_item_of_the_optimizer(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS) as ckpt:
        path = ckpt.save_params_only(3, state(3))
    params = {"model_params": state(3)["model_params"]}
    strategies.assert_same_state(params, flaxckpt.load(path, params))


def test_items_that_cannot_be_deleted_are_named(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS, dataset_item="iter") as ckpt:
        ckpt.save(1, state(), json={"config": {}}, dataset=batches(1)).wait()
        with pytest.raises(errors.CheckpointNotFoundError) as info:
            ckpt.delete(1, item="nothing")
        assert "it has model_params, optimizer_state, config, iter" in str(info.value)
        for item in ("config", "iter", "model_params"):
            ckpt.delete(1, item=item)
        metadata = ckpt.metadata(1)
        assert metadata.deleted_items == ("config", "iter", "model_params")
        assert not metadata.json
        assert not metadata.has_dataset
        with pytest.raises(errors.OptionError, match="delete the whole step"):
            ckpt.delete(1, item="optimizer_state")
        assert ckpt.verify(1).ok
        with pytest.raises(errors.DatasetStateError, match="deleted"):
            ckpt.restore_dataset(batches(0), step=1)


def test_steps_of_items_are_replaced_and_linked(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS) as ckpt:
        same = state(1)
        ckpt.save(1, same, json={"config": {}}, dataset=batches(1)).wait()
        ckpt.save(2, same).wait()
        name = "model_params/dense.kernel/c.0.0"
        first, second = (tmp_path / step / name for step in ("1", "2"))
        assert first.stat().st_ino == second.stat().st_ino
        ckpt.save(1, state(5), on_exists="overwrite").wait()
        strategies.assert_same_state(state(5), ckpt.restore(state(), step=1))
        assert ckpt.verify(1).ok
        (tmp_path / "2/model_params/mine.txt").write_text("keep me")
        with pytest.raises(errors.CheckpointExistsError, match=r"mine\.txt"):
            ckpt.save(2, state(5), on_exists="overwrite")
