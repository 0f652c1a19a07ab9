"""Chunks of stored leaves, and their limits, without values or files."""

from __future__ import annotations

import functools

from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import Shape
from flaxckpt._zarr import chunk_shape as zarr_chunk_shape
from flaxckpt._zarr import metadata


def chunks(info: LeafInfo) -> tuple[metadata.Chunk, ...]:
    """Returns the chunks of a leaf's array, in C order."""
    return metadata.chunks(metadata.whole(info.stored_shape), info.chunk_shape or ())


def fault(info: LeafInfo) -> str | None:
    """Returns the reason for readers to reject the array of a leaf, or None."""
    return _fault(info.shape, info.chunk_shape or ())


@functools.lru_cache(maxsize=4096)
def _fault(shape: Shape, chunk_shape: Shape) -> str | None:
    axes = len(chunk_shape)  # a PRNG key has an axis more than its shape
    if axes > metadata.MAX_AXES:
        return f"{axes} axes; readers accept at most {metadata.MAX_AXES}"
    if max(shape, default=0) >= metadata.MAX_SIZE:
        return (
            f"{max(shape)} elements along an axis; readers accept at most"
            f" {metadata.MAX_SIZE - 1}"
        )
    count = zarr_chunk_shape.chunk_count(shape, chunk_shape[: len(shape)])
    if count > metadata.MAX_CHUNKS:
        return f"{count} chunks; readers accept at most {metadata.MAX_CHUNKS}"
    return None
