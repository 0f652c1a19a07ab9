"""Traces functions over whole trees of leaves, and splits them by result."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from flaxckpt import _arrays, _state, _util, errors
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable
from flaxckpt._transforms import base, function_names
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._types import LeafPath

Tree: TypeAlias = dict[str, Any]
"""Nested dicts with `str` keys."""


@dataclasses.dataclass(frozen=True)
class _Function(TableTransform):
    fn: Callable[..., Any]
    style: Literal["tree", "save", "restore"]
    is_resuming: bool
    wanted: LeafTable | None = None
    _runs: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def with_wanted(self, wanted: LeafTable | None) -> Transform:
        return dataclasses.replace(self, wanted=wanted)

    def __call__(self, table: LeafTable) -> LeafTable:
        target: LeafTable = {}
        if self.style == "restore":
            if self.wanted is None:
                raise errors.OptionError(
                    f"{self} needs the leaves of the target: pass an abstract state"
                )
            target = self.wanted
        leaves = [*table.values(), *target.values()]
        traced = [leaf for leaf in leaves if _is_traced(leaf)]
        constants = [_Constant(leaf) for leaf in leaves if not _is_traced(leaf)]
        order = {id(leaf): i for i, leaf in enumerate(traced)}
        fixed = {id(c.leaf): c for c in constants}
        shape: list[tuple[LeafPath, _Constant | None]] = []

        def flat(values: Sequence[jax.Array]) -> list[jax.Array]:
            def value(leaf: Leaf) -> Any:
                i = order.get(id(leaf))
                return fixed[id(leaf)] if i is None else values[i]

            result = self._call(
                _nest({path: value(leaf) for path, leaf in table.items()}),
                _nest({path: value(leaf) for path, leaf in target.items()}),
                table,
            )
            if not isinstance(result, Mapping):
                raise errors.OptionError(
                    f"{self} must return the state as nested dicts, got"
                    f" {_util.arguments.describe(result)}"
                )
            items = list(_flatten(result))
            shape[:] = [
                (path, item if isinstance(item, _Constant) else None)
                for path, item in items
            ]
            return [item for _, item in items if not isinstance(item, _Constant)]

        # Python numbers need at most 32 bits, as in jax.
        is_wide = any(
            leaf.info.kind == "array" and leaf.info.dtype in _state.dtypes.WIDE
            for leaf in traced
        )
        try:
            with _state.meshes.use(None), _arrays.lazy.x64(is_wide):
                closed = jax.make_jaxpr(flat)(
                    [_arrays.lazy.to_abstract(leaf.info) for leaf in traced]
                )
        except jax.errors.JAXTypeError as error:
            raise errors.OptionError(
                f"{self} cannot be traced: use jax.numpy, which works on arrays before"
                f" they are read ({str(error).splitlines()[0][:160]})"
            ) from None
        with _arrays.lazy.Deriver(str(self)) as derive:
            part_of = _LeafParts(closed, traced, is_wide, self._runs, derive)
            return _assemble(table, shape, part_of)

    def _call(self, tree: Tree, target: Tree, table: LeafTable) -> Any:
        if self.style == "restore":
            return self.fn(tree, target, is_resuming=self.is_resuming)
        if self.style == "tree":
            return self.fn(tree)
        infos = _nest({path: leaf.info for path, leaf in table.items()})
        result = self.fn(tree, infos)
        if not isinstance(result, tuple) or len(result) != 2:
            raise errors.OptionError(
                f"{self} must return the state and its infos, got"
                f" {type(result).__name__}; a function of a checkpoint and a target"
                " needs a parameter is_resuming"
            )
        return result[0]

    def __str__(self) -> str:
        name, colon, detail = function_names.describe(self.fn).partition(": ")
        resuming = ", is_resuming=True" if self.is_resuming else ""
        return f"from_function({name}{resuming}){colon}{detail}"


def from_function(
    fn: Callable[..., Any], *, is_resuming: bool = False
) -> TableTransform:
    """Returns a transform from a function over nested dicts, as in T5X.

    The function is traced, so that leaves it does not use are never read: it sees
    shapes and types, and must use `jax.numpy`. Leaves without values (strings, empty
    containers) can only be moved.

    Args:
        fn: A function of one of three kinds, recognised by its parameters:
            `fn(checkpoint, target, *, is_resuming)` returns the new checkpoint, and may
            use arrays of the target; `fn(state, infos)` returns both, with a `LeafInfo`
            for each leaf, and the new infos are ignored; `fn(state)` returns the new
            state.
        is_resuming: The argument for the first kind. `restore_or_init` never transforms
            a run's own checkpoints, so it is False there.

    Raises:
        OptionError: `fn` has other parameters. When applied: it cannot be traced, or
            returns another type.

    Source: state transformations of T5X, on save and on restore.
    """
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        raise errors.OptionError(
            f"from_function needs a function, got {fn!r}"
        ) from None
    positional = [
        p
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.name != "is_resuming"
        and p.default is p.empty
    ]
    style: Literal["tree", "save", "restore"]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    if ("is_resuming" in parameters or takes_all) and len(positional) == 2:
        style = "restore"
    elif len(positional) == 2:
        style = "save"
    elif len(positional) == 1:
        style = "tree"
    else:
        raise errors.OptionError(
            "from_function needs fn(checkpoint, target, *, is_resuming),"
            f" fn(state, infos) or fn(state), got fn{inspect.signature(fn)}"
        )
    return _Function(fn, style, is_resuming)


@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    """A stand-in for a leaf without values."""

    leaf: Leaf

    def __repr__(self) -> str:
        return f"<{self.leaf.info} at {self.leaf.info.path}>"


def _is_traced(leaf: Leaf) -> bool:
    return leaf.info.kind not in ("string", "empty")


def _nest(leaves: Mapping[LeafPath, Any]) -> Tree:
    def build(value: Any) -> Any:
        if not isinstance(value, _Constant) or value.leaf.info.kind != "empty":
            return value
        return None if value.leaf.info.python_type == "None" else {}

    return _state.tree.nest_values(
        (_state.tree.split(path), build(value)) for path, value in leaves.items()
    )


def _flatten(tree: Any) -> list[tuple[LeafPath, Any]]:
    """Flattens a function's result to leaf paths and traced arrays or constants."""
    items: list[tuple[LeafPath, Any]] = []

    def visit(value: Any, keys: tuple[_state.tree.Key, ...]) -> None:
        path = _state.tree.join(keys)
        if isinstance(value, Mapping) and value:
            for name, child in value.items():
                visit(child, (*keys, _state.tree.Key(name, "key")))
        elif isinstance(value, tuple | list) and value:
            for i, child in enumerate(value):
                visit(child, (*keys, _state.tree.Key(i, "index")))
        elif value is None or isinstance(value, Mapping | tuple | list):
            kind = "None" if value is None else "dict"
            empty = Leaf(LeafInfo(path, keys, "empty", kind), (None,))
            items.append((path, _Constant(empty)))
        elif isinstance(value, str):
            info = LeafInfo(path, keys, "string", "str")
            items.append((path, _Constant(Leaf(info, (value,)))))
        elif isinstance(value, _Constant) or hasattr(value, "dtype"):
            items.append((path, value))
        elif isinstance(value, bool | int | float | complex):
            items.append((path, jnp.asarray(value)))
        else:
            raise errors.OptionError(
                f"the function returned {type(value).__name__} at {path or '(root)'},"
                " wanted nested dicts of arrays"
            )

    visit(tree, ())
    return items


def _assemble(
    table: LeafTable,
    shape: Sequence[tuple[LeafPath, _Constant | None]],
    part_of: _LeafParts,
) -> LeafTable:
    """Returns the table for the result of a function, of computed leaves and others."""
    base.check_paths(path for path, _ in shape if path not in table)
    numbers = itertools.count()
    new: LeafTable = {}
    for path, constant in shape:
        if constant is None:
            if (leaf := part_of(next(numbers), path)) is not None:
                new[path] = leaf
            continue
        found, old = constant.leaf, table.get(path)
        if old and found.info.kind == old.info.kind == "empty":
            found = old  # keeps the kind of the container
        new[path] = base.move(found, path)
    return new


class _LeafParts:
    """The results of a traced function, as leaves with only the needed sources."""

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        traced: Sequence[Leaf],
        is_wide: bool,
        runs: dict[str, Any],
        derive: _arrays.lazy.Deriver,
    ) -> None:
        self._closed = closed
        self._inputs = dict(zip(closed.jaxpr.invars, traced, strict=True))
        self._is_wide = is_wide
        self._runs = runs
        self._derive = derive
        self._made_by = {
            var: i for i, eqn in enumerate(closed.jaxpr.eqns) for var in eqn.outvars
        }

    def __call__(self, number: int, path: LeafPath) -> Leaf | None:
        """Returns a result as a leaf; None if it needs an abstract leaf of a target."""
        out = self._closed.jaxpr.outvars[number]
        if not isinstance(out, core.Literal) and out in self._inputs:
            leaf = self._inputs[out]
            return None if _is_abstract(leaf) else base.move(leaf, path)
        equations, used = self._needed(out)
        leaves = [self._inputs[var] for var in used]
        if any(_is_abstract(leaf) for leaf in leaves):
            return None
        jaxpr = self._closed.jaxpr
        part = jaxpr.replace(
            invars=used,
            outvars=[out],
            eqns=[jaxpr.eqns[i] for i in equations],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        run = core.jaxpr_as_fun(core.ClosedJaxpr(part, self._closed.consts))
        if not self._closed.consts and any(map(_has_body, part.eqns)):
            # Loops are compiled; only once for a part that is saved repeatedly.
            run = self._runs.setdefault(str(part), jax.jit(run))
        info = LeafInfo(path, _tree_keys(path), "array", "jax.Array")
        if leaves:
            info = base.move(leaves[0], path).info
        return self._derive(
            leaves,
            lambda *values: run(*values)[0],
            base=info,
            is_wide=self._is_wide,
            precision="own",
        )

    def _needed(self, out: Any) -> tuple[list[int], list[Any]]:
        """Returns the equations, in order, and the arguments that a result needs."""
        equations: set[int] = set()
        used: dict[Any, None] = {}
        waiting = [out]
        while waiting:
            var = waiting.pop()
            if isinstance(var, core.Literal):
                continue
            if var in self._inputs:
                used[var] = None
            elif var in self._made_by and self._made_by[var] not in equations:
                equations.add(self._made_by[var])
                waiting += self._closed.jaxpr.eqns[self._made_by[var]].invars
        return sorted(equations), [var for var in self._inputs if var in used]


def _has_body(equation: Any) -> bool:
    bodies = (core.Jaxpr, core.ClosedJaxpr)
    return any(
        isinstance(value, bodies)
        or (isinstance(value, tuple) and value and isinstance(value[0], bodies))
        for value in equation.params.values()
    )


def _tree_keys(path: LeafPath) -> tuple[_state.tree.Key, ...]:
    return base.keys(path, LeafInfo("", (), "array", "jax.Array"))


def _is_abstract(leaf: Leaf) -> bool:
    return any(isinstance(source, jax.ShapeDtypeStruct) for source in leaf.sources)
