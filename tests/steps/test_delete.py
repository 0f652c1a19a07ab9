"""Steps are deleted by name first, and what crashes leave is tidied up."""

import logging
import os
import time

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN
from tests.helpers import faulty_store as faulty
from tests.helpers import seams

LEFT = "7.orbax-checkpoint-tmp-writing-0123abcd"
REPLACING = "file.0123abcd.tmp"
LOCK = ".orbax-checkpoint-tmp-writing"
STATE = {"state": {"w": np.arange(4.0)}, "opt": {"m": np.ones(3)}}


def open_run(root, **options):
    return flaxckpt.Checkpointer(root, items=("state", "opt"), **options)


@pytest.fixture(params=["disk", "store"])
def root(request, tmp_path):
    """A run directory with steps 1 and 2, of two items."""
    root = faulty.new_path("delete") if request.param == "store" else tmp_path / "run"
    with open_run(root) as ckpt:
        for step in (1, 2):
            ckpt.save(step, STATE)
    return root


def entries(path):
    return {entry.name for entry in path.iterdir()}


def steps_of(root):
    return {name for name in entries(root) if name.isdigit()}


def test_delete_removes_all_files_of_step(root, caplog):
    caplog.set_level(logging.INFO, "flaxckpt")
    open_run(root).delete(1)
    assert steps_of(root) == {"2"}
    assert f"deleted {root / '1'}" in caplog.text


def test_deletes_step_pinned_meanwhile_only_on_demand(root, monkeypatch, caplog):
    real = seams.current("delete.delete")

    def delete(path, **options):
        open_run(root).pin(1)
        real(path, **options)

    caplog.set_level(logging.INFO, "flaxckpt")
    with monkeypatch.context() as patch:
        seams.replace(patch, "delete.delete", delete)
        open_run(root, keep=[LatestN(1)]).prune()
    assert "1 is not deleted: it is pinned" in caplog.text
    assert steps_of(root) == {"1", "2"}
    open_run(root).delete(1)
    assert steps_of(root) == {"2"}


def test_delete_item_removes_and_marks_item(root):
    before = entries(root / "1")
    open_run(root).delete(1, item="opt")
    assert entries(root / "1") == (before - {"opt"}) | {"ITEM_DELETED.opt"}
    assert steps_of(root) == {"1", "2"}


def test_does_not_delete_foreign_files(root):
    for name in ("notes.txt", "opt/mine"):
        (root / "1" / name).write_bytes(b"mine")
    ckpt = open_run(root)
    with pytest.raises(errors.SaveFailedError, match=r"(?s)1 is not.*notes.*opt/mine"):
        ckpt.delete(1)
    with pytest.raises(errors.SaveFailedError, match="opt/mine") as info:
        ckpt.delete(1, item="opt")
    assert "notes" not in str(info.value), "it stays"
    assert {"opt", "state"} <= entries(root / "1")
    ckpt.delete(1, item="state")
    assert "state" not in entries(root / "1")


def leave(root, name):
    (root / name).mkdir()
    (root / name / "file").touch()


def touch_old(file):
    file.touch()
    os.utime(file, (time.time() - 1000,) * 2)


@pytest.mark.parametrize("root", ["disk"], indirect=True)
def test_run_removes_leftovers_of_crashes(root):
    for name in (LEFT, f"x{LEFT}", "plots_1"):
        leave(root, name)
    for name in (".", "metadata", "1", "1/metadata", "plots_1", "other", "1/state"):
        (root / name).mkdir(exist_ok=True)
        touch_old(root / name / REPLACING)
    (root / "linked").mkdir()
    touch_old(root / "linked" / REPLACING)
    (root / "2" / "metadata").symlink_to(root / "linked")
    open_run(root).close()
    left = {str(path.parent.relative_to(root)) for path in root.rglob(REPLACING)}
    assert left == {".", "plots_1", "other", "1/state", "linked"}
    assert LEFT not in entries(root)
    assert f"x{LEFT}" in entries(root)


def test_run_removes_old_staging_owner_files(root):
    owner = "STAGING_OF"
    kept = [f"{owner}.0123abcd.temp", "notes.0123abcd.tmp", f"{owner}.recent.tmp"]
    old = root / f"{owner}.0123abcd.tmp"
    is_store = hasattr(root, "store")
    for path in (old, *(root / name for name in kept)):
        path.write_bytes(b"x")
        if not is_store and "recent" not in path.name:
            os.utime(path, (time.time() - 1000,) * 2)
    open_run(root).close()
    assert old.exists() == is_store
    assert all((root / name).exists() for name in kept)


@pytest.mark.parametrize("root", ["store"], indirect=True)
def test_removes_leftovers_from_run_in_store(root, monkeypatch):
    left = []

    def read_lock(*args):
        left.append(root.store.read((root / "7").key + LOCK).value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        seams.replace(patch, "commit_marker.commit", read_lock)
        with pytest.raises(KeyboardInterrupt):
            flaxckpt.save(root / "7", STATE)
    (root / "7/state/w").write_bytes(b"1")
    root.store.write((root / "7").key + LOCK, left[0])
    for name in ("1", "metadata", "1/metadata"):
        (root / name / "DELETING").write_bytes(b'{"time": 1}')
    open_run(root).close()
    assert steps_of(root) == {"1", "2"}
    assert "DELETING" not in entries(root / "1")
    assert "DELETING" in entries(root / "metadata"), "no replaced files in stores"


@pytest.mark.parametrize("root", ["disk"], indirect=True)
def test_run_logs_errors_of_sweep(root, monkeypatch, caplog):
    def fail(root, step_format):
        raise OSError("on fire")

    seams.replace(monkeypatch, "delete.sweep", fail)
    open_run(root).close()
    assert f"could not remove what a crash left in {root}: on fire" in caplog.text


@pytest.mark.parametrize("root", ["disk"], indirect=True)
def test_upload_mark_during_deletion_keeps_step(root, monkeypatch, caplog):
    real = seams.current("rename.withdraw")

    def withdraw(final, aside):
        (final / "NOT_UPLOADED").write_bytes(b"{}")
        real(final, aside)

    caplog.set_level(logging.INFO, "flaxckpt")
    with monkeypatch.context() as patch:
        seams.replace(patch, "rename.withdraw", withdraw)
        open_run(root, keep=[LatestN(1)]).prune()
    assert "not uploaded" in caplog.text
    assert (root / "1/NOT_UPLOADED").exists()
    open_run(root).delete(1)
    assert steps_of(root) == {"2"}
