"""The layers of a report are those of the model, in states of any kind."""

import flax
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flaxckpt
from flaxckpt import _report
from flaxckpt._arrays.leaf_sample import LeafSample
from flaxckpt._report.data import LeafHistory
from tests.helpers.report_runs import charts_of


class Block(nnx.Module):
    def __init__(self, rngs):
        self.lin = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.inside = Block(rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)


def nnx_objects():
    """Yields the state of three steps, whose counters grow faster than `out`."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for step in (1, 2, 3):
        model.out.bias[...] = jnp.full(3, 4.0**step)
        model.inside.drop.rngs.count[...] = jnp.uint32(100**step)
        optimizer.opt_state[0].count[...] = jnp.int32(100**step)
        yield model, optimizer


@flax.struct.dataclass
class State:
    iteration: jax.Array
    weights: dict
    adam: tuple
    ema: dict
    noise: jax.Array


def dataclass_objects():
    for step in (1, 2, 3):
        layers = {
            "out": {"kernel": jnp.full((8, 8), 4.0**step)},
            "enc": {"kernel": jnp.ones((8, 8)), "bias": jnp.full(8, 1 + step / 100)},
        }
        averages = jax.tree.map(jnp.square, layers)
        adam = optax.adam(1e-3).init(layers)
        adam = (adam[0]._replace(count=jnp.int32(100**step), mu=averages), *adam[1:])
        count = jnp.int32(100**step)
        yield State(count, layers, adam, averages, jax.random.key(step))


@pytest.mark.parametrize(
    ("states", "layers", "jumped"),
    [
        (
            nnx_objects,
            ["0/inside/lin", "0/inside/norm", "0/out"],
            ("0/out", "0/out/bias"),
        ),
        (
            lambda: (dict(zip("mo", each, strict=True)) for each in nnx_objects()),
            ["m/inside/lin", "m/inside/norm", "m/out"],
            ("m/out", "m/out/bias"),
        ),
        (
            lambda: (model for model, _ in nnx_objects()),
            ["inside/lin", "inside/norm", "out"],
            ("out", "out/bias"),
        ),
        (
            dataclass_objects,
            ["weights/enc", "weights/out"],
            ("weights/out", "weights/out/kernel"),
        ),
    ],
)
def test_layers_match_model_in_any_state(tmp_path, states, layers, jumped):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step, state in enumerate(states(), start=1):
            on_step(step, state)
    found = _report.gather(tmp_path / "run", _report.ReportOptions())
    layer, leaf = jumped
    assert sorted(charts_of(_report.page(found))["layers"]["names"]) == layers
    groups = _report.flight_recorder.group_layers(found)
    assert _report.flight_recorder.find_jump(groups) == ([layer], 2)
    notable = (leaf, "changed most at the last save")
    assert _report.flight_recorder.choose_leaf(found) == notable


SAMPLE = LeafSample(8, 8, 1.0, 0.0, -1.0, 1.0, 0, (4, 4))


def test_leaf_unsampled_by_short_save_counts_as_unchanged():
    scale, bias = (
        LeafHistory(f"params/norm/{name}", "params", "layer", norms, SAMPLE, {})
        for name, norms in (
            ("scale", {1: 11.0, 3: 11.2, 4: 11.4}),
            ("bias", {1: 0.1, 2: 0.1, 3: 0.1, 4: 0.1}),
        )
    )
    changes = _report.flight_recorder.find_changes([scale, bias])
    assert changes.keys() == {2, 3, 4}
    assert max(changes.values()) < 0.05


def test_no_layer_is_first_of_those_that_become_non_finite_at_once(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step, value in enumerate((1.0, 1.01, jnp.nan), start=1):
            layers = {name: {"w": jnp.full(4, value)} for name in "abc"}
            on_step(step, {"params": layers}, metrics={"loss": value})
    found = _report.gather(tmp_path / "run", _report.ReportOptions())
    text = _report.flight_recorder.judge(found).text
    assert "3 layers became non-finite at once, at 3" in text
    assert "jumped first" not in text


def test_counters_alone_are_no_heat_map(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step in (1, 2):
            on_step(step, {"seen": jnp.full(3, step)})
    page = _report.page(_report.gather(tmp_path / "run", _report.ReportOptions()))
    assert "Statistics of 1 leaf at 2 saves, from samples.</p>" in page
    assert 'data-draw="layers"' not in page
