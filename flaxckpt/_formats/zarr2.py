"""Reads arrays of zarr 2 in directories, and checks their metadata and files first.

TensorStore aborts the process if a `.zarray` asks for more memory than the machine has,
reads zeros for a missing chunk, and accepts a gzip stream without its checksum. So this
module decodes chunks without compression or with codecs of Python's standard library.
TensorStore decodes only zstd and blosc, which fail on chunks cut short.
"""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import functools
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from flaxckpt import _arrays, _state, _storage, _zarr, errors
from flaxckpt._formats import orbax_json, plain
from flaxckpt._types import Shape
from flaxckpt._zarr.metadata import Array

_MAX_CHUNK_BYTES = 2 * 2**30
_BEST_RATIO = {None: 1, "zlib": 1032, "gzip": 1032}
"""Codec -> upper bound on the compression ratio of a chunk; exact for deflate."""

_ANY_RATIO = 2**16

_DECODED_HERE = (None, "zlib", "gzip", "bz2")
_LEFT_TO_TENSORSTORE = ("zstd", "blosc")


@dataclasses.dataclass(frozen=True, slots=True)
class _Zarr2:
    """An array by its `.zarray`; `order` of bytes in a chunk is `C` or `F`."""

    root: Path
    name: str
    shape: Shape
    dtype: np.dtype[Any]
    chunk_shape: Shape
    order: str
    codec: str | None

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk_shape) * self.dtype.itemsize


def find_array(root: Path, name: str) -> plain.Opened:
    """Returns an unread array; raises ValueError if it is missing or unsupported."""
    array = _parse(root, name, _metadata(root, name))
    return plain.Opened(
        array.shape,
        _state.numpy_dtypes.name(array.dtype.newbyteorder("=")),
        array.chunk_shape,
        functools.partial(_open, array),
    )


def check_name(name: str) -> str:
    """Returns `name` if valid as the name of a directory directly in a checkpoint."""
    if not name or len(name) > 1024 or name[0] == "." or set(name) & set("/\\\0"):
        raise ValueError(
            f"its directory {name[:80]!r} is not a directory in the checkpoint"
        )
    return name


def _metadata(root: Path, name: str) -> Mapping[str, Any]:
    file = check_inside(root, root / check_name(name) / ".zarray")
    if not file.is_file():
        raise ValueError(f"{name}/.zarray is missing")
    try:
        content = _storage.of(file).read(
            file, max_bytes=_zarr.metadata.MAX_METADATA_BYTES
        )
        return orbax_json.loads(content, file)
    except errors.DamagedCheckpointError as error:
        raise ValueError(str(error)) from None


def check_inside(root: Path, path: Path) -> Path:
    """Returns `path`; raises ValueError if a symlink on the way leads out of `root`."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{path} is a symbolic link that leads out of the checkpoint")
    return path


def _parse(root: Path, name: str, data: Mapping[str, Any]) -> _Zarr2:
    """Parses a `.zarray`; raises ValueError if malformed or unsupported."""
    for key, allowed in (
        ("zarr_format", (2,)),
        ("order", ("C", "F")),
        ("filters", (None, [])),
        ("dimension_separator", (".", None)),
    ):
        if data.get(key) not in allowed or isinstance(data.get(key), bool):
            raise ValueError(
                f".zarray has the unsupported {key} {str(data.get(key))[:40]!r}"
            )
    if "shape" not in data or "chunks" not in data:
        raise ValueError(".zarray has no shape or no chunks")
    shape, chunk_shape = (
        _zarr.metadata.sizes(data[key]) for key in ("shape", "chunks")
    )
    array = _Zarr2(
        root,
        name,
        shape,
        _dtype(data.get("dtype")),
        chunk_shape,
        str(data["order"]),
        _codec(data.get("compressor")),
    )
    if len(chunk_shape) != len(shape) or 0 in chunk_shape:
        raise ValueError(f"chunks {list(chunk_shape)} in an array {list(shape)}")
    if array.chunk_bytes > _MAX_CHUNK_BYTES:
        raise ValueError(
            f"chunks of {array.chunk_bytes} bytes; at most {_MAX_CHUNK_BYTES} are read"
        )
    return array


def _dtype(name: object) -> np.dtype[Any]:
    if isinstance(name, str):
        with contextlib.suppress(TypeError, errors.OptionError):
            if not _zarr.metadata.ZARR_2_NUMBER.fullmatch(name):
                return _state.numpy_dtypes.to_numpy(name)
            dtype = np.dtype(name)
            _state.numpy_dtypes.to_numpy(dtype.name)
            return dtype
    raise ValueError(f"unsupported element type {str(name)[:40]!r}")


def _codec(compressor: Any) -> str | None:
    if compressor is None:
        return None
    name = compressor.get("id") if isinstance(compressor, dict) else None
    if name not in (*_DECODED_HERE, *_LEFT_TO_TENSORSTORE) or name is None:
        raise ValueError(f"unsupported compressor {str(compressor)[:40]!r}")
    return str(name)


def _open(array: _Zarr2, context: ts.Context) -> ts.Future[ts.TensorStore]:
    _check_files(array)
    if array.codec in _LEFT_TO_TENSORSTORE:
        return _arrays.read.open_zarr(
            context,
            root=array.root,
            name=array.name,
            version=2,
            ocdbt=False,
            strict=True,
        )

    def read(domain: ts.IndexDomain, target: Array, _: Any) -> None:
        region = tuple(zip(domain.inclusive_min, domain.exclusive_max, strict=True))
        for chunk in _zarr.metadata.chunks(region, array.chunk_shape):
            whole = tuple(
                (start - start % size, start - start % size + size)
                for (start, _), size in zip(
                    chunk.bounds, array.chunk_shape, strict=True
                )
            )
            values = _read_chunk(array, chunk.key_2)
            target[_zarr.metadata.within(chunk.bounds, region)] = values[
                _zarr.metadata.within(chunk.bounds, whole)
            ]

    return _arrays.read.completed_future(
        ts.virtual_chunked(
            read,
            dtype=ts.dtype(_state.dtypes.stored_name(array.dtype.name) or ""),
            shape=array.shape,
            chunk_layout=ts.ChunkLayout(read_chunk_shape=array.chunk_shape),
            context=context,
        )
    )


def _check_files(array: _Zarr2) -> None:
    """Raises ValueError unless chunks are plausible files, before memory is taken."""
    count = _zarr.chunk_shape.chunk_count(array.shape, array.chunk_shape)
    sizes: dict[str, int] = {}
    with os.scandir(array.root / array.name) as entries:
        for entry in entries:
            if entry.is_symlink():
                check_inside(array.root, Path(entry.path))
            if entry.is_file():
                sizes[entry.name] = entry.stat().st_size
    if count > len(sizes):
        raise ValueError(f"wanted {count} chunks, found at most {len(sizes)}")
    for chunk in _zarr.metadata.chunks(
        _zarr.metadata.whole(array.shape), array.chunk_shape
    ):
        key = chunk.key_2
        if key not in sizes:
            raise ValueError(f"chunk {key} is missing")
        ratio = _BEST_RATIO.get(array.codec, _ANY_RATIO)
        if not array.chunk_bytes / ratio <= sizes[key] <= 2 * array.chunk_bytes + 2**16:
            raise ValueError(
                f"chunk {key} has {sizes[key]} bytes, too few or too many for a chunk"
                f" of {array.chunk_bytes}"
            )


def _read_chunk(array: _Zarr2, key: str) -> Array:
    """Returns the values of a chunk; raises ValueError or OSError if damaged."""
    path = array.root / array.name / key
    content = path.read_bytes()
    if array.codec is not None:
        content = _decode(array, key, content)
    if len(content) != array.chunk_bytes:
        raise ValueError(
            f"chunk {key} has {len(content)} bytes, wanted {array.chunk_bytes}"
        )
    values = np.frombuffer(content, array.dtype)
    _state.numpy_dtypes.check_bools(values)
    if array.dtype.name != _state.dtypes.stored_name(array.dtype.name):
        values = values.view(np.uint8)
    return values.reshape(array.chunk_shape, order="C" if array.order == "C" else "F")


def _decode(array: _Zarr2, key: str, content: bytes) -> bytes:
    # 47 = 32 + 15: zlib or gzip, by the header. The checksum covers the whole stream,
    # so decoding must reach its end.
    codec = bz2.BZ2Decompressor() if array.codec == "bz2" else zlib.decompressobj(47)
    try:
        decoded = codec.decompress(content, array.chunk_bytes + 1)
    except (zlib.error, OSError) as error:
        raise ValueError(f"chunk {key} is damaged ({error})") from None
    if not codec.eof or codec.unused_data:
        raise ValueError(f"chunk {key} is cut short or has extra bytes at its end")
    return decoded
