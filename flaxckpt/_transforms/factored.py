"""Moments of Adafactor and SM3 when the axes of a parameter change.

Adafactor keeps the mean of a parameter's squared gradients over its largest axis,
`v_row`, and over the second largest, `v_col` (of equal axes, the later is larger), or
the full `v`; unused fields hold placeholders. SM3 keeps a list: for each axis, the
maximum of the summed squared gradients along all other axes.

Source: `optax.scale_by_factored_rms`, `optax.scale_by_sm3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flaxckpt import _state
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable
from flaxckpt._types import LeafPath, Shape

_CLASS = "FactoredState"
_MEANS = ("v_row", "v_col")

_SM3 = ("ScaleBySM3State", "mu")


class MirrorSource(NamedTuple):
    """A leaf with the `axes` of an old parameter; None for its own first axis."""

    leaf: Leaf
    axes: tuple[int | None, ...]


def has_no_axes(info: LeafInfo, shape: Shape, table: LeafTable) -> bool:
    """Returns True for a mirror without its parameter's axes: of a norm, or unused."""
    return not info.shape or _is_placeholder(info, shape, table)


def source(
    mirror: Leaf,
    shape: Shape,
    origins: Sequence[int | None],
    new_shape: Sequence[int],
    table: LeafTable,
) -> MirrorSource | None:
    """Returns the source of a mirror of another shape than its parameter had, or None.

    `origins` are, for each axis of the new parameter, the old axis, or None.
    """
    info, role = mirror.info, mirror.info.role
    taken = [axis for axis in range(len(shape)) if axis not in origins]
    if len(origins) == len(shape) and not taken:
        if info.shape[1:] == shape:  # several of a parameter, as in L-BFGS
            return MirrorSource(mirror, (None, *range(len(shape))))
        if (maxima := _maxima_of_axis(info, origins, table)) is not None:
            return maxima
    if role is not None and role.state_class == _CLASS:
        return _mean(info, shape, origins, new_shape, table)
    if role is not None and role.state_class:
        return None
    # Factored mirrors of other libraries, such as T5X, keep the first axes.
    ndim = len(info.shape)
    if any(at < ndim < len(shape) and info.shape[at] == shape[at] for at in taken):
        return MirrorSource(mirror, tuple(range(ndim)))
    return None


def _mean(
    info: LeafInfo,
    shape: Shape,
    origins: Sequence[int | None],
    new_shape: Sequence[int],
    table: LeafTable,
) -> MirrorSource | None:
    """Returns the source of a mirror of Adafactor; see `source`."""
    role = info.role
    if role is None or _is_placeholder(info, shape, table):
        return None
    if role.field not in _MEANS or min(len(shape), len(new_shape)) < 2:
        return None
    old = _averaged_axes(shape)
    new = [origins[axis] for axis in _averaged_axes(new_shape)]
    if set(old) != set(new):
        return None
    lacking = new[_MEANS.index(role.field)]
    assert lacking is not None  # an old axis, as the sets are equal
    other = _MEANS[old.index(lacking)]
    mirror = table.get(_beside(info, other))
    axes = tuple(axis for axis in range(len(shape)) if axis != lacking)
    if mirror is None or mirror.info.shape != tuple(shape[axis] for axis in axes):
        return None
    return MirrorSource(mirror, axes)


def _maxima_of_axis(
    info: LeafInfo, order: Sequence[int | None], table: LeafTable
) -> MirrorSource | None:
    """Returns the maxima of SM3 for a place in a new order of axes; None for others."""
    if info.role is None or (info.role.state_class, info.role.field) != _SM3:
        return None
    head, _, place = _state.tree.without_box(info.path).rpartition("/")
    if not place.isdecimal() or int(place) >= len(order):
        return None
    box = info.path.removeprefix(f"{head}/{place}")
    axis = order[int(place)]
    maxima = table.get(f"{head}/{axis}{box}")
    return None if maxima is None else MirrorSource(maxima, (axis,))


def _is_placeholder(info: LeafInfo, shape: Shape, table: LeafTable) -> bool:
    """Returns True for a leaf of Adafactor that is unused for its parameter."""
    role = info.role
    if role is None or role.state_class != _CLASS:
        return False
    whole = table.get(_beside(info, "v"))
    return whole is not None and (whole.info.shape == shape) != (role.field == "v")


def _averaged_axes(shape: Sequence[int]) -> list[int]:
    """Returns the axes of the means `v_row` and `v_col`."""
    order = np.argsort(shape)
    return [int(order[-1]), int(order[-2])]


def _beside(info: LeafInfo, field: str) -> LeafPath:
    """Returns the path of another field's mirror of the same parameter."""
    assert info.role is not None, info.path
    param = info.role.param
    head, _, box = info.path.rpartition(f"{info.role.field}/{param}")
    return f"{head}{field}/{param}{box}"
