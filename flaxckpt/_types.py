"""Type aliases shared by all modules."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Any tree of containers that jax flattens, or a Flax NNX object."""

PathLike: TypeAlias = str | os.PathLike[str]
"""A local path (relative is fine) or a `file://` URL."""

LeafPath: TypeAlias = str
"""The path of a leaf in its state: `params/Dense_0/kernel`."""

Shape: TypeAlias = tuple[int, ...]

JSON: TypeAlias = (
    "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
)
