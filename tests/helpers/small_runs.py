"""Two small training programs, to kill and restart.

    python -m tests.helpers.small_runs linen DIRECTORY TOTAL_STEPS

Prints the number of each completed step.
"""

import functools
import sys
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import flaxckpt
from flaxckpt.datasets import Buffered, StepIndexed
from flaxckpt.policies import BestN, LatestN

KEEP = (LatestN(2), BestN(1, "loss", mode="min"))
SAVE_EVERY = 7
STEP_SECS = 0.004


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(3)(x)


class KeyedState(train_state.TrainState):
    dropout_key: jax.Array


def linen():
    """A donated TrainState, and a shuffled grain iterator."""
    data = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
    rows = grain.MapDataset.source(data).seed(1).shuffle().repeat().batch(16)
    key, dropout_key = jax.random.split(jax.random.key(0))
    params = Net().init(key, data[:1], train=False)["params"]
    state = KeyedState.create(
        apply_fn=Net().apply,
        params=params,
        tx=optax.adamw(1e-2),
        dropout_key=dropout_key,
    )

    @functools.partial(jax.jit, donate_argnames="state")
    def step(state, batch):
        dropout_key, next_key = jax.random.split(state.dropout_key)

        def loss_fn(params):
            rngs = {"dropout": dropout_key}
            out = state.apply_fn({"params": params}, batch, train=True, rngs=rngs)
            return jnp.mean((out - batch[:, :3]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads, dropout_key=next_key), loss

    return state, iter(rows), step


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def nnx_objects():
    """A model and its optimizer, changed in place, and prefetched batches."""

    def batch(i):
        return np.random.default_rng([2, i]).normal(size=(16, 8)).astype(np.float32)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, batch):
        def loss_fn(model):
            return jnp.mean((model(batch) - batch[:, :3]) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def step(state, batch):
        loss = update(*state, batch)
        return state, loss

    batches = Buffered(StepIndexed(batch), depth=3, transform=jnp.asarray)
    return (model, optimizer), batches, step


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(kind, directory, total):
    state, batches, train_step = {"linen": linen, "nnx": nnx_objects}[kind]()
    with flaxckpt.Checkpointer(directory, keep=KEEP) as ckpt:
        on_step = flaxckpt.CheckpointCallback(
            ckpt, every_steps=SAVE_EVERY, dataset=batches
        )
        state, start = on_step.restore_or_init(state)
        for step in range(start + 1, total + 1):
            state, loss = train_step(state, next(batches))
            on_step(step, state, metrics={"loss": loss})
            time.sleep(STEP_SECS)
            say(str(step))
            if step % 50 == 0:
                for _ in range(20):  # an evaluation that checks for signals
                    if on_step.should_stop():
                        break
                    time.sleep(STEP_SECS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
