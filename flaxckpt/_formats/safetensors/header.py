"""Headers and indices of safetensors files, in JSON.

Source: the format section of the safetensors README, and its `tensor.rs`.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from flaxckpt import _state, _util
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON, Shape

MAX_HEADER_BYTES = 100 * 10**6
"""Largest header that the safetensors library reads, and largest index here."""

METADATA = "__metadata__"
OURS = "flaxckpt"
"""The key of our own metadata: exact types, structure, strings, empty containers."""

SUFFIX = ".safetensors"
INDEX_SUFFIX = f"{SUFFIX}.index.json"

ALIGNMENT = 64
"""Alignment of the first tensor in files that we write, in bytes."""

_MAX_CONTAINERS = 2**23
"""The most containers in a JSON text; a tensor takes three."""

_MAX_TENSORS = 5 * 10**5
_MAX_RANK = 32
_LONG_SHAPE = re.compile(rb'"shape"\s*:\s*\[[-+.\deE,\s]{4096}')
"""A shape too long to parse: 32 sizes take less, even if indented."""

_MAX_SIZE = 2**48
MAX_SHARDS = 100_000

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""Element types: name in the file -> ours. Types of less than a byte are not read."""

_OF_LESS_THAN_A_BYTE = frozenset(("F4", "F6_E2M3", "F6_E3M2"))

_NAMES = {ours: name for name, ours in DTYPES.items()}

_SURROGATE = re.compile("[\ud800-\udfff]")
_OBJECT = re.compile(rb"[ \t\r\n]*\{")
_PLAIN_NAME = re.compile(r"[^./\\\0][^/\\\0]*")


class SafetensorsTensor(NamedTuple):
    """An array in a file; `offset` is from the start of the file."""

    shape: Shape
    dtype: str
    offset: int


class SafetensorsHeader(NamedTuple):
    """The header of a file: tensors in its order, and free text of the writer."""

    tensors: Mapping[str, SafetensorsTensor]
    metadata: Mapping[str, str]


class ShardIndex(NamedTuple):
    """The index of a set of files: tensor name -> file name; JSON of the writer."""

    files: Mapping[str, str]
    metadata: Mapping[str, JSON]


class NotReadError(ValueError):
    """An intact file has tensors of unsupported types: tensor name -> type."""

    def __init__(self, tensors: Mapping[str, str]) -> None:
        self.tensors = dict(tensors)
        super().__init__(f"{len(tensors)} tensors have types of less than a byte")


# ---- parsing --------------------------------------------------------------------


def parse_header(text: bytes, *, file_size: int) -> SafetensorsHeader:
    """Parses the header of a file, without its length, and compares the file's size.

    Raises NotReadError for known but unsupported types; ValueError if the header is
    malformed, or its tensors do not fill the rest of the file exactly.
    """
    check_count(text.count(b'"data_offsets"'))  # before parsing takes memory
    if _LONG_SHAPE.search(text):
        raise ValueError(f"it has a shape of more than {_MAX_RANK} axes")
    data = parse_object(text)
    metadata = data.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    _check_names(text, data)
    unsupported = {
        name: dtype
        for name, row in data.items()
        if isinstance(row, dict)
        and isinstance(dtype := row.get("dtype"), str)
        and dtype in _OF_LESS_THAN_A_BYTE
    }
    if unsupported:
        raise NotReadError(unsupported)
    if not isinstance(metadata, dict) or not all(
        type(value) is str for value in metadata.values()
    ):
        raise ValueError(f"{METADATA} holds values that are not strings")
    begin = 8 + len(text)
    rows = [_parse_tensor(name, row, begin) for name, row in data.items()]
    rows.sort(key=lambda row: (row[1].offset, row[2]))
    end = begin
    for name, tensor, stop in rows:
        if tensor.offset != end:
            fault = (
                "overlaps another tensor" if tensor.offset < end else "follows a gap"
            )
            raise ValueError(f"{short(name)} at byte {tensor.offset} {fault}")
        end = stop
    if end != file_size:
        raise ValueError(f"the tensors end at byte {end}, the file at {file_size}")
    return SafetensorsHeader({name: tensor for name, tensor, _ in rows}, metadata)


def _check_names(text: bytes, names: Collection[str]) -> None:
    """Raises ValueError for too many names, or lone surrogates in names."""
    check_count(len(names))
    if b"\\u" in text:  # only an escape can be a lone surrogate
        for name in names:
            if not name.isascii() and _SURROGATE.search(name):
                raise ValueError(f"the name {short(name)} is not valid Unicode")


def check_count(count: int) -> None:
    """Raises ValueError for too many tensors."""
    if count > _MAX_TENSORS:
        raise ValueError(f"it has more than {_MAX_TENSORS} tensors")


def _parse_tensor(
    name: str, row: Any, begin: int
) -> tuple[str, SafetensorsTensor, int]:
    """Parses a row of a header; returns name, tensor and end offset."""
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{short(name)} has the malformed entry {reprlib.repr(row)}")
    dtype = row["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"{short(name)} has the unknown element type {reprlib.repr(dtype)}"
        )
    shape, offsets = row["shape"], row["data_offsets"]
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        raise ValueError(f"{short(name)} has the shape {reprlib.repr(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{short(name)} has the data_offsets {reprlib.repr(offsets)}")
    start, stop = offsets
    size = math.prod(shape) * _state.dtypes.item_size(DTYPES[dtype])
    if size != stop - start:
        raise ValueError(
            f"{short(name)} is {dtype}{reprlib.repr(shape)}: wanted {size} bytes, found"
            f" {stop - start}"
        )
    return (
        name,
        SafetensorsTensor(tuple(shape), DTYPES[dtype], begin + start),
        begin + stop,
    )


def parse_index(text: bytes, suffix: str = SUFFIX) -> ShardIndex:
    """Parses an index of files whose names end in `suffix`, all beside the index."""
    data = parse_object(text)
    files, metadata = data.get("weight_map"), data.get("metadata")
    metadata = {} if metadata is None else metadata
    if not isinstance(files, dict) or not isinstance(metadata, dict):
        raise ValueError("wanted an object with a weight_map")
    _check_names(text, files)
    names = set()
    for tensor, name in files.items():
        if type(name) is not str or not _is_plain_name(name, suffix):
            raise ValueError(
                f"{short(tensor)}: wanted the name of a {suffix} file beside the index,"
                f" found {reprlib.repr(name)}"
            )
        names.add(name)
    if len(names) > MAX_SHARDS:
        raise ValueError(f"it names {len(names)} files; at most {MAX_SHARDS} are read")
    return ShardIndex(files, metadata)


def _is_plain_name(name: str, suffix: str) -> bool:
    """Returns True for the name of a visible file without a directory."""
    return (
        len(name) <= 255
        and name.isprintable()
        and name.endswith(suffix)
        and _PLAIN_NAME.fullmatch(name) is not None
    )


def parse_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object within limits; raises ValueError for anything else."""
    if not _OBJECT.match(text):
        raise ValueError("wanted a JSON object")
    _util.json_limits.check(text, max_containers=_MAX_CONTAINERS)
    try:
        data = json.loads(
            text.decode(), object_pairs_hook=_util.json_limits.refuse_duplicates
        )
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    assert isinstance(data, dict), text[:64]
    return data


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < _MAX_SIZE for size in value
    )


def short(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}…")


# ---- writing --------------------------------------------------------------------


def dtype_name(info: LeafInfo) -> str | None:
    """Returns the safetensors name of a leaf's element type, or None if lacking."""
    dtype = info.stored_dtype
    is_exact = info.kind == "prng_key" or dtype == info.dtype
    return _NAMES.get(dtype) if is_exact else None


def make_header(
    tensors: Iterable[tuple[str, LeafInfo]], metadata: Mapping[str, str]
) -> bytes:
    """Returns the header, after its length; `tensors` are in the order of the file."""
    rows: dict[str, JSON] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, info in tensors:
        size = info.stored_bytes
        rows[name] = {
            "dtype": dtype_name(info),
            "shape": list(info.stored_shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def make_index(files: Mapping[str, str], metadata: Mapping[str, JSON]) -> bytes:
    """Returns an index in the style of Hugging Face's libraries."""
    data = {"metadata": dict(metadata), "weight_map": dict(files)}
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False)
    return f"{text}\n".encode()
