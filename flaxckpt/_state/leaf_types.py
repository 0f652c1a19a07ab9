"""Leaf types of users: classes that jax does not know, saved as dicts of parts.

The parts have paths, chunks, shardings and transforms like all other leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flaxckpt import _util, errors
from flaxckpt._types import LeafPath

Parts = dict[str, Any]
"""Name -> array, number, string, None, or a dict or list of these."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeafType:
    """A registered class of leaves; see `register_leaf`."""

    cls: type
    to_arrays: Callable[[Any], Parts]
    from_arrays: Callable[[Parts], Any]

    @property
    def name(self) -> str:
        return f"{self.cls.__module__}:{self.cls.__qualname__}"


class LeafParts:
    """A registered leaf that is not built: its parts are abstract, or are copies."""

    def __init__(self, leaf_type: LeafType, parts: Parts) -> None:
        self.leaf_type = leaf_type
        self.parts = parts

    def __repr__(self) -> str:
        return f"LeafParts({self.leaf_type.cls.__qualname__}, {self.parts})"


class LeafTypeError(Exception):
    """A function of a leaf type raised an error, or returned something unsuitable."""


class UnbuiltLeavesError(Exception):
    """Leaves that cannot be built: leaf path -> leaf type, parts and the reason."""

    def __init__(
        self, leaves: Mapping[LeafPath, tuple[LeafType, Parts, LeafTypeError]]
    ) -> None:
        self.leaves = dict(leaves)
        super().__init__(", ".join(self.leaves))


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenLeaf:
    """A leaf whose parts are unknown, with the reason."""

    reason: str


_by_class: dict[type, LeafType] = {}
_by_name: dict[str, LeafType] = {}


def add(leaf_type: LeafType) -> None:
    _by_class[leaf_type.cls] = leaf_type
    _by_name[leaf_type.name] = leaf_type


def of_class(cls: type) -> LeafType | None:
    return _by_class.get(cls)


def of_name(name: str) -> LeafType | None:
    """Returns the leaf type with a name in checkpoints; None for unknown names."""
    return _by_name.get(name)


def is_leaf(value: object) -> bool:
    return type(value) in _by_class or type(value) is LeafParts


def take(leaf: object) -> LeafParts | None:
    """Returns a leaf in parts; None for a leaf of no registered class."""
    if isinstance(leaf, LeafParts):
        return leaf
    leaf_type = _by_class.get(type(leaf))
    if leaf_type is None:
        return None
    try:
        parts = leaf_type.to_arrays(leaf)
    except Exception as error:
        raise LeafTypeError(_describe(leaf_type, "to_arrays", error)) from error
    if type(parts) is not dict:
        raise LeafTypeError(
            f"a {leaf_type.name} whose to_arrays returned"
            f" {_util.arguments.describe(parts)}, not a dict"
        )
    for name in parts:
        if type(name) is not str:
            raise LeafTypeError(
                f"a {leaf_type.name} whose to_arrays returned a dict with the key"
                f" {name!r:.80}, not a name"
            )
    return LeafParts(leaf_type, parts)


def build(leaf_type: LeafType, parts: Parts) -> Any:
    """Returns the leaf with these parts, or raises LeafTypeError."""
    try:
        leaf = leaf_type.from_arrays(parts)
    except Exception as error:
        raise LeafTypeError(_describe(leaf_type, "from_arrays", error)) from error
    if not isinstance(leaf, leaf_type.cls):
        raise LeafTypeError(
            f"from_arrays returned {_util.arguments.describe(leaf)} instead"
        )
    return leaf


def _describe(leaf_type: LeafType, function: str, error: Exception) -> str:
    reason = errors.one_line(f"{type(error).__name__}: {error}")
    if function == "from_arrays":
        return f"from_arrays raised {reason}"
    return f"a {leaf_type.name} whose {function} raised {reason}"
