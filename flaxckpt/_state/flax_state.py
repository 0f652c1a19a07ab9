"""Converts Flax states to leaf tables and back.

NNX objects are graphs with shared parts: flattening splits them into `nnx.State`s, and
rebuilding merges them. Wrappers of single values (linen's boxes and NNX variables) are
part of the structure but not of leaf paths. A variable that objects share is one leaf,
or one leaf in each branch of the state.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from flax import linen
from flax.core import meta

from flaxckpt import _util, errors
from flaxckpt._state import bits as state_bits
from flaxckpt._state import boxes as state_boxes
from flaxckpt._state import describe as state_describe
from flaxckpt._state import flatten as state_flatten
from flaxckpt._state import leaf_types, optimizer_roles
from flaxckpt._state import tree as state_tree
from flaxckpt._state.flatten import FlatTree
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._types import JSON, LeafPath, PyTree

Keys: TypeAlias = tuple[state_tree.Key, ...]


loaded_nnx: Callable[[], Any] = functools.partial(sys.modules.get, "flax.nnx")
"""Returns the module `flax.nnx` if imported; without it, no NNX objects exist.

Importing it takes a tenth of a second, which users of linen would wait for.
"""


def boxes() -> tuple[type, ...]:
    """Returns the classes of wrappers of single values, absent from leaf paths."""
    nnx = loaded_nnx()
    return (meta.AxisMetadata, nnx.Variable) if nnx else (meta.AxisMetadata,)


@dataclasses.dataclass(frozen=True)
class FlatState:
    """A state as a table of named leaves.

    Attributes:
        table: Leaf path -> leaf, in the order of the state.
        structure: The containers of the state.
        restore_objects: The inverse of splitting NNX objects: they become new objects
            with the same sharing. Takes the state, and values of empty attributes.
        objects: Leaf path -> NNX object that is split there.
        optimizer_states: Keys of each NNX optimizer's state, and its structure in
            optax's own classes, which an `nnx.State` lacks.
        repeated: Path of a variable -> its path in an earlier branch, if each branch
            has all of its variables.
        attributes: Leaf path of an empty attribute of an NNX object -> the structure of
            its new value.
    """

    table: LeafTable
    structure: state_tree.Node | LeafPath
    restore_objects: Callable[[PyTree, Mapping[LeafPath, Any]], PyTree]
    objects: Mapping[LeafPath, Any] = dataclasses.field(default_factory=dict)
    optimizer_states: tuple[tuple[Keys, state_tree.Node | LeafPath], ...] = ()
    repeated: Mapping[LeafPath, LeafPath] = dataclasses.field(default_factory=dict)
    attributes: Mapping[LeafPath, state_tree.Node | LeafPath] = dataclasses.field(
        default_factory=dict
    )

    @_util.forks.lazy
    def optimizer_facts(self) -> dict[LeafPath, optimizer_roles.LeafFacts]:
        """Leaf path -> facts, for each leaf of an optimizer state."""
        return optimizer_roles.find_facts(self.structure, self.optimizer_states)

    def table_with_roles(self) -> LeafTable:
        """Returns the table with the role of each optimizer leaf."""
        return optimizer_roles.with_roles(self.table, self.optimizer_facts)

    def table_to_transform(self) -> LeafTable:
        """Returns the table with roles, by which moments follow, and with boxes."""
        return state_boxes.with_boxes(self.table_with_roles(), self.structure)

    def rebuild(
        self, values: Mapping[LeafPath, Any], *, in_parts: bool = False
    ) -> PyTree:
        """Returns a state of the same classes with other values.

        `in_parts` leaves leaves of registered classes in parts, for values from which
        they cannot be built. Raises UnbuiltLeavesError, or UnequalVariablesError if the
        values of a shared variable differ.
        """
        make_leaf = leaf_types.LeafParts if in_parts else leaf_types.build
        return self.restore_objects(
            state_tree.unflatten(self.structure, values, make_leaf),
            {
                path: state_tree.unflatten(structure, values, make_leaf)
                for path, structure in self.attributes.items()
            },
        )


class UnequalVariablesError(Exception):
    """Variables that objects share, with different values in their branches.

    `variables`: path of a variable -> its path in an earlier branch.
    """

    def __init__(self, variables: Mapping[LeafPath, LeafPath]) -> None:
        self.variables = dict(variables)
        super().__init__(", ".join(self.variables))


def flatten(
    state: PyTree,
    *,
    whole_branches: bool = False,
    task: Literal["saved", "restored into"] = "saved",
) -> FlatState:
    """Returns the leaf table of a concrete or abstract state.

    With `whole_branches`, NNX variables are repeated in each top-level branch that has
    them, so that each branch can be restored alone. Otherwise, a variable that objects
    share is a leaf of the first object. `task` is what the caller does to the state,
    for messages.

    Raises:
        UnsupportedLeafError: Leaves cannot be saved; the error lists all of them.
        LeafNameError: Two leaves have the same path.
        OptionError: The state is a function or a class.
    """
    check_state(state)
    tree, restore_objects, repeated, objects = _split_objects(state, whole_branches)
    table: LeafTable = {}
    faults: dict[LeafPath, str] = {}

    def enter(path: LeafPath, leaf: state_tree.TreeLeaf) -> None:
        info = state_describe.describe(path, leaf)
        if isinstance(info, str):
            faults[path] = info
        else:
            table[path] = Leaf(info, (None if leaf.is_empty else leaf.value,))

    structure = state_flatten.walk(tree, enter, boxes=boxes())
    if faults:
        advice = ""
        if "" in faults and callable(state):
            advice = (
                "Wanted a concrete or abstract state: call the function that creates"
                " it, or pass jax.eval_shape of it."
            )
        raise errors.UnsupportedLeafError(faults, advice, task=task)
    # Without NNX objects, the state has no NNX optimizers.
    optimizers = () if tree is state else _find_nodes(state, _is_nnx_optimizer)
    if objects:
        structure = _with_attributes(structure, state, [_MAX_ATTRIBUTES_BYTES])
    return FlatState(
        table,
        structure,
        restore_objects,
        objects,
        tuple(
            ((*keys, _OPT_STATE), flatten_plain(node.opt_state).structure)
            for keys, node in optimizers
        ),
        repeated,
    )


def check_state(state: PyTree) -> None:
    """Raises OptionError for a function, class or linen module passed as the state."""
    if not callable(state) or is_object(state) or isinstance(state, jax.Array):
        return
    if leaf_types.is_leaf(state):
        return
    if jax.tree.structure(state) != _LEAF:
        return  # a callable pytree
    name = getattr(state, "__qualname__", type(state).__qualname__)
    if isinstance(state, type):
        what = f"the class {name}"
    elif isinstance(state, linen.Module):
        raise errors.OptionError(
            f"wanted a state, got the linen module {name}, which holds no parameters:"
            " pass the result of init, or a TrainState with it"
        )
    else:
        what = f"the function {name}"
    raise errors.OptionError(
        f"wanted a state, got {what}: pass its result, or, if shapes are enough,"
        " jax.eval_shape of it"
    )


_LEAF: Any = jax.tree.structure(0)


def flatten_plain(tree: PyTree) -> FlatTree:
    """Flattens a tree without NNX objects; boxes of Flax are absent from leaf paths."""
    return state_flatten.flatten(tree, boxes=boxes())


def leaves_by_path(tree: PyTree) -> dict[LeafPath, Any]:
    """Returns the leaves of any pytree by path, of any type."""
    plain = _split_objects(tree).tree
    entries = flatten_plain(plain).leaves
    return {path: entry.value for path, entry in entries.items()}


def locate_state(result: Any, paths: Set[LeafPath]) -> Callable[[Any], PyTree] | None:
    """Returns the function that takes the state from a result; None without a state.

    The state is the result, or the item of a dict, tuple or list with the most leaves
    of `paths`, the leaf paths before the step: a step may add leaves. A step that
    changes its state in place returns none of them.
    """
    if result is None:
        return None
    places: list[Callable[[Any], PyTree]] = [lambda result: result]
    if isinstance(result, Mapping):
        places += map(operator.itemgetter, result)
    elif isinstance(result, tuple | list):
        places += map(operator.itemgetter, range(len(result)))

    def count(take: Callable[[Any], PyTree]) -> int:
        return len(leaves_by_path(take(result)).keys() & paths)

    place = max(places, key=count)
    return place if count(place) else None


_OPT_STATE = state_tree.Key("opt_state", "attr")


def _find_nodes(
    state: PyTree, predicate: Callable[[Any], bool]
) -> list[tuple[Keys, Any]]:
    """Returns the nodes of a state that satisfy `predicate`, each with its keys."""
    nodes = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda node: predicate(node) or is_object(node)
    )
    return [
        (state_flatten.to_keys(path), node) for path, node in nodes if predicate(node)
    ]


def _is_nnx_optimizer(node: object) -> bool:
    nnx = loaded_nnx()
    return nnx is not None and isinstance(node, nnx.Optimizer)


class _Split(NamedTuple):
    """A state with an `nnx.State` in place of each NNX object; see `FlatState`."""

    tree: PyTree
    restore_objects: Callable[[PyTree, Mapping[LeafPath, Any]], PyTree]
    repeated: Mapping[LeafPath, LeafPath]
    objects: Mapping[LeafPath, Any]


def _split_objects(state: PyTree, whole_branches: bool = False) -> _Split:
    """Replaces NNX objects by `nnx.State`s."""
    try:
        state_flatten.check_nesting(state, is_object)
        treedef: Any  # jax declares no attributes of it
        nodes, treedef = flatten_around_objects(state, and_variables=True)
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
    around, _ = _flatten_by_path(state, (nnx.Pytree, nnx.Variable))
    paths = [path for path, _ in around]
    objects = {paths[i]: nodes[i] for i in places}
    for n, i in enumerate(places):
        nodes[i] = states[n] if n in states else nnx.State({})

    def restore(tree: PyTree, attributes: Mapping[LeafPath, Any]) -> PyTree:
        # The tree may have more leaves than the state.
        outer = dict(_flatten_by_path(tree, (nnx.State, nnx.Variable))[0])
        split = {id(outer[path]) for path in objects}
        around, treedef = _flatten_by_path(tree, (nnx.Variable,), split)
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
    tree: PyTree, kinds: tuple[type, ...], ids: Set[int] = frozenset()
) -> tuple[list[tuple[LeafPath, Any]], Any]:
    """Flattens a tree around nodes of `kinds`, or with `ids`; returns paths, too."""
    nodes, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, kinds) or id(node) in ids
    )
    keys = state_flatten.to_keys
    return [(state_tree.join(keys(path)), node) for path, node in nodes], treedef


# ---- attributes of objects ------------------------------------------------------


_MAX_ATTRIBUTES_BYTES = 2**20
"""Limit on the attributes to record of a state: they must not hinder its save."""


def _with_attributes(
    structure: state_tree.Node | LeafPath, value: Any, left: list[int]
) -> state_tree.Node | LeafPath:
    """Returns the containers of a value; those of NNX objects with static fields.

    These are attributes that are no leaves, such as the rate of a dropout. `left` is a
    single number, the bytes that further ones may take as JSON.
    """
    if isinstance(structure, str) or structure.is_box or _is_nnx_optimizer(value):
        return structure
    names = [state_tree.join((key,)) for key in structure.keys]
    inside = _children(value) or {}
    children = tuple(
        _with_attributes(child, inside.get(name), left)
        for name, child in zip(names, structure.children, strict=True)
    )
    if not is_object(value):
        return dataclasses.replace(structure, children=children)
    alone = {name: inner for name, inner in inside.items() if name not in names}
    static = dict(_attributes(alone, {id(value)}, left))
    return dataclasses.replace(structure, children=children, static=static)


def _attributes(
    values: Mapping[str, Any], seen: set[int], left: list[int]
) -> Iterator[tuple[str, JSON]]:
    """Yields the path and JSON of attributes, also of objects without leaves."""
    for name, value in values.items():
        field, size = state_flatten.attribute_to_json(name, value)
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
    """Returns the path and value of the empty attribute at or above a path.

    Empty are None and containers without children. None is returned for a path outside
    of `objects`, and for an attribute that has a value or does not exist.
    """
    around = (at for at in objects if state_tree.is_inside(path, at))
    above = max(around, key=len, default=None)
    if above is None:
        return None
    node, done = objects[above], above
    while done != path and (children := _children(node)) is not None:
        name = _next_part(done, path)
        done = f"{done}/{name}" if done else name
        if name not in children:
            return None
        node = children[name]
    is_empty = node is None or (isinstance(node, dict | list | tuple) and not node)
    return (done, node) if is_empty and done != above else None


def _children(node: Any) -> dict[LeafPath, Any] | None:
    """Returns the children of an NNX object or container; None if it has none."""
    if is_object(node):
        # Those of an nnx.List are numbers in older versions of Flax.
        inner = vars(node).items()
        return {state_tree.escape(str(name)): value for name, value in inner}
    if isinstance(node, loaded_nnx().Variable):
        return None
    return dict(_flatten_top(node)[0]) or None


def _flatten_top(node: Any) -> tuple[list[tuple[LeafPath, Any]], Any]:
    """Flattens the top level of a container; a leaf has the empty path."""
    nodes, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda inner: inner is not node
    )
    keys = state_flatten.to_keys
    return [(state_tree.join(keys(path)), inner) for path, inner in nodes], treedef


def _next_part(above: LeafPath, path: LeafPath) -> LeafPath:
    return path[len(above) :].lstrip("/").partition("/")[0]


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


def flatten_around_objects(
    state: PyTree, *, and_variables: bool = False
) -> tuple[list[Any], Any]:
    """Flattens a state with each NNX object as a leaf; returns leaves and treedef.

    With `and_variables`, NNX variables outside of objects are leaves as well. Raises
    TypeError or ValueError if jax cannot flatten the state.
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

    `nodes` are the leaves of the state, with objects at `places`. Index of a variable
    -> its first index in `nodes`; or, for a variable of an object, its path from the
    list of all objects.
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

    Values differ if the checkpoint was saved from a state without the sharing, such as
    an average that starts as a view of the parameters.
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
        parts, others = leaves_by_path(one), leaves_by_path(other)
        return parts.keys() == others.keys() and all(
            _is_equal(part, others[path]) for path, part in parts.items()
        )
    return state_bits.is_same(one, other)


def _check_objects(objects: Mapping[str, Any]) -> None:
    """Raises LeafNameError if a container of an NNX object contains itself.

    Objects may contain themselves.
    """
    seen: set[int] = set()
    waiting = list(objects.values())
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        fields = {type(node).__name__: dict(vars(node))}
        state_flatten.check_nesting(fields, is_object)
        waiting += filter(is_object, jax.tree.leaves(fields, is_leaf=is_object))


def is_object(node: object) -> bool:
    """Returns True for an NNX object: a module, an optimizer, random streams."""
    nnx = loaded_nnx()
    return nnx is not None and isinstance(node, nnx.Pytree)


# ---- branches with all of their variables ---------------------------------------


_GraphPath: TypeAlias = tuple[Any, ...]
"""Path of a node from the list of all objects of a state."""


def _list_branches(state: PyTree) -> dict[str, list[tuple[_GraphPath, Any]]]:
    """Returns the objects in each top-level branch, with their paths.

    The branches of an object are its attributes.
    """
    branches: dict[str, list[tuple[_GraphPath, Any]]] = {}
    if is_object(state):
        for name, value in vars(state).items():
            leaves = jax.tree.leaves(value, is_leaf=_is_in_graph)
            if any(map(_is_in_graph, leaves)):
                branches[name] = [((0, name), value)]
        return branches
    for n, (keys, node) in enumerate(_find_nodes(state, is_object)):
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
    """Adds variables that objects of an earlier branch share to the other branches.

    Returns the states of all objects, and the paths of the added variables -> their
    first paths.
    """
    nnx = loaded_nnx()
    values = dict(nnx.to_flat_state(states))
    repeated: dict[_GraphPath, _GraphPath] = {}
    branches = _list_branches(state)
    if len(branches) < 2:
        return states, repeated
    first = _paths_by_id([node for _, node in _find_nodes(state, is_object)])
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
    """Removes variables that `_repeat_variables` has added.

    Returns the states, and the paths of the removed variables with other values than
    the first.
    """
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
    places = [keys for keys, _ in _find_nodes(state, is_object)]
    return {
        path: state_tree.join(
            (*places[path[0]], *(state_tree.Key(name, "key") for name in path[1:]))
        )
        for path in (*repeated, *repeated.values())
    }


def eval_shape(init: Callable[..., PyTree], *args: Any) -> PyTree:
    """Returns the abstract state of `init(*args)`, for linen, NNX or plain jax."""
    from flax import nnx  # init may be the first to import it

    # A model with axis names would require a mesh for its parameters.
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(lambda: init(*args))


class OptimizerPart(NamedTuple):
    """An optimizer in a state; `init` makes its state from its parameters."""

    state_keys: Keys
    init: Callable[[PyTree], PyTree]
    params_keys: Keys
    params: PyTree


def optimizers(state: PyTree) -> list[OptimizerPart]:
    """Returns the optimizers of a state whose transform is available.

    Optimizers of `TrainState`s, each with the parameters beside it, and NNX optimizers,
    each with the modules of the state.
    """
    parts = [
        OptimizerPart(
            (*keys, _OPT_STATE),
            node.tx.init,
            (*keys, state_tree.Key("params", "attr")),
            node.params,
        )
        for keys, node in _find_nodes(state, _is_train_state)
        if node.tx is not None  # None in a state restored without classes
    ]
    nnx = loaded_nnx()
    modules = _find_nodes(
        state, lambda node: nnx is not None and isinstance(node, nnx.Module)
    )
    optimizers = _find_nodes(state, _is_nnx_optimizer)
    for n, (keys, optimizer) in enumerate(optimizers):
        fitting = [
            OptimizerPart((*keys, _OPT_STATE), optimizer.tx.init, module_keys, params)
            for module_keys, module in modules
            if _fits(params := nnx.state(module, optimizer.wrt), optimizer)
        ]
        if len(fitting) > 1 and len(modules) == len(optimizers):
            # Networks of equal classes: match optimizers and networks by position.
            fitting = [part for part in fitting if part.params_keys == modules[n][0]]
        if len(fitting) == 1:
            parts += fitting
    return parts


def _fits(params: PyTree, optimizer: Any) -> bool:
    """Returns True if an NNX optimizer was created for these parameters."""
    try:
        fresh = jax.eval_shape(optimizer.tx.init, params)
    except Exception:
        # A transform may raise anything for the parameters of another network.
        return False
    return _shapes(fresh) == _shapes(optimizer.opt_state)


def _shapes(tree: PyTree) -> dict[LeafPath, Any]:
    entries = flatten_plain(tree).leaves
    return {
        path: getattr(entry.value, "shape", None)
        for path, entry in entries.items()
        if not entry.is_empty
    }


def _is_train_state(node: object) -> bool:
    return not is_object(node) and all(
        hasattr(node, name) for name in ("tx", "params", "opt_state")
    )
