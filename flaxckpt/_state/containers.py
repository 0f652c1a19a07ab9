"""Builds the containers of a leaf table after transforms have changed the leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from flaxckpt import errors
from flaxckpt._state import boxes, tree
from flaxckpt._state.leaf import Leaf, LeafTable, StoredLeaf
from flaxckpt._types import LeafPath


def build(
    structure: tree.Node | LeafPath, old: LeafTable, table: LeafTable
) -> tree.Node | LeafPath:
    """Returns the containers of a table that transforms have changed.

    A container with the same keys keeps its class. Others become dicts, or lists if all
    items of a list are present. Raises OptionError for an empty table.
    """
    if table.keys() == old.keys():
        return structure
    if not table:
        raise errors.OptionError("the transforms remove all leaves of the checkpoint")
    return prune(structure, table)


def with_empty_nodes(table: LeafTable, structure: tree.Node | LeafPath) -> LeafTable:
    """Returns the table of a state with the node of each empty container as source."""
    nodes = _empty_nodes(structure)
    return {
        path: dataclasses.replace(leaf, sources=(nodes.get(path),))
        if leaf.info.kind == "empty"
        else leaf
        for path, leaf in table.items()
    }


def prune(structure: tree.Node | LeafPath, table: LeafTable) -> tree.Node | LeafPath:
    """Returns the containers of a table's leaves from those of more; see `build`."""
    empties = _empty_nodes(structure)
    root: _Parts = {}
    for path, leaf in table.items():
        part = (
            path if leaf.info.kind != "empty" else _find_empty_node(path, leaf, empties)
        )
        if not leaf.info.keys:
            return part
        *containers, last = zip(path.split("/"), leaf.info.keys, strict=True)
        parts = root
        for name, key in containers:
            _, inner = parts.setdefault(name, (key, {}))
            assert isinstance(inner, dict), path
            parts = inner
        parts[last[0]] = last[1], part
    return _build(root, structure)


_Parts: TypeAlias = "dict[str, tuple[tree.Key, _Parts | tree.Node | LeafPath]]"
"""Children by the last part of their paths, each with its key."""


def _empty_nodes(structure: tree.Node | LeafPath) -> dict[LeafPath, tree.Node]:
    return {
        tree.join(keys): node
        for keys, node in tree.containers(structure)
        if not node.children
    }


def _find_empty_node(
    path: LeafPath, leaf: Leaf, empties: Mapping[LeafPath, tree.Node]
) -> tree.Node:
    """Returns the node of an empty container, which may have moved."""
    [source] = leaf.sources
    if isinstance(source, tree.Node):
        return source
    before = source.info.path if isinstance(source, StoredLeaf) else path
    return empties.get(before) or tree.empty_node(leaf.info.python_type)


def _build(
    part: _Parts | tree.Node | LeafPath, old: tree.Node | LeafPath | None
) -> tree.Node | LeafPath:
    """Returns the new container in the place of `old`, which may be None."""
    if isinstance(old, tree.Node) and old.is_box:
        return _build_box(part, old)
    if not isinstance(part, dict):
        return part
    before: dict[str, tree.Node | LeafPath] = {}
    if isinstance(old, tree.Node):
        names = (tree.join((key,)) for key in old.keys)
        before = dict(zip(names, old.children, strict=True))
    new = {name: _build(inner, before.get(name)) for name, (_, inner) in part.items()}
    if isinstance(old, tree.Node) and new.keys() == before.keys():
        children = tuple(new[name] for name in before)
        return dataclasses.replace(old, children=children)
    keys = {name: key for name, (key, _) in part.items()}
    if any(key.kind == "index" for key in keys.values()):
        indices = [str(i) for i in range(len(new))]
        if new.keys() == set(indices) and not before.keys() - new.keys():
            items = tuple(new[i] for i in indices)
            return tree.plain_node("list", range(len(new)), items)
        # A list with gaps has no reader, and a list without its end would look
        # complete.
    plain = [
        tree.unescape(name) if key.kind == "index" else key.name
        for name, key in keys.items()
    ]
    return tree.plain_node("dict", plain, tuple(new.values()))


def _build_box(
    part: _Parts | tree.Node | LeafPath, old: tree.Node
) -> tree.Node | LeafPath:
    """Returns the new container in the place of a box, whose field may be in paths."""
    [key], [inside] = old.keys, old.children
    if not isinstance(part, dict):
        return dataclasses.replace(old, children=(_build(part, inside),))
    names = {tree.join((key,)) for key in _plain_keys(inside)}
    if part.keys() == names:
        return dataclasses.replace(old, children=(_build(part, inside),))
    if part.keys() == {key.name} == {boxes.FIELD}:
        child = _build(part[boxes.FIELD][1], inside)
        return dataclasses.replace(old, children=(child,), is_box=False)
    return _build(part, inside)


def _plain_keys(node: tree.Node | LeafPath) -> tuple[tree.Key, ...]:
    return () if isinstance(node, str) or node.is_box else node.keys
