"""Flax states as leaf tables, and back.

NNX objects are graphs, which may share parts: they are split into `nnx.State`s on the
way in and merged again on the way out. The wrappers around single values, linen's
boxes and NNX's variables, keep their place in the structure but add nothing to a
leaf's path.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core import meta
from flax.linen import spmd
from jax.sharding import PartitionSpec

from flaxckpt import errors
from flaxckpt._state import leaf_info
from flaxckpt._state import tree as state_tree
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._types import LeafPath, PyTree

Keys: TypeAlias = tuple[state_tree.Key, ...]


def loaded_nnx() -> Any:
    """The module `flax.nnx`, if anybody has imported it; else there are no objects.

    It takes a tenth of a second to import, which not every user of linen wants to wait.
    """
    return sys.modules.get("flax.nnx")


def boxes() -> tuple[type, ...]:
    """Classes of wrappers around single values, which add nothing to a leaf path."""
    nnx = loaded_nnx()
    return (meta.AxisMetadata, nnx.Variable) if nnx else (meta.AxisMetadata,)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatState:
    """A state as a table of named leaves.

    Attributes:
        table: Leaf path -> leaf, in the order of the state.
        structure: Its containers.
        rebuild: Leaf path -> value, back into a state of the same classes. NNX
            objects come back as new objects that share what the old ones shared.
        optimizer_states: Where the state of an NNX optimizer stands, and its structure
            in optax's own classes, which an `nnx.State` has lost.
    """

    table: LeafTable
    structure: state_tree.Node | LeafPath
    rebuild: Callable[[Mapping[LeafPath, Any]], PyTree]
    optimizer_states: tuple[tuple[Keys, state_tree.Node | LeafPath], ...] = ()


def flatten(state: PyTree) -> FlatState:
    """Makes the leaf table of a state, abstract or concrete.

    Raises:
        UnsupportedLeafError: Leaves that no checkpoint can hold; all are named.
        LeafNameError: Two leaves have one path.
        OptionError: A function or a class was passed for a state.
    """
    check_state(state)
    tree, restore_objects = _split_objects(state)
    table: LeafTable = {}
    faults: dict[LeafPath, str] = {}

    def enter(path: LeafPath, entry: state_tree.Entry) -> None:
        info = leaf_info.of(path, entry)
        if isinstance(info, str):
            faults[path] = info
        else:
            table[path] = Leaf(info, (None if entry.is_empty else entry.value,))

    structure = state_tree.walk(tree, enter, boxes=boxes())
    if faults:
        advice = ""
        if "" in faults and callable(state):
            advice = (
                "Wanted a state, concrete or abstract: call what makes it, or pass"
                " jax.eval_shape of it."
            )
        raise errors.UnsupportedLeafError(faults, advice)
    # Without objects, none of them is an optimizer.
    optimizers = () if tree is state else _nodes(state, _is_nnx_optimizer)
    return FlatState(
        table,
        structure,
        lambda values: restore_objects(state_tree.unflatten(structure, values)),
        tuple(
            (
                (*keys, _OPT_STATE),
                state_tree.flatten(node.opt_state, boxes=boxes()).structure,
            )
            for keys, node in optimizers
        ),
    )


def check_state(state: PyTree) -> None:
    """Raises OptionError if a function or class was passed as the state.

    Raises:
        OptionError: `state` is one.
    """
    if not callable(state) or is_object(state) or isinstance(state, jax.Array):
        return
    if jax.tree.structure(state) != _LEAF:
        return  # a pytree that can be called, too
    name = getattr(state, "__qualname__", type(state).__qualname__)
    if isinstance(state, type):
        what = f"the class {name}"
    elif isinstance(state, linen.Module):
        raise errors.OptionError(
            f"wanted a state, got the linen module {name}, which holds no parameters:"
            " pass what init returns, or a TrainState made of that"
        )
    else:
        what = f"the function {name}"
    raise errors.OptionError(
        f"wanted a state, got {what}: pass what it returns, or, where shapes are enough"
        " to restore into, jax.eval_shape of it"
    )


_LEAF: Any = jax.tree.structure(0)


def values(tree: PyTree) -> dict[LeafPath, Any]:
    """The leaves of a state, or of anything, by their paths; of any type."""
    plain, _ = _split_objects(tree)
    entries = state_tree.flatten(plain, boxes=boxes()).entries
    return {path: entry.value for path, entry in entries.items()}


_OPT_STATE = state_tree.Key("opt_state", "attr")


def _nodes(state: PyTree, wanted: Callable[[Any], bool]) -> list[tuple[Keys, Any]]:
    """The nodes of a state that are `wanted`, each with its keys."""
    found = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda node: wanted(node) or is_object(node)
    )
    return [(state_tree.keys(path), node) for path, node in found if wanted(node)]


def _is_nnx_optimizer(node: object) -> bool:
    nnx = loaded_nnx()
    return nnx is not None and isinstance(node, nnx.Optimizer)


def _split_objects(state: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Puts an `nnx.State` in the place of every NNX object, and tells the way back."""
    try:
        state_tree.check_nesting(state, is_object)
        treedef: Any  # jax declares no attributes of it
        nodes, treedef = flatten_around_objects(state, and_variables=True)
    except errors.LeafNameError:
        raise
    except (TypeError, ValueError) as error:
        raise errors.LeafNameError(
            {"the state": f"jax cannot flatten it ({error})"},
            "Give each dictionary keys of one sortable type.",
        ) from None
    places = [i for i, node in enumerate(nodes) if is_object(node)]
    shared = _shared_variables(nodes, places)
    if not places and not shared:
        return state, lambda tree: tree
    nnx = loaded_nnx()
    # Split together, so that what two objects share is stored once.
    try:
        graph, states = nnx.split([nodes[i] for i in places])
    except RecursionError:
        _check_objects({str(i): nodes[i] for i in places})
        raise errors.LeafNameError(
            {"the state": "nnx cannot split it: its objects are nested too deep"},
            "Flatten the modules.",
        ) from None
    for n, i in enumerate(places):
        nodes[i] = states[n] if n in states else nnx.State({})

    def restore(tree: PyTree) -> PyTree:
        leaves = treedef.flatten_up_to(tree)
        restored = {n: leaves[i] for n, i in enumerate(places) if leaves[i]}
        objects = nnx.merge(graph, nnx.State(restored)) if places else []
        for n, i in enumerate(places):
            leaves[i] = objects[n]
        _share_variables(leaves, objects, shared)
        return treedef.unflatten(leaves)

    return treedef.unflatten(nodes), restore


def flatten_around_objects(
    state: PyTree, *, and_variables: bool = False
) -> tuple[list[Any], Any]:
    """The leaves of a state, each NNX object in it as one leaf, and the tree of them.

    Args:
        state: Any pytree.
        and_variables: Whether NNX variables outside of objects are leaves, too.

    Raises:
        TypeError, ValueError: jax cannot flatten it.
    """
    nnx = loaded_nnx()
    if nnx is None:
        return jax.tree.flatten(state)
    # Every node of a state is looked at.
    kinds = (nnx.Pytree, nnx.Variable) if and_variables else (nnx.Pytree,)
    return jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, kinds))


def _shared_variables(
    nodes: Sequence[Any], places: Sequence[int]
) -> dict[int, int | tuple[Any, ...]]:
    """The NNX variables outside of objects that are also elsewhere in the state.

    Args:
        nodes: The leaves of a state, of which objects and variables are some.
        places: Which of them are objects.

    Returns:
        Place of a variable -> its first place among `nodes`; or, if an object has it,
        the path from the list of all objects to it.
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
        known = first.setdefault(id(variable), i)
        if known != i:
            shared[i] = known
    return shared


def _variables(objects: Sequence[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All variables of NNX objects, each once, with their paths."""
    nnx = loaded_nnx()
    for path, node in nnx.iter_graph(list(objects)) if objects else ():
        if isinstance(node, nnx.Variable):
            yield path, node


def _share_variables(
    leaves: list[Any],
    objects: Sequence[Any],
    shared: Mapping[int, int | tuple[Any, ...]],
) -> None:
    """Puts one variable in all places that shared it, unless the values differ.

    They may: the checkpoint may be of a state that did not share them, such as an
    average that begins as a view of the parameters.

    Args:
        leaves: The leaves of a state; changed in place.
        objects: Its objects.
        shared: What `_shared_variables` returned.
    """
    if not shared:
        return
    by_path = dict(_variables(objects))
    for i, known in shared.items():
        other = leaves[known] if isinstance(known, int) else by_path[known]
        values = jax.tree.leaves((leaves[i], other))
        if len(values) == 2 and _is_equal(*values):
            leaves[i] = other


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two leaves have the same type and value; of arrays, NaNs are equal."""
    if type(one) is not type(other):
        return False
    if not isinstance(one, jax.Array | np.ndarray):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, np.ndarray):
        return bool(_is_same(one, other).all())
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    # Compiled, because arrays of several processes can be compared in no other way.
    return bool(_are_same(one, other))


def _is_same(one: Any, other: Any) -> Any:
    return (one == other) | ((one != one) & (other != other))


@jax.jit
def _are_same(one: jax.Array, other: jax.Array) -> jax.Array:
    same: jax.Array = _is_same(one, other).all()
    return same


def _check_objects(objects: Mapping[str, Any]) -> None:
    """Refuses NNX objects with containers that contain themselves; objects may.

    Raises:
        LeafNameError: Where they do.
    """
    seen: set[int] = set()
    waiting = list(objects.values())
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        fields = {type(node).__name__: dict(vars(node))}
        state_tree.check_nesting(fields, is_object)
        waiting += filter(is_object, jax.tree.leaves(fields, is_leaf=is_object))


def is_object(node: object) -> bool:
    """Whether `node` is an NNX object: a module, an optimizer, streams of keys."""
    nnx = loaded_nnx()
    return nnx is not None and isinstance(node, nnx.Pytree)


def _is_module(node: object) -> bool:
    nnx = loaded_nnx()
    return nnx is not None and isinstance(node, nnx.Module)


# ---- what a model says of its partition -----------------------------------------


class AxisNames(NamedTuple):
    """The names that a model gives to the axes of a parameter.

    Attributes:
        names: One for each axis; None for an axis that is never split.
        rules: The parameter's own rules from logical names to axes of the mesh.
        are_logical: Whether the names need rules to become axes of the mesh.
    """

    names: tuple[Any, ...]
    rules: tuple[tuple[str, Any], ...]
    are_logical: bool


def axis_names(structure: state_tree.Node | LeafPath) -> dict[LeafPath, AxisNames]:
    """The axis names in linen's boxes and NNX's metadata, by leaf path."""
    found: dict[LeafPath, AxisNames] = {}
    _collect_axis_names(structure, found)
    return found


def _collect_axis_names(
    node: state_tree.Node | LeafPath, found: dict[LeafPath, AxisNames]
) -> None:
    if isinstance(node, str):
        return
    for child in node.children:
        _collect_axis_names(child, found)
        if node.is_box and isinstance(child, str):
            static = node.static
            names = static.get("names") or static.get("out_sharding")
            names = names or static.get("sharding_names")  # before flax 0.12.4
            rules = static.get("rules") or static.get("sharding_rules") or ()
            if isinstance(names, list | tuple):
                found[child] = AxisNames(
                    tuples(names),
                    tuples(rules),
                    node.type.endswith(":LogicallyPartitioned") or bool(rules),
                )


def tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value


def mesh_spec(axes: AxisNames, rules: Sequence[tuple[str, Any]]) -> PartitionSpec:
    """The partition spec that `axes` mean under the logical `rules`.

    A name that no rule mentions is not split if it is logical, or is an axis of the
    mesh otherwise.
    """
    known = (*rules, *axes.rules)
    if not known and not axes.are_logical:
        return PartitionSpec(*axes.names)
    mentioned = {logical for logical, _ in known}
    spec = spmd.logical_to_mesh_axes(axes.names, known) or ()
    return PartitionSpec(
        *(
            name
            if part is None and not axes.are_logical and name not in mentioned
            else part
            for name, part in zip(axes.names, spec, strict=True)
        )
    )


def eval_shape(init: Callable[..., PyTree], *args: Any) -> PyTree:
    """The abstract state that `init(*args)` would make, of linen, NNX or neither."""
    from flax import nnx  # init may be what imports it

    # A model with axis names would want a mesh to put its parameters on.
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(lambda: init(*args))


class OptimizerPart(NamedTuple):
    """An optimizer in a state, and what it optimizes.

    Attributes:
        state_keys: Where its state stands.
        init: Makes its state from the parameters.
        params_keys: Where the parameters stand.
        params: The parameters.
    """

    state_keys: Keys
    init: Callable[[PyTree], PyTree]
    params_keys: Keys
    params: PyTree


def optimizers(state: PyTree) -> list[OptimizerPart]:
    """The optimizers of a state that still know their transform.

    Those of `TrainState`s, with the parameters beside them, and NNX optimizers, each
    with the modules of the state.
    """
    parts = [
        OptimizerPart(
            (*keys, _OPT_STATE),
            node.tx.init,
            (*keys, state_tree.Key("params", "attr")),
            node.params,
        )
        for keys, node in _nodes(state, _is_train_state)
        if node.tx is not None  # as of a state that came out of a checkpoint
    ]
    modules = _nodes(state, _is_module)
    optimizers = _nodes(state, _is_nnx_optimizer)
    for n, (keys, optimizer) in enumerate(optimizers):
        fitting = [
            OptimizerPart((*keys, _OPT_STATE), optimizer.tx.init, module_keys, params)
            for module_keys, module in modules
            if _fits(params := loaded_nnx().state(module, optimizer.wrt), optimizer)
        ]
        if len(fitting) > 1 and len(modules) == len(optimizers):
            # Networks of one class: the n-th optimizer is the n-th network's.
            fitting = [part for part in fitting if part.params_keys == modules[n][0]]
        if len(fitting) == 1:
            parts += fitting
    return parts


def _fits(params: PyTree, optimizer: Any) -> bool:
    """Whether these are the parameters that an NNX optimizer was made for."""
    try:
        made = jax.eval_shape(optimizer.tx.init, params)
    except Exception:
        # Whatever its transform says to parameters that are not its own.
        return False
    return _shapes(made) == _shapes(optimizer.opt_state)


def _shapes(tree: PyTree) -> dict[LeafPath, Any]:
    entries = state_tree.flatten(tree, boxes=boxes()).entries
    return {
        path: getattr(entry.value, "shape", None)
        for path, entry in entries.items()
        if not entry.is_empty
    }


def _is_train_state(node: object) -> bool:
    return not is_object(node) and all(
        hasattr(node, name) for name in ("tx", "params", "opt_state")
    )
