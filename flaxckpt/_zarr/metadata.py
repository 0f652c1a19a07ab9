"""Metadata, chunks and keys of zarr arrays, as flaxckpt writes and accepts them.

An uncompressed chunk of zarr 3 consists of the values, little endian and in C order,
and their CRC-32C. Such *raw* arrays are written and read without TensorStore, but in
TensorStore's format.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from flaxckpt import _state, _storage
from flaxckpt._types import JSON, Shape
from flaxckpt._zarr.checksums import ChunkChecksums
from flaxckpt._zarr.chunk_shape import chunk_count

if TYPE_CHECKING:
    import numpy as np

    from flaxckpt._state.leaf import LeafInfo

METADATA = "zarr.json"
METADATA_FILES = {2: ".zarray", 3: METADATA}
"""Version of zarr -> file with the metadata of an array."""

_FORM = ("data_type", "shape")
"""Fields of the metadata that have an error of their own."""

DATABASE = "manifest.ocdbt"
"""File that an OCDBT database begins with."""

TREE = "d/tree"
"""The file with the nodes of the tree of a database that we write."""

INDEX_FILES = (DATABASE, TREE)
"""The files of a database that we write, without those of values."""

DATABASE_PART = "ocdbt.process_"
"""Prefix of the database of a process, in Orbax and in flaxckpt before version 3."""

CODECS = ("none", "compact", "zstd")

_COMPRESSED_FROM = 4096
"""Size in bytes below which arrays are not compressed."""

MAX_AXES = 32
"""Maximal number of axes of a stored array: TensorStore's limit."""

MAX_SIZE = 2**48
"""Exclusive bound on the elements along an axis."""

MAX_CHUNKS = 2**20
"""Maximal number of chunks of an array; more names would take gigabytes."""

_COMPRESSORS = frozenset(("blosc", "gzip", "zstd"))
_CODECS = frozenset(("bytes", "crc32c", "transpose", *_COMPRESSORS))
_COMPRESSORS_OF_2 = frozenset(("blosc", "bz2", "gzip", "zlib", "zstd"))
_MAX_CODECS = 8
_MAX_PARTS = 2**20
"""Maximal number of parts of a sharded chunk; each takes 16 bytes in the index."""

MAX_METADATA_BYTES = 2**16
"""Limit on the metadata of an array, including attributes and names of axes."""

ZARR_2_NUMBER = re.compile(r"[<>|][biufc][0-9]{1,2}")
"""Simple element types of zarr 2."""

_NEVER_RAW = frozenset(("int2", "int4", "float4_e2m1fn"))
"""Types of less than a byte, with different bits in memory and on disk."""

Array: TypeAlias = "np.ndarray[Any, Any]"
Region: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop along each axis."""


class Encoding(NamedTuple):
    """Encoding of the chunks of a checkpoint's arrays; see `ArrayLayout`.

    If `checksum`, each chunk ends in its CRC-32C; never in zarr 2.
    """

    codec: str
    checksum: bool
    version: int = 3


class ArrayForm(NamedTuple):
    """The stored shape and element type of an array, and the shape of a chunk."""

    shape: Shape
    dtype: str
    chunk_shape: Shape


class RawArray(NamedTuple):
    """An array with chunks of plain values, optionally followed by a checksum.

    Attributes:
        root: The directory or database with the arrays.
        ocdbt: True if `root` is a database.
        has_digests: True if digests cover the chunks, which then need no checksums.
        checksums: Checksums of the chunks; None if not recorded.
        check_database: Compares the database with its digests; None without digests.
        sizes: Files of the database with values -> recorded bytes; None if unknown.
    """

    root: Path
    name: str
    ocdbt: bool
    encoding: Encoding
    form: ArrayForm
    has_digests: bool = False
    checksums: ChunkChecksums | None = None
    check_database: Callable[[], None] | None = None
    sizes: Mapping[str, int] | None = None


@functools.lru_cache(maxsize=1024)  # many arrays are alike
def is_raw(encoding: Encoding, form: ArrayForm) -> bool:
    """Returns True if chunks hold the values as in memory, without encoding."""
    return (
        encoding.version == 3
        and form.dtype not in _NEVER_RAW
        and choose_codec(encoding, form.shape, form.dtype) == "none"
    )


def choose_codec(encoding: Encoding, shape: Shape, dtype: str) -> str:
    """Returns the codec of an array: `none` if it is small, else that of `encoding`."""
    size = math.prod(shape) * _state.dtypes.item_bits(dtype) // 8
    return "none" if size < _COMPRESSED_FROM else encoding.codec


def metadata(encoding: Encoding, form: ArrayForm) -> dict[str, JSON]:
    """Returns the content of an array's `zarr.json`, or `.zarray` for zarr 2.

    A chunk has at least 1 element along each axis.
    """
    if encoding.version == 2:
        return _metadata_2(encoding, form)
    shape, dtype, chunk_shape = form
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk_shape)},
        },
        # Dots instead of slashes: a single directory per array.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _zero(dtype),
        "codecs": _codecs(
            choose_codec(encoding, shape, dtype), dtype, encoding.checksum
        ),
    }


@functools.lru_cache(maxsize=1024)  # many arrays are alike
def metadata_text(encoding: Encoding, form: ArrayForm) -> bytes:
    return json.dumps(metadata(encoding, form), separators=(",", ":")).encode()


def check_metadata(text: bytes, encoding: Encoding, form: ArrayForm) -> None:
    """Raises ValueError if a `zarr.json` is not the recorded form of an array."""
    if text == metadata_text(encoding, form):
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    wanted = metadata(encoding, form)
    if found == wanted:
        return
    if not isinstance(found, dict):
        raise ValueError(f"{METADATA} has changed since it was written")
    if [found.get(name) for name in _FORM] == [wanted[name] for name in _FORM]:
        absent = object()
        names = sorted({*found, *wanted})
        other = [n for n in names if found.get(n, absent) != wanted.get(n, absent)]
        raise ValueError(
            f"{METADATA} has changed since it was written, in"
            f" {', '.join(repr(name)[:30] for name in other[:4])}"
        )
    raise ValueError(
        f"recorded as {form.dtype}{list(form.shape)}, but {METADATA} says"
        f" {str(found.get('data_type'))[:20]}{str(found.get('shape'))[:80]}"
    )


def check_compact(text: bytes) -> None:
    """Raises ValueError unless a `zarr.json` has the JSON style of our writers.

    flaxckpt and TensorStore write the same style; not a single space may differ.
    """
    if json.dumps(json.loads(text), separators=(",", ":")).encode() != text:
        raise ValueError(f"the formatting of {METADATA} has changed")


def _metadata_2(encoding: Encoding, form: ArrayForm) -> dict[str, JSON]:
    shape, dtype, chunk_shape = form
    blosc: JSON = {
        "id": "blosc",
        "cname": "lz4",
        "clevel": 1,
        "shuffle": 2,
        "blocksize": 0,
    }
    compressors: dict[str, JSON] = {
        "none": None,
        "compact": blosc,
        "zstd": {"id": "zstd", "level": 1},
    }
    return {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunk_shape),
        "dtype": _state.numpy_dtypes.zarr_2_name(dtype),
        "compressor": compressors[choose_codec(encoding, shape, dtype)],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }


def _zero(dtype: str) -> JSON:
    match _state.dtypes.kind(dtype):
        case "bool":
            return False
        case "complex":
            return [0.0, 0.0]
        case "float":
            return 0.0
        case _:
            return 0


def _codecs(codec: str, dtype: str, checksum: bool) -> list[JSON]:
    values: dict[str, JSON] = {"name": "bytes"}
    if _state.dtypes.item_bits(dtype) > 8:
        values["configuration"] = {"endian": "little"}
    codecs: list[JSON] = [values]
    if codec == "compact":
        blosc: JSON = {
            "cname": "lz4",
            "clevel": 1,
            "shuffle": "bitshuffle",
            "typesize": _state.dtypes.item_bits(dtype) // 8,
            "blocksize": 0,
        }
        codecs.append({"name": "blosc", "configuration": blosc})
    elif codec == "zstd":
        zstd: JSON = {"level": 1, "checksum": False}
        codecs.append({"name": "zstd", "configuration": zstd})
    if checksum:
        codecs.append({"name": "crc32c"})
    return codecs


def database_key(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key


@functools.lru_cache(maxsize=1024)
def whole(shape: Shape) -> Region:
    return tuple((0, size) for size in shape)


def region_of(index: tuple[slice, ...], shape: Shape) -> Region:
    """Returns the region of a tuple of slices, as in `jax.Shard.index`."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    return (*bounds, *((0, size) for size in shape[len(bounds) :]))


def within(inner: Region, outer: Region) -> tuple[Any, ...]:
    """Returns the index of `inner` in an array of `outer`; keeps 0-d arrays."""
    slices = (
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(inner, outer, strict=True)
    )
    return (*slices, ...)


def extent(region: Region) -> Shape:
    return tuple(stop - start for start, stop in region)


def enclosing(regions: Sequence[Region]) -> Region:
    return tuple(
        (min(start for start, _ in bounds), max(stop for _, stop in bounds))
        for bounds in zip(*regions, strict=True)
    )


class Chunk(NamedTuple):
    """The intersection `bounds` of a region and a chunk, in coordinates of the array.

    The key of the chunk is relative to its array.
    """

    key: str
    bounds: Region

    @property
    def key_2(self) -> str:
        return self.key.removeprefix("c").removeprefix(".") or "0"


@functools.lru_cache(maxsize=256)  # many arrays are alike
def chunks(region: Region, chunk_shape: Shape) -> tuple[Chunk, ...]:
    ranges = [
        range(start // size, -(-stop // size))
        for (start, stop), size in zip(region, chunk_shape, strict=True)
    ]
    if not all(ranges):
        return ()  # size 0 along an axis, perhaps huge along another
    return tuple(
        Chunk(
            ".".join(("c", *map(str, index))),
            tuple(
                (max(start, i * size), min(stop, (i + 1) * size))
                for i, (start, stop), size in zip(
                    index, region, chunk_shape, strict=True
                )
            ),
        )
        for index in itertools.product(*ranges)
    )


def form_of(info: LeafInfo) -> ArrayForm:
    return ArrayForm(info.stored_shape, info.stored_dtype, info.chunk_shape or ())


def chunks_of(info: LeafInfo) -> tuple[Chunk, ...]:
    """Returns the chunks of a leaf's array, in C order."""
    return chunks(whole(info.stored_shape), info.chunk_shape or ())


@functools.lru_cache(maxsize=4096)  # many arrays are alike
def fault(shape: Shape, chunk_shape: Shape) -> str | None:
    """Returns the reason for readers to reject the array of a leaf, or None."""
    axes = len(chunk_shape)  # a PRNG key has an axis more than its shape
    if axes > MAX_AXES:
        return f"{axes} axes; readers accept at most {MAX_AXES}"
    if max(shape, default=0) >= MAX_SIZE:
        return (
            f"{max(shape)} elements along an axis; readers accept at most"
            f" {MAX_SIZE - 1}"
        )
    count = chunk_count(shape, chunk_shape[: len(shape)])
    if count > MAX_CHUNKS:
        return f"{count} chunks; readers accept at most {MAX_CHUNKS}"
    return None


def region_of_key(key: str, shape: Shape, chunk_shape: Shape) -> Region | None:
    """Returns the region of the chunk `key`, such as `c.0.1`; None for other keys."""
    index = [text for text in key.replace("/", ".").split(".") if text != "c"]
    if len(index) != len(shape) or not all(text.isdecimal() for text in index):
        return None
    return tuple(
        (min(int(i) * size, total), min((int(i) + 1) * size, total))
        for i, size, total in zip(index, chunk_shape, shape, strict=True)
    )


def kvstore(root: Path, name: str, *, ocdbt: bool) -> dict[str, JSON]:
    """Returns the TensorStore kvstore spec of the array `name` under `root`."""
    below = f"{name}/" if name else ""
    storage = _storage.of(root)
    if ocdbt:
        return {"driver": "ocdbt", "base": storage.kvstore(root, ""), "path": below}
    return storage.kvstore(root, below)


# ---- checks of others' metadata ----------------------------------------------------


def parse(metadata: Mapping[str, Any]) -> ArrayForm:
    """Returns the form of an array from a `zarr.json` or a `.zarray`.

    Some codecs make TensorStore abort the process or exhaust memory. Only those written
    by Orbax and flaxckpt are accepted, and a few more. Raises ValueError, KeyError or
    TypeError for others, and for invalid metadata.
    """
    shape = sizes(metadata["shape"])
    if metadata["zarr_format"] == 3:
        dtype = metadata["data_type"]
        chunk_shape = sizes(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        _check_3(metadata, chunk_shape)
    else:
        dtype, chunk_shape = metadata["dtype"], sizes(metadata["chunks"])
        _check_2(metadata)
    return ArrayForm(shape, _element_type(dtype), chunk_shape)


def sizes(value: Any) -> Shape:
    """Returns the shape in a JSON value; raises ValueError beyond the limits."""
    is_shape = isinstance(value, list) and len(value) <= MAX_AXES
    for size in value if is_shape else ():
        is_shape = is_shape and type(size) is int and 0 <= size < MAX_SIZE
    if not is_shape:
        raise ValueError(f"{str(value)[:80]} is not a shape")
    return tuple(value)


def _element_type(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"element type {str(name)[:80]} is not supported")
    if ZARR_2_NUMBER.fullmatch(name):  # numpy accepts too many other texts
        name = _state.dtypes.of_zarr_2(name)
    return _state.dtypes.check(name)


def _check_2(metadata: Mapping[str, Any]) -> None:
    compressor = metadata["compressor"]
    name = None if compressor is None else compressor["id"]
    if name is not None and name not in _COMPRESSORS_OF_2:
        raise ValueError(f"compressor {str(name)[:40]!r} is not supported")
    if metadata.get("filters"):
        raise ValueError("filters are not supported")


def _check_3(metadata: Mapping[str, Any], chunk_shape: Shape) -> None:
    if metadata["node_type"] != "array" or metadata["chunk_grid"]["name"] != "regular":
        raise ValueError("it is not an array with regular chunks")
    if metadata.get("storage_transformers"):
        raise ValueError("storage transformers are not supported")
    codecs = metadata["codecs"]
    if "sharding_indexed" in _codec_names(codecs):
        [codec] = codecs
        _check_sharding(codec["configuration"], chunk_shape)
    else:
        _check_codecs(codecs)


def _check_sharding(sharding: Mapping[str, Any], chunk_shape: Shape) -> None:
    parts = sizes(sharding["chunk_shape"])
    fault = f"chunks {list(chunk_shape)} cannot be cut into {list(parts)}"
    if len(parts) != len(chunk_shape) or 0 in parts:
        raise ValueError(fault)
    counts = [-(-size // part) for size, part in zip(chunk_shape, parts, strict=True)]
    if math.prod(counts) > _MAX_PARTS:
        raise ValueError(f"{fault}: too many parts")
    if "blosc" in _check_codecs(sharding["codecs"]):
        # Each part declares its own decoded size, and cannot be checked before.
        raise ValueError("blosc is not supported in sharded chunks")
    if not {"bytes", "crc32c"} >= set(_check_codecs(sharding["index_codecs"])):
        raise ValueError("the index of sharded chunks is compressed")


def _check_codecs(codecs: Any) -> list[str]:
    names = _codec_names(codecs)
    if unknown := [name for name in names if name not in _CODECS]:
        raise ValueError(f"codec {unknown[0][:40]!r} is not supported")
    # Nested compression allows arbitrary ratios.
    if sum(name in _COMPRESSORS for name in names) > 1:
        raise ValueError("chunks that are compressed twice are not supported")
    return names


def _codec_names(codecs: Any) -> list[str]:
    if not isinstance(codecs, list) or len(codecs) > _MAX_CODECS:
        raise ValueError(f"{str(codecs)[:80]} is not a list of codecs")
    return list(map(codec_name, codecs))


def codec_name(codec: Any) -> str:
    """Returns the name of a codec, or of another extension of zarr 3."""
    name = codec if isinstance(codec, str) else codec["name"]
    if not isinstance(name, str):
        raise ValueError(f"{str(name)[:40]} is not the name of a codec")
    return name
