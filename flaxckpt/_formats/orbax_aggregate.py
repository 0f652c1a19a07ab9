"""Reader of the tree in msgpack of old Orbax: values, and names of zarr arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from flaxckpt import _storage, _zarr, errors
from flaxckpt._formats import items, native_arrays, plain, zarr2
from flaxckpt._formats.msgpack import leaves, scanner
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import StoredLeaf
from flaxckpt._types import LeafPath

_STANDS_FOR = ("PLACEHOLDER://", "AGGREGATED://")
"""Prefixes of strings in the aggregate file that name a zarr array."""


def read(path: Path, item: Path) -> Stored:
    """Reads a checkpoint without `_METADATA`, with only the aggregate file."""
    file = item / items.AGGREGATE
    stamp = _storage.stamp(file)
    tree = read_tree(file)
    names = list(dict.fromkeys(_array_names(tree)))
    ocdbt = (item / _zarr.metadata.DATABASE).is_file()
    opened: dict[str, plain.Opened] = {}
    if ocdbt:
        # Without `_METADATA` the flag is unknown, but these releases wrote all chunks.
        forms, blosc = native_arrays.array_forms(
            item, path, names, version=2, ocdbt=True
        )
        arrays = native_arrays.Arrays(item, 2, ocdbt=True, is_checked=True, blosc=blosc)
        for name, form in forms.items():
            open_array = functools.partial(arrays.open, name, form, path)
            opened[name] = plain.Opened(*form, open_array)
    else:
        faults: dict[LeafPath, str] = {}
        for name in names:
            with plain.fault_recorded(faults, name):
                opened[name] = zarr2.find_array(item, name)
        if faults:
            raise plain.unreadable_error(item, faults)
    tree = _insert(tree, opened)
    return leaves.make_stored(
        path, file, leaves.walk(tree), format_name="orbax", step=None, stamp=stamp
    )


def inline_leaves(path: Path, item: Path) -> dict[LeafPath, StoredLeaf]:
    """Returns the leaves with values in the aggregate file, beside `_METADATA`."""
    file = item / items.AGGREGATE
    tree = _insert(read_tree(file), {})
    stamp = _storage.stamp(file)
    stored = leaves.make_stored(
        path, file, leaves.walk(tree), format_name="", step=None, stamp=stamp
    )
    return {
        name: leaf.source
        for name, leaf in stored.table.items()
        if isinstance(leaf.source, StoredLeaf) and leaf.info.kind != "empty"
    }


def read_tree(file: Path) -> scanner.Value:
    """Returns the content of a file of msgpack, which must be inside its directory."""
    try:
        zarr2.check_inside(file.parent, file)
    except ValueError as error:
        raise errors.DamagedCheckpointError(str(error)) from None
    with scanner.scanner(file) as scan:
        tree = scan.value()
        scan.leave()
    return tree


def _array_names(value: scanner.Value) -> Iterator[str]:
    for _, leaf in leaves.walk(value):
        if isinstance(leaf, str) and leaf.startswith(_STANDS_FOR):
            yield leaf.partition("://")[2]


def _insert(value: scanner.Value, arrays: Mapping[str, plain.Opened]) -> scanner.Value:
    """Returns `value` with arrays in place of their names; None if not in `arrays`."""
    if isinstance(value, dict):
        return {key: _insert(child, arrays) for key, child in value.items()}
    if isinstance(value, list):
        return [_insert(child, arrays) for child in value]
    if isinstance(value, str) and value.startswith(_STANDS_FOR):
        return arrays.get(value.partition("://")[2])
    return value
