"""The callback as the function of clu's `PeriodicCallback`, which decides when to save.

    python -m examples.loops.clu_hooks

The callback has the signature of clu's actions, so it can also be an action itself, as
in `examples.loops.hooks` and `examples.loops.clu_metrics`. Then it sees every step,
saves the last step and handles signals at once.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import flaxckpt
from examples.loops import toy
from flaxckpt.integrations.clu import import_metric_writers

import_metric_writers()  # so that the next import succeeds without TensorFlow
periodic_actions = importlib.import_module("clu.periodic_actions")


def train(directory: Path, lose_after: int | None) -> Any:
    """Trains to the end, from the newest checkpoint if there is one."""
    batches = toy.batches()
    with (
        flaxckpt.Checkpointer(directory) as checkpointer,
        flaxckpt.CheckpointCallback(checkpointer, dataset=batches) as save,
    ):
        state, start = save.restore_or_init(toy.create())
        checkpoint = periodic_actions.PeriodicCallback(
            every_steps=4, callback_fn=functools.partial(save, force=True)
        )
        for step in range(start + 1, toy.TOTAL + 1):
            state, metrics = toy.train_step(state, next(batches))
            checkpoint(step, state=state, metrics=metrics)
            toy.lose_if(step == lose_after)
    return state


if __name__ == "__main__":
    toy.compare(train)
