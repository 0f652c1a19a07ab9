"""The JSON in safetensors files: headers, indices, and what we add to them.

Pure: text in, infos out, and back. `_safetensors` finds and opens the files.

Source: the format section of the safetensors README, and its `tensor.rs`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flaxckpt import _dtypes, _layout, _tree
from flaxckpt._info import CheckpointMetadata, LeafInfo, Lineage
from flaxckpt._types import JSON, LeafPath, Shape
from flaxckpt.formats import _orbax_json

MAX_HEADER_BYTES = 100 * 10**6
"""Largest header that the safetensors library reads, and largest index here."""

METADATA = "__metadata__"
OURS = "flaxckpt"
"""The key of our own metadata: exact types, structure, strings, empty containers."""

SUFFIX = ".safetensors"
INDEX_SUFFIX = f"{SUFFIX}.index.json"

_VERSION = 1
_ALIGNMENT = 64
"""Of the first tensor in what we write, in bytes."""

_MAX_BRACKETS = 2**23
"""Containers in one JSON text: each takes some 60 bytes as Python has it."""

_MAX_RANK = 32
_MAX_SIZE = 2**48
_MAX_SHARDS = 100_000

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

_NAMES = {ours: name for name, ours in DTYPES.items()}

_PLAIN_NAME = re.compile(r"[^./\\\0][^/\\\0]*")


class Tensor(NamedTuple):
    """An array in a file.

    Attributes:
        shape: In elements.
        dtype: Name of the element type, as we call it.
        offset: Where its first byte is, from the beginning of the file.
    """

    shape: Shape
    dtype: str
    offset: int


class Header(NamedTuple):
    """What a file says of itself.

    Attributes:
        tensors: Name -> where it is, in the order of the file.
        metadata: Free text of the writer.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


class Index(NamedTuple):
    """What an index says of the files beside it.

    Attributes:
        files: Name of a tensor -> name of its file.
        metadata: Free JSON of the writer.
    """

    files: Mapping[str, str]
    metadata: Mapping[str, JSON]


# ---- read -----------------------------------------------------------------------


def parse_header(text: bytes, *, file_size: int) -> Header:
    """Reads the header of a file, and holds it against the file's size.

    Args:
        text: The header, without the 8 bytes that tell its length.
        file_size: Of the whole file, in bytes.

    Raises:
        ValueError: It is no header, or its tensors are not exactly what follows it.
    """
    data = _load(text)
    metadata = data.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(
        type(value) is str for value in metadata.values()
    ):
        raise ValueError(f"{METADATA} holds something else than text")
    begin = 8 + len(text)
    found = [_tensor(name, row, begin) for name, row in data.items()]
    found.sort(key=lambda item: (item[1].offset, item[2]))
    end = begin
    for name, tensor, stop in found:
        if tensor.offset != end:
            problem = "overlaps another" if tensor.offset < end else "follows a hole"
            raise ValueError(f"{_short(name)} {problem}, at byte {tensor.offset}")
        end = stop
    if end != file_size:
        raise ValueError(f"the tensors end at byte {end}, the file at {file_size}")
    return Header({name: tensor for name, tensor, _ in found}, metadata)


def _tensor(name: str, row: Any, begin: int) -> tuple[str, Tensor, int]:
    """Name, place and end of a tensor."""
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{_short(name)} is described by {reprlib.repr(row)}")
    dtype = row["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"{_short(name)} has the unknown element type {reprlib.repr(dtype)}"
        )
    shape, offsets = row["shape"], row["data_offsets"]
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        raise ValueError(f"{_short(name)} has the shape {reprlib.repr(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{_short(name)} lies at {reprlib.repr(offsets)}")
    start, stop = offsets
    size = math.prod(shape) * _dtypes.to_numpy(DTYPES[dtype]).itemsize
    if size != stop - start:
        raise ValueError(
            f"{_short(name)} is {dtype}{reprlib.repr(shape)}, {size} bytes, and takes"
            f" {stop - start}"
        )
    return name, Tensor(tuple(shape), DTYPES[dtype], begin + start), begin + stop


def parse_index(text: bytes) -> Index:
    """Reads an index.

    Raises:
        ValueError: It is none, or names files that are not simply beside it.
    """
    data = _load(text)
    files, metadata = data.get("weight_map"), data.get("metadata", {})
    if not isinstance(files, dict) or not isinstance(metadata, dict):
        raise ValueError("wanted an object with a weight_map")
    names = set()
    for tensor, name in files.items():
        if type(name) is not str or not is_plain_name(name):
            raise ValueError(
                f"{_short(tensor)} is said to be in {reprlib.repr(name)}, which is no"
                f" name of a {SUFFIX} file beside the index"
            )
        names.add(name)
    if len(names) > _MAX_SHARDS:
        raise ValueError(f"it names {len(names)} files")
    return Index(files, metadata)


def is_plain_name(name: str) -> bool:
    """Whether `name` is that of a file in the same directory, not a hidden one."""
    return (
        len(name) <= 255
        and name.endswith(SUFFIX)
        and _PLAIN_NAME.fullmatch(name) is not None
    )


def _load(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise ValueError("wanted a JSON object")
    if text.count(b"{") + text.count(b"[") > _MAX_BRACKETS:
        raise ValueError("it has too many containers")
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error})") from None
    assert isinstance(data, dict), text[:1]
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("it has the same key twice")
    return data


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < _MAX_SIZE for size in value
    )


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}…")


# ---- what the leaves are --------------------------------------------------------


class Described(NamedTuple):
    """The leaves that a checkpoint's tensors are.

    Attributes:
        infos: The leaves, in the order of the state.
        names: Leaf path -> name of the tensor.
        structure: Their containers.
        strings: Leaf path -> value of the string leaves.
        metrics: What was measured.
        custom: The user's metadata.
        lineage: What the run began from.
        transforms: What was changed on the way, as text.
    """

    infos: tuple[LeafInfo, ...]
    names: Mapping[LeafPath, str]
    structure: _tree.Node | LeafPath
    strings: Mapping[LeafPath, str]
    metrics: Mapping[str, float]
    custom: Mapping[str, JSON]
    lineage: tuple[Lineage, ...] = ()
    transforms: tuple[str, ...] = ()


def describe_foreign(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, JSON]
) -> tuple[Described, bool]:
    """The leaves of a checkpoint that others wrote: names are split at the dots.

    Returns:
        The leaves, and whether names were split. They stay whole if one of them
        continues another, or is nested too deep.
    """
    split = {name: name.split(".") for name in tensors}
    inner = {
        ".".join(parts[:n]) for parts in split.values() for n in range(1, len(parts))
    }
    is_split = inner.isdisjoint(split) and all(
        len(parts) <= _tree.MAX_DEPTH // 2 for parts in split.values()
    )
    infos, names = [], {}
    for name, tensor in tensors.items():
        parts = split[name] if is_split else [name]
        keys = tuple([_tree.Key(part, "key") for part in parts])
        path = _tree.join(keys)
        infos.append(_foreign_info(path, keys, tensor))
        names[path] = name
    structure = _tree.plain_structure((info.path, info.keys, None) for info in infos)
    found = Described(tuple(infos), names, structure, {}, {}, dict(metadata))
    return found, is_split


def _foreign_info(
    path: LeafPath, keys: tuple[_tree.Key, ...], tensor: Tensor
) -> LeafInfo:
    # jax cuts elements of 64 bits down to 32, unless it is told not to.
    is_wide = tensor.dtype in ("int64", "uint64", "float64")
    python_type = "numpy.ndarray" if is_wide else "jax.Array"
    shape = tensor.shape
    return LeafInfo(
        path, keys, "array", python_type, shape, tensor.dtype, None, _each(shape)
    )


def describe_own(
    text: str, tensors: Mapping[str, Tensor], resolve: _tree.Resolve, unknown: set[str]
) -> Described:
    """The leaves of a checkpoint that we wrote.

    Args:
        text: What `own_metadata` made; nothing in it is trusted.
        tensors: What is there.
        resolve: Finds the builder of a class.
        unknown: Gets the names of classes that `resolve` does not know.

    Raises:
        ValueError: The text is something else, or does not fit the tensors.
    """
    try:
        data = _load(text.encode(errors="surrogatepass"))
        version = reprlib.repr(data["version"])
        if version != str(_VERSION):
            raise ValueError(f"it has version {version}, and {_VERSION} is read")
        structure = _tree.from_json(data["structure"], resolve, unknown)
        keys = dict(_tree.key_paths(structure))
        infos = tuple([_own_info(row, keys) for row in data["leaves"]])
        strings, metrics, custom = data["strings"], data["metrics"], data["custom"]
        _check_own(infos, keys, strings, metrics)
        if not isinstance(custom, dict):
            raise ValueError(f"it has the metadata {reprlib.repr(custom)}")
        names = {
            info.path: _orbax_json.param_name(info.keys)
            for info in infos
            if info.dtype is not None
        }
        _check_tensors(infos, names, tensors)
        lineage = _orbax_json.lineage(data)
        changes = _orbax_json.texts(data.get("transforms", []))
        numbers = {name: float(value) for name, value in metrics.items()}
    except (
        *(ValueError, KeyError, TypeError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise ValueError(
            f"its {OURS!r} metadata is not what was written: {str(error)[:200]}"
        ) from None
    return Described(
        infos, names, structure, strings, numbers, custom, lineage, changes
    )


def _own_info(row: Any, keys: Mapping[LeafPath, tuple[_tree.Key, ...]]) -> LeafInfo:
    info = _orbax_json.leaf_info(row, keys)
    if info.chunk_shape is None:
        return info
    return dataclasses.replace(info, chunk_shape=_each(info.chunk_shape))


def _check_own(
    infos: Sequence[LeafInfo], keys: Mapping[LeafPath, Any], strings: Any, metrics: Any
) -> None:
    if len({info.path for info in infos}) != len(infos) or {
        info.path for info in infos
    } != set(keys):
        raise ValueError("its leaves and its structure do not agree")
    wanted = {info.path for info in infos if info.kind == "string"}
    if strings.keys() != wanted or not all(type(s) is str for s in strings.values()):
        raise ValueError("its strings are not those of its leaves")
    if not all(type(value) in (int, float) for value in metrics.values()):
        raise ValueError("it has metrics that are no numbers")


def _check_tensors(
    infos: Sequence[LeafInfo],
    names: Mapping[LeafPath, str],
    tensors: Mapping[str, Tensor],
) -> None:
    if len(set(names.values())) != len(names) or set(names.values()) != set(tensors):
        different = set(names.values()) ^ set(tensors)
        raise ValueError(
            "its leaves and the tensors do not agree:"
            f" {', '.join(map(_short, sorted(different)[:3]))}"
        )
    for info in infos:
        if info.dtype is None:
            continue
        tensor = tensors[names[info.path]]
        if _layout.stored_form(info) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{info.path} is recorded as {info}, stored as"
                f" {tensor.dtype}{list(tensor.shape)}"
            )


def _each(shape: Shape) -> Shape:
    """The chunk shape of an array in which each element is found by itself."""
    return (1,) * len(shape)


# ---- written --------------------------------------------------------------------


def dtype_name(info: LeafInfo) -> str | None:
    """What safetensors calls the element type of a leaf; None if it has no such."""
    return _NAMES.get(_layout.stored_form(info)[1]) if _is_exact(info) else None


def _is_exact(info: LeafInfo) -> bool:
    return info.kind == "prng_key" or _layout.stored_form(info)[1] == info.dtype


def header(
    tensors: Iterable[tuple[str, LeafInfo]], metadata: Mapping[str, str]
) -> bytes:
    """The beginning of a file: the header's length, and the header.

    Args:
        tensors: Name and leaf of all tensors, in the order in which they follow.
        metadata: Free text.
    """
    rows: dict[str, JSON] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, info in tensors:
        size = _layout.stored_bytes(info)
        rows[name] = {
            "dtype": dtype_name(info),
            "shape": list(_layout.stored_form(info)[0]),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def index(files: Mapping[str, str], metadata: Mapping[str, JSON]) -> bytes:
    """An index, as Hugging Face's libraries write it."""
    data = {"metadata": dict(metadata), "weight_map": dict(files)}
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False)
    return f"{text}\n".encode()


def own_metadata(
    infos: Iterable[LeafInfo],
    structure: _tree.Node | LeafPath,
    strings: Mapping[LeafPath, str],
    metadata: CheckpointMetadata,
) -> str:
    """What `describe_own` reads."""
    data: dict[str, JSON] = {
        "version": _VERSION,
        "leaves": [_orbax_json.leaf_row(_whole(info)) for info in infos],
        "structure": _tree.to_json(structure),
        "strings": dict(strings),
        "metrics": dict(metadata.metrics),
        "custom": dict(metadata.custom),
    }
    if metadata.lineage:
        rows = [_orbax_json.lineage_row(origin) for origin in metadata.lineage]
        data["lineage"] = rows
    if metadata.transforms:
        data["transforms"] = list(metadata.transforms)
    return json.dumps(data, separators=(",", ":"))


def _whole(info: LeafInfo) -> LeafInfo:
    """`info` as one chunk: how it was stored elsewhere is nothing to keep."""
    if info.dtype is None:
        return info
    shape = tuple([size or 1 for size in _layout.stored_form(info)[0]])
    return dataclasses.replace(info, chunk_shape=shape)
