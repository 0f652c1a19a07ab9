"""Two programs that see one directory through two mounts, as two machines do.

`python -m verification filesystems` names the two mounts in
FLAXCKPT_TWO_MOUNTS; without it, both are the same directory.
"""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import LatestN
from tests import ROOT
from tests.helpers import gates

ROUNDS = 8
VISIBLE_SECS = 90
"""NFS keeps listings of directories for up to a minute."""

LAST = 30
"""The last step of the run that is read while steps are deleted."""


@pytest.fixture
def both(tmp_path):
    """A new directory, as each of the two mounts shows it."""
    mounts = os.environ.get("FLAXCKPT_TWO_MOUNTS")
    if mounts is None:
        return tmp_path, tmp_path
    name = uuid.uuid4().hex
    first, second = (Path(mount, name) for mount in mounts.split(":"))
    first.mkdir()
    await_true(second.is_dir)
    return first, second


def await_true(condition):
    until = time.monotonic() + VISIBLE_SECS
    while not condition():
        assert time.monotonic() < until, "the other mount does not see it"
        time.sleep(0.1)


def state(step, version=0):
    return {"w": np.full(50_000, step + 1000 * version, np.float32), "step": step}


def is_state(found, step, version):
    wanted = state(step, version)
    return found["step"] == step and (found["w"] == wanted["w"]).all()


class Other:
    """A process that runs a function of this file on the other mount."""

    def __init__(self, function, *args):
        words = [repr(str(arg) if isinstance(arg, Path) else arg) for arg in args]
        code = f"from {__name__} import *; {function.__name__}({', '.join(words)})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self):
        return self.process.stdout.readline().strip()

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self):
        with self.process:
            self.process.stdin.close()
            rest = self.process.stdout.read().split("\n")
        assert self.process.returncode == 0
        return [line for line in rest if line]


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# ---- two writers --------------------------------------------------------------------


def save_rounds(directory, version):
    ckpt = flaxckpt.Checkpointer(directory)
    say("ready")
    for line in sys.stdin:
        say(attempt(ckpt, int(line), version))


def attempt(ckpt, step, version):
    try:
        ckpt.save(step, state(step, version)).wait()
    except errors.CheckpointError as error:
        return type(error).__name__
    return "saved"


def test_one_of_two_writers_of_step_wins(both):
    first, second = both
    other = Other(save_rounds, second, 1)
    ckpt = flaxckpt.Checkpointer(first)
    for step in range(1, ROUNDS + 1):
        other.tell(str(step))
        outcomes = [attempt(ckpt, step, 0), other.line()]
        assert sorted(outcomes) == ["CheckpointExistsError", "saved"]
        winner = outcomes.index("saved")
        await_true(lambda: step in ckpt.steps())  # noqa: B023
        assert is_state(ckpt.restore(step=step), step, winner)
        assert ckpt.verify(step).ok
    other.end()


# ---- a reader, and deletion ---------------------------------------------------------


def hold_step(directory):
    steps = flaxckpt.Checkpointer(directory).new_steps(timeout_secs=60)
    step = next(steps)
    say("ready")
    sys.stdin.readline()
    assert is_state(flaxckpt.load(Path(directory) / str(step)), step, 0)
    steps.close()
    say("released")
    sys.stdin.readline()


@pytest.mark.slow
def test_does_not_delete_step_read_through_other_mount(both):
    first, second = both
    with flaxckpt.Checkpointer(first, keep=[LatestN(1)]) as ckpt:
        ckpt.save(1, state(1)).wait()
        await_true(lambda: (second / "1").exists())
        other = Other(hold_step, second)
        with pytest.raises(errors.SaveFailedError, match="read"):
            ckpt.delete(1)
        ckpt.save(2, state(2)).wait()
        assert ckpt.steps() == [1, 2]
        other.tell("")
        assert other.line() == "released"
        ckpt.save(3, state(3)).wait()
        ckpt.prune()
        assert ckpt.steps() == [3]
        other.end()


def read_all(directory):
    say("ready")
    checkpointer = flaxckpt.Checkpointer(directory)
    for step in checkpointer.new_steps(poll_secs=0.02):
        assert is_state(flaxckpt.load(Path(directory) / str(step)), step, 0)
        say(str(step))
        if step == LAST:
            return


@pytest.mark.slow
def test_loop_over_steps_reads_whole_steps_during_deletion(both):
    first, second = both
    other = Other(read_all, second)
    with flaxckpt.Checkpointer(first, keep=[LatestN(1)]) as ckpt:
        for step in range(1, LAST + 1):
            ckpt.save(step, state(step)).wait()
    assert other.end()[-1] == str(LAST), "the reader has seen steps, each of them whole"


# ---- what is seen, and what is swept ------------------------------------------------


def list_steps(directory):
    ckpt = flaxckpt.Checkpointer(directory)
    say("ready")
    for line in sys.stdin:
        until = time.monotonic() + VISIBLE_SECS
        while int(line) not in ckpt.steps() and time.monotonic() < until:
            time.sleep(0.05)
        say(" ".join(map(str, ckpt.steps())))


@pytest.mark.slow
def test_acknowledged_step_appears_on_other_mount(both):
    first, second = both
    other = Other(list_steps, second)
    with flaxckpt.Checkpointer(first) as ckpt:
        for step in range(1, 4):
            ckpt.save(step, state(step)).wait()
            begin = time.monotonic()
            other.tell(str(step))
            assert str(step) in other.line().split()
            sys.stderr.write(f"seen after {time.monotonic() - begin:.2f} s\n")
    other.end()


def open_and_close(directory):
    say("ready")
    for _ in sys.stdin:
        flaxckpt.Checkpointer(directory).close()
        say("opened")


@pytest.mark.slow
def test_does_not_sweep_running_save_through_other_mount(both, monkeypatch):
    first, second = both
    other = Other(open_and_close, second)
    gate = gates.Gate(monkeypatch, "sync")
    with flaxckpt.Checkpointer(first) as ckpt:
        handle = gate.hold(lambda: ckpt.save(7, state(7)))
        [directory] = first.glob("7.*")
        await_true(lambda: (second / directory.name).exists())
        other.tell("")
        assert other.line() == "opened"
        handle.wait()
    assert is_state(flaxckpt.load(first / "7"), 7, 0)
    other.end()
