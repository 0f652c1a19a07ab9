"""Transforms that change the values of leaves: types, shapes and sizes."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from flaxckpt import _state, _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base, function_names
from flaxckpt._transforms.axis_maps import check_axis
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.patterns import compile_pattern
from flaxckpt._transforms.rows import ValueMap, in_place
from flaxckpt._types import LeafPath

# ---- types --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Cast(TableTransform):
    pattern: re.Pattern[str]
    dtype: str
    lossy: bool

    def __call__(self, table: LeafTable) -> LeafTable:
        matching = base.matches(self.pattern, table)
        faults = {
            path: str(table[path].info)
            for path in matching
            if not self.lossy and not _is_safe(table[path], self.dtype)
        }
        if faults:
            raise errors.OptionError(
                f"{self} would lose values of integers:\n"
                + errors.rows(
                    f"{path}: found {found}" for path, found in faults.items()
                )
                + "\nPass lossy=True to allow this."
            )
        return {
            path: _cast(leaf, self.dtype, self.lossy) if path in matching else leaf
            for path, leaf in table.items()
        }

    def on_restore(self) -> Transform | None:
        return None

    def __str__(self) -> str:
        lossy = True if self.lossy else None
        return base.call("cast", self.pattern.pattern, self.dtype, lossy=lossy)


def cast(pattern: str, dtype: Any, *, lossy: bool = False) -> TableTransform:
    """Changes the element type of the matching floating leaves.

    ```python
    save(path, state, transforms=[cast("params/.*", "bfloat16")])
    ```

    Moments keep their type, unless the pattern matches them.

    Args:
        pattern: Regular expression on the whole leaf path.
        dtype: The new type, as a name or a numpy or jax type. A floating type applies
            to floating leaves that match, and other leaves stay unchanged.
        lossy: Also change integers to floats, floats to integers, and integers to
            narrower integers; and numpy scalars. A value that the new type cannot
            represent becomes an arbitrary value.

    Raises:
        OptionError: `pattern` is not a valid regular expression, or `dtype` not an
            element type. When applied: nothing matches, or a matching leaf cannot be
            cast without `lossy`.

    Source: `save_dtype` and `restore_dtype` of T5X, `float_dtype` of fjformer.
    """
    wanted = dtype
    if not isinstance(dtype, str):
        try:
            # numpy interprets None as float64.
            wanted = "" if dtype is None else _state.numpy_dtypes.name(dtype)
        except TypeError:
            wanted = ""
    if not wanted:
        raise errors.OptionError(
            "cast needs an element type, such as 'bfloat16' or jax.numpy.bfloat16, got"
            f" {_util.arguments.describe(dtype)}"
        )
    wanted = _state.dtypes.check(wanted)
    return _Cast(compile_pattern(pattern), wanted, lossy)


def _is_safe(leaf: Leaf, wanted: str) -> bool:
    stored = leaf.info.dtype
    if leaf.info.kind != "array" or stored is None:
        return True
    kinds = (_state.dtypes.kind(stored), _state.dtypes.kind(wanted))
    return kinds[1] == "float" or _state.dtypes.restores_as(stored, wanted)


def _cast(leaf: Leaf, wanted: str, lossy: bool) -> Leaf:
    stored = leaf.info.dtype
    is_numpy_scalar = leaf.info.python_type == "numpy.generic"
    if stored is None or not (leaf.info.kind == "array" or (lossy and is_numpy_scalar)):
        return leaf
    if not lossy and not _state.dtypes.restores_as(stored, wanted):
        return leaf
    info = dataclasses.replace(leaf.info, dtype=wanted, weak_type=False)
    if info.python_type == "jax.Array" and not _state.dtypes.is_in_jax(wanted):
        info = dataclasses.replace(info, python_type="numpy.ndarray", sharding=None)
    return dataclasses.replace(leaf, info=info)


# ---- one leaf to one ----------------------------------------------------------------

ArrayFn: TypeAlias = Callable[[jax.Array], jax.Array]


def map_leaf(
    pattern: str, fn: ArrayFn, *, inverse: ArrayFn | None = None
) -> TableTransform:
    """Replaces the values of every matching leaf by `fn(values)`.

    ```python
    map_leaf("params/pos_embed", lambda x: jax.image.resize(x, (256, 768), "linear"))
    ```

    `fn` gets values in the type of the leaf, and decides the type of the result. If it
    changes the shape of a parameter, it is also applied to the moments of the
    parameter's shape; other moments are initialised again.

    Args:
        pattern: Regular expression on the whole leaf path.
        fn: A function from array to array, traced by jax: use `jax.numpy`.
        inverse: The inverse of `fn`.

    Raises:
        OptionError: `pattern` is not a valid regular expression. When applied: nothing
            matches, or `fn` cannot be traced.
    """
    if not callable(fn):
        raise errors.OptionError(f"map_leaf needs a function of arrays, got {fn!r:.80}")

    def undo() -> Transform:
        if inverse is None:
            raise errors.OptionError(
                f"{name} cannot be inverted without an inverse function: write"
                " map_leaf(pattern, fn, inverse=...)"
            )
        return map_leaf(pattern, inverse, inverse=fn)

    # Trainers save repeatedly: compile the function once.
    traced = jax.jit(lambda x: fn(x))
    name = f"{base.call('map_leaf', pattern)} with {function_names.describe(fn)}"
    mapped = ValueMap(traced, precision="own")
    return in_place(name, pattern, lambda _: mapped, undo)


def pad(
    pattern: str, shape: Sequence[int | None], *, value: float = 0
) -> TableTransform:
    """Pads the matching leaves at the end of their axes; their moments, with zeros.

    Args:
        pattern: Regular expression on the whole leaf path.
        shape: The new size of each axis; None keeps the size.
        value: The value of new elements.

    Raises:
        OptionError: As for `map_leaf`; or a leaf has another number of axes, or is
            already larger.
    """
    wanted = _util.arguments.check_ints("shape", shape, least=0, or_none=True)
    _util.arguments.check_number("value", value)

    def padded(x: jax.Array, fill: float) -> jax.Array:
        widths = [(0, new - old) for old, new in _extents(x, wanted)]
        if any(width < 0 for _, width in widths):
            raise ValueError(f"it is already larger than {wanted}: use slice")
        return jnp.pad(x, widths, constant_values=fill)

    name = base.call("pad", pattern, wanted, value=value or None)
    fn = ValueMap(lambda x: padded(x, value), "wide", True, lambda x: padded(x, 0))
    return in_place(name, pattern, lambda _: fn)


def slice(pattern: str, shape: Sequence[int | None]) -> TableTransform:
    """Cuts the ends of the axes of the matching leaves, and of their moments.

    Args:
        pattern: Regular expression on the whole leaf path.
        shape: The new size of each axis; None keeps the size.

    Raises:
        OptionError: As for `map_leaf`; or a leaf has another number of axes, or is
            already smaller.
    """
    wanted = _util.arguments.check_ints("shape", shape, least=0, or_none=True)

    def cut(x: jax.Array) -> jax.Array:
        extents = list(_extents(x, wanted))
        if any(new > old for old, new in extents):
            raise ValueError(f"it is already smaller than {wanted}: use pad or grow")
        return jax.lax.slice(x, [0] * x.ndim, [new for _, new in extents])

    name = base.call("slice", pattern, wanted)
    return in_place(name, pattern, lambda _: ValueMap(cut, resizes=True))


def _extents(x: jax.Array, wanted: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    if x.ndim != len(wanted):
        raise ValueError(f"it has {x.ndim} axes, but {tuple(wanted)} has {len(wanted)}")
    for old, new in zip(x.shape, wanted, strict=True):
        yield old, old if new is None else new


def grow(
    pattern: str,
    axis: int,
    size: int,
    *,
    init: Literal["mean", "normal", "zeros"] = "mean",
    seed: int = 0,
) -> TableTransform:
    """Adds rows to the matching leaves: tokens to a vocabulary, classes to a head.

    Args:
        pattern: Regular expression on the whole leaf path.
        axis: The axis that grows.
        size: The new size of the axis.
        init: New rows are the mean of the old rows, random with their mean and
            deviation (for each element over all rows), or zero; of moments, zero.
        seed: For `normal`.

    Raises:
        OptionError: As for `map_leaf`; or a leaf is already larger.
    """
    _util.arguments.check_choice("init", init, ("mean", "normal", "zeros"))
    axis = _util.arguments.check_int("axis", axis)
    seed = _util.arguments.check_int("seed", seed)
    size = _util.arguments.check_int("size", size, least=0)

    def grown(x: jax.Array, how: str, path: LeafPath = "") -> jax.Array:
        check_axis(x, axis)
        old = x.shape[axis]
        if old == 0 and how != "zeros":
            raise ValueError(f"axis {axis} is empty: pass init='zeros'")
        if size < old:
            raise ValueError(f"axis {axis} already has {old} rows, more than {size}")
        shape = (*x.shape[: axis % x.ndim], size - old, *x.shape[axis % x.ndim + 1 :])
        if how == "zeros":
            new = jnp.zeros(shape, x.dtype)
        else:
            is_wide = jnp.dtype(x.dtype).itemsize > 4
            wide = jnp.asarray(x, x.dtype if is_wide else jnp.float32)
            new = jnp.broadcast_to(jnp.mean(wide, axis, keepdims=True), shape)
            if how == "normal":
                deviation = jnp.std(wide, axis, keepdims=True)
                # Leaves of equal shapes get different rows.
                key = jax.random.key(seed, impl="threefry2x32")
                key = jax.random.fold_in(key, zlib.crc32(path.encode()))
                new = new + deviation * jax.random.normal(key, shape, wide.dtype)
        return jnp.concatenate([x, jnp.asarray(new, x.dtype)], axis)

    def of_path(path: LeafPath) -> ValueMap:
        return ValueMap(
            lambda x: grown(x, init, path), "wide", True, lambda x: grown(x, "zeros")
        )

    shown = None if init == "mean" else init
    name = base.call("grow", pattern, axis, size, init=shown, seed=seed or None)
    same = of_path("")
    return in_place(name, pattern, of_path if init == "normal" else lambda _: same)
