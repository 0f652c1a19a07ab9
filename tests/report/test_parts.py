"""Moments are told apart from the parameters, for states of several kinds."""

import re
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import flaxckpt
from tests.helpers.report_runs import LASTS, Elements, charts_of, make_run, page_of

PARAMS = {
    "trunk": {"kernel": np.ones((8, 4), np.float32), "bias": np.ones(4, np.float32)},
    "head": np.ones((4, 2), np.float32),
}


class Pair(NamedTuple):
    params: Any
    opt_state: Any


@flax.struct.dataclass
class Struct:
    params: Any
    opt_state: Any


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 4, rngs=rngs)
        self.second = nnx.Linear(4, 2, rngs=rngs)


def nnx_state():
    model = Model(nnx.Rngs(0))
    return {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param),
    }


def in_dict(tx):
    return {"params": PARAMS, "opt_state": tx.init(PARAMS)}


BF16 = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
STATES = {
    "dict": (lambda: in_dict(optax.adam(1e-3)), "params", 2),
    "frozen": (lambda: FrozenDict(in_dict(optax.adam(1e-3))), "params", 2),
    "named tuple": (lambda: Pair(**in_dict(optax.adam(1e-3))), "params", 2),
    "struct": (lambda: Struct(**in_dict(optax.adam(1e-3))), "params", 2),
    "linen": (
        lambda: TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3)),
        "params",
        2,
    ),
    "nnx": (nnx_state, "model", 2),
    "momentum": (lambda: in_dict(optax.sgd(1e-3, momentum=0.9)), "params", 1),
    "other type": (lambda: in_dict(BF16), "params", 2),
    "average": (lambda: {"params": PARAMS, "ema_params": PARAMS}, "params", 1),
    "no moments": (lambda: in_dict(optax.sgd(1e-3)), "params", 0),
    "alike layers": (lambda: {"params": {"a": PARAMS, "b": PARAMS}}, "params", 0),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("x64", [False, True])
def test_copies_and_parts_add_up_to_whole_state(tmp_path, name, x64):
    make, original, count = STATES[name]
    with jax.enable_x64(x64):
        flaxckpt.save(tmp_path / "checkpoint", make())
    described = flaxckpt.metadata(tmp_path / "checkpoint")
    page = page_of(tmp_path / "checkpoint")
    elements = Elements(page)
    shares = elements.with_data("data-path", "data-bytes")
    assert sum(int(share["data-bytes"]) for share in shares) == described.total_bytes
    copies = re.findall(
        'data-path="([^"]*)"><[^>]*>[^<]*</span><[^>]*>the leaves', page
    )
    assert page.count(f'<span class="note">the shapes of {original}<') == count
    assert len(copies) == count
    rest = {share["data-path"]: int(share["data-bytes"]) for share in shares}
    copied = sum(rest.pop(path) for path in copies)
    parts = elements.with_data("data-part", "data-bytes")
    if parts:
        assert sum(int(part["data-bytes"]) for part in parts) == sum(rest.values())
    assert sum(rest.values()) == described.total_bytes - copied


def test_damaged_newest_step_does_not_hide_sizes_and_changes(tmp_path):
    run = make_run(tmp_path)
    (run / "80" / "flaxckpt.json").write_text("{")
    page = page_of(run, code=1)
    elements = Elements(page)
    shares = elements.with_data("data-path", "data-bytes")
    nbytes = flaxckpt.metadata(run / "70").total_bytes
    assert sum(int(share["data-bytes"]) for share in shares) == nbytes
    assert "leaves of step 70." in page
    assert elements.with_data("data-path", "data-rel")
    assert "Step 80 is damaged, newest other 70 (files complete, not read)" in page
    assert set(map(int, re.findall('<tr id="step-([0-9]+)"', page))) == LASTS - {80}


def test_reports_non_finite_values(tmp_path):
    state = {"params": {"w": np.arange(60, dtype=np.float32), "v": np.ones(9)}}
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=1, statistics=True, check_step=False
        )
        for step in (1, 2):
            state["params"]["w"][0] = np.nan if step == 2 else 0
            on_step(step, state)
    page = page_of(tmp_path / "run")
    assert "1 leaf has NaNs or infinities" in page
    assert charts_of(page)["layers"]["cells"] == ["!"]
