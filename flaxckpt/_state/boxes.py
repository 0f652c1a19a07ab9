"""Boxes around leaves: linen's metadata and NNX variables, absent from leaf paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from flaxckpt._state import tree
from flaxckpt._state.leaf import Box, LeafInfo, LeafTable
from flaxckpt._types import LeafPath

FIELD = "value"
"""The field of boxes under which a checkpoint is read without a template."""


class JaxKey(NamedTuple):
    """A key in jax's paths; `is_field` is that of a box, which leaf paths leave out."""

    key: tree.Key
    is_field: bool


def find(structure: tree.Node | LeafPath) -> dict[LeafPath, tuple[Box, ...]]:
    """Returns the boxes around each leaf and empty container that is in a box."""
    found: dict[LeafPath, tuple[Box, ...]] = {}
    _find(structure, (), (), found)
    return found


def _find(
    node: tree.Node | LeafPath,
    keys: tuple[tree.Key, ...],
    boxes: tuple[Box, ...],
    found: dict[LeafPath, tuple[Box, ...]],
) -> None:
    """Adds the leaves in `node` to `found`; `depth` of `boxes` is that of `node`."""
    if isinstance(node, str) or not node.children:
        if boxes:
            found[tree.join(keys)] = boxes
        return
    if node.is_box:
        [key], [child] = node.keys, node.children
        _find(child, keys, (*boxes, Box(0, str(key.name))), found)
        return
    deeper = tuple([Box(box.depth + 1, box.field) for box in boxes])
    for key, child in zip(node.keys, node.children, strict=True):
        _find(child, (*keys, key), deeper, found)


def find_named(structure: tree.Node | LeafPath) -> Iterator[LeafPath]:
    """Yields the path of each box of Flax whose field is part of leaf paths."""
    for keys, node in tree.containers(structure):
        names = [key.name for key in node.keys]
        if node.type.startswith("flax.") and names == [FIELD] and not node.is_box:
            yield tree.join(keys)


def with_boxes(table: LeafTable, structure: tree.Node | LeafPath) -> LeafTable:
    """Returns the table of a state or checkpoint with the boxes around each leaf."""
    boxes = find(structure)
    return {
        path: dataclasses.replace(
            leaf, info=dataclasses.replace(leaf.info, boxes=boxes[path])
        )
        if path in boxes
        else leaf
        for path, leaf in table.items()
    }


def jax_keys(info: LeafInfo) -> list[JaxKey]:
    keys: list[JaxKey] = []
    start = 0
    for box in info.boxes:
        # A transform may have moved the leaf to a shorter path.
        end = max(start, len(info.keys) - box.depth)
        keys += [JaxKey(key, False) for key in info.keys[start:end]]
        keys.append(JaxKey(tree.Key(box.field, "key"), True))
        start = end
    return [*keys, *[JaxKey(key, False) for key in info.keys[start:]]]


def jax_path(info: LeafInfo) -> LeafPath:
    return tree.join([key.key for key in jax_keys(info)])
