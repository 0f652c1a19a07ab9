"""The loops of the examples run, and each resumes exactly."""

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.helpers import programs, slow

ELSEWHERE = {"__init__", "toy"}


def run(name):
    """Returns the output of an example; skips the test if the example skips itself."""
    words = ("-m", f"examples.loops.{name}")
    printed = programs.run(*words, cwd=ROOT, timeout=None).stdout
    if printed.startswith("skipped: "):
        pytest.skip(printed)
    return printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    slow.all_but(
        ["bare", "hooks", "step_info", "keras_fit", "clu_hooks", "clu_metrics"],
        ["bare", "clu_hooks"],
    ),
)
def test_interrupted_loop_matches_uninterrupted_loop(name):
    assert run(name).endswith(
        "The resumed run equals the uninterrupted run, bit for bit.\n"
    )


@pytest.mark.slow
def test_evaluation_finds_best_step_of_other_job():
    printed = run("evaluation")
    losses = {
        int(step): float(loss)
        for step, loss in re.findall(r"step (\d+): loss (\S+)", printed)
    }
    assert 20 in losses
    assert f"{min(losses, key=losses.get)} is the best" in printed


def test_every_loop_is_tested_here():
    names = {file.stem for file in (ROOT / "examples/loops").glob("*.py")}
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in source for name in names - ELSEWHERE)


def test_each_loop_is_short():
    for file in (ROOT / "examples/loops").glob("*.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 80 or file.stem == "toy", file.name
