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
    """A hashable function from the values of parameters to that of a new parameter.

    One that changes more than the order of axes needs an `on` of its own, as
    `AlongAxis` has: factored moments are mapped by it.
    """

    @abc.abstractmethod
    def __call__(self, *values: jax.Array) -> jax.Array:
        """Returns the new value; raises ValueError for other axes or sizes."""

    @abc.abstractmethod
    def origins(self, ndim: int) -> Origins | None:
        """Returns the old axes in new order; None if they are split or joined."""

    def on(self, axes: Origins, ndim: int) -> AxisMap:
        """Returns the same function for arrays with some `axes` of the parameters.

        Axes of their own come first, and stay. The base class only changes the order.
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
class AlongAxis(AxisMap):
    """Moves the entries along an axis; all axes stay."""

    axis: int

    def origins(self, ndim: int) -> Origins:
        return range(ndim)

    def on(self, axes: Origins, ndim: int) -> AxisMap:
        if self.axis % ndim not in axes:
            return super().on(axes, ndim)
        return dataclasses.replace(self, axis=axes.index(self.axis % ndim))


def check_axis(x: jax.Array, axis: int) -> None:
    """Raises ValueError if an array lacks an axis."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"it has no axis {axis}")
