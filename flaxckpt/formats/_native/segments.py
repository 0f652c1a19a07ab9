"""Checksums of the segments of chunks in the manifest; see `_arrays.zarr.segments`."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flaxckpt import _arrays, _state
from flaxckpt._arrays.zarr import chunk_shape as zarr_chunk_shape
from flaxckpt._arrays.zarr.metadata import Encoding
from flaxckpt._arrays.zarr.segments import Segments
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON, LeafPath, Shape
from flaxckpt.formats._native.items import Items

KEY = "segments"

_LEAST_BYTES = _arrays.zarr.segments.LEAST_BYTES


class _Chunks(NamedTuple):
    """The chunks of an array.

    Attributes:
        shape: Stored shape of the array.
        chunk_shape: Shape of a chunk.
        nbytes: Bytes of a chunk.
    """

    shape: Shape
    chunk_shape: Shape
    nbytes: int

    @property
    def grid(self) -> Shape:
        """Number of chunks along each axis."""
        sizes = zip(self.shape, self.chunk_shape, strict=True)
        return tuple(-(-size // chunk) for size, chunk in sizes)

    @property
    def total(self) -> int:
        """Number of chunks."""
        return zarr_chunk_shape.chunk_count(self.shape, self.chunk_shape)


def choose_bytes(
    infos: Sequence[LeafInfo], encoding: Encoding, *, ocdbt: bool
) -> int | None:
    """Returns the bytes of the segments of a new checkpoint; None for no segments.

    All processes of a job get the same number.
    """
    if ocdbt or not encoding.checksum:
        return None
    chunks = [chunks for _, chunks in _large(infos, encoding)]
    return _arrays.zarr.segments.choose_bytes((c.total, c.nbytes) for c in chunks)


def _large(
    infos: Sequence[LeafInfo], encoding: Encoding
) -> Iterator[tuple[LeafInfo, _Chunks]]:
    """Yields the raw arrays with chunks of several segments."""
    for info in infos:
        chunk_shape = info.chunk_shape
        # In most states, most leaves are small.
        if chunk_shape is None or math.prod(chunk_shape) < _LEAST_BYTES // 16:
            continue
        shape, dtype = _arrays.forms.stored_form(info)
        size = math.prod(chunk_shape) * _state.dtypes.item_bits(dtype) // 8
        is_raw = _arrays.zarr.metadata.is_raw(encoding, shape, dtype)
        if size > _LEAST_BYTES and is_raw and 0 not in shape:
            yield info, _Chunks(shape, chunk_shape, size)


def row(
    infos: Sequence[LeafInfo],
    items: Items,
    encoding: Encoding,
    segment_bytes: int | None,
    checksums: _arrays.write.Checksums,
) -> JSON | None:
    """Returns the checksums for the manifest; None if there are none.

    Args:
        infos: The leaves of the checkpoint.
        items: The items of the checkpoint.
        encoding: Encoding of the chunks.
        segment_bytes: Bytes of a segment.
        checksums: The checksums from all processes.
    """
    rows: dict[str, JSON] = {}
    for info, chunks in _large(infos, encoding) if checksums else ():
        recorded = checksums.get(items.array_directory(info), {})
        whole = _arrays.zarr.metadata.whole(chunks.shape)
        keys = [c.key for c in _arrays.zarr.metadata.chunks(whole, chunks.chunk_shape)]
        if recorded.keys() == set(keys):
            content = b"".join(recorded[key] for key in keys)
            rows[info.path] = base64.b64encode(content).decode()
    return {"bytes": segment_bytes, "crc32c": rows} if rows else None


def parse(
    data: Mapping[str, Any], infos: Sequence[LeafInfo], encoding: Encoding | None
) -> dict[LeafPath, Segments]:
    """Returns the segments in a manifest: leaf path -> segments.

    Raises:
        ValueError, KeyError, TypeError: The segments are malformed.
    """
    if KEY not in data or encoding is None or not encoding.checksum:
        return {}
    nbytes, rows = data[KEY]["bytes"], data[KEY]["crc32c"]
    is_power = type(nbytes) is int and nbytes >= _LEAST_BYTES
    if not is_power or nbytes & (nbytes - 1) or not isinstance(rows, dict):
        raise ValueError(f"{str(data[KEY])[:80]} are not segments")
    segments = {}
    for info, chunks in _large(infos, encoding):
        if info.path not in rows:
            continue
        content = _decode(rows[info.path])
        wanted = _arrays.zarr.segments.checksums_bytes(
            chunks.total, chunks.nbytes, nbytes
        )
        if len(content) != wanted:
            raise ValueError(
                f"{info.path} has {len(content)} bytes of checksums, wanted {wanted}"
            )
        segments[info.path] = Segments(nbytes, chunks.grid, content)
    return segments


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError):
        raise ValueError(f"{str(text)[:80]} is not base64") from None


# ---- messages between processes ---------------------------------------------------


def to_message(checksums: _arrays.write.Checksums) -> JSON:
    """Returns checksums as JSON."""
    return {
        name: {key: base64.b64encode(content).decode() for key, content in rows.items()}
        for name, rows in checksums.items()
    }


def merge(
    mine: _arrays.write.Checksums, messages: Sequence[Mapping[str, Mapping[str, str]]]
) -> _arrays.write.Checksums:
    """Returns the checksums of this process and those in the messages of others."""
    merged = {name: dict(rows) for name, rows in mine.items()}
    for message in messages:
        for name, rows in message.items():
            content = {key: base64.b64decode(text) for key, text in rows.items()}
            merged.setdefault(name, {}).update(content)
    return merged
