"""Checks of the codecs in array metadata, before TensorStore opens the array.

Some metadata makes TensorStore abort the process or exhaust memory. The checks accept
the codecs written by Orbax and flaxckpt, and a few more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flaxckpt._arrays.zarr import limits

_COMPRESSORS = frozenset(("blosc", "gzip", "zstd"))
_CODECS = frozenset(("bytes", "crc32c", "transpose", *_COMPRESSORS))
_COMPRESSORS_OF_2 = frozenset(("blosc", "bz2", "gzip", "zlib", "zstd"))
_MAX_CODECS = 8
_MAX_PARTS = 2**20
"""Maximal number of parts of a sharded chunk; each takes 16 bytes in the index."""


def check(metadata: Mapping[str, Any], chunk_shape: Sequence[int]) -> None:
    """Raises an error for unsupported codecs of an array.

    Args:
        metadata: A `zarr.json` or a `.zarray`.
        chunk_shape: The chunk shape in the metadata.

    Raises:
        ValueError, KeyError, TypeError: The codecs are invalid or unsupported.
    """
    if metadata["zarr_format"] != 3:
        _check_2(metadata)
        return
    if metadata["node_type"] != "array" or metadata["chunk_grid"]["name"] != "regular":
        raise ValueError("it is no array with regular chunks")
    if metadata.get("storage_transformers"):
        raise ValueError("it has storage transformers")
    codecs = _list(metadata["codecs"])
    if any(_name(codec) == "sharding_indexed" for codec in codecs):
        [codec] = codecs
        _check_cut(codec["configuration"], chunk_shape)
    else:
        _check_codecs(codecs)


def _check_2(metadata: Mapping[str, Any]) -> None:
    compressor = metadata["compressor"]
    name = None if compressor is None else compressor["id"]
    if name is not None and name not in _COMPRESSORS_OF_2:
        raise ValueError(f"compressor {str(name)[:40]!r} is not read")
    if metadata.get("filters"):
        raise ValueError("it has filters")


def _check_cut(cut: Mapping[str, Any], chunk_shape: Sequence[int]) -> None:
    parts = limits.sizes(cut["chunk_shape"])
    if len(parts) != len(chunk_shape) or 0 in parts:
        raise ValueError(f"chunks {list(chunk_shape)} are cut into {list(parts)}")
    counts = [-(-size // part) for size, part in zip(chunk_shape, parts, strict=True)]
    if math.prod(counts) > _MAX_PARTS:
        raise ValueError(f"chunks {list(chunk_shape)} are cut into {list(parts)}")
    codecs = _list(cut["codecs"])
    _check_codecs(codecs)
    if "blosc" in map(_name, codecs):
        # Each part declares its own decoded size, and cannot be checked before.
        raise ValueError("the parts of its chunks are compressed by blosc")
    index_codecs = _list(cut["index_codecs"])
    _check_codecs(index_codecs)
    if not {_name(codec) for codec in index_codecs} <= {"bytes", "crc32c"}:
        raise ValueError("the index of its chunks is compressed")


def _check_codecs(codecs: Sequence[Any]) -> None:
    names = [_name(codec) for codec in codecs]
    if unknown := [name for name in names if name not in _CODECS]:
        raise ValueError(f"codec {unknown[0][:40]!r} is not read")
    # Nested compression allows arbitrary ratios.
    if sum(name in _COMPRESSORS for name in names) > 1:
        raise ValueError("its chunks are compressed twice")


def _list(codecs: Any) -> Sequence[Any]:
    if not isinstance(codecs, list) or len(codecs) > _MAX_CODECS:
        raise ValueError(f"{str(codecs)[:80]} are no codecs")
    return codecs


def _name(codec: Any) -> str:
    name = codec if isinstance(codec, str) else codec["name"]
    if not isinstance(name, str):
        raise ValueError(f"codec {str(name)[:40]} is not read")
    return name
