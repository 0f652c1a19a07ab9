"""The files that belong to a checkpoint, by their names, and those that do not."""

import json
import shutil

import pytest

import flaxckpt
from flaxckpt import errors
from tests import GOLDEN
from tests.helpers import seams

STANDARD = "orbax.checkpoint._src.handlers.StandardCheckpointHandler"
JSON = "orbax.checkpoint._src.handlers.JsonCheckpointHandler"
OWN = "flaxckpt.integrations.orbax.CheckpointHandler"
USERS = "trainer.Handler"


def make(directory, *names, handlers=None):
    """Makes files of these names; `/` at the end makes an empty directory."""
    for name in names:
        path = directory / name
        if name.endswith("/"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    if handlers is not None:
        metadata = json.dumps({"item_handlers": handlers})
        (directory / "_CHECKPOINT_METADATA").write_text(metadata)
    return directory


def save(directory, **options):
    flaxckpt.save(directory, {"n": 1}, **{"overwrite": True} | options)


def convert(target, **options):
    source = target.parent / "source"
    if not source.exists():
        flaxckpt.save(source, {"n": 1})
    flaxckpt.convert(source, target, **{"overwrite": True} | options)


def foreign(directory, replace=save):
    """Returns the names in the error; empty if the directory was replaced."""
    try:
        replace(directory)
    except errors.CheckpointExistsError as error:
        lines = str(error).splitlines()
        assert "do not belong to the checkpoint" in lines[0], lines
        return [line.strip() for line in lines[1:-1]]
    assert flaxckpt.load(directory) == {"n": 1}
    return []


# ---- flaxckpt's own ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "handlers", "not_ours"),
    [
        (["state/w/zarr.json", "state/w/c.0"], None, []),
        (["state/w/zarr.json", "state/w/c/0/1", "state/w/0.0"], None, []),
        (["state/w/zarr.json", "state/w/c.a"], None, ["state/w/c.a"]),
        (["state/w/zarr.json", "state/w.txt/c.0/x"], None, ["state/w.txt"]),
        (["state/w/c.0"], None, []),  # its zarr.json is lost
        (["state/v/w/c.0"], None, ["state"]),
        (["state/_METADATA", "state/_sharding", "state/_strings.json"], None, []),
        (["state/array_metadatas/process_0"], None, []),
        (["state/array_metadatas/other"], None, ["state"]),
        (["state/manifest.ocdbt", f"state/d/{'0' * 32}"], None, []),
        ([f"state/ocdbt.process_0/d/{'0' * 32}", "state/d/x"], None, ["state/d"]),
        (["model/w/zarr.json"], {"model": OWN}, []),
        (["model/w/zarr.json"], {"model": STANDARD}, []),
        (["model/w/zarr.json"], {"model": JSON}, ["model"]),
        (["model/w/zarr.json"], None, ["model"]),
        (["config/metadata"], {"config": JSON}, []),
        (["config/metadata"], {"config": STANDARD}, ["config"]),
        (["config/metadata", "config/mine"], {"config": JSON}, ["config/mine"]),
        (["metrics/metrics", "metrics/digests"], None, []),
        (["metrics/metrics", "metrics/best"], None, ["metrics/best"]),
        (["dataset/process_0-of-1.json", "dataset/metadata"], None, []),
        (["dataset/process_x"], None, ["dataset"]),
        (["_CHECKPOINT_METADATA", "commit_success.txt"], None, []),
        (["_METADATA", "w/zarr.json", "w/c.0", "b/c.0"], None, []),  # an item
        (["w/zarr.json"], None, ["w"]),  # no item
        (["notes.txt", "a/b.txt", "a/c.txt"], None, ["notes.txt", "a"]),
        (["a/b", "c/d", "metrics/metrics", "state/_METADATA"], None, ["a", "c"]),
    ],
)
def test_finds_foreign_files_in_step_with_manifest(tmp_path, names, handlers, not_ours):
    step = make(tmp_path / "3", "flaxckpt.json", *names, handlers=handlers)
    assert sorted(foreign(step)) == sorted(not_ours)


@pytest.mark.parametrize(
    ("name", "is_disposable"),
    [
        ("PINNED", True),
        ("state/READING-host-1-0123abcd", True),
        ("state/.nfs00000000000a1b2c00000001", True),
        ("state/.nfs0000", False),
        ("state/.DS_Store", True),
        ("state/DS_Store", False),
    ],
)
def test_recognizes_disposable_files_of_any_checkpoint(tmp_path, name, is_disposable):
    step = make(tmp_path / "3", "flaxckpt.json", "state/_METADATA", name)
    assert foreign(step) == ([] if is_disposable else [name])


def test_recognizes_links_as_foreign_files(tmp_path):
    step = make(tmp_path / "3", "flaxckpt.json", "state/w/zarr.json")
    (step / "state" / "w" / "c.0").symlink_to(tmp_path / "elsewhere")
    assert foreign(step) == ["state/w/c.0"]


@pytest.mark.parametrize(
    ("name", "handlers", "is_foreign"),
    [
        ("state/", None, False),
        ("metrics/", None, False),
        ("array_metadatas/", None, False),
        (".ipynb_checkpoints/", None, False),
        ("model/", {"model": OWN}, False),
        ("model/", None, True),
        ("model/", OWN, True),
    ],
)
def test_recognizes_foreign_empty_directories(tmp_path, name, handlers, is_foreign):
    step = make(tmp_path / "3", "flaxckpt.json", name, handlers=handlers)
    assert foreign(step) == ([name] if is_foreign else [])


# ---- Orbax's ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "handlers", "not_ours"),
    [
        (["model/_METADATA", "model/w/zarr.json"], {"model": STANDARD}, []),
        (["model/_METADATA", "model/w/c.0"], {"model": STANDARD}, ["model/w"]),
        (["model/w/.zarray", "model/w/0"], {"model": STANDARD}, []),
        (["model/_METADATA", "model/0"], {"model": STANDARD}, ["model/0"]),
        (["model/any", "model/thing"], {"model": USERS}, []),
        (["other/_METADATA", "other/w/zarr.json"], {"model": STANDARD}, []),
        (["other/w/zarr.json"], {"model": STANDARD}, ["other"]),
        (["config/anything"], {"config": JSON}, []),  # the only file
        (["config/data.json", "config/metadata"], {"config": JSON}, []),
        (["config/data.json", "config/a"], {"config": JSON}, ["config/a"]),
        (["config/sub/a"], {"config": JSON}, ["config"]),
        (["config/data.json"], {"config": STANDARD}, ["config"]),
        (["descriptor/descriptor.pbtxt"], {"model": STANDARD}, []),
        (["descriptor/descriptor.txt"], {"model": STANDARD}, ["descriptor"]),
        (["metadata/_ROOT_METADATA"], {"model": STANDARD}, []),
        (["metrics/metrics"], {"model": STANDARD}, []),
        (["dataset/process_0.json"], {"model": STANDARD}, []),
        (["dataset/shard_state_3.json"], {"model": STANDARD}, []),
        (["orbax.checkpoint", "notes"], {"model": STANDARD}, ["notes"]),
        # One item, which is the checkpoint.
        (["_METADATA", "w/zarr.json", "w/c.0"], STANDARD, []),
        (["_METADATA", "w/zarr.json", "mine/a"], STANDARD, ["mine"]),
        (["w/zarr.json"], STANDARD, []),
        (["_METADATA", "w/c.0"], STANDARD, ["w"]),
        (["data.json"], JSON, []),
        (["data.json"], STANDARD, ["data.json"]),
        (["_METADATA", "w/zarr.json"], {"model": STANDARD}, []),
        (["w/zarr.json"], {"model": STANDARD}, ["w"]),
        # Without handlers, as before Orbax 0.11: items are known by their files.
        (["model/_METADATA", "model/w/zarr.json"], {}, []),
        (["model/manifest.ocdbt"], {}, []),
        (["model/zarr.json", "model/c"], {}, []),
        (["model/w/.zarray", "model/w/0.1"], {}, []),
        (["model/v/w/zarr.json"], {}, ["model"]),
        (["model/w/notes"], {}, ["model"]),
        (["config/metadata"], {}, []),
        (["config/settings"], {}, ["config"]),
        (["config/metadata"], {"model": STANDARD}, ["config"]),
    ],
)
def test_finds_foreign_files_in_orbax_step(tmp_path, names, handlers, not_ours):
    step = make(tmp_path / "3", *names, handlers=handlers)
    assert sorted(foreign(step)) == sorted(not_ours)


def test_damaged_orbax_step_may_lack_array_metadata(tmp_path):
    names = ("model/_METADATA", "model/w/c.0")
    step = make(tmp_path / "3", *names, handlers={"model": STANDARD})
    assert foreign(step) == ["model/w"]
    make(step, "DAMAGED")
    assert foreign(step) == []


def test_orbax_step_with_several_json_items_is_replaceable(tmp_path):
    texts = ("a/data.json", "b/data.json")
    step = make(tmp_path / "3", *texts, handlers={"a": JSON, "b": JSON})
    assert foreign(step) == []


# ---- other formats ----------------------------------------------------------------

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("names", "shards", "not_ours"),
    [
        ([ONE], None, []),
        ([ONE, "config.json", "sub/a"], None, ["config.json", "sub"]),
        (["a.safetensors", "b.safetensors", "c.safetensors"], "ab", ["c.safetensors"]),
        (["a.safetensors", "b.safetensors"], "ab", []),
    ],
)
def test_finds_foreign_files_in_safetensors_directory(
    tmp_path, names, shards, not_ours
):
    path = make(tmp_path / "model", *names)
    if shards:
        where = {name: f"{name}.safetensors" for name in shards}
        text = json.dumps({"metadata": {"total_size": 0}, "weight_map": where})
        (path / INDEX).write_text(text)
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
        save(path)
    assert sorted(foreign(path, convert)) == sorted(not_ours)


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["notes.txt"],
        ["a.safetensors", "b.safetensors"],
        ["a.safetensors.index.json", "b.safetensors.index.json"],
    ],
)
def test_rejects_other_directories(tmp_path, names):
    path = make(tmp_path / "model", "other/x", *names)
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
        convert(path)


def test_conversion_can_replace_t5x_step(tmp_path):
    step = next(GOLDEN.glob("t5x-3/**/checkpoint")).parent
    path = tmp_path / "step"
    shutil.copytree(step, path)
    make(path, "notes.txt", "mine/0")
    assert sorted(foreign(path, convert)) == ["mine", "notes.txt"]
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
        save(path)
    (path / "notes.txt").unlink()
    shutil.rmtree(path / "mine")
    assert foreign(path, convert) == []


def test_conversion_can_replace_file_of_known_format(tmp_path):
    path, text = tmp_path / "model", tmp_path / "text"
    shutil.copyfile(GOLDEN / "safetensors" / "silero_vad_16k.safetensors", path)
    (tmp_path / "link").symlink_to(path)
    text.write_text("text")
    for other, replace, why in (
        (tmp_path / "link", convert, "is a symbolic link.*pass its target, .*/model"),
        (text, convert, "is not a checkpoint"),
        (path, save, "is not a checkpoint"),
    ):
        with pytest.raises(errors.CheckpointExistsError, match=why):
            replace(other)
    convert(path)
    assert flaxckpt.load(path) == {"n": 1}


# ---- free paths -------------------------------------------------------------------


def test_save_requires_free_path_or_overwrite(tmp_path):
    save(tmp_path / "missing", overwrite=False)
    save(make(tmp_path, "empty/") / "empty", overwrite=False)
    step = make(tmp_path / "3", "flaxckpt.json")
    with pytest.raises(errors.CheckpointExistsError, match="or pass overwrite=True"):
        save(step, overwrite=False)
    save(step)
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
        save(make(tmp_path / "other", "notes.txt"))
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(errors.CheckpointExistsError, match="is a symbolic link"):
        save(tmp_path / "link")


def test_step_deleted_meanwhile_frees_its_path(tmp_path, monkeypatch):
    step = make(tmp_path / "3", "flaxckpt.json")
    real, deleted = seams.current("overwrite.is_empty"), []

    def delete_first(path):
        if not deleted:
            shutil.rmtree(path)
            deleted.append(path)
            return not any(path.iterdir())  # after it was found to be a directory
        return real(path)

    seams.replace(monkeypatch, "overwrite.is_empty", delete_first)
    save(step, overwrite=False)
    assert deleted == [step]
    assert flaxckpt.load(step) == {"n": 1}


def test_conversion_requires_free_path_or_overwrite(tmp_path):
    convert(tmp_path / "a", overwrite=False)
    convert(make(tmp_path, "empty/") / "empty", overwrite=False)
    model = make(tmp_path / "model", ONE, "config.json")
    with pytest.raises(errors.CheckpointExistsError, match="or pass overwrite=True"):
        convert(model, overwrite=False)
    with pytest.raises(errors.CheckpointExistsError, match=r"config\.json"):
        convert(model)
    below = model / "config.json" / "a"
    with pytest.raises(errors.OptionError, match=r"config\.json is a file, not a dir"):
        flaxckpt.convert(tmp_path / "source", below)


@pytest.mark.parametrize(
    ("name", "maker", "told"),
    [
        (
            "a.safetensors",
            "save",
            "but save writes a directory: save to a name without .safetensors, then"
            " convert the checkpoint: flaxckpt.convert(checkpoint, 'a.safetensors',"
            " format='safetensors')",
        ),
        (
            "a.msgpack",
            "a run",
            "but a run writes a directory: choose another path, without .msgpack",
        ),
        ("a.NPZ", "save", "save writes a directory: choose another path, without .npz"),
        (
            "a.npz",
            "convert",
            "convert writes directories, and files that end in .safetensors or"
            " .msgpack: choose another path, without .npz",
        ),
    ],
)
def test_rejects_directory_names_of_files(tmp_path, name, maker, told):
    make = {
        "save": save,
        "convert": lambda path: convert(path, format="orbax"),
        "a run": flaxckpt.Checkpointer,
    }[maker]
    with pytest.raises(errors.OptionError) as info:
        make(tmp_path / name)
    assert told in str(info.value).replace(f"{tmp_path}/", "")
    make(tmp_path / "a.b")


def test_damaged_step_with_foreign_files_is_set_aside(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as run:
        for name in ("3.damaged", "3.2.damaged", "3.3.damaged"):
            run.save(3, {"n": 1}, on_exists="overwrite").wait()
            make(tmp_path / "3", "DAMAGED", "mine")
            run.reload()
            run.save(3, {"n": 1}).wait()
            assert (tmp_path / name / "mine").is_file()
            assert not (tmp_path / "3" / "mine").exists()
        make(tmp_path / "3", "DAMAGED")
        run.reload()
        run.save(3, {"n": 1}).wait()
    assert len([*tmp_path.glob("*.damaged")]) == 3, "without them it is replaced"
