"""Arrays in contiguous byte ranges of a file.

Formats with many arrays in a file (safetensors, msgpack, streams) differ only in the
records of the byte ranges. `_arrays.read_raw` reads whole arrays; TensorStore opens
arrays of which parts are read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from flaxckpt import _state, _storage
from flaxckpt._arrays.spans import Span
from flaxckpt._types import Shape
from flaxckpt._zarr import chunk_file
from flaxckpt._zarr.metadata import Array

_PART_BYTES = 8 * 2**20
"""Bytes per read: large enough for a disk, small enough for several cores."""


def open(span: Span, context: ts.Context) -> ts.Future[ts.TensorStore]:
    """Opens an array, read-only.

    Args:
        span: The array.
        context: Context shared by all arrays read together.
    """

    def read(domain: ts.IndexDomain, target: Array, _: Any) -> None:
        read_into(target, span, domain.origin)

    promise: ts.Promise[ts.TensorStore]
    future: ts.Future[ts.TensorStore]
    promise, future = ts.Promise.new()
    promise.set_result(
        ts.virtual_chunked(
            read,
            dtype=ts.dtype(span.dtype),
            shape=span.shape,
            chunk_layout=ts.ChunkLayout(
                read_chunk_shape=part_shape(span.shape, span.itemsize)
            ),
            context=context,
        )
    )
    return future


def read_into(target: Array, span: Span, origin: Sequence[int]) -> None:
    """Fills `target` with the elements of `span` from the index `origin` on.

    Raises:
        OSError: The file has changed since its header was read, or ends too early.
        ValueError: An array of bools has other bytes than 0 and 1.
    """
    # A few whole rows of the array, or a part of a row: few runs of bytes.
    outer = _outer_axes(span.shape, target.shape)
    with _open_file(span) as descriptor:
        for index in np.ndindex(target.shape[:outer]):
            start = [*origin]
            for axis, i in enumerate(index):
                start[axis] += i
            _read_run(descriptor, span, start, target[(*index, ...)])


def map_values(span: Span) -> Array | None:
    """Maps the whole array, copy-on-write.

    Returns:
        The values, aligned for jax; None if they cannot be mapped.

    Raises:
        OSError: The file has changed since its header was read.
    """
    if not span.is_replaced_only or span.pieces or span.is_big_endian:
        return None
    if span.offset % chunk_file.ALIGNMENT or span.nbytes < chunk_file.MAPPED_FROM:
        return None
    with _open_file(span) as descriptor:
        content = chunk_file.map_range(descriptor, span.offset, span.nbytes)
    if content is None:
        return None
    return content.view(_state.numpy_dtypes.to_numpy(span.dtype)).reshape(span.shape)


@contextlib.contextmanager
def _open_file(span: Span) -> Iterator[int]:
    """Yields the descriptor of the file, after checking its identity."""
    with _storage.of(span.file).open_file(span.file) as file:
        identity = _storage.files.identity(os.fstat(file.fileno()))
        if span.identity not in (None, identity):
            raise OSError(
                f"{span.file} was replaced or changed since it was opened; load it"
                " again"
            )
        yield file.fileno()


def part_shape(shape: Shape, itemsize: int, max_bytes: int | None = None) -> Shape:
    """Returns the shape of the largest part of an array to read at once."""
    part = [1] * len(shape)
    room = max((max_bytes or _PART_BYTES) // itemsize, 1)
    for axis in reversed(range(len(shape))):
        part[axis] = max(min(shape[axis], room), 1)
        room //= part[axis]
        if part[axis] < shape[axis]:
            break
    return tuple(part)


def _outer_axes(shape: Shape, extent: Shape) -> int:
    """Returns the number of leading axes before a contiguous part."""
    axis = len(shape)
    while axis > 0 and extent[axis - 1] == shape[axis - 1]:
        axis -= 1
    return max(axis - 1, 0)


def _read_run(descriptor: int, span: Span, start: Sequence[int], target: Array) -> None:
    """Fills `target` with the elements from `start` on."""
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
    _state.numpy_dtypes.check_bools(run)
    if run is not target:
        target[...] = run


def _fill(descriptor: int, file: Path, position: int, view: memoryview) -> None:
    while view:
        count = os.preadv(descriptor, [view], position)
        if not count:
            raise OSError(f"{file} ends at byte {position}, in the middle of an array")
        view, position = view[count:], position + count


def open_number(number: complex, context: ts.Context) -> ts.Future[ts.TensorStore]:
    """Opens a Python number as an array without axes."""
    return completed_future(ts.array(np.asarray(number), context=context))


def completed_future(store: ts.TensorStore) -> ts.Future[ts.TensorStore]:
    """Returns a future with the result `store`."""
    promise: ts.Promise[ts.TensorStore]
    future: ts.Future[ts.TensorStore]
    promise, future = ts.Promise.new()
    promise.set_result(store)
    return future
