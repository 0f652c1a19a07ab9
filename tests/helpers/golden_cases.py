"""The golden checkpoints of all readable formats, and their contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import numpy as safetensors

import flaxckpt
from tests import GOLDEN

PYTHON = {f"python {cls.__name__}": cls for cls in (int, float, bool, complex)}


@dataclass(frozen=True)
class Case:
    """A golden checkpoint.

    Attributes:
        name: Of its folder, and its own.
        path: Where it is.
        leaves: Leaf path -> value, of the type that a load gives.
    """

    name: str
    path: Path
    leaves: dict[str, Any]

    @property
    def format(self) -> str:
        return flaxckpt.metadata(self.path).format

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return {
            path: value
            for path, value in self.leaves.items()
            if isinstance(value, np.ndarray)
        }


def cases() -> list[Case]:
    found = []
    for file in sorted(GOLDEN.glob("*/expected.npz")):
        leaves: dict[str, dict[str, Any]] = {}
        with np.load(file) as expected:
            for key, value in expected.items():
                name, path, kind = key.split("|")
                leaves.setdefault(name, {})[path] = typed(value, kind)
        for name, values in leaves.items():
            path = file.parent / name
            found.append(Case(f"{file.parent.name}-{name}", path, values))
    silero = GOLDEN / "safetensors/silero_vad_16k.safetensors"
    tensors = safetensors.load_file(silero).items()
    values = {name.replace(".", "/"): tensor for name, tensor in tensors}
    return [*found, Case("safetensors-silero", silero, values)]


def typed(value: np.ndarray[Any, Any], kind: str) -> Any:
    """Decodes a value of `expected.npz`."""
    if kind in PYTHON:
        return PYTHON[kind](value)
    dtype_name, _, scalar = kind.partition(" ")
    array = value.astype(getattr(ml_dtypes, dtype_name, dtype_name))
    return array[()] if scalar else array


def find(tree: Any, path: str) -> Any:
    for key in path.split("/"):
        if isinstance(tree, list | tuple) and key.isdigit():
            tree = tree[int(key)]
        else:
            tree = tree[key] if isinstance(tree, Mapping) else getattr(tree, key)
    return tree


def nested(leaves: dict[str, Any]) -> Any:
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *outer, last = path.split("/")
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, np.ndarray | np.generic):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert found.tobytes() == wanted.tobytes()
    else:
        assert found == wanted


CASES = cases()
