"""Makes the layouts of safetensors files; equal infos give equal bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flaxckpt import _state, errors
from flaxckpt._formats import file_layout, orbax_json
from flaxckpt._formats.reader import CheckpointMetadata
from flaxckpt._formats.safetensors import header
from flaxckpt._formats.safetensors import metadata as safetensors_metadata
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import JSON, LeafPath

NAME = "model"
"""Stem of the file names, as in Hugging Face's libraries."""

_FORMAT = {"format": "flax"}
_FORMAT_OF_TORCH = {"format": "pt"}
"""Metadata of every file, required by transformers and others."""


def make_layouts(
    infos: Sequence[LeafInfo],
    structure: _state.tree.Node | LeafPath,
    strings: Mapping[LeafPath, str],
    metadata: CheckpointMetadata | None,
    *,
    max_shard_bytes: int | None,
    name: str = NAME,
) -> list[file_layout.FileLayout]:
    """Returns the layouts of the files of a checkpoint; several files have an index.

    A file has at most `max_shard_bytes` of arrays, unless it has a single one; None
    makes one file. Without `metadata`, the files are as torch's programs write them.
    """
    arrays = [info for info in infos if info.dtype is not None]
    names = {info.path: orbax_json.param_name(info.keys) for info in arrays}
    _check_names(names)
    _check_types(arrays)
    of_files, ours = _FORMAT_OF_TORCH, {}
    if metadata is not None:
        of_files = _FORMAT
        ours[header.OURS] = safetensors_metadata.native_metadata(
            infos, structure, strings, metadata
        )
    shards = list(_split(arrays, max_shard_bytes))
    if len(shards) == 1:
        file = f"{name}{header.SUFFIX}"
        return [_make_layout(file, shards[0], names, {**of_files, **ours})]
    files = []
    weight_map: dict[str, str] = {}
    for n, shard in enumerate(shards, start=1):
        file = f"{name}-{n:05}-of-{len(shards):05}{header.SUFFIX}"
        files.append(_make_layout(file, shard, names, of_files))
        weight_map |= {names[info.path]: file for info in shard}
    size = sum(info.stored_bytes for info in arrays)
    index = file_layout.FileLayout(f"{name}{header.INDEX_SUFFIX}")
    index_metadata: dict[str, JSON] = {"total_size": size, **ours}
    index.add(_check_size(header.make_index(weight_map, index_metadata), index.name))
    return [*files, index]


def _check_names(names: Mapping[LeafPath, str]) -> None:
    faults: dict[str, str] = {}
    seen: dict[str, LeafPath] = {}
    for path, name in names.items():
        if name in seen:
            faults[path] = f"is called {name!r} in the file, like {seen[name]}"
        elif name == header.METADATA:
            faults[path] = "is the name of the file's own metadata"
        elif not name.isascii() and name.encode(errors="replace").decode() != name:
            faults[path] = "is not valid Unicode"
        seen[name] = path
    if faults:
        raise errors.LeafNameError(
            faults,
            "Rename these keys, as transforms=[rename(pattern, new)]; in the file, keys"
            " are joined by dots.",
        )


def _check_types(arrays: Sequence[LeafInfo]) -> None:
    faults = {
        info.path: f"{info}, a type that safetensors lacks; {_advice(info)}"
        for info in arrays
        if header.dtype_name(info) is None
    }
    if faults:
        raise errors.UnsupportedLeafError(
            faults,
            "Change them, as transforms=[cast(pattern, dtype, lossy=True)]"
            " or [map_leaf(pattern, function)], or convert to another format.",
        )


def _advice(info: LeafInfo) -> str:
    dtype = info.dtype or ""
    if info.kind != "scalar":
        return f"cast it to {_nearest(dtype)}"
    # Casts do not change the types of Python numbers.
    if _state.dtypes.kind(dtype) == "complex":
        function = "lambda x: jnp.stack([x.real, x.imag])"
    else:
        function = f"lambda x: x.astype({_nearest(dtype)!r})"
    return f"use map_leaf with {function}"


def _nearest(dtype: str) -> str:
    """Returns the safetensors type to suggest for a cast of `dtype`."""
    match _state.dtypes.kind(dtype):
        case "float":
            return "float16"
        case "complex":
            return "complex64"
        case "uint":
            return "uint8"
        case _:
            return "int8"


def _split(
    arrays: Sequence[LeafInfo], max_bytes: int | None
) -> Iterator[list[LeafInfo]]:
    """Yields the arrays of each file, in order; at least a single file."""
    shard: list[LeafInfo] = []
    total = 0
    for info in arrays:
        size = info.stored_bytes
        if shard and max_bytes is not None and total + size > max_bytes:
            yield shard
            shard, total = [], 0
        shard.append(info)
        total += size
    yield shard


def _make_layout(
    name: str,
    infos: Sequence[LeafInfo],
    names: Mapping[LeafPath, str],
    metadata: Mapping[str, str],
) -> file_layout.FileLayout:
    ordered = sorted(infos, key=lambda info: (*_place(info), names[info.path]))
    file = file_layout.FileLayout(name)
    tensors = [(names[info.path], info) for info in ordered]
    file.add(_check_size(header.make_header(tensors, metadata), name))
    for info in ordered:
        file.add_values(info.path, 0, info.stored_bytes)
    return file


def _place(info: LeafInfo) -> tuple[bool, int]:
    """Returns the place of an array among those of a file.

    First come sizes that keep the next array aligned, so that it can be mapped; then
    large elements, so that each offset is a multiple of the item size.
    """
    is_uneven = info.stored_bytes % header.ALIGNMENT != 0
    return is_uneven, -_state.dtypes.item_bits(info.dtype or "")


def _check_size(content: bytes, name: str) -> bytes:
    if len(content) > header.MAX_HEADER_BYTES:
        raise errors.OptionError(
            f"{name} would describe its tensors in {len(content)} bytes; readers accept"
            f" at most {header.MAX_HEADER_BYTES}: drop leaves, or convert to another"
            " format"
        )
    return content
