"""What the chunks of an array say of themselves, before TensorStore decodes them.

It reads zeros where a directory lies in the place of a chunk, and takes memory for all
that a chunk of blosc says it has.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from flaxckpt import _state, _storage
from flaxckpt._arrays.zarr import metadata

_LONG_BYTES = 64 * 2**20
"""Shorter chunks may have any size: not much comes of them."""

_BEST_RATIO = {"gzip": 1100, "zlib": 1100, "zstd": 2**16, "blosc": 2**16}
"""Codec -> how many times its size a chunk may hold; that of bz2 has no such limit."""

_HEADER_BYTES = 16
_SPARE_BYTES = 64
"""For checksums, which may be compressed with a chunk."""


class Chunks(NamedTuple):
    """The chunks of an array, as its metadata has them.

    Attributes:
        pattern: What the key of a chunk looks like, below that of the array.
        codec: How they are compressed; None: not at all, or part by part.
        size: Of one, in bytes, decoded.
    """

    pattern: re.Pattern[str]
    codec: str | None
    size: int


@functools.lru_cache(maxsize=256)  # most arrays are like others
def described(text: bytes) -> Chunks:
    """The chunks that a `zarr.json` or a `.zarray` describes, if it is one we read.

    Raises:
        ValueError: It does not say.
    """
    try:
        return _described(json.loads(text))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its metadata is not read: {str(error)[:150]}") from None


def _described(data: Mapping[str, Any]) -> Chunks:
    shape, dtype, chunk_shape = metadata.array(data)
    size = math.prod(chunk_shape) * _state.dtypes.to_numpy(dtype).itemsize
    if data["zarr_format"] == 3:
        codecs = [_name(codec) for codec in data["codecs"]]
        known = [name for name in codecs if name in _BEST_RATIO]
        return Chunks(_pattern_3(data, len(shape)), known[0] if known else None, size)
    compressor = data["compressor"]
    separator = re.escape(str(data.get("dimension_separator") or "."))
    pattern = separator.join(["[0-9]+"] * len(shape)) or "0"
    codec = None if compressor is None else compressor["id"]
    return Chunks(re.compile(pattern), codec, size)


def _pattern_3(data: Mapping[str, Any], rank: int) -> re.Pattern[str]:
    encoding = data["chunk_key_encoding"]
    is_default = _name(encoding) == "default"
    options = encoding.get("configuration") if isinstance(encoding, dict) else None
    separator = (options or {}).get("separator", "/" if is_default else ".")
    parts = ["c"] * is_default + ["[0-9]+"] * rank
    return re.compile(re.escape(str(separator)).join(parts) or "0")


def _name(codec: Any) -> str:
    return str(codec if isinstance(codec, str) else codec["name"])


def check_files(directory: Path, chunks: Chunks) -> None:
    """Asserts that the chunks of an array are files, and not too short.

    Raises:
        ValueError: One is not.
        OSError: One cannot be read.
    """
    storage = _storage.of(directory)
    if storage.costs_requests and chunks.codec != "blosc":
        return  # sizes are not known there
    ratio = _BEST_RATIO.get(chunks.codec or "")
    for key, is_file in storage.entries_below(directory):
        if not chunks.pattern.fullmatch(key):
            continue
        if not is_file:
            raise ValueError(f"{key} is a directory, not a chunk")
        file = directory / key
        if ratio and chunks.size > _LONG_BYTES:
            size = storage.known_size(file, None)
            if size is not None and size * ratio < chunks.size:
                raise ValueError(f"{key} has {size} bytes instead of {chunks.size}")
        if chunks.codec == "blosc":
            header = storage.read_range(file, 0, _HEADER_BYTES)
            _check_blosc(key, header, chunks.size)


def check_values(store: ts.KvStore, name: str, chunks: Chunks) -> None:
    """Asserts the same of chunks in a database, as far as they say how long they are.

    Raises:
        ValueError: One says what it must not.
    """
    before = metadata.database_key(name, "")
    end = before[:-1] + "0" if before else ""  # "0" comes after "/"
    keys = [
        key.decode() for key in store.list(ts.KvStore.KeyRange(before, end)).result()
    ]
    reads = {
        key: store.read(key, byte_range=slice(0, _HEADER_BYTES))
        for key in keys
        if chunks.pattern.fullmatch(key.removeprefix(before))
    }
    for key, read in reads.items():
        _check_blosc(key, read.result().value, chunks.size)


def _check_blosc(key: str, header: bytes, size: int) -> None:
    found = int.from_bytes(header[4:8], "little")
    if len(header) < _HEADER_BYTES or not size <= found <= size + _SPARE_BYTES:
        raise ValueError(f"{key} is said to have {found} bytes instead of {size}")
