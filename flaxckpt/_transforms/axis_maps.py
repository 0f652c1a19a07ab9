"""Functions that keep, add or remove whole axes, and the same functions of moments.

Those of one transform are beside it.
"""

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
    order of axes: factored moments are mapped by it. `AlongAxis` has it.
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
