"""Converts a scanned tree to leaves: numbers, strings and unread arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from flaxckpt import _arrays, _state, _storage, errors
from flaxckpt._formats import file_leaves, plain
from flaxckpt._formats.msgpack.scanner import Array, ByteRun, Value
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import LeafPath

ELSEWHERE = "//GDAPlaceholder:"
"""Prefix of a string that stands for an array of several processes."""
_MAX_LEAVES = 5 * 10**5
_MAX_PATH_BYTES = 256 * 2**20  # for all leaf paths together, which share outer keys


def _is_sequence(names: Mapping[str, object]) -> bool:
    """Returns True for a map with keys 0, 1, …, Flax's form of lists and tuples."""
    # Sorted as text, 10 comes before 2.
    return bool(names) and all(str(i) in names for i in range(len(names)))


def walk(
    value: Value, keys: tuple[_state.tree.Key, ...] = ()
) -> Iterator[tuple[tuple[_state.tree.Key, ...], Value]]:
    """Yields the leaves and empty containers of a scanned tree, with their keys.

    Maps with keys 0, 1, … become lists; Flax's old named tuples become maps.
    """
    value = _unwrap_named_tuple(value)
    if isinstance(value, dict) and _is_sequence(value):
        value = [value[str(i)] for i in range(len(value))]
    if not value or not isinstance(value, dict | list):
        yield keys, value
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from walk(child, (*keys, _state.tree.Key(i, "index")))
    else:
        for name, child in value.items():
            yield from walk(child, (*keys, _state.tree.Key(name, "key")))


def _unwrap_named_tuple(value: Value) -> Value:
    """Returns a named tuple of Flax before 0.3 as a map, and other values unchanged."""
    if not isinstance(value, dict) or set(value) != {"name", "fields", "values"}:
        return value
    fields, values = value["fields"], value["values"]
    for part in (fields, values):
        if not isinstance(part, dict) or (part and not _is_sequence(part)):
            return value
    names = [fields[str(i)] for i in range(len(fields))]
    if type(value["name"]) is not str or len(values) != len(names):
        return value
    if any(type(name) is not str for name in names) or len(set(names)) != len(names):
        return value
    return {name: values[str(i)] for i, name in enumerate(names)}


def put(tree: dict[str, Value], keys: Sequence[str], value: Value) -> str | None:
    """Adds a leaf to nested maps; returns a conflict with other leaves instead."""
    inner: Value = tree
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            return "below the leaf of another"
    if keys[-1] in inner:
        is_leaf = not isinstance(inner[keys[-1]], dict)
        return "for the second time" if is_leaf else "above the leaves of others"
    inner[keys[-1]] = value
    return None


def make_stored(
    path: Path,
    file: Path,
    rows: Iterable[tuple[tuple[_state.tree.Key, ...], Value]],
    *,
    format_name: str,
    step: int | None,
    stamp: _storage.Stamp,
    shards: Iterable[_storage.Stamp] = (),
) -> Stored:
    """Returns the checkpoint of a scanned tree; the stamps are from before the scan."""
    leaves: dict[LeafPath, StoredLeaf] = {}
    faults: dict[LeafPath, str] = {}
    path_bytes = 0
    stamps = {file: stamp if stamp.path == file else _storage.Stamp(file, None)}
    stamps |= {one.path: one for one in shards}
    for keys, value in rows:
        name = _state.tree.join(keys)
        path_bytes += len(name)
        if len(leaves) >= _MAX_LEAVES or path_bytes > _MAX_PATH_BYTES:
            raise errors.DamagedCheckpointError(
                f"{file} holds more than {_MAX_LEAVES} leaves, or too long names"
            )
        if isinstance(value, ByteRun):
            faults[name] = f"is {value.size} bytes without an element type"
        elif name in leaves:
            faults[name] = "appears twice"
        else:
            leaves[name] = _leaf(path, stamps, name, keys, value)
    if faults:
        raise plain.unreadable_error(file, faults)
    table = {name: Leaf(leaf.info, (leaf,)) for name, leaf in leaves.items()}
    return plain.make_stored(
        path, table, format_name=format_name, step=step, stamp=stamp
    )


def _leaf(
    path: Path,
    stamps: Mapping[Path, _storage.Stamp],
    name: LeafPath,
    keys: tuple[_state.tree.Key, ...],
    value: Value,
) -> StoredLeaf:
    match value:
        case None | {} | []:
            empty = "None" if value is None else type(value).__name__
            return StoredLeaf(path, LeafInfo(name, keys, "empty", empty))
        case str():
            info = LeafInfo(name, keys, "string", "str")
            return StoredLeaf(path, info, value=value)
        case Array():
            dtype = _state.dtypes.stored_name(value.dtype)
            assert dtype is not None, value
            file = stamps[value.file]
            span = _arrays.read_plan.Span(
                file.path, 0, value.shape, dtype, value.pieces, file.identity
            )
            info = LeafInfo(
                name,
                keys,
                "scalar" if value.is_scalar else "array",
                "numpy.generic" if value.is_scalar else "numpy.ndarray",
                value.shape,
                value.dtype,
                # Single rows can be read.
                chunk_shape=tuple(
                    1 if axis == 0 else max(size, 1)
                    for axis, size in enumerate(value.shape)
                ),
            )
            return file_leaves.stored_leaf(path, info, span)
        case plain.Opened():
            info = LeafInfo(
                name,
                keys,
                "array",
                "numpy.ndarray",
                value.shape,
                value.dtype,
                chunk_shape=value.chunk_shape,
            )
            return StoredLeaf(path, info, value.open, check=value.check)
        case _:
            info = LeafInfo(
                name,
                keys,
                "scalar",
                type(value).__name__,
                (),
                _number_type(value),
                chunk_shape=(),
                weak_type=True,
            )
            return StoredLeaf(path, info, file_leaves.number_opener(value))


def _number_type(value: complex) -> str:
    """Returns the element type of a Python number, as numpy chooses it."""
    if isinstance(value, int) and value >= 2**63:
        return "uint64"
    return _state.dtypes.PYTHON_NUMBERS[type(value)]
