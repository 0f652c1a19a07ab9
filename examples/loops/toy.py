"""A small network with dropout, and batches that are functions of their number."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from flaxckpt.datasets import StepIndexed

TOTAL = 20


class TrainState(train_state.TrainState):
    """Adds the dropout key of the next step."""

    key: jax.Array


class Model(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Maps `[batch, 4]` to `[batch, 1]`."""
        x = nn.Dropout(0.3, deterministic=deterministic)(nn.relu(nn.Dense(16)(x)))
        y: jax.Array = nn.Dense(1)(x)
        return y


def create() -> TrainState:
    """Creates the initial state of all runs."""
    init_key, key = jax.random.split(jax.random.key(0))
    params = Model().init(init_key, jnp.zeros((1, 4)))["params"]
    state: TrainState = TrainState.create(  # type: ignore[no-untyped-call]
        apply_fn=Model().apply, params=params, tx=optax.adamw(1e-2), key=key
    )
    return state


def make_batch(i: int) -> np.ndarray:
    """Returns batch `i`, `[8, 4]`."""
    return np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32)


def batches() -> StepIndexed[np.ndarray]:
    """Returns the iterator of batches."""
    return StepIndexed(make_batch)


def loss_of(params: Any, batch: jax.Array | np.ndarray, **options: Any) -> jax.Array:
    """Returns the mean squared error of predicting the sine of the sum."""
    predicted = Model().apply({"params": params}, batch, **options)
    target = jnp.sin(batch.sum(axis=1, keepdims=True))
    return jnp.mean((jnp.asarray(predicted) - target) ** 2)


@functools.partial(jax.jit, donate_argnames="state")
def train_step(
    state: TrainState, batch: jax.Array | np.ndarray
) -> tuple[TrainState, Mapping[str, jax.Array]]:
    """Takes one step; donates `state`."""
    key, next_key = jax.random.split(state.key)
    options = {"deterministic": False, "rngs": {"dropout": key}}
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch, **options)
    state = state.apply_gradients(  # type: ignore[no-untyped-call]
        grads=grads, key=next_key
    )
    return state, {"loss": loss}


class LostError(Exception):
    """Simulates the loss of a process."""


def lose_if(lost: bool) -> None:
    """Simulates the loss of the process.

    Raises:
        LostError: `lost` is true.
    """
    if lost:
        raise LostError


def compare(train: Callable[[Path, int | None], Any]) -> None:
    """Trains without and with an interruption, and compares the results bit for bit.

    Args:
        train: `train(directory, lose_after)` returns the result of a run; it loses the
            process after step `lose_after`, unless that is None.

    Raises:
        SystemExit: The runs differ.
    """
    with tempfile.TemporaryDirectory() as directory:
        whole = train(Path(directory, "whole"), None)
        with contextlib.suppress(LostError):
            train(Path(directory, "lost"), TOTAL * 2 // 3)
        resumed = train(Path(directory, "lost"), None)
    pairs = zip(*map(jax.tree.leaves, (whole, resumed)), strict=True)
    if not all(_bits(a) == _bits(b) for a, b in pairs):
        sys.exit("the resumed run differs from the uninterrupted run")
    print("The resumed run equals the uninterrupted run, bit for bit.")


def _bits(leaf: Any) -> bytes:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()
