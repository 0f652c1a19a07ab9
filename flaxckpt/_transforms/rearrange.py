"""Transforms that rearrange the values of leaves: `transpose`, `reshape`, `permute`.

Each keeps all values, so each has an inverse, and moments of the parameter's shape
follow. The factored moments of Adafactor and SM3 follow a change of the order of axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxckpt import _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base, factored
from flaxckpt._transforms.axis_form import Form
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.map_values import ArrayFn, Followed, LeafMap
from flaxckpt._transforms.patterns import compile_pattern
from flaxckpt._types import Shape

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

    def fn(x: jax.Array) -> jax.Array:
        return jnp.transpose(x, order)

    def order_of(ndim: int) -> tuple[int, ...]:
        if order is None:
            return tuple(reversed(range(ndim)))
        return tuple(axis % ndim for axis in order)

    def follow(mirror: Leaf, shape: Shape, table: LeafTable) -> Followed | None:
        return transpose_mirror(mirror, shape, order_of(len(shape)), table)

    name = base.call("transpose", pattern, order)
    return LeafMap(
        name, compile_pattern(pattern), fn, undo=undo, follows=True, follow=follow
    )


def transpose_mirror(
    mirror: Leaf, shape: Shape, order: tuple[int, ...], table: LeafTable
) -> Followed | None:
    """Returns the source and function of a transposed mirror of another shape.

    Args:
        mirror: The leaf.
        shape: Of its parameter.
        order: The parameter's axes in their new order.
        table: All leaves.
    """
    info = mirror.info
    if not info.shape or factored.is_placeholder(info, shape, table):
        return mirror, _identity
    if info.shape[1:] == shape:  # several moments of a parameter, as in L-BFGS
        return mirror, _transposition((0, *(axis + 1 for axis in order)))
    if (maxima := factored.maxima_of_axis(info, order, table)) is not None:
        return maxima, _identity
    new_shape = [shape[axis] for axis in order]
    source = factored.source(info, shape, order, new_shape, table)
    if source is None:
        return None
    axes = [axis for axis in range(len(shape)) if axis != source.lacking]
    moved = tuple(axes.index(axis) for axis in order if axis != source.lacking)
    return source.leaf, _transposition(moved)


def _identity(x: jax.Array) -> jax.Array:
    """Returns `x`: norms, maxima of an axis and placeholders are not transposed."""
    return x


@functools.cache
def _transposition(order: tuple[int, ...]) -> ArrayFn:
    return lambda x: jnp.transpose(x, order)


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
        from_shape: The old shape, in which one size may be -1. Needed for the inverse
            of a new shape.
        **sizes: Sizes of named axes.

    Raises:
        OptionError: `form` is not in einops notation, or a size is missing. When
            applied: nothing matches, or a leaf has other axes or sizes.
        OptionError: On inversion, if sizes are needed that were not passed.
    """
    compiled = compile_pattern(pattern)
    if not isinstance(form, str):
        shape = _util.arguments.check_ints("form", form, least=-1)
        return _reshape_to(pattern, shape, from_shape, sizes)
    if from_shape is not None:
        raise errors.OptionError(
            f"from_shape is for a new shape, but {form!r} names the old axes: leave it"
            " out"
        )
    return _rearranged(compiled.pattern, Form.parse(form, sizes))


def _rearranged(pattern: str, form: Form) -> TableTransform:
    form.check()

    def undo() -> Transform:
        return _rearranged(pattern, form.inverse())

    def follow(mirror: Leaf, shape: Shape, table: LeafTable) -> Followed | None:
        if form.order is not None:
            return transpose_mirror(mirror, shape, form.order, table)
        return _keep_small(mirror, shape, table)

    return LeafMap(
        base.call("reshape", pattern, form.text, **form.sizes),
        compile_pattern(pattern),
        form,
        undo=undo,
        follows=True,
        follow=follow,
    )


def _keep_small(mirror: Leaf, shape: Shape, table: LeafTable) -> Followed | None:
    """Returns a mirror that has no axes of its parameter unchanged; None for others."""
    if not mirror.info.shape or factored.is_placeholder(mirror.info, shape, table):
        return mirror, _identity
    return None


def _reshape_to(
    pattern: str,
    shape: tuple[int, ...],
    from_shape: Sequence[int] | None,
    sizes: dict[str, int],
) -> TableTransform:
    """Returns the `reshape` to a new shape."""
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
    return LeafMap(
        name,
        compile_pattern(pattern),
        fn,
        undo=undo,
        follows=True,
        follow=_keep_small,
    )


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) == len(wanted) and all(
        size in (-1, old) for old, size in zip(shape, wanted, strict=True)
    )


# ---- entries along an axis ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Taking:
    """The function that puts the entries along an axis in another order.

    Attributes:
        order: For each new entry, the number of the old entry.
        axis: The axis.
    """

    order: tuple[int, ...]
    axis: int

    def __call__(self, x: jax.Array) -> jax.Array:
        if not -x.ndim <= self.axis < x.ndim:
            raise ValueError(f"it has no axis {self.axis}")
        size = x.shape[self.axis]
        if size != len(self.order):
            raise ValueError(
                f"axis {self.axis} has {size} entries, but the order has"
                f" {len(self.order)}"
            )
        return jnp.take(x, jnp.asarray(self.order, jnp.int32), axis=self.axis)


def permute(pattern: str, order: Sequence[int], axis: int = 0) -> TableTransform:
    r"""Reorders the entries of the matching leaves along an axis, and of their moments.

    ```python
    permute(r"(.*)/q_proj/bias", [0, 2, 4, 6, 1, 3, 5, 7])  # halves of interleaved rope
    ```

    Write `reshape(pattern, "(d two) -> (two d)", two=2)` for such regular orders. The
    factored moments of Adafactor follow; other moments of another shape than the
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

    def follow(mirror: Leaf, shape: Shape, table: LeafTable) -> Followed | None:
        if small := _keep_small(mirror, shape, table):
            return small
        of_param = axis % len(shape)
        if mirror.info.shape[1:] == shape:  # as in L-BFGS
            return mirror, _Taking(entries, of_param + 1)
        source = factored.source(mirror.info, shape, range(len(shape)), shape, table)
        if source is None:
            return None
        if source.lacking == of_param:
            return source.leaf, _identity
        return source.leaf, _Taking(entries, of_param - (source.lacking < of_param))

    return LeafMap(
        base.call("permute", pattern, list(entries), axis=axis or None),
        compile_pattern(pattern),
        _Taking(entries, axis),
        undo=undo,
        follows=True,
        follow=follow,
    )
