"""Recognises, by the names of classes, states of optax and other transforms."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

from flaxckpt._state import tree
from flaxckpt._types import LeafPath

_STATES_WITHOUT_SUFFIX = frozenset(("ApplyEvery", "WeightDecaySchedule"))


def holds_states(field: tree.Key) -> bool:
    return "state" in str(field.name)


def leaves(node: tree.Node | LeafPath) -> Iterator[LeafPath]:
    if isinstance(node, str):
        yield node
        return
    for child in node.children:
        yield from leaves(child)


def class_name(node: tree.Node) -> str:
    """Returns the name of a container's class, without its module."""
    return node.type.partition(":")[2]


def is_plain(node: tree.Node) -> bool:
    """Returns True for a box, a leaf, or a container without named fields."""
    return (
        node.is_box
        or node.leaf_type is not None
        or ":" not in node.type
        or node.type.startswith(("flax.", "collections:"))
    )


def is_state_of_optax(node: tree.Node) -> bool:
    """Returns True for the state of an optax transform, by its class name."""
    # LookaheadParams, for example, is an optax named tuple of parameters.
    return node.type.startswith("optax") and (
        node.type.endswith("State") or class_name(node) in _STATES_WITHOUT_SUFFIX
    )


def is_complete(node: tree.Node) -> bool:
    """Returns True for a possible state of a whole optimizer: a tuple, or a wrapper."""
    if node.type == "tuple":
        return bool(node.children)
    return any(
        holds_states(key) and isinstance(child, tree.Node)
        for key, child in zip(node.keys, node.children, strict=True)
    )


def may_be_several(node: tree.Node) -> bool:
    """Returns True if a stored tuple, list or dict may be several whole optimizers."""
    return (
        _is_like_tuple(node)
        and len(node.children) > 1
        and all(
            isinstance(child, tree.Node)
            and (is_complete(child) or _is_like_tuple(child))
            for child in node.children
        )
    )


def _is_like_tuple(node: tree.Node) -> bool:
    if not node.children or not is_plain(node) or node.is_box:
        return False
    return node.type in ("tuple", "list") or has_indices(node)


def is_masked(node: tree.Node) -> bool:
    """Returns True if `node` contains placeholders of parameters."""
    return node.type.endswith(":MaskedNode") or any(
        isinstance(child, tree.Node) and is_masked(child) for child in node.children
    )


def has_state_class(node: tree.Node) -> bool:
    """Returns True if `node` contains a state with a class, or a tuple."""
    return any(
        isinstance(child, tree.Node)
        and (not is_plain(child) or child.type == "tuple" or has_state_class(child))
        for child in node.children
    )


def has_indices(node: tree.Node) -> bool:
    """Returns True if a dict has the keys of a tuple's indices."""
    return all(str(key.name).isdecimal() for key in node.keys)


def is_chain(node: tree.Node) -> bool:
    """Returns True for a tuple of optax states, and of such tuples, only."""
    return (
        node.type == "tuple"
        and all(
            isinstance(child, tree.Node)
            and (
                is_state_of_optax(child)
                or is_chain(child)
                or (child.type == "tuple" and not child.children)
            )
            for child in node.children
        )
        and bool(node.children)
    )


@functools.lru_cache(maxsize=4)
def fields_of_states(modules: tuple[str, ...]) -> frozenset[frozenset[str]]:
    """Returns the field names of each state class in optax modules."""
    return frozenset(
        frozenset(fields)
        for module in modules
        for name, cls in list(vars(sys.modules[module]).items())
        if name.endswith("State") or name in _STATES_WITHOUT_SUFFIX
        if isinstance(cls, type) and (fields := getattr(cls, "_fields", ()))
    )


@functools.cache
def is_gone(type_name: str) -> bool:
    """Returns True for the name of a class that optax has removed or renamed."""
    module, _, name = type_name.partition(":")
    return module.startswith("optax") and not any(
        hasattr(imported, name)
        for loaded, imported in list(sys.modules.items())
        if loaded.startswith("optax")
    )
