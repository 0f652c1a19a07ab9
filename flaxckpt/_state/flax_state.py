"""Converts Flax states to leaf tables, without fields of boxes in paths, and back."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Set
from typing import Any, Literal, NamedTuple

import jax
from flax import linen
from flax.core import meta

from flaxckpt import _util, errors
from flaxckpt._state import boxes as state_boxes
from flaxckpt._state import containers, leaf_types, nnx_objects, optimizer_roles
from flaxckpt._state import describe as state_describe
from flaxckpt._state import flatten as state_flatten
from flaxckpt._state import tree as state_tree
from flaxckpt._state.flatten import FlatTree
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._state.nnx_objects import Keys
from flaxckpt._types import LeafPath, PyTree

_STEP = "step"
_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (32, 64))
"""Dtypes of step counters; that of a Python int is int64."""


def boxes() -> tuple[type, ...]:
    """Returns the classes of wrappers of single values, absent from leaf paths."""
    nnx = nnx_objects.loaded_nnx()
    return (meta.AxisMetadata, nnx.Variable) if nnx else (meta.AxisMetadata,)


@dataclasses.dataclass(frozen=True)
class FlatState:
    """A state as a table of named leaves, in its order.

    Attributes:
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

    @_util.forks.lazy
    def optimizers(self) -> set[LeafPath]:
        """Paths of the optimizer states, also of those without leaves."""
        return optimizer_roles.find_optimizers(self.structure, self.optimizer_states)

    @_util.forks.lazy
    def step_counters(self) -> set[LeafPath]:
        """Paths of the leaves `step` beside optimizers; without any, that of the top.

        The one of the top must be an integer, as it may be a parameter instead.
        """
        beside = {"/".join((*path.split("/")[:-1], _STEP)) for path in self.optimizers}
        if found := beside & self.table.keys():
            return found
        if (top := self.table.get(_STEP)) is None or top.info.shape != ():
            return set()
        return {_STEP} if top.info.dtype in _INTEGERS else set()

    def table_with_roles(self) -> LeafTable:
        return optimizer_roles.with_roles(self.table, self.optimizer_facts)

    def table_to_transform(self) -> LeafTable:
        """Returns the table with roles, by which moments follow, boxes, and nodes."""
        # The node of an empty container tells its class where it is moved or copied to.
        table = containers.with_empty_nodes(self.table_with_roles(), self.structure)
        return state_boxes.with_boxes(table, self.structure)

    def rebuild(
        self, values: Mapping[LeafPath, Any], *, in_parts: bool = False
    ) -> PyTree:
        """Returns a state of the same classes with other values.

        With `in_parts`, leaves of registered classes stay in parts. Raises
        UnbuiltLeavesError, or UnequalVariablesError if the values of a shared variable
        differ.
        """
        make_leaf = leaf_types.LeafParts if in_parts else leaf_types.build
        return self.restore_objects(
            state_tree.unflatten(self.structure, values, make_leaf),
            {
                path: state_tree.unflatten(structure, values, make_leaf)
                for path, structure in self.attributes.items()
            },
        )


def flatten(
    state: PyTree,
    *,
    whole_branches: bool = False,
    task: Literal["saved", "restored into"] = "saved",
) -> FlatState:
    """Returns the leaf table of a concrete or abstract state.

    A variable that objects share is a leaf of the first; with `whole_branches`, of each
    top-level branch, so that each can be restored alone. Raises UnsupportedLeafError
    with all leaves that cannot be saved, LeafNameError for equal paths, and OptionError
    for a function or a class.
    """
    check_state(state)
    tree, restore_objects, repeated, objects = nnx_objects.split(state, whole_branches)
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
    optimizers = (
        () if tree is state else nnx_objects.find_nodes(state, nnx_objects.is_optimizer)
    )
    if objects:
        structure = nnx_objects.with_attributes(structure, state)
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
    if (
        not callable(state)
        or nnx_objects.is_object(state)
        or isinstance(state, jax.Array)
    ):
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
    plain = nnx_objects.split(tree).tree
    entries = flatten_plain(plain).leaves
    return {path: entry.value for path, entry in entries.items()}


def locate_state(result: Any, paths: Set[LeafPath]) -> Callable[[Any], PyTree] | None:
    """Returns the function that takes the state from a result; None without a state.

    The state is the result, or its item with the most leaves of `paths`. A step that
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
        for keys, node in nnx_objects.find_nodes(state, _is_train_state)
        if node.tx is not None  # None in a state restored without classes
    ]
    nnx = nnx_objects.loaded_nnx()
    modules = nnx_objects.find_nodes(
        state, lambda node: nnx is not None and isinstance(node, nnx.Module)
    )
    optimizers = nnx_objects.find_nodes(state, nnx_objects.is_optimizer)
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
    return not nnx_objects.is_object(node) and all(
        hasattr(node, name) for name in ("tx", "params", "opt_state")
    )
