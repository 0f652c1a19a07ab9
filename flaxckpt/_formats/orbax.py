"""Reader of trees written by Orbax: the leaves, and the forms of arrays."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from flaxckpt import _formats, _state, _storage, _zarr, errors
from flaxckpt._formats import items, native_arrays, orbax_files, orbax_json, plain
from flaxckpt._formats.orbax_files import Split, TreeMetadata, TreeMetadataRow
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import LeafPath
from flaxckpt._zarr.metadata import ArrayForm

_log = logging.getLogger(__name__)


def read(path: Path, item: Path) -> Stored:
    """Reads all but the arrays of a tree, without the metadata of the step `path`."""
    if not (item / items.TREE).is_file():
        # Through the door: few checkpoints need its readers of arrays.
        return _formats.orbax_aggregate.read(path, item)
    stamp = _storage.stamp(item / items.TREE)
    tree = _read_tree(item, path)
    rows = tree.rows
    inline: Mapping[LeafPath, StoredLeaf] = {}
    if (item / items.AGGREGATE).is_file():
        inline = _formats.orbax_aggregate.inline_leaves(path, item)
    version, ocdbt = tree.zarr_version, tree.ocdbt
    if ocdbt is None:
        ocdbt = (item / _zarr.metadata.DATABASE).is_file()
    names = [row.name for row in rows if row.is_array and row.path not in inline]
    forms, blosc = native_arrays.array_forms(
        item, path, names, version=version, ocdbt=ocdbt
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
        item, version, ocdbt, strict=tree.strict, is_checked=True, blosc=blosc
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


def _read_tree(item: Path, checkpoint: Path) -> TreeMetadata:
    data = items.read_json(item / items.TREE, checkpoint)
    try:
        tree = TreeMetadata.from_json(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.DamagedCheckpointError(
            f"{item / items.TREE} does not describe a tree:"
            f" {errors.one_line(error, 200)}"
        ) from None
    # A partial save leaves placeholders at the prefixes of paths saved later.
    rows = tree.rows
    inner = {row.keys[:n] for row in rows for n in range(len(row.keys))}
    rows = sorted(
        (row for row in rows if row.keys not in inner or len(rows) == 1),
        key=lambda row: [_rank(key) for key in row.keys],
    )
    _check_places(item, rows)
    return tree._replace(rows=rows)


def _check_places(item: Path, rows: Sequence[TreeMetadataRow]) -> None:
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
    return ("", int(str(key.name))) if key.kind == "index" else (str(key.name), 0)


def _prng_impls(item: Path) -> dict[str, str]:
    directory = item / "array_metadatas"
    if not directory.is_dir():
        return {}
    for path in sorted(directory.iterdir())[:1]:
        try:
            return orbax_files.parse_impls(items.read_json(path, item))
        except (AttributeError, TypeError) as error:
            raise errors.DamagedCheckpointError(
                f"{path} does not describe arrays:"
                f" {errors.one_line(error, 100)}; restore another"
                " step"
            ) from None
    return {}


def _splits(item: Path, checkpoint: Path) -> dict[str, Split]:
    """Returns the splits of arrays, as far as recorded: param name -> split."""
    file = item / items.SHARDING
    if not file.is_file():
        return {}
    try:
        return orbax_files.parse_splits(items.read_json(file, checkpoint))
    except errors.DamagedCheckpointError as error:
        _log.info("the shardings of arrays are not known: %s", error)
        return {}


def _add_split(info: LeafInfo, split: Split | None) -> LeafInfo:
    if split is None or len(split.parts) > len(info.shape):
        return info
    shard_shape = split.shard_shape(info.shape)
    return dataclasses.replace(info, mesh_axes=split.mesh_axes, shard_shape=shard_shape)


def _leaf_info(
    item: Path,
    row: TreeMetadataRow,
    forms: Mapping[str, ArrayForm],
    impls: Mapping[str, str],
) -> LeafInfo:
    path = row.path
    if empty := row.empty_type:
        return LeafInfo(path, row.keys, "empty", empty)
    if row.value_type == "string":
        return LeafInfo(path, row.keys, "string", "str")
    shape, dtype, chunk_shape = forms[row.name]
    impl = impls.get(row.name)
    try:
        python_type = row.python_type(dtype)
        if impl:
            _state.dtypes.check_keys(impl, shape, dtype)
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
