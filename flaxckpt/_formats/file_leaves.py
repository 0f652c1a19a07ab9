"""Leaves whose values are byte ranges of files, opened with the first read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flaxckpt import _arrays
from flaxckpt._arrays.read_plan import Span
from flaxckpt._state.leaf import LeafInfo, StoredLeaf

if TYPE_CHECKING:
    import tensorstore as ts


def stored_leaf(root: Path, info: LeafInfo, span: Span) -> StoredLeaf:
    """Returns the leaf of the checkpoint `root` with its values in `span`."""

    def open(context: ts.Context) -> ts.Future[ts.TensorStore]:
        # Through the door: TensorStore is imported with the first array.
        return _arrays.read.open_span(span, context)

    return StoredLeaf(root, info, open, span=span)


def number_opener(number: complex) -> Callable[[ts.Context], ts.Future[ts.TensorStore]]:
    """Returns a function that opens a Python number as an array without axes."""
    return lambda context: _arrays.read.open_number(number, context)
