"""Flax states as leaf tables, and back.

NNX objects are graphs, which may share parts: they are split into `nnx.State`s on the
way in and merged again on the way out. The wrappers around single values, linen's
boxes and NNX's variables, keep their place in the structure but add nothing to a
leaf's path.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import meta

from flaxckpt import _info, _tree, errors
from flaxckpt._info import Leaf, LeafTable
from flaxckpt._types import JSON, LeafPath, PyTree

BOXES: tuple[type, ...] = (nnx.Variable, meta.AxisMetadata)

_TRUSTED_PACKAGES = ("flax", "optax")


@dataclasses.dataclass(frozen=True, slots=True)
class FlatState:
    """A state as a table of named leaves.

    Attributes:
        table: Leaf path -> leaf, in the order of the state.
        structure: Its containers.
        rebuild: Leaf path -> value, back into a state of the same classes. NNX
            objects come back as new objects that share what the old ones shared.
    """

    table: LeafTable
    structure: _tree.Node | LeafPath
    rebuild: Callable[[Mapping[LeafPath, Any]], PyTree]


def flatten(state: PyTree) -> FlatState:
    """Makes the leaf table of a state, abstract or concrete.

    Raises:
        UnsupportedLeafError: Leaves that no checkpoint can hold; all are named.
        LeafNameError: Two leaves have one path.
    """
    tree, restore_objects = _split_objects(state)
    flat = _tree.flatten(tree, boxes=BOXES)
    table: LeafTable = {}
    faults: dict[LeafPath, str] = {}
    for path, entry in flat.entries.items():
        info = _info.describe(path, entry)
        if isinstance(info, str):
            faults[path] = info
        else:
            table[path] = Leaf(info, None if entry.is_empty else entry.value)
    if faults:
        raise errors.UnsupportedLeafError(faults)
    return FlatState(
        table,
        flat.structure,
        lambda values: restore_objects(_tree.unflatten(flat.structure, values)),
    )


def _split_objects(state: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Puts an `nnx.State` in the place of every NNX object, and tells the way back."""
    try:
        treedef: Any  # jax declares no attributes of it
        nodes, treedef = jax.tree.flatten(state, is_leaf=_is_object)
    except (TypeError, ValueError) as error:
        raise errors.LeafNameError(
            {"the state": f"jax cannot flatten it ({error})"},
            "Give each dictionary keys of one sortable type.",
        ) from None
    places = [i for i, node in enumerate(nodes) if _is_object(node)]
    if not places:
        return state, lambda tree: tree
    # Split together, so that what two objects share is stored once.
    graph, states = nnx.split([nodes[i] for i in places])
    for n, i in enumerate(places):
        nodes[i] = states[n] if n in states else nnx.State({})

    def restore(tree: PyTree) -> PyTree:
        leaves = treedef.flatten_up_to(tree)
        restored = {n: leaves[i] for n, i in enumerate(places) if leaves[i]}
        objects = nnx.merge(graph, nnx.State(restored))
        for n, i in enumerate(places):
            leaves[i] = objects[n]
        return treedef.unflatten(leaves)

    return treedef.unflatten(nodes), restore


def _is_object(node: object) -> bool:
    return isinstance(node, nnx.Pytree)


# ---- classes named in a file ----------------------------------------------------

Build = Callable[[dict[str | int, Any], Mapping[str, JSON]], Any]


def resolve(type_name: str) -> Build | None:
    """Finds the builder of a class that a checkpoint names.

    Only containers defined by flax, optax or the standard library's `collections`
    are found; nothing else is imported or called, whatever the file says.
    """
    module_name, _, qualname = type_name.partition(":")
    if (
        module_name.split(".")[0] not in _TRUSTED_PACKAGES
        and module_name != "collections"
    ):
        return None
    try:
        found: Any = sys.modules.get(module_name) or importlib.import_module(
            module_name
        )
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return _builder(found) if isinstance(found, type) else None


def _builder(cls: Any) -> Build | None:
    if issubclass(cls, nnx.Variable):
        return lambda children, static: _variable(cls, children["value"], static)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return lambda children, _: cls(**_named(children))
    if dataclasses.is_dataclass(cls):
        return lambda children, static: _dataclass(cls, {**static, **_named(children)})
    if issubclass(cls, Mapping):
        return lambda children, _: cls(children)
    return None


def _named(children: Mapping[str | int, Any]) -> dict[str, Any]:
    return {str(name): child for name, child in children.items()}


def _variable(cls: Any, value: Any, metadata: Mapping[str, JSON]) -> Any:
    # Built without its mesh, which this process may not have.
    variable = cls(value, **{**metadata, "eager_sharding": False})
    variable.set_metadata(eager_sharding=metadata.get("eager_sharding", False))
    return variable


def _dataclass(cls: Any, known: dict[str, Any]) -> Any:
    """An instance with the `known` fields; None for unsaved ones such as `tx`."""
    fields = {}
    for field in dataclasses.fields(cls):
        value = known.get(field.name)
        if field.name in known:
            fields[field.name] = tuple(value) if isinstance(value, list) else value
        elif (
            field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ):
            fields[field.name] = None
    return cls(**fields)
