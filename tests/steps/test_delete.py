"""Steps are deleted by name first, and what crashes leave is tidied up."""

import logging
import os
import time

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt._steps import delete, markers, names
from flaxckpt._storage import commit_marker, locks
from flaxckpt._storage import paths as storage_paths
from tests.helpers import faulty_store as faulty
from tests.helpers import seams

PLAIN = names.StepFormat()
LEFT = "7.orbax-checkpoint-tmp-writing-0123abcd"
REPLACING = "file.0123abcd.tmp"


@pytest.fixture(params=["disk", "store"])
def root(request, tmp_path):
    """A run directory with steps 1 and 2."""
    root = faulty.new_path("delete") if request.param == "store" else tmp_path
    for step in ("1", "2"):
        for name in ("state/w", "opt/m", commit_marker.MARKER):
            if request.param == "disk":
                (root / step / name).parent.mkdir(parents=True, exist_ok=True)
            (root / step / name).write_bytes(b"{}")
    return root


def none(path):
    """Finds no files of others."""
    return []


def entries(path):
    return sorted(entry.name for entry in path.iterdir())


def test_delete_removes_all_files_of_step(root, caplog):
    caplog.set_level(logging.INFO, "flaxckpt")
    delete.delete(root / "1", find_foreign=none)
    assert entries(root) == ["2"]
    assert f"deleted {root / '1'}" in caplog.text


def test_deletes_pinned_step_only_on_demand(root):
    markers.pin(root / "1")
    with pytest.raises(errors.SaveFailedError, match="1 is not deleted: it is pinned"):
        delete.delete(root / "1", find_foreign=none)
    assert entries(root / "1") == ["PINNED", commit_marker.MARKER, "opt", "state"]
    delete.delete(root / "1", find_foreign=none, even_pinned=True)
    assert entries(root) == ["2"]


def test_delete_item_removes_and_marks_item(root):
    delete.delete_item(root / "1", "opt", find_foreign=none)
    assert entries(root / "1") == ["ITEM_DELETED.opt", commit_marker.MARKER, "state"]
    assert entries(root) == ["1", "2"]


def test_does_not_delete_foreign_files(root):
    def foreign(path):
        return ["notes.txt", "opt/mine"]

    with pytest.raises(errors.SaveFailedError, match=r"(?s)1 is not.*notes.*opt/mine"):
        delete.delete(root / "1", find_foreign=foreign)
    with pytest.raises(errors.SaveFailedError, match="opt/mine") as info:
        delete.delete_item(root / "1", "opt", find_foreign=foreign)
    assert "notes" not in str(info.value), "it stays"
    assert {"opt", "state"} <= {*entries(root / "1")}
    delete.delete_item(root / "1", "state", find_foreign=foreign)
    assert "state" not in entries(root / "1")


def test_delete_rejects_replaced_step(root):
    asked = []

    def is_unchanged(path):
        asked.append(path.name)
        return False

    before = entries(root / "1")
    with pytest.raises(errors.SaveFailedError, match="1 is not deleted: it was just"):
        delete.delete(
            root / "1", find_foreign=none, even_pinned=True, is_unchanged=is_unchanged
        )
    with pytest.raises(errors.SaveFailedError, match=r"opt of .*1 is not deleted: the"):
        delete.delete_item(
            root / "1", "opt", find_foreign=none, is_unchanged=is_unchanged
        )
    assert asked == ["1", "1"]
    assert entries(root / "1") == before
    delete.delete_item(
        root / "1", "opt", find_foreign=none, is_unchanged=lambda path: path.exists()
    )
    delete.delete(root / "1", find_foreign=none, is_unchanged=lambda path: True)
    assert entries(root) == ["2"]


def leave(root, name):
    (root / name).mkdir()
    (root / name / "file").touch()


def touch_old(file):
    file.touch()
    os.utime(file, (time.time() - 1000,) * 2)


def test_sweep_removes_only_leftovers_of_steps(tmp_path):
    leave(tmp_path, LEFT)
    leave(tmp_path, "x" + LEFT)
    delete.sweep(tmp_path, PLAIN)
    assert entries(tmp_path) == ["x" + LEFT]


def test_tidy_removes_leftovers_of_crashes_from_run(tmp_path):
    leave(tmp_path, LEFT)
    leave(tmp_path, "1")
    leave(tmp_path, "plots_1")
    for directory in (
        ".",
        "metadata",
        "1",
        "1/metadata",
        "plots_1",
        "other",
        "1/state",
    ):
        (tmp_path / directory).mkdir(exist_ok=True)
        touch_old(tmp_path / directory / REPLACING)
    (tmp_path / "linked").mkdir()
    touch_old(tmp_path / "linked" / REPLACING)
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    delete.tidy(tmp_path, PLAIN, ["metadata", "link"])
    left = {
        str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob(REPLACING)
    }
    assert left == {".", "plots_1", "other", "1/state", "linked"}
    assert not (tmp_path / LEFT).exists()


def test_tidy_removes_old_staging_owner_files(root):
    owner = names.STAGING_OWNER
    kept = [f"{owner}.0123abcd.temp", "notes.0123abcd.tmp", f"{owner}.recent.tmp"]
    old = root / f"{owner}.0123abcd.tmp"
    is_store = storage_paths.is_remote(root)
    for path in (old, *(root / name for name in kept)):
        path.write_bytes(b"x")
        if not is_store and "recent" not in path.name:
            os.utime(path, (time.time() - 1000,) * 2)
    delete.tidy(root, PLAIN, ())
    assert old.exists(), "beside items only"
    delete.tidy(root, PLAIN, ("state",))
    assert old.exists() == is_store
    assert all((root / name).exists() for name in kept)


@pytest.mark.parametrize("root", ["store"], indirect=True)
def test_tidy_removes_leftovers_from_run_in_store(root):
    (root / "7/state/w").write_bytes(b"1")
    holder = locks._self()._replace(id="gone")
    root.store.write((root / "7").key + locks.LOCK, holder.content())
    for name in ("1", "metadata", "1/metadata"):
        (root / name / "DELETING").write_bytes(b'{"time": 1}')
    delete.tidy(root, PLAIN, ["metadata"])
    assert entries(root) == ["1", "2", "metadata"]
    assert "DELETING" not in entries(root / "1")
    assert "DELETING" in entries(root / "metadata"), "no replaced files in stores"


def test_tidy_logs_errors_of_sweep(tmp_path, monkeypatch, caplog):
    def fail(root, step_format):
        raise OSError("on fire")

    seams.replace(monkeypatch, "delete.sweep", fail)
    delete.tidy(tmp_path, PLAIN, [])
    assert f"could not remove what a crash left in {tmp_path}: on fire" in caplog.text


def test_upload_mark_during_deletion_keeps_step(tmp_path, monkeypatch):
    step = tmp_path / "1"
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": np.arange(4.0)}).wait()
    real = seams.current("rename.withdraw")

    def withdraw(final, aside):
        markers.mark_for_upload(final)
        real(final, aside)

    seams.replace(monkeypatch, "rename.withdraw", withdraw)
    with pytest.raises(errors.SaveFailedError, match="not uploaded"):
        delete.delete(step, find_foreign=none)
    assert markers.is_marked_for_upload(step)
    delete.delete(step, find_foreign=none, even_pinned=True)
    assert not step.exists()
