"""Functions that keep, add or remove whole axes, and the same functions of moments."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Origins = Sequence[int | None]
"""For each axis of an array the axis of a parameter; None for an axis of its own."""


class AxisMap(abc.ABC):
    """A function from the values of parameters to that of a new parameter.

    It is hashable, as it is compiled once. Write `on`, too, if it changes more than the
    order of axes: factored moments are mapped by it.
    """

    @abc.abstractmethod
    def __call__(self, *values: jax.Array) -> jax.Array:
        """Returns the new value; raises ValueError for other axes or sizes."""

    @abc.abstractmethod
    def origins(self, ndim: int) -> Origins | None:
        """Returns the old axes in their new order; None if axes are split or joined.

        `ndim` is the number of axes of the parameters.
        """

    def on(self, axes: Origins, ndim: int) -> AxisMap:
        """Returns the same function for arrays with some axes of the parameters.

        `axes` are the axes of these arrays; axes of their own come first, and stay.
        This one is for functions that only change the order of axes.
        """
        order = (None, *(self.origins(ndim) or ()))
        return Transposed(tuple(axes.index(axis) for axis in order if axis in axes))


@dataclasses.dataclass(frozen=True)
class Transposed(AxisMap):
    """Changes the order of axes: for each new axis the old axis, or None to reverse."""

    order: tuple[int, ...] | None

    def __call__(self, *values: jax.Array) -> jax.Array:
        return jnp.transpose(values[0], self.order)

    def origins(self, ndim: int) -> Origins:
        if self.order is None:
            return range(ndim)[::-1]
        return [axis % ndim for axis in self.order]


@dataclasses.dataclass(frozen=True)
class Stacked(AxisMap):
    """Stacks arrays along a new axis."""

    axis: int

    def __call__(self, *values: jax.Array) -> jax.Array:
        check_types(values)
        return jnp.stack(values, self.axis)

    def origins(self, ndim: int) -> Origins:
        at = self.axis % (ndim + 1)
        return [*range(at), None, *range(at, ndim)]

    def on(self, axes: Origins, ndim: int) -> AxisMap:
        before = self.origins(ndim)[: self.axis % (ndim + 1)]
        return Stacked(sum(axis in before for axis in axes))


@dataclasses.dataclass(frozen=True)
class Taken(AxisMap):
    """Takes the array of a number along an axis."""

    axis: int
    number: int

    def __call__(self, *values: jax.Array) -> jax.Array:
        return jax.lax.index_in_dim(values[0], self.number, self.axis, keepdims=False)

    def origins(self, ndim: int) -> Origins:
        return [axis for axis in range(ndim) if axis != self.axis % ndim]

    def on(self, axes: Origins, ndim: int) -> AxisMap:
        return Taken(axes.index(self.axis % ndim), self.number)


@dataclasses.dataclass(frozen=True)
class Permuted(AxisMap):
    """Puts the entries along an axis in another order: new entry -> old entry."""

    order: tuple[int, ...]
    axis: int

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

    def origins(self, ndim: int) -> Origins:
        return range(ndim)

    def on(self, axes: Origins, ndim: int) -> AxisMap:
        if self.axis % ndim not in axes:
            return super().on(axes, ndim)
        return Permuted(self.order, axes.index(self.axis % ndim))


def check_axis(x: jax.Array, axis: int) -> None:
    """Raises ValueError if an array lacks an axis."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"it has no axis {axis}")


def check_types(values: Sequence[jax.Array]) -> None:
    """Raises ValueError if the parts of a leaf have several types."""
    types = sorted({str(value.dtype) for value in values})
    if len(types) > 1:
        raise ValueError(
            f"the parts have different types, {', '.join(types)}: cast them first"
        )
