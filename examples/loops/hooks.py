"""A list of hooks that receive only the step, counted from 0: bind the state.

python -m examples.loops.hooks
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flaxckpt
from examples.loops import toy


def train(directory: Path, lose_after: int | None) -> Any:
    """Trains to the end, from the newest checkpoint if there is one."""
    batches = toy.batches()
    with (
        flaxckpt.Checkpointer(directory) as checkpointer,
        flaxckpt.CheckpointCallback(
            checkpointer, every_steps=4, dataset=batches, step_is="index"
        ) as checkpoint,
    ):
        state, start = checkpoint.restore_or_init(toy.create())
        metrics = None
        # Functions, because the loop replaces these objects.
        checkpoint.bind(state=lambda: state, metrics=lambda: metrics)

        hooks: list[Callable[[int], Any]] = [checkpoint, progress]
        for step in range(start, toy.TOTAL):
            state, metrics = toy.train_step(state, next(batches))
            for hook in hooks:
                hook(step)
            toy.lose_if(step + 1 == lose_after)
    return state


def progress(step: int) -> None:
    """Prints the step, as another hook."""
    if step % 10 == 0:
        print(f"step {step}")


if __name__ == "__main__":
    toy.compare(train)
