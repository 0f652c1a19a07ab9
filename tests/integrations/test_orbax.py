"""Orbax's managers save and restore items of flaxckpt, in flaxckpt's way."""

import asyncio
import contextlib
import dataclasses
import errno
import inspect
import json
import os
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from flax.training.train_state import TrainState
from hypothesis import HealthCheck, given, settings
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from tests.helpers import strategies, system_calls
from tests.helpers.files import flip_bit

ocp = pytest.importorskip("orbax.checkpoint")

from flaxckpt.integrations.orbax import CheckpointHandler, RestoreArgs, SaveArgs  # noqa: E402
from tests.helpers import seams  # noqa: E402

# Orbax warns whenever an array is read without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

TX = optax.adamw(1e-2)
LAYOUTS = {
    "none": flaxckpt.ArrayLayout(),
    "zstd": flaxckpt.ArrayLayout(codec="zstd"),
    "zarr2": flaxckpt.ArrayLayout(zarr_version=2),
}


def make_state(seed=0):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    kernel = jax.random.normal(jax.random.key(seed), (16, 8))
    params = {
        "kernel": jax.device_put(kernel, NamedSharding(mesh, P("x"))),
        "bias": jnp.arange(8, dtype=jnp.bfloat16),
    }
    state = TrainState.create(apply_fn=None, params=params, tx=TX)
    return state.replace(step=jnp.int32(seed))


ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state()
)


def make_manager(directory, *, named=False, handler=None, is_async=True, **options):
    handler = handler or CheckpointHandler()
    return ocp.CheckpointManager(
        directory,
        item_handlers={"state": handler} if named else handler,
        options=ocp.CheckpointManagerOptions(
            enable_async_checkpointing=is_async, **options
        ),
    )


def check(found, wanted):
    jax.tree.map(strategies.assert_same_bits, wanted, found)


def files_below(directory):
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*")}


@pytest.fixture
def item(tmp_path):
    """The directory of an item, in a step of Orbax."""
    with make_manager(tmp_path / "run", named=True) as manager:
        manager.save(1, args=ocp.args.Composite(state=SaveArgs(make_state())))
    return tmp_path / "run" / "1" / "state"


# ---- saving and restoring -----------------------------------------------------------


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("named", [False, True], ids=["single", "named"])
def test_manager_saves_restores_and_deletes_steps(tmp_path, named, is_async):
    def wrap(args):
        return ocp.args.Composite(state=args) if named else args

    def unwrap(found):
        return found["state"] if named else found

    with make_manager(
        tmp_path, named=named, is_async=is_async, max_to_keep=2
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=wrap(SaveArgs(make_state(step))))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        found = unwrap(manager.restore(3, args=wrap(RestoreArgs(ABSTRACT))))
        check(found, make_state(3))
        assert found.params["kernel"].sharding == ABSTRACT.params["kernel"].sharding
        exact = unwrap(manager.restore(2))
        assert type(exact) is TrainState
        assert type(exact.opt_state[0]) is optax.ScaleByAdamState
        strategies.assert_same_bits(
            make_state(2).params["kernel"], exact.params["kernel"]
        )
    item = tmp_path / "3" / ("state" if named else "default")
    assert (item / "flaxckpt.json").is_file()
    for path in (item, item.parent):
        report = flaxckpt.verify(path)
        assert report.ok, report
        assert not report.unchecked
        assert not report.extra
        check(flaxckpt.load(path, ABSTRACT), make_state(3))
        assert type(flaxckpt.load(path)) is TrainState


def test_saves_several_items_beside_orbax_items(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:  # handlers found by their args
        args = ocp.args.Composite(
            state=SaveArgs(make_state(1)),
            ema=SaveArgs({"w": jnp.ones(3)}),
            config=ocp.args.JsonSave({"rate": 0.1}),
        )
        manager.save(1, args=args)
        manager.wait_until_finished()
        found = manager.restore(1)
    check(found["state"].params, make_state(1).params)
    np.testing.assert_array_equal(found["ema"]["w"], np.ones(3))
    assert found["config"] == {"rate": 0.1}


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_checkpointer_works_without_manager(tmp_path, kind):
    with kind(CheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", args=SaveArgs(make_state()))
    with kind(CheckpointHandler()) as checkpointer:
        found = checkpointer.restore(tmp_path / "one", args=RestoreArgs(ABSTRACT))
        assert type(checkpointer.restore(tmp_path / "one")) is TrainState
    check(found, make_state())
    report = flaxckpt.verify(tmp_path / "one")
    assert report.ok, report
    assert not report.extra


def test_saves_values_at_time_of_call(tmp_path):
    may_write = threading.Event()
    real = seams.current("disk.write_parts")

    def write_later(file, parts):
        assert may_write.wait(60)
        real(file, parts)

    state = {"numpy": np.arange(1000.0), "jax": jnp.arange(1000.0)}
    wanted = jax.tree.map(np.array, state)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    with make_manager(tmp_path) as manager, pytest.MonkeyPatch.context() as patch:
        seams.replace(patch, "disk.write_parts", write_later)
        manager.save(1, args=SaveArgs(state))
        state["numpy"] += 1
        state["jax"] = step(state["jax"])
        assert not (tmp_path / "1").exists()
        may_write.set()
        manager.wait_until_finished()
        found = manager.restore(1)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_orbax_and_verify_accept_every_layout(tmp_path, layout):
    handler = CheckpointHandler(layout=LAYOUTS[layout])
    state = make_state(1)
    with make_manager(tmp_path, named=True, handler=handler) as manager:
        manager.save(1, args=ocp.args.Composite(state=SaveArgs(state)))
    assert flaxckpt.verify(tmp_path / "1/state").ok
    with ocp.StandardCheckpointer() as orbax:
        check(orbax.restore(tmp_path / "1/state", ABSTRACT), state)
    check(flaxckpt.load(tmp_path / "1/state", ABSTRACT), state)


def test_transforms_apply_to_the_saved_item(tmp_path):
    cast = flaxckpt.transforms.cast("params/.*", "bfloat16")
    with make_manager(
        tmp_path, handler=CheckpointHandler(transforms=[cast])
    ) as manager:
        manager.save(1, args=SaveArgs(make_state()))
        manager.wait_until_finished()
        assert manager.restore(1).params["kernel"].dtype == jnp.bfloat16
        found = manager.restore(1, args=RestoreArgs(ABSTRACT))
    assert found.params["kernel"].dtype == jnp.float32


def test_restore_args_match_load_options(tmp_path):
    options = dict(inspect.signature(flaxckpt.load).parameters)
    del options["path"], options["step"]
    fields = {field.name: field.default for field in dataclasses.fields(RestoreArgs)}
    assert fields == {name: option.default for name, option in options.items()}
    with make_manager(tmp_path) as manager:
        manager.save(1, args=SaveArgs({"old": jnp.ones(3)}))
        manager.wait_until_finished()
        args = RestoreArgs(
            {"new": jnp.zeros(3), "more": jnp.full(2, 7.0)},
            transforms=[flaxckpt.transforms.rename("old", "new")],
            missing="init",
        )
        found = manager.restore(1, args=args)
    np.testing.assert_array_equal(found["new"], np.ones(3))
    np.testing.assert_array_equal(found["more"], np.full(2, 7.0))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=strategies.trees)
def test_any_tree_round_trips_exactly(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("item")
    handler = CheckpointHandler()
    with contextlib.suppress(errors.LeafNameError, errors.UnsupportedLeafError):
        handler.save(directory, SaveArgs(state))
    if not any(directory.iterdir()):
        return
    strategies.assert_same(state, handler.restore(directory))
    assert flaxckpt.verify(directory).ok


def test_leaves_may_have_names_of_files(tmp_path):
    names = ["flaxckpt.json", "flaxckpt.digest", "commit_success.txt", "metrics"]
    names += ["_METADATA", "_CHECKPOINT_METADATA", "dataset", "state", "d", "default"]
    names += ["PINNED", "ITEM_DELETED.state"]
    state = {name: jnp.full(3, float(i)) for i, name in enumerate(names)}
    with make_manager(tmp_path) as manager:
        manager.save(1, args=SaveArgs(state))
        manager.wait_until_finished()
        check(manager.restore(1, args=RestoreArgs(state)), state)
    report = flaxckpt.verify(tmp_path / "1/default")
    assert report.ok, report
    metadata = flaxckpt.metadata(tmp_path / "1/default")
    assert not metadata.has_dataset


# ---- beside Orbax's own handlers ----------------------------------------------------


def test_run_switches_to_flaxckpt_and_back(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(make_state(1)))
    with make_manager(tmp_path) as manager:
        check(manager.restore(1, args=RestoreArgs(ABSTRACT)), make_state(1))
        assert set(manager.restore(1)) == {"step", "params", "opt_state"}
        manager.save(2, args=SaveArgs(make_state(2)))
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            args = ocp.args.StandardRestore(ABSTRACT)
            check(manager.restore(step, args=args), make_state(step))
        manager.save(3, args=ocp.args.StandardSave(make_state(3)))
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3]
        for step in (1, 2, 3):
            found = checkpointer.restore(make_state(), step=step)
            check(found.params, make_state(step).params)
        checkpointer.save(4, make_state(4)).wait()


def test_item_metadata_matches_orbax(tmp_path):
    state = make_state()
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
    with ocp.CheckpointManager(
        tmp_path / "theirs", item_handlers=ocp.StandardCheckpointHandler()
    ) as manager:
        wanted = manager.item_metadata(1)
    with make_manager(tmp_path / "ours") as manager:
        manager.save(1, args=SaveArgs(state))
        manager.wait_until_finished()
        found = manager.item_metadata(1)

    def forms(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), dict(tree))

    assert forms(found) == forms(wanted)


def test_manager_saves_metrics_with_step(tmp_path):
    with make_manager(tmp_path, best_fn=lambda m: m["loss"]) as manager:
        manager.save(1, args=SaveArgs(make_state()), metrics={"loss": 0.5})
    metadata = flaxckpt.metadata(tmp_path, step=1)
    assert metadata.metrics == {"loss": 0.5}
    assert metadata.format == "orbax"
    assert metadata.created is not None


def test_overwrites_step_only_without_foreign_files(item):
    step = item.parent
    notes = item / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(errors.CheckpointExistsError, match=r"notes\.txt"):
        flaxckpt.save(step, make_state(2), overwrite=True)
    notes.unlink()
    flaxckpt.save(step, make_state(2), overwrite=True)
    check(flaxckpt.load(step, ABSTRACT), make_state(2))
    with ocp.Checkpointer(CheckpointHandler()) as checkpointer:
        checkpointer.save(step.parent / "flat", args=SaveArgs(make_state()))
    flaxckpt.save(step.parent / "flat", make_state(2), overwrite=True)
    check(flaxckpt.load(step.parent / "flat", ABSTRACT), make_state(2))


# ---- what goes wrong ----------------------------------------------------------------


BAD = {
    "unsupported": ({"w": jnp.ones(2), "f": object()}, errors.UnsupportedLeafError),
    "names": ({"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, errors.LeafNameError),
}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("bad", BAD)
def test_rejects_unsavable_state_at_call(tmp_path, bad, is_async):
    state, kind = BAD[bad]
    with make_manager(tmp_path, is_async=is_async) as manager:
        manager.save(1, args=SaveArgs({"w": jnp.ones(2)}))
        with pytest.raises(kind):
            manager.save(2, args=SaveArgs(state))
        assert manager.all_steps() == [1]
        # Another step: Orbax may still be making the directory of the one refused.
        manager.save(3, args=SaveArgs({"w": jnp.zeros(2)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]
        np.testing.assert_array_equal(manager.restore(3)["w"], np.zeros(2))
    with make_manager(tmp_path) as manager:
        assert manager.all_steps() == [1, 3]


def test_full_disk_fails_save_and_commits_nothing(tmp_path, monkeypatch):
    real = seams.current("disk.sync_tree")

    def fail(root):
        if "2" in str(root.relative_to(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(root)

    seams.replace(monkeypatch, "disk.sync_tree", fail)
    with make_manager(tmp_path) as manager:
        manager.save(1, args=SaveArgs(make_state(1)))
        manager.save(2, args=SaveArgs(make_state(2)))
        with pytest.raises(errors.SaveFailedError, match="No space left"):
            manager.wait_until_finished()
    with make_manager(tmp_path) as manager:
        assert manager.all_steps() == [1]
        check(manager.restore(1, args=RestoreArgs(ABSTRACT)), make_state(1))
        manager.save(3, args=SaveArgs(make_state(3)))
    assert flaxckpt.verify(tmp_path, step=3).ok


def test_save_syncs_all_files_before_returning(tmp_path, monkeypatch):
    calls = system_calls.record(monkeypatch, "fsync")
    CheckpointHandler().save(tmp_path, SaveArgs(make_state()))
    files = {str(tmp_path), *(str(tmp_path / name) for name in files_below(tmp_path))}
    assert len(files) > 10
    assert files <= {path for _, path in calls}


def test_detects_flipped_bit_in_any_file(item):
    """Not in the file that newer versions of Orbax add to an item."""
    files = [p for p in sorted(item.rglob("*")) if p.is_file()]
    files = [file for file in files if file.name != "commit_success.txt"]
    handler = CheckpointHandler()
    for file in files:
        content = file.read_bytes()
        for at in {0, len(content) // 2, len(content) - 1}:
            flip_bit(file, at)
            assert not flaxckpt.verify(item).ok, file
            if file.name.startswith(("flaxckpt", "c")):  # read by a restore
                with pytest.raises(errors.DamagedCheckpointError):
                    handler.restore(item, RestoreArgs(ABSTRACT))
            file.write_bytes(content)
    assert flaxckpt.verify(item).ok


def test_detects_missing_file(item):
    files = [p for p in sorted(item.rglob("*")) if p.is_file()]
    for file in files:
        if file.name == "commit_success.txt":
            continue
        content = file.read_bytes()
        file.unlink()
        assert not flaxckpt.verify(item).ok, file
        file.write_bytes(content)
    (item / "flaxckpt.json").unlink()
    for path in (item, item.parent):
        with pytest.raises(errors.DamagedCheckpointError, match=r"flaxckpt\.json"):
            flaxckpt.load(path)
    (item / "_METADATA").unlink()
    with pytest.raises(errors.CheckpointError, match="_METADATA"):
        flaxckpt.load(item)
    with pytest.raises(errors.DamagedCheckpointError, match=r"flaxckpt\.json"):
        flaxckpt.load(item.parent)


def test_manager_detects_damage(item):
    flip_bit(item / "d/0.small.0")
    with make_manager(item.parents[1], named=True) as manager:
        args = ocp.args.Composite(state=RestoreArgs(ABSTRACT))
        with pytest.raises(errors.DamagedCheckpointError):
            manager.restore(1, args=args)
    with pytest.raises(errors.DamagedCheckpointError):
        flaxckpt.load(item.parent)
    assert not flaxckpt.verify(item.parent).ok


@pytest.mark.parametrize("is_alone", [True, False])
def test_detects_item_of_other_step(tmp_path, is_alone):
    run = tmp_path / "run"
    handlers = {"state": CheckpointHandler()}
    others = {}
    if not is_alone:
        handlers["ema"] = CheckpointHandler()
        others = {"ema": SaveArgs(make_state())}
    with ocp.CheckpointManager(run, item_handlers=handlers) as manager:
        for step in (1, 2):
            args = {"state": SaveArgs(make_state(step)), **others}
            manager.save(step, args=ocp.args.Composite(**args))
    assert flaxckpt.verify(run, step=2).ok
    shutil.rmtree(run / "2" / "state")
    shutil.copytree(run / "1" / "state", run / "2" / "state")
    assert not flaxckpt.verify(run, step=2).ok
    for load in (
        lambda: flaxckpt.load(run),
        lambda: flaxckpt.Checkpointer(run, read_only=True).restore(step=2),
    ):
        with pytest.raises(errors.DamagedCheckpointError, match="saved as step 1"):
            load()
    with make_manager(run, named=True) as manager:
        args = ocp.args.Composite(state=RestoreArgs(ABSTRACT))
        with pytest.raises(errors.DamagedCheckpointError, match="saved as step 1"):
            manager.restore(2, args=args)
        check(manager.restore(1, args=args)["state"], make_state(1))


def test_mismatch_error_names_leaves(item):
    args = RestoreArgs({"params": {"other": jnp.ones(2)}})
    with (
        make_manager(item.parents[1], named=True) as manager,
        pytest.raises(errors.RestoreMismatchError, match="params/other"),
    ):
        manager.restore(1, args=ocp.args.Composite(state=args))


def test_rejects_wrong_arguments(tmp_path):
    handler = CheckpointHandler()
    with pytest.raises(errors.OptionError, match="SaveArgs"):
        handler.save(tmp_path, {"w": jnp.ones(2)})
    with pytest.raises(errors.OptionError, match="RestoreArgs"):
        handler.restore(tmp_path, SaveArgs({}))
    with pytest.raises(errors.OptionError, match="missing"):
        handler.restore(tmp_path, RestoreArgs(missing="zeros"))
    with pytest.raises(errors.OptionError):
        CheckpointHandler(layout="files")
    with pytest.raises(errors.CheckpointError):
        handler.restore(Path(tmp_path / "nothing"))


@pytest.mark.parametrize("url", ["gs://bucket/run/1/state", "s3://bucket/run/1/state"])
@pytest.mark.parametrize("kind", [str, epath.Path])
def test_rejects_save_to_object_store_at_call(url, kind):
    async def save_later(directory, args):
        await CheckpointHandler().async_save(directory, args)

    args = SaveArgs({"w": jnp.ones(2)})
    for save in (
        CheckpointHandler().save,
        lambda *args: asyncio.run(save_later(*args)),
    ):
        with pytest.raises(errors.OptionError, match=f"{url}: .* file systems only"):
            save(kind(url), args)


@pytest.mark.parametrize("source", ["ours", "orbax"])
def test_restores_items_from_object_store(tmp_path, store_path, source):
    state = make_state()
    path = store_path("moto")
    if source == "ours":
        with flaxckpt.Checkpointer(path) as checkpointer:
            checkpointer.save(1, state)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
        upload(tmp_path / "state", path / "1" / "state")
    item = epath.Path(f"{path}/1/state")
    check(CheckpointHandler().restore(item, RestoreArgs(ABSTRACT)), state)


def upload(source, target):
    """Copies the files of Orbax into an object store, its commit marker last."""
    for file in sorted(source.rglob("*")):
        if file.is_file():
            inner = target / file.relative_to(source).as_posix()
            inner.write_bytes(file.read_bytes())
    for directory in (target, target.parent):
        (directory / "commit_success.txt").write_bytes(b"")


def test_manifest_names_item_as_its_own_root(item):
    manifest = json.loads((item / "flaxckpt.json").read_text())
    assert manifest["version"] == 3
    assert manifest["items"]["state"] == ""
    seal = json.loads((item / "flaxckpt.digest").read_text())
    assert set(seal) == {"flaxckpt.json"}
