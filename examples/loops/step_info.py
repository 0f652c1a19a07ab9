"""A trainer that describes each step in an object, as in Levanter.

python -m examples.loops.step_info
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import flaxckpt
from examples.loops import toy


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The argument of hooks; `step` is the index of the completed step."""

    state: toy.TrainState
    step: int
    loss: Any

    @property
    def next_step(self) -> int:
        """The number of completed steps."""
        return self.step + 1


class Hook(Protocol):
    """A hook of this trainer."""

    def on_step(self, info: StepInfo, force: bool = False) -> Any:
        """Called after each step, with `force` after the last."""


def train(directory: Path, lose_after: int | None) -> Any:
    """Trains to the end, from the newest checkpoint if there is one."""
    batches = toy.batches()
    with (
        flaxckpt.Checkpointer(directory) as checkpointer,
        flaxckpt.CheckpointCallback(
            checkpointer, every_steps=4, dataset=batches
        ) as checkpoint,
    ):
        state, start = checkpoint.restore_or_init(toy.create())
        hooks: list[Hook] = [checkpoint]
        for step in range(start, toy.TOTAL):
            state, metrics = toy.train_step(state, next(batches))
            info = StepInfo(state, step, metrics["loss"])
            for hook in hooks:
                hook.on_step(info, force=info.next_step == toy.TOTAL)
            toy.lose_if(info.next_step == lose_after)
    return state


if __name__ == "__main__":
    toy.compare(train)
