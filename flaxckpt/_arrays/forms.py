"""Stored form of leaves: shape, type and size, without values, chunks or files."""

from __future__ import annotations

import functools
import math

from flaxckpt import _state
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import Shape
from flaxckpt._zarr import chunk_shape as zarr_chunk_shape
from flaxckpt._zarr import metadata

_KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
"""PRNG implementation of jax -> number of 32-bit words of a key."""


def stored_form(info: LeafInfo) -> tuple[Shape, str]:
    """Returns the stored shape and type name of a leaf."""
    if info.kind == "prng_key":
        return (*info.shape, key_words(info.prng_impl or "")), "uint32"
    dtype = _state.dtypes.stored_name(info.dtype or "")
    assert dtype is not None, info
    return info.shape, dtype


def chunks(info: LeafInfo) -> tuple[metadata.Chunk, ...]:
    """Returns the chunks of a leaf's array, in C order."""
    shape, _ = stored_form(info)
    return metadata.chunks(metadata.whole(shape), info.chunk_shape or ())


@functools.cache
def key_words(impl: str) -> int:
    """Returns the number of 32-bit words of a PRNG key; ValueError if unknown."""
    if words := _KEY_WORDS.get(impl):
        return words
    import jax  # only jax knows the implementations that a program registers

    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return int(key.shape[0])


def check_keys(impl: str, shape: Shape, dtype: str) -> None:
    """Raises ValueError unless an array can be the data of PRNG keys of `impl`."""
    words = key_words(impl)
    if dtype != "uint32" or shape[-1:] != (words,):
        raise ValueError(f"{dtype}{list(shape)} is not an array of {impl[:40]} keys")


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


def stored_bytes(info: LeafInfo) -> int:
    """Returns the uncompressed size of a leaf's values, in bytes."""
    if info.dtype is None:
        return 0
    shape, dtype = stored_form(info)
    return math.prod(shape) * _state.dtypes.item_bits(dtype) // 8
