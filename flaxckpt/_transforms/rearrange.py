"""Transforms that rearrange the values of leaves, and keep all of them.

So each has an inverse, and moments of the parameter's shape follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxckpt import _util, errors
from flaxckpt._transforms import base
from flaxckpt._transforms.axis_form import Form
from flaxckpt._transforms.axis_maps import AlongAxis, Transposed, check_axis
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.patterns import compile_pattern
from flaxckpt._transforms.rows import in_place

# ---- the order of axes --------------------------------------------------------------


def transpose(pattern: str, axes: Sequence[int] | None = None) -> TableTransform:
    """Permutes the axes of the matching leaves, and of their moments.

    The factored moments of optax's Adafactor follow as well, if the same axes are
    factored afterwards. Other moments of other shapes are initialised again.

    Args:
        pattern: Regular expression on the whole leaf path.
        axes: As for `jax.numpy.transpose`; reversed by default.

    Raises:
        OptionError: As for `map_leaf`.
    """
    order = None if axes is None else _util.arguments.check_ints("axes", axes)
    if order is not None and len(set(order)) < len(order):
        raise errors.OptionError(f"axes must be distinct, got {order}")

    def undo() -> Transform:
        if order is None:
            return transpose(pattern)
        ndim = len(order)
        positive = [axis % ndim for axis in order]
        return transpose(pattern, [positive.index(axis) for axis in range(ndim)])

    name = base.call("transpose", pattern, order)
    return in_place(name, pattern, lambda _: Transposed(order), undo)


# ---- shapes -------------------------------------------------------------------------


def reshape(
    pattern: str,
    form: str | Sequence[int],
    *,
    from_shape: Sequence[int] | None = None,
    **sizes: int,
) -> TableTransform:
    r"""Changes the shape of the matching leaves, and of their moments.

    ```python
    reshape(r"(.*)/q_proj/kernel", "(h d) e -> e h d", h=8)
    reshape(r"(.*)/bias", (8, -1), from_shape=(512,))
    ```

    Moments of the parameter's shape follow. Other moments follow if the form only
    changes the order of axes, as in `transpose`; otherwise they are initialised again.

    Args:
        pattern: Regular expression on the whole leaf path.
        form: The old and the new axes in the notation of `einops.rearrange`; or the new
            shape, in which one size may be -1.
        from_shape: The old shape, for the inverse of a new shape; one size may be -1.
        **sizes: Sizes of named axes.

    Raises:
        OptionError: `form` is not in einops notation, or a size is missing, also on
            inversion. When applied: nothing matches, or a leaf has other axes or sizes.
    """
    compile_pattern(pattern)
    if not isinstance(form, str):
        shape = _util.arguments.check_ints("form", form, least=-1)
        return _reshape_to(pattern, shape, from_shape, sizes)
    if from_shape is not None:
        raise errors.OptionError(
            f"from_shape is for a new shape, but {form!r} names the old axes: leave it"
            " out"
        )
    return _rearrange_by_form(pattern, Form.parse(form, sizes))


def _rearrange_by_form(pattern: str, form: Form) -> TableTransform:
    form.check()

    def undo() -> Transform:
        return _rearrange_by_form(pattern, form.inverse())

    name = base.call("reshape", pattern, form.text, **form.sizes)
    return in_place(name, pattern, lambda _: form, undo)


def _reshape_to(
    pattern: str,
    shape: tuple[int, ...],
    from_shape: Sequence[int] | None,
    sizes: dict[str, int],
) -> TableTransform:
    old = None
    if from_shape is not None:
        old = _util.arguments.check_ints("from_shape", from_shape, least=-1)
    for given in (shape, old or ()):
        if given.count(-1) > 1:
            raise errors.OptionError(f"only one size of a shape may be -1, got {given}")
    if sizes:
        raise errors.OptionError(
            f"sizes name axes of a form such as '(h d) e -> e h d', but the form is"
            f" {shape}, which has no {', '.join(sizes)}"
        )

    def fn(x: jax.Array) -> jax.Array:
        if old is not None and not _fits(x.shape, old):
            raise ValueError(f"it does not have the shape {old} of from_shape")
        return jnp.reshape(x, shape)

    def undo() -> Transform:
        if old is None:
            raise errors.OptionError(
                f"{name} cannot be inverted: the old shape is unknown. Pass it as"
                " from_shape=, or write a form such as '(h d) -> h d'"
            )
        return reshape(pattern, old, from_shape=shape)

    name = base.call("reshape", pattern, shape, from_shape=old)
    return in_place(name, pattern, lambda _: fn, undo)


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) == len(wanted) and all(
        size in (-1, old) for old, size in zip(shape, wanted, strict=True)
    )


# ---- entries along an axis ----------------------------------------------------------


def permute(pattern: str, order: Sequence[int], axis: int = 0) -> TableTransform:
    r"""Reorders the entries of the matching leaves along an axis, and of their moments.

    ```python
    permute(r"(.*)/q_proj/bias", [0, 2, 4, 6, 1, 3, 5, 7])  # halves of interleaved rope
    ```

    Write `reshape(pattern, "(d two) -> (two d)", two=2)` for such regular orders. The
    moments of Adafactor and SM3 follow; other moments of another shape than the
    parameter are initialised again.

    Args:
        pattern: Regular expression on the whole leaf path.
        order: For each new entry, the number of the old entry: a permutation.
        axis: The axis of the entries.

    Raises:
        OptionError: `order` is not a permutation. When applied: nothing matches, or a
            leaf has another number of entries along the axis.
    """
    entries = _util.arguments.check_ints("order", order, least=0)
    axis = _util.arguments.check_int("axis", axis)
    if sorted(entries) != list(range(len(entries))):
        raise errors.OptionError(
            f"order must be a permutation of 0 … {len(entries) - 1}, got"
            f" {list(entries)!r:.80}"
        )

    def undo() -> Transform:
        back = {old: new for new, old in enumerate(entries)}
        return permute(pattern, [back[i] for i in range(len(entries))], axis)

    name = base.call("permute", pattern, list(entries), axis=axis or None)
    return in_place(name, pattern, lambda _: _Permuted(axis, entries), undo)


@dataclasses.dataclass(frozen=True)
class _Permuted(AlongAxis):
    """Puts the entries along an axis in another order: new entry -> old entry."""

    order: tuple[int, ...]

    def __call__(self, *values: jax.Array) -> jax.Array:
        [x] = values
        check_axis(x, self.axis)
        size = x.shape[self.axis]
        if size != len(self.order):
            raise ValueError(
                f"axis {self.axis} has {size} entries, but the order has"
                f" {len(self.order)}"
            )
        return jnp.take(x, jnp.asarray(self.order, jnp.int32), axis=self.axis)
