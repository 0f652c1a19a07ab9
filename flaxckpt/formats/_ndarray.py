"""Msgpack as Flax writes it: small things are read, arrays are found where they lie.

Nothing in a file is trusted: sizes are compared with what is left of the file, and
counts with fixed limits, before anything is made of them. What an array holds is never
read here, so that a file of any size is scanned in the time its names take.

Source: `flax.serialization` (the extension types and the arrays in parts).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import tensorstore as ts

from flaxckpt import _dtypes, _layout, _spans, _storage, _tree, errors
from flaxckpt._info import CheckpointMetadata, Leaf, LeafInfo, Stored, StoredLeaf
from flaxckpt._types import LeafPath, Shape

MAX_NODES = 2 * 10**6
"""Values in one file, those in containers included."""

_MAX_LEAVES = 5 * 10**5
_MAX_TEXT_BYTES = 64 * 2**20
_MAX_PATH_BYTES = 256 * 2**20  # of all leaf paths together: keys high up recur in them
_MAX_KEY_BYTES = 4096
_MAX_RANK = 32
_PARTS = "__msgpack_chunked_array__"

_NDARRAY, _COMPLEX, _NUMPY_SCALAR, _TUPLE = 1, 2, 3, 4

# First byte -> what it begins, and how its size or its value follows.
_HEADS: dict[int, tuple[str, str]] = {
    0xC4: ("bin", ">B"),
    0xC5: ("bin", ">H"),
    0xC6: ("bin", ">I"),
    0xC7: ("ext", ">B"),
    0xC8: ("ext", ">H"),
    0xC9: ("ext", ">I"),
    0xCA: ("number", ">f"),
    0xCB: ("number", ">d"),
    0xCC: ("number", ">B"),
    0xCD: ("number", ">H"),
    0xCE: ("number", ">I"),
    0xCF: ("number", ">Q"),
    0xD0: ("number", ">b"),
    0xD1: ("number", ">h"),
    0xD2: ("number", ">i"),
    0xD3: ("number", ">q"),
    0xD9: ("str", ">B"),
    0xDA: ("str", ">H"),
    0xDB: ("str", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}
_CONSTANTS: dict[int, bool | None] = {0xC0: None, 0xC2: False, 0xC3: True}
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


class Run(NamedTuple):
    """Some bytes of a file.

    Attributes:
        offset: Where they begin.
        size: How many they are.
    """

    offset: int
    size: int


class Array(NamedTuple):
    """An array in a file.

    Attributes:
        pieces: The runs of bytes that hold its elements, one after another.
        shape: In elements.
        dtype: Name of the element type.
        is_scalar: Whether it stands for a numpy scalar.
    """

    pieces: tuple[Run, ...]
    shape: Shape
    dtype: str
    is_scalar: bool = False


Value: TypeAlias = Any
"""A dict (str -> `Value`), list, `Array`, `Run`, number, str or None."""


@contextlib.contextmanager
def scanner(path: Path) -> Iterator[Scanner]:
    """Opens a file to be scanned.

    Raises:
        DamagedCheckpointError: It is not there, or is no plain file.
    """
    if not path.is_file():
        raise errors.DamagedCheckpointError(
            f"{path} is no plain file; restore another step"
        )
    with path.open("rb", buffering=2**16) as file:
        yield Scanner(file, path)


class Scanner:
    """Goes through a file value by value.

    Attributes:
        position: Where the next value begins, in bytes.
        size: The size of the file.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self.position = 0
        self.size = file.seek(0, 2)
        file.seek(0)
        self._end = self.size
        self._nodes = 0
        self._text_bytes = 0

    def value(self) -> Value:
        """The next value, with all that is in it.

        Raises:
            DamagedCheckpointError: There is none, or none that Flax writes.
        """
        return self._value(0)

    def head(self) -> tuple[str, Any]:
        """What the next value is, and its size or its value."""
        byte = self._bytes(1)[0]
        if byte < 0x80:
            return "number", byte
        if byte < 0x90:
            return "map", byte & 0x0F
        if byte < 0xA0:
            return "array", byte & 0x0F
        if byte < 0xC0:
            return "str", byte & 0x1F
        if byte >= 0xE0:
            return "number", byte - 0x100
        if byte in _CONSTANTS:
            return "number", _CONSTANTS[byte]
        if byte in _FIXED_EXT:
            return "ext", _FIXED_EXT[byte]
        if byte not in _HEADS:
            raise self.fault(f"the byte {byte:#x}, which begins nothing", back=1)
        kind, layout = _HEADS[byte]
        [size] = struct.unpack(layout, self._bytes(struct.calcsize(layout)))
        return kind, size

    def text(self, kind: str, size: int) -> str:
        """What follows the head of a string."""
        if kind != "str":
            raise self.fault(f"{_a(kind)} where a string belongs")
        self._text_bytes += self._left(size)
        if self._text_bytes > _MAX_TEXT_BYTES:
            raise self.fault(f"more than {_MAX_TEXT_BYTES} bytes of text")
        try:
            return self._bytes(size).decode()
        except UnicodeDecodeError:
            raise self.fault("a string that is no UTF-8", back=size) from None

    def key(self) -> str:
        """The next value, which must be a string that can be part of a leaf path."""
        self._count(1)
        kind, size = self.head()
        if kind == "str" and size > _MAX_KEY_BYTES:
            raise self.fault(f"a key of {size} bytes")
        key = self.text(kind, size)
        if not key:
            raise self.fault("an empty key")
        for character, name in (("/", "a '/'"), ("\0", "a NUL")):
            if character in key:
                raise self.fault(f"the key {key[:60]!r}, which contains {name}")
        return key

    def enter(self, run: Run) -> None:
        """Goes to a run of bytes: what is scanned next lies within."""
        self._seek(run.offset)
        self._end = run.offset + run.size

    def leave(self, *, end: int | None = None) -> None:
        """Asserts that the run has been scanned to its end, and goes on behind it."""
        if self.position != self._end:
            raise self.fault(f"{self._end - self.position} bytes more than belong here")
        self._end = self.size if end is None else end

    def fault(self, found: str, *, back: int = 0) -> errors.DamagedCheckpointError:
        """The error that says what was found where it should not be."""
        return errors.DamagedCheckpointError(
            f"{self._path} is damaged or was written by something else: at byte"
            f" {self.position - back} found {found}; restore another step"
        )

    def _value(self, depth: int) -> Value:
        self._count(1)
        kind, size = self.head()
        if kind == "number":
            return size
        if kind == "str":
            return self.text(kind, size)
        if kind == "bin":
            return self._run(size)
        if kind == "ext":
            return self._ext(size, depth)
        if depth >= _tree.MAX_DEPTH:
            raise self.fault(f"containers nested more than {_tree.MAX_DEPTH} deep")
        if kind == "array":
            self._count(self._left(size), add=False)
            return [self._value(depth + 1) for _ in range(size)]
        return self._map(size, depth)

    def _map(self, size: int, depth: int) -> Value:
        self._count(self._left(2 * size), add=False)
        found: dict[str, Value] = {}
        for _ in range(size):
            key = self.key()
            if key in found:
                raise self.fault(f"the key {key[:60]!r} for the second time")
            found[key] = self._value(depth + 1)
        return self._joined(found) if _PARTS in found else found

    def _ext(self, size: int, depth: int) -> Value:
        [code] = struct.unpack(">b", self._bytes(1))
        self._left(size)
        end = self._end
        self.enter(Run(self.position, size))
        match code:
            case 1 | 3:
                value: Value = self._array(is_scalar=code == _NUMPY_SCALAR)
            case 2:
                value = self._complex()
            case 4:
                value = self._value(depth + 1)
                if not isinstance(value, list):
                    raise self.fault("a tuple that is none")
            case -1:
                raise self.fault("a timestamp, which no state holds")
            case _:
                raise self.fault(f"a value of the unknown extension type {code}")
        self.leave(end=end)
        return value

    def _array(self, *, is_scalar: bool) -> Array:
        if self.head() != ("array", 3):
            raise self.fault("an array that is not its shape, type and values")
        shape = self._shape(self._value(_tree.MAX_DEPTH - 2))
        kind, size = self.head()
        name = self.text(kind, size)
        try:
            itemsize = _dtypes.to_numpy(name).itemsize
        except errors.OptionError:
            raise self.fault(f"an array of the element type {name[:40]!r}") from None
        kind, size = self.head()
        if kind != "bin" or math.prod(shape) * itemsize != size:
            raise self.fault(
                f"{size if kind == 'bin' else 'no'} bytes for {name}{list(shape)}"
            )
        if is_scalar and shape:
            raise self.fault(f"a numpy scalar of shape {list(shape)}")
        return Array((self._run(size),), shape, name, is_scalar)

    def _shape(self, sizes: Value) -> Shape:
        if isinstance(sizes, dict) and list(sizes) == [
            str(i) for i in range(len(sizes))
        ]:
            sizes = list(sizes.values())
        if not isinstance(sizes, list) or len(sizes) > _MAX_RANK:
            raise self.fault("an array without a shape")
        for size in sizes:
            if type(size) is not int or not 0 <= size < 2**48:
                raise self.fault(f"an array with {str(size)[:40]} elements on an axis")
        return tuple(sizes)

    def _complex(self) -> complex:
        if self.head() != ("array", 2):
            raise self.fault("a complex number that is not two numbers")
        parts = [self._value(_tree.MAX_DEPTH) for _ in range(2)]
        for part in parts:
            if type(part) not in (int, float):
                raise self.fault("a complex number that is not two numbers")
        return complex(*parts)

    def _joined(self, found: Mapping[str, Value]) -> Array:
        """The array that `found` has in parts."""
        parts = found.get("chunks")
        if set(found) != {_PARTS, "shape", "chunks"} or not isinstance(parts, dict):
            raise self.fault("an array in parts that lacks some of them")
        shape = self._shape(found["shape"])
        if list(parts) != [str(i) for i in range(len(parts))] or not parts:
            raise self.fault("an array in parts that lacks some of them")
        arrays = list(parts.values())
        for part in arrays:
            if not isinstance(part, Array) or part.is_scalar or len(part.shape) != 1:
                raise self.fault("an array in parts that are none")
        types = {part.dtype for part in arrays}
        count = sum(part.shape[0] for part in arrays)
        if len(types) != 1 or count != math.prod(shape):
            raise self.fault(
                f"an array {list(shape)} in parts of {count} elements and the types"
                f" {', '.join(sorted(types))}"
            )
        pieces = tuple(piece for part in arrays for piece in part.pieces)
        return Array(pieces, shape, arrays[0].dtype)

    # ---- bytes

    def _count(self, nodes: int, *, add: bool = True) -> None:
        if self._nodes + nodes > MAX_NODES:
            raise self.fault(f"more than {MAX_NODES} values")
        if add:
            self._nodes += nodes

    def _left(self, size: int) -> int:
        """`size`, if as many bytes are left."""
        if size > self._end - self.position:
            raise self.fault(
                f"the beginning of {size} bytes or more, but only"
                f" {self._end - self.position} follow"
            )
        return size

    def _run(self, size: int) -> Run:
        run = Run(self.position, self._left(size))
        self._seek(run.offset + size)
        return run

    def _seek(self, position: int) -> None:
        self._file.seek(position)
        self.position = position

    def _bytes(self, size: int) -> bytes:
        content = self._file.read(self._left(size))
        self.position += size
        if len(content) != size:
            raise self.fault("the end of the file, which has become shorter")
        return content


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "ae" else f"a {kind}"


# ---- leaves of a scanned tree -----------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """An array that is kept somewhere else than in the scanned file.

    Attributes:
        shape: In elements.
        dtype: Name of the element type.
        chunk_shape: What is read at once.
        open: Opens it; see `StoredLeaf`.
    """

    shape: Shape
    dtype: str
    chunk_shape: Shape
    open: Callable[[ts.Context], ts.Future[ts.TensorStore]]


def is_sequence(names: Mapping[str, object]) -> bool:
    """Whether the keys of a map are 0, 1, …, as Flax writes lists and tuples."""
    # Sorted as text, 10 comes before 2.
    return bool(names) and all(str(i) in names for i in range(len(names)))


def walk(tree: Value) -> Iterator[tuple[tuple[_tree.Key, ...], Value]]:
    """The leaves and empty containers of what was scanned, each with its keys.

    Maps whose keys are 0, 1, … are lists, in that order; so are Flax's old named
    tuples maps.
    """
    return _walk(tree, ())


def _walk(
    value: Value, keys: tuple[_tree.Key, ...]
) -> Iterator[tuple[tuple[_tree.Key, ...], Value]]:
    value = _without_name(value)
    if isinstance(value, dict) and is_sequence(value):
        value = [value[str(i)] for i in range(len(value))]
    if not value or not isinstance(value, dict | list):
        yield keys, value
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from _walk(child, (*keys, _tree.Key(i, "index")))
    else:
        for name, child in value.items():
            yield from _walk(child, (*keys, _tree.Key(name, "key")))


def _without_name(value: Value) -> Value:
    """What is in a named tuple as Flax wrote it before 0.3; all else unchanged."""
    if not isinstance(value, dict) or set(value) != {"name", "fields", "values"}:
        return value
    fields, values = value["fields"], value["values"]
    for part in (fields, values):
        if not isinstance(part, dict) or (part and not is_sequence(part)):
            return value
    names = [fields[str(i)] for i in range(len(fields))]
    if type(value["name"]) is not str or len(values) != len(names):
        return value
    if any(type(name) is not str for name in names) or len(set(names)) != len(names):
        return value
    return {name: values[str(i)] for i, name in enumerate(names)}


def stored(
    path: Path,
    file: Path,
    tree: Value,
    *,
    format_name: str,
    step: int | None,
    stamp: _storage.Stamp,
) -> Stored:
    """A checkpoint whose leaves were scanned.

    Args:
        path: The checkpoint.
        file: The file that was scanned.
        tree: What was found in it.
        format_name: What `CheckpointMetadata.format` says.
        step: Its number, if it is known.
        stamp: Of the file, from before it was scanned.

    Raises:
        DamagedCheckpointError: Leaves are nothing that Flax writes; they are named.
    """
    leaves: dict[LeafPath, StoredLeaf] = {}
    faults: dict[LeafPath, str] = {}
    path_bytes = 0
    for keys, value in walk(tree):
        name = _tree.join(keys)
        path_bytes += len(name)
        if len(leaves) >= _MAX_LEAVES or path_bytes > _MAX_PATH_BYTES:
            raise errors.DamagedCheckpointError(
                f"{file} holds more than {_MAX_LEAVES} leaves, or absurdly long names"
            )
        if isinstance(value, Run):
            faults[name] = f"is {value.size} bytes without a type"
        elif name in leaves:
            faults[name] = "is there twice"
        else:
            leaves[name] = _leaf(path, file, name, keys, value)
    if faults:
        raise errors.DamagedCheckpointError(
            f"{len(faults)} leaves of {file} are not as Flax writes them:\n"
            + errors.rows(f"{name}: {reason}" for name, reason in faults.items())
            + "\nRestore another step."
        )
    infos = [leaf.info for leaf in leaves.values()]
    return Stored(
        CheckpointMetadata(
            str(path),
            format_name,
            step,
            {info.path: info for info in infos},
            {},
            None,
            None,
            {},
            False,
            sum(_layout.stored_bytes(info) for info in infos),
        ),
        {name: Leaf(leaf.info, (leaf,)) for name, leaf in leaves.items()},
        _tree.plain_structure(
            (i.path, i.keys, i.python_type if i.kind == "empty" else None)
            for i in infos
        ),
        stamp=stamp,
    )


def _leaf(
    path: Path, file: Path, name: LeafPath, keys: tuple[_tree.Key, ...], value: Value
) -> StoredLeaf:
    match value:
        case None | {} | []:
            empty = "None" if value is None else type(value).__name__
            return StoredLeaf(path, LeafInfo(name, keys, "empty", empty))
        case str():
            info = LeafInfo(name, keys, "string", "str")
            return StoredLeaf(path, info, value=value)
        case Array():
            dtype = _dtypes.stored_name(value.dtype)
            assert dtype is not None, value
            span = _spans.Span(file, 0, value.shape, dtype, value.pieces)
            info = LeafInfo(
                name,
                keys,
                "scalar" if value.is_scalar else "array",
                "numpy.generic" if value.is_scalar else "numpy.ndarray",
                value.shape,
                value.dtype,
                # Rows can be read one by one.
                chunk_shape=tuple(
                    1 if axis == 0 else max(size, 1)
                    for axis, size in enumerate(value.shape)
                ),
            )
            return StoredLeaf(path, info, functools.partial(_spans.opened, [span]))
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
            return StoredLeaf(path, info, value.open)
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
            return StoredLeaf(path, info, functools.partial(_constant, number))


def _constant(
    number: np.ndarray[Any, Any], context: ts.Context
) -> ts.Future[ts.TensorStore]:
    promise: ts.Promise[ts.TensorStore]
    future: ts.Future[ts.TensorStore]
    promise, future = ts.Promise.new()
    promise.set_result(ts.array(number, context=context))
    return future


# ---- what a file begins with ------------------------------------------------------


def first_keys(path: Path) -> Sequence[str] | None:
    """The keys of the map that the file `path` begins with, as far as they are cheap.

    None: it is no plain file, or begins with no map of strings. Only numbers and
    strings are passed over on the way to the next key.
    """
    found: list[str] = []
    try:
        with scanner(path) as scan:
            kind, size = scan.head()
            if kind != "map":
                return None
            for _ in range(min(size, 2)):
                found.append(scan.key())
                kind, length = scan.head()
                if kind == "str":
                    scan.text(kind, length)
                elif kind != "number":
                    break
    except (errors.DamagedCheckpointError, PermissionError):
        return found or None
    return found or None


def begins_with_record(path: Path) -> bool:
    """Whether the file `path` begins with a list of two, the first a list of strings.

    So do streams of records `[key, value]`.
    """
    try:
        with scanner(path) as scan:
            if scan.head() != ("array", 2):
                return False
            kind, size = scan.head()
            return kind == "array" and size > 0 and bool(scan.key())
    except (errors.DamagedCheckpointError, PermissionError):
        return False
