"""Nodes, keys and leaf paths of pytrees, and the rebuilding of a pytree."""

from __future__ import annotations

import bisect
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from flaxckpt._state import leaf_types
from flaxckpt._types import JSON, LeafPath, PyTree

MAX_DEPTH = 64
"""Deepest nesting of containers that is saved or read; real states stay below 20."""


KeyName: TypeAlias = "str | int | tuple[str | int, ...]"
"""The name of a child; a tuple is a key of a dictionary, as in `nnx.SpectralNorm`."""


class Key(NamedTuple):
    """A key in the path of a leaf: of a mapping, of an object, or of a sequence."""

    name: KeyName
    kind: Literal["key", "attr", "index"]


Rebuild: TypeAlias = Callable[[Sequence[Key], Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A container of a pytree.

    Attributes:
        type: `dict`, `list`, `tuple`, `None`, or `module:qualname` of the class.
        children: A `Node` for a container, the leaf path for a leaf.
        static: Fields other than children, in JSON types (`DynamicScale.factor`).
        is_box: True for a wrapper of a single value, such as `nnx.Param`; not part of
            the path.
        leaf_type: The registered class of a leaf whose parts are the children; None for
            a container. `rebuild` returns the parts.
        is_open: True for a mapping of this process, which may get more keys.
    """

    type: str
    keys: tuple[Key, ...]
    children: tuple[Node | LeafPath, ...]
    rebuild: Rebuild
    static: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    is_box: bool = False
    leaf_type: leaf_types.LeafType | None = None
    is_open: bool = False


class TreeLeaf(NamedTuple):
    """A leaf, or an empty container, of a flattened pytree; keys without boxes."""

    keys: tuple[Key, ...]
    value: Any
    is_empty: bool


def find_key_fault(name: object) -> str | None:
    """Returns the fault of the name of a key; None if it can be stored."""
    parts = name if type(name) is tuple else (name,)
    if not all(type(part) is str or type(part) is int for part in parts):
        return f"has the key {name!r} of type {type(name).__name__}"
    if any(type(part) is int and not -(2**63) <= part < 2**63 for part in parts):
        return "has an int key of more than 64 bits"
    return None


def join(keys: Sequence[Key]) -> LeafPath:
    """Joins `keys` to a leaf path; `/` and `%` inside a key are percent-escaped."""
    return "/".join([escape(str(key.name)) for key in keys])


BOX_FIELDS = ("value", "raw_value")
"""Orbax's names for the value in a box or an NNX variable; Flax 0.8 used the second."""


def without_box(path: LeafPath) -> LeafPath:
    """Returns the path of a stored leaf without the field name of its box."""
    outer, _, name = path.rpartition("/")
    return outer if outer and name in BOX_FIELDS else path


def before(path: LeafPath, end: LeafPath) -> LeafPath | None:
    """Returns `path` without `end`, where fields of boxes do not count, or None."""
    for bare in (path, without_box(path)):
        if f"/{bare}".endswith(f"/{end}"):
            return bare[: -len(end)].removesuffix("/")
    return None


def prefixes(path: LeafPath) -> Iterator[str]:
    """Yields the proper prefixes of a path: for `a/b/c`, `a/b`, `a` and empty."""
    end = path.rfind("/")
    while end >= 0:
        yield path[:end]
        end = path.rfind("/", 0, end)
    yield ""


def suffixes(path: LeafPath) -> Iterator[LeafPath]:
    """Yields a path, and its ends: for `a/b/c`, `b/c` and `c`."""
    yield path
    at = path.find("/")
    while at >= 0:
        yield path[at + 1 :]
        at = path.find("/", at + 1)


def inside(path: LeafPath) -> str:
    """Returns the start of all paths in a container; empty for the root."""
    return f"{path}/" if path else ""


def is_inside(path: LeafPath, above: LeafPath) -> bool:
    """Returns True if `path` is `above`, or a path in it."""
    return f"{path}/".startswith(inside(above))


def beginning_with(start: LeafPath, paths: Sequence[LeafPath]) -> list[LeafPath]:
    """Returns the paths, of sorted ones, that begin with `start`."""
    first = bisect.bisect_left(paths, start)
    return list(paths[first : bisect.bisect_left(paths, f"{start}{_LAST}", first)])


_LAST = chr(sys.maxunicode)
"""The last character in the order of paths."""


def escape(name: str) -> str:
    """Returns the part of a leaf path for a key, the inverse of `unescape`."""
    if "%" in name or "/" in name:
        return name.replace("%", "%25").replace("/", "%2F")
    return name


def unescape(part: LeafPath) -> str:
    return part.replace("%2F", "/").replace("%25", "%")


def split(path: LeafPath) -> list[str]:
    """Returns the names of the keys of a leaf path, the inverse of `join`."""
    return [unescape(part) for part in path.split("/")]


def nest_values(values: Iterable[tuple[Sequence[Any], Any]]) -> dict[Any, Any]:
    """Returns nested dicts of values, each with its keys from the outermost on."""
    nested: dict[Any, Any] = {}
    for keys, value in values:
        inner = nested
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    return nested


def unflatten(
    structure: Node | LeafPath,
    values: Mapping[LeafPath, Any],
    make_leaf: Callable[[leaf_types.LeafType, leaf_types.Parts], Any] = (
        leaf_types.build
    ),
) -> PyTree:
    """Puts values back into containers; `make_leaf` makes leaves of parts.

    Raises UnbuiltLeavesError if it raised LeafTypeError for some leaves.
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


def node_at(node: Node | LeafPath, path: LeafPath) -> Node | LeafPath | None:
    """Returns the container or leaf at a path of a structure, boxes included."""
    for part in path.split("/") if path else ():
        node = inside_boxes(node)
        if isinstance(node, str):
            return None
        for key, child in zip(node.keys, node.children, strict=True):
            if join((key,)) == part:
                node = child
                break
        else:
            return None
    return node


def inside_boxes(node: Node | LeafPath) -> Node | LeafPath:
    """Returns the container or leaf in the boxes around it."""
    while not isinstance(node, str) and node.is_box and node.children:
        node = node.children[0]
    return node


class LeafPlace(NamedTuple):
    """The path and keys of a leaf, and its path in the structure, if not empty."""

    path: LeafPath
    keys: tuple[Key, ...]
    recorded: LeafPath | None


def leaf_places(
    structure: Node | LeafPath, keys: tuple[Key, ...] = (), path: LeafPath = ""
) -> list[LeafPlace]:
    """Returns the places of all leaves and empty containers, in order."""
    if isinstance(structure, str) or not structure.children:
        recorded = structure if isinstance(structure, str) else None
        return [LeafPlace(path, keys, recorded)]
    found: list[LeafPlace] = []
    for key, child in zip(structure.keys, structure.children, strict=True):
        if structure.is_box:
            found += leaf_places(child, keys, path)
        else:
            name = escape(str(key.name))
            inner = f"{path}/{name}" if keys else name
            found += leaf_places(child, (*keys, key), inner)
    return found


def containers(
    structure: Node | LeafPath, keys: tuple[Key, ...] = ()
) -> Iterator[tuple[tuple[Key, ...], Node]]:
    """Yields each container with its keys, the outermost first."""
    if isinstance(structure, str):
        return
    yield keys, structure
    for key, child in zip(structure.keys, structure.children, strict=True):
        yield from containers(child, keys if structure.is_box else (*keys, key))


def plain_structure(
    leaves: Iterable[tuple[LeafPath, tuple[Key, ...], str | None]],
) -> Node | LeafPath:
    """Builds dicts and lists for leaves and empty containers, from path and keys."""
    nodes = [
        (keys, path if empty is None else empty_node(empty))
        for path, keys, empty in leaves
    ]
    for keys, node in nodes:
        if not keys:
            return node
    return _plain_node(nest_values(nodes))


def plain_node(
    kind: Literal["dict", "list"],
    names: Iterable[KeyName],
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
    is_list = keys and all(key.kind == "index" for key in keys)
    kind = "list" if is_list else "dict"
    return Node(kind, keys, children, MAKERS[kind])


def nest(trees: Mapping[str, Node | LeafPath]) -> Node:
    """Returns a dict of trees; the leaf paths begin with the keys."""
    children = tuple(
        escape(name) if isinstance(child, str) else _add_prefix(child, escape(name))
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


def make_dict(keys: Sequence[Key], children: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip([key.name for key in keys], children, strict=True))


def make_list(_: Sequence[Key], children: Sequence[Any]) -> list[Any]:
    return list(children)


MAKERS: dict[str, Rebuild] = {
    "None": lambda keys, children: None,
    "dict": make_dict,
    "list": make_list,
    "tuple": lambda keys, children: tuple(children),
}
