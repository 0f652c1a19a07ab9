"""What would fail at the first save, or at hour thirty, fails before training."""

import logging
import os
import resource
import shutil
import types
from collections import namedtuple

import numpy as np
import pytest

import flaxckpt
from flaxckpt import configs, errors
from flaxckpt.policies import BestN, EveryNSteps, LatestN, OnSteps
from tests.helpers import any_policy, run_files

MIB = 2**20
STATE = {"w": np.ones(MIB // 4, np.float32)}
Usage = namedtuple("Usage", "total used free")


def first_call(directory, *, keep=(), state=STATE, **options):
    ckpt = flaxckpt.Checkpointer(directory, keep=keep)
    on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False, **options)
    on_step(1, state)
    return ckpt


@pytest.fixture
def free(monkeypatch):
    """Sets how much space is free, which only a file system of one's own could."""

    def set_free(size):
        usage = Usage(10**12, 10**12 - size, size)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return set_free


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), None),
        ([LatestN(3)], 3),
        ([LatestN(3), BestN(2, "loss", "min")], 5),
        ([OnSteps((1, 5)), LatestN(1)], 3),
        ([LatestN(3), EveryNSteps(10)], None),
    ],
)
def test_preflight_counts_steps_kept_by_policies(tmp_path, keep, kept):
    first_call(tmp_path, keep=keep)
    [found] = [e for e in run_files.read_events(tmp_path) if e.kind == "preflight"]
    assert found.details["saves_kept"] == kept


def test_preflight_takes_no_more_space_than_a_save(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, before[1]))
    try:
        assert first_call(tmp_path, state=STATE, every_steps=1).steps() == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("option", [option for _, option, _ in any_policy.in_guide()])
def test_preflight_knows_limit_of_each_policy(tmp_path, option):
    policy = configs.parse_option("keep", option)
    first_call(tmp_path, keep=[policy])
    [found] = [e for e in run_files.read_events(tmp_path) if e.kind == "preflight"]
    saved = [
        types.SimpleNamespace(step=step, metrics=metrics, created=36.0 * step)
        for step in range(0, 200_000, 100)
        for metrics in [{} if step % 3 else {"eval/loss": step}]
    ]
    kept, limit = len(policy.preserved(saved)), found.details["saves_kept"]
    assert kept > 10 if limit is None else kept <= limit


def test_first_call_reports_too_little_space_for_kept_steps(tmp_path, free):
    free(3 * MIB)
    first_call(tmp_path / "two", keep=[LatestN(2)])
    with pytest.raises(errors.SaveFailedError) as told:
        first_call(tmp_path / "three", keep=[LatestN(3)])
    assert "3.15 MB free" in str(told.value)
    assert "4.19 MB are needed" in str(told.value)
    assert "3 are kept" in str(told.value)


def test_preflight_counts_existing_steps(tmp_path, free):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, STATE)
    free(MIB + MIB // 2)
    ckpt = flaxckpt.Checkpointer(tmp_path, keep=[LatestN(3)])
    state = ckpt.restore(STATE)
    flaxckpt.CheckpointCallback(ckpt, on_preemption=False)(4, state)


def test_preflight_warn_only_warns(tmp_path, free, caplog):
    free(MIB // 2)
    first_call(tmp_path, keep=[LatestN(1)], preflight="warn")
    assert "are needed" in caplog.text
    caplog.clear()
    first_call(tmp_path / "x", state={"fn": print}, preflight="warn")
    assert "may fail" in caplog.text
    caplog.clear()
    first_call(tmp_path / "off", keep=[LatestN(1)], preflight=False)
    assert not caplog.text


def test_warns_about_room_for_few_saves_without_retention(tmp_path, free, caplog):
    free(3 * MIB)
    first_call(tmp_path)
    assert "room for 3 more saves" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_first_call_reports_unwritable_directory(tmp_path):
    ckpt = flaxckpt.Checkpointer(tmp_path)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(errors.SaveFailedError, match="make a directory"):
            flaxckpt.CheckpointCallback(ckpt, on_preemption=False)(1, STATE)
    finally:
        tmp_path.chmod(0o700)


def test_first_call_reports_removed_directory(tmp_path):
    ckpt = flaxckpt.Checkpointer(tmp_path / "run")
    on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(errors.SaveFailedError, match="make a directory"):
        on_step(1, STATE)


def test_first_call_reports_unsavable_leaves(tmp_path):
    with pytest.raises(errors.UnsupportedLeafError, match="fn"):
        first_call(tmp_path, state={"fn": print})
    with pytest.raises(errors.DatasetStateError, match="generator"):
        first_call(tmp_path, dataset=(i for i in range(3)))


def test_preflight_leaves_no_files_and_logs_size_of_saves(tmp_path, caplog):
    caplog.set_level(logging.INFO, "flaxckpt")
    ckpt = first_call(tmp_path, keep=[LatestN(2)])
    assert "each save: 1.05 MB" in caplog.text
    assert ckpt.steps() == []
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
