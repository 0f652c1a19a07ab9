"""The axis names of parameters, from linen's boxes and NNX metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax.linen import spmd
from jax.sharding import PartitionSpec

from flaxckpt import _state
from flaxckpt._types import LeafPath


class AxisNames(NamedTuple):
    """The axis names of a parameter, from the model.

    Attributes:
        names: A name for each axis; None for an axis that is never split.
        rules: The parameter's own rules from logical names to mesh axes.
        are_logical: True if rules must map the names to mesh axes.
    """

    names: tuple[Any, ...]
    rules: tuple[tuple[str, Any], ...]
    are_logical: bool


def axis_names(structure: _state.tree.Node | LeafPath) -> dict[LeafPath, AxisNames]:
    found = {}
    for _, node in _state.tree.containers(structure):
        if not node.is_box or not isinstance(path := node.children[0], str):
            continue
        static = node.static
        names = static.get("names") or static.get("out_sharding")
        names = names or static.get("sharding_names")  # before flax 0.12.4
        rules = static.get("rules") or static.get("sharding_rules") or ()
        if isinstance(names, list | tuple):
            found[path] = AxisNames(
                _state.classes.to_tuples(names),
                _state.classes.to_tuples(rules),
                node.type.endswith(":LogicallyPartitioned") or bool(rules),
            )
    return found


def mesh_spec(axes: AxisNames, rules: Sequence[tuple[str, Any]]) -> PartitionSpec:
    """Returns the partition spec of `axes` under the logical `rules`.

    A name without a rule is not split if logical; otherwise it is a mesh axis.
    """
    all_rules = (*rules, *axes.rules)
    if not all_rules and not axes.are_logical:
        return PartitionSpec(*axes.names)
    mentioned = {logical for logical, _ in all_rules}
    spec = spmd.logical_to_mesh_axes(axes.names, all_rules) or ()
    return PartitionSpec(
        *(
            name
            if part is None and not axes.are_logical and name not in mentioned
            else part
            for name, part in zip(axes.names, spec, strict=True)
        )
    )
