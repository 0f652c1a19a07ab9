"""The layers of a report are those of the model, in states of any kind."""

import json

import flax
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flaxckpt
from tests.helpers.report_runs import charts_of, page_of


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


def leaf_beside_layers():
    for step in (1, 2, 3):
        layer = {"kernel": jnp.ones(8), "bias": jnp.ones(4)}
        yield {"params": {"enc": layer, "head": jnp.full(8, 4.0**step)}}


def save_steps(run, states):
    with flaxckpt.Checkpointer(run) as ckpt:
        on_step = flaxckpt.CheckpointCallback(
            ckpt, every_steps=1, statistics=True, check_step=False
        )
        for step, state in enumerate(states, start=1):
            on_step(step, state)
    return run


def changes_of(page):
    """Returns the changes of the layers in the page, a sign for each step."""
    layers = charts_of(page)["layers"]
    return dict(zip(layers["names"], layers["cells"], strict=True))


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        (nnx_objects, {"0/inside/lin": "00", "0/inside/norm": "00", "0/out": "ww"}),
        (
            lambda: (dict(zip("mo", each, strict=True)) for each in nnx_objects()),
            {"m/inside/lin": "00", "m/inside/norm": "00", "m/out": "ww"},
        ),
        (
            lambda: (model for model, _ in nnx_objects()),
            {"inside/lin": "00", "inside/norm": "00", "out": "ww"},
        ),
        (dataclass_objects, {"weights/enc": "cc", "weights/out": "ww"}),
        (leaf_beside_layers, {"params/enc": "00", "params/head": "ww"}),
    ],
)
def test_layers_match_model_in_any_state(tmp_path, states, wanted):
    page = page_of(save_steps(tmp_path / "run", states()))
    assert changes_of(page) == wanted


def test_leaf_unsampled_by_short_save_counts_as_unchanged(tmp_path):
    def states():
        for norm in (1.0, 1.0, 1.02, 1.04):
            layer = {"scale": jnp.full(8, 4 * norm), "bias": jnp.full(8, 0.1)}
            yield {"params": {"norm": layer, "out": {"kernel": jnp.full(8, norm)}}}

    run = save_steps(tmp_path / "run", states())
    whole = changes_of(page_of(run))
    statistics = run / "statistics.jsonl"
    rows = [json.loads(row) for row in statistics.read_text().splitlines()]
    del rows[1]["leaves"]["params/norm/scale"]
    statistics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert changes_of(page_of(run)) == whole


def test_layer_is_compared_with_samples_of_as_many_values(tmp_path):
    whole, part = {"w": jnp.ones(8)}, {"w": jnp.ones(8), "b": jnp.ones(8)}
    state = {"params": {"whole": whole, "part": part}}
    run = save_steps(tmp_path / "run", [state] * 5)
    statistics = run / "statistics.jsonl"
    rows = [json.loads(row) for row in statistics.read_text().splitlines()]
    samples = [(8, 4.0), (4, 3.0), (8, 4.0), (4, 3.03), (8, 40.0)]
    for row, (sampled, norm) in zip(rows, samples, strict=True):
        for layer in state["params"]:
            row["leaves"][f"params/{layer}/w"][1:3] = sampled, norm
        row["leaves"]["params/part/b"][2] = 0.1 if row["step"] == 1 else 0.2
    statistics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert changes_of(page_of(run)) == {
        "params/whole": ".0gz",
        "params/part": "d0gz",  # as if the other leaf had not changed at step 2
    }


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((1.0, 1.01, jnp.nan), "3 layers became non-finite at once, at 3"),
        ((1.0, 9.0, jnp.nan), "3 layers jumped, params/a most, at 2, so that 1 is off"),
        ((1.0, 9.0, 9.0, jnp.nan), "3 layers jumped, params/a most, at 2."),
    ],
)
def test_no_layer_is_first_of_those_that_jump_at_once(tmp_path, values, said):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step, value in enumerate(values, start=1):
            layers = {name: {"w": jnp.full(4, value)} for name in "abc"}
            on_step(step, {"params": layers}, metrics={"loss": value})
    page = page_of(tmp_path / "run")
    assert said in page
    assert "jumped first" not in page


def test_counters_alone_are_no_heat_map(tmp_path):
    states = ({"seen": jnp.full(3, step)} for step in (1, 2))
    page = page_of(save_steps(tmp_path / "run", states))
    assert "Statistics of 1 leaf at 2 saves, from samples.</p>" in page
    assert 'data-draw="layers"' not in page


def test_layers_are_in_order_of_their_numbers(tmp_path):
    def states():
        for norm in (1.0, 1.1):
            names = sorted(f"block_{n}" for n in range(12))
            layers = {name: {"w": jnp.full(4, norm)} for name in names}
            yield {"params": layers}

    page = page_of(save_steps(tmp_path / "run", states()))
    assert list(changes_of(page)) == [f"params/block_{n}" for n in range(12)]
