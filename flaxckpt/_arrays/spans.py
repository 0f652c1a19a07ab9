"""Byte ranges of arrays in files; `_arrays.byte_ranges` reads them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _state
from flaxckpt._types import Shape


class Span(NamedTuple):
    """Byte range of an array in a file, in C order.

    Attributes:
        file: Path of the file.
        offset: Offset of the first element, in bytes.
        shape: Shape in elements.
        dtype: Name of the stored element type.
        pieces: Offset and size in bytes of each run, for several consecutive runs;
            `offset` is then unused.
        identity: Identity of the file when its header was read (see `Stamp`); a file
            changed since then is not read.
        is_big_endian: True if elements are big endian instead of little endian.
        is_replaced_only: True if the file is never changed in place, so that it may
            be mapped: only files that flaxckpt wrote.
    """

    file: Path
    offset: int
    shape: Shape
    dtype: str
    pieces: tuple[tuple[int, int], ...] = ()
    identity: tuple[int, ...] | None = None
    is_big_endian: bool = False
    is_replaced_only: bool = False

    @property
    def nbytes(self) -> int:
        """Size of all elements, in bytes."""
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _state.dtypes.item_size(self.dtype)
