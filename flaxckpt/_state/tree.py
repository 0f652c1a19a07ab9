"""Splits a pytree into named leaves and a description of its nodes, and rebuilds it.

`flatten` walks a state once. Its result rebuilds the same classes in this process;
`_state.treedef` writes it to JSON for later processes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from flaxckpt import _util, errors
from flaxckpt._state import leaf_types
from flaxckpt._types import JSON, LeafPath, PyTree

MAX_DEPTH = 64
"""Deepest nesting of containers that is saved or read; real states stay below 20."""

_MAX_KEYS = 32
"""The maximal number of keys of a leaf."""

_MAX_STATIC_BYTES = 32 * 2**20
"""Limit on the text in static fields of a state: half of a manifest's limit."""


class Key(NamedTuple):
    """A key in the path of a leaf.

    Attributes:
        name: Dictionary key, attribute name or index.
        kind: `key` of a mapping, `attr` of an object, `index` of a sequence.
    """

    name: str | int
    kind: Literal["key", "attr", "index"]


Rebuild: TypeAlias = Callable[[Sequence[Key], Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A container of a pytree.

    Attributes:
        type: `dict`, `list`, `tuple`, `None`, or `module:qualname` of the class.
        keys: The key of each child.
        children: A `Node` for a container, the leaf path for a leaf.
        rebuild: Rebuilds the container from its keys and its children's values.
        static: Fields other than children, in JSON types (`DynamicScale.factor`).
        is_box: True for a wrapper of a single value, such as `nnx.Param`; not part of
            the path.
        leaf_type: The registered class of a leaf whose parts are the children; None for
            a container. `rebuild` returns the parts.
    """

    type: str
    keys: tuple[Key, ...]
    children: tuple[Node | LeafPath, ...]
    rebuild: Rebuild
    static: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    is_box: bool = False
    leaf_type: leaf_types.LeafType | None = None


class TreeLeaf(NamedTuple):
    """A leaf, or an empty container, of a flattened pytree.

    Attributes:
        keys: The keys of the leaf, without boxes.
        value: The leaf or the empty container itself.
        is_empty: True for a container without children: `None`, `{}`, …
    """

    keys: tuple[Key, ...]
    value: Any
    is_empty: bool


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTree:
    """A flattened pytree.

    Attributes:
        leaves: Leaf path -> leaf, in the order of the tree, empty containers included.
        structure: The containers; a bare leaf path if the tree is a leaf.
    """

    leaves: dict[LeafPath, TreeLeaf]
    structure: Node | LeafPath


def join(keys: Sequence[Key]) -> LeafPath:
    """Joins `keys` to a leaf path; `/` and `%` inside a key are percent-escaped."""
    return "/".join([_escape(str(key.name)) for key in keys])


BOX_FIELDS = ("value", "raw_value")
"""Orbax's names for the value in a box or an NNX variable; Flax 0.8 used the second."""


def without_box(path: LeafPath) -> LeafPath:
    """Returns the path of a stored leaf without the field name of its box."""
    outer, _, name = path.rpartition("/")
    return outer if outer and name in BOX_FIELDS else path


def _escape(name: str) -> str:
    if "%" in name or "/" in name:
        return name.replace("%", "%25").replace("/", "%2F")
    return name


def unescape(part: LeafPath) -> str:
    """Returns the key for a part of a leaf path."""
    return part.replace("%2F", "/").replace("%25", "%")


def to_keys(path: Sequence[Any]) -> tuple[Key, ...]:
    """Converts a path of `jax.tree_util` to keys."""
    return tuple(_key(key, i) for i, key in enumerate(path))


def check_nesting(tree: PyTree, is_leaf: Callable[[object], bool]) -> None:
    """Raises LeafNameError if a tree contains itself or is nested too deep.

    Call this before jax flattens a user's tree: a `RecursionError` inside jax leaves
    Python with less stack for the rest of the program.

    Args:
        tree: Any pytree.
        is_leaf: Returns True for a node that counts as a leaf.

    Raises:
        LeafNameError: Names the container or the leaf.
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
        dict([_too_deep(tree, is_leaf)]),
        "Remove the reference, or flatten the state.",
    )


def _children(
    node: Any, is_leaf: Callable[[object], bool], leaf_types: set[type]
) -> Iterable[Any]:
    cls = type(node)
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
        name = f"{join(keys)[:60]} …" if keys else "the state"
        return name, f"is nested more than {MAX_DEPTH} deep"
    outer = join(first) if first else "the state"
    return join(keys), f"is {outer} itself: the state contains itself"


def _find_fault(
    node: Any,
    keys: tuple[Key, ...],
    above: dict[int, tuple[Key, ...]],
    done: set[int],
    is_leaf: Callable[[object], bool],
) -> tuple[tuple[Key, ...], tuple[Key, ...] | None] | None:
    """Returns the keys of a node that is its own ancestor, and the ancestor's keys.

    For a node that is too deep, returns its keys and None.

    Args:
        node: The node to search.
        keys: The keys of the node.
        above: The containers above the node: `id` -> keys.
        done: Containers that are not in a cycle.
        is_leaf: Returns True for a node that counts as a leaf.
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

    Args:
        tree: Any pytree. A dictionary keeps its order and its integer keys.
        boxes: Classes that wrap a single value, absent from leaf paths.

    Raises:
        LeafNameError: Two leaves have the same path, a key is neither str nor int, or
            containers are nested too deep.
        UnsupportedLeafError: Static fields take too much text.
    """
    leaves: dict[LeafPath, TreeLeaf] = {}
    return FlatTree(leaves, walk(tree, leaves.__setitem__, boxes=boxes))


def walk(
    tree: PyTree,
    enter: Callable[[LeafPath, TreeLeaf], None],
    *,
    boxes: tuple[type, ...] = (),
) -> Node | LeafPath:
    """Passes each leaf to `enter` and returns only the structure.

    Raises:
        LeafNameError, UnsupportedLeafError: As for `flatten`; leaves may be missing.
    """
    # Most keys recur, in a parameter and its moments, so share the objects.
    make_key = functools.lru_cache(maxsize=None, typed=True)(Key)
    walker = _Walker(enter, boxes, make_key, set(), set(), {}, [0])
    structure = _visit(walker, tree, (), "", 0)
    if walker.faults:
        raise errors.LeafNameError(
            walker.faults,
            "Use str or int keys that differ when written as text.",
        )
    return structure


class _Walker(NamedTuple):
    """State of a walk over a tree.

    A recursive closure instead would keep itself and the leaves alive until the garbage
    collector runs.
    """

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
            name = key.name
            if type(name) is not str and type(name) is not int:
                fault = f"has the key {name!r} of type {type(name).__name__}"
                walker.faults[path or "(root)"] = fault
                continue
            if type(name) is int and not -(2**63) <= name < 2**63:
                fault = "has an int key of more than 64 bits"
                walker.faults[path or "(root)"] = fault
                continue
            name = _escape(str(name))
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
    )


def _count_static(walker: _Walker, path: LeafPath, static: Mapping[str, JSON]) -> None:
    """Raises UnsupportedLeafError if static fields exceed the limit on text.

    Also for text that JSON would not return unchanged.

    Raises:
        UnsupportedLeafError: Names the field.
    """
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
    """Estimates the size of a static field as JSON; exact for long strings.

    Raises:
        ValueError: JSON would return another text.
    """
    if isinstance(field, str):
        _util.json_limits.check_text(field, "it")
        return len(field) if len(field) < _SHORT else len(json.dumps(field))
    if isinstance(field, list):
        return 2 + sum([1 + _static_bytes(item) for item in field])
    return 8


def unflatten(
    structure: Node | LeafPath,
    values: Mapping[LeafPath, Any],
    make_leaf: Callable[[leaf_types.LeafType, leaf_types.Parts], Any] = (
        leaf_types.build
    ),
) -> PyTree:
    """Puts `values` (leaf path -> leaf) back into the containers of `structure`.

    Args:
        structure: The containers.
        values: Leaf path -> value.
        make_leaf: Makes a leaf of a registered class from its parts.

    Raises:
        UnbuiltLeavesError: `make_leaf` raised LeafTypeError for some leaves.
    """
    unbuilt: _Unbuilt = {}
    tree = _unflatten(structure, values, make_leaf, unbuilt)
    if unbuilt:
        raise leaf_types.UnbuiltLeavesError(unbuilt)
    return tree


_Unbuilt: TypeAlias = (
    "dict[LeafPath,"
    " tuple[leaf_types.LeafType, leaf_types.Parts, leaf_types.LeafTypeError]]"
)


def _unflatten(
    structure: Node | LeafPath,
    values: Mapping[LeafPath, Any],
    make_leaf: Callable[[leaf_types.LeafType, leaf_types.Parts], Any],
    unbuilt: _Unbuilt,
) -> PyTree:
    if isinstance(structure, str):
        return values[structure]
    children = [
        values[child]
        if isinstance(child, str)
        else _unflatten(child, values, make_leaf, unbuilt)
        for child in structure.children
    ]
    made = structure.rebuild(structure.keys, children)
    if structure.leaf_type is not None:
        try:
            return make_leaf(structure.leaf_type, made)
        except leaf_types.LeafTypeError as error:
            unbuilt[_path_of(structure)] = structure.leaf_type, made, error
    return made


def _path_of(node: Node) -> LeafPath:
    """Returns the path of a node from the path of a leaf inside; empty without any."""
    for child in node.children:
        path = child if isinstance(child, str) else _path_of(child)
        if path:
            return path if node.is_box else path.rpartition("/")[0]
    return ""


def key_paths(
    structure: Node | LeafPath, keys: tuple[Key, ...] = ()
) -> Iterator[tuple[LeafPath, tuple[Key, ...]]]:
    """Yields the path and keys of each leaf and empty container, in order."""
    if isinstance(structure, str) or not structure.children:
        yield join(keys), keys
        return
    for key, child in zip(structure.keys, structure.children, strict=True):
        yield from key_paths(child, keys if structure.is_box else (*keys, key))


def leaf_type_paths(
    structure: Node | LeafPath, keys: tuple[Key, ...] = ()
) -> Iterator[LeafPath]:
    """Yields the path of each leaf of a registered class."""
    if isinstance(structure, str):
        return
    if structure.leaf_type is not None:
        yield join(keys)
        return
    for key, child in zip(structure.keys, structure.children, strict=True):
        yield from leaf_type_paths(child, keys if structure.is_box else (*keys, key))


def plain_structure(
    leaves: Iterable[tuple[LeafPath, tuple[Key, ...], str | None]],
) -> Node | LeafPath:
    """Builds dicts and lists for leaves without recorded containers.

    Args:
        leaves: Leaf path, keys, and None for each leaf; or, for an empty container,
            its type: `None`, `dict`, `list` or `tuple`.
    """
    nested: dict[Key, Any] = {}
    for path, keys, empty in leaves:
        leaf = path if empty is None else empty_node(empty)
        if not keys:
            return leaf
        inner = nested
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = leaf
    return _plain_node(nested)


def plain_node(
    kind: Literal["dict", "list"],
    names: Iterable[str | int],
    children: tuple[Node | LeafPath, ...],
) -> Node:
    """Returns a dict or a list."""
    key_kind: Literal["key", "index"] = "key" if kind == "dict" else "index"
    keys = tuple(Key(name, key_kind) for name in names)
    return Node(kind, keys, children, MAKERS[kind])


def _plain_node(nested: Mapping[Key, Any]) -> Node:
    keys = tuple(nested)
    children = tuple(
        _plain_node(child) if isinstance(child, dict) else child
        for child in nested.values()
    )
    if keys and all(key.kind == "index" for key in keys):
        return Node("list", keys, children, make_list)
    return Node("dict", keys, children, make_dict)


def nest(trees: Mapping[str, Node | LeafPath]) -> Node:
    """Returns a dict of trees; the leaf paths begin with the keys."""
    children = tuple(
        _escape(name) if isinstance(child, str) else _add_prefix(child, _escape(name))
        for name, child in trees.items()
    )
    return plain_node("dict", trees, children)


def _add_prefix(tree: Node, prefix: str) -> Node:
    children = tuple(
        f"{prefix}/{child}" if isinstance(child, str) else _add_prefix(child, prefix)
        for child in tree.children
    )
    return dataclasses.replace(tree, children=children)


def empty_node(type_name: str) -> Node:
    """Returns an empty container: `None`, `dict`, `list` or `tuple`."""
    return Node(type_name, (), (), MAKERS[type_name])


class _Parts(NamedTuple):
    type: str
    keys: tuple[Key, ...]
    children: Sequence[Any]
    rebuild: Rebuild
    static: Mapping[str, JSON]
    is_box: bool
    leaf_type: leaf_types.LeafType | None = None


def _take_leaf(value: Any, make_key: Callable[[Any, Any], Key]) -> _Parts | None:
    """Splits a leaf of a registered class into parts; None for another value.

    Raises:
        LeafTypeError: The parts are unknown.
    """
    leaf = leaf_types.take(value)
    if leaf is None:
        return None
    keys = tuple([make_key(name, "key") for name in leaf.parts])
    parts = list(leaf.parts.values())
    name = leaf.leaf_type.name
    return _Parts(name, keys, parts, make_dict, {}, False, leaf.leaf_type)


def _decompose(
    value: Any, boxes: tuple[type, ...], make_key: Callable[[Any, Any], Key]
) -> _Parts | None:
    """Splits the top level of `value` into children; None for a leaf."""
    cls = type(value)
    if value is None:
        return _Parts("None", (), (), _make_none, {}, False)
    if cls is dict:
        keys = tuple([make_key(name, "key") for name in value])
        return _Parts("dict", keys, list(value.values()), make_dict, {}, False)
    if cls is list or cls is tuple:
        keys = tuple([make_key(i, "index") for i in range(len(value))])
        name = cls.__name__
        return _Parts(name, keys, value, MAKERS[name], {}, False)
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        keys = tuple([make_key(name, "attr") for name in cls._fields])
        return _Parts(_name(cls), keys, value, lambda _, new: cls(*new), {}, False)
    return _decompose_registered(value, boxes)


def _make_none(_: Sequence[Key], children: Sequence[Any]) -> None:
    return None


def make_dict(keys: Sequence[Key], children: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip([key.name for key in keys], children, strict=True))


def make_list(_: Sequence[Key], children: Sequence[Any]) -> list[Any]:
    return list(children)


def _make_tuple(_: Sequence[Key], children: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(children)


MAKERS: dict[str, Rebuild] = {
    "None": _make_none,
    "dict": make_dict,
    "list": make_list,
    "tuple": _make_tuple,
}


def _decompose_registered(value: Any, boxes: tuple[type, ...]) -> _Parts | None:
    treedef: Any  # jax declares no attributes of it
    # Treat all nodes after the first as leaves, even if a child is `value` itself.
    seen = iter((False,))
    nodes, treedef = jax.tree_util.tree_flatten_with_path(
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
        lambda _, new: treedef.unflatten(new),
        _static_fields(value, {key.name for key in keys}, is_box),
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
    value: Any, children: set[str | int], is_box: bool
) -> dict[str, JSON]:
    if dataclasses.is_dataclass(value):
        named = {
            f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)
        }
    elif is_box and hasattr(value, "get_metadata"):
        named = value.get_metadata()
    else:
        return {}
    plain = {}
    for name, field in named.items():
        if name not in children and (as_json := _as_json(field)) is not _NOT_JSON:
            plain[name] = as_json
    return plain


_NOT_JSON: Any = object()

_MAX_INT_BITS = 2**13
"""Python parses every int of this size; its limit is 4,300 digits."""


def _as_json(value: Any, depth: int = 0) -> Any:
    """Converts `value` to JSON types; `_NOT_JSON` if not possible.

    Not possible either for an int with more digits than Python parses, and for a list
    that is nested too deep or contains itself.
    """
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
