"""Which checkpoint a path means: damage, permissions and junk are never passed over."""

import logging
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import serialization

import flaxckpt
from flaxckpt import errors, formats
from tests import GOLDEN
from tests.helpers import command_line, seams
from tests.helpers.files import without_permissions


@pytest.fixture
def orbax_steps(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "o") as ckpt:
        for step in (5, 6):
            ckpt.save(step, {"step": step})
    return tmp_path / "o"


def flax_file(path, step):
    path.write_bytes(serialization.to_bytes({"step": step}))


@pytest.fixture
def flax_steps(tmp_path):
    (tmp_path / "f").mkdir()
    for step in (7, 8):
        flax_file(tmp_path / f"f/checkpoint_{step}", step)
    return tmp_path / "f"


@pytest.fixture
def t5x_steps(tmp_path):
    for name in ("checkpoint_7", "checkpoint_9"):
        shutil.copytree(GOLDEN / "t5x-3" / name, tmp_path / "t" / name)
    return tmp_path / "t"


@pytest.fixture
def shared_path():
    """A directory that others than root may look into."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


# ---- damaged steps ----------------------------------------------------------------


def assert_left_out(root, *, newest, good, says, caplog):
    with caplog.at_level(logging.WARNING):
        assert flaxckpt.metadata(root).step == good
        assert flaxckpt.load(root) is not None
    warned = [r for r in caplog.records if "a newer step is left out" in r.message]
    assert len(warned) == 2
    assert says in warned[0].message
    with pytest.raises(errors.DamagedCheckpointError, match=says):
        flaxckpt.load(root, step=newest)
    with pytest.raises(errors.CheckpointError):
        flaxckpt.load(root, step=newest + 1)


def test_warns_about_newest_step_without_tree(orbax_steps, caplog):
    (orbax_steps / "6/state/_METADATA").unlink()
    assert_left_out(
        orbax_steps, newest=6, good=5, says="state/_METADATA", caplog=caplog
    )
    with pytest.raises(errors.DamagedCheckpointError, match="state/_METADATA"):
        flaxckpt.load(orbax_steps / "6")
    shutil.rmtree(orbax_steps / "5")
    with pytest.raises(errors.DamagedCheckpointError, match="state/_METADATA"):
        flaxckpt.load(orbax_steps)


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "an empty file"), (bytes(500), "zeros")]
)
def test_warns_about_unwritten_newest_file(flax_steps, content, says, caplog):
    (flax_steps / "checkpoint_9").write_bytes(content)
    assert_left_out(flax_steps, newest=9, good=8, says=says, caplog=caplog)


def test_warns_about_newest_t5x_step_without_file(t5x_steps, caplog):
    (t5x_steps / "checkpoint_9/checkpoint").unlink()
    assert_left_out(t5x_steps, newest=9, good=7, says="a directory with", caplog=caplog)


@pytest.mark.parametrize("kind", ["file", "directory", "empty"])
def test_damaged_sole_step_is_not_reported_missing(tmp_path, kind):
    path = tmp_path / "checkpoint_9"
    if kind == "file":
        path.write_bytes(b"")
    else:
        path.mkdir()
        (path / "target.w").mkdir() if kind == "directory" else None
    with pytest.raises(errors.DamagedCheckpointError, match=rf"_9 is .*{kind}"):
        flaxckpt.load(tmp_path, step=9)
    with pytest.raises(errors.CheckpointNotFoundError, match="no step 8"):
        flaxckpt.load(tmp_path, step=8)


def test_does_not_warn_about_older_damage(orbax_steps, caplog):
    (orbax_steps / "5/state/_METADATA").unlink()
    (orbax_steps / "9").mkdir()  # nothing is ever committed empty
    with caplog.at_level(logging.WARNING):
        assert flaxckpt.metadata(orbax_steps).step == 6
    assert not caplog.records
    with pytest.raises(errors.DamagedCheckpointError, match="state/_METADATA"):
        flaxckpt.load(orbax_steps, step=5)


# ---- permissions ------------------------------------------------------------------

DENIED = "cannot be read: permission denied; change its mode, or run as its owner"


@pytest.mark.parametrize(
    "closed", ["6", "6/state", "6/flaxckpt.json", "6/commit_success.txt"]
)
def test_reports_step_without_read_permission(shared_path, closed, caplog):
    with flaxckpt.Checkpointer(shared_path / "o") as ckpt:
        for step in (5, 6):
            ckpt.save(step, {"step": step})
    (shared_path / "o" / closed).chmod(0)
    with without_permissions():
        with pytest.raises(errors.DamagedCheckpointError, match=DENIED):
            flaxckpt.load(shared_path / "o", step=6)
        with pytest.raises(errors.DamagedCheckpointError, match=DENIED):
            flaxckpt.load(shared_path / "o/6")
        if closed in ("6", "6/state"):
            assert flaxckpt.metadata(shared_path / "o").step == 5
            assert DENIED in caplog.text
        else:
            with pytest.raises(errors.DamagedCheckpointError, match=DENIED):
                flaxckpt.load(shared_path / "o")
    (shared_path / "o" / closed).chmod(0o755)


@pytest.mark.parametrize(
    "name",
    [
        "safetensors/sharded/model-00001-of-00002.safetensors",
        "safetensors/sharded/model.safetensors.index.json",
        "safetensors/sharded",
        "safetensors/silero_vad_16k.safetensors",
        "streaming/streaming_params",
        "t5x-3/checkpoint_7/checkpoint",
        "t5x-3/checkpoint_7",
        "legacy-orbax/files/checkpoint",
    ],
)
def test_error_reports_denied_permission(shared_path, name):
    copy = shared_path / "copy"
    shutil.copytree(GOLDEN / name.split("/")[0], copy)
    closed = copy / name.partition("/")[2]
    closed.chmod(0)
    whole = closed if closed.is_dir() or "silero" in name else closed.parent
    if "streaming" in name:
        whole = closed
    try:
        with (
            without_permissions(),
            pytest.raises(errors.DamagedCheckpointError, match=DENIED),
        ):
            flaxckpt.load(whole)
    finally:
        closed.chmod(0o755)


# ---- step= ------------------------------------------------------------------------


@pytest.mark.parametrize("step", [True, 7.0, "7", -1])
def test_rejects_invalid_steps(flax_steps, step):
    with pytest.raises(errors.OptionError, match="a step is the number"):
        flaxckpt.load(flax_steps, step=step)


def test_rejects_step_for_single_checkpoint(flax_steps, orbax_steps):
    for path in (flax_steps / "checkpoint_7", orbax_steps / "5"):
        with pytest.raises(errors.OptionError, match="leave step out, or pass its par"):
            flaxckpt.load(path, step=7)
    assert flaxckpt.load(flax_steps, step=np.int64(7)) == {"step": 7}


# ---- one recognition --------------------------------------------------------------


LOADS = {
    "load": flaxckpt.load,
    "metadata": flaxckpt.metadata,
    "verify": flaxckpt.verify,
    "leaf": lambda path: flaxckpt.open_leaf(path, "step"),
    "step": lambda path: flaxckpt.load(path, step=6),
    "its path": lambda path: flaxckpt.load(path / "6"),
    "restore": lambda path: flaxckpt.Checkpointer(path, read_only=True).restore(),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_load_recognizes_its_checkpoint_once_and_no_others(
    orbax_steps, monkeypatch, load
):
    asked = []
    table = seams.current("formats.table")

    def counted(path):
        asked.append(path)
        return table["orbax"].recognise(path)

    changed = {**table, "orbax": table["orbax"]._replace(recognise=counted)}
    seams.replace(monkeypatch, "formats.table", changed)
    load(orbax_steps)
    assert asked.count(orbax_steps / "6") == 1
    assert orbax_steps / "5" not in asked


# ---- saves under way ----------------------------------------------------------------


@pytest.fixture
def slow_saves(monkeypatch):
    """Saves that are written, and not committed before the event is set."""
    go = threading.Event()
    real = seams.current("disk.sync_tree")

    def sync_tree(path):
        size = real(path)
        go.wait(60)
        return size

    write_marker = seams.current("commit_marker.commit")

    def commit(*args):
        go.wait(60)
        return write_marker(*args)

    seams.replace(monkeypatch, "disk.sync_tree", sync_tree)
    seams.replace(monkeypatch, "commit_marker.commit", commit)
    yield go
    go.set()


LOOKS = {
    "load": flaxckpt.load,
    "metadata": flaxckpt.metadata,
    "verify": flaxckpt.verify,
    "detect": formats.detect,
    "step": lambda path: flaxckpt.load(path, step=1),
    "restore": lambda path: flaxckpt.Checkpointer(path, read_only=True).restore(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_error_mentions_first_save_in_progress(store_path, slow_saves, kind, look):
    root = store_path(kind)
    with flaxckpt.Checkpointer(root) as run:
        handle = run.save(1, {"w": np.ones(3)})
        wait_for_names(root, "tmp-writing")
        with pytest.raises(errors.CheckpointNotFoundError) as info:
            look(root)
        assert "a save of 1 is under way, or was interrupted" in str(info.value)
        slow_saves.set()
        handle.wait()
    assert flaxckpt.load(root)["w"].shape == (3,)


def wait_for_names(root, part):
    for _ in range(6000):
        if root.is_dir() and any(part in path.name for path in root.iterdir()):
            return
        time.sleep(0.01)
    raise AssertionError(f"no {part} in {root}")


def test_error_mentions_save_to_path_in_progress(tmp_path, slow_saves):
    handle = flaxckpt.save_async(tmp_path / "a", {"w": np.ones(3)})
    wait_for_names(tmp_path, "tmp-writing")
    with pytest.raises(errors.CheckpointNotFoundError, match="save to it is under way"):
        flaxckpt.load(tmp_path / "a")
    slow_saves.set()
    handle.wait()


def test_error_reports_run_without_steps(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(errors.CheckpointNotFoundError, match="a run that has no steps"):
        flaxckpt.load(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "1.orbax-checkpoint-tmp").mkdir()  # of Orbax
    with pytest.raises(
        errors.CheckpointNotFoundError, match="a save of 1 is under way"
    ):
        flaxckpt.load(tmp_path)


# ---- what lies beside steps -------------------------------------------------------


def test_error_for_directory_of_checkpoints_suggests_one(tmp_path):
    flaxckpt.save(tmp_path / "runs" / "first", {"step": 1})
    with pytest.raises(errors.CheckpointFormatError, match="pass the path of") as info:
        flaxckpt.load(tmp_path / "runs")
    assert str(tmp_path / "runs" / "first") in str(info.value)


def test_files_ending_in_numbers_are_not_steps(flax_steps):
    for name in ("vocab_32000", "notes2024"):
        flax_file(flax_steps / name, 0)
    assert flaxckpt.load(flax_steps) == {"step": 8}
    for path in flax_steps.glob("checkpoint_*"):
        path.unlink()
    for _ in range(2):
        with pytest.raises(errors.CheckpointFormatError, match="not names of steps"):
            flaxckpt.load(flax_steps)
        (flax_steps / "notes2024").unlink(missing_ok=True)


@pytest.mark.parametrize("format_name", ["safetensors", "msgpack"])
def test_reading_leaf_of_replaced_file_raises_error(tmp_path, format_name):
    files = []
    for i in range(2):
        flaxckpt.save(tmp_path / f"c{i}", {"w": np.full(8, i, "float32")})
        files.append(tmp_path / f"c{i}.{format_name}")
        flaxckpt.convert(tmp_path / f"c{i}", files[i], format=format_name)
    leaf = flaxckpt.open_leaf(files[0], "w")
    files[1].replace(files[0])
    with pytest.raises(OSError, match="replaced or changed since it was opened"):
        leaf.read().result()


# ---- missing paths ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "near"),
    [
        ("runs/runn", "runs/run"),
        ("rnus/run", "runs/run"),
        ("runs/run/state 100", None),
        ("runs/run2", None),  # another number is another run
        ("rnus/other", None),
    ],
)
def test_error_for_missing_path_suggests_similar_path(tmp_path, missing, near):
    flaxckpt.save(tmp_path / "runs/run/100", {"n": 1})
    with pytest.raises(errors.CheckpointNotFoundError) as raised:
        flaxckpt.load(tmp_path / missing)
    question = str(raised.value).partition("does not exist")[2]
    assert question == (f"; did you mean {tmp_path / near}?" if near else "")


# ---- pointers of big_vision ---------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoint.bv", "checkpoint.bv-LAST"])
def test_follows_big_vision_pointer(name, tmp_path):
    shutil.copytree(GOLDEN / "big_vision", tmp_path / "work")
    path = tmp_path / "work" / name
    newest = tmp_path / "work/checkpoint.bv-000000007-tmp"
    found = flaxckpt.metadata(path)
    assert found.format == "big_vision"
    assert found.path == str(newest)
    jax.tree.map(
        np.testing.assert_array_equal, flaxckpt.load(path), flaxckpt.load(newest)
    )
    assert isinstance(flaxckpt.load(path)["opt"], list)
    flaxckpt.convert(path, tmp_path / "own.safetensors")
    assert flaxckpt.verify(path).ok
    shutil.rmtree(newest)
    missing = f"checkpoint.bv-LAST names the checkpoint {newest}, which is missing"
    for read in (flaxckpt.load, flaxckpt.metadata):
        with pytest.raises(errors.DamagedCheckpointError, match=re.escape(missing)):
            read(path)
    assert missing in command_line.run("ls", path, code=1)


@pytest.mark.parametrize("name", ["checkpoint.bv", "checkpoint.bv-LAST"])
def test_listing_follows_big_vision_pointer(name, tmp_path):
    work = shutil.copytree(GOLDEN / "big_vision", tmp_path / "work")
    newest = work / "checkpoint.bv-000000007-tmp"
    wanted = command_line.read_json("ls", newest)
    assert command_line.read_json("ls", work / name) == wanted
    used = command_line.read_json("du", work / name)
    assert used == command_line.read_json("du", newest)
    assert used["bytes"] == wanted["bytes"]


def test_listing_omits_pointer_beside_checkpoints(tmp_path):
    work = shutil.copytree(GOLDEN / "big_vision", tmp_path / "work")
    (work / "x.bv-LAST").write_text("000000300")
    (work / "expected.npz").unlink()
    names = {path.name for path in work.iterdir() if path.is_dir()}
    found = command_line.read_json("ls", work)
    assert {Path(run["path"]).name for run in found["runs"]} == names


def test_error_names_big_vision_array_without_metadata(tmp_path):
    work = shutil.copytree(GOLDEN / "big_vision", tmp_path / "work")
    lost = sorted(work.glob("*-000000003/*~*"))[0]
    (lost / ".zarray").unlink()
    with pytest.raises(errors.DamagedCheckpointError) as caught:
        flaxckpt.load(lost.parent)
    assert f"{lost.name}/.zarray is missing" in str(caught.value)


def test_error_names_newest_big_vision_checkpoint_or_another(tmp_path):
    work = shutil.copytree(GOLDEN / "big_vision", tmp_path / "work")
    with pytest.raises(errors.CheckpointFormatError, match=r"work/checkpoint\.bv, the"):
        flaxckpt.load(work)
    (work / "checkpoint.bv-LAST").unlink()
    with pytest.raises(errors.CheckpointFormatError, match=r"checkpoint\.bv-000000003"):
        flaxckpt.load(work)
