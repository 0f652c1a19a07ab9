"""Transforms: what to change between a state and its checkpoint.

A transform takes a leaf table and gives another. It touches names and infos, never the
values: those follow while they are moved. So what it will do is known, and shown by
`plan`, before anything is read.

Whatever is done to a parameter is done to its moments, too, wherever in the optimizer
they are. Moments that cannot follow, because they have another shape than the
parameter, are left out, and start afresh when they are restored.
"""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt import errors
from flaxckpt.transforms import _base
from flaxckpt.transforms._base import TableTransform, Transform, describe
from flaxckpt.transforms._from_function import from_function
from flaxckpt.transforms._fuse import fuse, split
from flaxckpt.transforms._map import cast, grow, map_leaf, pad, slice, transpose
from flaxckpt.transforms._merge import merge
from flaxckpt.transforms._rename import assign, copy, drop, keep, rename
from flaxckpt.transforms._stack import stack, unstack

__all__ = [
    "Transform",
    "assign",
    "cast",
    "copy",
    "drop",
    "from_function",
    "fuse",
    "grow",
    "inverse",
    "keep",
    "map_leaf",
    "merge",
    "pad",
    "rename",
    "slice",
    "split",
    "stack",
    "transpose",
    "unstack",
]


def inverse(transforms: Sequence[Transform]) -> list[Transform]:
    """What undoes several transforms, in the order in which to apply it.

    Raises:
        OptionError: One of them cannot be undone.
    """
    undone: list[Transform] = []
    for transform in reversed(_base.checked(transforms)):
        if not isinstance(transform, TableTransform):
            [name] = describe([transform])
            raise errors.OptionError(f"{name} cannot be inverted: it is a function")
        undone.append(transform.inverse())
    return undone
