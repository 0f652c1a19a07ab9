"""Writes golden checkpoints of big_vision, and what is in them.

Run from the root of the repository:

    python -m tests.golden.make_big_vision

What is in the repository was written with

    jax 0.10.2    tensorstore 0.1.86

as `tssave` and `save_checkpoint_ts` of big_vision do: each leaf by jax's manager of
checkpoints, under its path with `~` in place of `/`, and a pointer to the newest
checkpoint. A folder is never written again. `expected.npz` is as in `make_legacy.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.array_serialization import serialization

from tests.golden import make_legacy

ROOT: Final = Path(__file__).parent / "big_vision"
NAME: Final = "checkpoint.bv"


def state(seed: int) -> dict[str, jax.Array]:
    """The leaves of a checkpoint by their paths."""
    params = {
        name: jnp.asarray(value)
        for name, value in make_legacy.leaves(make_legacy.parameters(seed))
        if "embedding" not in name
    }
    moments = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    return {
        **{f"params/{name}": value for name, value in params.items()},
        "opt/0/count": jnp.int32(seed),
        **{f"opt/0/mu/{name}": value for name, value in moments.items()},
        "opt/1/scale": jnp.float32(0.5),
        "chrono/step": jnp.int32(7),
    }


def write(
    manager: serialization.GlobalAsyncCheckpointManager,
    end: str,
    seed: int,
    expected: make_legacy.Expected,
) -> None:
    """Writes a checkpoint and the pointer to it, and notes what is in it."""
    path = ROOT / f"{NAME}-{end}"
    path.mkdir()
    leaves = state(seed)
    manager.serialize_with_paths(
        [*leaves.values()],
        [str(path / name.replace("/", "~")) for name in leaves],
        on_commit_callback=lambda: None,
    )
    manager.wait_until_finished()
    (ROOT / f"{NAME}-LAST").write_text(end)
    for name, value in leaves.items():
        make_legacy.expect(expected, path.name, name, value, value.dtype.name)


def main() -> None:
    """Writes what is not there yet."""
    if ROOT.exists():
        print(f"{ROOT} is there already")  # noqa: T201
        return
    ROOT.mkdir()
    expected: make_legacy.Expected = {}
    manager = serialization.GlobalAsyncCheckpointManager()
    write(manager, "000000003", 1, expected)
    write(manager, "000000007-tmp", 2, expected)
    np.savez(ROOT / "expected.npz", **expected)


if __name__ == "__main__":
    main()
