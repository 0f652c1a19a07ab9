"""Markers of a step: what each says, on a disk and in a store."""

import json
import shutil
import time
from pathlib import Path

import pytest

from flaxckpt import errors
from flaxckpt._steps import markers
from flaxckpt._storage import leases
from tests.helpers import faulty_store as faulty
from tests.helpers import seams, system_calls

SIMPLE = {
    "pinned": (markers.pin, markers.is_pinned, markers.unpin, "PINNED"),
    "damaged": (
        lambda path: markers.mark_damaged(path, "why"),
        markers.is_damaged,
        markers.unmark_damaged,
        "DAMAGED",
    ),
    "to be uploaded": (
        markers.mark_for_upload,
        markers.is_marked_for_upload,
        markers.unmark_upload,
        "NOT_UPLOADED",
    ),
}
UNREADABLE = [b"", b"\xff", b"7", b"[]", b"{}", b"[" * 60_000, b" " * 2**17]


@pytest.fixture(params=["disk", "store"])
def path(request, tmp_path):
    """A step with one file."""
    path = tmp_path / "1"
    if request.param == "store":
        path = faulty.new_path("markers") / "1"
    else:
        path.mkdir()
    (path / "file").write_text("content")
    return path


def names(path):
    return {entry.name for entry in path.iterdir()} - {"file"}


@pytest.mark.parametrize("kind", SIMPLE)
def test_sets_and_removes_marker(path, kind):
    mark, is_marked, unmark, name = SIMPLE[kind]
    assert not is_marked(path)
    unmark(path)
    for _ in range(2):
        mark(path)
        assert is_marked(path)
        assert names(path) == {name}
    unmark(path)
    assert not is_marked(path)
    assert name not in names(path)


def test_removal_of_marker_syncs_directory(tmp_path, monkeypatch):
    synced = system_calls.record(monkeypatch, "fsync")
    markers.pin(tmp_path)
    synced.clear()
    markers.unpin(tmp_path)
    assert synced == [("fsync", str(tmp_path))]
    markers.unpin(tmp_path)
    assert len(synced) == 1


@pytest.mark.parametrize("kind", SIMPLE)
def test_unmark_tolerates_deletion_of_step(tmp_path, kind, monkeypatch):
    """As a thread that deletes steps in staging does after an upload."""
    path = tmp_path / "step"
    path.mkdir()
    mark, _, unmark, name = SIMPLE[kind]
    mark(path)
    real = Path.unlink

    def unlink(file, missing_ok=False):
        real(file, missing_ok)
        if file == path / name:
            shutil.rmtree(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    unmark(path)
    assert not path.exists()


def test_step_is_temporary_until_made_permanent(path):
    for name, content in markers.for_new_step(path, temporary=True).items():
        (path / name).write_bytes(content)
    assert markers.is_temporary(path)
    markers.make_permanent(path)
    assert not markers.is_temporary(path)
    markers.make_permanent(path)
    assert markers.for_new_step(path, temporary=False) == {}


def test_replacement_of_pinned_step_inherits_pin_on_disk(path):
    markers.pin(path)
    assert markers.for_new_step(path.parent / "2", temporary=False) == {}
    new = markers.for_new_step(path, temporary=True)
    keeps_its_pin = hasattr(path, "store")
    assert {*new} == ({"TEMPORARY"} if keeps_its_pin else {"TEMPORARY", "PINNED"})
    assert {*new.values()} == {b"1\n"}


# ---- items ------------------------------------------------------------------------


def test_marks_item_as_deleted_only_once(path, monkeypatch):
    for item, name in (
        ("dataset", "DATASET_LET_GO"),
        ("optimizer", "ITEM_DELETED.optimizer"),
    ):
        assert not markers.is_item_deleted(path, item)
        markers.mark_item_deleted(path, item)
        assert markers.is_item_deleted(path, item)
        assert name in names(path)
        with monkeypatch.context() as patch:
            seams.replace(patch, "markers.write", None)  # nothing is written again
            markers.mark_item_deleted(path, item)
    assert markers.deleted_items(names(path)) == {"dataset", "optimizer"}
    assert markers.deleted_items(["dataset", "PINNED"]) == frozenset()


def test_marks_added_metrics_only_once(path, monkeypatch):
    assert not markers.is_measured(path)
    markers.mark_measured(path)
    assert markers.is_measured(path)
    assert names(path) == {"MEASURED"}
    seams.replace(monkeypatch, "markers.write", None)
    markers.mark_measured(path)


def test_recognizes_names_of_markers():
    for name in (
        *("PINNED", "TEMPORARY", "DATASET_LET_GO", "MEASURED", "DAMAGED"),
        *("NOT_UPLOADED", "DELETING", "READING-x", "ITEM_DELETED.x", "COPIES.2"),
        "CHANGES",
    ):
        assert markers.is_marker(name), name
        is_copied = name in ("DATASET_LET_GO", "MEASURED", "ITEM_DELETED.x")
        assert markers.is_copied(name) is is_copied, name
    for name in ("state", "dataset", "READING", "ITEM_DELETED", "PINNED.txt"):
        assert not markers.is_marker(name), name
        assert not markers.is_copied(name), name


def test_derives_status_of_step_from_names(path):
    lease = leases.Lease(path)
    reading = names(path)
    status = markers.status(path, ["state", *reading])
    assert status == markers.Status(
        pinned=False,
        temporary=False,
        items=frozenset(["state", *reading]),
        deleted_items=frozenset(),
        readers=tuple(leases.readers(path)),
        waiting=False,
        copies=0,
    )
    assert len(status.readers) == 1
    lease.release()
    for name, field in (
        ("PINNED", "pinned"),
        ("TEMPORARY", "temporary"),
        ("NOT_UPLOADED", "waiting"),
    ):
        status = markers.status(path, ["state", name])
        assert [status.pinned, status.temporary, status.waiting].count(True) == 1
        assert getattr(status, field)
    assert markers.status(path, ["state", "COPIES.2"]).copies == 2
    assert markers.status(path, ["state", "COPIES.x"]).copies == 0
    status = markers.status(path, [*reading, "DATASET_LET_GO", "ITEM_DELETED.a"])
    assert status.readers == ()
    assert status.deleted_items == {"dataset", "a"}


# ---- damage -----------------------------------------------------------------------


def test_keeps_reason_of_damage(path):
    markers.mark_damaged(path, "a chunk\x1b[2J differs")
    assert markers.damage_reason(path) == errors.printable("a chunk\x1b[2J differs")
    row = json.loads((path / "DAMAGED").read_bytes())
    assert abs(row["time"] - time.time()) < 600
    markers.mark_damaged(path, "x" * 200_000)
    assert markers.damage_reason(path) == "x" * 1000
    row["reason"] = "y" * 5000
    (path / "DAMAGED").write_text(json.dumps(row))
    assert markers.damage_reason(path) == "y" * 1000


@pytest.mark.parametrize("content", [None, *UNREADABLE])
def test_damage_reason_reports_missing_reason(path, content):
    if content is not None:
        (path / "DAMAGED").write_bytes(content)
    assert markers.damage_reason(path) == "its marker gives no reason"


def test_keeps_damaged_leaves(path):
    markers.mark_damaged(path, "a and b", ["b", "a"])
    assert markers.damaged_leaves(path) == {"a", "b"}
    markers.mark_damaged(path, "many", [f"{n:0100}" for n in range(1000)])
    assert markers.damaged_leaves(path) is None
    assert markers.damage_reason(path) == "many"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"leaves": "ab"}', b'{"leaves": null}']
)
def test_damage_mark_without_leaves_names_none(path, content):
    (path / markers.DAMAGED).write_bytes(content)
    assert markers.damaged_leaves(path) is None


# ---- uploads ----------------------------------------------------------------------


def test_damage_mark_records_time(path):
    assert markers.damage_time(path) is None
    before = time.time()
    markers.mark_damaged(path, "a chunk is lost")
    assert before <= markers.damage_time(path) <= time.time()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"time": "soon"}', b'{"time": null}']
)
def test_damage_time_is_zero_without_valid_time(path, content):
    (path / markers.DAMAGED).write_bytes(content)
    assert markers.damage_time(path) == 0


@pytest.mark.parametrize("make", ["mkdir", "deep"])
def test_damage_time_is_zero_for_unreadable_mark(tmp_path, make):
    marker = tmp_path / markers.DAMAGED
    if make == "mkdir":
        marker.mkdir()
    else:
        marker.write_bytes(b"[" * 60_000)
    assert markers.damage_time(tmp_path) == 0


def test_each_change_renews_upload_marker(path):
    assert markers.read_upload_marker(path) is None
    assert markers.is_settled(path)
    markers.mark_for_upload(path, ["b", "a"])
    first = markers.read_upload_marker(path)
    assert first.settled
    assert not first.overwrite
    assert first.removed == ("a", "b")
    assert len(first.change) == 16
    markers.mark_for_upload(path, ["c"])
    second = markers.read_upload_marker(path)
    assert second.removed == ("a", "b", "c")
    assert second.change != first.change
    assert markers.is_settled(path)
    markers.unmark_upload(path)
    assert markers.read_upload_marker(path) is None


def test_counts_changes_across_uploads(path):
    markers.unmark_upload(path)
    assert not names(path), "a step that was never changed needs no count"
    for number in (1, 2):
        markers.mark_for_upload(path)
        assert markers.count_changes(path) == number
    markers.unmark_upload(path)
    assert markers.count_changes(path) == 2
    markers.mark_for_upload(path)
    assert markers.count_changes(path) == 3
    assert markers.read_upload_marker(path).changes == 3


@pytest.mark.parametrize("content", UNREADABLE)
def test_unreadable_count_of_changes_is_that_of_the_upload_marker(path, content):
    markers.mark_for_upload(path)
    (path / "CHANGES").write_bytes(content)
    assert markers.count_changes(path) == (7 if content == b"7" else 1)


@pytest.mark.parametrize("overwrite", [False, True])
def test_first_upload_of_step_is_not_settled(path, overwrite):
    content = markers.UploadMarker(overwrite).content()
    (path / markers.NOT_UPLOADED).write_bytes(content)
    assert not markers.is_settled(path)
    markers.mark_for_upload(path)
    marker = markers.read_upload_marker(path)
    assert marker == markers.UploadMarker(overwrite, (), marker.change, False, 1)


def test_upload_marker_of_older_release_is_not_settled(path):
    row = {"overwrite": 1, "removed": [], "change": "x"}
    (path / markers.NOT_UPLOADED).write_text(json.dumps(row))
    assert markers.read_upload_marker(path) == (True, (), "x", False, 0)


@pytest.mark.parametrize("content", UNREADABLE)
def test_unreadable_upload_marker_counts_as_unsettled(path, content):
    (path / markers.NOT_UPLOADED).write_bytes(content)
    assert markers.read_upload_marker(path) == (False, (), "", False, 0)
    assert not markers.is_settled(path)
