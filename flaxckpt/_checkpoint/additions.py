"""Leaves that only the checkpoint has, and their places in the restored state.

They may fill an empty place, such as None or `{}`, and add keys to a mapping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from flaxckpt import _state
from flaxckpt._checkpoint.match_optimizer import OptimizerMatcher, place_of_state
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import LeafInfo, LeafTable
from flaxckpt._types import LeafPath

_OPT_STATE = "opt_state"

_Structure: TypeAlias = "_state.tree.Node | LeafPath"


class _Place(NamedTuple):
    """The empty place or missing key at or above a leaf, and the container there."""

    path: LeafPath
    kind: Literal["empty", "lacking", "none"]
    node: _Structure | None


class Assigned(NamedTuple):
    """Leaves that only the checkpoint has, with their places; `homeless` lack one."""

    places: dict[LeafPath, LeafPath]
    homeless: list[LeafPath]


def assign(
    unused: LeafTable,
    flat: _state.flax_state.FlatState,
    stored: Stored,
    matcher: OptimizerMatcher,
    *,
    to_missing_keys: bool,
) -> Assigned:
    """Assigns leaves that only the checkpoint has; `to_missing_keys`, to keys, too."""
    find = _Places(flat, stored, matcher)
    assigned = Assigned({}, [])
    for path, leaf in unused.items():
        place = find(path, leaf.info)
        if place is None:
            continue
        if place.kind == "none":
            assigned.homeless.append(path)
        elif place.kind == "empty" or to_missing_keys:
            assigned.places[path] = place.path
    return assigned


class _Places:
    def __init__(
        self,
        flat: _state.flax_state.FlatState,
        stored: Stored,
        matcher: OptimizerMatcher,
    ) -> None:
        self._flat = flat
        self._stored = stored
        self._matcher = matcher
        self._children: dict[int, dict[str, _Structure]] = {}

    def __call__(self, path: LeafPath, info: LeafInfo) -> _Place | None:
        """Returns the place of a leaf; None for a leaf of a removed transform."""
        place = self._find(path)
        if info.role is None and _OPT_STATE not in path.split("/")[:-1]:
            return place
        return self._check_optimizer(place, path, info)

    def _find(self, path: LeafPath) -> _Place:
        node: _Structure = self._flat.structure
        done: list[str] = []
        for part in path.split("/") if path else ():
            node = _state.tree.inside_boxes(node)
            if isinstance(node, str) or not node.children:
                break
            child = self._names(node).get(part)
            if child is None:
                return self._find_missing(path, node, [*done, part])
            node = child
            done.append(part)
        node, at = _state.tree.inside_boxes(node), "/".join(done)
        if isinstance(node, str) or node.children:
            return _Place(at, "none", node)
        parts = path.split("/")[: len(done) + 1]
        if at in self._flat.objects:  # an object without leaves
            return self._find_missing(path, node, parts)
        if node.type in _state.tree.MAKERS:
            return _Place(at, "empty", node)
        if node.is_open and at != path:  # keeps its class
            return _Place("/".join(parts), "empty", node)
        return _Place(at, "none", node)

    def _find_missing(
        self, path: LeafPath, node: _state.tree.Node, parts: Sequence[str]
    ) -> _Place:
        """Returns the place of a leaf at a key that a container lacks."""
        objects = self._flat.objects
        at = "/".join(parts)
        if not any(_state.tree.is_inside(at, above) for above in objects):
            return _Place(at, "lacking" if node.is_open else "none", node)
        empty = _state.nnx_objects.empty_attribute(objects, path)
        if empty is None:
            return _Place(at, "none", None)
        attribute, value = empty
        stored = _state.tree.node_at(self._stored.structure, attribute)
        # Modules are stored as dicts, too.
        is_value = not isinstance(stored, _state.tree.Node) or (
            stored.is_box or stored.leaf_type is not None or isinstance(value, dict)
        )
        return _Place(attribute, "empty" if is_value else "none", None)

    def _names(self, node: _state.tree.Node) -> dict[str, _Structure]:
        names = self._children.get(id(node))
        if names is None:
            keys = [_state.tree.join((key,)) for key in node.keys]
            names = dict(zip(keys, node.children, strict=True))
            self._children[id(node)] = names
        return names

    # ---- optimizers -----------------------------------------------------------------

    def _check_optimizer(
        self, place: _Place, path: LeafPath, info: LeafInfo
    ) -> _Place | None:
        """Returns the place of an optimizer leaf; None if its transform is gone.

        Containers of transforms say nothing about one that only the checkpoint has.
        """
        role = info.role
        optimizer = _optimizer_above(path) if role is None else role.optimizer
        if _state.tree.is_inside(optimizer, place.path) and (
            place.kind != "none" or self._class_at(optimizer) is None
        ):
            return place  # the whole optimizer
        state = None if role is None else place_of_state(info)
        if role is None or state is None:
            return None
        is_named = role.field in _state.optimizer_roles.NAMED_VALUES
        # `measurements` are empty before the first update; hyperparameters never are.
        if is_named and (role.field == "hyperparams" or place.kind != "empty"):
            return None
        if self._class_at(state) == role.state_class:
            is_masked = isinstance(place.node, _state.tree.Node) and (
                not place.node.children and place.node.type.startswith("optax")
            )
            return None if is_masked and place.kind == "none" else place
        if isinstance(place.node, _state.tree.Node) and place.node.type == "None":
            outer = place.path.rpartition("/")[0]
            stored = _state.tree.node_at(self._stored.structure, outer)
            if isinstance(stored, _state.tree.Node) and (
                _state.optax_containers.class_name(stored) == self._class_at(outer)
            ):
                return place
        return place._replace(kind="none") if self._matcher.has_moved(state) else None

    def _class_at(self, path: LeafPath) -> str | None:
        """Returns the class of the container at a path of the wanted state."""
        node = _state.tree.node_at(self._flat.structure, path)
        for keys, structure in self._flat.optimizer_states:  # their classes are known
            if _state.tree.is_inside(path, above := _state.tree.join(keys)):
                below = path[len(above) :].lstrip("/")
                node = _state.tree.node_at(structure, below)
        if not isinstance(node, _state.tree.Node):
            return None
        return _state.optax_containers.class_name(node)


def _optimizer_above(path: LeafPath) -> LeafPath:
    parts = path.split("/")
    return "/".join(parts[: parts.index(_OPT_STATE) + 1])


# ---- the containers with the leaves --------------------------------------------------


class Grown(NamedTuple):
    """A state with places for further leaves, and places of unknown classes."""

    flat: _state.flax_state.FlatState
    unknown: dict[LeafPath, str]


def grow(
    flat: _state.flax_state.FlatState,
    table: LeafTable,
    stored: Stored,
    places: Mapping[LeafPath, LeafPath],
) -> Grown:
    """Returns the state with the placed leaves, in their recorded classes."""
    tops = set(places.values())
    whole = {
        path: leaf
        for path, leaf in table.items()
        if path in places
        or (
            leaf.info.kind == "empty"
            and not tops.isdisjoint((path, *_state.tree.prefixes(path)))
        )
    }
    structure = _state.containers.prune(stored.structure, whole)
    attributes, unknown = dict(flat.attributes), {}
    rows: list[tuple[list[str], tuple[_state.tree.Key, _Structure]]] = []
    first = {place: path for path, place in places.items()}
    for place in first:
        new = _state.tree.node_at(structure, place)
        assert new is not None, place
        for _, node in _state.tree.containers(new):
            if node.type in stored.unknown_types:
                unknown[place] = node.type
        if _state.nnx_objects.empty_attribute(flat.objects, place) and (
            _state.tree.node_at(flat.structure, place) is None
        ):
            attributes[place] = new
            continue
        keys = table[first[place]].info.keys
        parts = place.split("/") if place else []
        if not parts:
            return Grown(dataclasses.replace(flat, structure=new), unknown)
        rows.append((parts, (keys[len(parts) - 1], new)))
    grown = _graft(flat.structure, _state.tree.nest_values(rows))
    return Grown(
        dataclasses.replace(flat, structure=grown, attributes=attributes), unknown
    )


_Trie: TypeAlias = "dict[str, _Trie | tuple[_state.tree.Key, _Structure]]"
"""New children by the parts of their paths, each with its key."""


def _graft(node: _Structure, trie: _Trie) -> _Structure:
    if not trie:
        return node
    assert not isinstance(node, str)
    if node.is_box:
        return dataclasses.replace(node, children=(_graft(node.children[0], trie),))
    left = dict(trie)
    children = []
    for key, child in zip(node.keys, node.children, strict=True):
        new = left.pop(_state.tree.join((key,)), None)
        if new is None:
            children.append(child)
        elif isinstance(new, dict):
            children.append(_graft(child, new))
        else:
            children.append(_replace(child, new[1]))
    keys = list(node.keys)
    for new in left.values():
        assert isinstance(new, tuple)
        keys.append(new[0])
        children.append(new[1])
    rebuild = node.rebuild
    if left:
        rebuild = _extended(rebuild, len(node.keys))
    return dataclasses.replace(
        node, keys=tuple(keys), children=tuple(children), rebuild=rebuild
    )


def _replace(old: _Structure, new: _Structure) -> _Structure:
    """Returns the new content of an empty place, in the boxes around it."""
    if isinstance(old, str) or not old.is_box:
        return new
    inside = _state.tree.inside_boxes(new)
    return dataclasses.replace(old, children=(_replace(old.children[0], inside),))


def _extended(
    rebuild: _state.tree.Rebuild, count: int
) -> Callable[[Sequence[_state.tree.Key], Sequence[Any]], Any]:
    """Returns a function that builds a mapping of `count` keys and adds the others."""
    if rebuild is _state.tree.make_dict:
        return rebuild

    def build(keys: Sequence[_state.tree.Key], children: Sequence[Any]) -> Any:
        mapping = rebuild(keys[:count], children[:count])
        new = _state.tree.make_dict(keys[count:], children[count:])
        if not isinstance(mapping, MutableMapping):
            return type(mapping)({**mapping, **new})
        for name, child in new.items():
            mapping[name] = child
        return mapping

    return build
