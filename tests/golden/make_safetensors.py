"""Writes `tests/golden/safetensors/sharded` and `ours-<version>`.

Run from the root of the repository, once for every new version of our metadata:

    PYTHONPATH=tests python tests/golden/make_safetensors.py

What is in the repository was written with

    safetensors 0.8.0    jax 0.10.2    flax 0.12.8    optax 0.2.8    numpy 2.4.6

A directory is never written again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from golden import make_flaxckpt
from safetensors import numpy as safetensors

import flaxckpt

ROOT: Final = Path(__file__).parent / "safetensors"

SHARDS: Final[dict[str, tuple[str, ...]]] = {
    "model-00001-of-00002.safetensors": ("embed.weight", "layers.0.weight"),
    "model-00002-of-00002.safetensors": ("layers.0.bias", "layers.1.mask", "empty"),
}


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    """What the shards hold."""
    return {
        "embed.weight": make_flaxckpt.array(6, 4).astype(ml_dtypes.bfloat16),
        "layers.0.weight": make_flaxckpt.array(4, 3),
        "layers.0.bias": make_flaxckpt.array(3).astype(np.float16),
        "layers.1.mask": np.array([True, False, True]),
        "empty": np.zeros((0, 4), np.int32),
    }


def state() -> dict[str, Any]:
    """What is in ours: what the golden checkpoint of our own format has.

    But not the types that safetensors lacks.
    """
    state = make_flaxckpt.state()
    state["small"] = {k: v for k, v in state["small"].items() if "int4" not in k}
    state["numbers"] = tuple(n for n in state["numbers"] if n != 1j)
    return state


def write_sharded(directory: Path) -> None:
    """Writes the shards and their index."""
    directory.mkdir()
    weight_map = {}
    for name, keys in SHARDS.items():
        some = {key: tensors()[key] for key in keys}
        safetensors.save_file(some, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, name)
    size = sum(array.nbytes for array in tensors().values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_ours(directory: Path) -> None:
    """Writes what convert makes of a checkpoint of our own format."""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        flaxckpt.save(source, state(), metadata=make_flaxckpt.METADATA)
        flaxckpt.convert(source, directory, format="safetensors")


def main() -> None:
    """Writes what is not there yet."""
    for name, write in (("sharded", write_sharded), ("ours-1", write_ours)):
        if not (ROOT / name).exists():
            write(ROOT / name)


if __name__ == "__main__":
    main()
