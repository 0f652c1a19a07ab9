"""Steps of several items with arrays, JSON items, and items deleted later."""

import dataclasses
import json
import logging
import shutil
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
from tests.helpers import faulty_store as faulty
from tests.helpers import old_stores, strategies

ITEMS = ("model_params", "optimizer_state")
LAYOUTS = {
    "none": flaxckpt.ArrayLayout(),
    "zstd": flaxckpt.ArrayLayout(codec="zstd"),
    "zarr 2": flaxckpt.ArrayLayout(zarr_version=2),
}


def state(step=0):
    params = {"dense": {"kernel": jnp.full((4, 8), step, jnp.bfloat16)}}
    params["dense"]["bias"] = jnp.arange(8.0) + step
    return {"model_params": params, "optimizer_state": optax.adam(1e-3).init(params)}


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("store", ["database", "directories"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", STATES)
def test_items_round_trip_for_every_kind_of_state(tmp_path, kind, layout, store):
    wanted = STATES[kind]()
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS, layout=layout) as ckpt:
        ckpt.save(1, wanted)
    path = tmp_path / "1"
    if store == "directories":
        old_stores.make_directories(path, ITEMS)
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


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(tree=st.fixed_dictionaries({"a": branches, "b": branches, "c-1": branches}))
def test_loads_any_branches_without_template(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("items") / "c"
    try:
        flaxckpt.save(path, tree, items=("a", "b", "c-1"))
    except (errors.LeafNameError, errors.UnsupportedLeafError):
        return
    strategies.assert_same(tree, flaxckpt.load(path))
    one = flaxckpt.load(path, {"b": tree["b"]})
    strategies.assert_same(tree["b"], one["b"])
    assert flaxckpt.verify(path).ok


def test_single_named_item_holds_whole_state(tmp_path):
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


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
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


def test_json_items_round_trip(tmp_path):
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
        ckpt.metadata(1).json["config"]


# ---- damaged items ----------------------------------------------------------------


def lose(item):
    shutil.rmtree(item)


def lose_file(item):
    (item / "metadata").unlink()


def change(item):
    (item / "metadata").write_text('{"depth": 3}')


@pytest.mark.sampled(5)
@pytest.mark.parametrize("items", ["state", ITEMS])
@pytest.mark.parametrize("damage", [lose, lose_file, change])
@pytest.mark.parametrize("kind", STATES)
def test_damaged_json_does_not_block_state(tmp_path, caplog, kind, damage, items):
    wanted = STATES[kind]()
    json_items = {"config": {"depth": 2}, "other": [1]}
    with flaxckpt.Checkpointer(tmp_path, items=items) as ckpt:
        ckpt.save(1, wanted, json=json_items).wait()
        damage(tmp_path / "1/config")
        strategies.assert_same_state(wanted, ckpt.restore(wanted))
        [record] = [r for r in caplog.records if r.name.startswith("flaxckpt")]
        assert record.levelno == logging.WARNING
        assert "config cannot be read: " in record.message
        assert "config/metadata" in record.message
        flaxckpt.load(tmp_path, types=[type(wanted)])
        metadata = ckpt.metadata(1)
        assert list(metadata.damaged_items) == ["config"]
        assert metadata.json == {"other": [1]}
        with pytest.raises(errors.DamagedCheckpointError, match="config/metadata"):
            metadata.json["config"]
        assert list(ckpt.verify(1).problems) == ["config/metadata"]
        assert not ckpt.verify(1).unreadable
        with pytest.raises(errors.DamagedCheckpointError, match="config"):
            flaxckpt.convert(tmp_path / "1", tmp_path / "converted")
        ckpt.delete(1, item="config")
        assert ckpt.verify(1).ok
        assert ckpt.metadata(1).deleted_items == ("config",)


def test_explain_reports_step_with_damaged_json(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)]) as ckpt:
        ckpt.save(1, {"w": np.ones(2)}, json={"config": {"depth": 2}}).wait()
        change(tmp_path / "1/config")
        [why] = ckpt.explain()[1]
        assert why.startswith("damaged: ")
        assert "config" in why


@pytest.mark.parametrize("store", ["database", "directories"])
@pytest.mark.parametrize("damage", ["lost", "strings"])
def test_damaged_item_does_not_block_others(tmp_path, damage, store):
    tree = state(1)
    tree["optimizer_state"] = {"opt": tree["optimizer_state"], "name": "adam"}
    params = {"model_params": tree["model_params"]}
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS) as ckpt:
        for step in (1, 2):
            ckpt.save(step, tree).wait()
            if store == "directories":
                old_stores.make_directories(tmp_path / str(step), ITEMS)
        item = tmp_path / "2/optimizer_state"
        if damage == "lost":
            shutil.rmtree(item)
        else:
            (item / "_strings.json").write_text("{}")
        strategies.assert_same_state(params, ckpt.restore(params, step=2))
        metadata = ckpt.metadata(2)
        assert metadata.items == ITEMS[:1]
        assert list(metadata.damaged_items) == ["optimizer_state"]
        report = ckpt.verify(2)
        assert {name.partition("/")[0] for name in report.problems} == {
            "optimizer_state"
        }
        assert not report.extra
        assert damage == "lost" or list(report.problems) == [
            "optimizer_state/_strings.json"
        ]
        for abstract in (None, tree):
            with pytest.raises(errors.DamagedCheckpointError) as info:
                ckpt.restore(abstract, step=2, fallback=False)
            assert "optimizer_state " in str(info.value)
            assert len(str(info.value).splitlines()) < 15
        with pytest.raises(errors.DamagedCheckpointError, match="optimizer_state"):
            flaxckpt.open_leaf(tmp_path / "2", "optimizer_state/opt/0/count")
        strategies.assert_same_state(tree, ckpt.restore(tree))
        assert ckpt.restored_step == 1


def test_delete_records_lost_item_as_deleted(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS) as ckpt:
        ckpt.save(1, state(1)).wait()
        shutil.rmtree(tmp_path / "1/optimizer_state")
        with pytest.raises(errors.OptionError, match="delete the whole step"):
            ckpt.delete(1, item="model_params")
        ckpt.delete(1, item="optimizer_state")
        assert ckpt.verify(1).ok
        assert ckpt.metadata(1).deleted_items == ("optimizer_state",)
        with pytest.raises(errors.CheckpointNotFoundError, match="deleted before"):
            ckpt.delete(1, item="optimizer_state")


@pytest.mark.parametrize("items", ["state", ITEMS])
def test_error_hints_at_json_requested_as_leaves(tmp_path, items):
    wanted = state()
    with flaxckpt.Checkpointer(tmp_path, items=items) as ckpt:
        ckpt.save(1, wanted, json={"config": {"depth": 2}}).wait()
        asked = wanted | {"config": {"depth": 2}}
        with pytest.raises(errors.RestoreMismatchError) as info:
            ckpt.restore(asked)
        assert "config/depth: wanted a Python int, found nothing: config is a JSON" in (
            str(info.value)
        )
        assert "metadata(path).json['config']" in str(info.value)
        ckpt.delete(1, item="config")
        with pytest.raises(errors.RestoreMismatchError) as info:
            ckpt.restore(asked)
        assert "the item config was deleted from this step" in str(info.value)


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
        ({"items": ("",)}, "'' in items: wanted the name of a directory"),
        ({"items": ("", "a")}, "'' in items: wanted the name of a directory"),
        ({"items": (".",)}, "'.' in items: wanted the name of a directory"),
        ({"items": ("..", "a")}, "'..' in items: wanted the name of a directory"),
        ({"items": ("a", "metrics")}, "'metrics' in items: this name has another use"),
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
def test_rejects_invalid_items_before_making_directory(tmp_path, options, wanted):
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
def test_rejects_state_with_mismatched_branches(tmp_path, tree, wanted):
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
def test_rejects_invalid_json_items(tmp_path, items, wanted):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(errors.OptionError) as info:
            ckpt.save(1, {"w": np.ones(2)}, json=items)
        assert wanted in str(info.value)
        assert not ckpt.steps()


# ---- items deleted later ----------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_item_policies_delete_item_of_old_steps(tmp_path, layout):
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
def test_warns_once_about_policies_for_unknown_item(tmp_path, items, caplog):
    keep_items = {"optimiser_state": [LatestN(1)], "config": [LatestN(1)]}
    with flaxckpt.Checkpointer(tmp_path, items=items, keep_items=keep_items) as ckpt:
        ckpt.save(1, state(1), json={"config": {"a": 1}}).wait()
        assert "policies for 'optimiser_state', but no step" in caplog.text
        assert "'config'" not in caplog.text
        caplog.clear()
        ckpt.save(2, state(2), json={"config": {"a": 2}}).wait()
    assert not caplog.text
    assert ckpt.metadata(1).deleted_items == ("config",)


def test_does_not_warn_about_policies_for_existing_items(tmp_path, caplog):
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


def test_deleted_item_raises_error_unless_reinitialized(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS) as ckpt:
        ckpt.save(1, state(1)).wait()
        ckpt.delete(1, item="optimizer_state")
        with pytest.raises(errors.RestoreMismatchError) as info:
            ckpt.restore(state(), step=1)
        assert "the item optimizer_state was deleted from this step" in str(info.value)
        assert str(info.value).count('optimizer="reinit"') == 1
        assert len(str(info.value).splitlines()) < 15
        plan = flaxckpt.plan(tmp_path, state())
        assert len(plan.problems) == 5
        found = ckpt.restore(state(), step=1, optimizer="reinit")
    strategies.assert_same_state(state(1)["model_params"], found["model_params"])
    fresh = optax.adam(1e-3).init(state(1)["model_params"])
    strategies.assert_same_state(fresh, found["optimizer_state"])


def test_save_params_only_omits_optimizer_item(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS) as ckpt:
        path = ckpt.save_params_only(3, state(3))
    params = {"model_params": state(3)["model_params"]}
    strategies.assert_same_state(params, flaxckpt.load(path, params))


def test_delete_rejects_unknown_and_last_items(tmp_path):
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
        with pytest.raises(errors.DatasetStateError, match=r"keep_items or delete\("):
            ckpt.restore_dataset(batches(0), step=1)


def test_links_and_overwrites_steps_with_items(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, items=ITEMS) as ckpt:
        same = {item: {"w": jnp.ones((512, 512))} for item in ITEMS}
        ckpt.save(1, same, json={"config": {}}, dataset=batches(1)).wait()
        ckpt.save(2, same).wait()
        for item in ITEMS:
            name = f"{item}/d/0.0/w"
            first, second = (tmp_path / step / name for step in ("1", "2"))
            assert first.stat().st_ino == second.stat().st_ino
        ckpt.save(1, state(5), on_exists="overwrite").wait()
        strategies.assert_same_state(state(5), ckpt.restore(state(), step=1))
        assert ckpt.verify(1).ok
        (tmp_path / "2/model_params/mine.txt").write_text("keep me")
        with pytest.raises(errors.CheckpointExistsError, match=r"mine\.txt"):
            ckpt.save(2, state(5), on_exists="overwrite")


def test_damaged_items_in_store_do_not_block_others():
    path = faulty.new_path("items") / "checkpoint"
    flaxckpt.save(path, state(1), items=ITEMS, json={"config": {}, "other": 1})
    params = {"model_params": state(1)["model_params"]}
    for name in ("config", "optimizer_state"):
        for file in sorted((path / name).rglob("*")):
            file.unlink()
    strategies.assert_same_state(params, flaxckpt.load(path, params))
    metadata = flaxckpt.metadata(path)
    assert metadata.damaged_items.keys() == {"config", "optimizer_state"}
    assert metadata.json == {"other": 1}
    with pytest.raises(errors.DamagedCheckpointError, match="optimizer_state is miss"):
        flaxckpt.load(path)
    assert not flaxckpt.verify(path).ok
