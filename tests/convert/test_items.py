"""A conversion keeps the items of its source, or makes other items of the branches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from orbax import checkpoint as ocp

import flaxckpt
from flaxckpt import errors, transforms
from flaxckpt.datasets import StepIndexed
from tests.convert.reads import stopping, trace_reads
from tests.helpers import strategies

LAYOUTS = {
    "none": flaxckpt.ArrayLayout(),
    "zstd": flaxckpt.ArrayLayout(codec="zstd"),
    "zarr 2": flaxckpt.ArrayLayout(zarr_version=2),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
ITEMS = ("params", "opt_state")


def state(seed=0):
    params = FrozenDict(
        {"dense": {"kernel": jnp.arange(40.0).reshape(8, 5) + seed, "bias": np.ones(5)}}
    )
    return {"params": params, "opt_state": optax.adam(1e-3).init(params)}


def save_run(path, **options):
    """A step with several items, JSON and a dataset that has a name of its own."""
    batches = StepIndexed(lambda i: i)
    next(batches)
    options = {"items": ITEMS, "dataset_item": "iter", **options}
    with flaxckpt.Checkpointer(path, **options) as ckpt:
        ckpt.save(
            3, state(), dataset=batches, json={"config": {"a": [1]}}, metrics={"x": 1}
        )
    return path


def orbax_items(path):
    """The items of a checkpoint, each restored by stock Orbax alone."""
    names = flaxckpt.metadata(path).items
    restore = ocp.args.StandardRestore
    checkpointer = ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            **{name: ocp.StandardCheckpointHandler() for name in names}
        )
    )
    return {
        name: checkpointer.restore(path, ocp.args.Composite(**{name: restore()}))[name]
        for name in names
    }


def assert_same_values(wanted, found):
    ours, theirs = jax.tree.leaves(wanted), jax.tree.leaves(found)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@layouts
def test_keeps_items_of_run(tmp_path, layout):
    source = save_run(tmp_path / "run")
    target = tmp_path / "new" / "3"
    flaxckpt.convert(source, target, layout=layout)
    strategies.assert_same_state(state(), flaxckpt.load(target))
    ours, theirs = flaxckpt.metadata(source), flaxckpt.metadata(target)
    assert theirs.items == ours.items == ITEMS
    assert theirs.json == ours.json == {"config": {"a": [1]}}
    assert theirs.metrics == {"x": 1}
    assert flaxckpt.verify(target).ok
    found = orbax_items(target)
    for item in ITEMS:
        assert_same_values(state()[item], found[item])
    with flaxckpt.Checkpointer(tmp_path / "new", dataset_item="iter") as ckpt:
        batches = StepIndexed(lambda i: i)
        restored = ckpt.restore({"params": state(1)["params"]}, dataset=batches)
    strategies.assert_same_state({"params": state()["params"]}, restored)
    assert next(batches) == 1
    assert (target / "iter").is_dir()
    names = ("params", "config")
    with ocp.CheckpointManager(tmp_path / "new", item_names=names) as manager:
        args = ocp.args.Composite(config=ocp.args.JsonRestore())
        assert manager.restore(3, args=args)["config"] == {"a": [1]}


@layouts
def test_keeps_items_of_orbax(tmp_path, layout):
    names = ("params", "ema")
    trees = {
        name: {"w": jnp.full((4, 4), i, jnp.float32)} for i, name in enumerate(names)
    }
    with ocp.CheckpointManager(tmp_path / "run", item_names=names) as manager:
        args = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        manager.save(1, args=ocp.args.Composite(**args))
    flaxckpt.convert(tmp_path / "run", tmp_path / "new", layout=layout)
    strategies.assert_same_state(trees, flaxckpt.load(tmp_path / "new"))
    found = orbax_items(tmp_path / "new")
    assert found.keys() == set(names)
    for name, tree in trees.items():
        assert_same_values(tree, found[name])


@pytest.mark.parametrize("item", ["default", "pytree", "my_item"])
def test_keeps_name_of_single_item(tmp_path, item):
    tree = {"w": jnp.ones((3, 2)), "b": {"n": np.arange(3)}}
    flaxckpt.save(tmp_path / "ours", tree, items=item)
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        args = ocp.args.Composite(**{item: ocp.args.StandardSave(tree)})
        manager.save(1, args=args)
    for name in ("ours", "theirs"):
        flaxckpt.convert(tmp_path / name, tmp_path / f"new-{name}")
        assert flaxckpt.metadata(tmp_path / f"new-{name}").items == (item,)
        assert_same_values(tree, orbax_items(tmp_path / f"new-{name}")[item])


@layouts
def test_splits_and_joins_items(tmp_path, layout):
    flaxckpt.save(tmp_path / "one", state())
    flaxckpt.convert(tmp_path / "one", tmp_path / "two", items=ITEMS, layout=layout)
    flaxckpt.convert(
        tmp_path / "two", tmp_path / "default", items="default", layout=layout
    )
    for name, items in (("two", ITEMS), ("default", ("default",))):
        strategies.assert_same_state(state(), flaxckpt.load(tmp_path / name))
        assert flaxckpt.metadata(tmp_path / name).items == items
        assert flaxckpt.verify(tmp_path / name).ok
    assert_same_values(state(), orbax_items(tmp_path / "default")["default"])


def test_makes_items_from_branches_of_other_formats(tmp_path):
    flaxckpt.save(tmp_path / "one", {"params": state()["params"].unfreeze()})
    flaxckpt.convert(tmp_path / "one", tmp_path / "m.safetensors")
    flaxckpt.convert(tmp_path / "m.safetensors", tmp_path / "new", items=["params"])
    assert orbax_items(tmp_path / "new").keys() == {"params"}
    flaxckpt.convert(tmp_path / "m.safetensors", tmp_path / "state")
    assert flaxckpt.metadata(tmp_path / "state").items == ("state",)


def test_omits_items_without_leaves_after_transforms(tmp_path):
    source = save_run(tmp_path / "run")
    params = transforms.keep("params/.*")
    flaxckpt.convert(source, tmp_path / "params", transforms=[params])
    assert flaxckpt.metadata(tmp_path / "params").items == ("params",)
    assert orbax_items(tmp_path / "params").keys() == {"params"}
    found = flaxckpt.load(tmp_path / "params")
    strategies.assert_same_state({"params": state()["params"]}, found)


def test_omits_items_deleted_from_source(tmp_path):
    with flaxckpt.Checkpointer(save_run(tmp_path / "run"), items=ITEMS) as ckpt:
        ckpt.delete(3, item="opt_state")
    flaxckpt.convert(tmp_path / "run", tmp_path / "new")
    assert flaxckpt.metadata(tmp_path / "new").items == ("params",)
    assert flaxckpt.metadata(tmp_path / "new").deleted_items == ()
    assert flaxckpt.verify(tmp_path / "new").ok


@pytest.mark.parametrize(
    "change",
    [
        transforms.rename("params/(.*)", r"\1"),
        transforms.rename("params/(.*)", r"model/\1"),
    ],
    ids=["to the root", "to another branch"],
)
def test_leaves_outside_items_make_single_item(tmp_path, change):
    source = save_run(tmp_path / "run")
    flaxckpt.convert(source, tmp_path / "new", transforms=[change])
    assert flaxckpt.metadata(tmp_path / "new").items == ("state",)
    assert flaxckpt.load(tmp_path / "new").keys() > {"opt_state"}


def test_interrupted_conversion_keeps_pieces_of_all_items(tmp_path, monkeypatch):
    tree = {
        name: {f"w{i}": jnp.arange(2**15, dtype=jnp.float32) + i for i in range(4)}
        for name in ("a", "b", "c")
    }
    flaxckpt.save(tmp_path / "source", tree, items=("a", "b", "c"))
    options = {"max_concurrent_bytes": 2**18}
    with stopping(0.7) as stop:
        flaxckpt.convert(
            tmp_path / "source", tmp_path / "new", progress=stop, **options
        )
    journal = tmp_path / "new.flaxckpt-convert-tmp" / "done.txt"
    done = journal.read_text().splitlines()
    assert len(done) >= 4
    read = trace_reads(monkeypatch)
    flaxckpt.convert(tmp_path / "source", tmp_path / "new", **options)
    assert set(read).isdisjoint(done)
    assert read
    strategies.assert_same_state(tree, flaxckpt.load(tmp_path / "new"))
    assert flaxckpt.verify(tmp_path / "new").ok
    for item, found in orbax_items(tmp_path / "new").items():
        assert_same_values(tree[item], found)


def test_other_items_start_over(tmp_path):
    flaxckpt.save(tmp_path / "source", state())
    with stopping(1) as stop:
        flaxckpt.convert(tmp_path / "source", tmp_path / "new", progress=stop)
    flaxckpt.convert(tmp_path / "source", tmp_path / "new", items=ITEMS)
    assert not (tmp_path / "new" / "state").exists()
    strategies.assert_same_state(state(), flaxckpt.load(tmp_path / "new"))


@pytest.mark.parametrize(
    ("options", "error", "wanted"),
    [
        ({"items": ("params",)}, errors.LeafNameError, "opt_state: is a branch"),
        ({"items": ("params", "x")}, errors.LeafNameError, "x: is an item, but not"),
        ({"items": "a/b"}, errors.OptionError, "wanted the name of a directory"),
        ({"items": "config"}, errors.OptionError, "'config' in json: the name is also"),
        ({"items": ()}, errors.OptionError, "wanted at least one name"),
        (
            {"items": ITEMS, "format": "msgpack"},
            errors.OptionError,
            "only format='orbax' has items",
        ),
    ],
    ids=str,
)
def test_rejects_impossible_items(tmp_path, options, error, wanted):
    source = save_run(tmp_path / "run")
    with pytest.raises(error) as info:
        flaxckpt.convert(source, tmp_path / "new", **options)
    assert wanted in str(info.value)
    assert len(str(info.value).splitlines()) < 15
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
