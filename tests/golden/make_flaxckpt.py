"""Writes the golden checkpoints of our own format, `tests/golden/flaxckpt-<version>…/`.

Run from the root of the repository, once for every new version of the manifest, and for
every release that writes more than the one before:

    python -m tests.golden.make_flaxckpt

What is in the repository for versions 1 to 3 was written on one CPU device, with

    jax 0.10.2    flax 0.12.8    optax 0.2.8    tensorstore 0.1.86

Versions 1 and 2 are by earlier forms of this module, which wrote a directory for each
array, too. `flaxckpt-1` is by the first writer of version 1, which had no digests of
metrics and no `encoding`. A folder is never written again.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import linen, nnx
from flax.core import FrozenDict
from flax.training import dynamic_scale, train_state

import flaxckpt
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import LatestN

STEP: Final = 7
METRICS: Final = {"eval/loss": 0.25}
METADATA: Final = {"note": "golden", "tags": ["a", 1, None]}
LAYOUTS: Final = {
    "ocdbt": flaxckpt.ArrayLayout(),
    "zarr-2": flaxckpt.ArrayLayout(zarr_version=2),
    "ocdbt-compact": flaxckpt.ArrayLayout(codec="compact"),
}


def array(*shape: int) -> np.ndarray[Any, Any]:
    """Numbers that are the same with any version of anything."""
    size = int(np.prod(shape))
    return (np.arange(size, dtype=np.float32) * 7 % 11 / 8 - 0.5).reshape(shape)


def state() -> dict[str, Any]:
    """One of every kind of container and leaf."""
    params = {
        "kernel": linen.Partitioned(jnp.asarray(array(2, 3)), names=("in", None)),
        "bias": jnp.asarray(array(3), jnp.bfloat16),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    key = jax.random.wrap_key_data(np.array([1, 2], np.uint32), impl="threefry2x32")
    return {
        "train": train_state.TrainState.create(apply_fn=None, params=params, tx=tx),
        "model": nnx.State(
            {"w": nnx.Param(jnp.asarray(array(2))), "l": {0: nnx.Variable(3)}}
        ),
        "frozen": FrozenDict({"a": {"b": np.array([True, False])}}),
        "scale": dynamic_scale.DynamicScale(growth_interval=5),
        "key": key,
        "numbers": (1, -2.5, True, 1j, np.float16(0.5), jnp.asarray(4)),
        "text": ["", "a/b\n\0é"],
        "empty": [None, {}, [], (), optax.EmptyState(), np.zeros((0, 2), np.int8)],
        "small": {
            "int4": array(4).astype(ml_dtypes.int4),
            "uint4": array(4).astype(np.uint8).astype(ml_dtypes.uint4),
            "float8": array(4).astype(ml_dtypes.float8_e4m3fn),
        },
        "int keys": {10: np.array(9, np.int64), 9: None},
    }


def write(folder: Path) -> None:
    """Writes a run of one step for each layout, and one with items."""
    for name, layout in LAYOUTS.items():
        batches = StepIndexed(lambda i: i, start=STEP)
        with flaxckpt.Checkpointer(
            folder / name, layout=layout, metadata=METADATA
        ) as ckpt:
            ckpt.save(
                STEP, state(), metrics=METRICS, metadata=METADATA, dataset=batches
            )
            ckpt.wait()
            ckpt.pin(STEP)
        # The journal tells where that was, which is nobody's business.
        (folder / name / "events.jsonl").unlink()
    write_items(folder / "items" / "ocdbt")


def in_items(tree: dict[str, Any]) -> dict[str, Any]:
    """The state in two branches, which are items in version 2."""
    first = {name: tree[name] for name in ("train", "model", "frozen")}
    return {"first": first, "second": {k: v for k, v in tree.items() if k not in first}}


def write_items(run: Path) -> None:
    """Writes a run of two steps of several items, the first without an item."""
    with flaxckpt.Checkpointer(
        run,
        items=("first", "second"),
        dataset_item="iter",
        keep_items={"second": [LatestN(1)]},
    ) as ckpt:
        for step in (STEP - 1, STEP):
            ckpt.save(
                step,
                in_items(state()),
                metrics=METRICS,
                metadata=METADATA,
                json={"config": METADATA},
                dataset=StepIndexed(lambda i: i, start=step),
            )
    (run / "events.jsonl").unlink()


def main() -> None:
    """Adds the folder of this release."""
    new = Path(__file__).parent / "new"
    new.mkdir()
    write(new)
    manifest = next(new.rglob("flaxckpt.json")).read_text(encoding="utf-8")
    number = json.loads(manifest)["version"]
    new.rename(new.with_name(f"flaxckpt-{number}-{version('flaxckpt')}"))


if __name__ == "__main__":
    main()
