"""Writer of Flax's msgpack, with the same bytes as `flax.serialization.to_bytes`.

Source: `flax/serialization.py`.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgpack

from flaxckpt import _state, errors
from flaxckpt._formats import file_layout, recognise
from flaxckpt._formats.msgpack import leaves, scanner
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath, Shape

MAX_CHUNK_BYTES = 2**30
"""Larger arrays are written in pieces of this size; Flax's `MAX_CHUNK_SIZE`."""


class Contents(NamedTuple):
    """A state for the writer: containers, leaf infos, and values that are no arrays."""

    structure: _state.tree.Node | LeafPath
    infos: Mapping[LeafPath, LeafInfo]
    numbers: Mapping[LeafPath, bool | int | float | complex]
    strings: Mapping[LeafPath, str]


def make_layout(name: str, contents: Contents) -> file_layout.FileLayout:
    """Returns the layout of a file; raises errors for what readers would misread."""
    _check(contents)
    file = file_layout.FileLayout(name)
    _add(file, contents, contents.structure)
    return file


def _parts(node: _state.tree.Node) -> list[tuple[str, _state.tree.Node | LeafPath]]:
    """Returns the items of a container's map."""
    names = ["value"] if node.is_box else [str(key.name) for key in node.keys]
    return list(zip(names, node.children, strict=True))


# ---- checks -------------------------------------------------------------------------


_NAMED_TUPLE = {"name", "fields", "values"}
_SURROGATES = re.compile(r"[\ud800-\udfff]")


def _check(contents: Contents) -> None:
    """Raises an error for names or values that readers would refuse or misread."""
    root = contents.structure
    if isinstance(root, str) or root.type == "None" or not root.children:
        root_text = (
            str(contents.infos[root]) if isinstance(root, str) else "an empty container"
        )
        raise errors.UnsupportedLeafError(
            {"": f"{root_text} as the whole state; msgpack files hold a dict"},
            "Put it in a dict, or convert to another format.",
        )
    names: dict[LeafPath, str] = {}
    keys = [key for key, _ in _parts(root)]
    if set(keys) == recognise.T5X_KEYS or set(keys[:2]) == recognise.T5X_KEYS:
        names |= dict.fromkeys(
            _leaf_paths(root, ()),
            "is in a dict of 'version' and 'optimizer', like T5X's files",
        )
    _check_names(contents, root, (), 0, names)
    if names:
        raise errors.LeafNameError(
            names,
            "Rename them, as transforms=[rename(pattern, new)], or convert"
            " to another format.",
        )
    values = {
        path: f"the string {text[:40]!r}, which {reason}"
        for path, text in contents.strings.items()
        if (reason := _fault_of_text(text))
    }
    if values:
        raise errors.UnsupportedLeafError(
            values,
            "Drop them, as transforms=[drop(pattern)], or convert to another format.",
        )


def _check_names(
    contents: Contents,
    node: _state.tree.Node | LeafPath,
    path: tuple[_state.tree.Key, ...],
    depth: int,
    faults: dict[LeafPath, str],
) -> None:
    """Adds leaves with names that readers would refuse or misread to `faults`."""
    if isinstance(node, str) or node.type == "None":
        return
    if depth >= _state.tree.MAX_DEPTH:
        reason = f"is in containers nested more than {_state.tree.MAX_DEPTH} deep"
        faults |= dict.fromkeys(_leaf_paths(node, path), reason)
        return
    parts = dict(_parts(node))
    if scanner.PARTS in parts:
        reason = f"is in a dict with the key {scanner.PARTS!r}, like arrays in parts"
        faults |= dict.fromkeys(_leaf_paths(node, path), reason)
    elif set(parts) == _NAMED_TUPLE and _is_named_tuple(contents, parts):
        reason = "is in a dict of 'name', 'fields' and 'values', like old named tuples"
        faults |= dict.fromkeys(_leaf_paths(node, path), reason)
    for (name, child), key in zip(parts.items(), node.keys, strict=True):
        inner = path if node.is_box else (*path, key)
        if fault := _fault_of_key(name):
            faults |= dict.fromkeys(_leaf_paths(child, inner), fault)
        _check_names(contents, child, inner, depth + 1, faults)


def _is_named_tuple(
    contents: Contents, parts: Mapping[str, _state.tree.Node | LeafPath]
) -> bool:
    if parts["name"] not in contents.strings:
        return False
    maps = [parts[name] for name in ("fields", "values")]
    return not any(isinstance(node, str) or node.type == "None" for node in maps)


def _fault_of_key(key: str) -> str | None:
    if not key:
        return "has an empty key"
    if _SURROGATES.search(key):
        return "is not valid Unicode"
    if len(key.encode()) > scanner.MAX_KEY_BYTES:
        return f"has a key of more than {scanner.MAX_KEY_BYTES} bytes"
    return f"has a NUL in the key {key[:60]!r}" if "\0" in key else None


def _fault_of_text(text: str) -> str | None:
    if text.startswith(leaves.ELSEWHERE):
        return "stands for an array in another file"
    return "is not valid Unicode" if _SURROGATES.search(text) else None


def _leaf_paths(
    node: _state.tree.Node | LeafPath, path: tuple[_state.tree.Key, ...]
) -> list[LeafPath]:
    """Returns the paths of all leaves and empty containers in a node."""
    places = _state.tree.leaf_places(node, path, _state.tree.join(path))
    return [place.path for place in places]


# ---- the file ---------------------------------------------------------------------


def _add(
    file: file_layout.FileLayout, contents: Contents, node: _state.tree.Node | LeafPath
) -> None:
    if isinstance(node, str):
        _add_leaf(file, contents, contents.infos[node])
    elif node.type == "None":
        file.add(_pack(None))
    else:
        parts = {
            name: functools.partial(_add, file, contents, child)
            for name, child in _parts(node)
        }
        _add_map(file, parts)


def _add_map(
    file: file_layout.FileLayout, parts: Mapping[str, Callable[[], None]]
) -> None:
    file.add(msgpack.Packer().pack_map_header(len(parts)))
    for key, add in parts.items():
        file.add(_pack(key))
        add()


def _add_leaf(file: file_layout.FileLayout, contents: Contents, info: LeafInfo) -> None:
    if info.path in contents.strings:
        file.add(_pack(contents.strings[info.path]))
    elif info.path in contents.numbers:
        file.add(_pack(contents.numbers[info.path]))
    else:
        _add_array(file, info)


def _add_array(file: file_layout.FileLayout, info: LeafInfo) -> None:
    shape, dtype = info.stored_shape, info.dtype or ""
    itemsize = _state.dtypes.item_size(dtype)
    elements = math.prod(shape)
    if info.python_type == "numpy.generic":
        _add_elements(file, info, shape, 0, itemsize, scanner.NUMPY_SCALAR)
        return
    if elements * itemsize <= MAX_CHUNK_BYTES:
        _add_elements(file, info, shape, 0, elements * itemsize)
        return
    step = max(1, MAX_CHUNK_BYTES // itemsize)
    chunks = [
        (start, min(start + step, elements)) for start in range(0, elements, step)
    ]

    def add_chunk(start: int, stop: int) -> None:
        bounds = (start * itemsize, stop * itemsize)
        _add_elements(file, info, (stop - start,), *bounds)

    sizes = {str(i): functools.partial(file.add, _pack(n)) for i, n in enumerate(shape)}
    parts = {
        str(i): functools.partial(add_chunk, *bounds) for i, bounds in enumerate(chunks)
    }
    _add_map(
        file,
        {
            scanner.PARTS: lambda: file.add(_pack(True)),
            "shape": lambda: _add_map(file, sizes),
            "chunks": lambda: _add_map(file, parts),
        },
    )


def _add_elements(
    file: file_layout.FileLayout,
    info: LeafInfo,
    shape: Shape,
    start: int,
    stop: int,
    kind: int = scanner.NDARRAY,
) -> None:
    """Appends the bytes from `start` to `stop` of a leaf, as an array."""
    name = _state.numpy_dtypes.to_numpy(info.dtype or "").name
    size = stop - start
    inner = b"\x93" + _pack(shape) + _pack(name) + _bin_header(size)
    file.add(_ext_header(kind, len(inner) + size) + inner)
    file.add_values(info.path, start, stop)


def _pack(value: object) -> bytes:
    if isinstance(value, complex):
        parts = msgpack.packb((value.real, value.imag))
        value = msgpack.ExtType(scanner.COMPLEX, parts)
    packed: bytes = msgpack.packb(value)
    return packed


def _bin_header(size: int) -> bytes:
    if size < 2**8:
        return struct.pack(">BB", 0xC4, size)
    if size < 2**16:
        return struct.pack(">BH", 0xC5, size)
    return struct.pack(">BI", 0xC6, size)


_FIXED_EXT = {size: head for head, size in scanner.FIXED_EXT.items()}


def _ext_header(kind: int, size: int) -> bytes:
    if size in _FIXED_EXT:
        return struct.pack(">BB", _FIXED_EXT[size], kind)
    if size < 2**8:
        return struct.pack(">BBB", 0xC7, size, kind)
    if size < 2**16:
        return struct.pack(">BHB", 0xC8, size, kind)
    return struct.pack(">BIB", 0xC9, size, kind)
