"""Statistics of the leaves at each save, beside the steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt._run import sample_log
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


KERNEL = "params/dense/kernel"


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_each_save_records_statistics_of_its_leaves(tmp_path, codec):
    layout = flaxckpt.ArrayLayout(codec=codec)
    run_loop(tmp_path, train_state, layout)
    found = sample_log.read(tmp_path)
    assert [samples.step for samples in found] == [1, 2, 3]
    kernel = found[1].leaves[KERNEL]
    assert (kernel.size, kernel.sampled, kernel.nonfinite) == (32, 32, 0)
    assert (kernel.min, kernel.mean, kernel.max) == (2, 2, 2)
    assert kernel.norm == pytest.approx(2 * np.sqrt(32), rel=1e-4)
    assert "opt_state/0/mu/dense/kernel" in found[1].leaves
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
    assert [s.leaves[path].max for s in sample_log.read(tmp_path)] == [1, 2, 3]


def test_wide_types_have_statistics(tmp_path):
    with jax.enable_x64(True):
        run_loop(tmp_path, lambda step: {"w": jnp.full(3, step, jnp.float64)})
    assert sample_log.read(tmp_path)[0].leaves["w"].max == 1


def test_items_and_staging_have_statistics(tmp_path):
    split = {"items": ("params", "opt_state")}

    def make(step):
        return {"params": params(step), "opt_state": params(step)}

    run_loop(tmp_path / "a", make, **split)
    run_loop(tmp_path / "b", make, staging=tmp_path / "fast")
    bucket = faulty.new_path("statistics")
    run_loop(bucket, make)
    for root in (tmp_path / "a", tmp_path / "b", bucket):
        found = sample_log.read(root)
        assert [s.leaves[KERNEL].max for s in found] == [1, 2, 3]


def test_ignores_unreadable_lines(tmp_path):
    assert sample_log.read(tmp_path) == []
    run_loop(tmp_path, train_state)
    with (tmp_path / "statistics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "time": 1.0, "leaves": {"w": [1]}}\n{"step"\n[]\n')
        file.write(b'{"step": true, "time": 1.0, "leaves": {}}\n')
    assert [samples.step for samples in sample_log.read(tmp_path)] == [1, 2, 3]
    run_loop(tmp_path / "other", train_state)
    without = tmp_path / "without"
    with flaxckpt.Checkpointer(without) as ckpt:
        ckpt.save(1, train_state(1))
    assert not (without / "statistics.jsonl").exists()
