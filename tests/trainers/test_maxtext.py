"""MaxText's checkpointing functions and flaxckpt read each other's steps, exactly."""

import types

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import flaxckpt
from tests.trainers.compare import assert_equal

checkpointing = pytest.importorskip(
    "maxtext.common.checkpointing", reason="MaxText is not installed"
)

from maxtext.common import train_state_nnx  # noqa: E402

pytestmark = pytest.mark.slow

ITEMS = {"items": "items", "dataset_item": "iter"}

CONFIG = types.SimpleNamespace(
    checkpoint_period=1,
    dataset_type="grain",
    elastic_enabled=False,
    enable_autocheckpoint=False,
    enable_checkpointing=True,
    enable_continuous_checkpointing=False,
    enable_diloco=False,
    enable_emergency_checkpoint=False,
    enable_multi_tier_checkpointing=False,
    expansion_factor_real_data=-1,
    scan_layers=True,
)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs, param_dtype=jnp.bfloat16)

    def __call__(self, x):
        return self.last(self.norm(self.dropout(nnx.relu(self.first(x)))))


def create_nnx():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    return train_state_nnx.TrainStateNNX(model, optimizer)


@nnx.jit
def step_nnx(state, x):
    def loss_fn(model):
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    state.apply_gradients(nnx.grad(loss_fn)(state.model))


def create_linen():
    model = nn.Dense(4)
    params = model.init(jax.random.key(0), jnp.ones((4, 8)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))


@jax.jit
def step_linen(state, x):
    def loss_fn(params):
        return jnp.mean(state.apply_fn(params, x) ** 2)

    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))


def make_batches():
    def batch(i):
        return np.random.default_rng(i).normal(size=(4, 8)).astype(np.float32)

    return iter(grain.MapDataset.range(40).shuffle(seed=1).map(batch).to_iter_dataset())


def as_saved(state):
    """Returns the tree that MaxText saves of an NNX state, values or shapes."""
    return train_state_nnx.to_checkpoint_dict(nnx.state(state))


def manager(directory):
    return checkpointing.create_orbax_checkpoint_manager(
        str(directory), enable_checkpointing=True, use_async=True, save_interval_steps=1
    )


def save(directory, step, state, batches):
    with manager(directory) as theirs:
        assert checkpointing.save_checkpoint(theirs, step, state, CONFIG, batches)


def restore(directory, state, batches):
    """Returns what MaxText restores of the newest step; moves the batches, too."""
    with manager(directory) as theirs:
        restored, _ = checkpointing.load_state_if_possible(
            theirs, batches, "", "", 8, state, dataset_type="grain"
        )
    return restored["items"]


def test_nnx_run_continues_exactly_in_both_directions(tmp_path):
    state, batches = create_nnx(), make_batches()
    for _ in range(3):
        step_nnx(state, next(batches))
    save(tmp_path / "theirs", 2, nnx.state(state), batches)  # counted from 0

    moved = make_batches()
    with flaxckpt.Checkpointer(tmp_path / "theirs", **ITEMS) as checkpointer:
        tree = checkpointer.restore(as_saved(create_nnx()), dataset=moved)
        metadata = checkpointer.metadata(2).custom
    assert_equal(tree, as_saved(state))
    assert moved.get_state() == batches.get_state() == {"next_index": 3}
    assert metadata == {"scan_layers": True}

    with flaxckpt.Checkpointer(tmp_path / "ours", **ITEMS) as checkpointer:
        checkpointer.save(2, tree, dataset=moved, metadata=metadata)
    again, resumed = make_batches(), create_nnx()
    restored = restore(tmp_path / "ours", nnx.state(resumed), again)
    assert_equal(restored, nnx.state(state))
    assert again.get_state() == {"next_index": 3}
    assert checkpointing.load_checkpoint_metadata(str(tmp_path / "ours/2")) == metadata

    nnx.update(resumed, restored)
    for _ in range(2):
        step_nnx(state, next(batches))
        step_nnx(resumed, next(again))
    assert_equal(nnx.state(resumed), nnx.state(state))

    # MaxText goes on in the same directory.
    save(tmp_path / "ours", 4, nnx.state(resumed), again)
    with flaxckpt.Checkpointer(tmp_path / "ours", **ITEMS) as checkpointer:
        assert checkpointer.steps() == [2, 4]
        assert_equal(checkpointer.restore(as_saved(create_nnx())), as_saved(resumed))


def test_linen_run_continues_exactly_in_both_directions(tmp_path):
    state, batches = create_linen(), make_batches()
    for _ in range(3):
        state = step_linen(state, next(batches))
    save(tmp_path / "theirs", 2, state, batches)

    moved = make_batches()
    with flaxckpt.Checkpointer(tmp_path / "theirs", **ITEMS) as checkpointer:
        found = checkpointer.restore(jax.eval_shape(create_linen), dataset=moved)
    assert found.step == 3
    assert_equal(found.params, state.params)
    assert_equal(found.opt_state, state.opt_state)

    with flaxckpt.Checkpointer(tmp_path / "ours", **ITEMS) as checkpointer:
        checkpointer.save(2, found, dataset=moved)
    again = make_batches()
    restored = restore(tmp_path / "ours", jax.eval_shape(create_linen), again)
    assert_equal(restored.params, state.params)
    assert_equal(restored.opt_state, state.opt_state)
    np.testing.assert_array_equal(next(again), next(batches))


def test_maxtext_loads_params_of_step(tmp_path):
    state = create_nnx()
    with flaxckpt.Checkpointer(tmp_path, **ITEMS) as checkpointer:
        checkpointer.save(2, as_saved(state))
    blank = nnx.state(create_nnx().model, nnx.Param)
    params = checkpointing.load_params_from_path(
        str(tmp_path / "2" / "items"), blank, 8
    )
    assert_equal(params, nnx.state(state.model, nnx.Param))


def test_reads_params_saved_alone_by_maxtext(tmp_path):
    params = as_saved(create_nnx())["params"]
    checkpointing.save_params_to_path(str(tmp_path / "params"), params)
    assert_equal(flaxckpt.load(tmp_path / "params")["params"], params)
