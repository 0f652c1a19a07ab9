"""Reads the requested blocks of quantized values as float32.

A block of Q8_0 is a scale in float16 and 32 integers of 8 bits.

Source: `gguf.quants.Q8_0` of the gguf package 0.19.0, with the same results bit by bit.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import tensorstore as ts

from flaxckpt import _arrays
from flaxckpt._arrays.read_plan import Span
from flaxckpt._zarr.metadata import Array

BLOCK: Final = 32
"""Elements in a block of Q8_0."""

_SCALE_BYTES = 2


def open_q8_0(blocks: Span, context: ts.Context) -> ts.Future[ts.TensorStore]:
    """Opens an array stored as Q8_0, read-only.

    The last axes of `blocks` are the blocks of a row, and the bytes of a block.
    """
    *outer, count, _ = blocks.shape
    shape = (*outer, count * BLOCK)

    def read(domain: ts.IndexDomain, target: Array, _: Any) -> None:
        start, stop = domain[-1].inclusive_min, domain[-1].exclusive_max
        first, last = start // BLOCK, -(-stop // BLOCK)
        extent = (*target.shape[:-1], last - first, blocks.shape[-1])
        encoded = np.empty(extent, np.uint8)
        _arrays.read_files.read_into(encoded, blocks, (*domain.origin[:-1], first, 0))
        values = decode_q8_0(encoded)
        begin = start - first * BLOCK
        target[...] = values[..., begin : begin + target.shape[-1]]

    store = ts.virtual_chunked(
        read,
        dtype=ts.float32,
        shape=shape,
        chunk_layout=ts.ChunkLayout(
            read_chunk_shape=_arrays.read_plan.part_shape(shape, 4)
        ),
        context=context,
    )
    return _arrays.read.completed_future(store)


def decode_q8_0(blocks: Array) -> Array:
    """Returns the float32 values of blocks, whose bytes are the last axis."""
    scales = np.ascontiguousarray(blocks[..., :_SCALE_BYTES]).view("<f2")
    integers = blocks[..., _SCALE_BYTES:].view(np.int8)
    with np.errstate(invalid="ignore"):  # of an infinite scale
        values = np.multiply(integers, scales.astype(np.float32), dtype=np.float32)
    return values.reshape((*blocks.shape[:-2], -1))
