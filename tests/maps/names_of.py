"""Recorded names and shapes, as files and as states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.maps.record_names import NAMES, fill

RECORDED = sorted(file.stem for file in NAMES.glob("*.json"))


class Recorded(NamedTuple):
    """The shapes of a model on both sides of a conversion.

    Attributes:
        source: Leaf path -> shape, of the source.
        target: Leaf path -> shape, of the converted model.
        checksums: Leaf path -> checksum of the converted model; None: initialised.
    """

    source: dict[str, tuple[int, ...]]
    target: dict[str, tuple[int, ...]]
    checksums: dict[str, int | None]


def read(name: str) -> Recorded:
    found = json.loads((NAMES / f"{name}.json").read_text(encoding="utf-8"))
    return Recorded(
        {path: tuple(shape) for path, shape in found["source"].items()},
        {path: tuple(shape) for path, (shape, _) in found["target"].items()},
        {path: number for path, (_, number) in found["target"].items()},
    )


def write_source(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Writes a checkpoint with distinct whole numbers, as they were converted."""
    filled = fill({path.replace("/", "."): shape for path, shape in shapes.items()})
    arrays = {name.replace(".", "/"): array for name, array in filled.items()}
    np.savez(file, **arrays)
    return file


def abstract(shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float32) -> Any:
    """Returns an abstract state of nested dicts."""
    state: dict[str, Any] = {}
    for path, shape in shapes.items():
        *above, name = path.split("/")
        inner = state
        for key in above:
            inner = inner.setdefault(key, {})
        inner[name] = jax.ShapeDtypeStruct(shape, dtype)
    return state


def flatten(state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {"/".join(key.key for key in keys): leaf for keys, leaf in leaves}
