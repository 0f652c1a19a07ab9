"""Initialization of optimizer leaves from the restored parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from flaxckpt import _arrays, _state, errors
from flaxckpt._checkpoint import planner
from flaxckpt._types import LeafPath, PyTree
from flaxckpt.errors import Mismatch


def init_leaves(
    recipe: planner.Recipe,
    abstract_state: PyTree,
    restored: Mapping[LeafPath, Any],
    path: str,
) -> tuple[dict[LeafPath, Any], list[LeafPath]]:
    """Returns the initialized leaves of a recipe, and the paths of those kept.

    Leaves that `tx.init` does not make keep their values in the abstract state. Raises
    RestoreMismatchError if they have none there.
    """
    assert recipe.flat is not None
    initial = _init_optimizers(abstract_state, restored)
    values = {}
    kept = []
    for info in recipe.fresh:
        value = initial.get(info.path)
        if value is not None and np.shape(value) == info.shape:
            values[info.path] = _arrays.to_device.place(value, info)
            continue
        values[info.path] = recipe.flat.table[info.path].source
        kept.append(info)
    lacking = [i for i in kept if isinstance(values[i.path], jax.ShapeDtypeStruct)]
    if lacking:
        nothing = "nothing, and tx.init of all params does not make it"
        raise errors.RestoreMismatchError(
            path,
            [Mismatch(info.path, str(info), nothing) for info in lacking],
            "Pass a state with values for them.",
        )
    return values, [info.path for info in kept]


def _init_optimizers(
    abstract_state: PyTree, values: Mapping[LeafPath, Any]
) -> dict[LeafPath, Any]:
    """Returns optimizer leaves initialized by `init` of their transforms."""
    initial: dict[LeafPath, Any] = {}
    for part in _state.flax_state.optimizers(abstract_state):
        flat = _state.flax_state.flatten_plain(part.params)
        params = {
            path: values[_state.tree.join((*part.params_keys, *entry.keys))]
            for path, entry in flat.leaves.items()
            if not entry.is_empty
        }
        with _mesh_of(params.values()):
            state = _init(part, _state.tree.unflatten(flat.structure, params))
        for entry in _state.flax_state.flatten_plain(state).leaves.values():
            initial[_state.tree.join((*part.state_keys, *entry.keys))] = entry.value
    return initial


def _init(part: _state.flax_state.OptimizerPart, params: PyTree) -> PyTree:
    """Returns the state of an optimizer; jit has no other arguments than arrays."""
    treedef: Any  # jax declares no attributes of it
    leaves, treedef = jax.tree.flatten(params)
    places = [i for i, leaf in enumerate(leaves) if not _state.leaf_types.is_leaf(leaf)]

    def init(arrays: list[Any]) -> PyTree:
        whole = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            whole[place] = array
        return part.init(treedef.unflatten(whole))

    return jax.jit(init)([leaves[place] for place in places])


def _mesh_of(leaves: Iterable[Any]) -> AbstractContextManager[Any]:
    """Returns a context with the mesh of `leaves` if its axes are explicit, or none."""
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            mesh: Any = sharding.mesh
            if AxisType.Explicit in mesh.axis_types:
                return _state.meshes.use(mesh)
            break
    return _state.meshes.use(None)
