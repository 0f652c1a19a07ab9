"""A checkpoint is replaced, and nothing else: files of others are never deleted."""

import dataclasses
import errno
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from tests import GOLDEN
from tests.helpers import faulty_store, old_stores, run_files, seams

STATE = {"w": np.arange(6.0).reshape(2, 3), "name": "x", "n": 1}
NEW = {"w": np.ones((2, 3)), "name": "y", "n": 2}
"""What is there, and what is to replace it."""

USERS = ("notes.txt", "tokenizer/vocab.json", "state/d/plot.png", "metrics/loss.png")


def add_files(step, names=USERS):
    for name in names:
        path = step / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")


def assert_refused(info, *names):
    text = str(info.value)
    assert "do not belong to the checkpoint and would be lost" in text
    for name in names:
        assert f"\n  {name}\n" in text
    assert "Move them elsewhere" in text


def replace_with_save(path):
    return flaxckpt.save(path, NEW, overwrite=True)


def replace_in_a_run(path):
    with flaxckpt.Checkpointer(path.parent) as run:
        return run.save(int(path.name), NEW, on_exists="overwrite").wait()


def replace_by_converting(path):
    source = path.parent.parent / "source"
    flaxckpt.save(source, NEW, overwrite=True)
    return flaxckpt.convert(source, path, overwrite=True)


def replace_with_a_file(path):
    flaxckpt.save(path.parent.parent / "source", NEW, overwrite=True)
    return flaxckpt.convert(
        path.parent.parent / "source", path, format="msgpack", overwrite=True
    )


@pytest.mark.parametrize(
    "write",
    [replace_with_save, replace_in_a_run, replace_by_converting, replace_with_a_file],
)
def test_overwrite_accepts_empty_directory(tmp_path, write):
    (tmp_path / "run" / "3").mkdir(parents=True)
    write(tmp_path / "run" / "3")
    assert flaxckpt.load(tmp_path / "run" / "3")["n"] == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_ignores_placeholder_of_empty_bucket_directory(overwrite):
    path = faulty_store.new_path(f"placeholder-{overwrite}") / "3"
    path.store.write(path.prefix, b"")
    flaxckpt.save(path, NEW, overwrite=overwrite)
    assert flaxckpt.load(path)["n"] == 2
    assert flaxckpt.verify(path).ok
    with flaxckpt.Checkpointer(path.parent) as run:
        assert run.steps() == [3]
        run.delete(3)
        assert run.steps() == []
        run.save(3, NEW, on_exists="overwrite" if overwrite else "error").wait()
        assert run.steps() == [3]


@pytest.mark.parametrize(
    "replace", [replace_with_save, replace_in_a_run, replace_by_converting]
)
@pytest.mark.parametrize("names", [USERS[:1], USERS[1:2], USERS[2:3], USERS])
def test_does_not_replace_checkpoint_with_foreign_files(tmp_path, replace, names):
    path = tmp_path / "run" / "3"
    with flaxckpt.Checkpointer(path.parent) as run:
        run.save(3, STATE, metrics={"loss": 1}, dataset=StepIndexed(lambda i: i))
    add_files(path, names)
    with pytest.raises(errors.CheckpointExistsError) as info:
        replace(path)
    seen = ["tokenizer" if name.startswith("tok") else name for name in names]
    assert_refused(info, *seen)
    assert all((path / name).read_bytes() == b"mine" for name in names)
    assert flaxckpt.load(path)["n"] == 1
    assert [p.name for p in path.parent.iterdir() if "tmp" in p.name] == []

    for name in names:
        (path / name).unlink()
    if not any((path / "tokenizer").glob("*")) and (path / "tokenizer").is_dir():
        (path / "tokenizer").rmdir()
    replace(path)
    assert flaxckpt.load(path)["n"] == 2


@pytest.mark.parametrize(
    "replace", [replace_with_save, replace_in_a_run, replace_by_converting]
)
def test_does_not_replace_checkpoint_that_cannot_be_listed(
    tmp_path, monkeypatch, replace
):
    path = tmp_path / "run" / "3"
    with flaxckpt.Checkpointer(path.parent) as run:
        run.save(3, STATE)
    add_files(path, ["state/d/plot.png"])
    real = os.scandir

    def scandir(directory):
        if str(directory).rstrip("/").endswith("3/state/d"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))
        return real(directory)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(errors.CheckpointError, match=os.strerror(errno.EIO)):
            replace(path)
    assert (path / "state/d/plot.png").read_bytes() == b"mine"
    assert flaxckpt.load(path)["n"] == 1


@pytest.mark.parametrize(
    "state",
    [
        {str(i): np.ones(3) for i in range(80)},
        np.arange(3.0),
        {"d": {"c": np.ones(2), "0": jnp.ones(()), "e": np.ones((0, 2))}},
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    ],
    ids=["database", "bare", "short names", "nnx"],
)
@pytest.mark.parametrize("zarr_version", [2, 3])
def test_overwrite_replaces_all_files_of_flaxckpt(tmp_path, state, zarr_version):
    layout = flaxckpt.ArrayLayout(chunk_bytes=8, zarr_version=zarr_version)
    with flaxckpt.Checkpointer(tmp_path, layout=layout) as run:
        run.save(1, state, dataset=StepIndexed(lambda i: i), temporary=True).wait()
        run.pin(1)
        run.add_metrics(1, {"loss": 1.0})
        lease = run_files.add_lease(tmp_path / "1")
        for name in (
            run_files.DELETING,
            run_files.TEMPORARY,
            run_files.DATASET_DELETED,
        ):
            (tmp_path / "1" / name).touch()
        (tmp_path / "1" / ".nfs00000000000a1b2c00000001").touch()
        run.save(1, state, on_exists="overwrite").wait()
        lease.unlink(missing_ok=True)
        run_files.mark_damaged(tmp_path / "1", "it is bad")
        (tmp_path / "1" / "flaxckpt.json").unlink()
        run.save(1, state).wait()
        assert run.steps() == [1]


@pytest.mark.parametrize("names", [["notes.txt", "PINNED/mine"], ["state/d/a.txt"]])
def test_sets_aside_damaged_step_with_foreign_files(tmp_path, caplog, names):
    for number in ("", "2."):
        with flaxckpt.Checkpointer(tmp_path) as run:
            run.save(1, STATE).wait()
            run_files.mark_damaged(tmp_path / "1", "it is bad")
            (tmp_path / "1" / "flaxckpt.json").unlink()
            add_files(tmp_path / "1", names)
            run.save(1, NEW).wait()
            assert run.steps() == [1]
            assert run.restore()["n"] == 2
        aside = tmp_path / f"1.{number}damaged"
        assert all((aside / name).read_bytes() == b"mine" for name in names)
        assert f"it was renamed to {aside.name}" in caplog.text
        with flaxckpt.Checkpointer(tmp_path) as run:
            assert run.steps() == [1]
            run.delete(1)
        assert flaxckpt.Checkpointer(tmp_path, read_only=True).steps() == []


def test_training_replaces_damaged_step_with_litter(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as run:
        run.save(1, STATE).wait()
        run_files.mark_damaged(tmp_path / "1", "it is bad")
        (tmp_path / "1" / ".ipynb_checkpoints").mkdir()
        add_files(tmp_path / "1", [".DS_Store"])
        run.save(1, NEW).wait()
    assert flaxckpt.load(tmp_path)["n"] == 2
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["1"]


def test_upload_sets_aside_damaged_step_with_foreign_files(tmp_path):
    directory, staging = tmp_path / "run", tmp_path / "fast"
    with flaxckpt.Checkpointer(directory, staging=staging) as run:
        run.save(1, STATE).wait()
        run.wait_for_uploads()
        for path in (directory / "1", staging / "1"):
            run_files.mark_damaged(path, "it is bad")
            add_files(path, ["notes.txt"])
        run.save(1, NEW).wait()
        run.wait_for_uploads()
    assert flaxckpt.load(directory)["n"] == 2
    for path in (directory, staging):
        assert (path / "1.damaged" / "notes.txt").read_bytes() == b"mine"


def test_overwrite_keeps_files_added_during_save(tmp_path, monkeypatch):
    flaxckpt.save(tmp_path / "a", STATE)
    real = seams.current("disk.sync_tree")

    def sync_tree(path):
        add_files(tmp_path / "a", ["notes.txt"])
        return real(path)

    seams.replace(monkeypatch, "disk.sync_tree", sync_tree)
    with pytest.raises(errors.CheckpointExistsError) as info:
        flaxckpt.save(tmp_path / "a", NEW, overwrite=True)
    assert_refused(info, "notes.txt")
    assert flaxckpt.load(tmp_path / "a")["n"] == 1


# ---- steps of Orbax --------------------------------------------------------------


@pytest.mark.parametrize("items", [("state", "config", "ema"), ("a", "b")])
def test_overwrite_replaces_orbax_items_with_their_step(tmp_path, items):
    with ocp.CheckpointManager(tmp_path, item_names=items) as manager:
        saved = {name: ocp.args.StandardSave({"w": jnp.ones(3)}) for name in items}
        if "config" in saved:
            saved["config"] = ocp.args.JsonSave({"a": 1})
        manager.save(1, args=ocp.args.Composite(**saved))
    with flaxckpt.Checkpointer(tmp_path) as run:
        add_files(tmp_path / "1", ["notes.txt", "tokenizer/vocab.json"])
        with pytest.raises(errors.CheckpointExistsError) as info:
            run.save(1, NEW, on_exists="overwrite")
        assert_refused(info, "notes.txt", "tokenizer")
        (tmp_path / "1" / "notes.txt").unlink()
        (tmp_path / "1" / "tokenizer").rename(tmp_path / "tokenizer")
        run.save(1, NEW, on_exists="overwrite").wait()
    assert flaxckpt.load(tmp_path)["n"] == 2


def test_overwrite_keeps_user_files_in_orbax_items(tmp_path):
    with ocp.CheckpointManager(tmp_path / "m") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    names = ["default/tokenizer.json", "default/d/notes.txt", "default/vocab/en.txt"]
    names += ["default/array_metadatas/a.json", "default/ocdbt.process_0/a.txt"]
    add_files(tmp_path / "m" / "1", names)
    add_files(tmp_path / "m" / "1", ["results/metrics", "results/plot.png"])
    add_files(tmp_path / "m" / "1", ["more/checkpoint", "other/metadata", "n/0"])
    with flaxckpt.Checkpointer(tmp_path / "m") as run:
        with pytest.raises(errors.CheckpointExistsError) as info:
            run.save(1, NEW, on_exists="overwrite")
        seen = [*names[:2], "default/vocab", *names[3:]]
        assert_refused(info, *seen, "more", "n")
        assert "… and 1 more" in str(info.value)
        for name in names:
            (tmp_path / "m" / "1" / name).unlink()
        for name in ("results", "more", "other", "n"):
            (tmp_path / "m" / "1" / name).rename(tmp_path / name)
        run.save(1, NEW, on_exists="overwrite").wait()
        assert run.restore()["n"] == 2


@pytest.mark.parametrize("ocdbt", [True, False])
def test_overwrite_keeps_user_files_in_flat_checkpoints(tmp_path, ocdbt):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
        args = ocp.args.PyTreeSave({"w": jnp.ones(3), "b": {"c": np.ones(2)}})
        checkpointer.save(tmp_path / "a", args=args)
    names = ["array_metadatas/notes.txt", "metadata/notes.txt", "plots/0"]
    names += ["d/a.txt", "ocdbt.process_0/a.txt"] if ocdbt else ["w/a.txt", "b.c/c/a"]
    add_files(tmp_path / "a", ["metadata/_ROOT_METADATA"])
    for name in names:
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
    add_files(tmp_path / "a", names)
    with pytest.raises(errors.CheckpointExistsError) as info:
        flaxckpt.save(tmp_path / "a", NEW, overwrite=True)
    seen = [*names[:2], "plots", names[3], "b.c/c" if not ocdbt else names[4]]
    assert_refused(info, *seen)


@pytest.mark.parametrize("is_old", [False, True])
def test_overwrite_keeps_user_files_anywhere_in_state(tmp_path, is_old):
    names = ["array_metadatas/notes.txt", "d/notes.txt", "ocdbt.process_0/notes.txt"]
    names += ["w/c/notes.txt"]
    flaxckpt.save(tmp_path / "a", STATE)
    if is_old:
        old_stores.make_directories(tmp_path / "a")
    for name in names:
        (tmp_path / "a" / "state" / name).parent.mkdir(parents=True, exist_ok=True)
    add_files(tmp_path / "a" / "state", names)
    with pytest.raises(errors.CheckpointExistsError) as info:
        flaxckpt.save(tmp_path / "a", NEW, overwrite=True)
    parts = ("d", "w/c") if is_old else ("d/notes.txt", "w")
    seen = ("array_metadatas/notes.txt", "ocdbt.process_0", *parts)
    assert_refused(info, *(f"state/{name}" for name in seen))


class CustomHandler(ocp.CheckpointHandler):
    """Writes files that only it knows."""

    def save(self, directory, args):
        (directory / "weights.bin").write_bytes(b"1")
        (directory / "parts").mkdir()
        (directory / "parts" / "1.txt").write_text(args.item)

    def restore(self, directory, args=None):
        return (directory / "parts" / "1.txt").read_text()


@ocp.args.register_with_handler(CustomHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class CustomSave(ocp.args.CheckpointArgs):
    item: str = ""


def test_overwrite_replaces_items_of_all_handlers(tmp_path):
    items = {
        "state": ocp.args.StandardSave({"w": jnp.ones((2, 3)), "n": 1}),
        "tree": ocp.args.PyTreeSave({"a": {"b/c": np.ones(2)}, "d": jnp.ones(2)}),
        "config": ocp.args.JsonSave({"a": 1}),
        "array": ocp.args.ArraySave(np.ones(3)),
        "key": ocp.args.JaxRandomKeySave(jax.random.key(0)),
        "random": ocp.args.NumpyRandomKeySave(np.random.get_state()),
        "custom": CustomSave("x"),
    }
    with ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"])
    ) as manager:
        args = ocp.args.Composite(**items)
        manager.save(1, args=args, metrics={"loss": 1.0}, custom_metadata={"a": 1})
    with flaxckpt.Checkpointer(tmp_path) as run:
        run.save(1, NEW, on_exists="overwrite").wait()
        assert run.restore()["n"] == 2


@pytest.mark.parametrize("names", ["a", "a/b", "c.d", "array_metadatas", "d"])
def test_overwrite_replaces_orbax_arrays_in_own_directories(tmp_path, names):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3="." in names)
    state = {names: jnp.ones((2, 3)), "0": jnp.ones(()), "e": {"f": np.ones(2)}}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
    flaxckpt.save(tmp_path / "a", NEW, overwrite=True)


CHECKPOINTS = sorted(
    {
        *(file.parent for file in GOLDEN.glob("*/*/7/_CHECKPOINT_METADATA")),
        *(GOLDEN / "old-orbax-0.5.23" / name for name in ("nnx", "run/1")),
        GOLDEN / "legacy-orbax" / "both",
    }
)


@pytest.mark.parametrize(
    "path", CHECKPOINTS, ids=lambda p: p.relative_to(GOLDEN).as_posix()
)
def test_overwrite_replaces_every_orbax_and_own_checkpoint(tmp_path, path):
    shutil.copytree(path, tmp_path / "a")
    flaxckpt.save(tmp_path / "a", NEW, overwrite=True)
    assert flaxckpt.load(tmp_path / "a")["n"] == 2


def test_overwrite_removes_litter_and_empty_directories(tmp_path):
    names = (".DS_Store", "Thumbs.db", "state/._w", "state/w/.DS_Store")
    flaxckpt.save(tmp_path / "a", STATE)
    add_files(tmp_path / "a", names)
    for name in (".ipynb_checkpoints", "state/empty/empty"):
        (tmp_path / "a" / name).mkdir(parents=True)
    flaxckpt.save(tmp_path / "a", NEW, overwrite=True)
    assert flaxckpt.load(tmp_path / "a")["n"] == 2
    (tmp_path / "a" / ".ipynb_checkpoints").mkdir()
    add_files(tmp_path / "a", [".ipynb_checkpoints/mine"])
    with pytest.raises(errors.CheckpointExistsError) as info:
        flaxckpt.save(tmp_path / "a", NEW, overwrite=True)
    assert_refused(info, ".ipynb_checkpoints")


# ---- names of files --------------------------------------------------------------


@pytest.mark.parametrize("format_name", [None, "orbax", "safetensors", "msgpack"])
@pytest.mark.parametrize("suffix", ["npz", "json", "PT"])
def test_convert_does_not_replace_file_of_another_format(tmp_path, suffix, format_name):
    flaxckpt.save(tmp_path / "source", STATE)
    data = tmp_path / f"data.{suffix}"
    with data.open("wb") as file:
        np.savez(file, images=np.ones(3))
    before = data.read_bytes()
    says = "has the name of a file" if format_name else "names no format"
    with pytest.raises(errors.OptionError, match=says):
        flaxckpt.convert(tmp_path / "source", data, format=format_name, overwrite=True)
    assert data.read_bytes() == before
    new = tmp_path / f"new.{suffix}"
    with pytest.raises(errors.OptionError, match=r"without (\.|a suffix)"):
        flaxckpt.convert(tmp_path / "source", new, format=format_name)
    assert not new.exists()


def test_run_rejects_directories_named_like_files(tmp_path):
    with pytest.raises(errors.OptionError, match="has the name of a file"):
        flaxckpt.Checkpointer(tmp_path / "y.json")
    with pytest.raises(errors.OptionError, match="has the name of a file"):
        flaxckpt.Checkpointer(tmp_path / "run", step_format="{step}.zip")
    with pytest.raises(errors.OptionError, match="has the name of a file"):
        flaxckpt.Checkpointer(tmp_path / "run", staging=tmp_path / "x.gz")
    assert list(tmp_path.iterdir()) == []


def test_existing_run_named_like_file_continues(tmp_path):
    flaxckpt.save(tmp_path / "1", STATE)
    (tmp_path / "y.json").mkdir()
    (tmp_path / "1").rename(tmp_path / "y.json" / "1.zip")
    with flaxckpt.Checkpointer(tmp_path / "y.json", step_format="{step}.zip") as run:
        run.save(2, STATE).wait()
        assert run.steps() == [1, 2]


# ---- elsewhere -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "moto"])
def test_does_not_replace_store_step_with_foreign_objects(store_path, kind):
    root = store_path(kind)
    with flaxckpt.Checkpointer(root) as run:
        run.save(1, STATE, metrics={"loss": 1}).wait()
        run.pin(1)
        run.save(1, STATE, on_exists="overwrite").wait()
        path = root / "1/tokenizer/vocab.json"
        path.write_bytes(b"mine")
        with pytest.raises(errors.CheckpointExistsError) as info:
            run.save(1, NEW, on_exists="overwrite")
        assert_refused(info, "tokenizer")
        with pytest.raises(errors.CheckpointExistsError):
            flaxckpt.save(f"{root}/1", NEW, overwrite=True)
        assert path.read_bytes() == b"mine"
        assert run.restore()["n"] == 1
        path.unlink()
        run.save(1, NEW, on_exists="overwrite").wait()
        assert run.restore()["n"] == 2


def test_staged_save_rejects_step_with_foreign_files(tmp_path):
    directory, staging = tmp_path / "run", tmp_path / "fast"
    with flaxckpt.Checkpointer(directory, staging=staging) as run:
        run.save(1, STATE).wait()
        run.wait_for_uploads()
        add_files(directory / "1", ["notes.txt"])
        with pytest.raises(errors.CheckpointExistsError) as info:
            run.save(1, NEW, on_exists="overwrite")
        assert_refused(info, "notes.txt")
        (directory / "1" / "notes.txt").unlink()
        run.save(1, NEW, on_exists="overwrite").wait()
        run.wait_for_uploads()
    assert flaxckpt.load(directory)["n"] == 2


def test_upload_continues_after_foreign_files_are_moved(tmp_path):
    directory, staging = tmp_path / "run", tmp_path / "fast"
    run = flaxckpt.Checkpointer(directory, staging=staging)
    run.save(1, STATE).wait()
    run.wait_for_uploads()
    add_files(directory / "1", ["notes.txt"])
    (directory / "1" / "state" / "_METADATA").unlink()  # so it is uploaded anew
    run.pin(1)
    with pytest.raises(errors.SaveFailedError, match="1 could not be uploaded") as info:
        run.wait_for_uploads()
    assert_refused(
        pytest.ExceptionInfo.from_exception(info.value.__cause__), "notes.txt"
    )
    assert (directory / "1" / "notes.txt").read_bytes() == b"mine"
    (directory / "1" / "notes.txt").rename(tmp_path / "notes.txt")
    run.close()
    assert flaxckpt.load(directory)["n"] == 1
    assert (directory / "1" / "PINNED").is_file()


def test_upload_after_outage_names_foreign_files(tmp_path):
    directory, staging = tmp_path / "run", tmp_path / "fast"
    with flaxckpt.Checkpointer(directory, staging=staging) as run:
        run.save(1, STATE).wait()
        run.wait_for_uploads()
    add_files(directory / "1", ["notes.txt"])
    directory.rename(tmp_path / "away")
    directory.write_text("out of reach")
    run = flaxckpt.Checkpointer(directory, staging=staging)
    run.save(1, NEW, on_exists="overwrite").wait()
    directory.unlink()
    (tmp_path / "away").rename(directory)
    with pytest.raises(errors.SaveFailedError, match="1 could not be uploaded") as info:
        run.wait_for_uploads()
    assert "another writer" not in str(info.value)
    assert "\n  notes.txt\n" in str(info.value)
    (directory / "1" / "notes.txt").unlink()
    run.close()
    assert flaxckpt.load(directory)["n"] == 2
