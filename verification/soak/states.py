"""Small states of several kinds; each step has values of its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

FROZEN = np.arange(4096, dtype=np.float32)


def plain(step):
    """A dict, with a leaf that never changes: it is hard-linked."""
    return {
        "params": {"w": jnp.full((64, 32), step, jnp.float32), "frozen": FROZEN},
        "key": jax.random.fold_in(KEY, step),
        "name": f"step {step}",
        "step": step,
    }


def train_state(step):
    """A TrainState of Linen, with the moments of Adam."""
    params = {"kernel": jnp.full((32, 32), step, jnp.bfloat16), "bias": jnp.zeros(32)}
    state = TrainState.create(apply_fn=None, params=params, tx=ADAM)
    return state.replace(step=jnp.int32(step))


def objects(step):
    """An NNX module."""
    model = nnx.Linear(16, 8, rngs=RNGS)
    model.kernel[...] = jnp.full((16, 8), step, jnp.float32)
    return model


ADAM = optax.adam(1e-3)
KEY = jax.random.key(0)
RNGS = nnx.Rngs(0)
KINDS = (plain, train_state, objects)


def value(state):
    """Returns the step that the values of a state tell; -1 if they disagree."""
    leaves = jax.tree_util.tree_leaves_with_path(
        nnx.state(state) if isinstance(state, nnx.Module) else state
    )
    [array] = [
        np.asarray(leaf, np.float32)
        for path, leaf in leaves
        if _NAMES.search(jax.tree_util.keystr(path))
    ]
    return float(array.flat[0]) if (array == array.flat[0]).all() else -1.0


def expected(step, state):
    """Returns the value of a step, rounded as the state has it."""
    is_half = isinstance(state, TrainState)
    return float(np.asarray(jnp.asarray(step, jnp.bfloat16))) if is_half else step


_NAMES = re.compile(r"^(?!.*opt_state).*(kernel|'w')")
