"""What `verify` finds, and what becomes of steps that are damaged."""

import errno
import itertools
import json
import logging
import os
import pickle
import re
import shutil

import jax
import numpy as np
import pytest
import tensorstore as ts

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN
from tests.helpers import (
    chunks,
    old_stores,
    programs,
    run_files,
    seams,
    strategies,
    system_calls,
)
from tests.helpers.chunks import flip
from tests.helpers.files import flip_bit

CODECS = [*itertools.product(("none", "compact", "zstd"), (3, 2))]
LAYOUTS = {
    f"{codec} zarr{version}": flaxckpt.ArrayLayout(codec=codec, zarr_version=version)
    for codec, version in CODECS
}


class Iterator:
    """A dataset iterator, as far as checkpoints know it."""

    def __init__(self):
        self.position = 7

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def state(step):
    return {
        "w": np.full((4, 4), float(step)),
        "table": np.arange(4096, dtype=np.int32).reshape(64, 64) // 7 + step,
        "name": f"step {step}",
        "step": step,
    }


def run(root, *steps, layout=None, is_old=False, **options):
    """A run with some steps; if it is old, with directories of chunk files."""
    ckpt = flaxckpt.Checkpointer(root, layout=layout, **options)
    for step in steps:
        ckpt.save(step, state(step), metrics={"loss": 0.5}, dataset=Iterator())
    ckpt.wait()
    for step in steps if is_old else ():
        old_stores.make_directories(root / str(step))
    return ckpt


def files(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


@pytest.fixture(params=itertools.product(sorted(LAYOUTS), (False, True)), ids=str)
def layout(request):
    """Options of `run`: each layout, in a database and in directories."""
    name, is_old = request.param
    return {"layout": LAYOUTS[name], "is_old": is_old}


# ---- what is found --------------------------------------------------------------


def test_good_checkpoint_has_no_problems(tmp_path, layout):
    run(tmp_path, 1, **layout)
    report = flaxckpt.verify(tmp_path, step=1)
    assert report.ok, str(report)
    assert (report.step, report.format, report.path) == (
        1,
        "flaxckpt",
        str(tmp_path / "1"),
    )
    assert (report.problems, report.unread, report.unchecked) == ({}, {}, {})
    assert report.extra == ()
    compared = [f for f in files(tmp_path / "1") if f.suffix != ".json"]
    assert report.bytes_checked > 0.5 * sum(f.stat().st_size for f in compared)
    assert f"{tmp_path / '1'} is good" in str(report)
    assert " kB checked in " in str(report)  # not 0.0 MB
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.sampled(5)
def test_detects_every_flipped_byte(tmp_path, layout):
    """The first, the last and some bytes between of each file; a bit of each."""
    run(tmp_path, 1, **layout)
    flips = 0
    for file in files(tmp_path / "1"):
        content = file.read_bytes()
        for at in {*range(0, len(content), 1 + len(content) // 4), len(content) - 1}:
            changed = bytearray(content)
            changed[at] ^= 1 << (at % 8)
            file.write_bytes(changed)
            report = flaxckpt.verify(tmp_path / "1")
            assert report.problems, f"{file} at {at}"
            flips += 1
        file.write_bytes(content)
    assert flips > 30
    assert flaxckpt.verify(tmp_path / "1").ok


@pytest.mark.sampled(3)
def test_detects_every_missing_or_truncated_file(tmp_path, layout):
    run(tmp_path, 1, **layout)
    for file in files(tmp_path / "1"):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        assert flaxckpt.verify(tmp_path / "1").problems, file
        file.unlink()
        assert flaxckpt.verify(tmp_path / "1").problems, file
        file.write_bytes(content)
    assert flaxckpt.verify(tmp_path / "1").ok


@pytest.mark.sampled(7)
@pytest.mark.parametrize("added", [b" ", b"\n", b"\0", b"x"])
def test_detects_every_file_with_extra_bytes(tmp_path, layout, added):
    run(tmp_path, 1, **layout)
    for file in files(tmp_path / "1"):
        content = file.read_bytes()
        file.write_bytes(content + added)
        assert flaxckpt.verify(tmp_path / "1").problems, file
        file.write_bytes(content)
    assert flaxckpt.verify(tmp_path / "1").ok


def test_detects_every_missing_directory(tmp_path, layout):
    run(tmp_path / "run", 1, **layout)
    for directory in [p for p in (tmp_path / "run/1").rglob("*") if p.is_dir()]:
        directory.rename(tmp_path / "aside")
        assert flaxckpt.verify(tmp_path / "run/1").problems, directory
        (tmp_path / "aside").rename(directory)
    assert flaxckpt.verify(tmp_path / "run/1").ok


@pytest.mark.parametrize("lost", ["metrics", "metrics/metrics", "metrics/digests"])
@pytest.mark.parametrize("measured", ["at the save", "later", "both"])
def test_detects_missing_metrics_whenever_added(tmp_path, measured, lost):
    metrics = None if measured == "later" else {"loss": 0.5}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1), metrics=metrics)
    if measured != "at the save":
        ckpt.add_metrics(1, {"accuracy": 0.25})
    assert ckpt.verify(1).ok
    (tmp_path / "1" / lost).rename(tmp_path / "aside")
    name = "metrics/digests" if lost == "metrics/digests" else "metrics/metrics"
    assert "missing" in ckpt.verify(1).problems[name]
    strategies.assert_same(state(1), ckpt.restore())
    ckpt.add_metrics(1, {"accuracy": 0.5})
    assert ckpt.verify(1).ok
    assert ckpt.metrics(1)["accuracy"] == 0.5


def test_rejects_step_renamed_to_another_number(tmp_path, caplog):
    run(tmp_path, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    ckpt = flaxckpt.Checkpointer(tmp_path)
    assert "was saved as step 1" in ckpt.verify(2).problems["."]
    with pytest.raises(errors.DamagedCheckpointError, match="was saved as step 1"):
        ckpt.restore(step=2)
    with pytest.raises(errors.DamagedCheckpointError, match="was saved as step 1"):
        ckpt.restore_dataset(Iterator(), step=2)
    strategies.assert_same(state(1), ckpt.restore())
    assert ckpt.restored_step == 1
    assert ckpt.steps() == [1]
    assert "was saved as step 1" in ckpt.damaged()[2]


def test_copied_step_loads_and_verifies(tmp_path):
    run(tmp_path / "run", 1)
    for name in ("copy", "pretrained/7"):
        shutil.copytree(tmp_path / "run/1", tmp_path / name)
        strategies.assert_same(state(1), flaxckpt.load(tmp_path / name))
        assert flaxckpt.verify(tmp_path / name).ok
    with pytest.raises(errors.DamagedCheckpointError, match="load this path directly"):
        flaxckpt.load(tmp_path / "pretrained")  # of a run, it would be a mix-up


def test_accepts_step_converted_to_another_number(tmp_path):
    run(tmp_path / "run", 5)
    flaxckpt.convert(tmp_path / "run", tmp_path / "new/0")
    ckpt = flaxckpt.Checkpointer(tmp_path / "new")
    strategies.assert_same(state(5), ckpt.restore(step=0))
    assert ckpt.verify(0).ok


def test_reports_extra_files_without_failing(tmp_path, layout):
    run(tmp_path, 1, **layout)
    (tmp_path / "1/notes.txt").write_text("mine")
    (tmp_path / "1/state/.c.0.rsync").write_bytes(b"0")
    (tmp_path / "1/PINNED").touch()
    report = flaxckpt.verify(tmp_path / "1")
    assert report.extra == ("notes.txt", "state/.c.0.rsync")
    assert report.ok
    assert "not in the checkpoint: notes.txt" in str(report)


@pytest.mark.parametrize("is_old", [False, True])
def test_reports_problems_by_leaf_and_file(tmp_path, is_old):
    run(tmp_path, 1, is_old=is_old)
    arrays = tmp_path / "1/state"
    flip(arrays, "w/c.0.0", 3)
    flip_bit(tmp_path / "1/dataset/process_0-of-1.json", 3)
    if is_old:
        (arrays / "table/c.0.0").unlink()
    else:
        flip(arrays, "table/c.0.0", 9)
    report = flaxckpt.verify(tmp_path)
    assert set(report.problems) == {"w", "table", "dataset/process_0-of-1.json"}
    assert "c.0.0 has changed" in report.problems["w"]
    table = "c.0.0 is missing" if is_old else "c.0.0 has changed"
    assert table in report.problems["table"]
    assert "is damaged" in str(report)
    assert not report.ok


def refused(path):
    """The leaves for which a load refuses the checkpoint."""
    with pytest.raises(errors.DamagedCheckpointError) as told:
        flaxckpt.load(path)
    count, word, *_ = str(told.value).split()
    assert word in ("leaf", "leaves")
    return int(count)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_reports_unreadable_leaves(tmp_path, layout, damage):
    """As many as a load refuses, whether a file holds one of them or all."""
    saved = {f"l{n}": np.full(2, float(n)) for n in range(20)} | {"name": "text"}
    flaxckpt.save(tmp_path / "c", saved, layout=layout["layout"])
    if layout["is_old"]:
        old_stores.make_directories(tmp_path / "c")
    report = flaxckpt.verify(tmp_path / "c")
    assert (report.leaves, report.unreadable, report.summary) == (21, {}, "")
    is_database = not layout["is_old"]
    arrays = "d/tree" if is_database else "l7/*"
    file = max((tmp_path / "c/state").glob(arrays), key=lambda f: f.stat().st_size)
    if damage == "missing":
        file.unlink()
    else:
        flip_bit(file)
    report = flaxckpt.verify(tmp_path / "c")
    wanted = {f"l{n}" for n in range(20)} if is_database else {"l7"}
    assert set(report.unreadable) == wanted
    assert len(wanted) == refused(tmp_path / "c")
    assert report.summary.startswith(f"{len(wanted)} of 21 leaves cannot be read: ")
    assert report.summary in str(report)
    assert len(report.summary) < 200
    if is_database:
        state = "missing" if damage == "missing" else "damaged"
        name = file.relative_to(tmp_path / "c").as_posix()
        assert f"{name} is {state} (l0, l1, l10, …)" in report.summary


def test_damaged_description_makes_all_leaves_unreadable(tmp_path):
    run(tmp_path, 1)
    flip_bit(tmp_path / "1/flaxckpt.json", 100)
    report = flaxckpt.verify(tmp_path, step=1)
    assert (report.leaves, report.unreadable) == (None, {})
    assert "no leaf can be read" in str(report)


def test_damaged_auxiliary_files_make_no_leaf_unreadable(tmp_path, layout):
    run(tmp_path, 1, **layout)
    flip_bit(tmp_path / "1/state/_sharding", 0)
    flip_bit(tmp_path / "1/dataset/process_0-of-1.json", 3)
    report = flaxckpt.verify(tmp_path, step=1)
    assert len(report.problems) == 2
    assert (report.leaves, report.unreadable, report.summary) == (4, {}, "")


def test_load_checks_digests_of_zarr_2_arrays(tmp_path):
    for (name, layout), is_old in itertools.product(LAYOUTS.items(), (False, True)):
        if layout.zarr_version == 3:
            continue
        path = tmp_path / f"{name} {is_old}" / "1"
        run(path.parent, 1, layout=layout, is_old=is_old)
        arrays = [*path.glob("state/table/*"), *path.glob("state/d/*")]
        largest = max(arrays, key=lambda file: file.stat().st_size)
        flip_bit(largest)
        with pytest.raises(errors.DamagedCheckpointError, match="has changed"):
            flaxckpt.load(path)
        with pytest.raises(errors.DamagedCheckpointError, match="has changed"):
            flaxckpt.convert(path, tmp_path / f"{name} {is_old}.msgpack")


@pytest.mark.parametrize("is_old", [False, True])
def test_verify_lists_leaves_without_checksums_as_unchecked(tmp_path, is_old):
    layout = flaxckpt.ArrayLayout(checksum=False)
    run(tmp_path, 1, layout=layout, is_old=is_old)
    report = flaxckpt.verify(tmp_path)
    assert report.ok
    assert set(report.unchecked) == {"w", "table", "step"}
    file, offset, _ = chunks.place(tmp_path / "1/state", "w/c.0.0")
    file.write_bytes(file.read_bytes()[: offset + 5])
    told = "bytes instead of" if is_old else "ends before the chunk c.0.0 does"
    assert told in flaxckpt.verify(tmp_path).problems["w"]
    file.unlink()
    report = flaxckpt.verify(tmp_path)
    name = "w" if is_old else str(file.relative_to(tmp_path / "1"))
    assert list(report.problems) == [name], "and not each leaf in it once more"
    assert "w" in report.unreadable
    assert "w" not in report.unchecked


def test_verify_reports_edited_metrics_and_run_drops_them(tmp_path, caplog):
    ckpt = run(tmp_path, 1)
    ckpt.add_metrics(1, {"accuracy": 0.25})
    assert ckpt.verify(1).ok
    file = tmp_path / "1/metrics/metrics"
    file.write_text(file.read_text().replace("0.25", "0.95"))
    assert list(ckpt.verify(1).problems) == ["metrics/metrics"]
    assert ckpt.metrics(1) == {}
    assert "are lost" in caplog.text
    strategies.assert_same(state(1), ckpt.restore())


def test_reads_and_decodes_other_formats(tmp_path):
    run(tmp_path / "run", 1)
    for name in ("model.safetensors", "model.msgpack"):
        flaxckpt.convert(tmp_path / "run", tmp_path / name)
        report = flaxckpt.verify(tmp_path / name)
        assert report.ok, str(report)
        assert {"w", "table"} <= set(report.unchecked)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-100])
        assert flaxckpt.verify(tmp_path / name).problems


@pytest.mark.parametrize("name", ["flaxckpt.json", "commit_success.txt"])
def test_shows_differing_manifest_digests(tmp_path, name):
    run(tmp_path, 1)
    file = tmp_path / "1" / name
    content = file.read_text()
    if name == "flaxckpt.json":
        file.write_text(content + " ")
    else:
        last = content[-3]  # of the digest
        file.write_text(f"{content[:-3]}{'0' if last == '1' else '1'}{content[-2:]}")
    [why] = flaxckpt.verify(tmp_path / "1").problems.values()
    assert "flaxckpt.json, or its digest in commit_success.txt, has changed" in why
    begin = "sha256:" if name == "flaxckpt.json" else "…"
    wanted, found = re.findall(rf"(?:wanted|found) {begin}([0-9a-f]+)", why)
    assert wanted != found


def as_orbax(path):
    """Leaves of a checkpoint of ours what Orbax would have written."""
    (path / "flaxckpt.json").unlink()
    (path / "commit_success.txt").unlink()


@pytest.mark.parametrize("is_old", [False, True])
def test_checks_chunk_checksums_of_other_writers(tmp_path, is_old):
    run(tmp_path, 1, is_old=is_old)
    as_orbax(tmp_path / "1")
    report = flaxckpt.verify(tmp_path / "1")
    assert report.ok, str(report)
    assert (report.format, report.unchecked) == ("orbax", {})
    flip(tmp_path / "1/state", "w/c.0.0", 3)
    assert list(flaxckpt.verify(tmp_path / "1").problems) == ["w"]


@pytest.mark.parametrize("is_old", [False, True])
def test_marks_damaged_steps_of_other_writers(tmp_path, is_old):
    ckpt = run(tmp_path, 1, 2, is_old=is_old)
    as_orbax(tmp_path / "2")
    file, offset, _ = chunks.place(tmp_path / "2/state", "table/c.0.0")
    file.write_bytes(file.read_bytes()[: offset + 5])
    strategies.assert_same(state(1), ckpt.restore(state(0)))
    assert ckpt.damaged().keys() == {2}
    # The cut ends the database, so the leaf after it is lost, too.
    assert ("table" if is_old else ": 1 leaf of ") in ckpt.damaged()[2]
    assert "table" in flaxckpt.verify(tmp_path / "2").problems


@pytest.mark.parametrize("is_old", [False, True])
def test_verifies_databases_by_their_values(tmp_path, is_old):
    for codec in ("none", "compact"):
        layout = flaxckpt.ArrayLayout(codec=codec)
        run(tmp_path / codec, 1, layout=layout)
        path = tmp_path / codec / "1"
        if is_old:
            old_stores.make_databases(path)
        assert not any("state/d/0" in name for name in manifest(path)["digests"])
        report = flaxckpt.verify(path)
        assert report.ok, str(report)
        assert (report.unchecked, report.extra) == ({}, ())
        data = [file for file in path.glob("state/d/*") if file.name != "tree"]
        largest = max(data, key=lambda file: file.stat().st_size)
        flip_bit(largest)
        report = flaxckpt.verify(path)
        assert list(report.problems) == ["table"]
        assert report.places["table"].startswith("state/d/")


@pytest.mark.parametrize("codec", ["none", "compact"])
def test_verify_names_keys_missing_from_old_database(tmp_path, codec):
    layout = flaxckpt.ArrayLayout(codec=codec, chunk_bytes=4096)
    run(tmp_path, 1, layout=layout)
    old_stores.make_databases(tmp_path / "1")
    assert flaxckpt.verify(tmp_path / "1").ok
    base = {"driver": "file", "path": f"{tmp_path}/1/state/"}
    values = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = sorted(key.decode() for key in values.list().result())
    chunks = [key for key in keys if key.startswith("table/c.")]
    assert len(chunks) > 3
    for number, gone in enumerate((chunks[2], chunks[3])):
        values.write(gone, None).result()
        problems = flaxckpt.verify(tmp_path / "1").problems
        name = chunks[2].removeprefix("table/")
        rest = " and 1 more are missing" if number else " is missing"
        assert problems == {"table": f"{name}{rest} from the database"}
    values.write("w/zarr.json", None).result()
    assert flaxckpt.verify(tmp_path / "1").problems.keys() == {"table", "w"}


def manifest(path):
    return json.loads((path / "flaxckpt.json").read_text())


@pytest.mark.parametrize("is_old", [False, True])
def test_verify_reports_io_errors_as_unread(tmp_path, monkeypatch, is_old):
    ckpt = run(tmp_path, 1, is_old=is_old)
    file = "table/c.0.0" if is_old else "d/0.small.0"
    system_calls.fail(monkeypatch, os, "open", errno.EIO, file)
    report = ckpt.verify(1)
    assert (list(report.problems), list(report.unread)) == (
        [],
        ["table"] if is_old else ["state/d/0.small.0"],
    )
    assert not report.ok
    assert "could not be read" in str(report)


def test_missing_checkpoint_raises_not_found_error(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.verify(tmp_path / "none")
    with pytest.raises(errors.CheckpointNotFoundError, match="no step 3"):
        run(tmp_path, 1).verify(3)


# ---- falling back ---------------------------------------------------------------


def test_retention_does_not_count_damaged_steps(tmp_path):
    ckpt = run(tmp_path, 5, 10, 15, 20)
    flip(tmp_path / "15/state", "w/c.0.0", 3)
    flip(tmp_path / "20/state", "w/c.0.0", 3)
    ckpt.close()
    again = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(3)])
    strategies.assert_same(state(10), again.restore())
    assert again.steps() == [5, 10]
    assert again.latest_step() == 10
    for step in (11, 12, 13):
        again.save(step, state(step)).wait()
    assert again.steps() == [11, 12, 13]
    assert set(again.damaged()) == {15, 20}
    assert "w: c.0.0 has changed" in again.damaged()[20]
    assert again.explain()[20] == [f"damaged: {again.damaged()[20]}"]
    assert again.prune(dry_run=True) == ()
    assert again.prune() == ()
    assert (tmp_path / "20").is_dir()


def test_run_replaces_marked_step(tmp_path):
    ckpt = run(tmp_path, 1, 2)
    ckpt.pin(2)
    flip(tmp_path / "2/state", "w/c.0.0", 3)
    ckpt.restore()
    assert ckpt.damaged().keys() == {2}
    ckpt.save(2, state(2)).wait()
    assert (ckpt.steps(), ckpt.damaged()) == ([1, 2], {})
    assert ckpt.verify(2).ok
    assert run_files.is_pinned(tmp_path / "2")


@pytest.mark.parametrize("on_exists", ["error", "skip", "overwrite"])
def test_run_replaces_remains_of_damaged_step(tmp_path, on_exists):
    ckpt = run(tmp_path, 1, 2)
    for name in ("flaxckpt.json", "_CHECKPOINT_METADATA", "state/_METADATA"):
        (tmp_path / "2" / name).unlink()
    strategies.assert_same(state(1), ckpt.restore())
    assert ckpt.damaged().keys() == {2}
    assert ckpt.save(2, state(2), on_exists=on_exists).wait().skipped is None
    strategies.assert_same(state(2), ckpt.restore(step=2))


def test_leaves_foreign_directory_named_like_step_alone(tmp_path):
    ckpt = run(tmp_path, 1)
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024/notes.txt").write_text("mine")
    strategies.assert_same(state(1), ckpt.restore())
    assert ckpt.damaged() == {}
    with pytest.raises(errors.CheckpointExistsError):
        ckpt.save(2024, state(2024))
    assert (tmp_path / "2024/notes.txt").read_text() == "mine"


def test_explicit_restore_tries_marked_step_and_unmarks_if_good(tmp_path):
    ckpt = run(tmp_path, 1, 2)
    file = tmp_path / "2/state/d/0.small.0"
    good = file.read_bytes()
    flip(tmp_path / "2/state", "w/c.0.0", 3)
    ckpt.restore()
    with pytest.raises(errors.DamagedCheckpointError, match="w: c"):
        ckpt.restore(step=2)
    # A part of it that is good does not make it good.
    ckpt.restore({"step": 0}, step=2, unused="ignore")
    assert ckpt.damaged().keys() == {2}
    file.write_bytes(good)  # as from a backup
    strategies.assert_same(state(2), ckpt.restore(step=2))
    assert (ckpt.steps(), ckpt.damaged()) == ([1, 2], {})


def test_delete_removes_marked_step(tmp_path):
    ckpt = run(tmp_path, 1, 2)
    flip(tmp_path / "2/state", "w/c.0.0", 3)
    ckpt.restore()
    ckpt.delete(2)
    assert ckpt.damaged() == {}
    assert not (tmp_path / "2").exists()


def test_marks_nothing_without_good_step(tmp_path):
    ckpt = run(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"{step}/state", "w/c.0.0", 3)
    for _ in range(2):
        with pytest.raises(errors.DamagedCheckpointError, match=str(tmp_path / "2")):
            ckpt.restore()
    assert (ckpt.steps(), ckpt.damaged()) == ([1, 2], {})


def test_run_with_only_damaged_steps_does_not_restart(tmp_path):
    ckpt = run(tmp_path, 1, 2)
    flip(tmp_path / "2/state", "w/c.0.0", 3)
    ckpt.restore()
    ckpt.delete(1)
    on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False)
    with pytest.raises(errors.DamagedCheckpointError, match="only damaged steps"):
        on_step.restore_or_init(state(0))


def test_reader_marks_nothing(tmp_path):
    run(tmp_path, 1, 2).close()
    flip(tmp_path / "2/state", "w/c.0.0", 3)
    reader = flaxckpt.Checkpointer(tmp_path, read_only=True)
    strategies.assert_same(state(1), reader.restore())
    assert reader.damaged() == {}


def test_transient_disk_error_marks_nothing(tmp_path, monkeypatch, caplog):
    ckpt = run(tmp_path, 1, 2)
    real = seams.current("files.open_regular_file")

    def fail(path, **options):
        if "/2/" in str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, **options)

    seams.replace(monkeypatch, "files.open_regular_file", fail)
    strategies.assert_same(state(1), ckpt.restore())
    monkeypatch.undo()
    assert (ckpt.steps(), ckpt.damaged()) == ([1, 2], {})
    assert "step 2 may be good" in caplog.text
    strategies.assert_same(state(2), ckpt.restore())


def test_permission_error_marks_nothing(tmp_path, monkeypatch):
    ckpt = run(tmp_path, 1, 2)

    def denied(path, *, max_bytes):
        if str(path).endswith("2/flaxckpt.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, max_bytes=max_bytes)

    read = seams.current("disk.read")
    seams.replace(monkeypatch, "disk.read", denied)
    system_calls.fail(monkeypatch, os, "open", errno.EACCES, "2/flaxckpt.json")
    strategies.assert_same(state(1), ckpt.restore())
    monkeypatch.undo()
    assert ckpt.damaged() == {}


def test_restore_warns_if_marking_fails(tmp_path, monkeypatch, caplog):
    ckpt = run(tmp_path, 1, 2)
    flip(tmp_path / "2/state", "w/c.0.0", 3)

    def fail(path, content, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    seams.replace(monkeypatch, "disk.replace", fail)
    strategies.assert_same(state(1), ckpt.restore())
    assert "could not be marked: [Errno 30]" in caplog.text


def test_load_and_other_processes_respect_mark(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="flaxckpt")
    ckpt = run(tmp_path, 1, 2)
    flip(tmp_path / "2/state", "w/c.0.0", 3)
    ckpt.restore()
    mark = json.loads((tmp_path / "2/DAMAGED").read_text())
    assert mark.keys() == {"reason", "time"}
    strategies.assert_same(state(1), flaxckpt.load(tmp_path))
    assert "is marked as damaged" in caplog.text
    assert flaxckpt.Checkpointer(tmp_path, read_only=True).damaged().keys() == {2}
    (tmp_path / "2/DAMAGED").write_text("")
    assert ckpt.damaged() == {2: "its marker gives no reason"}
    seen = list(ckpt.new_steps(timeout_secs=0, poll_secs=0.01))
    assert seen == [1]


def test_damaged_dataset_state_marks_step(tmp_path):
    ckpt = run(tmp_path, 1, 2)
    flip_bit(tmp_path / "2/dataset/process_0-of-1.json", 3)
    restored, step = ckpt.restore_latest(state(0), dataset=Iterator())
    assert step == 1
    assert ckpt.damaged().keys() == {2}
    assert jax.tree.leaves(restored)


@pytest.mark.slow
def test_duration_excludes_imports(tmp_path):
    flaxckpt.save(tmp_path / "c", {"w": np.ones((4, 4), np.float32)})
    code = (
        "import sys, flaxckpt\n"
        "from flaxckpt._checkpoint import verify\n"
        "start = verify.time.monotonic\n"
        "seen = []\n"
        "def clock():\n"
        "    seen.append(set(sys.modules))\n"
        "    return start()\n"
        "verify.time = type(sys)('clock')\n"
        "verify.time.monotonic = clock\n"
        "assert flaxckpt.verify(sys.argv[1]).ok\n"
        "late = seen[-1] - seen[0]\n"
        "assert not late & {'jax', 'flax', 'tensorstore'}, late\n"
    )
    programs.run("-c", code, tmp_path / "c")
