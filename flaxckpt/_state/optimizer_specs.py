"""Derives partition specs of optimizer leaves from the specs of parameters.

No transform is known by name here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from flaxckpt._state import flatten, tree
from flaxckpt._types import LeafPath, PyTree, Shape

Spec: TypeAlias = PartitionSpec
Keys: TypeAlias = tuple[tree.Key, ...]
Rule: TypeAlias = Literal["types", "suffix", "small", "replicated"]

_SMALL = 64
"""Leaves with fewer elements are replicated without a warning."""


class Param(NamedTuple):
    """A parameter, with the properties that affect its optimizer state."""

    keys: Keys
    shape: Shape
    spec: Spec


class Derived(NamedTuple):
    """The partition spec of an optimizer leaf, and the rule that it follows from.

    `types`, jax propagated the parameters' shardings through `tx.init`; `suffix`, the
    leaf path ends with a parameter's path; `small`, not worth splitting; or
    `replicated`, no rule applies.
    """

    spec: Spec
    rule: Rule


def derive_specs(
    leaves: Mapping[LeafPath, tuple[Keys, Shape]],
    params: Sequence[Param],
    *,
    by_types: Mapping[LeafPath, Spec | None],
) -> dict[LeafPath, Derived]:
    """Derives the partition spec of every leaf of an optimizer state.

    `leaves` are the keys and shapes of the optimizer's leaves; `by_types` has the specs
    that `specs_by_types` has found, by leaf path.
    """
    suffixes = _Suffixes(params)
    derived = {}
    for path, (keys, shape) in leaves.items():
        param = suffixes.find(keys)
        by_suffix = None if param is None else _adapt_spec(param, shape)
        typed = by_types.get(path)
        if not shape or all(size == 1 for size in shape):
            derived[path] = Derived(PartitionSpec(), "small")
        elif typed is not None and (
            any(part is not None for part in typed)
            or (param is not None and by_suffix is None)
        ):
            derived[path] = Derived(typed, "types")
        elif by_suffix is not None:
            # Zeros created from a shape lack the sharding, but have the path.
            derived[path] = Derived(by_suffix, "suffix")
        else:
            rule: Rule = "small" if math.prod(shape) < _SMALL else "replicated"
            derived[path] = Derived(PartitionSpec(), rule)
    return derived


def specs_by_types(
    init: Callable[[PyTree], PyTree],
    params: PyTree,
    specs: Mapping[LeafPath, Spec],
    axis_sizes: Mapping[str, int],
    boxes: tuple[type, ...],
) -> dict[Keys, Spec | None]:
    """Propagates the parameters' shardings through the optimizer's `init` with jax.

    With explicit axes, a sharding is part of an array's type, so abstract evaluation
    returns the sharding of every leaf, exact even for factored moments. It needs no
    devices, and works beside a user's mesh of any kind. `specs` are those of the leaf
    paths within `params`. Keys within the optimizer state -> spec, or None if jax
    returns no sharding. Empty if this evaluation fails, as for an `init` that mixes
    shardings.
    """
    mesh = AbstractMesh(
        tuple(axis_sizes.values()),
        tuple(axis_sizes),
        axis_types=(AxisType.Explicit,) * len(axis_sizes),
    )
    flat = flatten.flatten(params, boxes=boxes)
    try:
        typed = {
            path: jax.ShapeDtypeStruct(
                entry.value.shape,
                entry.value.dtype,
                sharding=NamedSharding(mesh, specs[path]),
            )
            for path, entry in flat.leaves.items()
            if not entry.is_empty
        }
        with jax.sharding.use_abstract_mesh(mesh):
            state = jax.eval_shape(init, tree.unflatten(flat.structure, typed))
    except Exception:
        # A user's transform may raise anything; the suffix rule still applies.
        return {}
    return {
        entry.keys: _spec_of(entry.value)
        for entry in flatten.flatten(state, boxes=boxes).leaves.values()
        if not entry.is_empty
    }


def _spec_of(leaf: Any) -> Spec | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None


class _Suffixes:
    """Finds the parameter whose path is the end of an optimizer leaf's path."""

    def __init__(self, params: Sequence[Param]) -> None:
        self._params = {_names(param.keys): param for param in params}
        self._lengths = sorted({len(names) for names in self._params}, reverse=True)

    def find(self, keys: Keys) -> Param | None:
        """Returns the parameter with the longest path at the end of `keys`."""
        names = _names(keys)
        for length in self._lengths:
            param = self._params.get(names[len(names) - length :])
            if length <= len(names) and param is not None:
                return param
        return None


def _names(keys: Keys) -> tuple[tuple[str, bool], ...]:
    # A list index differs from a dict key with the same digits.
    return tuple((str(key.name), key.kind == "index") for key in keys)


def _adapt_spec(param: Param, shape: Shape) -> Spec | None:
    """Returns the parameter's spec for a leaf of another shape, None if ambiguous."""
    parts = (*param.spec, *(None,) * (len(param.shape) - len(param.spec)))
    if shape == param.shape:
        return PartitionSpec(*parts)
    if shape[1:] == param.shape:
        return PartitionSpec(None, *parts)
    without = {
        parts[:axis] + parts[axis + 1 :]
        for axis in range(len(param.shape))
        if param.shape[:axis] + param.shape[axis + 1 :] == shape
    }
    return PartitionSpec(*without.pop()) if len(without) == 1 else None
