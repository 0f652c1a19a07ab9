"""A staging directory before the run's own: what is acknowledged where, and found."""

import collections
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import time

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.configs import CheckpointConfig
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import BestN, LatestN
from tests.helpers import chunks, run_files, seams, store_servers, strategies
from tests.helpers import faulty_store as faulty
from tests.helpers.files import flip_bit
from tests.helpers.interruptions import end_threads

DIRECTORIES = ("file", "memory", "moto")
LAYOUTS = [flaxckpt.ArrayLayout(), flaxckpt.ArrayLayout(codec="zstd")]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    seams.replace(monkeypatch, "requests.first_pause_secs", 1e-4)
    seams.replace(monkeypatch, "requests.longest_pause_secs", 1e-4)


def state(step, text="a"):
    return {"w": jnp.full((4, 4), float(step)), "n": step, "text": text}


def damage(step):
    """Changes a byte of an array's value."""
    chunks.flip(step / "state", "w/c.0.0", 5)


def steps_in(directory):
    return set(flaxckpt.Checkpointer(directory, read_only=True).steps())


def kinds(directory):
    return collections.Counter(event.kind for event in run_files.read_events(directory))


# ---- what is where ----------------------------------------------------------------


@pytest.mark.parametrize("copies", [0, 1])
def test_staging_keeps_all_steps_without_policies(tmp_path, copies):
    staging = tmp_path / "ssd"
    options = {"keep_staging": [], "staging_copies": copies}
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging, **options) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).wait()
            ckpt.wait_for_uploads()
    assert {path.name for path in staging.iterdir() if path.is_dir()} == {"1", "2", "3"}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("file", LAYOUTS[0]),
        ("memory", LAYOUTS[1]),
        pytest.param("moto", LAYOUTS[1], marks=pytest.mark.slow),
    ],
    ids=["file-raw", "memory-zstd", "moto-zstd"],
)
def test_each_tier_keeps_steps_by_its_own_policies(store_path, tmp_path, kind, layout):
    path, staging = store_path(kind), tmp_path / "ssd"
    options = {"keep": [LatestN(3)], "keep_staging": [LatestN(2)], "layout": layout}
    with flaxckpt.Checkpointer(path, staging=staging, **options) as ckpt:
        for step in range(6):
            result = ckpt.save(step, state(step)).wait()
            assert result.tier == "staging"
            assert result.path == str(staging / str(step))
            ckpt.wait_for_uploads()
        assert ckpt.steps() == [3, 4, 5]
        assert steps_in(path) == {3, 4, 5}
        assert {p.name for p in staging.iterdir() if p.is_dir()} == {"4", "5"}
        assert ckpt.keep == (LatestN(3),)
        assert ckpt.explain() == {
            3: ["LatestN(3)"],
            4: ["LatestN(3)", "staging: LatestN(2)"],
            5: ["newest", "LatestN(3)", "staging: newest", "staging: LatestN(2)"],
        }
    for step in (3, 4, 5):
        strategies.assert_same(state(step), flaxckpt.load(path, step=step))
        assert flaxckpt.verify(path / str(step)).ok
    assert not list(staging.rglob(run_files.NOT_UPLOADED))
    there = {p.name for p in path.iterdir()}
    assert there == {"3", "4", "5", "events.jsonl"}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_directory_records_events_and_metadata_of_staging(store_path, tmp_path, kind):
    path = store_path(kind)
    told = []
    for run in range(2):
        with flaxckpt.Checkpointer(
            path, staging=tmp_path / "ssd", metadata={"run": run}, sinks=[told.append]
        ) as ckpt:
            ckpt.save(run, state(run))
            ckpt.wait_for_uploads()
            assert ckpt.run_metadata == {"run": run}
        assert flaxckpt.Checkpointer(path, read_only=True).run_metadata == {"run": run}
        assert kinds(path)["uploaded"] == kinds(path)["committed"] == run + 1
    uploaded = [event for event in told if event.kind == "uploaded"]
    assert [event.step for event in uploaded] == [0, 1]
    assert uploaded[0].path == str(path / "0")
    assert uploaded[0].details["bytes"] > 0
    assert [e.details["tier"] for e in told if e.kind == "committed"] == ["staging"] * 2


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_run_on_two_tiers_matches_run_without_staging(store_path, tmp_path, kind):
    def train(path, last, **options):
        batches = StepIndexed(lambda i: jnp.float32(i))
        with flaxckpt.Checkpointer(path, keep=[LatestN(2)], **options) as ckpt:
            on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=2, dataset=batches)
            begun, start = on_step.restore_or_init({"sum": jnp.float32(0), "step": 0})
            for step in range(start + 1, last + 1):
                begun = {"sum": begun["sum"] + next(batches), "step": step}
                on_step(step, begun, metrics={"loss": 1 / step})
        return begun, start

    path = store_path(kind)
    whole, _ = train(tmp_path / "whole", 9)
    staged = {"staging": tmp_path / "ssd"}
    train(path, 5, **staged)
    parts, start = train(path, 9, **staged)
    assert start == 5
    strategies.assert_same(whole, parts)
    strategies.assert_same(whole, flaxckpt.load(path))
    assert steps_in(path) == {8, 9}
    shutil.rmtree(tmp_path / "ssd")
    assert train(path, 9, **staged)[1] == 9


@pytest.mark.parametrize("permissions", [None, 0o750])
def test_links_unchanged_files_in_directory(tmp_path, permissions):
    """Those of a frozen array, unless the directory has the file with another mode."""
    frozen, same = jnp.arange(2**19, dtype=jnp.float32), []
    for step, mode in enumerate((permissions, permissions, 0o700)):
        # Each resume knows nothing of the files before.
        with flaxckpt.Checkpointer(
            tmp_path / "run", staging=tmp_path / "ssd", permissions=mode
        ) as ckpt:
            ckpt.save(step, {"frozen": frozen, **state(step)})
            ckpt.wait_for_uploads()
        same.append(tmp_path / f"run/{step}/state/d/0.0/frozen")
    assert same[0].samefile(same[1])
    assert not same[1].samefile(same[2])
    for step in range(3):
        assert flaxckpt.verify(tmp_path / f"run/{step}").ok
        assert flaxckpt.load(tmp_path / "run", step=step)["n"] == step


def test_saves_durably_in_directory_without_staging(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.save(1, state(1)).wait().tier == "directory"
        ckpt.wait_for_uploads()
        assert not (tmp_path / "run/1" / run_files.NOT_UPLOADED).exists()


# ---- what changes later -----------------------------------------------------------


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_metrics_and_marks_follow_step_to_any_tier(store_path, tmp_path, kind):
    path, staging = store_path(kind), tmp_path / "ssd"
    with flaxckpt.Checkpointer(path, staging=staging) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step), metrics={"a": step, "b": 0.0}).wait()
            ckpt.wait_for_uploads()
        assert not (staging / "1").exists()
        for step in (1, 2):  # 1 is in the directory only
            ckpt.add_metrics(step, {"loss": 1 / step, "b": 1.0})
            ckpt.pin(step)
        ckpt.wait_for_uploads()
        assert ckpt.best_step("loss", "min") == 2
        for step in (1, 2):
            wanted = {"a": step, "b": 1.0, "loss": 1 / step}
            assert ckpt.metrics(step) == ckpt.metadata(step).metrics == wanted
            assert run_files.is_pinned(path / str(step))
            assert flaxckpt.Checkpointer(path).metrics(step) == wanted
            ckpt.unpin(step)
        ckpt.wait_for_uploads()
        assert not any(run_files.is_pinned(path / str(step)) for step in (1, 2))
        # What somebody else has measured counts, too.
        flaxckpt.Checkpointer(path).add_metrics(2, {"elsewhere": 3.0})
        ckpt.reload()
        assert ckpt.metrics(2)["elsewhere"] == 3.0
        assert ckpt.best_step("elsewhere", "max") == 2
        ckpt.add_metrics(2, {"c": 5.0})
        ckpt.wait_for_uploads()
        found = flaxckpt.Checkpointer(path, read_only=True).metrics(2)
        assert (found["elsewhere"], found["c"]) == (3.0, 5.0)


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_directory_keeps_best_step_by_late_metrics(store_path, tmp_path, kind):
    path = store_path(kind)
    keep = [LatestN(1), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(
        path, staging=tmp_path / "ssd", keep=keep, keep_staging=[LatestN(4)]
    ) as ckpt:
        for step, loss in ((1, 3.0), (2, None), (3, None), (4, None)):
            ckpt.save(step, state(step), metrics=loss and {"loss": loss}).wait()
            ckpt.wait_for_uploads()
        assert steps_in(path) == {1, 4}
        ckpt.add_metrics(3, {"loss": 1.0})  # it comes back
        ckpt.wait_for_uploads()
        assert steps_in(path) == {3, 4}
        assert ckpt.best_step("loss", "min") == 3
        assert ckpt.steps() == [1, 2, 3, 4]
    strategies.assert_same(state(3), flaxckpt.load(path, step=3))


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_temporary_steps_can_be_made_permanent_on_both_tiers(
    store_path, tmp_path, kind
):
    path, staging = store_path(kind), tmp_path / "ssd"
    with flaxckpt.Checkpointer(path, staging=staging, keep=[LatestN(3)]) as ckpt:
        ckpt.save(1, state(1), temporary=True).wait()
        ckpt.wait_for_uploads()
        assert run_files.is_temporary(path / "1")
        ckpt.save(1, state(1), on_exists="skip").wait()
        ckpt.wait_for_uploads()
        assert not run_files.is_temporary(path / "1")
        ckpt.save(2, state(2), temporary=True)
        ckpt.save(3, state(3))
    assert steps_in(path) == {1, 3}


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_deletes_and_replaces_step_on_both_tiers(store_path, tmp_path, kind):
    path, staging = store_path(kind), tmp_path / "ssd"
    with flaxckpt.Checkpointer(path, staging=staging) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).wait()
            ckpt.wait_for_uploads()
        for step in (1, 3):
            with pytest.raises(errors.CheckpointExistsError, match="exists"):
                ckpt.save(step, state(step, "b"))
            skipped = ckpt.save(step, state(step, "b"), on_exists="skip").wait()
            assert skipped.skipped
            assert skipped.tier == ("directory" if step == 1 else "staging")
        ckpt.pin(1)
        for step in (1, 3):
            ckpt.save(step, state(step, "b"), on_exists="overwrite").wait()
            ckpt.wait_for_uploads()
            strategies.assert_same(state(step, "b"), flaxckpt.load(path, step=step))
        assert run_files.is_pinned(path / "1")
        ckpt.delete(3)
        ckpt.delete(2)
        assert ckpt.steps() == [1]
        assert steps_in(path) == {1}
        assert not (staging / "3").exists()
        with pytest.raises(errors.CheckpointNotFoundError):
            ckpt.delete(3)


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_pin_of_uploaded_step_survives_replacement(store_path, tmp_path, kind):
    path, staging = store_path(kind), tmp_path / "ssd"
    with flaxckpt.Checkpointer(path, staging=staging) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).wait()
            ckpt.wait_for_uploads()
        assert not (staging / "1").exists()
        ckpt.pin(1)
        ckpt.save(1, state(1, "b"), on_exists="overwrite").wait()
        assert run_files.is_pinned(staging / "1")  # before the upload, too
        ckpt.wait_for_uploads()
        assert run_files.is_pinned(path / "1")
        ckpt.unpin(1)
        ckpt.wait_for_uploads()
        for directory in (staging, path):
            assert not run_files.is_pinned(directory / "1")


def test_uploads_changes_made_during_upload(tmp_path, monkeypatch):
    path = faulty.new_path("tiers-changes")
    real = seams.current("transaction.copy")
    with flaxckpt.Checkpointer(path, staging=tmp_path / "ssd") as ckpt:

        def upload(*given, **options):
            marker = real(*given, **options)
            ckpt.add_metrics(1, {"late": 2.0})
            ckpt.make_permanent(1)
            ckpt.pin(1)
            return marker

        seams.replace(monkeypatch, "transaction.copy", upload)
        ckpt.save(1, state(1), metrics={"loss": 1.0}, temporary=True).wait()
        ckpt.wait_for_uploads()
        monkeypatch.undo()
        assert not ckpt._run.uploads.pending()
        assert flaxckpt.Checkpointer(path).metrics(1) == {"loss": 1.0, "late": 2.0}
        assert run_files.is_pinned(path / "1")
        assert not run_files.is_temporary(path / "1")
        assert ckpt.verify(1).ok
        assert flaxckpt.verify(path / "1").ok


@pytest.mark.parametrize("is_during", [True, False])
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_uploads_deletions_of_items(store_path, tmp_path, monkeypatch, kind, is_during):
    path, staging = store_path(kind), tmp_path / "ssd"
    real = seams.current("transaction.copy")
    kept, other = state(1), state(1, "b")

    def delete(ckpt):
        for item in ("dataset", "b"):
            ckpt.delete(1, item=item)

    with flaxckpt.Checkpointer(path, staging=staging, items=("a", "b")) as ckpt:

        def copy(*given, **options):
            marker = real(*given, **options)
            delete(ckpt)
            return marker

        if is_during:
            seams.replace(monkeypatch, "transaction.copy", copy)
        dataset = StepIndexed(lambda i: i)
        ckpt.save(1, {"a": kept, "b": other}, dataset=dataset).wait()
        ckpt.wait_for_uploads()
        monkeypatch.undo()
        if not is_during:
            delete(ckpt)
            ckpt.wait_for_uploads()
    for directory in (staging, path):
        with flaxckpt.Checkpointer(directory, read_only=True) as ckpt:
            assert ckpt.verify(1).ok
            (why,) = ckpt.explain().values()
            assert {"item b deleted", "dataset state deleted"} <= {*why}
            assert "b" not in ckpt.restore(step=1)


def test_upload_waits_for_save_renaming_its_step(tmp_path, monkeypatch):
    """The upload of an earlier step may find a step before its save has ended."""
    real = seams.current("rename.publish")
    told = []
    with flaxckpt.Checkpointer(
        tmp_path / "run", staging=tmp_path / "ssd", sinks=[told.append]
    ) as ckpt:

        def publish(*given, **options):
            real(*given, **options)
            ckpt._run.uploads.start()
            time.sleep(0.5)  # the upload comes to the step, which is still claimed

        seams.replace(monkeypatch, "rename.publish", publish)
        ckpt.save(1, state(1)).wait()
    assert [event.kind for event in told if event.kind in ("uploaded", "failed")] == [
        "uploaded"
    ]
    strategies.assert_same(state(1), flaxckpt.load(tmp_path / "run"))


def test_does_not_replace_step_during_upload(tmp_path):
    path = faulty.new_path("tiers-replaced")
    with flaxckpt.Checkpointer(path, staging=tmp_path / "ssd") as ckpt:
        ckpt.save(1, state(1)).wait()
        with ckpt._run.uploads.step_lock.get():
            replacing = ckpt.save(1, state(1, "b"), on_exists="overwrite")
            with pytest.raises(errors.CheckpointTimeoutError):
                replacing.wait(timeout_secs=0.2)
            strategies.assert_same(state(1), flaxckpt.load(tmp_path / "ssd/1"))
        replacing.wait()
    strategies.assert_same(state(1, "b"), flaxckpt.load(path))


def test_step_replaced_by_another_job_is_not_mixed_into_its_upload(
    tmp_path, monkeypatch, caplog
):
    path, staging, other = tmp_path / "run", tmp_path / "ssd", tmp_path / "other"
    real = seams.current("transaction.copy")
    with flaxckpt.Checkpointer(other) as ckpt:
        ckpt.save(1, state(1, "b")).wait()

    def copy(*given, **options):
        marker = real(*given, **options)
        if (other / "1").exists():
            shutil.copy(staging / "1/NOT_UPLOADED", other / "1")
            (staging / "1").rename(tmp_path / "before")
            (other / "1").rename(staging / "1")
        return marker

    with flaxckpt.Checkpointer(path, staging=staging) as ckpt:
        seams.replace(monkeypatch, "transaction.copy", copy)
        ckpt.save(1, state(1)).wait()
        ckpt.wait_for_uploads()
    assert "was saved by another writer in the meantime" in caplog.text
    strategies.assert_same(state(1, "b"), flaxckpt.load(path))


def test_prune_applies_policies_of_both_tiers(tmp_path):
    path, staging = tmp_path / "run", tmp_path / "ssd"
    with flaxckpt.Checkpointer(path, staging=staging, keep_staging=()) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step))
    ckpt = flaxckpt.Checkpointer(path, staging=staging, keep=[LatestN(2)])
    assert ckpt.prune(dry_run=True) == (0, 1)
    assert ckpt.prune() == (0, 1)
    assert ckpt.steps() == [2, 3]
    assert not (staging / "2").exists()


# ---- restoring --------------------------------------------------------------------


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_restores_damaged_staged_step_from_directory(
    store_path, tmp_path, kind, fallback
):
    path, staging = store_path(kind), tmp_path / "ssd"
    files = {"layout": LAYOUTS[0]}
    with flaxckpt.Checkpointer(path, staging=staging, **files) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
        ckpt.wait_for_uploads()
        damage(staging / "2")
        strategies.assert_same(state(2), ckpt.restore(fallback=fallback))
        assert ckpt.restored_step == 2
        strategies.assert_same(state(2), ckpt.restore(step=2))
        assert ckpt.steps() == [1, 2]
        assert ckpt.damaged() == {}
        strategies.assert_same(state(2), ckpt.restore_latest(state(0))[0])
        ckpt.save(3, state(3)).wait()
        ckpt.wait_for_uploads()
        damage(staging / "3")
        damage(path / "3")
        if fallback:
            strategies.assert_same(state(2), ckpt.restore())
            assert list(ckpt.damaged()) == [3]
            ckpt.save(3, state(3, "b")).wait()
            ckpt.wait_for_uploads()
            strategies.assert_same(state(3, "b"), flaxckpt.load(path))
        else:
            with pytest.raises(errors.DamagedCheckpointError):
                ckpt.restore(fallback=False)


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_survives_loss_of_staging(store_path, tmp_path, kind):
    path, staging = store_path(kind), tmp_path / "ssd"
    with flaxckpt.Checkpointer(path, staging=staging) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step), dataset=StepIndexed(lambda i: i))
    shutil.rmtree(staging)
    with flaxckpt.Checkpointer(path, staging=staging) as ckpt:
        strategies.assert_same(state(2), ckpt.restore(state(0)))
        assert ckpt.has_dataset(2)
        ckpt.save(3, state(3)).wait()
        assert ckpt.steps() == [1, 2, 3]
    assert kinds(path)["committed"] == 3


def test_restores_newest_step_of_either_tier(tmp_path):
    path, staging = tmp_path / "run", tmp_path / "ssd"
    with flaxckpt.Checkpointer(path, staging=staging) as ckpt:
        ckpt.save(1, state(1))
    with flaxckpt.Checkpointer(path) as direct:
        direct.save(5, state(5))
    with flaxckpt.Checkpointer(path, staging=staging) as ckpt:
        assert (ckpt.latest_step(), ckpt.steps()) == (5, [1, 5])
        strategies.assert_same(state(5), ckpt.restore())
        ckpt.save(6, state(6)).wait()
        assert next(ckpt.new_steps(timeout_secs=0)) == 1
        strategies.assert_same(state(6), ckpt.restore())


@pytest.mark.parametrize("harm", ["a missing file", "a changed bit"])
def test_damaged_staged_step_is_not_uploaded(tmp_path, harm):
    path, staging = tmp_path / "run", tmp_path / "ssd"
    (path / "7").mkdir(parents=True)
    (path / "7/notes.txt").write_text("mine")
    ckpt = flaxckpt.Checkpointer(path, staging=staging)
    ckpt.save(7, state(7)).wait()
    ckpt.save(8, state(8)).wait()
    with pytest.raises(errors.SaveFailedError, match=r"step 7 .*another writer"):
        ckpt.wait_for_uploads()
    assert (path / "7/notes.txt").read_text() == "mine"
    assert 8 in steps_in(path), "others go all the same"
    shutil.rmtree(path / "7")
    if harm == "a missing file":
        (staging / "7/state/_METADATA").unlink()
    else:
        damage(staging / "7")
    with pytest.raises(errors.SaveFailedError, match=r"_METADATA|7 is damaged: w: "):
        ckpt.wait_for_uploads()
    ckpt.delete(7)
    ckpt.close()
    assert steps_in(path) == {8}


# ---- steps of one number that are not the same ---------------------------------------


def replace(path, step, text="b", **given):
    """Replaces a step in the directory, without its staging directory."""
    with flaxckpt.Checkpointer(path) as other:
        other.save(step, state(step, text), on_exists="overwrite", **given)


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_step_replaced_in_directory_beats_its_old_copy(
    store_path, tmp_path, kind, is_reopened
):
    path, staging = store_path(kind), tmp_path / "ssd"
    ckpt = flaxckpt.Checkpointer(path, staging=staging)
    ckpt.save(1, state(1), metrics={"loss": 1.0, "old": 1.0}).wait()
    ckpt.wait_for_uploads()
    if is_reopened:
        ckpt.close()
    replace(path, 1, metrics={"loss": 2.0})
    if is_reopened:
        ckpt = flaxckpt.Checkpointer(path, staging=staging)
    for found in (
        ckpt.restore(),
        ckpt.restore(step=1),
        ckpt.restore(fallback=False),
        ckpt.restore_latest(state(0))[0],
    ):
        strategies.assert_same(state(1, "b"), found)
    assert ckpt.steps() == [1]
    assert dict(ckpt.metrics(1)) == {"loss": 2.0}
    assert ckpt.best_step("old", "max") is None
    assert ckpt.metadata(1).path == str(path / "1")
    ckpt.pin(1)
    assert run_files.is_pinned(path / "1")
    ckpt.save(2, state(2))
    ckpt.close()
    strategies.assert_same(state(1, "b"), flaxckpt.load(path, step=1))
    assert steps_in(staging) == {2}


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_changes_of_staged_step_skip_its_replacement(store_path, tmp_path, kind):
    path, staging = store_path(kind), tmp_path / "ssd"
    told = []
    ckpt = flaxckpt.Checkpointer(path, staging=staging, sinks=[told.append])
    ckpt.save(1, state(1)).wait()
    ckpt.wait_for_uploads()
    with ckpt._run.uploads.step_lock.get():
        ckpt.add_metrics(1, {"loss": 1.0})
        ckpt.pin(1)
        replace(path, 1)
    ckpt.close()
    [skipped] = [event for event in told if event.kind == "skipped"]
    assert "another step 1 was saved in" in skipped.details["reason"]
    found = flaxckpt.Checkpointer(path)
    assert (found.metrics(1), run_files.is_pinned(path / "1")) == ({}, False)
    strategies.assert_same(state(1, "b"), found.restore())


@pytest.mark.parametrize("file", ["flaxckpt.json", "commit_success.txt"])
def test_damaged_copy_in_directory_replaces_nothing(tmp_path, file):
    path, staging = tmp_path / "run", tmp_path / "ssd"
    ckpt = flaxckpt.Checkpointer(path, staging=staging)
    ckpt.save(1, state(1)).wait()
    ckpt.wait_for_uploads()
    flip_bit(path / "1" / file, -9)
    strategies.assert_same(state(1), ckpt.restore())
    assert ckpt.metadata(1).path == str(staging / "1")
    if file == "commit_success.txt":  # the copy is known by its marker
        ckpt.pin(1)
        ckpt.close()
        assert flaxckpt.verify(path / "1").ok
        strategies.assert_same(state(1), flaxckpt.load(path))


@pytest.fixture(params=["open", "reopened", "reopened after other steps"])
def refused(request, tmp_path):
    """A run whose step 1 is not uploaded, as another writer has saved one.

    With the error that says so.
    """
    path, staging = faulty.new_path("tiers-refused"), tmp_path / "ssd"
    with faulty.faulty(path, last=0):
        ckpt = flaxckpt.Checkpointer(path, staging=staging)
        ckpt.save(1, state(1))
        with pytest.raises(errors.SaveFailedError, match="network"):
            ckpt.wait_for_uploads()
    replace(path, 1, "other")
    for _ in range(2):
        with pytest.raises(errors.SaveFailedError, match="by another writer") as told:
            ckpt.close()
    if request.param != "open":
        ckpt = flaxckpt.Checkpointer(path, staging=staging)
    if "other steps" in request.param:
        ckpt.save(2, state(2)).wait()
    strategies.assert_same(state(1, "other"), flaxckpt.load(path, step=1))
    assert len(str(told.value).splitlines()) < 15
    assert "is reachable" not in str(told.value)
    return ckpt, path, staging, str(told.value)


def test_copy_in_staging_can_be_discarded(refused):
    ckpt, path, staging, told = refused
    assert f"delete the directory 1 in {staging}" in told
    shutil.rmtree(staging / "1")
    ckpt.close()
    assert 1 in steps_in(path)
    strategies.assert_same(state(1, "other"), ckpt.restore(step=1))
    flaxckpt.Checkpointer(path, staging=staging).close()


def test_copy_in_directory_can_be_replaced(refused):
    ckpt, path, _, told = refused
    assert "save the result of restore(step=1) again" in told
    restored = ckpt.restore(step=1)
    strategies.assert_same(state(1), restored)
    ckpt.save(1, restored, on_exists="overwrite")
    ckpt.close()
    strategies.assert_same(state(1), flaxckpt.load(path, step=1))


def test_step_of_other_writer_is_not_a_copy(refused):
    ckpt, path, staging, _ = refused
    with flaxckpt.Checkpointer(path) as other:
        other.add_metrics(1, {"loss": 1.0})
    assert ckpt.metrics(1) == {}
    (staging / "1/flaxckpt.json").write_text("{")
    with pytest.raises(errors.DamagedCheckpointError):
        ckpt.restore(step=1)
    with pytest.raises(errors.SaveFailedError, match=r"Delete 1 in .*ssd"):
        ckpt.close()
    ckpt.delete(1)
    ckpt.close()


def test_uploads_resume_once_foreign_directories_are_moved(tmp_path):
    path, staging = tmp_path / "run", tmp_path / "ssd"
    ckpt = flaxckpt.Checkpointer(path, staging=staging)
    for step in (3, 7):
        (path / f"{step}").mkdir()
        (path / f"{step}" / "notes.txt").write_text("mine")
        ckpt.save(step, state(step)).wait()
    with pytest.raises(
        errors.SaveFailedError, match=rf"Move 7, 3, or .* out of {path}"
    ):
        ckpt.close()
    for step in (3, 7):
        (path / f"{step}").rename(path / f"notes-{step}")
    ckpt.close()
    assert steps_in(path) == {3, 7}


# ---- directories that are out of reach ----------------------------------------------


def test_saves_continue_while_directory_is_unreachable(tmp_path):
    path, staging = faulty.new_path("tiers-gone"), tmp_path / "ssd"
    options = {"staging": staging, "keep": [LatestN(2)]}
    ckpt = flaxckpt.Checkpointer(path, **options)
    ckpt.save(0, state(0)).wait()
    ckpt.wait_for_uploads()
    told = []
    ckpt.events.subscribe(told.append)
    with faulty.faulty(path, last=0):
        for step in range(1, 5):
            assert ckpt.save(step, state(step)).wait().tier == "staging"
            ckpt.add_metrics(step, {"loss": 1 / step})
        strategies.assert_same(state(3), ckpt.restore(step=3))
        with pytest.raises(errors.StoreError, match="network"):
            ckpt.restore()  # who knows whether there is a newer one
        with pytest.raises(errors.SaveFailedError, match=r"step 4 could.* network"):
            ckpt.wait_for_uploads()
        with pytest.raises(
            errors.SaveFailedError, match=r"Steps 1, 2, 3, 4 stay in .*ssd"
        ):
            ckpt.close()
        assert {event.kind for event in told} >= {"committed", "failed"}
        reopened = flaxckpt.Checkpointer(path, **options)  # warns
        reopened.save(5, state(5)).wait()
        with pytest.raises(errors.SaveFailedError):
            reopened.close()
    assert steps_in(path) == {0}
    with flaxckpt.Checkpointer(path, sinks=[told.append], **options) as ckpt:
        ckpt.wait_for_uploads()
        assert steps_in(path) == {4, 5}
        assert [e.step for e in told if e.kind == "uploaded"] == [5, 4]
        skipped = [event for event in told if event.kind == "skipped"]
        assert [event.step for event in skipped] == [3, 2, 1]
        assert all("no policy" in event.details["reason"] for event in skipped)
        ckpt.save(6, state(6))
    assert steps_in(path) == {5, 6}
    assert {p.name for p in staging.iterdir() if p.is_dir()} <= {"5", "6"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=["raw", "zstd"])
def test_completes_interrupted_upload_later(tmp_path, monkeypatch, layout):
    # The store answers at once: a later upload need not wait for late requests.
    seams.replace(monkeypatch, "locks.late_secs", 0.1)
    for last in range(0, 10_000, 2):
        path = faulty.new_path(f"tiers-cut-{layout.codec}-{last}")
        staging = tmp_path / f"ssd-{last}"
        options = {"staging": staging, "layout": layout, "keep": [LatestN(1)]}
        ckpt = flaxckpt.Checkpointer(path, **options)
        ckpt.save(1, state(1)).wait()
        ckpt.wait_for_uploads()
        with faulty.faulty(path, last=last):
            ckpt.save(2, state(2)).wait()
            try:
                ckpt.wait_for_uploads()
            except errors.SaveFailedError:
                is_done = False
            else:
                is_done = True
        for step in steps_in(path):
            strategies.assert_same(state(step), flaxckpt.load(path, step=step))
        with flaxckpt.Checkpointer(path, **options) as again:
            again.wait_for_uploads()
            assert 2 in steps_in(path)
            strategies.assert_same(state(2), again.restore())
        shutil.rmtree(staging)
        strategies.assert_same(state(2), flaxckpt.load(path))
        if is_done:
            break
    assert last > 10


def test_partial_upload_does_not_count_as_step():
    path = faulty.new_path("tiers-parts")
    with flaxckpt.Checkpointer(path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step), metrics={"loss": 1.0})
    second = path / "2"
    objects = {
        file.relative_to(second).as_posix(): file.read_bytes()
        for file in second.rglob("*")
        if file.is_file()
    }
    marker = objects.pop("commit_success.txt")
    assert len(objects) > 5
    for key, content in objects.items():  # objects arrive in any order
        for file in [*second.rglob("*")]:
            file.unlink(missing_ok=True)
        (second / key).write_bytes(content)
        assert steps_in(path) == {1}, key
        strategies.assert_same(state(1), flaxckpt.load(path))
    for key, content in {**objects, "commit_success.txt": marker}.items():
        assert steps_in(path) == {1}
        (second / key).write_bytes(content)
    assert steps_in(path) == {1, 2}
    strategies.assert_same(state(2), flaxckpt.load(path))


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_dead_endpoint_does_not_block(tmp_path, monkeypatch, how):
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    quick = flaxckpt.StoreOptions(deadline_secs=1, retries=1)
    flaxckpt.set_store_options("s3://dead", quick)
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        if how == "is silent":
            dead.listen(1)
        endpoint = f"http://127.0.0.1:{dead.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        begun = time.monotonic()
        ckpt = flaxckpt.Checkpointer("s3://dead/run", staging=tmp_path / "ssd")
        for step in (1, 2):
            assert ckpt.save(step, state(step)).wait().tier == "staging"
        strategies.assert_same(state(2), ckpt.restore(step=2))
        with pytest.raises(errors.SaveFailedError, match=r"s3://dead/run") as info:
            ckpt.close()
        assert time.monotonic() - begun < 90, "TensorStore alone takes 93 s"
        assert len(str(info.value).splitlines()) < 15
    flaxckpt.set_store_options("s3://dead", None)
    assert ckpt._run.retention.explain()[1] == ["not uploaded"]


def test_waiting_for_uploads_times_out(tmp_path, monkeypatch):
    path = faulty.new_path("tiers-slow")
    ckpt = flaxckpt.Checkpointer(path, staging=tmp_path / "ssd")
    ckpt.save(1, state(1)).wait()
    with ckpt._run.uploads.step_lock.get():
        ckpt.save(2, state(2)).wait()
        with pytest.raises(errors.CheckpointTimeoutError, match=r"0\.01 s"):
            ckpt.wait_for_uploads(timeout_secs=0.01)
    ckpt.close()
    assert steps_in(path) == {1, 2}


def test_waiting_begins_upload_again_whose_thread_had_no_memory(tmp_path, monkeypatch):
    end_threads(monkeypatch, "flaxckpt uploads", count=1)
    ckpt = flaxckpt.Checkpointer(tmp_path / "run", staging=tmp_path / "ssd")
    ckpt.save(1, state(1)).wait()
    ckpt.wait_for_uploads()
    ckpt.close()
    assert steps_in(tmp_path / "run") == {1}


# ---- programs that end --------------------------------------------------------------


def save_and_end(url, staging, options):
    """Saves, and ends without a word."""
    if options is not None:
        flaxckpt.set_store_options("s3://", options)
    ckpt = flaxckpt.Checkpointer(url, staging=staging)
    ckpt.save(1, {"n": np.arange(1000)})


def run_apart(target, *args):
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    return process


@pytest.mark.slow
def test_exiting_program_completes_upload(tmp_path):
    path = tmp_path / "run"
    process = run_apart(save_and_end, str(path), str(tmp_path / "ssd"), None)
    process.join(60)
    assert process.exitcode == 0
    strategies.assert_same({"n": np.arange(1000)}, flaxckpt.load(path))


@pytest.mark.slow
def test_program_exits_despite_dead_directory(tmp_path, monkeypatch):
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        dead.listen(1)  # and never answers
        endpoint = f"http://127.0.0.1:{dead.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        quick = flaxckpt.StoreOptions(deadline_secs=1, retries=1)
        staging = tmp_path / "ssd"
        process = run_apart(save_and_end, "s3://nowhere/run", str(staging), quick)
        process.join(60)
        assert process.exitcode == 0
    assert (staging / "1" / run_files.NOT_UPLOADED).is_file()
    (staging / "STAGING_OF").write_text(f"{tmp_path / 'run'}\n")  # it has moved
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        ckpt.wait_for_uploads()
    strategies.assert_same({"n": np.arange(1000)}, flaxckpt.load(tmp_path / "run"))


def save_on(url, staging, log, begin):
    """Saves step after step, and writes down what is acknowledged."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(tier, step):
        os.write(file, f"{json.dumps([tier, step])}\n".encode())

    def tell(event):
        if event.kind == "uploaded":
            note("directory", event.step)

    ckpt = flaxckpt.Checkpointer(url, staging=staging, sinks=[tell])
    for step in range(begin, 10_000):
        values = np.full(5000, step, np.float32)
        result = ckpt.save(step, {"w": values}, on_exists="overwrite").wait()
        note(result.tier, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        ("file", 2),
        pytest.param("file", 7, marks=pytest.mark.slow),
        pytest.param("moto", 3, marks=pytest.mark.slow),
    ],
)
def test_acknowledged_steps_survive_kill_at_any_moment(
    store_path, tmp_path, kind, rounds
):
    path, staging, log = store_path(kind), tmp_path / "ssd", tmp_path / "log"
    chance = random.Random(kind)
    acknowledged = collections.defaultdict(set)
    for _ in range(rounds):
        begin = max((s for found in acknowledged.values() for s in found), default=0)
        log.write_bytes(b"")
        process = run_apart(save_on, str(path), str(staging), str(log), begin + 1)
        lines = chance.randrange(1, 25)
        until = time.monotonic() + 120
        while log.read_bytes().count(b"\n") < lines:
            assert process.is_alive()
            assert time.monotonic() < until
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for line in log.read_text().splitlines():
            tier, step = json.loads(line)
            acknowledged[tier].add(step)
        assert acknowledged["directory"] <= steps_in(path)
        reader = flaxckpt.Checkpointer(path, staging=staging, read_only=True)
        assert acknowledged["staging"] <= set(reader.steps())
        for step in acknowledged["directory"] | acknowledged["staging"]:
            found = reader.restore(step=step)["w"]
            np.testing.assert_array_equal(found, np.full(5000, step, np.float32))
    with flaxckpt.Checkpointer(path, staging=staging) as ckpt:
        ckpt.wait_for_uploads()
        newest = max(acknowledged["staging"])
        assert ckpt.latest_step() >= newest
        assert acknowledged["staging"] <= steps_in(path)
        assert ckpt.restore()["w"][0] == ckpt.latest_step()
        names = {p.name for p in path.iterdir()} - {"events.jsonl"}
        # In a bucket, the lock of the killed process stays until no request can arrive.
        names = {name for name in names if not name.endswith(run_files.LOCK)}
        assert names == set(map(str, steps_in(path))), "nothing is left over"


# ---- options ----------------------------------------------------------------------


def test_rejects_invalid_staging(tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(tmp_path)
    for staging, why in (
        ("memory://x/y", "on this machine"),
        (run, "separate directories"),
        (run / "ssd", "separate directories"),
        (tmp_path, "separate directories"),
        (link, "separate directories"),
        (link / "run", "separate directories"),
        (link / "run/ssd", "separate directories"),
    ):
        with pytest.raises(errors.OptionError, match=why):
            flaxckpt.Checkpointer(run, staging=staging)
    with pytest.raises(errors.OptionError, match="keep_staging"):
        flaxckpt.Checkpointer(run, keep_staging=[LatestN(2)])
    flaxckpt.Checkpointer(run, staging=tmp_path / "ssd").close()
    with pytest.raises(errors.OptionError, match=r"belongs to .*run, not to .*other"):
        flaxckpt.Checkpointer(tmp_path / "other", staging=tmp_path / "ssd")
    flaxckpt.Checkpointer(
        link / "run", staging=tmp_path / "ssd"
    ).close()  # the same run
    with flaxckpt.Checkpointer(tmp_path / "plain") as ckpt:
        ckpt.save(1, state(1))
    with pytest.raises(
        errors.OptionError, match=r"no file STAGING_OF.*choose an empty"
    ):
        flaxckpt.Checkpointer(run, staging=tmp_path / "plain")


@pytest.mark.parametrize("name", ["", "STAGING_OF"], ids=["directory", "owner"])
def test_staging_removed_during_a_run_names_its_run_again(tmp_path, name):
    staging = tmp_path / "ssd"
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        ckpt.save(1, state(1)).wait()
        ckpt.wait_for_uploads()
        if name:
            (staging / name).unlink()
        else:
            shutil.rmtree(staging)
        ckpt.save(2, state(2))
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        strategies.assert_same(ckpt.restore(), state(2))


def test_save_refuses_staging_taken_by_another_run(tmp_path):
    staging = tmp_path / "ssd"
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        ckpt.save(1, state(1)).wait()
        ckpt.wait_for_uploads()
        shutil.rmtree(staging)
        flaxckpt.Checkpointer(tmp_path / "other", staging=staging).close()
        with pytest.raises(errors.OptionError, match=r"belongs to .*other, not to"):
            ckpt.save(2, state(2)).wait()
    assert not (staging / "2").exists()


@pytest.mark.parametrize("is_function", [True, False])
def test_single_process_can_name_staging_by_index(tmp_path, is_function):
    template = f"{tmp_path}/ssd-{{process}}"
    staging = (lambda index: tmp_path / f"ssd-{index}") if is_function else template
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        ckpt.save(1, {"x": 1})
    assert (tmp_path / "ssd-0/1").is_dir()
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        assert ckpt.restore() == {"x": 1}


@pytest.mark.parametrize("name", ["state/d/tree", "state/manifest.ocdbt"])
def test_reads_damaged_staging_index_from_directory(tmp_path, name):
    staging = tmp_path / "ssd"
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        ckpt.save(1, {"x": np.arange(9)})
    index = staging / "1" / name
    index.write_bytes(bytes([index.read_bytes()[0] ^ 1]) + index.read_bytes()[1:])
    with flaxckpt.Checkpointer(tmp_path / "run", staging=staging) as ckpt:
        assert np.array_equal(ckpt.restore()["x"], np.arange(9))


def test_staging_copies_require_staging(tmp_path):
    with pytest.raises(errors.OptionError, match="staging_copies needs a staging"):
        flaxckpt.Checkpointer(tmp_path / "run", staging_copies=1)
    with pytest.raises(errors.OptionError, match="staging_copies must be"):
        flaxckpt.Checkpointer(tmp_path, staging=tmp_path / "ssd", staging_copies=-1)


def test_config_sets_staging(tmp_path):
    config = CheckpointConfig.from_mapping(
        {
            "directory": str(tmp_path / "run"),
            "staging": str(tmp_path / "ssd"),
            "keep_staging": [{"latest": 2}],
        }
    )
    assert CheckpointConfig.from_mapping(config.to_mapping()) == config
    with config.checkpointer() as ckpt:
        for step in range(4):
            ckpt.save(step, state(step)).wait()
            ckpt.wait_for_uploads()
    assert steps_in(tmp_path / "run") == {0, 1, 2, 3}
    assert steps_in(tmp_path / "ssd") == {2, 3}


def test_reader_uploads_nothing(tmp_path):
    path, staging = faulty.new_path("tiers-reader"), tmp_path / "ssd"
    with faulty.faulty(path, last=0):
        ckpt = flaxckpt.Checkpointer(path, staging=staging)
        ckpt.save(1, state(1))
        with pytest.raises(errors.SaveFailedError, match="network"):
            ckpt.wait_for_uploads()
    with flaxckpt.Checkpointer(path, staging=staging, read_only=True) as reader:
        strategies.assert_same(state(1), reader.restore())
        reader.wait_for_uploads()
    assert steps_in(path) == set()
