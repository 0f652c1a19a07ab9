"""Checks of chunk headers and sizes, before TensorStore decodes the chunks.

TensorStore reads zeros if a chunk is a directory, and allocates any size that the
header of a blosc chunk declares.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxckpt import _state, _storage
from flaxckpt._zarr import metadata

if TYPE_CHECKING:  # it imports NumPy, which a look at metadata need not
    from flaxckpt._zarr.ocdbt import DatabaseIndex

_LONG_BYTES = 64 * 2**20
"""Decoded size up to which the ratio below is not checked."""

_BEST_RATIO = {"gzip": 1100, "zlib": 1100, "zstd": 2**16, "blosc": 2**16}
"""Codec -> maximal ratio of decoded to stored size of a chunk; none for bz2."""

_HEADER_BYTES = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SPARE_BYTES = 64
"""Allowance for checksums compressed with a chunk."""


class Chunks(NamedTuple):
    """The chunks of an array, by its metadata.

    Attributes:
        pattern: Pattern of the keys of chunks, relative to the array.
        codec: Compression codec; None for no compression, or compression by parts.
        size: Decoded size of a chunk, in bytes.
    """

    form: metadata.ArrayForm
    pattern: re.Pattern[str]
    codec: str | None
    size: int


def parse(data: Mapping[str, Any]) -> Chunks:
    """Returns the chunks described by a `zarr.json` or a `.zarray`.

    Raises ValueError, KeyError, TypeError or AttributeError for metadata that are
    invalid or unsupported.
    """
    form = metadata.parse(data)
    rank = len(form.shape)
    size = math.prod(form.chunk_shape) * _state.dtypes.item_size(form.dtype)
    if data["zarr_format"] == 3:
        codecs = map(metadata.codec_name, data["codecs"])
        codec = next((name for name in codecs if name in _BEST_RATIO), None)
        return Chunks(form, _pattern_3(data, rank), codec, size)
    compressor = data["compressor"]
    separator = re.escape(str(data.get("dimension_separator") or "."))
    pattern = separator.join(["[0-9]+"] * rank) or "0"
    codec = None if compressor is None else compressor["id"]
    return Chunks(form, re.compile(pattern), codec, size)


def _pattern_3(data: Mapping[str, Any], rank: int) -> re.Pattern[str]:
    encoding = data["chunk_key_encoding"]
    is_default = metadata.codec_name(encoding) == "default"
    options = encoding.get("configuration") if isinstance(encoding, dict) else None
    separator = (options or {}).get("separator", "/" if is_default else ".")
    parts = ["c"] * is_default + ["[0-9]+"] * rank
    return re.compile(re.escape(str(separator)).join(parts) or "0")


def check_files(directory: Path, chunks: Chunks) -> None:
    """Checks that the chunks of an array are files of plausible size.

    Raises ValueError if a chunk is a directory, too short, or declares a wrong size.
    """
    storage = _storage.of(directory)
    if storage.costs_requests and chunks.codec != "blosc":
        return  # sizes would cost requests
    ratio = _BEST_RATIO.get(chunks.codec or "")
    for key, is_directory, is_file, is_link in storage.walk(directory, strict=True):
        if is_directory and is_link:  # it may lead in circles
            raise ValueError(f"{key} is a link to a directory")
        if not chunks.pattern.fullmatch(key):
            continue
        if not is_file:
            raise ValueError(f"{key} is a directory, not a chunk")
        file = directory / key
        if ratio and chunks.size > _LONG_BYTES:
            size = storage.known_size(file, None)
            if size is not None and size * ratio < chunks.size:
                raise ValueError(
                    f"{key} has {size} bytes, too few for a chunk of {chunks.size}"
                )
        if chunks.codec == "blosc":
            header = storage.read_range(file, 0, _HEADER_BYTES)
            _check_blosc(key, header, chunks.size)


def compressed_bytes(file: Path, codec: str) -> int:
    """Returns the size of a compressed chunk by its headers; 0 for a foreign header.

    The file need not be that long. A checksum after the chunk is not counted. `codec`
    is `compact`, which is blosc, or `zstd`, with a single frame.

    Source: `README_HEADER.rst` of c-blosc; RFC 8878, section 3.1.1.
    """
    descriptor = _storage.files.open_regular_file(file)
    try:
        if codec == "compact":
            header = os.pread(descriptor, _HEADER_BYTES, 0)
            return int.from_bytes(header[12:], "little")
        return _frame_bytes(functools.partial(os.pread, descriptor))
    finally:
        os.close(descriptor)


def _frame_bytes(read: Callable[[int, int], bytes]) -> int:
    """Returns the size of a zstd frame; `read` takes a number of bytes and an offset.

    Only the headers of its blocks are read, of which each has up to 128 KiB.
    """
    header = read(5, 0)
    if header[:4] != _ZSTD_MAGIC or len(header) < 5:
        return 0
    flags = header[4]
    is_single = flags >> 5 & 1
    content_size_bytes = (is_single, 2, 4, 8)[flags >> 6]
    at = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3] + content_size_bytes
    while True:
        block = int.from_bytes(read(3, at), "little")
        if not block:  # the end of the file, or zeros
            return at + 3
        is_of_one_byte = block >> 1 & 3 == 1
        at += 3 + (1 if is_of_one_byte else block >> 3)
        if block & 1:
            return at + 4 * (flags >> 2 & 1)


def check_values(
    index: DatabaseIndex, name: str, chunks: Chunks, keys: Container[str] | None = None
) -> None:
    """Checks the declared sizes of blosc chunks in a database: of all, or of `keys`.

    Raises ValueError if a chunk declares a wrong size, or is cut off.
    """
    before = metadata.database_key(name, "")
    for key in index.keys(before):
        chunk = key.removeprefix(before)
        if chunks.pattern.fullmatch(chunk) and (keys is None or chunk in keys):
            header = index.read(key, slice(0, _HEADER_BYTES))
            _check_blosc(key, header, chunks.size)


def _check_blosc(key: str, header: bytes, size: int) -> None:
    declared = int.from_bytes(header[4:8], "little")
    if len(header) < _HEADER_BYTES or not size <= declared <= size + _SPARE_BYTES:
        raise ValueError(
            f"{key} has {declared} bytes according to its header, wanted {size}"
        )
