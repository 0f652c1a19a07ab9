"""Checkpoints that earlier versions wrote are read as they were written."""

from pathlib import Path

import jax
import pytest
import strategies
from golden import make_flaxckpt

import flaxckpt
from flaxckpt.datasets import StepIndexed

RUNS = sorted((Path(__file__).parent / "golden").glob("flaxckpt-*/*"))


def test_there_is_a_golden_checkpoint_of_every_version_and_store():
    found = {f"{run.parent.name}/{run.name}" for run in RUNS}
    assert {"flaxckpt-1/files", "flaxckpt-1/ocdbt"} <= found


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_a_golden_checkpoint_comes_back_with_and_without_a_template(run):
    wanted = make_flaxckpt.state()
    found = flaxckpt.load(run)
    assert jax.tree.structure(found["model"]) == jax.tree.structure(wanted["model"])
    for again in (found, flaxckpt.load(run, wanted)):
        assert set(again) == set(wanted)
        for name in wanted:
            strategies.assert_same_state(wanted[name], again[name])
        # Classes without their functions: a TrainState gets those from a template.
        for name in ("frozen", "scale", "numbers", "text", "empty", "int keys"):
            assert jax.tree.structure(again[name]) == jax.tree.structure(wanted[name])
        assert type(again["train"]) is type(wanted["train"])
        assert list(again["int keys"]) == [10, 9]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_what_belongs_to_a_golden_checkpoint_is_read_too(run):
    ckpt = flaxckpt.Checkpointer(run, read_only=True)
    assert ckpt.steps() == [make_flaxckpt.STEP]
    assert ckpt.metrics(make_flaxckpt.STEP) == make_flaxckpt.METRICS
    assert ckpt.metadata(make_flaxckpt.STEP).custom == make_flaxckpt.METADATA
    assert ckpt.run_metadata == make_flaxckpt.METADATA
    batches = StepIndexed(lambda i: i)
    ckpt.restore(dataset=batches)
    assert next(batches) == make_flaxckpt.STEP


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_a_golden_checkpoint_is_good(run):
    report = flaxckpt.verify(run)
    assert report.ok, str(report)
    assert report.extra == ()
