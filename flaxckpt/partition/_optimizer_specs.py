"""Derives partition specs of optimizer leaves from the specs of parameters.

No transform is known by name here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flaxckpt import _state
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath, PyTree, Shape

Spec: TypeAlias = PartitionSpec
Keys: TypeAlias = tuple[_state.tree.Key, ...]
Rule: TypeAlias = Literal["types", "suffix", "small", "replicated"]

_SMALL = 64
"""Leaves with fewer elements are replicated without a warning."""


class _Param(NamedTuple):
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


def derive(
    state: PyTree,
    infos: Mapping[LeafPath, LeafInfo],
    optimizer: set[LeafPath],
    specs: Mapping[LeafPath, Spec],
    mesh: Mesh | AbstractMesh,
) -> dict[LeafPath, Derived]:
    """Returns the spec of each leaf of `optimizer`, and the rule that derived the spec.

    `specs` are those of the other leaves of the state.
    """
    by_types: dict[LeafPath, Spec | None] = {}
    params: list[_Param] = []
    for part in _state.flax_state.optimizers(state):
        entries = _state.flax_state.flatten_plain(part.params).leaves
        paths = {
            path: _state.tree.join((*part.params_keys, *entry.keys))
            for path, entry in entries.items()
            if not entry.is_empty
        }
        if not all(whole in specs for whole in paths.values()):
            continue
        inside = {path: specs[whole] for path, whole in paths.items()}
        params += [
            _Param(entries[path].keys, infos[whole].shape, specs[whole])
            for path, whole in paths.items()
        ]
        by_types |= {
            _state.tree.join((*part.state_keys, *keys)): spec
            for keys, spec in _specs_by_types(
                part.init, part.params, inside, mesh
            ).items()
        }
    if not params:
        # Without an optimizer to call, treat all other leaves as parameters, with and
        # without the first key of their path.
        params = [
            _Param(keys, infos[path].shape, spec)
            for path, spec in specs.items()
            for keys in (infos[path].keys, infos[path].keys[1:])
        ]
    suffixes = _Suffixes(params)
    return {
        path: _derive(
            infos[path].shape, suffixes.find(infos[path].keys), by_types.get(path)
        )
        for path in optimizer
    }


def _derive(shape: Shape, param: _Param | None, typed: Spec | None) -> Derived:
    """Derives the spec of a leaf from its parameter and from jax, if known."""
    by_suffix = None if param is None else _adapt_spec(param, shape)
    if not shape or all(size == 1 for size in shape):
        return Derived(PartitionSpec(), "small")
    if typed is not None and (
        any(part is not None for part in typed)
        or (param is not None and by_suffix is None)
    ):
        return Derived(typed, "types")
    if by_suffix is not None:
        # Zeros created from a shape lack the sharding, but have the path.
        return Derived(by_suffix, "suffix")
    is_small = math.prod(shape) < _SMALL
    return Derived(PartitionSpec(), "small" if is_small else "replicated")


def _specs_by_types(
    init: Callable[[PyTree], PyTree],
    params: PyTree,
    specs: Mapping[LeafPath, Spec],
    mesh: Mesh | AbstractMesh,
) -> dict[Keys, Spec | None]:
    """Propagates the parameters' shardings through the optimizer's `init` with jax.

    With explicit axes, a sharding is part of an array's type, so abstract evaluation
    returns the sharding of every leaf, exact even for factored moments. It needs no
    devices, and works beside a user's mesh of any kind. `specs` are those of the leaf
    paths within `params`. Returns keys within the optimizer state -> spec, or None if
    jax returns no sharding; none at all if the evaluation fails, as for an `init` that
    mixes shardings.
    """
    mesh = AbstractMesh(
        tuple(mesh.shape.values()),
        tuple(mesh.shape),
        axis_types=(AxisType.Explicit,) * len(mesh.shape),
    )
    flat = _state.flax_state.flatten_plain(params)
    values = {path: flat.leaves[path].value for path in specs}
    try:
        typed = {
            path: jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=NamedSharding(mesh, specs[path])
            )
            for path, value in values.items()
        }
        with jax.sharding.use_abstract_mesh(mesh):
            state = jax.eval_shape(init, _state.tree.unflatten(flat.structure, typed))
    except Exception:
        # A user's transform may raise anything; the suffix rule still applies.
        return {}
    return {
        entry.keys: _spec_of(entry.value)
        for entry in _state.flax_state.flatten_plain(state).leaves.values()
        if not entry.is_empty
    }


def _spec_of(leaf: Any) -> Spec | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None


class _Suffixes:
    """Finds the parameter whose path is the end of an optimizer leaf's path."""

    def __init__(self, params: Sequence[_Param]) -> None:
        self._params = {_names(param.keys): param for param in params}
        self._lengths = sorted({len(names) for names in self._params}, reverse=True)

    def find(self, keys: Keys) -> _Param | None:
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


def _adapt_spec(param: _Param, shape: Shape) -> Spec | None:
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
