"""Splits a pytree into named leaves and a description of its nodes, in one walk."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from flaxckpt import _util, errors
from flaxckpt._state import leaf_types, treedef
from flaxckpt._state import tree as state_tree
from flaxckpt._state.tree import MAX_DEPTH, Key, Node, Rebuild, TreeLeaf
from flaxckpt._types import JSON, LeafPath, PyTree

_MAX_KEYS = 32
"""The maximal number of keys of a leaf."""

_MAX_STATIC_BYTES = 32 * 2**20
"""Limit on the text in static fields of a state: half of a manifest's limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTree:
    """A flattened pytree: its leaves, empty containers included, and its containers."""

    leaves: dict[LeafPath, TreeLeaf]
    structure: Node | LeafPath


def to_keys(path: Sequence[Any]) -> tuple[Key, ...]:
    """Converts a path of `jax.tree_util` to keys."""
    return tuple(_key(key, i) for i, key in enumerate(path))


def check_nesting(tree: PyTree, is_leaf: Callable[[object], bool]) -> None:
    """Raises LeafNameError if a tree contains itself or is nested too deep.

    Call this before jax, which would leave less stack after its `RecursionError`.
    """
    leaf_types: set[type] = set()
    level = {id(tree): tree}
    for _ in range(MAX_DEPTH + 1):
        # Shared containers are visited once per level, which bounds the work; leaves
        # are skipped by class, as most of them have the same few classes.
        level = {
            id(child): child
            for node in level.values()
            for child in _children(node, is_leaf, leaf_types)
            if type(child) not in leaf_types
        }
        if not level:
            return
    raise errors.LeafNameError(
        dict([_too_deep(tree, is_leaf)]), "Remove the reference, or flatten the state."
    )


def _children(
    node: Any, is_leaf: Callable[[object], bool], leaf_types: set[type]
) -> Iterable[Any]:
    cls = type(node)
    if cls in leaf_types:
        return ()
    if cls is dict:
        return cast("Iterable[Any]", node.values())
    if cls is list or cls is tuple:
        return cast("Iterable[Any]", node)
    if is_leaf(node):
        return ()
    parts = _decompose(node, (), Key)
    if parts is None:
        leaf_types.add(cls)
    return () if parts is None else parts.children


def _too_deep(tree: PyTree, is_leaf: Callable[[object], bool]) -> tuple[LeafPath, str]:
    """Returns the path of a cycle or of the deepest leaf, and a description."""
    fault = _find_fault(tree, (), {}, set(), is_leaf)
    keys, first = fault or ((), None)
    if first is None:
        name = f"{state_tree.join(keys)[:60]} …" if keys else "the state"
        return name, f"is nested more than {MAX_DEPTH} deep"
    outer = state_tree.join(first) if first else "the state"
    return state_tree.join(keys), f"is {outer} itself: the state contains itself"


def _find_fault(
    node: Any,
    keys: tuple[Key, ...],
    above: dict[int, tuple[Key, ...]],
    done: set[int],
    is_leaf: Callable[[object], bool],
) -> tuple[tuple[Key, ...], tuple[Key, ...] | None] | None:
    """Returns the keys of a node that is its own ancestor, and the ancestor's keys.

    For a node that is too deep, returns its keys and None.
    """
    if id(node) in done:
        return None
    if id(node) in above:
        return keys, above[id(node)]
    if len(keys) > MAX_DEPTH:
        return keys, None
    if is_leaf(node) or (parts := _decompose(node, (), Key)) is None:
        return None
    above[id(node)] = keys
    for key, child in zip(parts.keys, parts.children, strict=True):
        inner = (*keys, key)
        if fault := _find_fault(child, inner, above, done, is_leaf):
            return fault
    del above[id(node)]
    done.add(id(node))
    return None


def flatten(tree: PyTree, *, boxes: tuple[type, ...] = ()) -> FlatTree:
    """Splits `tree` into named leaves and a description of its containers.

    A dictionary keeps its order and its integer keys. Values of the classes in `boxes`,
    which wrap a single value, are absent from leaf paths. Raises LeafNameError if
    leaves have the same path, a key is no str, int or tuple of them, or containers are
    nested too deep; UnsupportedLeafError if static fields take too much text.
    """
    leaves: dict[LeafPath, TreeLeaf] = {}
    return FlatTree(leaves, walk(tree, leaves.__setitem__, boxes=boxes))


def walk(
    tree: PyTree,
    enter: Callable[[LeafPath, TreeLeaf], None],
    *,
    boxes: tuple[type, ...] = (),
) -> Node | LeafPath:
    """Passes each leaf to `enter` and returns only the structure; see `flatten`."""
    # Most keys recur, in a parameter and its moments, so share the objects.
    make_key = functools.lru_cache(maxsize=None, typed=True)(Key)
    walker = _Walker(enter, boxes, make_key, set(), set(), {}, [0])
    structure = _visit(walker, tree, (), "", 0)
    if walker.faults:
        raise errors.LeafNameError(
            walker.faults,
            "Use str or int keys, or tuples of them, that differ when written as text.",
        )
    return structure


class _Walker(NamedTuple):
    """State of a walk; a recursive closure would keep leaves alive in a cycle."""

    enter: Callable[[LeafPath, TreeLeaf], None]
    boxes: tuple[type, ...]
    make_key: Callable[[Any, Any], Key]
    leaf_types: set[type]
    seen: set[LeafPath]
    faults: dict[str, str]
    static_bytes: list[int]  # a single number: the total of all static fields so far


def _visit(
    walker: _Walker, value: Any, keys: tuple[Key, ...], path: LeafPath, depth: int
) -> Node | LeafPath:
    if len(keys) >= _MAX_KEYS or depth > MAX_DEPTH:
        raise errors.LeafNameError(
            {f"{path[:60]} …": f"is nested {max(len(keys), depth)} deep"},
            f"Flatten the state: readers accept {_MAX_KEYS - 1} keys, and {MAX_DEPTH}"
            " containers including boxes and modules.",
        )
    # The class alone decides if a value is a leaf, as in jax.
    parts = None
    if type(value) not in walker.leaf_types:
        try:
            parts = _take_leaf(value, walker.make_key)
        except leaf_types.LeafTypeError as error:
            value = leaf_types.BrokenLeaf(str(error))
        parts = parts or _decompose(value, walker.boxes, walker.make_key)
    if parts is None or not parts.children:
        if path in walker.seen:
            walker.faults[path] = "two leaves have this path"
        walker.seen.add(path)
        walker.enter(path, TreeLeaf(keys, value, parts is not None))
        if parts is None:
            walker.leaf_types.add(type(value))
            return path
    if parts.static:
        _count_static(walker, path, parts.static)
    if parts.is_box:
        children = [
            _visit(walker, child, keys, path, depth + 1) for child in parts.children
        ]
    else:
        children = []
        for key, child in zip(parts.keys, parts.children, strict=True):
            if type(key.name) is not str and (
                fault := state_tree.find_key_fault(key.name)
            ):
                walker.faults[path or "(root)"] = fault
                continue
            name = state_tree.escape(str(key.name))
            inner = f"{path}/{name}" if keys else name
            children.append(_visit(walker, child, (*keys, key), inner, depth + 1))
    return Node(
        parts.type,
        parts.keys,
        tuple(children),
        parts.rebuild,
        parts.static,
        parts.is_box,
        parts.leaf_type,
        isinstance(value, Mapping) and not parts.is_box and parts.leaf_type is None,
    )


def _count_static(walker: _Walker, path: LeafPath, static: Mapping[str, JSON]) -> None:
    """Raises UnsupportedLeafError if static fields are too long, or change as JSON."""
    [total] = walker.static_bytes
    for name, field in static.items():
        try:
            total += _static_bytes(field)
        except ValueError:
            raise errors.UnsupportedLeafError(
                {path: f"the static field {name!r} with two surrogates"},
                "They would be restored as one character: write that character.",
            ) from None
        if total > _MAX_STATIC_BYTES:
            raise errors.UnsupportedLeafError(
                {path: f"the static field {name!r} of {_static_bytes(field)} bytes"},
                "All static fields of a state may take"
                f" {_MAX_STATIC_BYTES} bytes as JSON. Store large fields elsewhere, or"
                " as arrays: np.frombuffer(text.encode(), np.uint8).",
            )
    walker.static_bytes[0] = total


_SHORT = 1000
"""Below this length in characters, an estimate of the JSON size is enough."""


def _static_bytes(field: JSON) -> int:
    """Estimates a field's size as JSON; raises ValueError if JSON changes its text."""
    if isinstance(field, str):
        _util.json_limits.check_text(field, "it")
        return len(field) if len(field) < _SHORT else len(json.dumps(field))
    if isinstance(field, list):
        return 2 + sum([1 + _static_bytes(item) for item in field])
    return 8


class _Parts(NamedTuple):
    type: str
    keys: tuple[Key, ...]
    children: Sequence[Any]
    rebuild: Rebuild
    static: Mapping[str, JSON]
    is_box: bool
    leaf_type: leaf_types.LeafType | None = None


def _take_leaf(value: Any, make_key: Callable[[Any, Any], Key]) -> _Parts | None:
    """Splits a leaf of a registered class into parts; None for another value."""
    leaf = leaf_types.take(value)
    if leaf is None:
        return None
    keys = tuple([make_key(name, "key") for name in leaf.parts])
    parts = list(leaf.parts.values())
    name = leaf.leaf_type.name
    return _Parts(name, keys, parts, state_tree.make_dict, {}, False, leaf.leaf_type)


def _decompose(
    value: Any, boxes: tuple[type, ...], make_key: Callable[[Any, Any], Key]
) -> _Parts | None:
    """Splits the top level of `value` into children; None for a leaf."""
    cls = type(value)
    if value is None:
        return _Parts("None", (), (), state_tree.MAKERS["None"], {}, False)
    if cls is dict:
        keys = tuple([make_key(name, "key") for name in value])
        return _Parts(
            "dict", keys, list(value.values()), state_tree.make_dict, {}, False
        )
    if cls is list or cls is tuple:
        keys = tuple([make_key(i, "index") for i in range(len(value))])
        name = cls.__name__
        return _Parts(name, keys, value, state_tree.MAKERS[name], {}, False)
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        keys = tuple([make_key(name, "attr") for name in cls._fields])
        return _Parts(_name(cls), keys, value, lambda _, new: cls(*new), {}, False)
    return _decompose_registered(value, boxes)


def _decompose_registered(value: Any, boxes: tuple[type, ...]) -> _Parts | None:
    definition: Any  # jax declares no attributes of it
    # Treat all nodes after the first as leaves, even if a child is `value` itself.
    seen = iter((False,))
    nodes, definition = jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda _: next(seen, True)
    )
    if len(nodes) == 1 and not nodes[0][0]:
        return None
    keys = tuple([_key(path[0], i) for i, (path, _) in enumerate(nodes)])
    is_box = isinstance(value, boxes) and len(nodes) == 1
    return _Parts(
        _name(type(value)),
        keys,
        [child for _, child in nodes],
        lambda _, new: definition.unflatten(new),
        _static_fields(
            value, {key.name for key in keys}, definition.node_data()[1], is_box
        ),
        is_box,
    )


def _key(key: Any, index: int) -> Key:
    match key:
        case DictKey():
            return Key(key.key, "key")
        case GetAttrKey():
            return Key(key.name, "attr")
        case SequenceKey():
            return Key(key.idx, "index")
        case FlattenedIndexKey():
            return Key(key.key, "index")
        case _:
            return Key(str(key), "attr")


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _static_fields(
    value: Any, children: set[state_tree.KeyName], aux: Any, is_box: bool
) -> dict[str, JSON]:
    """Returns what JSON can hold of a container's fields or auxiliary data."""
    if treedef.has_fields(type(value), children):
        named = {
            f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)
        }
    elif is_box and hasattr(value, "get_metadata"):
        named = value.get_metadata()
    else:
        return {} if isinstance(value, Mapping) else treedef.aux_to_json(aux)
    plain = {}
    for name, field in named.items():
        if name not in children and (as_json := _as_json(field)) is not _NOT_JSON:
            plain[name] = as_json
    return plain


_MAX_ATTRIBUTE_BYTES = 256
"""Limit on the size as JSON of an attribute to record; larger ones are data."""

_NOT_RECORDED = ("deterministic", "use_running_average", "decode")
"""Attributes that `eval` and `train` of a module set, between steps and saves."""


def attribute_to_json(name: str, value: Any) -> tuple[JSON, int]:
    """Returns an attribute of an NNX object as JSON, and its size; 0 for none."""
    if name in _NOT_RECORDED or name.startswith("_pytree__"):
        return None, 0
    field = _as_json(value)
    if field is _NOT_JSON:
        return None, 0
    try:
        size = _static_bytes([name, field])
    except ValueError:  # text that JSON would change
        return None, 0
    return (field, size) if size <= _MAX_ATTRIBUTE_BYTES else (None, 0)


_NOT_JSON: Any = object()

_MAX_INT_BITS = 2**13
"""Python parses every int of this size; its limit is 4,300 digits."""


def _as_json(value: Any, depth: int = 0) -> Any:
    """Returns `value` in JSON types, or `_NOT_JSON` if readers would not return it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value.bit_length() <= _MAX_INT_BITS else _NOT_JSON
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, tuple | list) and depth < _MAX_KEYS:
        items = []
        for item in value:
            items.append(_as_json(item, depth + 1))
            if items[-1] is _NOT_JSON:  # immediately: a list may contain itself twice
                return _NOT_JSON
        return items
    return _NOT_JSON
