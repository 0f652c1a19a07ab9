"""The hook as the function of a `PeriodicCallback` of clu, which decides when to save.

    python -m examples.loops.clu_hooks

`clu.periodic_actions` needs TensorFlow and TensorBoard; flaxckpt needs neither. Because
the hook can be called as clu's actions are, it may also be one of them itself, as in
`examples.loops.hooks`. Then it sees every step: it saves the last one, too, and heeds
signals at once.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import flaxckpt
from examples.loops import toy

try:
    from clu import periodic_actions
except ImportError as error:
    print(f"skipped: clu.periodic_actions cannot be imported ({error})")
    sys.exit()


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
