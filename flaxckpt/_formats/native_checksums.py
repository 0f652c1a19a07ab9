"""Checksums of chunks and segments in the manifest; see `_zarr.checksums`."""

from __future__ import annotations

import base64
import binascii
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxckpt import _arrays, _state, _zarr
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON, LeafPath, Shape
from flaxckpt._zarr.checksums import CHECKSUM_BYTES, ChunkChecksums
from flaxckpt._zarr.metadata import ArrayForm, Encoding

if TYPE_CHECKING:
    from flaxckpt._formats.native_manifest import Manifest

_CHUNKS = "checksums"
_SEGMENTS = "segments"

_LEAST_BYTES = _zarr.checksums.LEAST_BYTES


class _Chunks(NamedTuple):
    """The chunks of an array; a chunk of one segment has 0 `segmented_bytes`."""

    grid: Shape
    total: int
    segmented_bytes: int


@functools.lru_cache(maxsize=4096)  # most leaves are like another one
def _chunks_of(
    shape: Shape, dtype: str, chunk_shape: Shape, encoding: Encoding
) -> _Chunks:
    sizes = zip(shape, chunk_shape, strict=True)
    grid = tuple([-(-size // chunk) for size, chunk in sizes])
    size = math.prod(chunk_shape) * _state.dtypes.item_bits(dtype) // 8
    is_segmented = (
        size > _LEAST_BYTES
        and 0 not in shape
        and _zarr.metadata.is_raw(encoding, ArrayForm(shape, dtype, chunk_shape))
    )
    return _Chunks(grid, math.prod(grid), size * is_segmented)


def choose_bytes(infos: Sequence[LeafInfo], encoding: Encoding | None) -> int:
    """Returns the bytes of segments of new chunks, equal everywhere; or maxsize."""
    if encoding is None or not encoding.checksum:
        return sys.maxsize
    chunks = [chunks for _, chunks in _arrays_of(infos, encoding)]
    return _zarr.checksums.choose_bytes(
        [(c.total, c.segmented_bytes) for c in chunks if c.segmented_bytes]
    )


def _arrays_of(
    infos: Sequence[LeafInfo], encoding: Encoding
) -> list[tuple[LeafInfo, _Chunks]]:
    return [
        (info, _chunks_of(info.stored_shape, info.stored_dtype, shape, encoding))
        for info in infos
        if (shape := info.chunk_shape) is not None
    ]


def of_written(
    manifest: Manifest,
    names: Mapping[LeafPath, str],
    written: Mapping[str, _arrays.written.Written],
    segment_bytes: int,
) -> dict[LeafPath, ChunkChecksums]:
    """Returns leaf path -> the checksums of new chunks, written by all processes."""
    encoding = manifest.encoding
    if encoding is None or not encoding.checksum or not written:
        return {}
    found = {}
    for info, chunks in _arrays_of(manifest.infos, encoding):
        item = manifest.items.item_of(info)
        recorded = written[item].checksums.get(names[info.path], {})
        is_cut = chunks.segmented_bytes > segment_bytes
        whole, inner = bytearray(), bytearray()
        for chunk in _zarr.metadata.chunks_of(info):
            value = recorded[chunk.key]
            whole += value[-CHECKSUM_BYTES:]
            if is_cut:
                inner += value[:-CHECKSUM_BYTES]
        if whole:
            found[info.path] = ChunkChecksums(
                chunks.grid, bytes(whole), segment_bytes * is_cut, bytes(inner)
            )
    return found


def to_json(checksums: Mapping[LeafPath, ChunkChecksums]) -> dict[str, JSON]:
    """Returns the fields of the manifest with checksums; inverse of `from_json`."""
    cut = {path: found for path, found in checksums.items() if found.segment_bytes}
    fields: dict[str, JSON] = {}
    if checksums:
        fields[_CHUNKS] = {p: _encode(found.whole) for p, found in checksums.items()}
    if cut:
        nbytes = next(iter(cut.values())).segment_bytes  # that of all
        inner: JSON = {path: _encode(found.inner) for path, found in cut.items()}
        fields[_SEGMENTS] = {"bytes": nbytes, "crc32c": inner}
    return fields


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def from_json(
    data: Mapping[str, Any], infos: Sequence[LeafInfo], encoding: Encoding | None
) -> dict[LeafPath, ChunkChecksums]:
    """Returns the checksums in a manifest, which is not trusted, by leaf path."""
    if encoding is None or not encoding.checksum:
        return {}
    whole = data.get(_CHUNKS, {})
    if not isinstance(whole, dict):
        raise ValueError(f"{str(whole)[:80]} are not checksums")
    nbytes, inner = 0, {}
    if _SEGMENTS in data:
        nbytes, inner = data[_SEGMENTS]["bytes"], data[_SEGMENTS]["crc32c"]
        is_power = type(nbytes) is int and nbytes >= _LEAST_BYTES
        if not is_power or nbytes & (nbytes - 1) or not isinstance(inner, dict):
            raise ValueError(f"{str(data[_SEGMENTS])[:80]} are not segments")
    if not whole and not inner:
        return {}
    parsed: dict[LeafPath, ChunkChecksums] = {}
    for info, chunks in _arrays_of(infos, encoding):
        found = ChunkChecksums(chunks.grid)
        if info.path in whole:
            size = chunks.total * CHECKSUM_BYTES
            found = found._replace(whole=_decode(info.path, whole[info.path], size))
        if info.path in inner and chunks.segmented_bytes:
            size = _zarr.checksums.checksums_bytes(
                chunks.total, chunks.segmented_bytes, nbytes
            )
            content = _decode(info.path, inner[info.path], size)
            found = found._replace(segment_bytes=nbytes, inner=content)
        if found.whole or found.segment_bytes:
            parsed[info.path] = found
    return parsed


def _decode(path: LeafPath, text: str, size: int) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError):
        raise ValueError(f"{str(text)[:80]} is not base64") from None
    if len(content) != size:
        raise ValueError(f"{path} has {len(content)} bytes of checksums, wanted {size}")
    return content
