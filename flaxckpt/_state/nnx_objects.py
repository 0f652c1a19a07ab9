"""NNX objects in a state: graphs with shared parts, split and merged again."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from flaxckpt import errors
from flaxckpt._state import bits, flatten, leaf_types
from flaxckpt._state import tree as state_tree
from flaxckpt._types import JSON, LeafPath, PyTree

Keys: TypeAlias = tuple[state_tree.Key, ...]


loaded_nnx: Callable[[], Any] = functools.partial(sys.modules.get, "flax.nnx")
"""Returns the module `flax.nnx` if imported; without it, no NNX objects exist.

Importing it takes a tenth of a second, which users of linen would wait for.
"""


def is_object(node: object) -> bool:
    """Returns True for an NNX object: a module, an optimizer, random streams."""
    nnx = loaded_nnx()
    return nnx is not None and isinstance(node, nnx.Pytree)


def find_nodes(
    state: PyTree, predicate: Callable[[Any], bool]
) -> list[tuple[Keys, Any]]:
    """Returns the nodes of a state that satisfy `predicate`, each with its keys."""
    nodes = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda node: predicate(node) or is_object(node)
    )
    return [(flatten.to_keys(path), node) for path, node in nodes if predicate(node)]


def is_optimizer(node: object) -> bool:
    nnx = loaded_nnx()
    return nnx is not None and isinstance(node, nnx.Optimizer)


class UnequalVariablesError(Exception):
    """Shared `variables` have other values than at their paths in earlier branches."""

    def __init__(self, variables: Mapping[LeafPath, LeafPath]) -> None:
        self.variables = dict(variables)
        super().__init__(", ".join(self.variables))


class _Split(NamedTuple):
    """A state with an `nnx.State` in place of each NNX object; see `FlatState`."""

    tree: PyTree
    restore_objects: Callable[[PyTree, Mapping[LeafPath, Any]], PyTree]
    repeated: Mapping[LeafPath, LeafPath]
    objects: Mapping[LeafPath, Any]


def split(state: PyTree, whole_branches: bool = False) -> _Split:
    try:
        flatten.check_nesting(state, is_object)
        treedef: Any  # jax declares no attributes of it
        nodes, treedef = flatten_around(state, and_variables=True)
    except errors.LeafNameError:
        raise
    except (TypeError, ValueError) as error:
        raise errors.LeafNameError(
            {"the state": f"jax cannot flatten it ({error})"},
            "Use keys of a single sortable type in each dictionary.",
        ) from None
    nnx = loaded_nnx()
    kind = nnx.Pytree if nnx else ()
    places = [i for i, node in enumerate(nodes) if isinstance(node, kind)]
    shared = _shared_variables(nodes, places)
    if not places and not shared:
        return _Split(state, lambda tree, _: tree, {}, {})
    # Split together, so that variables shared by two objects are stored once.
    try:
        graph, states = nnx.split([nodes[i] for i in places])
    except RecursionError:
        _check_objects({str(i): nodes[i] for i in places})
        raise errors.LeafNameError(
            {"the state": "nnx cannot split it: its objects are nested too deep"},
            "Flatten the modules.",
        ) from None
    repeated: dict[_GraphPath, _GraphPath] = {}
    if whole_branches:
        states, repeated = _repeat_variables(state, states)
    named = _leaf_paths(state, repeated)
    paths = [path for path, _ in _flatten_by_path(state, _is_in_graph)[0]]
    objects = {paths[i]: nodes[i] for i in places}
    for n, i in enumerate(places):
        nodes[i] = states[n] if n in states else nnx.State({})

    def restore(tree: PyTree, attributes: Mapping[LeafPath, Any]) -> PyTree:
        # The tree may have more leaves than the state.
        kinds = (nnx.State, nnx.Variable)
        outer, _ = _flatten_by_path(tree, lambda node: isinstance(node, kinds))
        ids = {id(node) for path, node in outer if path in objects}
        around, treedef = _flatten_by_path(
            tree, lambda node: isinstance(node, nnx.Variable) or id(node) in ids
        )
        values = dict(around)
        leaves = [values[path] for path in paths]
        restored = nnx.State({n: leaves[i] for n, i in enumerate(places) if leaves[i]})
        restored, unequal = _drop_repeated(restored, repeated)
        if unequal:
            raise UnequalVariablesError(
                {named[path]: named[repeated[path]] for path in unequal}
            )
        merged = nnx.merge(graph, restored) if places else []
        for n, i in enumerate(places):
            leaves[i] = merged[n]
        _set_attributes({paths[i]: leaves[i] for i in places}, attributes)
        _share_variables(leaves, merged, shared)
        values |= zip(paths, leaves, strict=True)
        return treedef.unflatten(values.values())

    return _Split(
        treedef.unflatten(nodes),
        restore,
        {named[path]: named[first] for path, first in repeated.items()},
        objects,
    )


def _flatten_by_path(
    tree: PyTree, is_leaf: Callable[[Any], bool]
) -> tuple[list[tuple[LeafPath, Any]], Any]:
    """Flattens a tree around nodes; returns them with their paths, and the treedef."""
    nodes, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    keys = flatten.to_keys
    return [(state_tree.join(keys(path)), node) for path, node in nodes], treedef


def flatten_around(
    state: PyTree, *, and_variables: bool = False
) -> tuple[list[Any], Any]:
    """Flattens a state with each NNX object as a leaf; returns leaves and treedef.

    With `and_variables`, variables outside are leaves as well. Raises TypeError or
    ValueError if jax cannot flatten it.
    """
    nnx = loaded_nnx()
    if nnx is None:
        return jax.tree.flatten(state)
    # This runs for every node of a state, so it must be fast.
    kinds = (nnx.Pytree, nnx.Variable) if and_variables else (nnx.Pytree,)
    return jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, kinds))


def _shared_variables(
    nodes: Sequence[Any], places: Sequence[int]
) -> dict[int, int | tuple[Any, ...]]:
    """Returns the NNX variables outside of objects that occur twice in the state.

    Maps the index of a variable to its first index, or its path in the objects.
    """
    nnx = loaded_nnx()
    if nnx is None:
        return {}
    beside = {i: n for i, n in enumerate(nodes) if isinstance(n, nnx.Variable)}
    if not beside:
        return {}
    first: dict[int, int | tuple[Any, ...]] = {}
    for path, variable in _variables([nodes[i] for i in places]):
        first.setdefault(id(variable), path)
    shared = {}
    for i, variable in beside.items():
        place = first.setdefault(id(variable), i)
        if place != i:
            shared[i] = place
    return shared


def _variables(objects: Sequence[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields each variable of NNX objects once, with its path."""
    nnx = loaded_nnx()
    for path, node in nnx.iter_graph(list(objects)) if objects else ():
        if isinstance(node, nnx.Variable):
            yield path, node


def _share_variables(
    leaves: list[Any],
    objects: Sequence[Any],
    shared: Mapping[int, int | tuple[Any, ...]],
) -> None:
    """Restores the sharing of variables in `leaves`, unless their values differ.

    Values differ after a save without the sharing, as of a view that became an average.
    """
    if not shared:
        return
    by_path = dict(_variables(objects))
    for i, place in shared.items():
        other = leaves[place] if isinstance(place, int) else by_path[place]
        values = jax.tree.leaves((leaves[i], other))
        if len(values) == 2 and _is_equal(*values):
            leaves[i] = other


def _is_equal(one: Any, other: Any) -> bool:
    """Returns True if two leaves have equal types and bits."""
    if type(one) is not type(other):
        return False
    if leaf_types.is_leaf(one):
        parts, others = flatten.flatten(one).leaves, flatten.flatten(other).leaves
        return parts.keys() == others.keys() and all(
            _is_equal(part.value, others[path].value) for path, part in parts.items()
        )
    return bits.is_same(one, other)


def _check_objects(objects: Mapping[str, Any]) -> None:
    """Raises LeafNameError for a container, not an object, that contains itself."""
    seen: set[int] = set()
    waiting = list(objects.values())
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        fields = {type(node).__name__: dict(vars(node))}
        flatten.check_nesting(fields, is_object)
        waiting += filter(is_object, jax.tree.leaves(fields, is_leaf=is_object))


# ---- attributes of objects ------------------------------------------------------


_MAX_ATTRIBUTES_BYTES = 2**20
"""Limit on the attributes to record of a state: they must not hinder its save."""


def with_attributes(
    structure: state_tree.Node | LeafPath, state: PyTree
) -> state_tree.Node | LeafPath:
    """Returns the containers, with the attributes of NNX objects that are no leaves."""
    left = [_MAX_ATTRIBUTES_BYTES]

    def add(
        structure: state_tree.Node | LeafPath, value: Any
    ) -> state_tree.Node | LeafPath:
        if isinstance(structure, str) or structure.is_box or is_optimizer(value):
            return structure
        names = [state_tree.join((key,)) for key in structure.keys]
        inside = _children(value) or {}
        children = tuple(
            add(child, inside.get(name))
            for name, child in zip(names, structure.children, strict=True)
        )
        if not is_object(value):
            return dataclasses.replace(structure, children=children)
        alone = {name: inner for name, inner in inside.items() if name not in names}
        static = dict(_attributes(alone, {id(value)}, left))
        return dataclasses.replace(structure, children=children, static=static)

    return add(structure, state)


def _attributes(
    values: Mapping[str, Any], seen: set[int], left: list[int]
) -> Iterator[tuple[str, JSON]]:
    """Yields the path and JSON of attributes, within the bytes that are `left`."""
    for name, value in values.items():
        field, size = flatten.attribute_to_json(name, value)
        left[0] -= size
        if size and left[0] >= 0:
            yield name, field
        elif not size and is_object(value) and id(value) not in seen:
            seen.add(id(value))
            inner = dict(_attributes(_children(value) or {}, seen, left))
            yield from ((f"{name}/{path}", field) for path, field in inner.items())


def empty_attribute(
    objects: Mapping[LeafPath, Any], path: LeafPath
) -> tuple[LeafPath, Any] | None:
    """Returns the path and value of the None or empty attribute at or above a path."""
    around = (at for at in objects if state_tree.is_inside(path, at))
    above = max(around, key=len, default=None)
    if above is None:
        return None
    node, done = objects[above], above
    while done != path and (children := _children(node)) is not None:
        name = path[len(done) :].lstrip("/").partition("/")[0]
        done = state_tree.inside(done) + name
        if name not in children:
            return None
        node = children[name]
    is_empty = node is None or (isinstance(node, dict | list | tuple) and not node)
    return (done, node) if is_empty and done != above else None


def _children(node: Any) -> dict[LeafPath, Any] | None:
    if is_object(node):
        # Those of an nnx.List are numbers in older versions of Flax.
        inner = vars(node).items()
        return {state_tree.escape(str(name)): value for name, value in inner}
    if isinstance(node, loaded_nnx().Variable):
        return None
    return dict(_flatten_top(node)[0]) or None


def _flatten_top(node: Any) -> tuple[list[tuple[LeafPath, Any]], Any]:
    """Flattens the top level of a container; a leaf has the empty path."""
    return _flatten_by_path(node, lambda inner: inner is not node)


def _set_attributes(
    objects: Mapping[LeafPath, Any], attributes: Mapping[LeafPath, Any]
) -> None:
    """Sets attributes of NNX objects, and values in them: leaf path -> value."""
    for path, value in attributes.items():
        at = max((at for at in objects if state_tree.is_inside(path, at)), key=len)
        _put(objects[at], path[len(at) :].lstrip("/").split("/"), value)


def _put(node: Any, parts: Sequence[LeafPath], value: Any) -> Any:
    """Returns a container with `value` at a path; NNX objects change in place."""
    if not parts:
        return value
    if is_object(node):
        name = state_tree.unescape(parts[0])
        child = vars(node)[name]
        new = _put(child, parts[1:], value)
        if new is not child:
            setattr(node, name, loaded_nnx().data(new))
        return node
    children, treedef = _flatten_top(node)
    return treedef.unflatten(
        _put(child, parts[1:], value) if part == parts[0] else child
        for part, child in children
    )


# ---- branches with all of their variables ---------------------------------------


_GraphPath: TypeAlias = tuple[Any, ...]
"""Path of a node from the list of all objects of a state."""


def _list_branches(state: PyTree) -> dict[str, list[tuple[_GraphPath, Any]]]:
    """Returns the objects in each branch or attribute, with their paths."""
    branches: dict[str, list[tuple[_GraphPath, Any]]] = {}
    if is_object(state):
        for name, value in vars(state).items():
            leaves = jax.tree.leaves(value, is_leaf=_is_in_graph)
            if any(map(_is_in_graph, leaves)):
                branches[name] = [((0, name), value)]
        return branches
    for n, (keys, node) in enumerate(find_nodes(state, is_object)):
        branches.setdefault(state_tree.join(keys[:1]), []).append(((n,), node))
    return branches


def _is_in_graph(node: object) -> bool:
    """Returns True for an NNX object or variable, which several objects may share."""
    return is_object(node) or isinstance(node, loaded_nnx().Variable)


def _paths_by_id(objects: Sequence[Any]) -> dict[int, _GraphPath]:
    """Returns the first path of each object and variable in `objects`."""
    graph = loaded_nnx().iter_graph(list(objects))
    return {id(node): path for path, node in graph if _is_in_graph(node)}


def _repeat_variables(
    state: PyTree, states: Any
) -> tuple[Any, dict[_GraphPath, _GraphPath]]:
    """Repeats shared variables in all branches; returns states, added -> first path."""
    nnx = loaded_nnx()
    values = dict(nnx.to_flat_state(states))
    repeated: dict[_GraphPath, _GraphPath] = {}
    branches = _list_branches(state)
    if len(branches) < 2:
        return states, repeated
    first = _paths_by_id([node for _, node in find_nodes(state, is_object)])
    for members in branches.values():
        inside = [node for _, node in members]
        here = {path: node for node, path in _paths_by_id(inside).items()}
        for path, value in nnx.to_flat_state(nnx.split(inside)[1]):
            whole = (*members[path[0]][0], *path[1:])
            if whole in values:
                continue
            length = max(n for n in range(len(path) + 1) if path[:n] in here)
            repeated[whole] = (*first[here[path[:length]]], *path[length:])
            values[whole] = value
    return (nnx.from_flat_state(values), repeated) if repeated else (states, {})


def _drop_repeated(
    states: Any, repeated: Mapping[_GraphPath, _GraphPath]
) -> tuple[Any, list[_GraphPath]]:
    """Removes repeated variables; returns the paths of those with other values."""
    if not repeated:
        return states, []
    nnx = loaded_nnx()
    values = dict(nnx.to_flat_state(states))
    unequal = []
    for path, first in repeated.items():
        pair = jax.tree.leaves(values.pop(path)), jax.tree.leaves(values[first])
        if len(pair[0]) != len(pair[1]) or not all(map(_is_equal, *pair)):
            unequal.append(path)
    return nnx.from_flat_state(values), unequal


def _leaf_paths(
    state: PyTree, repeated: Mapping[_GraphPath, _GraphPath]
) -> dict[_GraphPath, LeafPath]:
    if not repeated:
        return {}
    places = [keys for keys, _ in find_nodes(state, is_object)]
    return {
        path: state_tree.join(
            (*places[path[0]], *(state_tree.Key(name, "key") for name in path[1:]))
        )
        for path in (*repeated, *repeated.values())
    }
