"""A bare loop: call the hook after every step.

python -m examples.loops.bare
"""

from __future__ import annotations

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
            checkpointer, every_steps=4, dataset=batches
        ) as on_step,
    ):
        state, start = on_step.restore_or_init(toy.create())
        print(f"from step {start}")
        for step in range(start + 1, toy.TOTAL + 1):
            state, metrics = toy.train_step(state, next(batches))
            on_step(step, state, metrics=metrics)
            toy.lose_if(step == lose_after)
    return state


if __name__ == "__main__":
    toy.compare(train)
