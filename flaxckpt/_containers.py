"""The containers of leaves that transforms have moved or left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from flaxckpt import _tree, errors
from flaxckpt._info import LeafTable, Stored, StoredLeaf
from flaxckpt._types import LeafPath


def of(stored: Stored, table: LeafTable) -> _tree.Node | LeafPath:
    """The containers of a table that transforms have made of a checkpoint's.

    If leaves were only left out, those that have lost nothing are what they were. If
    any was moved, they are dicts and lists, and empty ones what they were elsewhere.

    Raises:
        OptionError: The table is empty.
    """
    if table.keys() == stored.table.keys():
        return stored.structure
    if table.keys() < stored.table.keys():
        pruned = _pruned(stored.structure, (), table)
        if pruned is None:
            raise errors.OptionError(
                f"the transforms leave nothing of {stored.metadata.path}"
            )
        return pruned
    plain = _without_holes(
        _tree.plain_structure(
            (i.path, i.keys, i.python_type if i.kind == "empty" else None)
            for i in (leaf.info for leaf in table.values())
        )
    )
    old = dict(_empties(stored.structure, ()))
    moved = {
        path: old[source.info.path]
        for path, leaf in table.items()
        for source in leaf.sources
        if isinstance(source, StoredLeaf)
        and leaf.info.kind == "empty"
        and source.info.path in old
    }
    return _with_empties(plain, (), moved)


_Keys: TypeAlias = tuple[_tree.Key, ...]


def _children(
    node: _tree.Node, keys: _Keys
) -> Iterator[tuple[_tree.Key, _tree.Node | LeafPath, _Keys]]:
    """The children of a node, each with its key and its keys from the root."""
    for key, child in zip(node.keys, node.children, strict=True):
        yield key, child, keys if node.is_box else (*keys, key)


def _pruned(
    node: _tree.Node | LeafPath, keys: _Keys, table: LeafTable
) -> _tree.Node | LeafPath | None:
    """A container without the leaves that are not in `table`; None: nothing is left.

    What has lost something is a dict of the rest: Orbax takes no lists with holes.
    """
    if isinstance(node, str) or not node.children:
        return node if _tree.join(keys) in table else None
    kept = {
        key: part
        for key, child, inner in _children(node, keys)
        if (part := _pruned(child, inner, table)) is not None
    }
    if len(kept) == len(node.children):
        return dataclasses.replace(node, children=tuple(kept.values()))
    return _dict(kept) if kept else None


def _dict(children: Mapping[_tree.Key, _tree.Node | LeafPath]) -> _tree.Node:
    """A dict; what was an index is a string of it."""
    keys = [
        _tree.Key(str(key.name) if key.kind == "index" else key.name, "key")
        for key in children
    ]
    plain = _tree.plain_structure((_tree.join((key,)), (key,), None) for key in keys)
    assert isinstance(plain, _tree.Node), plain
    return dataclasses.replace(plain, children=tuple(children.values()))


def _without_holes(node: _tree.Node | LeafPath) -> _tree.Node | LeafPath:
    """The same containers, but lists only where they have all of their items."""
    if isinstance(node, str) or not node.children:
        return node
    parts = dict(zip(node.keys, map(_without_holes, node.children), strict=True))
    if all(key.kind == "key" for key in parts):
        return dataclasses.replace(node, children=tuple(parts.values()))
    # What was moved into a list has a text for its index.
    items = {str(key.name): part for key, part in parts.items()}
    indices = [str(i) for i in range(len(parts))]
    if items.keys() != set(indices):
        return _dict(parts)
    keys = [_tree.Key(i, "index") for i in range(len(parts))]
    plain = _tree.plain_structure((_tree.join((key,)), (key,), None) for key in keys)
    assert isinstance(plain, _tree.Node), plain
    return dataclasses.replace(plain, children=tuple(items[i] for i in indices))


def _empties(
    node: _tree.Node | LeafPath, keys: _Keys
) -> Iterator[tuple[LeafPath, _tree.Node]]:
    if isinstance(node, str):
        return
    if not node.children:
        yield _tree.join(keys), node
    for _, child, inner in _children(node, keys):
        yield from _empties(child, inner)


def _with_empties(
    node: _tree.Node | LeafPath, keys: _Keys, empties: Mapping[LeafPath, _tree.Node]
) -> _tree.Node | LeafPath:
    """The same containers, but those that are empty as they were elsewhere."""
    if isinstance(node, str):
        return node
    if not node.children:
        return empties.get(_tree.join(keys), node)
    children = [
        _with_empties(child, inner, empties)
        for _, child, inner in _children(node, keys)
    ]
    return dataclasses.replace(node, children=tuple(children))
