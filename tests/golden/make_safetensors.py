"""Writes `tests/golden/safetensors/sharded` and `ours-<version>`, and what is in them.

Run from the root of the repository, once for every new version of our metadata:

    python -m tests.golden.make_safetensors

What is in the repository was written with

    safetensors 0.8.0    jax 0.10.2    flax 0.12.8    optax 0.2.8    numpy 2.4.6

A directory is never written again. `expected.npz`, as in `make_legacy.py`, has what the
safetensors library finds in them.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors import numpy as safetensors

import flaxckpt
from tests.golden import make_flaxckpt, make_legacy

ROOT: Final = Path(__file__).parent / "safetensors"

SHARDS: Final[dict[str, tuple[str, ...]]] = {
    "model-00001-of-00002.safetensors": ("embed.weight", "layers.0.weight"),
    "model-00002-of-00002.safetensors": ("layers.0.bias", "layers.1.mask", "empty"),
}


KINDS: Final = {
    "train/step": "python int",
    "train/params/bias": "bfloat16",
    "train/opt_state/1/0/count": "int32",
    "train/opt_state/1/0/mu/bias": "bfloat16",
    "train/opt_state/1/0/nu/bias": "bfloat16",
    "frozen/a/b": "bool",
    "scale/fin_steps": "python int",
    "scale/scale": "python float",
    "numbers/0": "python int",
    "numbers/1": "python float",
    "numbers/2": "python bool",
    "numbers/3": "float16 scalar",
    "numbers/4": "int32",
    "empty/5": "int8",
    "small/float8": "float8_e4m3fn",
}
"""Leaf path -> type, of what is in ours, but for boxes and keys."""

DTYPES: Final = {
    "BOOL": "bool",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
"""Element types as safetensors calls them -> as numpy and ml_dtypes do."""


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


def write_expected(file: Path) -> None:
    """Writes what the safetensors library finds, with the types that are meant."""
    expected: make_legacy.Expected = {}
    for path in sorted(ROOT.glob("*/*.safetensors")):
        name = path.parent.name
        for key, tensor in deserialize(path.read_bytes()):
            leaf, dtype = key.replace(".", "/"), DTYPES.get(tensor["dtype"], "uint32")
            kind = KINDS.get(leaf) if name.startswith("ours") else dtype
            if kind is None:
                continue
            dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
            value = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
            make_legacy.expect(expected, name, leaf, value, kind)
    np.savez(file, **expected)


def main() -> None:
    """Writes what is not there yet."""
    for name, write in (
        ("sharded", write_sharded),
        ("ours-1", write_ours),
        ("expected.npz", write_expected),
    ):
        if not (ROOT / name).exists():
            write(ROOT / name)


if __name__ == "__main__":
    main()
