"""Partition specs and chunk shapes, derived from the model.

The partitioning of a leaf is decided by the first of these that applies: a rule on
the leaf path, the model's own axis names (linen boxes, NNX metadata) through the
logical rules, the current sharding. Optimizer leaves follow their parameters.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flaxckpt import _arrays, _state, _util, errors
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable
from flaxckpt._transforms.patterns import compile_pattern
from flaxckpt._types import LeafPath, PyTree
from flaxckpt._zarr.array_layout import ArrayLayout, check_layout
from flaxckpt.partition import _axis_names
from flaxckpt.partition._axis_names import AxisNames
from flaxckpt.partition._optimizer_specs import derive as derive

__all__ = ["abstract_state", "parameter_infos"]

_log = logging.getLogger(__name__)

AnyMesh: TypeAlias = Mesh | AbstractMesh
MeshAxes: TypeAlias = str | tuple[str, ...] | None
AxisRules: TypeAlias = Sequence[tuple[str, MeshAxes]] | Mapping[str, MeshAxes]
LeafRules: TypeAlias = Sequence[tuple[str, PartitionSpec]] | Mapping[str, PartitionSpec]


@_util.guessed_names.explain
def abstract_state(
    init_fn_or_state: Callable[..., PyTree] | PyTree,
    *args: Any,
    mesh: AnyMesh | None = None,
    rules: AxisRules = (),
    leaf_rules: LeafRules = (),
) -> PyTree:
    """Returns the shapes, dtypes and shardings of a state, without values.

    ```python
    abstract = abstract_state(init_fn, key, mesh=mesh,
        rules=[("embed", None), ("mlp", "model")],
        leaf_rules=[(r".*/embedding", P("model", None))])
    ```

    Args:
        init_fn_or_state: A function that returns the state for `args`, which is traced
            and not run; or a concrete or abstract state.
        *args: Arguments of the function.
        mesh: The mesh to shard the state over, with devices or without
            (`AbstractMesh`). By default, leaves keep their shardings.
        rules: Logical axis -> mesh axis, as in Flax: the first rule whose mesh axis is
            not yet used by the array wins, and an axis without a rule is not split.
            Pairs, or a dict.
        leaf_rules: Regular expression on the whole leaf path -> partition spec; the
            first match wins. Pairs, or a dict. If given, a leaf without any spec is an
            error, so end with `(".*", P())` to replicate the rest. Scalars and leaves
            of size 1 are always replicated.

    Returns:
        The state with a `jax.ShapeDtypeStruct` for every jax array, sharded over
        `mesh`. Numbers, strings and numpy arrays are returned unchanged.

    Raises:
        PartitionError: Rules match nothing, name axes that the mesh lacks, or do not
            fit a leaf. The error lists every invalid leaf. For `rules`, which models
            may share, unused rules only cause a warning: if no rule is used, or if a
            rule's name is close to the name of an axis without a rule.
        OptionError: Rules are not pairs, or are given without a mesh.

    Source: logical axis rules of Flax and T5X, leaf rules of EasyLM and fjformer.
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise errors.OptionError(
            "mesh must be a jax.sharding.Mesh or AbstractMesh, got"
            f" {_util.arguments.describe(mesh)}:"
            " jax.make_mesh((4, 2), ('data', 'model'))"
        )
    if any(isinstance(arg, Mesh | AbstractMesh) for arg in args):
        raise errors.OptionError("the mesh must be passed by name: mesh=mesh")
    state = init_fn_or_state
    if callable(state) and not _state.nnx_objects.is_object(state):
        state = _state.flax_state.eval_shape(state, *args)
    elif args:
        raise errors.OptionError(
            f"{_util.arguments.describe(init_fn_or_state)} takes no arguments, got"
            f" {len(args)}: pass arguments only with a function that creates the state"
        )
    axis_rules = _axis_rules(rules)
    compiled = _leaf_rules(leaf_rules)
    if mesh is None and (axis_rules or compiled):
        raise errors.OptionError(
            "rules and leaf_rules split leaves over a mesh: pass mesh=..."
        )
    return _make_abstract(state, mesh, axis_rules, compiled)


@_util.gc_pause.pause()
def _make_abstract(
    state: PyTree,
    mesh: AnyMesh | None,
    rules: Sequence[tuple[str, MeshAxes]],
    leaf_rules: Sequence[_Rule],
) -> PyTree:
    flat = _state.flax_state.flatten(state)
    specs = {} if mesh is None else _specs(state, flat, mesh, rules, leaf_rules)
    values = {
        path: _abstract(leaf, mesh, specs.get(path))
        for path, leaf in flat.table.items()
        if leaf.info.kind != "empty"
    }
    return flat.rebuild(values, in_parts=True)


def _abstract(leaf: Leaf, mesh: AnyMesh | None, spec: PartitionSpec | None) -> Any:
    value = leaf.source
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return value
    sharding = leaf.info.sharding
    if mesh is not None:
        sharding = NamedSharding(mesh, spec or PartitionSpec())
    return jax.ShapeDtypeStruct(
        value.shape, value.dtype, sharding=sharding, weak_type=leaf.info.weak_type
    )


@_util.gc_pause.pause()
@_util.guessed_names.explain
def parameter_infos(state: PyTree, *, layout: ArrayLayout | None = None) -> PyTree:
    """Returns the leaf infos that a save of `state` would record.

    Args:
        state: Concrete or abstract.
        layout: As for `save`.

    Returns:
        The same tree, with each NNX object as an `nnx.State`, each leaf of a registered
        class as a dict, and each leaf as a `LeafInfo`: name, shape, dtype, partition
        spec and chunk shape.
    """
    layout = check_layout(layout)
    flat = _state.flax_state.flatten(state)
    infos = {
        path: _arrays.layout.with_chunk_shape(leaf.info, layout)
        for path, leaf in flat.table.items()
    }
    return _state.tree.unflatten(flat.structure, infos, lambda _, parts: parts)


# ---- deciding ---------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Rule:
    pattern: re.Pattern[str]
    spec: PartitionSpec
    is_used: bool = False


def _leaf_rules(leaf_rules: LeafRules) -> list[_Rule]:
    """Returns `leaf_rules` as compiled rules; raises OptionError if invalid."""
    pairs = _pairs(leaf_rules, "leaf_rules", '(r".*/kernel", P("data", None))')
    for pattern, spec in pairs:
        if not isinstance(spec, PartitionSpec):
            raise errors.OptionError(
                f"leaf_rules must map {pattern!r} to a jax.sharding.PartitionSpec,"
                f" got {spec!r:.80}"
            )
    return [_Rule(compile_pattern(pattern), spec) for pattern, spec in pairs]


def _axis_rules(rules: AxisRules) -> list[tuple[str, MeshAxes]]:
    """Returns the `rules` argument as pairs of a logical axis and mesh axes."""
    pairs = _pairs(rules, "rules", '("embed", "data")')
    for name, axes in pairs:
        names = axes if isinstance(axes, tuple | list) else (axes,)
        if not isinstance(name, str) or not all(
            isinstance(axis, str | None) for axis in names
        ):
            raise errors.OptionError(
                "rules must map each logical axis to a mesh axis, a tuple of mesh axes"
                f" or None, got {(name, axes)!r:.80}"
            )
    return [
        (name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs
    ]


def _pairs(rules: Any, what: str, example: str) -> list[tuple[Any, Any]]:
    listed = rules.items() if isinstance(rules, Mapping) else rules
    is_text = isinstance(listed, str | bytes)
    if is_text or not isinstance(listed, Iterable):
        listed = [listed]
    pairs = list(listed)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise errors.OptionError(
                f"{what} must be pairs, such as [{example}], or a dict,"
                f" got {pair!r:.80}"
            )
    return [(name, value) for name, value in pairs]


def _specs(
    state: PyTree,
    flat: _state.flax_state.FlatState,
    mesh: AnyMesh,
    rules: Sequence[tuple[str, MeshAxes]],
    compiled: Sequence[_Rule],
) -> dict[LeafPath, PartitionSpec]:
    infos = {
        path: leaf.info
        for path, leaf in flat.table.items()
        if leaf.info.python_type == "jax.Array"
    }
    axis_names = _axis_names.axis_names(flat.structure)
    optimizer = {path for path in infos if path in flat.optimizer_facts}
    faults: dict[LeafPath, str] = {}
    specs: dict[LeafPath, PartitionSpec] = {}
    for path, info in infos.items():
        if path in optimizer:
            continue
        spec = _decide(info, axis_names.get(path), mesh, rules, compiled)
        if spec is None and compiled:
            faults[path] = f"{info} matches no rule"
        specs[path] = spec or PartitionSpec()
        if problem := _problem(info, specs[path], mesh):
            faults[path] = problem
    if not faults:
        specs |= _choose_optimizer_specs(state, infos, optimizer, specs, mesh, compiled)
    _check_rules(compiled, flat.table, infos, mesh, faults)
    _warn_of_unused(rules, axis_names.values(), mesh)
    return specs


def _decide(
    info: LeafInfo,
    axes: AxisNames | None,
    mesh: AnyMesh,
    rules: Sequence[tuple[str, MeshAxes]],
    leaf_rules: Iterable[_Rule],
) -> PartitionSpec | None:
    """Returns the spec from the rules, the model or the current sharding, or None."""
    matching = _match_rule(info.path, leaf_rules)
    if math.prod(info.shape) <= 1:
        return PartitionSpec()
    if matching is not None:
        return matching
    if axes is not None and len(axes.names) == len(info.shape):
        return _axis_names.mesh_spec(axes, rules)
    if isinstance(info.sharding, NamedSharding):
        spec = info.sharding.spec
        return spec if _axes_of(spec) <= set(mesh.axis_names) else None
    return None


def _match_rule(path: LeafPath, leaf_rules: Iterable[_Rule]) -> PartitionSpec | None:
    matching = [rule for rule in leaf_rules if rule.pattern.fullmatch(path)]
    for rule in matching:
        rule.is_used = True
    return matching[0].spec if matching else None


def _axes_of(spec: PartitionSpec) -> set[str]:
    return {axis for part in spec for axis in _part_axes(part)}


def _part_axes(part: Any) -> tuple[str, ...]:
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _problem(info: LeafInfo, spec: PartitionSpec, mesh: AnyMesh) -> str | None:
    """Returns the reason why `spec` cannot split `info`; None if it can."""
    sizes = dict(mesh.shape)
    axes = [axis for part in spec for axis in _part_axes(part)]
    if missing := [axis for axis in axes if axis not in sizes]:
        return f"{spec} names {missing[0]!r}, {_list_axes(missing[0], sizes)}"
    if len(spec) > len(info.shape):
        return f"{spec} has more parts than {info} has axes"
    if len(set(axes)) < len(axes):
        return f"{spec} uses an axis of the mesh twice"
    for size, part in zip(info.shape, spec, strict=False):
        ways = math.prod(sizes[axis] for axis in _part_axes(part))
        if size % ways:
            return f"{spec} cannot split {size} into {ways} equal parts, in {info}"
    return None


def _choose_optimizer_specs(
    state: PyTree,
    infos: Mapping[LeafPath, LeafInfo],
    optimizer: set[LeafPath],
    specs: Mapping[LeafPath, PartitionSpec],
    mesh: AnyMesh,
    leaf_rules: Sequence[_Rule],
) -> dict[LeafPath, PartitionSpec]:
    """Returns the specs of optimizer leaves: derived or from rules, then checked."""
    derived = derive(state, infos, optimizer, specs, mesh)
    # A rule that also matches parameters is meant for the parameters, and reaches
    # optimizer leaves only through them: (".*", P()) does not undo derived specs.
    optimizer_rules = [
        rule
        for rule in leaf_rules
        if not any(rule.pattern.fullmatch(path) for path in specs)
    ]
    chosen: dict[LeafPath, PartitionSpec] = {}
    replicated: list[str] = []
    for path in infos:
        if path not in optimizer:
            continue
        info, ruled = infos[path], _match_rule(path, optimizer_rules)
        chosen[path] = derived[path].spec if ruled is None else ruled
        if problem := _problem(info, chosen[path], mesh):
            replicated.append(f"{path}: {problem}")
            chosen[path] = PartitionSpec()
        elif ruled is None and derived[path].rule == "replicated":
            replicated.append(f"{path}: {info} follows no parameter")
    if replicated:
        _log.warning(
            "%s replicated:\n%s\nleaf_rules can split them.",
            _util.humanize.count(
                len(replicated), "optimizer leaf is", "optimizer leaves are"
            ),
            errors.rows(replicated),
        )
    return chosen


def _check_rules(
    leaf_rules: Iterable[_Rule],
    table: LeafTable,
    infos: Mapping[LeafPath, LeafInfo],
    mesh: AnyMesh,
    faults: dict[LeafPath, str],
) -> None:
    """Raises PartitionError for unused leaf rules and for axes missing in the mesh.

    Raises it for `faults`, too.
    """
    sizes = dict(mesh.shape)
    for rule in leaf_rules:
        pattern = rule.pattern.pattern
        lacking = sorted(_axes_of(rule.spec) - sizes.keys())
        if not rule.is_used:
            faults[pattern] = f"matches no leaf{_nearest(rule.pattern, table, infos)}"
        elif lacking and not any(map(rule.pattern.fullmatch, faults)):
            name = lacking[0]
            faults[pattern] = f"{rule.spec} names {name!r}, {_list_axes(name, sizes)}"
    if faults:
        raise errors.PartitionError(faults)


def _nearest(
    pattern: re.Pattern[str], table: LeafTable, infos: Mapping[LeafPath, LeafInfo]
) -> str:
    """Describes the leaf that an unmatched pattern was probably meant for."""
    others = [path for path in table if pattern.fullmatch(path)]
    if others:
        return f" that jax splits ({others[0]} is {table[others[0]].info})"
    near = difflib.get_close_matches(pattern.pattern, infos, n=1, cutoff=0.3)
    return f" (nearest: {near[0]})" if near else ""


def _list_axes(name: str, axes: Iterable[str]) -> str:
    """Lists the axes of the mesh, and the closest match to `name`."""
    listed = tuple(axes)
    near = difflib.get_close_matches(str(name), listed, n=1)
    return f"the mesh has {listed}" + (f"; nearest: {near[0]!r}" if near else "")


def _warn_of_unused(
    rules: Sequence[tuple[str, MeshAxes]],
    axis_names: Iterable[AxisNames],
    mesh: AnyMesh,
) -> None:
    """Warns of rules on logical axes that look like mistakes.

    Models share rules, and rules also name axes of activations, so an unused rule alone
    is not a mistake.
    """
    names: dict[str, None] = {}
    ruled: set[str] = set()
    for axes in axis_names:
        names |= {name: None for name in axes.names if isinstance(name, str)}
        ruled |= {name for name, _ in axes.rules}
    given = {name for name, _ in rules}
    unused = [name for name in given if name not in names]
    warnings = []
    if rules and not names.keys() & given:
        has = f"its axes are {', '.join(names)}" if names else "no axis has a name"
        warnings.append(f"none of the rules names an axis of the state: {has}")
    else:
        without = names.keys() - given - ruled - set(mesh.axis_names)
        warnings += [
            f"the axis {name!r} has no rule; nearest: {near[0]!r}"
            for name in without
            if (near := difflib.get_close_matches(name, unused, n=1))
        ]
    sizes = dict(mesh.shape)
    for name, axes_of_mesh in rules:
        lacking = [axis for axis in _part_axes(axes_of_mesh) if axis not in sizes]
        if lacking:
            available = _list_axes(lacking[0], sizes)
            warnings.append(f"the rule of {name!r} names {lacking[0]!r}, {available}")
    if warnings:
        _log.warning(
            "partition rules without effect:\n%s", errors.rows(sorted(warnings))
        )
