"""Transforms: changes to the leaves between a state and its checkpoint.

A transform maps a leaf table to a new leaf table: names and infos, so `plan` shows its
effect before any data is read. Values are computed during the save or restore.

A `pattern` is a regular expression on the whole leaf path. A change to a parameter also
applies to its moments, wherever they are in the optimizer. Moments of another shape
that cannot be changed are initialised on restore.
"""

from __future__ import annotations

from flaxckpt._transforms.affine import offset, scale
from flaxckpt._transforms.base import Transform, inverse
from flaxckpt._transforms.dequantize import dequantize
from flaxckpt._transforms.from_function import from_function
from flaxckpt._transforms.join import fuse, split, stack, unstack
from flaxckpt._transforms.lora import merge_lora
from flaxckpt._transforms.map_values import cast, grow, map_leaf, pad, slice
from flaxckpt._transforms.merge import merge
from flaxckpt._transforms.orbax_names import use_orbax_names
from flaxckpt._transforms.rearrange import permute, reshape, transpose
from flaxckpt._transforms.remap import Row, remap
from flaxckpt._transforms.rename import assign, copy, drop, keep, rename
from flaxckpt._transforms.tie import tie, untie

__all__ = [
    "Row",
    "Transform",
    "assign",
    "cast",
    "copy",
    "dequantize",
    "drop",
    "from_function",
    "fuse",
    "grow",
    "inverse",
    "keep",
    "map_leaf",
    "merge",
    "merge_lora",
    "offset",
    "pad",
    "permute",
    "remap",
    "rename",
    "reshape",
    "scale",
    "slice",
    "split",
    "stack",
    "tie",
    "transpose",
    "unstack",
    "untie",
    "use_orbax_names",
]
