"""Converts a scanned tree to leaves: numbers, strings and unread arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from flaxckpt import _arrays, _state, _storage, errors
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable, StoredLeaf
from flaxckpt._types import JSON, LeafPath, Shape
from flaxckpt.formats._msgpack.scanner import Array, Run, Value
from flaxckpt.formats._reader import CheckpointMetadata, Stored

_MAX_LEAVES = 5 * 10**5
_MAX_PATH_BYTES = 256 * 2**20  # for all leaf paths together, which share outer keys


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """An array with a function to open it, unlike the plain bytes of `Array`.

    Attributes:
        shape: In elements.
        dtype: Name of the element type.
        chunk_shape: Shape of the smallest part that can be read.
        open: Opens the array; see `StoredLeaf`.
        check: Compares the array with its checksum, if any; see `StoredLeaf`.
    """

    shape: Shape
    dtype: str
    chunk_shape: Shape
    open: Callable[[ts.Context], ts.Future[ts.TensorStore]]
    check: Callable[[], None] | None = None


def _is_sequence(names: Mapping[str, object]) -> bool:
    """Returns True for a map with keys 0, 1, …, Flax's form of lists and tuples."""
    # Sorted as text, 10 comes before 2.
    return bool(names) and all(str(i) in names for i in range(len(names)))


def walk(
    value: Value, keys: tuple[_state.tree.Key, ...] = ()
) -> Iterator[tuple[tuple[_state.tree.Key, ...], Value]]:
    """Yields the leaves and empty containers of a scanned tree, with their keys.

    Maps with keys 0, 1, … become lists, in that order; Flax's old named tuples become
    maps.
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


def make_stored(
    path: Path,
    file: Path,
    rows: Iterable[tuple[tuple[_state.tree.Key, ...], Value]],
    *,
    format_name: str,
    step: int | None,
    stamp: _storage.Stamp,
) -> Stored:
    """Returns the checkpoint of a scanned tree.

    Args:
        path: The checkpoint.
        file: The scanned file.
        rows: The keys and the value of each leaf and empty container, as by `walk`.
        format_name: Value of `CheckpointMetadata.format`.
        step: Step number, or None.
        stamp: Stamp of the file, from before the scan.

    Raises:
        DamagedCheckpointError: Some leaves are not of Flax, or too many; lists the
            leaves.
    """
    leaves: dict[LeafPath, StoredLeaf] = {}
    faults: dict[LeafPath, str] = {}
    path_bytes = 0
    file_stamp = stamp if stamp.path == file else _storage.Stamp(file, None)
    for keys, value in rows:
        name = _state.tree.join(keys)
        path_bytes += len(name)
        if len(leaves) >= _MAX_LEAVES or path_bytes > _MAX_PATH_BYTES:
            raise errors.DamagedCheckpointError(
                f"{file} holds more than {_MAX_LEAVES} leaves, or too long names"
            )
        if isinstance(value, Run):
            faults[name] = f"is {value.size} bytes without an element type"
        elif name in leaves:
            faults[name] = "appears twice"
        else:
            leaves[name] = _leaf(path, file_stamp, name, keys, value)
    if faults:
        raise unreadable_error(file, faults)
    table = {name: Leaf(leaf.info, (leaf,)) for name, leaf in leaves.items()}
    return make_plain_stored(
        path, table, format_name=format_name, step=step, stamp=stamp
    )


def make_plain_stored(
    path: Path,
    table: LeafTable,
    *,
    format_name: str,
    step: int | None,
    stamp: _storage.Stamp,
    custom: Mapping[str, JSON] | None = None,
) -> Stored:
    """Returns the checkpoint of a leaf table without recorded containers.

    Args:
        path: The checkpoint.
        table: The leaves.
        format_name: Value of `CheckpointMetadata.format`.
        step: Step number, or None.
        stamp: Stamp of the file that describes the leaves, from before the read.
        custom: Metadata in the file, if any.
    """
    infos = [leaf.info for leaf in table.values()]
    return Stored(
        CheckpointMetadata(
            str(path),
            format_name,
            step,
            {info.path: info for info in infos},
            {},
            None,
            None,
            custom or {},
            False,
            sum(_arrays.layout.stored_bytes(info) for info in infos),
            unsupported={
                path: leaf.unsupported.form
                for path, leaf in table.items()
                if leaf.unsupported is not None
            },
        ),
        table,
        _state.tree.plain_structure(
            (i.path, i.keys, i.python_type if i.kind == "empty" else None)
            for i in infos
        ),
        stamp=stamp,
    )


def unreadable_error(
    path: Path, faults: Mapping[LeafPath, str]
) -> errors.DamagedCheckpointError:
    """Returns the error for leaves that cannot be read, with their faults."""
    count = f"{len(faults)} leaves" if len(faults) > 1 else "1 leaf"
    return errors.DamagedCheckpointError(
        f"{count} of {path} cannot be read:\n"
        + errors.rows(f"{name}: {reason}" for name, reason in faults.items())
        + "\nRestore another step."
    )


def _leaf(
    path: Path,
    file: _storage.Stamp,
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
            span = _arrays.byte_ranges.Span(
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
            return _arrays.byte_ranges.stored_leaf(path, info, span)
        case Opened():
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
            number = np.asarray(value)
            info = LeafInfo(
                name,
                keys,
                "scalar",
                type(value).__name__,
                (),
                number.dtype.name,
                chunk_shape=(),
                weak_type=True,
            )
            return StoredLeaf(path, info, functools.partial(_open_number, number))


def _open_number(
    number: np.ndarray[Any, Any], context: ts.Context
) -> ts.Future[ts.TensorStore]:
    return completed_future(ts.array(number, context=context))


def completed_future(store: ts.TensorStore) -> ts.Future[ts.TensorStore]:
    """Returns a future with the result `store`."""
    promise: ts.Promise[ts.TensorStore]
    future: ts.Future[ts.TensorStore]
    promise, future = ts.Promise.new()
    promise.set_result(store)
    return future
