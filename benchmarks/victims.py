"""Runs to kill, cut off or damage, the same for each checkpointer.

The program `python -m benchmarks.victims NAME DIRECTORY SAVES` saves that many steps
and prints the number of each acknowledged step; with one save, it exits without
waiting.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_LEAVES = 4
_SHAPE = (512, 512)
_KEPT = 2


def state(step: int) -> dict[str, Any]:
    """Returns 4 MB of float32 values, different for each step."""
    rng = np.random.default_rng(step)
    params = {f"w{n}": rng.standard_normal(_SHAPE, np.float32) for n in range(_LEAVES)}
    return {"params": params, "step": np.asarray(step)}


def is_state(restored: Any, step: int) -> bool:
    """Returns True if a restored state equals the state of a step, bit for bit."""
    wanted = state(step)
    return np.array_equal(restored["step"], wanted["step"]) and all(
        np.asarray(restored["params"][name]).tobytes() == value.tobytes()
        for name, value in wanted["params"].items()
    )


class Victim(Protocol):
    """A checkpointer in a directory, with default options, that keeps two steps."""

    def save(self, step: int) -> None:
        """Begins to save a step."""

    def wait(self) -> None:
        """Returns when the step counts as saved."""

    def steps(self) -> list[int]:
        """Returns the listed steps."""

    def restore(self, step: int | None) -> Any:
        """Restores a step, or the newest."""

    def close(self) -> None:
        """Closes threads and files."""


class Flaxckpt:
    """A `Checkpointer`."""

    def __init__(self, directory: Path) -> None:
        import flaxckpt
        from flaxckpt.policies import LatestN

        self._ckpt = flaxckpt.Checkpointer(directory, keep=[LatestN(_KEPT)])

    def save(self, step: int) -> None:
        self._ckpt.save(step, state(step))

    def wait(self) -> None:
        self._ckpt.wait()

    def steps(self) -> list[int]:
        return self._ckpt.steps()

    def restore(self, step: int | None) -> Any:
        return self._ckpt.restore(state(0), step=step)

    def close(self) -> None:
        self._ckpt.close()


class Orbax:
    """A `CheckpointManager` with `StandardSave`."""

    def __init__(self, directory: Path) -> None:
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._manager = ocp.CheckpointManager(
            directory, options=ocp.CheckpointManagerOptions(max_to_keep=_KEPT)
        )

    def save(self, step: int) -> None:
        self._manager.save(step, args=self._args.StandardSave(state(step)))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def restore(self, step: int | None) -> Any:
        args = self._args.StandardRestore(state(0))
        return self._manager.restore(step, args=args)

    def close(self) -> None:
        self._manager.close()


VICTIMS: dict[str, Callable[[Path], Victim]] = {"flaxckpt": Flaxckpt, "orbax": Orbax}


def main(arguments: Sequence[str]) -> None:
    """Saves steps in a directory and waits to be killed, or saves once and exits."""
    name, directory, saves = arguments
    victim = VICTIMS[name](Path(directory))
    for step in range(1, int(saves) + 1):
        victim.save(step)
        if saves == "1":
            return  # without waiting
        victim.wait()
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
    time.sleep(600)  # until it is killed


if __name__ == "__main__":
    main(sys.argv[1:])
