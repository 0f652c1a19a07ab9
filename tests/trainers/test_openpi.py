"""openpi's items, saved and restored by Orbax as openpi calls it.

openpi is in no package index. Its `save_state` splits the params off the TrainState, or
their averages if it has them, and saves both as items beside `assets`, a directory of
normalization statistics. Source: `src/openpi/training/checkpoints.py` and
`src/openpi/models/model.py` of Physical-Intelligence/openpi at 15a9616, June 2026.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, struct, traverse_util

import flaxckpt
from flaxckpt.policies import EveryNSteps, LatestN
from flaxckpt.transforms import use_orbax_names
from tests.trainers.compare import assert_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
]

ITEMS = ("train_state", "params")
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
NORM_STATS = {"norm_stats": {"state": {"mean": [0.5], "std": [2.0]}}}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(3, 4, rngs=rngs)
        self.layers = nnx.List(
            [nnx.Linear(4, 4, rngs=rngs, param_dtype=jnp.bfloat16) for _ in range(2)]
        )

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


@struct.dataclass
class TrainState:
    step: Any
    params: nnx.State
    model_def: nnx.GraphDef
    opt_state: optax.OptState
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    ema_decay: float | None = struct.field(pytree_node=False)
    ema_params: nnx.State | None = None


def create(has_average):
    model = Model(nnx.Rngs(0))
    params = nnx.state(model)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_def=nnx.graphdef(model),
        opt_state=TX.init(nnx.state(model, nnx.Param)),
        tx=TX,
        ema_decay=0.9 if has_average else None,
        ema_params=params if has_average else None,
    )


@jax.jit
def train_step(state, x):
    def loss_fn(params):
        model = nnx.merge(state.model_def, params)
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    grads = jax.grad(loss_fn)(state.params)
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.ema_params
    if average is not None:
        average = jax.tree.map(
            lambda old, new: state.ema_decay * old + (1 - state.ema_decay) * new,
            average,
            params,
        )
    return dataclasses.replace(
        state,
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        ema_params=average,
    )


def trained(state, steps):
    for step in range(steps):
        state = train_step(state, jnp.full((2, 3), step + 1.0))
    return state


def split(state):
    """Returns the items with arrays."""
    if state.ema_params is None:
        params, rest = state.params, dataclasses.replace(state, params={})
    else:
        params, rest = state.ema_params, dataclasses.replace(state, ema_params=None)
    return {"train_state": rest, "params": {"params": params}}


def join(items):
    rest, params = items["train_state"], items["params"]["params"]
    if rest.params:
        return dataclasses.replace(rest, ema_params=params)
    return dataclasses.replace(rest, params=params)


def manager(directory):
    return ocp.CheckpointManager(
        directory,
        item_handlers={name: ocp.PyTreeCheckpointHandler() for name in ITEMS},
        options=ocp.CheckpointManagerOptions(max_to_keep=1, keep_period=5),
    )


def open_run(directory, **options):
    """Opens a directory that openpi reads, too: its variables end with `value`."""
    return flaxckpt.Checkpointer(
        directory, items=ITEMS, transforms=[use_orbax_names()], **options
    )


def restore_params(path):
    """Restores the params of an item as openpi's policies do, without a structure."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata
        item = {"params": tree["params"]}
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        restored = checkpointer.restore(
            path, ocp.args.PyTreeRestore(item=item, restore_args=args)
        )
    flat = traverse_util.flatten_dict(restored["params"])
    assert all(key[-1] == "value" for key in flat)
    return traverse_util.unflatten_dict({key[:-1]: v for key, v in flat.items()})


@pytest.mark.parametrize("has_average", [False, True])
def test_run_continues_exactly_in_both_directions(tmp_path, has_average):
    state = trained(create(has_average), 2)
    with manager(tmp_path / "theirs") as theirs:
        theirs.save(2, items=split(state))
    assets = tmp_path / "theirs/2/assets/trossen"
    assets.mkdir(parents=True)  # by a handler of openpi's own
    (assets / "norm_stats.json").write_text(json.dumps(NORM_STATS))

    blank = split(create(has_average))
    with open_run(tmp_path / "theirs") as checkpointer:
        found = checkpointer.restore(blank)
    assert_equal(join(found), state)

    with open_run(tmp_path / "ours") as checkpointer:
        checkpointer.save(2, found, metadata=NORM_STATS)
    with manager(tmp_path / "ours") as theirs:
        restored = theirs.restore(2, items=blank)
        resumed = join({item: restored[item] for item in ITEMS})
        assert_equal(resumed, state)
        resumed = trained(resumed, 1)
        theirs.save(3, items=split(resumed))
    with open_run(tmp_path / "ours") as checkpointer:
        assert_equal(join(checkpointer.restore(blank)), resumed)


@pytest.mark.parametrize("has_average", [False, True])
def test_openpi_policies_load_params_of_step(tmp_path, has_average):
    state = trained(create(has_average), 2)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(2, split(state))
    params = state.ema_params if has_average else state.params
    wanted = jax.tree.map(np.asarray, nnx.to_pure_dict(params))
    found = restore_params(tmp_path / "2" / "params")
    found["layers"] = {int(key): value for key, value in found["layers"].items()}
    assert_equal(found, wanted)


def test_loads_only_params_of_openpi_step(tmp_path):
    state = trained(create(has_average=True), 2)
    with manager(tmp_path) as theirs:
        theirs.save(2, items=split(state))
    model = Model(nnx.Rngs(1))
    blank = {"params": {"params": nnx.state(model)}}
    found = flaxckpt.load(tmp_path, blank)
    assert_equal(found["params"]["params"], state.ema_params)


def test_old_steps_keep_only_params(tmp_path):
    state = split(trained(create(has_average=False), 1))
    keep = [LatestN(1), EveryNSteps(5)]
    with open_run(
        tmp_path, keep=keep, keep_items={"train_state": [LatestN(1)]}
    ) as checkpointer:
        for step in (5, 6, 7):
            checkpointer.save(step, state).wait()
        checkpointer.wait()
    found = {
        step.name: sorted(item.name for item in step.iterdir() if item.is_dir())
        for step in Path(tmp_path).iterdir()
        if step.name.isdigit()
    }
    assert found == {"5": ["params"], "7": ["params", "train_state"]}
    restore_params(tmp_path / "5" / "params")


def test_retention_keeps_step_until_assets_are_gone(tmp_path):
    state = split(create(has_average=False))
    with open_run(tmp_path / "run", keep=[LatestN(1)]) as checkpointer:
        checkpointer.save(1, state).wait()
        assets = tmp_path / "run/1/assets/trossen"
        assets.mkdir(parents=True)
        (assets / "norm_stats.json").write_text(json.dumps(NORM_STATS))
        report = checkpointer.verify(1)
        assert report.ok
        assert any("assets" in str(path) for path in report.extra)
        assert_equal(checkpointer.restore(state), state)
        restore_params(tmp_path / "run/1/params")
        checkpointer.save(2, state).wait()
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2]
        shutil.rmtree(assets.parent)
        checkpointer.save(3, state).wait()
        checkpointer.wait()
        assert checkpointer.steps() == [3]
