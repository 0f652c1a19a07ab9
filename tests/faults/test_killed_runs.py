"""A run that is killed and started again ends as one that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

import flaxckpt
from tests import ROOT
from tests.helpers import strategies

PROGRAM = ROOT / "tests/helpers/small_runs.py"
TOTAL = 1000
LONGEST_LIFE_STEPS = 70
LONGEST_STEP_SECS = 0.02
TIMEOUT_SECS = 900


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


def start(kind, directory, cache):
    return subprocess.Popen(
        [sys.executable, PROGRAM, kind, str(directory), str(TOTAL)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ
        | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": "",
        },
    )


def run_to_the_end(kind, directory, cache):
    process = start(kind, directory, cache)
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECS)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out.split()[-1] == str(TOTAL)


def interrupt(kind, directory, cache, number, chance):
    """Starts a run, sends it a signal within a step, and tells how it ended."""
    process = start(kind, directory, cache)
    try:
        for _ in range(chance.randrange(1, LONGEST_LIFE_STEPS)):
            assert process.stdout.readline(), process.stderr.read()
        time.sleep(chance.uniform(0, LONGEST_STEP_SECS))
        process.send_signal(number)
        _, err = process.communicate(timeout=TIMEOUT_SECS)
    finally:
        process.kill()
    return process.returncode, err


def assert_equal_ends(directory, straight):
    ends = [flaxckpt.load(run, step=TOTAL) for run in (directory, straight)]
    strategies.assert_same_state(*ends)
    positions = [
        (run / str(TOTAL) / "dataset/process_0-of-1.json").read_bytes()
        for run in (directory, straight)
    ]
    assert positions[0] == positions[1]


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param("linen", 8, marks=pytest.mark.slow),
        pytest.param("nnx", 8, marks=pytest.mark.slow),
    ],
)
def test_killed_run_ends_like_uninterrupted_run(tmp_path, cache, kind, kills):
    chance = random.Random(f"kill {kind}")
    for _ in range(kills):
        code, err = interrupt(kind, tmp_path / "run", cache, signal.SIGKILL, chance)
        assert code == -signal.SIGKILL, err
        with flaxckpt.Checkpointer(tmp_path / "run", read_only=True) as ckpt:
            for step in ckpt.steps():  # what is listed is whole
                flaxckpt.load(ckpt.directory, step=step)
    run_to_the_end(kind, tmp_path / "run", cache)
    run_to_the_end(kind, tmp_path / "straight", cache)
    assert_equal_ends(tmp_path / "run", tmp_path / "straight")


@pytest.mark.slow
def test_stopped_run_saves_exits_and_resumes(tmp_path, cache):
    chance = random.Random("stop")
    before = 0
    for _ in range(8):
        number = chance.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1])
        code, err = interrupt("linen", tmp_path / "run", cache, number, chance)
        assert code == 75, err
        latest = flaxckpt.metadata(tmp_path / "run").step
        assert latest > before, "the steps of this life are saved"
        before = latest
        assert int(flaxckpt.load(tmp_path / "run")["step"]) == latest
    run_to_the_end("linen", tmp_path / "run", cache)
    run_to_the_end("linen", tmp_path / "straight", cache)
    assert_equal_ends(tmp_path / "run", tmp_path / "straight")
