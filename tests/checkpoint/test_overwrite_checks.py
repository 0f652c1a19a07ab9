"""The files that belong to a checkpoint, by their names, and those that do not."""

import json
import shutil
from pathlib import PurePath

import pytest

from flaxckpt import errors
from flaxckpt._checkpoint import overwrite
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


def foreign(directory, **options):
    """Returns the names in the error; empty if the directory may be replaced."""
    try:
        overwrite.check_replaceable(directory, **options)
    except errors.CheckpointExistsError as error:
        lines = str(error).splitlines()
        assert "do not belong to the checkpoint" in lines[0], lines
        return [line.strip() for line in lines[1:-1]]
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
    assert sorted(foreign(path, of_any_format=True)) == sorted(not_ours)
    assert foreign(path, of_any_format=True, replaced=not_ours) == []
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
        overwrite.check_replaceable(path)


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
        overwrite.check_replaceable(path, of_any_format=True)


def test_conversion_can_replace_t5x_step(tmp_path):
    step = next(GOLDEN.glob("t5x-3/**/checkpoint")).parent
    shutil.copytree(step, tmp_path / "step")
    assert foreign(tmp_path / "step", of_any_format=True) == []
    make(tmp_path / "step", "notes.txt", "mine/0")
    found = foreign(tmp_path / "step", of_any_format=True)
    assert sorted(found) == ["mine", "notes.txt"]
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
        overwrite.check_replaceable(tmp_path / "step")


def test_conversion_can_replace_file_of_known_format(tmp_path):
    path = tmp_path / "model.safetensors"
    shutil.copyfile(GOLDEN / "safetensors" / "silero_vad_16k.safetensors", path)
    overwrite.check_replaceable(path, of_any_format=True)
    (tmp_path / "link.safetensors").symlink_to(path)
    (tmp_path / "text").write_text("text")
    for other, is_any in (("link.safetensors", True), ("text", True), (path, False)):
        with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
            overwrite.check_replaceable(tmp_path / other, of_any_format=is_any)


# ---- free paths -------------------------------------------------------------------


def test_save_requires_free_path_or_overwrite(tmp_path):
    overwrite.check_free(tmp_path / "missing", overwrite=False)
    overwrite.check_free(make(tmp_path, "empty/") / "empty", overwrite=False)
    step = make(tmp_path / "3", "flaxckpt.json")
    with pytest.raises(errors.CheckpointExistsError, match="or pass overwrite=True"):
        overwrite.check_free(step, overwrite=False)
    overwrite.check_free(step, overwrite=True)
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
        overwrite.check_free(make(tmp_path / "other", "notes.txt"), overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(errors.CheckpointExistsError, match="is not a checkpoint"):
        overwrite.check_free(tmp_path / "link", overwrite=True)


def test_step_deleted_meanwhile_frees_its_path(tmp_path, monkeypatch):
    step = make(tmp_path / "3", "flaxckpt.json")

    def delete_first(path):
        shutil.rmtree(path)
        return not any(path.iterdir())  # after it was found to be a directory

    seams.replace(monkeypatch, "overwrite.is_empty", delete_first)
    overwrite.check_free(step, overwrite=False)


def test_conversion_requires_free_path_or_overwrite(tmp_path):
    overwrite.check_target_free(tmp_path / "missing" / "a", overwrite=False)
    overwrite.check_target_free(make(tmp_path, "empty/") / "empty", overwrite=False)
    model = make(tmp_path / "model", ONE, "config.json")
    with pytest.raises(errors.CheckpointExistsError, match="or pass overwrite=True"):
        overwrite.check_target_free(model, overwrite=False)
    overwrite.check_target_free(model, overwrite=True, replaced=["config.json"])
    with pytest.raises(errors.CheckpointExistsError, match=r"config\.json"):
        overwrite.check_target_free(model, overwrite=True)
    below = model / "config.json" / "a"
    with pytest.raises(errors.OptionError, match=r"config\.json is a file, not a dir"):
        overwrite.check_target_free(below, overwrite=False)


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
def test_rejects_directory_names_of_files(name, maker, told):
    with pytest.raises(errors.OptionError) as info:
        overwrite.check_name(PurePath(name), maker)
    assert told in str(info.value)
    overwrite.check_name(PurePath("a.b"), maker)


def test_set_aside_uses_next_free_name(tmp_path):
    for expected in ("3.damaged", "3.2.damaged", "3.3.damaged"):
        step = make(tmp_path / "3", "flaxckpt.json", "mine")
        overwrite.set_aside(step)
        assert (tmp_path / expected / "mine").is_file()
        assert not step.exists()
    overwrite.set_aside(make(tmp_path / "3", "flaxckpt.json"))
    assert (tmp_path / "3" / "flaxckpt.json").is_file(), "it may be replaced"
