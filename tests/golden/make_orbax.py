"""Writes the golden checkpoints of Orbax, `tests/golden/orbax-<version>/`.

Run from the root of the repository, once for every new version of Orbax:

    python -m tests.golden.make_orbax

What is in the repository was written by Python 3.11.2 with

    orbax-checkpoint 0.12.8    jax 0.10.2    tensorstore 0.1.86    grain 0.2.18

on one CPU device. A folder is never written again: a new version adds its own.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

SEED: Final = 20
STEP: Final = 7
NEXT_INDEX: Final = 3
VARIANTS: Final = (
    "v0_standard",
    "v0_pytree",
    "v0_zarr3",
    "v0_files",
    "v0_files_zarr3",
    "v0_rich_types",
    "v0_manager",
    "v0_manager_composite",
    "v1_save",
    "v1_files",
    "v1_training",
)
"""Names in `orbax_writers.WRITERS`; `v0_grain` is written besides."""
WITHOUT_TEXT: Final = frozenset({"v0_standard", "v0_manager", "v0_manager_composite"})
"""Variants whose writer refuses a string."""


def state(seed: int, *, text: bool) -> dict[str, Any]:
    """A small state; the same seed gives the same bits with any version of jax."""
    rng = np.random.default_rng(seed)
    tree = {
        "params": {
            "kernel": jnp.asarray(rng.normal(size=(2, 3)), jnp.float32),
            "bias": jnp.asarray(rng.normal(size=3), jnp.bfloat16),
        },
        "opt_state": (None, [jnp.asarray(rng.integers(0, 99, 3), jnp.int32)], {}),
        "steps": np.asarray(rng.integers(0, 2**60, 2), np.int64),
        "rng": jax.random.wrap_key_data(
            rng.integers(0, 2**32, 2, np.uint32), impl="threefry2x32"
        ),
        "epoch": 3,
    }
    return tree | {"name": "golden/é", "done": True} if text else tree


def main() -> None:
    """Writes every variant beside this script."""
    # Only here: a test reads `state` also where Orbax and grain are missing.
    import grain
    import orbax.checkpoint as ocp

    from tests.helpers.orbax_writers import WRITERS

    folder = Path(__file__).parent / f"orbax-{ocp.__version__}"
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        for variant in VARIANTS:
            root = Path(scratch) / variant
            WRITERS[variant](root, STEP, state(SEED, text=variant not in WITHOUT_TEXT))
            shutil.copytree(root, folder / variant)
        root = Path(scratch) / "v0_grain"
        iterator = iter(grain.MapDataset.range(20).to_iter_dataset())
        for _ in range(NEXT_INDEX):
            next(iterator)
        with ocp.CheckpointManager(root) as manager:
            args = ocp.args.Composite(
                state=ocp.args.StandardSave({"kernel": jnp.arange(3.0)}),
                dataset=grain.checkpoint.CheckpointSave(iterator),
            )
            manager.save(STEP, args=args)
        shutil.copytree(root, folder / "v0_grain")


if __name__ == "__main__":
    sys.exit(main())
