"""A job that evaluates each checkpoint while another job trains.

    python -m examples.loops.evaluation

The trainer keeps the two newest steps and the best step. The evaluation adds the
metrics that define the best. No step is deleted while the evaluation reads it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import jax

import flaxckpt
from examples.loops import toy
from flaxckpt.policies import BestN, LatestN

KEEP = (LatestN(2), BestN(1, "eval/loss", mode="min"))


def train(directory: str) -> None:
    """Trains, in a bare loop."""
    batches = toy.batches()
    with (
        flaxckpt.Checkpointer(directory, keep=KEEP) as checkpointer,
        flaxckpt.CheckpointCallback(
            checkpointer, every_steps=4, dataset=batches
        ) as on_step,
    ):
        state, start = on_step.restore_or_init(toy.create())
        for step in range(start + 1, toy.TOTAL + 1):
            state, _ = toy.train_step(state, next(batches))
            on_step(step, state)


def evaluate(directory: str) -> None:
    """Evaluates each new step, up to the last step."""
    batch = toy.make_batch(10**6)  # not used in training
    params = jax.eval_shape(toy.create).params
    with flaxckpt.Checkpointer(directory) as checkpointer:
        for step in checkpointer.new_steps(timeout_secs=120, poll_secs=0.2):
            restored = checkpointer.restore({"params": params}, step=step)
            loss = float(toy.loss_of(restored["params"], batch))
            checkpointer.add_metrics(step, {"eval/loss": loss})
            print(f"step {step}: loss {loss:.4f}")
            if step == toy.TOTAL:
                break
        best = checkpointer.best_step("eval/loss", "min")
        print(f"of steps {checkpointer.steps()}, {best} is the best")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "examples.loops.evaluation", directory]
            with subprocess.Popen(command):
                evaluate(directory)
