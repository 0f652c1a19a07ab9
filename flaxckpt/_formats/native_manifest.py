"""Pure functions that convert the metadata of a checkpoint to our manifest and back."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flaxckpt import _arrays, _state, _zarr, errors
from flaxckpt._formats import native_checksums, orbax_json
from flaxckpt._formats.items import Items
from flaxckpt._formats.orbax_json import EMPTIES
from flaxckpt._formats.reader import Lineage
from flaxckpt._state.leaf import LeafInfo, MeshAxes, Role
from flaxckpt._types import JSON, LeafPath
from flaxckpt._zarr.checksums import ChunkChecksums
from flaxckpt._zarr.metadata import sizes

VERSIONS = (1, 2, 3)
"""Versions that are read; version 2 names the items other than `state`, and version 3
the files of databases."""

_PARSED_LEAVES = 20_000  # up to which `check_readable` parses all rows
_SCALARS = frozenset((*orbax_json.PYTHON_OF_KIND.values(), "numpy.generic"))


class Manifest(NamedTuple):
    """The contents of a manifest.

    Attributes:
        infos: The leaves, in order.
        structure: The containers.
        unknown_types: Classes in `structure` that become plain dicts or lists.
        digests: File name -> digest.
        ocdbt: Whether the arrays are in an OCDBT database.
        encoding: Encoding of the chunks; None if not recorded.
        lineage: Checkpoints that the run started from.
        transforms: The transforms applied to the state, as text.
        step: Step number; None for a checkpoint saved on its own.
        items: The items with the arrays and the dataset.
        json: The names of the JSON items.
        checksums: Leaf path -> checksums of its chunks and their segments.
        files: Files of databases, without trees -> bytes; None if not recorded.
        has_metrics: Whether the step was saved with metrics and their digests.
    """

    infos: Sequence[LeafInfo]
    structure: _state.tree.Node | LeafPath
    unknown_types: frozenset[str]
    digests: Mapping[str, str]
    ocdbt: bool
    encoding: _zarr.metadata.Encoding | None
    lineage: tuple[Lineage, ...]
    transforms: tuple[str, ...]
    step: int | None
    items: Items
    json: tuple[str, ...]
    checksums: Mapping[LeafPath, ChunkChecksums]
    files: Mapping[str, int] | None
    has_metrics: bool


def parse(data: Mapping[str, Any], resolve: _state.treedef.Resolve) -> Manifest:
    """Parses a manifest of this version.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The manifest is malformed.
    """
    unknown: set[str] = set()
    structure = _state.treedef.from_json(data["structure"], resolve, unknown)
    keys = key_paths(structure)
    infos = with_trusted_roles(
        [parse_leaf(row, keys) for row in data["leaves"]], structure
    )
    check_leaves(infos, keys, structure)
    items = parse_items(data)
    items.split(infos)  # raises if a leaf is in no item
    encoding = parse_encoding(data)
    return Manifest(
        infos,
        structure,
        frozenset(unknown),
        parse_digests(data["digests"]),
        bool(data["ocdbt"]),
        encoding,
        parse_lineage(data),
        parse_texts(data.get("transforms", [])),
        _parse_step(data),
        items,
        parse_item_names(data.get("json", [])),
        native_checksums.parse(data, infos, encoding),
        parse_files(data) if "files" in data else None,
        data.get("metrics") is True,
    )


def check_arrays(infos: Sequence[LeafInfo]) -> None:
    """Raises UnsupportedLeafError for arrays that `parse` would not accept."""
    faults = {
        info.path: f"{_shorten(info)} with {fault}"
        for info in infos
        if info.chunk_shape is not None and (fault := _arrays.forms.fault(info))
    }
    if faults:
        raise errors.UnsupportedLeafError(
            faults,
            "Too many axes: reshape the array, x.reshape(-1). Too many chunks: make"
            " them larger, layout=ArrayLayout(chunk_bytes=…).",
        )


def _shorten(info: LeafInfo) -> str:
    """Returns the type and the shape of a leaf; of many axes, the first."""
    text = str(info)
    return text if len(text) <= 60 else f"{text[:50].rpartition(',')[0]}, …]"


def check_readable(data: Mapping[str, Any], infos: Sequence[LeafInfo]) -> None:
    """Parses a new manifest before the commit.

    Of more than 20,000 leaves, only a leaf of each kind is parsed, and no containers.

    Args:
        data: The manifest, parsed from JSON.
        infos: The leaves of the checkpoint.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: Readers would not accept the
            manifest.
    """
    if len(infos) <= _PARSED_LEAVES:
        parse(data, lambda name: None)
        return
    kinds = {
        (i.kind, i.python_type, i.dtype, i.shape, i.chunk_shape, i.mesh_axes): n
        for n, i in enumerate(infos)
    }
    for n in kinds.values():
        parse_leaf(data["leaves"][n], {infos[n].path: infos[n].keys})
    parse_digests(data["digests"])
    native_checksums.parse(data, infos, parse_encoding(data))
    parse_files(data)
    parse_lineage(data)
    parse_texts(data.get("transforms", []))
    _parse_step(data)


# ---- leaves -----------------------------------------------------------------------


def leaf_row(info: LeafInfo) -> JSON:
    """Returns the row of a leaf in the manifest; the inverse of `parse_leaf`."""
    row: dict[str, JSON] = {"path": info.path, "type": info.python_type}
    if info.kind in ("array", "prng_key", "scalar"):
        row |= {"dtype": info.dtype, "shape": info.shape, "chunks": info.chunk_shape}
    if info.weak_type and info.kind == "array":
        row["weak_type"] = True
    if info.prng_impl:
        row["prng_impl"] = info.prng_impl
    if info.mesh_axes is not None:
        row["spec"] = [
            list(part) if isinstance(part, tuple) else part for part in info.mesh_axes
        ]
    if info.shard_shape is not None:
        row["shard"] = info.shard_shape
    if info.role is not None:
        row["role"] = info.role
    return row


def parse_leaf(
    row: Any, keys: Mapping[LeafPath, tuple[_state.tree.Key, ...]]
) -> LeafInfo:
    """Parses a row of `leaf_row`.

    Raises:
        ValueError, KeyError: The row is malformed.
    """
    path, python_type = row["path"], row["type"]
    impl = row.get("prng_impl")
    if python_type in EMPTIES:
        return LeafInfo(path, keys[path], "empty", python_type)
    if python_type == "str":
        return LeafInfo(path, keys[path], "string", "str")
    dtype = _parse_dtype(row["dtype"])
    is_scalar = python_type in _SCALARS
    if not is_scalar and python_type not in ("jax.Array", "numpy.ndarray"):
        raise ValueError(f"{path} has the unknown type {python_type!r}")
    shape, chunk_shape = sizes(row["shape"]), sizes(row["chunks"])
    if len(chunk_shape) != len(shape) + bool(impl) or 0 in chunk_shape:
        raise ValueError(f"{path} has chunks {chunk_shape} in an array {shape}")
    if impl:
        _arrays.forms.check_keys(impl, (*shape, _arrays.forms.key_words(impl)), dtype)
    info = LeafInfo(
        path,
        keys[path],
        "prng_key" if impl else "scalar" if is_scalar else "array",
        python_type,
        shape,
        dtype,
        chunk_shape=chunk_shape,
        weak_type=bool(row.get("weak_type", False))
        or (is_scalar and python_type != "numpy.generic"),
        prng_impl=impl,
        mesh_axes=_parse_spec(row["spec"]) if "spec" in row else None,
        shard_shape=sizes(row["shard"]) if "shard" in row else None,
        role=_parse_role(row["role"]) if "role" in row else None,
    )
    if fault := _arrays.forms.fault(info):
        raise ValueError(f"{path} has {fault}")
    return info


def with_trusted_roles(
    infos: Sequence[LeafInfo], structure: _state.tree.Node | LeafPath
) -> list[LeafInfo]:
    """Returns the leaves with wrong roles from older releases corrected."""
    recorded = {info.path: info.role for info in infos if info.role is not None}
    corrected = (
        _state.optimizer_roles.trusted_roles(structure, recorded) if recorded else {}
    )
    return [
        dataclasses.replace(info, role=corrected[info.path])
        if info.path in corrected
        else info
        for info in infos
    ]


@functools.cache
def _parse_dtype(name: str) -> str:
    return _state.dtypes.check(name)


def _parse_spec(parts: Any) -> tuple[MeshAxes, ...]:
    if not isinstance(parts, list):
        raise ValueError(f"{str(parts)[:80]} is not a partition spec")
    return tuple(map(orbax_json.parse_mesh_axes, parts))


def _parse_role(row: Any) -> Role:
    is_role = isinstance(row, list) and len(row) == 4
    for part in row if is_role else ():
        is_role = is_role and type(part) is str
    if not is_role:
        raise ValueError(f"{str(row)[:80]} is not a role")
    return Role(*row)


# ---- containers ---------------------------------------------------------------------


def key_paths(
    structure: _state.tree.Node | LeafPath,
) -> dict[LeafPath, tuple[_state.tree.Key, ...]]:
    """Returns the keys of each leaf of a parsed structure: leaf path -> keys.

    Raises:
        ValueError: A leaf appears twice, or its name differs from its place.
    """
    places = list(_state.tree.key_paths(structure))
    keys = dict(places)
    names = _names(structure)
    if len(keys) != len(places) or not all(
        name in (None, path) for name, (path, _) in zip(names, places, strict=True)
    ):
        raise ValueError("its structure has leaves at wrong paths")
    return keys


def check_leaves(
    infos: Sequence[LeafInfo],
    keys: Mapping[LeafPath, object],
    structure: _state.tree.Node | LeafPath,
) -> None:
    """Raises ValueError unless `structure` contains exactly the leaves, once each."""
    paths = {info.path for info in infos}
    leaves = {name for name in _names(structure) if name is not None}
    full = {info.path for info in infos if info.kind != "empty"}
    if len(paths) != len(infos) or paths != keys.keys() or full != leaves:
        raise ValueError("its leaves do not match its structure")


def _names(structure: _state.tree.Node | LeafPath) -> list[LeafPath | None]:
    """Returns the names of the leaves in a structure; None for an empty container."""
    if isinstance(structure, str):
        return [structure]
    if not structure.children:
        return [None]
    return [name for child in structure.children for name in _names(child)]


# ---- other fields -------------------------------------------------------------------


def parse_encoding(data: Mapping[str, Any]) -> _zarr.metadata.Encoding | None:
    """Returns the encoding of the chunks of all arrays; None if not recorded.

    Raises:
        ValueError, KeyError, TypeError: The encoding is malformed.
    """
    if "encoding" not in data:
        return None
    row = data["encoding"]
    version = row.get("zarr_version", 3)
    if version not in (2, 3):
        raise ValueError(f"its arrays are in zarr {str(version)[:20]}, wanted 2 or 3")
    if row["codec"] not in _zarr.metadata.CODECS or type(row["checksum"]) is not bool:
        raise ValueError(f"its arrays have the unknown encoding {str(row)[:80]}")
    return _zarr.metadata.Encoding(row["codec"], row["checksum"], int(version))


def encoding_row(encoding: _zarr.metadata.Encoding) -> JSON:
    """Returns the encoding for the manifest; the inverse of `parse_encoding`."""
    row: dict[str, JSON] = {"codec": encoding.codec, "checksum": encoding.checksum}
    return row if encoding.version == 3 else {**row, "zarr_version": encoding.version}


def items_row(items: Items) -> JSON:
    """Returns the items for the manifest; the inverse of `parse_items`."""
    state = items.state
    return {
        "state": state if isinstance(state, str) else list(state),
        "dataset": items.dataset,
    }


def parse_items(data: Mapping[str, Any]) -> Items:
    """Returns the items with the arrays and the dataset.

    Raises:
        ValueError, KeyError, TypeError: The items are malformed.
    """
    if "items" not in data:
        return Items()
    row = data["items"]
    state, dataset = row["state"], row["dataset"]
    names = [state] if isinstance(state, str) else state
    parse_item_names([*(name for name in names if name), dataset])
    return Items(state if isinstance(state, str) else tuple(state), dataset)


def parse_item_names(value: Any) -> tuple[str, ...]:
    """Converts a list of the names of items to a tuple.

    Raises:
        ValueError: `value` is not a list of different names of directories.
    """
    names = parse_texts(value)
    if len(set(names)) < len(names):
        raise ValueError(f"it names an item twice: {str(value)[:80]}")
    for name in names:
        if not name or "/" in name or orbax_json.UNSAFE.search(name):
            raise ValueError(f"it has the unsafe item {name[:80]!r}")
    return names


def parse_digests(value: Any) -> dict[str, str]:
    """Returns the digests in the manifest: file name -> digest.

    Raises:
        ValueError: The digests are malformed, or of files outside of the checkpoint.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:80]} is not a map of digests")
    for name in value:
        if orbax_json.UNSAFE.search(name):
            raise ValueError(f"it has the digest of the unsafe name {name[:80]!r}")
    return dict(value)


def parse_files(data: Mapping[str, Any]) -> dict[str, int]:
    """Returns the files of databases: file name -> bytes.

    Raises:
        ValueError: The files are malformed, or outside of the checkpoint.
    """
    value = data.get("files", {})
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:80]} is not a map of files")
    for name, size in value.items():
        if orbax_json.UNSAFE.search(name):
            raise ValueError(f"it has a file with the unsafe name {name[:80]!r}")
        if type(size) is not int or size < 0:
            raise ValueError(f"{name[:80]!r} has {str(size)[:20]} bytes")
    return dict(value)


def parse_lineage(data: Mapping[str, Any]) -> tuple[Lineage, ...]:
    """Returns the checkpoints that the run started from.

    Raises:
        ValueError, KeyError, TypeError: The lineage is malformed.
    """
    origins = []
    for row in data.get("lineage", []):
        path, step, digest = row["path"], row["step"], row["digest"]
        if type(step) not in (int, type(None)) or type(digest) not in (str, type(None)):
            raise ValueError(f"{str(row)[:80]} is not a lineage")
        origins.append(Lineage(str(path), step, digest, parse_texts(row["transforms"])))
    return tuple(origins)


def _parse_step(data: Mapping[str, Any]) -> int | None:
    """Returns the step number; None for a checkpoint saved on its own.

    Raises:
        ValueError: The step is neither an integer nor null.
    """
    step = data.get("step")
    if type(step) not in (int, type(None)):
        raise ValueError(f"{str(step)[:80]} is not a step number")
    return step


def parse_texts(value: Any) -> tuple[str, ...]:
    """Converts a list of strings to a tuple.

    Raises:
        ValueError: `value` is not a list of strings.
    """
    if not isinstance(value, list) or not all(type(text) is str for text in value):
        raise ValueError(f"{str(value)[:80]} is not a list of strings")
    return tuple(value)


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of the packages used in a save."""
    versions = {}
    for name in ("jax", "flaxckpt", "flax", "optax", "tensorstore"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
