"""The manifest of a checkpoint: its fields, and their form in JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from flaxckpt import _state, _zarr, errors
from flaxckpt._formats import native_checksums, orbax_files, orbax_json
from flaxckpt._formats.items import Items
from flaxckpt._formats.orbax_files import EMPTIES
from flaxckpt._formats.reader import Lineage
from flaxckpt._state.leaf import LeafInfo, MeshAxes, Role
from flaxckpt._types import JSON, LeafPath
from flaxckpt._zarr.checksums import ChunkChecksums
from flaxckpt._zarr.metadata import Encoding, sizes

State: TypeAlias = tuple[Sequence[LeafInfo], _state.tree.Node | LeafPath]
"""Leaves in order, and containers."""

VERSIONS = (1, 2, 3)
"""Versions that are read; version 2 names the items other than `state`, and version 3
the files of databases."""

_PARSED_LEAVES = 20_000  # up to which `check_readable` parses all rows
_check_dtype = functools.cache(_state.dtypes.check)
_SCALARS = frozenset((*orbax_files.PYTHON_OF_KIND.values(), "numpy.generic"))


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest; raises ValueError if a leaf is in no item.

    Attributes:
        encoding: Encoding of the chunks; None if not recorded.
        step: Step number; None for a checkpoint saved on its own.
        has_metrics: Whether the step was saved with metrics and their digests.
        files: Files of databases, without trees -> bytes; None if not recorded.
        unknown_types: Classes in `structure` that become plain dicts or lists.
        parts: Item -> its leaves.
    """

    infos: Sequence[LeafInfo]
    structure: _state.tree.Node | LeafPath
    encoding: Encoding | None
    items: Items = dataclasses.field(default_factory=Items)
    step: int | None = None
    lineage: tuple[Lineage, ...] = ()
    transforms: tuple[str, ...] = ()
    json: tuple[str, ...] = ()
    has_metrics: bool = False
    ocdbt: bool = True
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, int] | None = None
    checksums: Mapping[LeafPath, ChunkChecksums] = dataclasses.field(
        default_factory=dict
    )
    unknown_types: frozenset[str] = frozenset()
    parts: Mapping[str, Sequence[LeafInfo]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", self.items.split(self.infos))

    @property
    def zarr_version(self) -> int:
        return 3 if self.encoding is None else self.encoding.version

    def segment_bytes(self) -> int:
        return native_checksums.choose_bytes(self.infos, self.encoding)

    def to_json(self) -> dict[str, JSON]:
        assert self.encoding is not None  # only old manifests are without
        data: dict[str, JSON] = {
            "format": "flaxckpt",
            "version": VERSIONS[-1],
            "step": self.step,
            "versions": _versions(),
            "ocdbt": self.ocdbt,
            "encoding": _encoding_row(self.encoding),
            **state_rows(self.infos, self.structure),
            "digests": dict(self.digests),
            "files": dict(self.files or {}),
            **native_checksums.to_json(self.checksums),
            **history_rows(self.lineage, self.transforms),
        }
        if self.has_metrics:
            data["metrics"] = True
        if self.items != Items():
            data["items"] = {"state": self.items.state, "dataset": self.items.dataset}
        if self.json:
            data["json"] = self.json
        return data

    @classmethod
    def from_json(
        cls,
        data: Mapping[str, Any],
        resolve: _state.treedef.Resolve,
        state: State | None = None,
    ) -> Manifest:
        """Parses an untrusted manifest, but not a given `state`; raises `MALFORMED`."""
        unknown: set[str] = set()
        infos, structure = state or parse_state(data, resolve, unknown)
        items = _parse_items(data["items"]) if "items" in data else Items()
        encoding = _parse_encoding(data["encoding"]) if "encoding" in data else None
        return cls(
            infos,
            structure,
            encoding,
            items,
            _parse_step(data.get("step")),
            *parse_history(data),
            _parse_item_names(data.get("json", [])),
            data.get("metrics") is True,
            bool(data["ocdbt"]),
            _parse_files(data["digests"], "digests"),
            _parse_sizes(data["files"]) if "files" in data else None,
            native_checksums.from_json(data, infos, encoding),
            frozenset(unknown),
        )


def check_version(data: Mapping[str, Any], path: object) -> None:
    """Raises CheckpointFormatError for a version of the manifest that is not read."""
    version = data.get("version")
    if version not in VERSIONS:
        *first, last = map(str, VERSIONS)
        raise errors.CheckpointFormatError(
            f"{path} has manifest version {repr(version)[:20]}; this flaxckpt reads"
            f" versions {', '.join(first)} and {last}: use the flaxckpt that wrote it"
            f" ({repr(data.get('versions'))[:200]}) or a newer one"
        )


MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""The errors of `Manifest.from_json`."""


def check_arrays(infos: Sequence[LeafInfo]) -> None:
    """Raises UnsupportedLeafError for arrays that readers would not accept."""
    faults = {
        info.path: f"{_shorten(info)} with {fault}"
        for info in infos
        if (chunk_shape := info.chunk_shape) is not None
        and (fault := _zarr.metadata.fault(info.shape, chunk_shape))
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
    """Parses a new manifest before the commit, and raises an error of `MALFORMED`.

    Of more than 20,000 leaves, only a leaf of each kind is parsed, and no containers.
    """
    resolve = _state.treedef.resolve_nothing
    if len(infos) <= _PARSED_LEAVES:
        Manifest.from_json(data, resolve)
        return
    kinds = {
        (i.kind, i.python_type, i.dtype, i.shape, i.chunk_shape, i.mesh_axes): n
        for n, i in enumerate(infos)
    }
    for n in kinds.values():
        _parse_leaf(data["leaves"][n], {infos[n].path: infos[n].keys})
    Manifest.from_json(data, resolve, (infos, ""))  # all but leaves and containers


# ---- the state ----------------------------------------------------------------------


def state_rows(
    infos: Iterable[LeafInfo], structure: _state.tree.Node | LeafPath
) -> dict[str, JSON]:
    """Returns the fields of leaves and containers; the inverse of `parse_state`."""
    return {
        "leaves": [leaf_row(info) for info in infos],
        "structure": _state.treedef.to_json(structure),
    }


def parse_state(
    data: Mapping[str, Any], resolve: _state.treedef.Resolve, unknown: set[str]
) -> State:
    """Parses leaves and containers, and adds their unknown classes to `unknown`."""
    structure = _state.treedef.from_json(data["structure"], resolve, unknown)
    keys: dict[LeafPath, tuple[_state.tree.Key, ...]] = {}
    recorded = set()
    for path, path_keys, name in _state.tree.leaf_places(structure):
        if path in keys or name not in (None, path):
            raise ValueError("its structure has leaves at wrong paths")
        keys[path] = path_keys
        if name is not None:
            recorded.add(path)
    infos = _with_trusted_roles(
        [_parse_leaf(row, keys) for row in data["leaves"]], structure
    )
    paths = {info.path for info in infos}
    full = {info.path for info in infos if info.kind != "empty"}
    if len(paths) != len(infos) or paths != keys.keys() or full != recorded:
        raise ValueError("its leaves do not match its structure")
    return infos, structure


def leaf_row(info: LeafInfo) -> JSON:
    row: dict[str, JSON] = {"path": info.path, "type": info.python_type}
    if info.kind in ("array", "prng_key", "scalar"):
        row |= {"dtype": info.dtype, "shape": info.shape, "chunks": info.chunk_shape}
    if info.weak_type and info.kind == "array":
        row["weak_type"] = True
    if info.prng_impl:
        row["prng_impl"] = info.prng_impl
    if info.mesh_axes is not None:
        row["spec"] = info.mesh_axes
    if info.shard_shape is not None:
        row["shard"] = info.shard_shape
    if info.role is not None:
        row["role"] = info.role
    return row


def _parse_leaf(
    row: Any, keys: Mapping[LeafPath, tuple[_state.tree.Key, ...]]
) -> LeafInfo:
    path, python_type = row["path"], row["type"]
    impl = row.get("prng_impl")
    if python_type in EMPTIES:
        return LeafInfo(path, keys[path], "empty", python_type)
    if python_type == "str":
        return LeafInfo(path, keys[path], "string", "str")
    dtype = _check_dtype(row["dtype"])
    is_scalar = python_type in _SCALARS
    if not is_scalar and python_type not in ("jax.Array", "numpy.ndarray"):
        raise ValueError(f"{path} has the unknown type {python_type!r}")
    shape, chunk_shape = sizes(row["shape"]), sizes(row["chunks"])
    if len(chunk_shape) != len(shape) + bool(impl) or 0 in chunk_shape:
        raise ValueError(f"{path} has chunks {chunk_shape} in an array {shape}")
    if impl:
        _state.dtypes.check_keys(impl, (*shape, _state.dtypes.key_words(impl)), dtype)
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
    if fault := _zarr.metadata.fault(shape, chunk_shape):
        raise ValueError(f"{path} has {fault}")
    return info


def _with_trusted_roles(
    infos: list[LeafInfo], structure: _state.tree.Node | LeafPath
) -> list[LeafInfo]:
    """Returns the leaves with wrong roles from older releases corrected."""
    recorded = {info.path: info.role for info in infos if info.role is not None}
    if not recorded:
        return infos
    corrected = _state.optimizer_roles.trusted_roles(structure, recorded)
    return [
        dataclasses.replace(info, role=corrected[info.path])
        if info.path in corrected
        else info
        for info in infos
    ]


def _parse_spec(parts: Any) -> tuple[MeshAxes, ...]:
    if not isinstance(parts, list):
        raise ValueError(f"{str(parts)[:80]} is not a partition spec")
    return tuple(map(orbax_files.parse_mesh_axes, parts))


def _parse_role(row: Any) -> Role:
    if not isinstance(row, list) or [*map(type, row)] != [str] * 4:
        raise ValueError(f"{str(row)[:80]} is not a role")
    return Role(*row)


# ---- other fields -------------------------------------------------------------------


def _encoding_row(encoding: Encoding) -> JSON:
    """Returns the encoding of chunks; the inverse of `_parse_encoding`."""
    row: dict[str, JSON] = {"codec": encoding.codec, "checksum": encoding.checksum}
    return row if encoding.version == 3 else {**row, "zarr_version": encoding.version}


def _parse_encoding(row: Any) -> Encoding:
    version = row.get("zarr_version", 3)
    if version not in (2, 3):
        raise ValueError(f"its arrays are in zarr {str(version)[:20]}, wanted 2 or 3")
    if row["codec"] not in _zarr.metadata.CODECS or type(row["checksum"]) is not bool:
        raise ValueError(f"its arrays have the unknown encoding {str(row)[:80]}")
    return Encoding(row["codec"], row["checksum"], int(version))


def _parse_items(row: Any) -> Items:
    """Returns the items with the arrays and the dataset."""
    state, dataset = row["state"], row["dataset"]
    names = [state] if isinstance(state, str) else state
    _parse_item_names([*(name for name in names if name), dataset])
    return Items(state if isinstance(state, str) else tuple(state), dataset)


def _parse_item_names(value: Any) -> tuple[str, ...]:
    """Returns names as a tuple; raises ValueError unless of different directories."""
    names = _parse_texts(value)
    if len(set(names)) < len(names):
        raise ValueError(f"it names an item twice: {str(value)[:80]}")
    for name in names:
        if not name or "/" in name or orbax_json.UNSAFE.search(name):
            raise ValueError(f"it has the unsafe item {name[:80]!r}")
    return names


def _parse_files(value: Any, what: str) -> dict[str, Any]:
    """Returns a map of files; raises ValueError for files outside of the checkpoint."""
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:80]} is not a map of {what}")
    for name in value:
        if orbax_json.UNSAFE.search(name):
            raise ValueError(f"its {what} have the unsafe name {name[:80]!r}")
    return dict(value)


def _parse_sizes(value: Any) -> dict[str, int]:
    """Returns the files of databases: file name -> bytes."""
    for name, size in (files := _parse_files(value, "files")).items():
        if type(size) is not int or size < 0:
            raise ValueError(f"{name[:80]!r} has {str(size)[:20]} bytes")
    return files


def history_rows(
    lineage: Iterable[Lineage], transforms: Iterable[str]
) -> dict[str, JSON]:
    """Returns the fields of lineage and transforms, if any, for `parse_history`."""
    origins = [origin._asdict() for origin in lineage]
    rows: dict[str, JSON] = {"lineage": origins, "transforms": list(transforms)}
    return {name: row for name, row in rows.items() if row}


def parse_history(
    data: Mapping[str, Any],
) -> tuple[tuple[Lineage, ...], tuple[str, ...]]:
    """Returns the checkpoints that the run started from, and the transforms."""
    origins = []
    for row in data.get("lineage", []):
        path, step, digest = row["path"], row["step"], row["digest"]
        if type(step) not in (int, type(None)) or type(digest) not in (str, type(None)):
            raise ValueError(f"{str(row)[:80]} is not a lineage")
        done = _parse_texts(row["transforms"])
        origins.append(Lineage(str(path), step, digest, done))
    return tuple(origins), _parse_texts(data.get("transforms", []))


def _parse_step(step: Any) -> int | None:
    """Returns the step number; None for a checkpoint saved on its own."""
    if type(step) not in (int, type(None)):
        raise ValueError(f"{str(step)[:80]} is not a step number")
    return cast("int | None", step)


def _parse_texts(value: Any) -> tuple[str, ...]:
    """Converts a list of strings to a tuple; raises ValueError for anything else."""
    if not isinstance(value, list) or not {str}.issuperset(map(type, value)):
        raise ValueError(f"{str(value)[:80]} is not a list of strings")
    return tuple(value)


@functools.cache
def _versions() -> dict[str, str]:
    versions = {}
    for name in ("jax", "flaxckpt", "flax", "optax", "tensorstore"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
