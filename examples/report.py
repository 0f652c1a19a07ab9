"""Pre-trains and fine-tunes a small model, and writes a report of the second run.

    python -m examples.report                   # in ./report-run, half a minute
    python -m examples.report --workdir=other-run

The second run starts from the first, with another head; it is stopped halfway, and
resumes. Its policies delete old steps. `report.html` shows how long training waited for
saves, the metrics, the kept steps with the reasons, and the changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt.cli import main as flaxckpt_command
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import BestN, EveryNSteps, LatestN
from flaxckpt.transforms import Transform, drop

WIDTH, BLOCKS, FEATURES, BATCH = 128, 4, 32, 256
KEEP = (LatestN(4), BestN(2, "eval/loss", "min"), EveryNSteps(50))


class Block(nn.Module):
    """A residual block."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations `[batch, width]` to the same shape."""
        inner = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="norm")(x)))
        return x + jnp.asarray(nn.Dense(WIDTH, name="down")(inner))


class Classifier(nn.Module):
    """A trunk of blocks, and a head."""

    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps features `[batch, features]` to logits `[batch, classes]`."""
        x = nn.Dense(WIDTH, name="embed")(x)
        for number in range(BLOCKS):
            x = Block(name=f"block_{number}")(x)
        logits: jax.Array = nn.Dense(self.classes, name="head")(x)
        return logits


def make_batch(classes: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns batch `index`: distorted points around the centers of classes."""
    centers = np.random.default_rng(classes).normal(size=(classes, FEATURES))
    rng = np.random.default_rng((classes, index))
    labels = rng.integers(classes, size=BATCH)
    points = centers[labels] + 1.3 * rng.normal(size=(BATCH, FEATURES))
    return np.tanh(points).astype(np.float32), labels


def create_state(classes: int, steps: int) -> TrainState:
    """Creates an initial state."""
    model = Classifier(classes)
    params = model.init(jax.random.key(classes), jnp.zeros((1, FEATURES)))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state: TrainState = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return state


def compute_loss(
    state: TrainState, params: object, batch: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean cross entropy and the accuracy."""
    points, labels = batch
    logits = state.apply_fn({"params": params}, points)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(
    state: TrainState, batch: tuple[jax.Array, jax.Array]
) -> tuple[TrainState, jax.Array]:
    """Takes one step; returns the new state and the loss before the step."""
    compute = functools.partial(compute_loss, state)
    (loss, _), grads = jax.value_and_grad(compute, has_aux=True)(state.params, batch)
    updated: TrainState = state.apply_gradients(grads=grads)
    return updated, loss


@jax.jit
def evaluate(
    state: TrainState, batch: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns loss and accuracy on a batch."""
    return compute_loss(state, state.params, batch)


def train(
    directory: Path,
    classes: int,
    steps: int,
    *,
    stop_at: int | None = None,
    source: Path | None = None,
    changes: Sequence[Transform] = (),
) -> None:
    """Trains, from the newest step in `directory` if there is one.

    Args:
        directory: The run directory.
        classes: The number of classes.
        steps: The number of steps.
        stop_at: A step to stop at, as at a time limit.
        source: A run to start from.
        changes: Transforms of the source.
    """
    batches = StepIndexed(functools.partial(make_batch, classes))
    held_out = make_batch(classes, 10**6)
    with flaxckpt.Checkpointer(directory, keep=KEEP) as checkpointer:
        on_step = flaxckpt.CheckpointCallback(
            checkpointer, every_steps=10, dataset=batches, statistics=True
        )
        state, start = on_step.restore_or_init(
            create_state(classes, steps),
            source=source,
            source_transforms=changes,
            missing="init",
        )
        for step in range(start + 1, (stop_at or steps) + 1):
            state, loss = train_step(state, next(batches))
            metrics = {}
            if step % 10 == 0:
                eval_loss, accuracy = evaluate(state, held_out)
                metrics = {"train/loss": loss, "eval/loss": eval_loss}
                metrics["eval/accuracy"] = accuracy
            on_step(step, state, metrics={k: float(v) for k, v in metrics.items()})


def make(workdir: Path, first_steps: int = 120, second_steps: int = 300) -> Path:
    """Creates both runs, and returns the second."""
    first, second = workdir / "pretrained", workdir / "finetuned"
    changes = [drop("params/head/.*")]
    train(first, classes=24, steps=first_steps)
    fine_tune = functools.partial(
        train, second, classes=10, steps=second_steps, source=first, changes=changes
    )
    fine_tune(stop_at=second_steps * 17 // 30)
    fine_tune()
    return second


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", "report-run", "Directory of the runs.")

    def _run(argv: list[str]) -> None:
        import sys

        workdir = Path(_WORKDIR.value)
        run = make(workdir)
        keep = ["--keep", "latest:4", "--keep", "best:2:eval/loss:min"]
        page = str(workdir / "report.html")
        sys.argv = ["flaxckpt", "report", str(run), "-o", page]
        sys.argv += [*keep, "--keep", "every:50", "--verify"]
        flaxckpt_command()

    app.run(_run)
