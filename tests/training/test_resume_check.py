"""Trying out a resume tells what would not come back."""

import functools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from tests.helpers import small_runs


@pytest.fixture
def ckpt(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        yield checkpointer


def callback(ckpt, batches=None):
    return flaxckpt.CheckpointCallback(ckpt, dataset=batches, on_preemption=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [small_runs.linen, small_runs.nnx_objects])
def test_check_resume_leaves_whole_runs_unchanged(ckpt, kind):
    state, batches, step = kind()
    on_step = callback(ckpt, batches)
    state, _ = step(state, next(batches))
    before = jax.tree.map(np.asarray, flaxckpt.load(saved(ckpt, "before", state)))
    position = batches.get_state()
    fresh, _, _ = kind()
    on_step.check_resume(state, step, fresh=fresh)
    on_step.check_resume(state, step)
    assert batches.get_state() == position
    after = jax.tree.map(np.asarray, flaxckpt.load(saved(ckpt, "after", state)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert ckpt.steps() == []
    step(state, next(batches))


def saved(ckpt, name, state):
    keys = jax.tree.map(
        lambda x: jax.random.key_data(x) if is_key(x) else x,
        nnx.state(state) if isinstance(state, tuple) else state,
        is_leaf=lambda x: isinstance(x, jax.Array),
    )
    path = ckpt.directory.parent / name
    flaxckpt.save(path, jax.tree.leaves(keys))
    return path


def is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_accepts_step_without_returned_state(ckpt):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(state):
        model, optimizer = state
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones(2))))(model))

    callback(ckpt).check_resume((model, optimizer), step)


def test_compares_objects_even_if_step_returns_something_else(ckpt):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    calls = []

    def step(model):
        calls.append(None)
        model.bias[...] += len(calls)
        return jnp.float32(0)

    with pytest.raises(errors.ResumeMismatchError, match="given/bias"):
        callback(ckpt).check_resume(model, step)


def test_reports_exhausted_dataset(ckpt):
    batches = iter(grain.MapDataset.source([1, 2]))
    list(batches)
    with pytest.raises(errors.DatasetStateError, match="no batch left"):
        callback(ckpt, batches).check_resume({"w": 0}, lambda s, b: s)


def test_compares_results_of_any_kind(ckpt):
    def step(state):
        return state, {"nan": float("nan"), "name": "x", "fn": object()}

    callback(ckpt).check_resume({"w": jnp.zeros(3)}, step)


def test_finds_state_outside_of_given_state(ckpt):
    momentum = {"v": 0.0}

    def step(state, batch):
        momentum["v"] += 1.0
        return {"w": state["w"] + momentum["v"]}

    batches = StepIndexed(lambda i: i)
    with pytest.raises(
        errors.ResumeMismatchError, match="repeated from the same state"
    ) as told:
        callback(ckpt, batches).check_resume({"w": jnp.zeros(3)}, step)
    [mismatch] = told.value.mismatches
    assert mismatch.leaf == "state/w"
    assert "1.0, 1.0" in mismatch.wanted
    assert "2.0, 2.0" in mismatch.found


def test_finds_casts_of_checkpointer(tmp_path):
    cast = flaxckpt.transforms.cast("w", "bfloat16")
    ckpt = flaxckpt.Checkpointer(tmp_path, transforms=[cast])
    state = {"w": jnp.float32(1 / 3), "n": jnp.int32(1)}
    with pytest.raises(errors.ResumeMismatchError, match="restored") as told:
        callback(ckpt).check_resume(state, lambda s: {**s, "n": s["n"] + 1})
    assert [m.leaf for m in told.value.mismatches] == ["state/w"]
    assert len(str(told.value).splitlines()) < 15


def test_finds_dataset_without_restored_position(ckpt):
    class Forgets:
        def __init__(self):
            self.n = 0

        def __next__(self):
            self.n += 1
            return np.float32(self.n)

        def get_state(self):
            return {}

        def set_state(self, state):
            pass

    with pytest.raises(errors.ResumeMismatchError, match=r"batch/0"):
        callback(ckpt, Forgets()).check_resume(
            {"w": jnp.zeros(())}, lambda s, b: {"w": s["w"] + b}
        )


def test_finds_prefetcher_around_grain(ckpt):
    """The loop takes from a prefetcher, and saves the iterator inside it."""
    inner = iter(grain.MapDataset.source(list(range(100))))

    class Prefetcher:
        def __init__(self):
            self.ahead = [next(inner), next(inner)]

        def __next__(self):
            self.ahead.append(next(inner))
            return np.int32(self.ahead.pop(0))

        def get_state(self):
            return inner.get_state()

        def set_state(self, state):
            inner.set_state(state)

    step = functools.partial(lambda s, b: {"w": s["w"] + b})
    with pytest.raises(errors.ResumeMismatchError, match=r"batch/0"):
        callback(ckpt, Prefetcher()).check_resume({"w": jnp.int32(0)}, step)


def test_finds_dtypes_changed_by_first_step(ckpt):
    begin = {"n": jnp.zeros(2, jnp.int32), "ema": None}

    def step(state):
        return {"n": state["n"] + 0.5, "ema": jnp.ones(2)}, jnp.float32(1)

    with pytest.raises(errors.RestoreMismatchError, match="n: wanted int32"):
        callback(ckpt).check_resume(begin, step)
    fresh = {"n": jnp.zeros(2), "ema": None}
    callback(ckpt).check_resume(begin, step, fresh=fresh)
    assert ckpt.steps() == []


def test_accepts_python_number_restored_for_scalar(ckpt):
    begin = {"step": 0, "w": jnp.zeros(2)}
    callback(ckpt).check_resume(
        begin, lambda s: {"step": jnp.asarray(s["step"]) + 1, "w": s["w"] + s["step"]}
    )
