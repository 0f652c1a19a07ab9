"""Reader of trees written by Orbax: the leaves, and the forms of arrays."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxckpt import _arrays, _formats, _state, _storage, _zarr, errors
from flaxckpt._formats import items, native_arrays, orbax_json, plain
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import LeafPath
from flaxckpt._zarr.metadata import ArrayForm

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    keys: tuple[_state.tree.Key, ...]
    value_type: str

    @property
    def path(self) -> LeafPath:
        return _state.tree.join(self.keys)

    @property
    def name(self) -> str:
        return orbax_json.param_name(self.keys)

    @property
    def is_array(self) -> bool:
        is_empty = orbax_json.empty_type(self.value_type) is not None
        return self.value_type != "string" and not is_empty


def read(path: Path, item: Path) -> Stored:
    """Reads everything but the arrays of a tree, without the metadata of the step.

    Args:
        path: The checkpoint.
        item: The directory of the tree: the checkpoint itself, or an item.

    Raises:
        DamagedCheckpointError: A file is missing or malformed.
    """
    if not (item / items.TREE).is_file():
        # Through the door: few checkpoints need its readers of arrays.
        return _formats.orbax_aggregate.read(path, item)
    stamp = _storage.stamp(item / items.TREE)
    metadata = items.read_json(item / items.TREE, path)
    rows = _read_rows(item, metadata)
    inline: Mapping[LeafPath, StoredLeaf] = {}
    if (item / items.AGGREGATE).is_file():
        inline = _formats.orbax_aggregate.inline_leaves(path, item)
    version = 3 if metadata.get("use_zarr3") else 2
    ocdbt = metadata.get("use_ocdbt")
    if ocdbt is None:
        ocdbt = (item / _zarr.metadata.DATABASE).is_file()
    names = [row.name for row in rows if row.is_array and row.path not in inline]
    forms, blosc = native_arrays.array_forms(
        item, path, names, version=version, ocdbt=bool(ocdbt)
    )
    impls = _prng_impls(item)
    splits = _splits(item, path)
    infos = [
        dataclasses.replace(inline[row.path].info, keys=row.keys)
        if row.path in inline
        else _add_split(_leaf_info(item, row, forms, impls), splits.get(row.name))
        for row in rows
    ]
    arrays = native_arrays.Arrays(
        item,
        version,
        bool(ocdbt),
        strict=bool(metadata.get("store_array_data_equal_to_fill_value")),
        is_checked=True,
        blosc=blosc,
    )
    others = [info for info in infos if info.path not in inline]
    names = [orbax_json.param_name(info.keys) for info in others]
    strings = items.read_strings(item, path, names, others)
    table = native_arrays.leaf_table(path, names, others, arrays, strings)
    for info in infos:
        if info.path in inline:
            source = dataclasses.replace(inline[info.path], info=info)
            table[info.path] = Leaf(info, (source,))
    table = {info.path: table[info.path] for info in infos}
    return plain.make_stored(path, table, format_name="orbax", step=None, stamp=stamp)


# ---- the tree in `_METADATA` ------------------------------------------------------


def _read_rows(item: Path, metadata: Mapping[str, Any]) -> list[_Row]:
    try:
        rows = [
            _Row(orbax_json.parse_keys(row), str(row["value_metadata"]["value_type"]))
            for row in metadata["tree_metadata"].values()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.DamagedCheckpointError(
            f"{item / items.TREE} does not describe a tree:"
            f" {errors.one_line(error, 200)}"
        ) from None
    # A partial save leaves placeholders at the prefixes of paths saved later.
    inner = {row.keys[:n] for row in rows for n in range(len(row.keys))}
    rows = sorted(
        (row for row in rows if row.keys not in inner or len(rows) == 1),
        key=lambda row: [_rank(key) for key in row.keys],
    )
    _check_places(item, rows)
    return rows


def _check_places(item: Path, rows: Sequence[_Row]) -> None:
    """Raises DamagedCheckpointError for leaves that share a path or an array."""
    faults: dict[LeafPath, str] = {}
    seen: dict[str, LeafPath] = {}
    paths: set[LeafPath] = set()
    for row in rows:
        path = row.path
        if path in paths:
            faults[path] = "appears twice"
        paths.add(path)
        if row.is_array and (other := seen.setdefault(row.name, path)) != path:
            faults[path] = f"has the same place as {other}"
    if faults:
        raise plain.unreadable_error(item, faults)


def _rank(key: _state.tree.Key) -> tuple[str, int]:
    return ("", int(key.name)) if key.kind == "index" else (str(key.name), 0)


def _prng_impls(item: Path) -> dict[str, str]:
    directory = item / "array_metadatas"
    if not directory.is_dir():
        return {}
    impls = {}
    for path in sorted(directory.iterdir())[:1]:
        try:
            for row in items.read_json(path, item).get("array_metadatas", []):
                array = row.get("array_metadata", {})
                impl = (array.get("ext_metadata") or {}).get("random_key_impl")
                if isinstance(impl, str):
                    impls[str(array.get("param_name"))] = impl
        except (AttributeError, TypeError) as error:
            raise errors.DamagedCheckpointError(
                f"{path} does not describe arrays:"
                f" {errors.one_line(error, 100)}; restore another"
                " step"
            ) from None
    return impls


def _splits(item: Path, checkpoint: Path) -> dict[str, orbax_json.Split]:
    """Returns the splits of arrays, as far as recorded: param name -> split."""
    file = item / items.SHARDING
    if not file.is_file():
        return {}
    try:
        return orbax_json.parse_splits(items.read_json(file, checkpoint))
    except errors.DamagedCheckpointError as error:
        _log.info("the shardings of arrays are not known: %s", error)
        return {}


def _add_split(info: LeafInfo, split: orbax_json.Split | None) -> LeafInfo:
    if split is None or len(split.parts) > len(info.shape):
        return info
    shard_shape = split.shard_shape(info.shape)
    return dataclasses.replace(info, mesh_axes=split.mesh_axes, shard_shape=shard_shape)


def _leaf_info(
    item: Path, row: _Row, forms: Mapping[str, ArrayForm], impls: Mapping[str, str]
) -> LeafInfo:
    path = row.path
    if empty := orbax_json.empty_type(row.value_type):
        return LeafInfo(path, row.keys, "empty", empty)
    if row.value_type == "string":
        return LeafInfo(path, row.keys, "string", "str")
    shape, dtype, chunk_shape = forms[row.name]
    impl = impls.get(row.name)
    try:
        python_type = orbax_json.python_type(row.value_type, dtype)
        if impl:
            _arrays.forms.check_keys(impl, shape, dtype)
    except ValueError as error:
        raise errors.DamagedCheckpointError(f"{item}: {path}: {error}") from None
    is_scalar = python_type not in ("jax.Array", "numpy.ndarray")
    return LeafInfo(
        path,
        row.keys,
        "prng_key" if impl else "scalar" if is_scalar else "array",
        python_type,
        shape[:-1] if impl else shape,
        dtype,
        chunk_shape=chunk_shape,
        weak_type=is_scalar,
        prng_impl=impl,
    )
