"""What stays in a run directory and what goes, over real checkpoints."""

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import BestN, EveryNSecs, EveryNSteps, LatestN
from tests.helpers import (
    chunks,
    faulty_store,
    old_stores,
    programs,
    run_files,
    seams,
    slow,
    strategies,
    system_calls,
)
from tests.helpers.files import flip_bit, largest_file, without_permissions

SMALL = "state/d/0.small.0"
"""The file of the arrays of a small state, in a step."""

ACC = "eval/accuracy"


def names(directory):
    """What is in a run directory, beside its journal of events."""
    return sorted(path.name for path in directory.glob("[!e]*"))


def state(step):
    return {"w": np.full((4, 4), float(step)), "step": step}


def save(root, *steps, **options):
    """Saves each step after a restart of its own."""
    for step in steps:
        with flaxckpt.Checkpointer(root, **options) as ckpt:
            ckpt.save(step, state(step))
    return ckpt.steps()


def save_many(root, steps, **options):
    with flaxckpt.Checkpointer(root, **options) as ckpt:
        for step in steps:
            ckpt.save(step, state(step))


def put_metrics(root, **values):
    """Adds `s3=0.5` to step 3, as a job that evaluates would."""
    ckpt = flaxckpt.Checkpointer(root)
    for name, value in values.items():
        ckpt.add_metrics(int(name[1:]), {ACC: value})


def save_at(root, times, monkeypatch):
    """Saves steps when the clock shows other times."""
    with flaxckpt.Checkpointer(root) as ckpt:
        for step, seconds in times.items():
            monkeypatch.setattr(time, "time", lambda seconds=seconds: seconds)
            ckpt.save(step, state(step), overwrite=True).wait()
    monkeypatch.undo()


# ---- as T5X ----------------------------------------------------------------------


def test_keeps_latest_like_t5x_across_restarts_and_options(tmp_path):
    assert save(tmp_path, 42, keep=[LatestN(2)]) == [42]
    assert save(tmp_path, 43, keep=[LatestN(2)]) == [42, 43]
    assert save(tmp_path, 44, keep=[LatestN(2)]) == [43, 44]
    assert save(tmp_path, 45, keep=[LatestN(1)]) == [45]
    assert save(tmp_path, 46, keep=[LatestN(3)]) == [45, 46]
    assert save(tmp_path, 47) == [45, 46, 47]


def test_keeps_directory_with_pinned_file_like_t5x(tmp_path):
    save(tmp_path, 42, keep=[LatestN(1)])
    (tmp_path / "42" / "PINNED").write_text("1")  # as its users write it
    assert save(tmp_path, 43, keep=[LatestN(1)]) == [42, 43]
    assert save(tmp_path, 44, keep=[LatestN(1)]) == [42, 44]


def test_keeps_best_and_latest_like_t5x_with_late_metrics(tmp_path):
    keep = [LatestN(1), BestN(2, ACC, "max")]
    save(tmp_path, 42, 43, 44)
    put_metrics(tmp_path, s42=0.9, s43=0.8, s44=0.7)
    assert save(tmp_path, 45, keep=keep) == [42, 43, 45]
    keep = [LatestN(1), BestN(2, ACC, "min")]
    put_metrics(tmp_path, s45=0.95)
    assert save(tmp_path, 46) == [42, 43, 45, 46]
    put_metrics(tmp_path, s46=0.99)
    assert save(tmp_path, 47, keep=keep) == [42, 43, 47]


def test_first_save_warns_once_about_missing_metric(tmp_path, caplog):
    keep = [LatestN(1), BestN(1, "los", "min")]
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        ckpt.save(1, state(1), metrics={"loss": 0.5}).wait()
        told = [record.getMessage() for record in caplog.records]
        for step in (2, 3):
            ckpt.save(step, state(step), metrics={"loss": 0.5}).wait()
    assert len(told) == len(caplog.records) == 1
    assert "has a finite metric 'los'" in told[0]
    assert "the steps have loss" in told[0]
    assert ckpt.steps() == [1, 2, 3]
    assert ckpt.explain()[1] == [f"{keep[1]}, once a step has the metric"]


@pytest.mark.parametrize("option", ["keep", "keep_dataset"])
def test_deletes_nothing_until_metric_is_known(tmp_path, caplog, option):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step), dataset=StepIndexed(lambda i: i)).wait()
    options = {option: [LatestN(1), BestN(1, "los", "min")]}
    with flaxckpt.Checkpointer(tmp_path, **options) as ckpt:
        ckpt.save(3, state(3)).wait()
        assert "no metrics at all" in caplog.text
        assert ckpt.steps() == [1, 2, 3]
        assert [ckpt.has_dataset(step) for step in (1, 2)] == [True, True]
        ckpt.save(4, state(4)).wait()
        assert ckpt.steps() == [1, 2, 3, 4]
        assert [ckpt.has_dataset(step) for step in (1, 2)] == [True, True]
        ckpt.add_metrics(2, {"los": 1.0})
        ckpt.prune()
    if option == "keep":
        assert ckpt.steps() == [2, 4]
    else:
        assert [ckpt.has_dataset(step) for step in (1, 2)] == [False, True]


def test_does_not_warn_about_metrics_added_before_deletion(tmp_path, caplog):
    keep = [LatestN(1), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).wait()
            ckpt.add_metrics(step, {"loss": float(step)})
    assert ckpt.steps() == [1, 3]
    assert not caplog.records


def test_metric_of_one_step_is_enough(tmp_path, caplog):
    keep = [LatestN(1), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        ckpt.save(1, state(1), metrics={"loss": 0.5})
        for step in (2, 3):
            ckpt.save(step, state(step))
    assert ckpt.steps() == [1, 3]
    assert not caplog.records


def has_datasets(ckpt):
    return {step: ckpt.metadata(step).has_dataset for step in ckpt.steps()}


# ---- policies over what is on the disk -------------------------------------------


def test_keeps_steps_far_enough_apart_in_time(tmp_path, monkeypatch):
    keep = [EveryNSecs(60)]
    times = dict(enumerate((1000, 1030, 1061, 1100, 1121, 1122)))
    save_at(tmp_path, times, monkeypatch)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=keep)
    assert [s for s, why in ckpt.explain().items() if str(keep[0]) in why] == [0, 2, 4]
    save_at(
        tmp_path, {3: 2000}, monkeypatch
    )  # told anew: nothing is remembered of the old file
    assert [s for s, why in ckpt.explain().items() if str(keep[0]) in why] == [
        *(0, 2, 3),
        4,  # the clock went back
    ]


def test_unrecorded_step_is_as_old_as_its_oldest_file(tmp_path):
    save(tmp_path, 1, 2, 3)
    for step, seconds in ((1, 1000), (2, 1010), (3, 1070)):
        for name in ("_CHECKPOINT_METADATA", "flaxckpt.json", "commit_success.txt"):
            (tmp_path / str(step) / name).unlink()
        for path in (tmp_path / str(step)).iterdir():
            os.utime(path, (seconds, seconds))
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[EveryNSecs(60)])
    assert ckpt.prune(dry_run=True) == (2,)


def test_uses_creation_time_recorded_by_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    before = time.time()
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
    seen = []

    class Look:
        def preserved(self, checkpoints):
            seen.extend(c.created for c in checkpoints)
            return set()

    assert list(flaxckpt.Checkpointer(tmp_path, keep=[Look()]).explain()) == [1, 2]
    assert before - 1 < seen[0] <= seen[1] < time.time() + 1
    for path in (tmp_path / "1").iterdir():
        os.utime(path, (0, 0))  # what the files say does not matter
    assert flaxckpt.Checkpointer(tmp_path, keep=[Look()]).explain()
    assert seen[2:] == seen[:2]


def test_metrics_of_other_process_count_without_reload(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[BestN(1, ACC, "max")]) as trainer:
        trainer.save(1, state(1), metrics={"loss": 1.0}).wait()
        assert trainer.best_step(ACC, "max") is None
        put_metrics(tmp_path, s1=0.5)
        trainer.save(2, state(2)).wait()
        trainer.save(3, state(3)).wait()
        assert trainer.steps() == [1, 3]
        assert trainer.metrics(1) == {"loss": 1.0, ACC: 0.5}


# ---- temporary steps -------------------------------------------------------------


def test_keeps_two_temporary_steps_until_permanent_one(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1)).wait()
        ckpt.save(2, state(2), temporary=True).wait()
        assert ckpt.explain() == {1: ["no policy"], 2: ["newest", "temporary"]}
        assert ckpt.save(3, state(3), temporary=True).wait().deleted_steps == ()
        assert ckpt.explain()[2] == ["temporary"]
        assert ckpt.save(4, state(4), temporary=True).wait().deleted_steps == (2,)
        assert ckpt.save(5, state(5)).wait().deleted_steps == (3, 4)
        assert ckpt.steps() == [1, 5]


def test_damaged_temporary_step_falls_back_to_previous_one(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
        for step in (2, 3, 4):
            ckpt.save(step, state(step), temporary=True)
        ckpt.wait()
        chunks.flip(tmp_path / "4/state", "w/c.0.0")
        strategies.assert_same(state(3), ckpt.restore())


def test_restores_temporary_step_after_restart(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2), temporary=True)
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        strategies.assert_same(state(2), ckpt.restore())
        ckpt.save(3, state(3))
    assert ckpt.steps() == [1, 3]


@pytest.mark.parametrize("on_exists", ["overwrite", "skip"])
def test_saving_temporary_step_again_permanently_keeps_it(tmp_path, on_exists):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1), temporary=True)
        ckpt.save(1, state(1), on_exists=on_exists)
        ckpt.save(2, state(2)).wait()
        assert ckpt.steps() == [1, 2]
        ckpt.save(2, state(2), temporary=True, on_exists="skip")
        ckpt.save(3, state(3)).wait()
        assert ckpt.steps() == [1, 2, 3], "what is skipped is not changed"
        ckpt.save(3, state(3), temporary=True, on_exists="overwrite")
        ckpt.save(4, state(4))
    assert ckpt.steps() == [1, 2, 4]


def test_replacement_of_pinned_step_is_pinned(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)]) as ckpt:
        ckpt.save(1, state(1)).wait()
        ckpt.pin(1)
        ckpt.save(1, state(7), on_exists="overwrite")
        ckpt.save(2, state(2)).wait()
        assert ckpt.explain()[1] == ["pinned"]
        strategies.assert_same(state(7), ckpt.restore(step=1))
        ckpt.unpin(1)
        assert ckpt.prune() == (1,)


def test_keeps_step_pinned_during_decision(tmp_path):
    class Pinning:
        def preserved(self, checkpoints):
            ckpt.pin(1)
            return set()

    save(tmp_path, 1, 2)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[Pinning()])
    assert ckpt.prune() == ()
    assert ckpt.explain()[1] == ["pinned"]


def test_ignores_directory_named_like_step(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "99").mkdir()
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(2)])
    assert ckpt.steps() == [1, 2]
    (tmp_path / "99" / "notes.txt").write_text("of the user")
    assert ckpt.steps() == list(ckpt.explain()) == [1, 2]
    assert ckpt.latest_step() == 2
    strategies.assert_same(state(2), ckpt.restore())
    with pytest.raises(errors.CheckpointNotFoundError, match="has no step 99"):
        ckpt.restore(step=99)
    ckpt.save(3, state(3)).wait()
    assert ckpt.steps() == [2, 3]
    assert (tmp_path / "99" / "notes.txt").is_file()
    shutil.copytree(tmp_path / "3", tmp_path / "99", dirs_exist_ok=True)
    assert ckpt.steps() == [2, 3, 99], "now it is one"


def test_restore_reports_damaged_step_without_manifest(tmp_path, caplog):
    save(tmp_path, 1, 2)
    (tmp_path / "2" / "flaxckpt.json").unlink()
    shutil.rmtree(tmp_path / "2" / "state")
    ckpt = flaxckpt.Checkpointer(tmp_path)
    assert ckpt.steps() == [1, 2]
    strategies.assert_same(state(1), ckpt.restore())
    assert "step 2 is left out: " in caplog.text


# ---- dataset states --------------------------------------------------------------


def batches(start=0):
    return StepIndexed(lambda i: i, start=start)


def save_datasets(root, *steps, **options):
    with flaxckpt.Checkpointer(root, **options) as ckpt:
        for step in steps:
            ckpt.save(step, state(step), dataset=batches(step))
    return ckpt


def test_reports_deleted_dataset_state_without_damage(tmp_path):
    ckpt = save_datasets(tmp_path, 1, 2, keep_dataset=[LatestN(1)])
    assert ckpt.explain() == {
        1: ["no policy", "dataset state deleted"],
        2: ["newest", "no policy"],
    }
    strategies.assert_same(state(1), ckpt.restore(step=1))
    with pytest.raises(errors.DatasetStateError, match="deleted by keep_dataset"):
        ckpt.restore(step=1, dataset=batches())
    iterator = batches()
    ckpt.restore(dataset=iterator)
    assert next(iterator) == 2
    flaxckpt.convert(tmp_path / "1", tmp_path / "copy")
    assert not flaxckpt.metadata(tmp_path / "copy").has_dataset


def test_restarting_dataset_starts_over_if_state_was_deleted(tmp_path, caplog):
    save_datasets(tmp_path, 1, 2, keep_dataset=[LatestN(1)])
    change(tmp_path / "2/flaxckpt.json")
    iterator = batches()
    ckpt = flaxckpt.Checkpointer(tmp_path)
    ckpt.restore(dataset=flaxckpt.datasets.Restarting(iterator))
    assert ckpt.restored_step == 1
    assert next(iterator) == 0
    assert "the data starts from the beginning" in caplog.text


def test_restarting_dataset_can_begin_in_run_without_data(tmp_path, caplog):
    save(tmp_path, 1)
    iterator = batches()
    ckpt = flaxckpt.Checkpointer(tmp_path)
    with pytest.raises(errors.DatasetStateError, match="Restarting"):
        ckpt.restore(dataset=iterator)
    ckpt.restore(dataset=flaxckpt.datasets.Restarting(iterator))
    assert next(iterator) == 0
    assert "was saved without a dataset iterator" in caplog.text


def test_newest_and_pinned_steps_keep_dataset_states(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep_dataset=[EveryNSteps(3)]) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step), dataset=batches(step)).wait()
            if step == 2:
                ckpt.pin(2)
    found = {1: False, 2: True, 3: True, 4: False, 5: True}
    assert has_datasets(ckpt) == found
    assert ckpt.explain()[4] == ["no policy", "dataset state deleted"]


def test_step_just_saved_keeps_dataset_state_despite_newer_steps(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, keep_dataset=[LatestN(1)]) as ckpt:
        for step in (10, 90, 40):
            ckpt.save(step, state(step), dataset=batches(step)).wait()
        iterator = batches()
        ckpt.restore(step=40, dataset=iterator)
        assert next(iterator) == 40
        assert has_datasets(ckpt) == {10: False, 40: True, 90: True}


def test_dataset_states_live_as_long_as_steps_by_default(tmp_path):
    ckpt = save_datasets(tmp_path, 1, 2, 3, keep=[LatestN(2)])
    assert has_datasets(ckpt) == {2: True, 3: True}


@pytest.mark.parametrize(
    "call", ["disk.replace", "disk.sync_directory", "files.remove_tree"]
)
def test_deletes_dataset_state_entirely_or_not_at_all(
    tmp_path, monkeypatch, caplog, call
):
    ckpt = save_datasets(tmp_path, 1, 2)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep_dataset=[LatestN(1)])

    def fail(path, *_, **__):
        if path.exists() or call == "disk.replace":
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        seams.replace(patch, call, fail)
        assert ckpt.prune() == ()
    said = (
        "could not remove"
        if call == "files.remove_tree"
        else "the dataset state of step 1 could"
    )
    assert said in caplog.text
    if ckpt.metadata(1).has_dataset:
        iterator = batches()
        ckpt.restore(step=1, dataset=iterator)
        assert next(iterator) == 1
    else:
        with pytest.raises(errors.DatasetStateError, match="deleted by"):
            ckpt.restore(step=1, dataset=batches())
    ckpt.prune()
    assert has_datasets(ckpt) == {1: False, 2: True}
    assert names(tmp_path) == ["1", "2"]


def test_finishes_interrupted_deletion_of_dataset_state(tmp_path):
    save_datasets(tmp_path, 1, 2)
    (tmp_path / "1" / "DATASET_LET_GO").touch()  # and then the machine went down
    ckpt = flaxckpt.Checkpointer(tmp_path, keep_dataset=[LatestN(2)])
    assert has_datasets(ckpt) == {1: False, 2: True}
    ckpt.prune()
    assert not (tmp_path / "1" / "dataset").exists()
    assert has_datasets(ckpt) == {1: False, 2: True}


# ---- metrics from elsewhere ------------------------------------------------------


def test_external_metrics_rank_steps(tmp_path):
    measured = {1: {ACC: 0.9}, 2: {ACC: 0.1}, 77: {ACC: 1.0}}
    options = {"keep": [BestN(1, ACC, "max")], "metrics_from": lambda: measured}
    assert save(tmp_path, 1, 2, 3, **options) == [1, 3]
    ckpt = flaxckpt.Checkpointer(tmp_path, **options)
    assert ckpt.best_step(ACC, "max") == 1
    assert ckpt.metrics(1) == {}
    ckpt.add_metrics(1, {ACC: 0.2})
    measured[3] = {ACC: 0.5}
    assert ckpt.best_step(ACC, "max") == 3, "what is stored with a step counts first"


@pytest.mark.parametrize(
    ("measured", "kept"),
    [
        ({"1": {"eval": {"accuracy": 0.9}}, "2": {}}, [1, 3]),
        ({1: {"eval": {"accuracy": math.nan}}, 2: {"eval": {"accuracy": 0.1}}}, [2, 3]),
    ],
    ids=["steps as text, from JSON", "nested, NaN"],
)
def test_external_metrics_may_be_nested(tmp_path, measured, kept):
    options = {"keep": [BestN(1, ACC, "max")], "metrics_from": lambda: measured}
    assert save(tmp_path, 1, 2, 3, **options) == kept


@pytest.mark.parametrize(
    "measured", [{"last": {ACC: 1}}, {1.5: {}}, {1: 0.5}, [0.5], {1: {ACC: "0.5"}}]
)
def test_invalid_external_metrics_delete_nothing(tmp_path, measured):
    options = {"keep": [BestN(1, ACC, "max")], "metrics_from": lambda: measured}
    assert save(tmp_path, 1, 2, **options) == [1, 2]
    with pytest.raises(errors.OptionError, match="metric"):
        flaxckpt.Checkpointer(tmp_path, **options).explain()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("keep", LatestN(3)),
        ("keep", [LatestN]),
        ("keep", [5]),
        ("keep", "LatestN(3)"),
        ("keep", None),
        ("keep_dataset", LatestN(3)),
        ("keep_dataset", [3]),
        ("metrics_from", {1: {ACC: 0.5}}),
    ],
)
def test_rejects_non_policy(tmp_path, option, value):
    with pytest.raises(
        errors.OptionError, match=f"{option} (must be|wants) .* write {option}="
    ):
        flaxckpt.Checkpointer(tmp_path / "run", **{option: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "metrics", [{"a": 10**400}, {"a": "0.5"}, {"a": b"0.5"}, [0.5], 0.5, {"a": [1, 2]}]
)
def test_rejects_non_numeric_metrics(tmp_path, metrics):
    ckpt = flaxckpt.Checkpointer(tmp_path)
    with pytest.raises(errors.OptionError, match="must be"):
        ckpt.save(1, state(1), metrics=metrics)
    assert ckpt.steps() == []


def test_unavailable_metrics_delete_nothing(tmp_path, caplog):
    def fails():
        raise RuntimeError("no such log")

    options = {"keep": [LatestN(1)], "metrics_from": fails}
    assert save(tmp_path, 1, 2, **options) == [1, 2]
    assert "nothing is deleted after step 2: no such log" in caplog.text
    ckpt = flaxckpt.Checkpointer(tmp_path, **options)
    for ask in (ckpt.explain, ckpt.prune, lambda: ckpt.best_step(ACC, "max")):
        with pytest.raises(RuntimeError, match="no such log"):
            ask()
    assert ckpt.steps() == [1, 2]
    assert save(tmp_path, 3, keep=[LatestN(1)]) == [3]


# ---- nothing is deleted before the new step is whole ------------------------------


class Damaging:
    """A policy that keeps nothing and breaks the newest step when it is asked."""

    def __init__(self, root, damage):
        self.root, self.damage = root, damage

    def preserved(self, checkpoints):
        if len(checkpoints) > 1:
            self.damage(self.root / str(checkpoints[-1].step))
        return set()


def shorten(path):
    put(path, path.read_bytes()[:-1])


def change(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    put(path, content)


def put(path, content):
    path.unlink()  # it may be linked to that of another step
    path.write_bytes(content)


DAMAGES = {
    "manifest": lambda step: change(step / "flaxckpt.json"),
    "no manifest": lambda step: (step / "flaxckpt.json").unlink(),
    "no description": lambda step: (step / "state/_METADATA").unlink(),
    "metadata": lambda step: change(step / "_CHECKPOINT_METADATA"),
    "sharding": lambda step: change(step / "state/_sharding"),
    "dataset": lambda step: shutil.rmtree(step / "dataset"),
    "strings": lambda step: change(step / "state/_strings.json"),
    "small": lambda step: shorten(step / SMALL),
    "no small": lambda step: (step / SMALL).unlink(),
    "large": lambda step: shorten(step / "state/d/0.0/large"),
    "no large": lambda step: (step / "state/d/0.0/large").unlink(),
    "no tree": lambda step: (step / "state/d/tree").unlink(),
    "tree": lambda step: change(step / "state/d/tree"),
    "no database": lambda step: shutil.rmtree(step / "state/d"),
    "no root": lambda step: (step / "state/manifest.ocdbt").unlink(),
}
OLD_DAMAGES = {
    "chunk": lambda step: shorten(step / "state/w/c.0.0"),
    "no chunk": lambda step: (step / "state/w/c.0.0").unlink(),
    "no array": lambda step: shutil.rmtree(step / "state/w"),
    "no zarr.json": lambda step: (step / "state/w/zarr.json").unlink(),
}
SIZED = {
    "w": np.arange(4096.0).reshape(64, 64),
    "large": np.arange(2.0**17),
    "name": "x",
    "key": jax.random.key(1),
}


def assert_the_older_step_is_there_until_a_new_one_is(ckpt):
    assert ckpt.steps() == [1, 2]
    strategies.assert_same(SIZED, ckpt.restore(step=1))
    ckpt.delete(2)
    with flaxckpt.Checkpointer(ckpt.directory, keep=[LatestN(1)]) as ckpt:
        ckpt.save(2, SIZED, dataset=batches())
    assert ckpt.steps() == [2]


@pytest.mark.parametrize("damage", DAMAGES)
def test_incomplete_new_step_deletes_nothing(tmp_path, damage):
    keep = [Damaging(tmp_path, DAMAGES[damage])]
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=keep)
    ckpt.save(1, SIZED, dataset=batches()).wait()
    handle = ckpt.save(2, SIZED, dataset=batches())
    with pytest.raises(errors.SaveFailedError, match="no other step") as info:
        handle.wait()
    assert len(str(info.value).splitlines()) < 15
    assert_the_older_step_is_there_until_a_new_one_is(ckpt)


@pytest.mark.parametrize("damage", OLD_DAMAGES)
def test_incomplete_newest_step_of_old_layout_deletes_nothing(tmp_path, damage):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, SIZED, dataset=batches()).wait()
            old_stores.make_directories(tmp_path / str(step))
    OLD_DAMAGES[damage](tmp_path / "2")
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    with pytest.raises(errors.SaveFailedError, match="no other step") as info:
        ckpt.prune()
    assert len(str(info.value).splitlines()) < 15
    assert_the_older_step_is_there_until_a_new_one_is(ckpt)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("small", "wanted 144 bytes, found 143"),
        ("no manifest", r"flaxckpt.json is missing, although commit_success"),
        ("no description", "was a checkpoint, .* wanted state/_METADATA"),
    ],
)
def test_prune_deletes_nothing_if_newest_step_is_incomplete(tmp_path, damage, told):
    save(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "2")
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    with pytest.raises(errors.SaveFailedError, match=told):
        ckpt.prune()
    with pytest.raises(errors.SaveFailedError, match="step 2 is incomplete, so no"):
        ckpt.prune(dry_run=True)
    assert ckpt.explain()[2][0].startswith("damaged: ")
    assert ckpt.steps() == [1, 2]


@pytest.mark.parametrize("is_newest", [False, True])
def test_reports_damage_even_if_nothing_would_be_deleted(tmp_path, is_newest):
    save(tmp_path, 1, 2, 3)
    put_metrics(tmp_path, s1=0.3, s2=0.2, s3=0.1)
    damaged = 3 if is_newest else 1  # the best
    shorten(tmp_path / str(damaged) / SMALL)
    keep = [LatestN(3), BestN(1, ACC, "max")]
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=keep)
    explained = ckpt.explain()
    assert explained[damaged][0].startswith("damaged: ")
    if is_newest:
        with pytest.raises(errors.SaveFailedError, match="step 3 is incomplete"):
            ckpt.prune(dry_run=True)
    else:
        assert explained[2] == [str(each) for each in keep]
        assert ckpt.prune(dry_run=True) == ()


def test_step_without_read_permission_stays_and_hides_no_other(caplog):
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        root = Path(name) / "run"
        save_many(root, (1, 2, 3))
        put_metrics(root, s2=0.5)
        (root / "1").chmod(0)
        keep = [LatestN(1)]
        with without_permissions():
            ckpt = flaxckpt.Checkpointer(root, keep=keep, read_only=True)
            assert ckpt.steps() == [1, 2, 3]
            strategies.assert_same(state(3), ckpt.restore())
            assert "permission denied" in ckpt.explain()[1][0]
            assert ckpt.prune(dry_run=True) == (2,)
        (root / "1").chmod(0o755)
        (root / "3").chmod(0)
        with without_permissions():
            strategies.assert_same(state(2), ckpt.restore())
            with pytest.raises(errors.SaveFailedError, match="permission denied"):
                ckpt.prune(dry_run=True)
        assert "1 step of training lost" in caplog.text
        (root / "3").chmod(0o755)
        (root / "2/metrics").chmod(0)
        with without_permissions():
            assert ckpt.metrics(2) == {}
        assert "Permission denied" in caplog.text
        (root / "2/metrics").chmod(0o755)


@pytest.mark.parametrize("damage", ["small", "no manifest", "no description"])
def test_incomplete_kept_step_does_not_count(tmp_path, caplog, damage):
    save(tmp_path, *range(1, 7))
    put_metrics(tmp_path, **{f"s{step}": step / 10 for step in range(1, 5)})
    DAMAGES[damage](tmp_path / "4")  # the best
    keep = [LatestN(1), BestN(1, ACC, "max")]
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=keep)
    explained = ckpt.explain()
    assert explained[3] == [str(keep[1])]
    assert explained[4][0].startswith("damaged: ")
    doomed = ckpt.prune(dry_run=True)
    assert "step 4 is damaged, so it does not count" in caplog.text
    assert doomed == ckpt.prune() == (1, 2, 5)
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        ckpt.save(7, state(7)).wait()
        shorten(tmp_path / "7" / SMALL)
        ckpt.save(8, state(8)).wait()  # 7 would go, and goes
    assert ckpt.steps() == [3, 4, 8]


def test_detects_copy_of_other_step(tmp_path):
    """As a backup leaves it that was interrupted, or made of the wrong step."""
    save_many(tmp_path, (1, 2, 3))
    shutil.rmtree(tmp_path / "3")
    shutil.copytree(tmp_path / "1", tmp_path / "3")
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    for dry_run in (True, False):
        with pytest.raises(errors.SaveFailedError, match="was saved as step 1"):
            ckpt.prune(dry_run=dry_run)
    assert "was saved as step 1" in ckpt.explain()[3][0]
    assert save(tmp_path, 4, keep=[LatestN(2)]) == [2, 3, 4]
    strategies.assert_same(state(2), ckpt.restore(step=2))


COMPRESSED = {
    "zstd": {"codec": "zstd"},
    "compact": {"codec": "compact"},
    "zstd without checksums": {"codec": "zstd", "checksum": False},
    "zarr 2": {"codec": "none", "zarr_version": 2, "checksum": False},
    "zarr 2 compact": {"codec": "compact", "zarr_version": 2, "checksum": False},
    "zarr 2 zstd": {"codec": "zstd", "zarr_version": 2, "checksum": False},
}


@pytest.mark.parametrize("is_old", [False, True], ids=["database", "directories"])
@pytest.mark.parametrize("layout", COMPRESSED)
def test_detects_shortened_chunk_of_any_layout(tmp_path, layout, is_old):
    layout = flaxckpt.ArrayLayout(**COMPRESSED[layout])
    with flaxckpt.Checkpointer(tmp_path, layout=layout) as ckpt:
        for step, loss in enumerate([0.5, 0.1, 0.2, 0.3, 0.4], 1):
            w = np.random.default_rng(step).normal(size=(64, 64))
            ckpt.save(step, {"w": w}, metrics={"loss": loss})
    if is_old:
        for step in range(1, 6):
            old_stores.make_directories(tmp_path / str(step))
    keep = [LatestN(1), BestN(1, "loss", "min")]
    cut_in_half(tmp_path, 2)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=keep)
    assert ckpt.prune(dry_run=True) == ckpt.prune() == (1, 4)
    assert ckpt.explain()[2][0].startswith("damaged: ")
    cut_in_half(tmp_path, 5)
    for dry_run in (True, False):
        with pytest.raises(errors.SaveFailedError, match="step 5 is incomplete"):
            ckpt.prune(dry_run=dry_run)


def cut_in_half(root, step):
    file = largest_file(root / f"{step}/state")
    put(file, file.read_bytes()[: file.stat().st_size // 2])


def test_rechecks_whole_step_before_deleting_others_for_it(tmp_path, caplog):
    keep = [LatestN(1), BestN(1, "loss", "min"), EveryNSteps(10)]
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:

        def save(step, loss):
            ckpt.save(step, state(step), metrics={"loss": loss}).wait()

        save(1, 0.3)
        save(2, 0.1)  # deletes 1
        save(3, 0.2)
        save(4, 0.4)  # looks at 2, the best, and deletes 3
        put(tmp_path / "2" / SMALL, b"")
        save(5, 0.5)  # without 2, the best is 4
        assert ckpt.steps() == [2, 4, 5]
        save(6, 0.3)
        assert ckpt.steps() == [2, 6]
    assert "step 2 is damaged, so it does not count" in caplog.text


def test_rechecks_only_deciding_steps(tmp_path, monkeypatch):
    looked = []
    are_unchanged = seams.current("files.are_unchanged")
    seams.replace(
        monkeypatch,
        "files.are_unchanged",
        lambda self, path: looked.append(path.name) or are_unchanged(self, path),
    )
    keep = [LatestN(2), EveryNSteps(10), BestN(1, ACC, "max")]
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step in range(51):
            metrics = {ACC: {13: 1.0, 48: 0.5}.get(step, 0.0)}
            ckpt.save(step, state(step), metrics=metrics).wait()
            if step == 49:
                looked.clear()
    assert ckpt.steps() == [0, 10, 13, 20, 30, 40, 49, 50]
    assert sorted(looked) == ["13", "49"]


FOREIGN = [
    "notes.txt",
    "state/notes.txt",
    "extra/notes.txt",
    "state/mine/c.0",
    "state/mine/zarr.json",
    "state/w/c.7.0",
    "state/d/0123456789abcdef",
    "state/ocdbt.process_9/d/0123456789abcdef",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_deletes_no_foreign_file_with_step(tmp_path, caplog, name):
    save(tmp_path, 1, 2)
    file = tmp_path / "1" / name
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("mine")
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)]) as ckpt:
        for step in (3, 4):
            ckpt.save(step, state(step)).wait()
        assert ckpt.steps() == [1, 4]
        assert ckpt.prune(dry_run=True) == ckpt.prune() == ()
        assert "files of others in it" in ckpt.explain()[1][0]
        with pytest.raises(errors.SaveFailedError, match=name.partition("/")[0]):
            ckpt.delete(1)
    assert len([r for r in caplog.records if "would be lost" in r.message]) == 1
    strategies.assert_same(state(1), ckpt.restore(step=1))
    file.unlink()
    ckpt.delete(1)
    assert ckpt.steps() == [4]


def test_deletes_no_foreign_file_with_item(tmp_path, caplog):
    items = {"items": ("a", "b")}
    branches = {"a": state(1), "b": state(2)}
    with flaxckpt.Checkpointer(tmp_path, **items) as ckpt:
        for step in (1, 2):
            ckpt.save(step, branches).wait()
    (tmp_path / "1/b/notes.txt").write_text("mine")
    with flaxckpt.Checkpointer(tmp_path, keep_items={"b": [LatestN(1)]}, **items) as c:
        c.prune()
        with pytest.raises(errors.SaveFailedError, match=r"b/notes\.txt"):
            c.delete(1, item="b")
        assert "would be lost: b/notes.txt" in caplog.text
        assert "files of others in item b: b/notes.txt" in c.explain()[1]
        strategies.assert_same(branches, c.restore(step=1))
        c.delete(1, item="a")  # its own files only
    assert (tmp_path / "1/b/notes.txt").read_text() == "mine"


FLIPPED = {
    "small arrays": SMALL,
    "a large array": "state/d/0.0/large",
    "a tree": "state/d/tree",
    "a directory": "state/w/c.0.0",
    "a string": "state/_strings.json",
    "the dataset": "dataset/*",
}


@pytest.mark.parametrize("what", FLIPPED)
def test_prune_reads_newest_step_before_deleting(tmp_path, what):
    ckpt = flaxckpt.Checkpointer(tmp_path)
    for step in (1, 2, 3):
        state = {**SIZED, "w": SIZED["w"] + step}
        ckpt.save(step, state, dataset=batches(), metrics={"loss": 1 / step})
    ckpt.wait()
    if what == "a directory":
        for step in (1, 2, 3):
            old_stores.make_directories(tmp_path / str(step))
    damaged = next((tmp_path / "3").glob(FLIPPED[what]))
    before = damaged.read_bytes()
    change(damaged)
    pruning = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    with pytest.raises(errors.SaveFailedError, match="step 3 is incomplete") as info:
        pruning.prune()
    assert len(str(info.value).splitlines()) < 15
    assert str(tmp_path / "3") in str(info.value)
    assert pruning.steps() == [1, 2, 3]
    for step in (1, 2):
        assert pruning.verify(step).ok
    damaged.write_bytes(before)
    flip_bit(tmp_path / "3/metrics/metrics")  # lost, and the state is not
    assert pruning.prune() == (1, 2)
    assert pruning.verify(3).problems.keys() == {"metrics/metrics"}


def test_prune_deletes_nothing_if_newest_step_cannot_be_read(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    system_calls.fail(monkeypatch, os, "readv", errno.EIO, f"/2/{SMALL}")
    with pytest.raises(errors.SaveFailedError, match="Input/output error"):
        ckpt.prune()
    monkeypatch.undo()
    assert ckpt.prune() == (1,)


LAYOUTS = [
    flaxckpt.ArrayLayout(codec=codec, chunk_bytes=8192, **more)
    for codec in ("none", "compact", "zstd")
    for more in ({}, {"checksum": False}, {"checksum": False, "zarr_version": 2})
]
KINDS = {
    "one": jnp.ones(5),
    "nothing": {"a": None, "b": {}},
    "many": {f"l{i}": np.full(i, i) for i in range(100)},
    "kinds": {
        "jax": jnp.ones((300, 7)),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), (2, 3)),
        "zero size": jnp.zeros((0, 3)),
        "0-d": jnp.zeros(()),
        "text": "x",
        "python": [1, 0.5, True, 1 - 2j, None],
        "bits": np.ones((100, 9), bool),
        "big": np.zeros((100, 100)),
        "bfloat16": jnp.ones((3000,), "bfloat16"),
        "float8": np.ones((5000,), jnp.float8_e4m3),
    },
}


@pytest.mark.parametrize("is_old", [False, True], ids=["database", "directories"])
@pytest.mark.parametrize("kind", KINDS)
def test_recognizes_every_layout_as_complete(tmp_path, kind, is_old):
    for step, layout in enumerate(LAYOUTS):
        keep = [LatestN(1)]
        if is_old:
            save_old(tmp_path, step, KINDS[kind], layout)
            deleted = flaxckpt.Checkpointer(tmp_path, keep=keep).prune()
        else:
            with flaxckpt.Checkpointer(tmp_path, keep=keep, layout=layout) as ckpt:
                deleted = ckpt.save(step, KINDS[kind]).wait().deleted_steps
        assert deleted == ((step - 1,) if step else ())


def save_old(root, step, state, layout):
    """Saves a step as a directory for each array."""
    with flaxckpt.Checkpointer(root, layout=layout) as ckpt:
        ckpt.save(step, state)
    old_stores.make_directories(root / str(step))


def test_recognizes_sub_byte_types_as_complete(tmp_path):
    tree = {"a": jnp.ones((5001,), "int4"), "b": jnp.ones((3, 5), "int2")}
    layout = flaxckpt.ArrayLayout(codec="compact")
    save_old(tmp_path, 0, tree, layout)
    with flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)], layout=layout) as ckpt:
        for step in (1, 2):
            ckpt.save(step, tree).wait()
            assert ckpt.steps() == [step]
    save_old(tmp_path, 3, tree, layout)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    assert ckpt.prune() == (2,)


# ---- what cannot be written or deleted -------------------------------------------


@pytest.mark.parametrize("cut", ["rename.withdraw", "files.remove_tree"])
def test_next_save_finishes_interrupted_deletion(tmp_path, monkeypatch, cut):
    save(tmp_path, 1, 2)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])

    def fail(path, *_):
        if path.exists():
            raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        seams.replace(patch, cut, fail)
        assert ckpt.prune() == (() if cut == "rename.withdraw" else (1,))
    assert len(names(tmp_path)) == 2
    assert ckpt.steps() == ([1, 2] if cut == "rename.withdraw" else [2])
    ckpt.save(3, state(3)).wait()
    assert names(tmp_path) == ["3"]
    ckpt.close()


def test_errors_of_unwritable_markers_advise_to_retry(tmp_path):
    save(tmp_path, 1, 2)
    ckpt = flaxckpt.Checkpointer(tmp_path)
    # Directories where files are to be, which not even root can write over.
    for name in ("1/PINNED/x", "2/PINNED", "2/metrics"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "1/metrics").touch()
    (tmp_path / "1/DELETING").symlink_to(tmp_path / "nowhere" / "file")
    for act in (
        lambda: ckpt.pin(1),
        lambda: ckpt.unpin(2),
        lambda: ckpt.add_metrics(1, {"loss": 1}),
        lambda: ckpt.delete(1),
    ):
        with pytest.raises(errors.SaveFailedError, match="try again"):
            act()
    strategies.assert_same(state(1), ckpt.restore(step=1))
    ckpt.add_metrics(2, {"loss": 1})
    assert ckpt.metrics(2) == {"loss": 1.0}, "an empty directory is no hindrance"


ADDING = """
    import sys
    import flaxckpt

    root, name, count = sys.argv[1:]
    ckpt = flaxckpt.Checkpointer(root)
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(int(count)):
        ckpt.add_metrics(1, {f"{name}{i}": i})
"""


@pytest.mark.slow
@pytest.mark.parametrize("metrics", slow.all_but([None, {"loss": 0.5}], [None]))
def test_processes_adding_metrics_concurrently_lose_none(tmp_path, metrics):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1), metrics=metrics)
    adding = [programs.start_text(ADDING, tmp_path, name, 60) for name in "ab"]
    for process in adding:
        assert process.stdout.readline() == "ready\n"
    for process in adding:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in adding:
        process.communicate(timeout=300)
        assert process.returncode == 0
    wanted = {f"{name}{i}": float(i) for name in "ab" for i in range(60)}
    assert ckpt.metrics(1) == {**wanted, **(metrics or {})}
    left = sorted(path.name for path in (tmp_path / "1/metrics").iterdir())
    assert left == ["digests", "metrics"]
    assert names(tmp_path) == ["1"]


def test_adding_metrics_keeps_non_numeric_ones(tmp_path):
    save(tmp_path, 1)
    put_metrics(tmp_path, s1=0.5)
    file = tmp_path / "1/metrics/metrics"
    file.with_name("digests").unlink()  # as FORMAT.md asks of other writers
    file.write_text('{"note": "by hand", "huge": 1' + "0" * 400 + "}")
    put_metrics(tmp_path, s1=0.5)
    assert json.loads(file.read_text()) == {
        "note": "by hand",
        "huge": 10**400,
        ACC: 0.5,
    }
    assert flaxckpt.Checkpointer(tmp_path).metrics(1) == {ACC: 0.5}


@pytest.mark.parametrize("lost", [["metrics"], ["metrics", "digests"], None])
@pytest.mark.parametrize("is_new", [False, True])
def test_does_not_delete_step_with_missing_metrics(tmp_path, lost, is_new):
    keep = [LatestN(1), BestN(1, ACC, "max")]
    if is_new:
        with flaxckpt.Checkpointer(tmp_path) as ckpt:
            for step, value in ((1, 0.9), (2, 0.5), (3, 0.1)):
                ckpt.save(step, state(step), metrics={ACC: value})
    else:
        save(tmp_path, 1, 2, 3)
        put_metrics(tmp_path, s1=0.9, s2=0.5, s3=0.1)
    directory = tmp_path / "1/metrics"
    for file in directory.iterdir():
        if lost is None or file.name in lost:
            file.unlink()
    if lost is None:
        directory.rmdir()
    assert save(tmp_path, 4, keep=keep) == [1, 2, 4]
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=keep)
    assert ckpt.explain()[1] == ["metrics damaged"]
    ckpt.add_metrics(1, {ACC: 0.95})
    assert ckpt.prune() == (2,)


@pytest.mark.parametrize("content", ["", '{"eval/accur', "[0.9]"])
def test_does_not_delete_step_with_damaged_metrics(tmp_path, caplog, content):
    keep = [LatestN(1), BestN(1, ACC, "max")]
    save(tmp_path, 1, 2, 3)
    put_metrics(tmp_path, s1=0.9, s2=0.5, s3=0.1)
    file = tmp_path / "1/metrics/metrics"
    file.write_text(content)
    assert save(tmp_path, 4, keep=keep) == [1, 2, 4]
    assert "the metrics of" in caplog.text
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=keep)
    assert ckpt.explain()[1] == ["metrics damaged"]
    with pytest.raises(errors.SaveFailedError, match="delete it, and add all metrics"):
        ckpt.add_metrics(1, {ACC: 0.9})
    assert file.read_text() == content
    file.unlink()
    ckpt.add_metrics(1, {ACC: 0.9})
    assert save(tmp_path, 5, keep=keep) == [1, 5]
    file.write_text(content)
    assert save(tmp_path, 6, keep=[LatestN(1)]) == [6], "nobody asks for its metrics"


def test_keeps_dataset_state_of_possibly_best_step(tmp_path):
    save_datasets(tmp_path, 1, 2, 3)
    put_metrics(tmp_path, s1=0.9, s3=0.5)
    (tmp_path / "1/metrics/metrics").write_text("")
    ckpt = flaxckpt.Checkpointer(tmp_path, keep_dataset=[BestN(1, ACC, "max")])
    ckpt.prune()
    assert has_datasets(ckpt) == {1: True, 2: False, 3: True}


def test_creates_metrics_and_directory_atomically(tmp_path, monkeypatch):
    save(tmp_path, 1)
    ckpt = flaxckpt.Checkpointer(tmp_path)
    seen = []

    def watch(seam):
        real = seams.current(seam)

        def write(path, content, **options):
            seen.append((tmp_path / "1/metrics").exists())
            real(path, content, **options)

        seams.replace(monkeypatch, seam, write)

    watch("disk.write")
    watch("disk.replace")
    ckpt.add_metrics(1, {"loss": 1})
    # Only the mark comes after it, as it says that there are metrics.
    assert seen == [False, False, True]
    assert ckpt.metrics(1) == {"loss": 1.0}
    assert names(tmp_path) == ["1"]


# ---- what happens while steps are deleted ----------------------------------------


def during(monkeypatch, act, *, before):
    """Has `act(path)` happen whenever a directory is withdrawn, or begins to be."""
    seam = "delete.delete" if before == "deletion" else "rename.withdraw"
    real = seams.current(seam)

    def act_first(path, *rest, **options):
        act(path)
        real(path, *rest, **options)

    seams.replace(monkeypatch, seam, act_first)


CHANGES_IN_BUCKETS = {
    "pin": lambda run: run.pin(1),
    "add metrics": lambda run: run.add_metrics(1, {"accuracy": 0.5}),
}


@pytest.mark.parametrize("name", CHANGES_IN_BUCKETS)
def test_rejects_changes_to_bucket_step_announced_for_deletion(name):
    change = CHANGES_IN_BUCKETS[name]
    with flaxckpt.Checkpointer(faulty_store.new_path("announced")) as run:
        run.save(1, {"w": np.ones(2)}).wait()
        path = run.directory / "1"
        before = run.metadata(1).metrics
        announced = run_files.announce_deletion(path)
        with pytest.raises(errors.SaveFailedError, match="try again in 10 min"):
            change(run)
        assert not (path / "PINNED").is_file()
        assert run.metadata(1).metrics == before
        announced.unlink()
        change(run)
        assert (path / "PINNED").is_file() or run.metadata(1).metrics != before


def test_failed_pin_does_not_undo_pin_of_other_process():
    with flaxckpt.Checkpointer(faulty_store.new_path("pinned-twice")) as run:
        run.save(1, {"w": np.ones(2)}).wait()
        other = flaxckpt.Checkpointer(run.directory)
        with faulty_store.faulty(run.directory) as store:

            def pin_and_announce():
                other.pin(1)
                run_files.announce_deletion(run.directory / "1")

            store.after["PINNED"] = pin_and_announce
            with pytest.raises(errors.SaveFailedError, match="being deleted"):
                run.pin(1)
        (run.directory / "1" / run_files.DELETING).unlink()
        assert run.explain() == {1: ["newest", "pinned", "no policy"]}


@pytest.mark.parametrize("before", ["deletion", "withdrawal"])
def test_late_pin_prevents_deletion(tmp_path, monkeypatch, caplog, before):
    caplog.set_level("INFO")
    save(tmp_path, 1, 2, 3)
    other = flaxckpt.Checkpointer(tmp_path)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    with monkeypatch.context() as patch:
        during(patch, lambda path: other.pin(int(path.name)), before=before)
        assert ckpt.prune() == ()
    assert "step 1 stays for now" in caplog.text
    assert ckpt.explain() == {1: ["pinned"], 2: ["pinned"], 3: ["newest", "LatestN(1)"]}
    assert names(tmp_path) == ["1", "2", "3"]
    strategies.assert_same(state(1), ckpt.restore(step=1))
    ckpt.delete(1)
    assert ckpt.steps() == [2, 3]


def test_deletes_steps_on_full_disk(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    real = os.open

    def full(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(28, "No space left on device", str(path))
        return real(path, flags, *args, **kwargs)

    def touch(path, *args, **kwargs):
        full(path, os.O_CREAT)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        patch.setattr(Path, "touch", touch)
        ckpt.delete(1)
        assert ckpt._run.retention.delete_unkept() == (2,)
    assert names(tmp_path) == ["3"]


def test_awaited_save_leaves_deletions_to_next(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "retention.deleting_secs", 0)
    save(tmp_path, *range(9))
    waited = threading.Event()

    class Waited(LatestN):
        """Judges when somebody waits for the save."""

        def preserved(self, checkpoints):
            assert waited.wait(60)
            return super().preserved(checkpoints)

    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[Waited(1)])
    handle = ckpt.save(9, state(9))
    seams.replace(
        monkeypatch,
        "progress.bar",
        lambda counter: contextlib.nullcontext(waited.set()),
    )
    assert handle.wait().deleted_steps == (0, 1)
    assert ckpt.steps() == [*range(2, 10)]
    monkeypatch.undo()
    assert ckpt.save(10, state(10)).wait().deleted_steps == tuple(range(2, 10))


def test_unawaited_save_deletes_all(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "retention.deleting_secs", 0)
    save(tmp_path, *range(9))
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(1)])
    handle = ckpt.save(9, state(9))
    deadline = time.monotonic() + 60
    while not handle.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert handle.wait().deleted_steps == tuple(range(9))
    save(tmp_path, *range(10, 15))
    assert ckpt.prune() == (9, 10, 11, 12, 13), "what is asked for is done"


PRUNING = """
    import sys
    import flaxckpt
    from flaxckpt.policies import LatestN

    ckpt = flaxckpt.Checkpointer(sys.argv[1], keep=[LatestN(1)])
    print("ready", flush=True)
    sys.stdin.readline()
    print(*ckpt.prune())
"""


@pytest.mark.slow
def test_processes_pruning_concurrently_delete_each_step_once(tmp_path):
    save_many(tmp_path, range(80))
    pruning = [programs.start_text(PRUNING, tmp_path) for _ in range(2)]
    for process in pruning:
        assert process.stdout.readline() == "ready\n"
    for process in pruning:
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [process.communicate(timeout=300) for process in pruning]
    assert [told for _, told in found] == ["", ""], "nothing went wrong"
    deleted = sorted(int(step) for out, _ in found for step in out.split())
    assert deleted == list(range(79))
    assert names(tmp_path) == ["79"]


# ---- as Orbax sees it ------------------------------------------------------------


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A run whose only step has every mark, and whose dataset state was let go."""
    pytest.importorskip("orbax.checkpoint")
    root = tmp_path_factory.mktemp("marked")
    tree = {"w": jnp.arange(12.0).reshape(3, 4)}
    with flaxckpt.Checkpointer(root) as ckpt:
        ckpt.save(5, tree, dataset=batches(), metrics={"loss": 1}, temporary=True)
        ckpt.save(6, tree, dataset=batches()).wait()
    assert ckpt.steps() == [6]
    with flaxckpt.Checkpointer(root, keep_dataset=[LatestN(1)]) as ckpt:
        ckpt.save(7, tree, dataset=batches()).wait()
        ckpt.pin(6)
        for name in ("TEMPORARY", "READING-here-1-00", "DELETING"):
            (root / "6" / name).touch()
    assert (root / "6" / "DATASET_LET_GO").is_file()
    return root, tree


def orbax_readers():
    try:
        from tests.helpers.orbax_readers import READERS
    except ImportError:
        return {}
    return READERS


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("reader", orbax_readers())
def test_orbax_reads_step_with_all_marks_and_no_dataset(marked, reader):
    root, tree = marked
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    read = orbax_readers()[reader](root, 6, abstract)
    if reader.endswith("metadata"):
        assert tuple(read["w"].shape) == (3, 4)
    else:
        np.testing.assert_array_equal(read["w"], tree["w"])


def test_orbax_lists_steps_with_marks(marked):
    from orbax import checkpoint as ocp

    root, _ = marked
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [6, 7]
