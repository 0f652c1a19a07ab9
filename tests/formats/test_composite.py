"""Steps of Orbax with several items are read as one tree."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from tests.helpers import chunks
from tests.helpers import faulty_store as faulty

grain = pytest.importorskip("grain")
ocp = pytest.importorskip("orbax.checkpoint")

from flaxckpt.integrations.orbax import CheckpointHandler, SaveArgs  # noqa: E402

# Orbax warns whenever an array is read without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

STEP = 7
CONFIG = {"name": "tiny", "rates": [0.5, 1, None, True, {}, []], "0": {"0": 1, "1": 2}}
TX = optax.adam(0.1)


def params(value=1.0):
    return {"dense": {"kernel": jnp.full((64, 64), value), "bias": jnp.arange(3)}}


def trainer_state(value=1.0):
    """The state of a trainer that saves parameters and optimizer as items."""
    model_params = params(value)
    grads = jax.tree.map(jnp.ones_like, model_params)
    model_params["dense"]["bias"] = jnp.arange(3.0)
    _, optimizer_state = TX.update(grads, TX.init(model_params))
    return {"model_params": model_params, "optimizer_state": optimizer_state}


def iterator():
    return iter(grain.MapDataset.range(20).to_iter_dataset())


def write(root, step=STEP, metrics=None, **items):
    """Saves items with the manager of Orbax; returns the step."""
    options = ocp.CheckpointManagerOptions(
        best_fn=(lambda metrics: metrics["loss"]) if metrics else None
    )
    with ocp.CheckpointManager(root, options=options) as manager:
        manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
    return root / str(step)


def write_trainer(root, step=STEP, **others):
    state = trainer_state()
    return write(
        root,
        step,
        model_params=ocp.args.StandardSave(state["model_params"]),
        optimizer_state=ocp.args.PyTreeSave(state["optimizer_state"]),
        **others,
    )


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for left, right in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_array_equal(left, right, strict=True)


@pytest.fixture(scope="module")
def _trainer(tmp_path_factory):
    used = iterator()
    next(used)
    return write_trainer(
        tmp_path_factory.mktemp("trainer"),
        config=ocp.args.JsonSave(CONFIG),
        iter=grain.checkpoint.CheckpointSave(used),
        metrics={"loss": 0.5},
    )


@pytest.fixture
def trainer(_trainer, tmp_path):
    """A step with two trees, JSON, metrics and an iterator."""
    return shutil.copytree(_trainer, tmp_path / "run" / str(STEP))


# ---- one tree -----------------------------------------------------------------------


def test_loads_items_as_branches_of_one_tree(trainer):
    found = flaxckpt.load(trainer)
    with ocp.CheckpointManager(trainer.parent) as manager:
        args = ocp.args.Composite(
            model_params=ocp.args.StandardRestore(),
            optimizer_state=ocp.args.PyTreeRestore(),
            config=ocp.args.JsonRestore(),
        )
        wanted = manager.restore(STEP, args=args)
    assert list(found) == ["model_params", "optimizer_state"]
    config = flaxckpt.metadata(trainer).json["config"]
    assert config == wanted["config"] == CONFIG
    assert type(config["rates"][1]) is int
    for item in ("model_params", "optimizer_state"):
        assert_same(found[item], wanted[item])


def test_template_with_same_branches_restores_its_classes(trainer):
    wanted = trainer_state()
    for path in (trainer, trainer.parent):
        assert_same(flaxckpt.load(path, trainer_state(0.0), unused="ignore"), wanted)


def test_reads_only_requested_items(trainer):
    wanted = {"model_params": trainer_state()["model_params"]}
    plan = flaxckpt.plan(trainer, wanted)
    assert plan.bytes_to_read == 64 * 64 * 4 + 3 * 4
    assert_same(flaxckpt.load(trainer, wanted, unused="ignore"), wanted)


def test_metadata_describes_items_json_metrics_and_dataset(trainer):
    metadata = flaxckpt.metadata(trainer)
    assert metadata.format == "orbax"
    assert metadata.items == ("model_params", "optimizer_state")
    assert metadata.json == {"config": CONFIG}
    assert metadata.metrics == {"loss": 0.5}
    assert metadata.has_dataset
    assert metadata.created is not None
    assert metadata.leaves["model_params/dense/kernel"].shape == (64, 64)
    assert not metadata.damaged_items
    assert not flaxckpt.metadata(write_trainer(trainer.parent.parent / "b")).has_dataset


def test_opens_leaf_by_path_with_item(trainer):
    array = flaxckpt.open_leaf(trainer, "model_params/dense/bias")
    np.testing.assert_array_equal(array[1:].read().result(), [1, 2])


def test_orbax_run_resumes(trainer):
    with flaxckpt.Checkpointer(trainer.parent, read_only=True) as run:
        assert run.steps() == [STEP]
        assert run.has_dataset(STEP)
        data = iterator()
        made = run.restore(trainer_state(0.0), dataset=data, unused="ignore")
    assert_same(made, trainer_state())
    used = iterator()
    next(used)
    assert next(data) == next(used)


def test_converted_checkpoint_equals_source(trainer, tmp_path):
    target = tmp_path / "converted"
    flaxckpt.convert(trainer, target)
    assert flaxckpt.verify(target).ok
    assert flaxckpt.diff(trainer, target).is_empty
    assert flaxckpt.metadata(target).has_dataset
    assert_same(flaxckpt.load(target), flaxckpt.load(trainer))


def test_converts_items_to_other_formats(trainer, tmp_path):
    target = tmp_path / "params.safetensors"
    kept = [flaxckpt.transforms.keep("model_params/.*")]
    flaxckpt.convert(trainer, target, format="safetensors", transforms=kept)
    wanted = {"model_params": trainer_state()["model_params"]}
    assert_same(flaxckpt.load(target, wanted), wanted)


def test_verify_reads_all_items(trainer):
    report = flaxckpt.verify(trainer)
    assert report.ok, str(report)
    assert "model_params/dense/kernel" in report.unchecked
    shutil.rmtree(trainer / "optimizer_state" / "d")
    report = flaxckpt.verify(trainer)
    assert not report.ok
    assert all(name.startswith("optimizer_state") for name in report.unreadable)


def test_loads_single_item_without_its_name(tmp_path):
    saved = ocp.args.StandardSave({"w": jnp.ones(2)})
    step = write(tmp_path, params=saved, config=ocp.args.JsonSave(CONFIG))
    assert list(flaxckpt.load(step)) == ["w"]
    assert flaxckpt.metadata(step).json == {"config": CONFIG}
    assert flaxckpt.metadata(step).items == ("params",)
    flaxckpt.convert(step, tmp_path / "converted")
    assert flaxckpt.metadata(tmp_path / "converted").json == {"config": CONFIG}
    assert flaxckpt.verify(tmp_path / "converted").ok


def test_reads_trees_of_any_name(tmp_path):
    saved = {
        name: ocp.args.StandardSave({"w": jnp.full(2, i)})
        for i, name in enumerate(("dataset", "metrics", "state", "default"))
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / str(STEP), ocp.args.Composite(**saved))
    found = flaxckpt.load(tmp_path / str(STEP))
    assert found.keys() == saved.keys()
    assert found["metrics"]["w"].tolist() == [1, 1]
    assert not flaxckpt.metadata(tmp_path / str(STEP)).has_dataset


def test_reads_step_in_store(trainer):
    target = faulty.new_path("composite") / "run" / str(STEP)
    for file in sorted(trainer.rglob("*")):
        if file.is_file():
            (target / file.relative_to(trainer).as_posix()).write_bytes(
                file.read_bytes()
            )
    assert_same(flaxckpt.load(target), flaxckpt.load(trainer))
    assert flaxckpt.metadata(target).items == flaxckpt.metadata(trainer).items
    assert flaxckpt.metadata(target).has_dataset
    assert flaxckpt.verify(target).ok


# ---- JSON items ---------------------------------------------------------------------

NUMBERS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
VALUES = st.recursive(
    st.none() | NUMBERS | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.lists(VALUES))
def test_json_round_trips(tmp_path_factory, left, right):
    step = tmp_path_factory.mktemp("json")
    for name, value in {"left": left, "right": right}.items():
        (step / name).mkdir()
        (step / name / "metadata").write_text(json.dumps(value))
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    found = flaxckpt.load(step)
    assert found == {"left": left, "right": right}
    assert json.dumps(found) == json.dumps({"left": left, "right": right})


def test_omits_json_not_representable_as_leaves(tmp_path, caplog):
    big = {"seeds": [1, 2**70]}
    step = write(tmp_path, a=ocp.args.JsonSave(big), b=ocp.args.JsonSave(CONFIG))
    assert flaxckpt.load(step) == {"b": CONFIG}
    assert "a cannot be leaves of a state: seeds/1 needs more than 64" in caplog.text
    assert flaxckpt.metadata(step).json == {"a": big, "b": CONFIG}


def lose(item):
    shutil.rmtree(item)


def lose_file(item):
    for file in item.iterdir():
        file.unlink()


def change(item):
    (item / "metadata").write_text("{'a': 1}")


@pytest.mark.parametrize("damage", [lose, lose_file, change])
def test_damaged_json_is_reported_and_state_still_loads(trainer, damage, caplog):
    damage(trainer / "config")
    wanted = trainer_state()
    assert list(flaxckpt.load(trainer)) == list(wanted)
    [record] = [r for r in caplog.records if r.name.startswith("flaxckpt")]
    assert record.levelno == logging.WARNING
    assert "config cannot be read: " in record.message
    with flaxckpt.Checkpointer(trainer.parent) as run:
        assert_same(run.restore(trainer_state(0.0)), wanted)
        metadata = run.metadata(STEP)
        assert run.steps() == [STEP]
    assert list(metadata.damaged_items) == ["config"]
    assert not metadata.json
    with pytest.raises(errors.DamagedCheckpointError, match="JSON item config"):
        metadata.json["config"]
    with pytest.raises(KeyError):
        metadata.json["other"]
    assert list(flaxckpt.verify(trainer).problems) == ["config"]
    with pytest.raises(errors.DamagedCheckpointError, match="config"):
        flaxckpt.convert(trainer, trainer.parent.parent / "converted")


def test_damaged_json_does_not_block_other_json(tmp_path):
    step = write(tmp_path, a=ocp.args.JsonSave(CONFIG), b=ocp.args.JsonSave(CONFIG))
    change(step / "a")
    assert flaxckpt.load(step, {"b": CONFIG}) == {"b": CONFIG}
    with pytest.raises(errors.DamagedCheckpointError, match="a cannot be read"):
        flaxckpt.load(step)
    assert flaxckpt.metadata(step).json["b"] == CONFIG
    change(step / "b")
    with pytest.raises(errors.DamagedCheckpointError) as info:
        flaxckpt.load(step, {"b": CONFIG})
    assert "'a' cannot be read" in str(info.value)
    assert "'b' cannot be read" in str(info.value)


def test_error_for_json_requested_as_leaves_gives_hint(trainer):
    wanted = trainer_state() | {"config": {"name": "large"}}
    with pytest.raises(errors.RestoreMismatchError) as info:
        flaxckpt.load(trainer, wanted)
    assert "found nothing: config is a JSON item" in str(info.value)
    assert "metadata(path).json['config']" in str(info.value)
    with pytest.raises(errors.RestoreMismatchError, match="config is a JSON item"):
        flaxckpt.open_leaf(trainer, "config/name")


# ---- other items --------------------------------------------------------------------


class Text(ocp.CheckpointHandler):
    """A handler that only its program has."""

    def save(self, directory, args):
        (directory / "text.txt").write_text(args.text)

    def restore(self, directory, args=None):
        return (directory / "text.txt").read_text()


@ocp.args.register_with_handler(Text, for_save=True, for_restore=True)
class TextArgs(ocp.args.CheckpointArgs):
    def __init__(self, text=""):
        self.text = text


class Shared(ocp.CheckpointHandler):
    """Saves an elastic iterator as MaxText does: one file for all processes."""

    def save(self, directory, args):
        (directory / "process_0.json").write_text(json.dumps(args.item.get_state()))

    def restore(self, directory, args=None):
        raise NotImplementedError


@ocp.args.register_with_handler(Shared, for_save=True, for_restore=True)
class SharedArgs(ocp.args.CheckpointArgs):
    def __init__(self, item=None):
        self.item = item


def elastic():
    data, shards = grain.MapDataset.range(40), grain.sharding.NoSharding()
    return grain.experimental.ElasticIterator(data, 4, shards)


def test_recognizes_shared_elastic_iterator_state_as_dataset(tmp_path):
    used = elastic()
    next(used)
    state = {"w": jnp.ones(2)}
    items = ocp.args.StandardSave(state)
    write(tmp_path, items=items, iter=SharedArgs(used))
    data = elastic()
    with flaxckpt.Checkpointer(tmp_path, items="items", dataset_item="iter") as run:
        assert run.has_dataset(STEP)
        assert run.metadata(STEP).has_dataset
        assert_same(run.restore(state, dataset=data), state)
        assert next(data).tolist() == [4, 5, 6, 7]
        run.save(STEP, state, dataset=data, on_exists="overwrite")
        assert run.verify(STEP).ok


def test_omits_item_of_unknown_handler_with_reason(tmp_path, caplog):
    step = write_trainer(tmp_path, notes=TextArgs("hello"))
    assert list(flaxckpt.load(step)) == ["model_params", "optimizer_state"]
    [record] = [r for r in caplog.records if r.name.startswith("flaxckpt")]
    assert record.levelno == logging.WARNING
    assert (
        "notes was written by a handler that flaxckpt does not know" in record.message
    )
    wanted = {"model_params": trainer_state()["model_params"], "notes": {"a": 1}}
    with pytest.raises(errors.RestoreMismatchError, match="Text") as info:
        flaxckpt.load(step, wanted)
    assert [row.leaf for row in info.value.mismatches] == ["notes/a"]


def test_lost_item_leaves_paths_of_others_unchanged(trainer, caplog):
    shutil.rmtree(trainer / "optimizer_state")
    found = flaxckpt.load(trainer)
    assert list(found) == ["model_params"]
    assert "optimizer_state is missing from this step" in caplog.text
    assert list(flaxckpt.verify(trainer).problems) == ["optimizer_state"]
    assert list(flaxckpt.metadata(trainer).damaged_items) == ["optimizer_state"]
    wanted = trainer_state()
    with pytest.raises(errors.DamagedCheckpointError, match="is missing from this"):
        flaxckpt.load(trainer, wanted)
    with pytest.raises(errors.DamagedCheckpointError, match="is missing from this"):
        flaxckpt.open_leaf(trainer, "optimizer_state/0/count")
    for options in ({"missing": "init"}, {"optimizer": "reinit"}):
        found = flaxckpt.load(trainer, trainer_state(0.0), **options)
        assert_same(found["model_params"], wanted["model_params"])
    names = [flaxckpt.transforms.rename("model_params/(.*)", r"params/\1")]
    asked = {"params": wanted["model_params"]}
    assert_same(flaxckpt.load(trainer, asked, transforms=names), asked)
    with pytest.raises(errors.RestoreMismatchError):
        flaxckpt.load(trainer, {"weights": wanted["model_params"]}, transforms=names)
    with flaxckpt.Checkpointer(trainer.parent) as run:
        run.delete(STEP, item="optimizer_state")  # the loss is accepted
        assert run.metadata(STEP).deleted_items == ("optimizer_state",)
    assert flaxckpt.verify(trainer).ok


def test_errors_and_metadata_name_deleted_item(trainer, caplog):
    with flaxckpt.Checkpointer(trainer.parent) as run:
        run.delete(STEP, item="optimizer_state")
        assert run.metadata(STEP).deleted_items == ("optimizer_state",)
        assert run.metadata(STEP).items == ("model_params",)
        with pytest.raises(errors.CheckpointNotFoundError, match="deleted before"):
            run.delete(STEP, item="optimizer_state")
    with pytest.raises(errors.RestoreMismatchError) as info:
        flaxckpt.load(trainer, trainer_state())
    assert str(info.value).count("optimizer_state was deleted from this step") > 1
    assert str(info.value).count('optimizer="reinit"') == 1
    assert len(str(info.value).splitlines()) < 15
    reset = flaxckpt.load(trainer, trainer_state(0.0), optimizer="reinit")
    assert_same(reset["model_params"], trainer_state()["model_params"])
    assert list(flaxckpt.load(trainer)) == ["model_params"]
    assert flaxckpt.verify(trainer).ok
    assert not [r for r in caplog.records if r.name.startswith("flaxckpt.formats")]


def test_error_explains_deleted_dataset(trainer):
    with flaxckpt.Checkpointer(trainer.parent) as run:
        run.delete(STEP, item="iter")
        assert run.metadata(STEP).deleted_items == ("iter",)
        assert not run.metadata(STEP).has_dataset
        with pytest.raises(errors.DatasetStateError, match=r"keep_items or delete\("):
            run.restore_dataset(iterator(), step=STEP)
        assert run.verify(STEP).ok


def damage_description(item):
    (item / "_METADATA").unlink()


def damage_json(item):
    (item / "_METADATA").write_text("{")


def damage_database(item):
    (item / "manifest.ocdbt").write_bytes(b"damaged")


@pytest.mark.parametrize(
    "damage",
    [damage_description, damage_json, damage_database],
    ids=lambda f: f.__name__,
)
def test_damaged_item_does_not_block_others(trainer, damage, caplog):
    damage(trainer / "optimizer_state")
    wanted = trainer_state()
    params = {"model_params": wanted["model_params"]}
    assert_same(flaxckpt.load(trainer, params), params)
    assert "optimizer_state " in caplog.text
    assert flaxckpt.open_leaf(trainer, "model_params/dense/bias").shape == (3,)
    metadata = flaxckpt.metadata(trainer)
    assert metadata.items == ("model_params",)
    assert list(metadata.damaged_items) == ["optimizer_state"]
    assert metadata.json == {"config": CONFIG}
    assert metadata.metrics == {"loss": 0.5}
    report = flaxckpt.verify(trainer)
    assert list(report.problems) == ["optimizer_state"]
    assert "optimizer_state" in str(report)
    with pytest.raises(errors.DamagedCheckpointError, match="optimizer_state"):
        flaxckpt.load(trainer)
    fresh = flaxckpt.load(trainer, trainer_state(0.0), optimizer="reinit")
    assert_same(fresh["model_params"], wanted["model_params"])


@pytest.mark.parametrize(
    "read",
    [
        flaxckpt.load,
        lambda path: flaxckpt.load(path, trainer_state(0.0)),
        lambda path: flaxckpt.load(path, trainer_state(0.0), missing="init"),
        lambda path: flaxckpt.plan(path, trainer_state(0.0)),
        lambda path: flaxckpt.open_leaf(path, "optimizer_state/0/count"),
        lambda path: flaxckpt.convert(path, path.parent.parent / "converted"),
        lambda path: flaxckpt.load(
            path,
            {"opt": trainer_state()["optimizer_state"]},
            transforms=[flaxckpt.transforms.rename("optimizer_state/(.*)", r"opt/\1")],
        ),
    ],
)
def test_error_names_damaged_item_on_read(trainer, read):
    damage_json(trainer / "optimizer_state")
    with pytest.raises(errors.DamagedCheckpointError) as info:
        read(trainer)
    assert "optimizer_state cannot be read" in str(info.value)
    assert "optimizer_state/_METADATA" in str(info.value)
    assert len(str(info.value).splitlines()) < 15


@pytest.mark.parametrize("damage", [damage_json, lose])
def test_run_falls_back_only_if_wanted_items_are_damaged(trainer, damage):
    newer = write_trainer(trainer.parent, STEP + 1)
    damage(newer / "optimizer_state")
    params = {"model_params": trainer_state()["model_params"]}
    with flaxckpt.Checkpointer(trainer.parent) as run:
        assert_same(run.restore(params), params)
        assert run.restored_step == STEP + 1
        run.restore(trainer_state(0.0))
        assert run.restored_step == STEP
        assert run.steps() == [STEP]


def test_error_names_all_damaged_items(trainer):
    for item in ("model_params", "optimizer_state"):
        damage_json(trainer / item)
    for read in (flaxckpt.load, flaxckpt.metadata):
        with pytest.raises(errors.DamagedCheckpointError) as info:
            read(trainer)
        assert "'model_params' cannot be read" in str(info.value)
        assert "'optimizer_state' cannot be read" in str(info.value)


def test_delete_rejects_unknown_item(tmp_path):
    step = write_trainer(tmp_path, notes=TextArgs("hello"))
    with flaxckpt.Checkpointer(tmp_path) as run:
        with pytest.raises(errors.OptionError) as info:
            run.delete(STEP, item="notes")
        assert f"remove {step / 'notes'} yourself" in str(info.value)
        assert (step / "notes" / "text.txt").exists()


@pytest.mark.parametrize(
    "name", ["../secret", "/secret", "..", "a\\b", "a\0", "a" * 300, ""]
)
def test_rejects_names_leading_out_of_step(trainer, name):
    file = trainer / "_CHECKPOINT_METADATA"
    fields = json.loads(file.read_text())
    fields["item_handlers"][name] = fields["item_handlers"]["model_params"]
    file.write_text(json.dumps(fields))
    with pytest.raises(errors.DamagedCheckpointError, match="not the name of a dir"):
        flaxckpt.load(trainer)


def test_rejects_links_leading_out_of_step(trainer, tmp_path):
    for item in ("model_params", "config"):
        (trainer / item).rename(tmp_path / item)
        (trainer / item).symlink_to(tmp_path / item)
    with pytest.raises(errors.DamagedCheckpointError, match="model_params"):
        flaxckpt.load(trainer)
    metadata = flaxckpt.metadata(trainer)
    assert list(metadata.damaged_items) == ["model_params", "config"]
    with pytest.raises(errors.DamagedCheckpointError, match="leads out of"):
        metadata.json["config"]


# ---- items in our own format --------------------------------------------------------


def write_own(path, state):
    """Writes a tree as flaxckpt's handler for Orbax does: the directory is the item."""
    path.mkdir()
    CheckpointHandler().save(path, SaveArgs(state))


@pytest.fixture
def own(trainer):
    """A step of Orbax in which the optimizer is in our own format."""
    shutil.rmtree(trainer / "optimizer_state")
    write_own(trainer / "optimizer_state", trainer_state()["optimizer_state"])
    return trainer


def test_item_in_own_format_keeps_its_classes(own):
    found = flaxckpt.load(own)
    wanted = trainer_state()
    assert_same(found["optimizer_state"], wanted["optimizer_state"])
    assert_same(flaxckpt.load(own, trainer_state(0.0), unused="ignore"), wanted)
    metadata = flaxckpt.metadata(own)
    assert metadata.metrics == {"loss": 0.5}
    assert metadata.has_dataset


def test_item_in_own_format_can_be_only_one(own):
    for item in ("model_params", "config"):
        shutil.rmtree(own / item)
    file = own / "_CHECKPOINT_METADATA"
    fields = json.loads(file.read_text())
    for item in ("model_params", "config"):
        del fields["item_handlers"][item]
    file.write_text(json.dumps(fields | {"custom_metadata": {"by": "me"}}))
    wanted = trainer_state()["optimizer_state"]
    assert_same(flaxckpt.load(own), wanted)
    metadata = flaxckpt.metadata(own)
    assert metadata.items == ("optimizer_state",)
    assert metadata.custom == {"by": "me"}
    assert metadata.metrics == {"loss": 0.5}
    assert metadata.has_dataset
    assert flaxckpt.verify(own).unchecked == {}
    check_damage(own, "0/mu/dense/kernel")


def test_verify_compares_checksums_of_item_in_own_format(own):
    report = flaxckpt.verify(own)
    assert report.ok, str(report)
    assert not any(name.startswith("optimizer_state") for name in report.unchecked)
    (own / "optimizer_state" / "stray.txt").write_text("x")
    assert flaxckpt.verify(own).extra == ("optimizer_state/stray.txt",)
    check_damage(own, "optimizer_state/0/mu/dense/kernel")


def check_damage(step, leaf):
    """Damages a leaf of the optimizer; `verify` and `load` must name it."""
    item = step / "optimizer_state"
    chunks.flip(item, "0.mu.dense.kernel/c.0.0", at=3)
    report = flaxckpt.verify(step)
    assert list(report.problems) == [leaf]
    assert list(report.unreadable) == [leaf]
    with pytest.raises(errors.DamagedCheckpointError, match="mu/dense/kernel"):
        flaxckpt.load(step)


# ---- any items damaged --------------------------------------------------------------

TREES, TEXTS = ("a", "b", "c"), ("first", "second")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """Steps with equal items: of Orbax, of flaxckpt, and with an item in our format."""
    root = tmp_path_factory.mktemp("intact")
    state = {name: {"w": jnp.full(3, i)} for i, name in enumerate(TREES)}
    texts = {name: {"name": name} for name in TEXTS}
    args = {name: ocp.args.StandardSave(state[name]) for name in TREES}
    args |= {name: ocp.args.JsonSave(texts[name]) for name in TEXTS}
    steps = {"orbax": write(root / "orbax", **args)}
    steps["both"] = shutil.copytree(steps["orbax"], root / "both")
    shutil.rmtree(steps["both"] / "b")
    write_own(steps["both"] / "b", state["b"])
    steps["flaxckpt"] = root / "flaxckpt"
    flaxckpt.save(steps["flaxckpt"], state, items=TREES, json=texts)
    return steps, state, texts


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(("orbax", "both", "flaxckpt")),
    trees=st.sets(st.sampled_from(TREES), max_size=2),
    texts=st.sets(st.sampled_from(TEXTS)),
)
def test_reads_undamaged_items(intact, tmp_path_factory, kind, trees, texts):
    steps, state, json_items = intact
    step = tmp_path_factory.mktemp("damaged") / "step"
    shutil.copytree(steps[kind], step)
    for name in trees:
        is_own = (step / name / "flaxckpt.json").exists()
        file = "flaxckpt.json" if is_own else "_METADATA"
        if kind == "flaxckpt":
            shutil.rmtree(step / name)
        else:
            (step / name / file).write_text("{")
    for name in texts:
        (step / name / "metadata").write_text("{")
    metadata = flaxckpt.metadata(step)
    assert metadata.damaged_items.keys() == trees | texts
    assert {*metadata.items} == {*TREES} - trees
    assert metadata.json == {t: json_items[t] for t in TEXTS if t not in texts}
    for name in TREES:
        if name in trees:
            with pytest.raises(errors.DamagedCheckpointError, match=f"  {name} "):
                flaxckpt.load(step, {name: state[name]})
        else:
            found = flaxckpt.load(step, {name: state[name]})
            assert_same(found, {name: state[name]})
    if trees:
        with pytest.raises(errors.DamagedCheckpointError):
            flaxckpt.load(step)
    else:
        assert_same(flaxckpt.load(step), state)
    found = {name.partition("/")[0] for name in flaxckpt.verify(step).problems}
    assert found == trees | texts
