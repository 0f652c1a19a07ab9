"""Statistics of the leaves at each save, beside the steps."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import flaxckpt
from tests.helpers import command_line, report_runs
from tests.helpers import faulty_store as faulty


def params(step):
    return {"dense": {"kernel": jnp.full((8, 4), float(step)), "bias": jnp.zeros(4)}}


def train_state(step):
    tx = optax.adam(1e-3)
    state = TrainState.create(apply_fn=None, params=params(step), tx=tx)
    return state.replace(step=step)


def run_loop(path, make, layout=None, **options):
    layout = layout or flaxckpt.ArrayLayout()
    with (
        flaxckpt.Checkpointer(path, layout=layout, **options) as ckpt,
        flaxckpt.CheckpointCallback(
            ckpt, every_steps=1, statistics=True, preflight=False
        ) as on_step,
    ):
        for step in (1, 2, 3):
            on_step(step, make(step))


class Statistics(NamedTuple):
    """The statistics of a leaf, as a line has them."""

    size: int
    sampled: int
    norm: float
    mean: float
    min: float
    max: float
    nonfinite: int
    histogram: list[int]


def read(path):
    """Returns the statistics that saves recorded: step -> leaf path -> statistics."""
    lines = (path / "statistics.jsonl").read_bytes().splitlines()
    return {
        row["step"]: {leaf: Statistics(*each) for leaf, each in row["leaves"].items()}
        for row in map(json.loads, lines)
    }


def maxima(path, leaf):
    return {step: leaves[leaf].max for step, leaves in read(path).items()}


KERNEL = "params/dense/kernel"


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_each_save_records_statistics_of_its_leaves(tmp_path, codec):
    layout = flaxckpt.ArrayLayout(codec=codec)
    run_loop(tmp_path, train_state, layout)
    found = read(tmp_path)
    assert [*found] == [1, 2, 3]
    kernel = found[2][KERNEL]
    assert (kernel.size, kernel.sampled, kernel.nonfinite) == (32, 32, 0)
    assert (kernel.min, kernel.mean, kernel.max) == (2, 2, 2)
    assert kernel.norm == pytest.approx(2 * np.sqrt(32), rel=1e-4)
    assert "opt_state/0/mu/dense/kernel" in found[2]
    assert flaxckpt.Checkpointer(tmp_path).steps() == [1, 2, 3]


def model(step):
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.full((3, 2), float(step), jnp.float32)
    return layer


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda step: freeze({"params": params(step)}), KERNEL),
        (model, "kernel"),
        (lambda step: {"kernel": jnp.full(4, step, jnp.bfloat16)}, "kernel"),
        (lambda step: (np.full(4, float(step)), step), "0"),
    ],
)
def test_every_kind_of_state_has_statistics(tmp_path, make, path):
    run_loop(tmp_path, make)
    assert maxima(tmp_path, path) == {1: 1, 2: 2, 3: 3}


def test_wide_types_have_statistics(tmp_path):
    with jax.enable_x64(True):
        run_loop(tmp_path, lambda step: {"w": jnp.full(3, step, jnp.float64)})
    assert maxima(tmp_path, "w") == {1: 1, 2: 2, 3: 3}


def test_items_and_staging_have_statistics(tmp_path):
    split = {"items": ("params", "opt_state")}

    def make(step):
        return {"params": params(step), "opt_state": params(step)}

    run_loop(tmp_path / "a", make, **split)
    run_loop(tmp_path / "b", make, staging=tmp_path / "fast")
    bucket = faulty.new_path("statistics")
    run_loop(bucket, make)
    for root in (tmp_path / "a", tmp_path / "b", bucket):
        assert maxima(root, KERNEL) == {1: 1, 2: 2, 3: 3}


def test_report_ignores_unreadable_lines(tmp_path):
    run_loop(tmp_path / "run", train_state)
    with (tmp_path / "run/statistics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "time": 1.0, "leaves": {"w": [1]}}\n{"step"\n[]\n')
        file.write(b'{"step": true, "time": 1.0, "leaves": {}}\n')
    command_line.run("report", tmp_path / "run", "-o", tmp_path / "page.html")
    drawn = report_runs.charts_of((tmp_path / "page.html").read_text("utf-8"))["layers"]
    assert (drawn["first"], drawn["x"]) == (1, [2, 3])
    for ridge in drawn["ridges"]:
        assert [row[0] for row in ridge["rows"]] == [1, 2, 3]


def test_saves_record_no_statistics_by_default(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, train_state(1))
    assert not (tmp_path / "statistics.jsonl").exists()
