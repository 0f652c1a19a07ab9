"""Converts the tensors and the metadata of a safetensors file to leaves, and back.

Our files also have text with exact types, containers and strings.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt import _state, errors
from flaxckpt._formats import array_names, native_manifest, orbax_json
from flaxckpt._formats.reader import CheckpointMetadata, Lineage
from flaxckpt._formats.safetensors import header
from flaxckpt._formats.safetensors.header import SafetensorsTensor
from flaxckpt._state.leaf import EMPTY_STATE, LeafInfo
from flaxckpt._types import JSON, LeafPath, Shape

_VERSION = 1


class Described(NamedTuple):
    """The leaves and metadata of a checkpoint; `names` are those of tensors."""

    infos: tuple[LeafInfo, ...]
    names: Mapping[LeafPath, str]
    structure: _state.tree.Node | LeafPath
    strings: Mapping[LeafPath, str]
    metrics: Mapping[str, float]
    custom: Mapping[str, JSON]
    lineage: tuple[Lineage, ...] = ()
    transforms: tuple[str, ...] = ()
    is_native: bool = False


def describe_foreign(
    path: Path, tensors: Mapping[str, SafetensorsTensor], metadata: Mapping[str, JSON]
) -> Described:
    """Returns the leaves of another program's checkpoint, with names split at dots."""
    keys = array_names.split(tensors, ".", path)
    infos = [_foreign_info(keys[name], tensor) for name, tensor in tensors.items()]
    names = {info.path: name for info, name in zip(infos, tensors, strict=True)}
    structure = _state.tree.plain_structure(
        (info.path, info.keys, None) for info in infos
    )
    return Described(
        tuple(infos) or (EMPTY_STATE,), names, structure, {}, {}, dict(metadata)
    )


def _foreign_info(
    keys: tuple[_state.tree.Key, ...], tensor: SafetensorsTensor
) -> LeafInfo:
    python_type = _state.dtypes.array_type(tensor.dtype)
    path, shape = _state.tree.join(keys), tensor.shape
    return LeafInfo(
        path, keys, "array", python_type, shape, tensor.dtype, None, _each(shape)
    )


class LaterVersionError(ValueError):
    """The metadata have a version of a later flaxckpt."""


def describe_native(
    text: str,
    tensors: Mapping[str, SafetensorsTensor],
    resolve: _state.treedef.Resolve,
    unknown: set[str],
) -> Described:
    """Returns the leaves of a checkpoint of flaxckpt, by its untrusted `text`.

    `unknown` gets names of unknown classes. Raises LaterVersionError or ValueError.
    """
    try:
        data = header.parse_object(text.encode(errors="surrogatepass"))
        _check_version(data["version"])
        rows, structure = native_manifest.parse_state(data, resolve, unknown)
        infos = tuple(map(_by_element, rows))
        strings, metrics, custom = data["strings"], data["metrics"], data["custom"]
        _check_values(infos, strings, metrics)
        if not isinstance(custom, dict):
            raise ValueError(f"its custom metadata is {reprlib.repr(custom)}")
        names = {
            info.path: orbax_json.param_name(info.keys)
            for info in infos
            if info.dtype is not None
        }
        _check_tensors(infos, names, tensors)
        lineage, changes = native_manifest.parse_history(data)
        numbers = {name: float(value) for name, value in metrics.items()}
    except LaterVersionError:
        raise
    except (
        *(ValueError, KeyError, TypeError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise ValueError(
            f"its {header.OURS!r} metadata is malformed: {errors.one_line(error, 200)}"
        ) from None
    return Described(
        infos, names, structure, strings, numbers, custom, lineage, changes, True
    )


def _check_version(version: Any) -> None:
    text = reprlib.repr(version)
    if type(version) is int and version > _VERSION:
        raise LaterVersionError(
            f"its {header.OURS!r} metadata has version {text}, this flaxckpt"
            f" reads {_VERSION}; use a newer one"
        )
    if text != str(_VERSION):
        raise ValueError(f"it has version {text}; wanted {_VERSION}")


def _by_element(info: LeafInfo) -> LeafInfo:
    if info.chunk_shape is None:
        return info
    return dataclasses.replace(info, chunk_shape=_each(info.chunk_shape))


def _check_values(infos: Sequence[LeafInfo], strings: Any, metrics: Any) -> None:
    wanted = {info.path for info in infos if info.kind == "string"}
    if strings.keys() != wanted or not all(type(s) is str for s in strings.values()):
        raise ValueError("its strings do not match its leaves")
    if not all(type(value) in (int, float) for value in metrics.values()):
        raise ValueError("it has metrics that are not numbers")


def _check_tensors(
    infos: Sequence[LeafInfo],
    names: Mapping[LeafPath, str],
    tensors: Mapping[str, SafetensorsTensor],
) -> None:
    if len(set(names.values())) != len(names) or set(names.values()) != set(tensors):
        different = set(names.values()) ^ set(tensors)
        raise ValueError(
            "its leaves do not match its tensors:"
            f" {', '.join(map(header.short, sorted(different)[:3]))}"
        )
    for info in infos:
        if info.dtype is None:
            continue
        tensor = tensors[names[info.path]]
        if (info.stored_shape, info.stored_dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{info.path} is recorded as {info}, stored as"
                f" {tensor.dtype}{list(tensor.shape)}"
            )


def _each(shape: Shape) -> Shape:
    """Returns the chunk shape of an array with each element readable on its own."""
    return (1,) * len(shape)


def native_metadata(
    infos: Iterable[LeafInfo],
    structure: _state.tree.Node | LeafPath,
    strings: Mapping[LeafPath, str],
    metadata: CheckpointMetadata,
) -> str:
    """Returns our metadata as text, for `describe_native`."""
    data: dict[str, JSON] = {
        "version": _VERSION,
        **native_manifest.state_rows(map(_whole, infos), structure),
        "strings": dict(strings),
        "metrics": dict(metadata.metrics),
        "custom": dict(metadata.custom),
        **native_manifest.history_rows(metadata.lineage, metadata.transforms),
    }
    return json.dumps(data, separators=(",", ":"))


def _whole(info: LeafInfo) -> LeafInfo:
    """Returns `info` with a single chunk; chunks of its source do not matter."""
    if info.dtype is None:
        return info
    shape = tuple([size or 1 for size in info.stored_shape])
    return dataclasses.replace(info, chunk_shape=shape)
