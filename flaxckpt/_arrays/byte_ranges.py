"""Arrays that lie in a file as one run of bytes, opened as TensorStore has them.

Formats that keep many arrays in one file (safetensors, msgpack, streams) differ only in
how they say where each of them begins.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from flaxckpt import _state, _storage
from flaxckpt._arrays.zarr.metadata import Array
from flaxckpt._types import Shape

_PART_BYTES = 8 * 2**20
"""What is read at once: enough for a disk, and several at a time for several cores."""


class Span(NamedTuple):
    """Where the elements of an array lie, in C order.

    Attributes:
        file: Which file.
        offset: Where the first element begins, in bytes.
        shape: In elements.
        dtype: Name of the element type, as it is stored.
        pieces: Offset and size in bytes of each run, if they are no single one but
            several, whose bytes belong one after another; `offset` is then not used.
        identity: Of the file as it was when it was described (see `Stamp`); another
            file of this name, or another content, is then not read.
        is_big_endian: Whether the bytes of each element are swapped; else they are
            little endian.
    """

    file: Path
    offset: int
    shape: Shape
    dtype: str
    pieces: tuple[tuple[int, int], ...] = ()
    identity: tuple[int, ...] | None = None
    is_big_endian: bool = False

    @property
    def nbytes(self) -> int:
        """The size of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """The size of one element in bytes."""
        return _state.dtypes.to_numpy(self.dtype).itemsize


def opened(spans: Sequence[Span], context: ts.Context) -> ts.Future[ts.TensorStore]:
    """Opens an array, read-only.

    Args:
        spans: Its parts, one after another along the first axis: mostly one.
        context: Shared by all arrays that are read together.
    """
    promise: ts.Promise[ts.TensorStore]
    future: ts.Future[ts.TensorStore]
    promise, future = ts.Promise.new()
    stores = [_opened(span, context) for span in spans]
    promise.set_result(stores[0] if len(stores) == 1 else ts.concat(stores, axis=0))
    return future


def _opened(span: Span, context: ts.Context) -> ts.TensorStore:
    def read(domain: ts.IndexDomain, target: Array, _: Any) -> None:
        # Some whole rows of the array, or a part of one row: always few runs of bytes.
        outer = _outer_axes(span.shape, domain.shape)
        with _storage.local.opened(span.file) as file:
            found = _storage.local.identity(os.fstat(file.fileno()))
            if span.identity not in (None, found):
                raise OSError(
                    f"{span.file} was replaced or changed since it was opened; load it"
                    " again"
                )
            for index in np.ndindex(domain.shape[:outer]):
                start = [*domain.origin]
                for axis, i in enumerate(index):
                    start[axis] += i
                _read_run(file.fileno(), span, start, target[(*index, ...)])

    return ts.virtual_chunked(
        read,
        dtype=ts.dtype(span.dtype),
        shape=span.shape,
        chunk_layout=ts.ChunkLayout(read_chunk_shape=_part_shape(span)),
        context=context,
    )


def _part_shape(span: Span) -> Shape:
    """The largest run of bytes that is read at once, at least 1 along each axis."""
    part = [1] * len(span.shape)
    room = max(_PART_BYTES // span.itemsize, 1)
    for axis in reversed(range(len(span.shape))):
        part[axis] = max(min(span.shape[axis], room), 1)
        room //= part[axis]
        if part[axis] < span.shape[axis]:
            break
    return tuple(part)


def _outer_axes(shape: Shape, extent: Shape) -> int:
    """How many leading axes must be walked, so that the rest is one run of bytes."""
    axis = len(shape)
    while axis > 0 and extent[axis - 1] == shape[axis - 1]:
        axis -= 1
    return max(axis - 1, 0)


def _read_run(descriptor: int, span: Span, start: Sequence[int], target: Array) -> None:
    """Reads what lies from the element `start` on, as much as `target` takes."""
    run = target if target.flags.c_contiguous else np.empty_like(target, order="C")
    element = 0
    for size, i in zip(span.shape, start, strict=True):
        element = element * size + i
    view = run.reshape(-1).view(np.uint8).data
    start_byte = element * span.itemsize
    for begin, size in span.pieces or ((span.offset, span.nbytes),):
        if view and start_byte < size:
            count = min(size - start_byte, len(view))
            _fill(descriptor, span.file, begin + start_byte, view[:count])
            view = view[count:]
        start_byte = max(start_byte - size, 0)
    if span.is_big_endian:
        run.byteswap(inplace=True)
    _state.dtypes.check_bools(run)
    if run is not target:
        target[...] = run


def _fill(descriptor: int, file: Path, position: int, view: memoryview) -> None:
    while view:
        count = os.preadv(descriptor, [view], position)
        if not count:
            raise OSError(f"{file} ends at byte {position}, in the middle of an array")
        view, position = view[count:], position + count
