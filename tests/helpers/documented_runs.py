"""The directories for the shell commands of the documents."""

import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import flaxckpt
from tests.helpers import chunks, published

LOSSES = {1000: 0.91, 2000: 0.62, 3000: 0.71, 4000: 0.66}


def make(root):
    """Creates a run, a damaged run, and files beside them."""
    rng = np.random.default_rng(0)
    for name in ("7", "8"):
        with flaxckpt.Checkpointer(root / "runs" / name) as run:
            for step, loss in LOSSES.items():
                kernel = jnp.asarray(rng.normal(size=(64, 32)), jnp.float32)
                params = {"dense": {"kernel": kernel, "bias": jnp.zeros(32)}}
                state = TrainState.create(
                    apply_fn=None, params=params, tx=optax.adamw(1e-3)
                )
                metrics = {"eval/loss": loss}
                run.save(step, state.replace(step=step), metrics=metrics)
    state = root / "runs/8/4000/state"
    [name] = chunks.names(state, "params.dense.kernel")
    chunks.flip(state, name, at=1000)
    make_model(root)
    (root / "wanted.json").write_text(
        '{"params": {"dense": {"kernel": "bfloat16[64, 32]", "scale": "float32[32]"}}}'
    )
    (root / "run.toml").write_text(
        'keep = [{latest = 2}, {best = 1, metric = "eval/loss", mode = "min"}]\n'
    )


def make_model(root):
    """Creates the directory of a published model."""
    published.write_llama(root / "tiny-llama")
