"""What `verify` says of each kind of fault: where it is, and whether it is proved."""

import errno
import os
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt._checkpoint import verify
from flaxckpt.datasets import StepIndexed
from flaxckpt.formats._native import contents
from tests.helpers.files import flip_bit


def save(path, state, **layout):
    layout = {"store": "files", "codec": "none", **layout}
    flaxckpt.save(path, state, layout=flaxckpt.ArrayLayout(**layout))
    return path


def unreadable(monkeypatch, ending):
    """Has the disk fail for files whose path has this end."""
    real = os.open

    def fail(path, *args, **options):
        if str(path).endswith(ending):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", fail)


# ---- where a fault is -------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "chunk", "place"),
    [
        ((32,), "c.1", "elements 16-31 of 32"),
        ((8, 8), "c.1.0", "rows 2-3 of 8"),
        ((2, 32), "c.0.1", "[0:1, 16:32] of [2, 32]"),
        ((1, 32), "c.0.1", "[0:1, 16:32] of [1, 32]"),
    ],
)
def test_the_values_in_a_damaged_chunk_are_named(tmp_path, shape, chunk, place):
    value = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    path = save(tmp_path / "c", {"w": value}, chunk_bytes=64)
    flip_bit(path / "state" / "w" / chunk)
    report = flaxckpt.verify(path)
    assert report.places == {"w": f"state/w/{chunk} -> w, {place}"}


def test_a_whole_leaf_has_no_place_in_it(tmp_path):
    path = save(tmp_path / "c", {"w": np.arange(8.0)})
    flip_bit(path / "state/w/c.0")
    assert flaxckpt.verify(path).places == {"w": "state/w/c.0 -> w"}


def test_a_database_names_some_of_its_leaves(tmp_path):
    state = {name: np.arange(64.0) for name in "abcde"}
    path = save(tmp_path / "c", state, store="ocdbt")
    [data] = (path / "state/d").iterdir()
    flip_bit(data)
    name = f"state/d/{data.name}"
    text = f"{name} -> 5 leaves: a, b, c, …"
    assert flaxckpt.verify(path).places == {name: text}


# ---- sizes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "content", "told"),
    [
        ({"checksum": False}, b"1" * 31, "c.0 has 31 bytes instead of 32"),
        ({"checksum": False}, b"1" * 33, "c.0 has 33 bytes instead of 32"),
        ({"checksum": False}, b"", "c.0 has 0 bytes instead of 32"),
        ({}, b"1" * 32, "c.0 has 32 bytes instead of 36"),
        ({"codec": "zstd"}, b"", "c.0 has 0 bytes instead of some"),
        ({"codec": "zstd"}, b"1" * 40, "its CRC-32C differs"),
    ],
)
def test_chunks_of_another_size(tmp_path, layout, content, told):
    value = np.zeros(4096) if "codec" in layout else np.arange(4.0)
    path = save(tmp_path / "c", {"w": value}, **layout)
    (path / "state/w/c.0").write_bytes(content)
    report = flaxckpt.verify(path)
    assert told in report.problems["w"]
    with pytest.raises(errors.DamagedCheckpointError, match=r"^w: c\.0 "):
        verify.check(path)


def test_arrays_without_checksums_are_decoded(tmp_path):
    layout = {"codec": "zstd", "checksum": False}
    path = save(tmp_path / "c", {"w": np.zeros(4096), "v": np.zeros(4096)}, **layout)
    report = flaxckpt.verify(path)
    assert report.ok
    assert set(report.unchecked) == {"w", "v"}
    size = (path / "state/w/c.0").stat().st_size
    (path / "state/w/c.0").write_bytes(b"\xff" * size)
    report = flaxckpt.verify(path)
    assert set(report.problems) == {"w"}
    assert 0 <= report.secs < 3600


# ---- faults that are not proved ---------------------------------------------------


def test_what_cannot_be_read_is_no_damage(tmp_path, monkeypatch):
    layout = {"codec": "zstd", "checksum": False}
    path = save(tmp_path / "c", {"w": np.zeros(4096), "v": np.zeros(4096)}, **layout)
    (path / "state/w/c.0").write_bytes(b"\xff" * 9)
    unreadable(monkeypatch, "state/v/c.0")
    report = flaxckpt.verify(path)
    assert not report.problems
    assert {"w"} <= set(report.unread)
    assert verify.find_damage(path, None) is None
    with pytest.raises(errors.DamagedCheckpointError):
        verify.check(path)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_description_that_is_damaged_or_cannot_be_read(
    tmp_path, monkeypatch, is_lost
):
    path = save(tmp_path / "c", {"w": np.zeros(4), "name": "x"})
    flip_bit(path / "state/_strings.json")
    if not is_lost:
        unreadable(monkeypatch, "state/w/c.0")
    report = flaxckpt.verify(path)
    faults, others = report.problems, report.unread
    if not is_lost:
        faults, others = others, faults
    assert (len(faults), len(others)) == (1, 0)
    assert report.leaves is None
    with pytest.raises(errors.DamagedCheckpointError, match=str(path)):
        verify.check(path)


def test_damaged_metrics_do_not_make_a_step_unreadable(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as run:
        run.save(1, {"w": np.zeros(4)}, metrics={"loss": 1.0})
    flip_bit(tmp_path / "1" / "metrics" / "metrics")
    assert not flaxckpt.verify(tmp_path).ok
    verify.check(tmp_path / "1")
    flip_bit(tmp_path / "1" / "state" / "w" / "zarr.json")
    with pytest.raises(errors.DamagedCheckpointError):
        verify.check(tmp_path / "1")


def test_all_places_are_told_whatever_else_is_damaged(tmp_path):
    """Also of a leaf after a file that holds no leaf, and before it."""
    with flaxckpt.Checkpointer(tmp_path) as run:
        data = StepIndexed(lambda i: i)
        state = {"v": np.zeros(4), "w": np.zeros(4)}
        run.save(1, state, metrics={"loss": 1.0}, dataset=data)
    for name in ("state/v/c.0", "state/w/c.0", "metrics/metrics"):
        flip_bit(tmp_path / "1" / name)
    for file in (tmp_path / "1" / "dataset").iterdir():
        flip_bit(file)
    report = flaxckpt.verify(tmp_path)
    assert {"v", "w"} < set(report.problems)
    assert report.places == {name: f"state/{name}/c.0 -> {name}" for name in "vw"}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "failed"), ValueError("lost")])
def test_a_path_that_is_no_checkpoint_any_more_is_reported(tmp_path, error):
    report = verify.report_lost(tmp_path, 3, error)
    faults = report.unread if isinstance(error, OSError) else report.problems
    assert dict(faults) == {".": str(error)}
    assert (len(report.problems) + len(report.unread), report.secs) == (1, 0.0)
    assert (report.leaves, report.step) == (None, 3)


def test_damage_is_told_of_what_was_a_checkpoint(tmp_path):
    path = save(tmp_path / "c", {"w": np.zeros(4)})
    (path / "flaxckpt.json").unlink()
    (path / "state" / "_METADATA").unlink()
    assert verify.find_damage(path, None)
    shutil.rmtree(path / "state")
    assert verify.find_damage(path, None)
    shutil.rmtree(path)
    assert verify.find_damage(path, None) is None


# ---- databases, and Orbax ---------------------------------------------------------


def test_a_sound_database_of_one_item_is_searched_though_another_is_damaged(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(contents, "_SMALL_DATABASE_BYTES", 0)
    layout = flaxckpt.ArrayLayout(store="ocdbt")
    with flaxckpt.Checkpointer(tmp_path, items=("a", "b"), layout=layout) as run:
        for step, names in ((1, "wv"), (2, "w")):
            arrays = {name: np.arange(4096.0) for name in names}
            run.save(step, {"a": dict(arrays), "b": dict(arrays)})
    for item in ("a", "b"):
        shutil.rmtree(tmp_path / "1" / item)
        shutil.copytree(tmp_path / "2" / item, tmp_path / "1" / item)
    report = flaxckpt.verify(tmp_path, step=1)
    assert {"a/v", "b/v"} <= set(report.problems)
    assert "missing from the database" in report.problems["a/v"]


def test_damaged_items_of_orbax_are_found(tmp_path):
    path = tmp_path / "c"
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler("a", "b")) as checkpointer:
        states = {name: {"w": np.arange(4.0)} for name in "ab"}
        checkpointer.save(
            path,
            ocp.args.Composite(**{n: ocp.args.StandardSave(states[n]) for n in "ab"}),
        )
    assert flaxckpt.verify(path).ok
    (path / "b" / "_METADATA").write_bytes(b"{")
    report = flaxckpt.verify(path)
    assert set(report.problems) == {"b"}


def test_the_first_fault_is_enough_if_nobody_reads_the_others(tmp_path):
    layout = {"codec": "zstd", "checksum": False}
    state = {name: np.zeros(2**21) for name in "rstu"}
    path = save(tmp_path / "c", state, **layout)
    for name in state:
        (path / f"state/{name}/c.0").write_bytes(b"\xff" * 9)
    assert set(flaxckpt.verify(path).problems) == {*state}
    report = verify.verify_checkpoint(path, None, thorough=False)
    assert 1 <= len(report.problems) < 4
