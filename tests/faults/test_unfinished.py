"""What crashes leave is removed; what others work with, or have made, is not."""

import os
import random
import signal
import time

import pytest

import flaxckpt
from tests.faults import scenarios
from tests.helpers import programs, run_files, seams

KILLS = 30
LEFT = "7.orbax-checkpoint-tmp-writing-0123abcd"


def leave(directory, name):
    (directory / name / "state").mkdir(parents=True)
    (directory / name / "state" / "file").touch()
    return directory / name


def grow_old(path, secs):
    then = time.time() - secs
    os.utime(path, (then, then))


TRYING = """
import os, signal, sys
import numpy as np
import pytest
import flaxckpt
from tests.helpers import seams

def stop(*ignored):
    print("in the middle", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)

ckpt = flaxckpt.Checkpointer(sys.argv[1])
on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False)
state = {"w": np.ones(3), "step": 1}
if sys.argv[2] == "preflight":
    seams.replace(pytest.MonkeyPatch(), "disk.write", stop)  # of the probe
    on_step(1, state)
else:
    on_step.check_resume(state, stop)
"""


@pytest.mark.slow
@pytest.mark.parametrize("trial", ["preflight", "resume"])
def test_next_opening_removes_leftovers_of_killed_trial(tmp_path, trial):
    process = programs.start("-c", TRYING, tmp_path, trial)
    assert process.stdout.readline() == "in the middle\n"
    (left,) = tmp_path.glob(f"{trial}.orbax-checkpoint-tmp-*")
    assert flaxckpt.Checkpointer(tmp_path).steps() == []
    assert left.exists(), "it is at work"
    process.communicate("\n")
    assert process.returncode == -signal.SIGKILL
    assert left.exists()
    flaxckpt.Checkpointer(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("what", ["writing", "deleted", "replaced"])
def test_writable_run_removes_leftovers_of_crash(tmp_path, what):
    leave(tmp_path, "7")
    left = leave(tmp_path, f"7.orbax-checkpoint-tmp-{what}-0123abcd")
    aside = leave(tmp_path / "params_only", LEFT)
    flaxckpt.Checkpointer(tmp_path, read_only=True)
    assert left.exists()
    flaxckpt.Checkpointer(tmp_path)
    assert not left.exists()
    assert not aside.exists()
    assert (tmp_path / "7" / "state" / "file").exists()


def test_undoes_interrupted_replacement(tmp_path, caplog):
    """Where two directories cannot be exchanged in one step."""
    step = leave(tmp_path, "7.orbax-checkpoint-tmp-replaced-0123abcd")
    (step / "flaxckpt.json").touch()
    leave(tmp_path, LEFT)
    assert flaxckpt.Checkpointer(tmp_path).steps() == [7]
    assert "its replacement was interrupted" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


@pytest.mark.parametrize(
    "name",
    [
        "7.orbax-checkpoint-tmp",
        "7.orbax-checkpoint-tmp-1700000000",
        "checkpoint_7.tmp-1700000000",
        "model.orbax-checkpoint-tmp-writing-0123abcd",  # no step of this run
        "7.orbax-checkpoint-tmp-writing-mine",
        "preflight.orbax-checkpoint-tmp-0123abcd",  # not called as ours are
        "7.orbax-checkpoint-tmp-metrics",
    ],
)
def test_keeps_leftovers_of_other_writers(tmp_path, name):
    left = leave(tmp_path, name)
    flaxckpt.Checkpointer(tmp_path).save(7, {"a": 1}).wait()
    assert left.exists()


@pytest.mark.parametrize(
    ("name", "secs"),
    [
        ("7.orbax-checkpoint-tmp-metrics", 90),
        ("7.orbax-checkpoint-tmp-metrics-0123abcd", 90),
    ],
)
def test_removes_old_unlocked_leftovers(tmp_path, name, secs):
    left = leave(tmp_path, name)
    grow_old(left, secs)
    flaxckpt.Checkpointer(tmp_path)
    assert not left.exists()


def test_keeps_claimed_directory(tmp_path):
    left = leave(tmp_path, LEFT)
    with run_files.locked(left):
        flaxckpt.Checkpointer(tmp_path)
        assert left.exists()
    flaxckpt.Checkpointer(tmp_path)
    assert not left.exists()


def test_removes_leftovers_on_shared_disks_by_age(tmp_path, monkeypatch):
    left = leave(tmp_path, LEFT)
    seams.replace(monkeypatch, "filesystem.is_local", lambda path: False)
    flaxckpt.Checkpointer(tmp_path)
    assert left.exists(), "a process of another machine may write it"
    grow_old(left, 700)
    other = left.with_name(LEFT.replace("0123", "4567"))
    left.rename(other)
    grow_old(other, 700)
    with monkeypatch.context() as patch:
        seams.replace(patch, "temporary.touched_every_secs", 0.01)
        claim = seams.current("temporary.claim")
        with claim(other):
            while time.time() - other.stat().st_mtime > 60:
                time.sleep(0.01)
    grow_old(other, 700)  # a sweep claims it, too, and would touch it as often
    flaxckpt.Checkpointer(tmp_path)
    assert not other.exists()


def test_removes_nothing_through_links(tmp_path):
    target = leave(tmp_path / "elsewhere", "precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / LEFT).symlink_to(target)
    (run / "params_only").symlink_to(target.parent)
    leave(target.parent, LEFT)
    inside = leave(run, LEFT.replace("0123", "4567"))
    (inside / "link").symlink_to(target)
    flaxckpt.Checkpointer(run)
    assert not inside.exists()
    assert (target / "state" / "file").exists()
    assert (target.parent / LEFT).exists()
    assert (run / LEFT).is_symlink()


def test_next_save_removes_leftovers_of_bare_checkpoint(tmp_path):
    left = leave(tmp_path, "model.orbax-checkpoint-tmp-writing-0123abcd")
    other = leave(tmp_path, LEFT)
    flaxckpt.save(tmp_path / "model", {"a": 1})
    assert not left.exists()
    assert other.exists()


def test_removes_small_leftovers_only_when_old(tmp_path):
    with flaxckpt.Checkpointer(tmp_path, metadata={"name": "a"}) as ckpt:
        ckpt.save(7, {"a": 1}, metrics={"loss": 1.0}).wait()
    replacing = ["7/PINNED", "7/metrics/metrics", "metadata/_ROOT_METADATA"]
    names = [f"{name}.0123abcd.tmp" for name in replacing]
    names += ["7/READING-host-1-0123abcd", "7/DELETING"]
    files = [tmp_path / name for name in names]
    for file in files:
        file.touch()
    flaxckpt.Checkpointer(tmp_path)
    assert all(file.exists() for file in files)
    for file in files:
        grow_old(file, 90)
    flaxckpt.Checkpointer(tmp_path)
    assert not any(file.exists() for file in files)


USERS_OWN = [
    "draft.tmp",
    "draft.0123ABCD.tmp",
    ".0123abcd.tmp",
    "READING-list.md",
    "READING-host-1-0123abcd.md",
    "READING-host-1",
    "DELETING-not",
]


@pytest.mark.parametrize("place", ["", "7", "7/metrics", "metadata"])
def test_keeps_user_files_of_any_age(tmp_path, place):
    with flaxckpt.Checkpointer(tmp_path, metadata={"name": "a"}) as ckpt:
        ckpt.save(7, {"a": 1}, metrics={"loss": 1.0}).wait()
    own = [tmp_path / place / name for name in USERS_OWN]
    if not place:  # where nothing of ours is called so
        own += [tmp_path / "DELETING", tmp_path / "notes.0123abcd.tmp"]
    for file in own:
        file.write_text("mine")
        grow_old(file, 90)
    flaxckpt.Checkpointer(tmp_path)
    assert all(file.exists() for file in own)


@pytest.mark.parametrize("place", ["7/metrics", "metadata"])
def test_keeps_small_files_behind_links(tmp_path, place):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    flaxckpt.Checkpointer(run).save(7, {"a": 1}).wait()
    elsewhere.mkdir()
    (run / place).symlink_to(elsewhere)
    names = ["metrics.0123abcd.tmp", "READING-host-1-0123abcd", "DELETING"]
    for name in names:
        (elsewhere / name).touch()
        grow_old(elsewhere / name, 90)
    link = run / "7" / "PINNED.0123abcd.tmp"
    link.symlink_to(elsewhere / names[0])
    os.utime(link, (1, 1), follow_symlinks=False)
    flaxckpt.Checkpointer(run)
    assert {path.name for path in elsewhere.iterdir()} == set(names)
    assert link.is_symlink()


@pytest.mark.slow
def test_random_kills_lose_nothing(worker, directory):
    chance = random.Random("kills")
    assert worker("prepare", scenario="Endless", base=directory / "base")["code"] == 0
    for _ in range(KILLS):
        done = worker(
            "kill",
            scenario="Endless",
            base=directory / "base",
            rows=chance.randrange(4, 20),  # a save logs five or six
            secs=chance.uniform(0, 0.02),
        )
        assert done == {"code": -signal.SIGKILL, "problems": []}
    rows = scenarios.Log.read(directory / "base" / "log")
    assert len([row for row in rows if row[0] == "saved"]) > KILLS
    flaxckpt.Checkpointer(directory / "base" / "run")
    scenarios.age(directory / "base" / "run")
    flaxckpt.Checkpointer(directory / "base" / "run")
    assert scenarios.leftovers(directory / "base" / "run") == []
