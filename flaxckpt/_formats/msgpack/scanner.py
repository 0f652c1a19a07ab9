"""Scanner of Flax's msgpack: reads names and small values, and locates the arrays.

No file is trusted: before use, sizes are compared with the rest of the file, and counts
with fixed limits. The values of arrays are never read here, so the time of a scan
depends on the number of names, not on the size of the file.

Source: `flax.serialization` (the extension types and the arrays in parts).
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from flaxckpt import _state, _storage, errors
from flaxckpt._types import Shape

MAX_NODES = 2 * 10**6
"""The most values in a file, including values in containers."""

_MAX_TEXT_BYTES = 64 * 2**20
MAX_KEY_BYTES = 4096
_MAX_RANK = 32
PARTS = "__msgpack_chunked_array__"

# Extension types of Flax, of Orbax (tuples) and of msgpack itself (timestamps).
NDARRAY, COMPLEX, NUMPY_SCALAR, _TUPLE, _TIMESTAMP = 1, 2, 3, 4, -1

# First byte -> kind of value, and the struct format of the size or the number after it.
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
FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


class ByteRun(NamedTuple):
    """A run of bytes in a file."""

    offset: int
    size: int


class Array(NamedTuple):
    """An array in a file; `pieces` are the bytes of its elements, in order."""

    pieces: tuple[ByteRun, ...]
    shape: Shape
    dtype: str
    file: Path
    is_scalar: bool = False


Value: TypeAlias = Any
"""A dict (str -> `Value`), list, `Array`, `ByteRun`, number, str or None."""


@contextlib.contextmanager
def scanner(path: Path, *, buffer_bytes: int = 2**16) -> Iterator[Scanner]:
    if not path.is_file():
        raise errors.DamagedCheckpointError(
            f"{path} is not a regular file; restore another step"
        )
    with _storage.of(path).open_file(path, buffer_bytes=buffer_bytes) as file:
        yield Scanner(file, path)


class Scanner:
    """Scans a file value by value; `position` and `size` are in bytes."""

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
        """Returns the next value, including nested values."""
        return self._value(0)

    def head(self) -> tuple[str, Any]:
        """Returns the kind of the next value, and its size; of a number, the number."""
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
        if byte in FIXED_EXT:
            return "ext", FIXED_EXT[byte]
        if byte not in _HEADS:
            raise self.fault(f"the byte {byte:#x}, which is not valid msgpack", back=1)
        kind, layout = _HEADS[byte]
        [size] = struct.unpack(layout, self._bytes(struct.calcsize(layout)))
        return kind, size

    def value_type(self) -> int:
        """Returns the type of an extension; called right after `head`."""
        return struct.unpack(">b", self._bytes(1))[0]  # type: ignore[no-any-return]

    def text(self, kind: str, size: int) -> str:
        """Returns a string; called with the result of `head`."""
        if kind != "str":
            raise self.fault(f"the type {kind!r} in place of a string")
        self._text_bytes += self._left(size)
        if self._text_bytes > _MAX_TEXT_BYTES:
            raise self.fault(f"more than {_MAX_TEXT_BYTES} bytes of text")
        try:
            return self._bytes(size).decode()
        except UnicodeDecodeError:
            raise self.fault("a string that is not UTF-8", back=size) from None

    def key(self, *, or_integer: bool = False) -> str:
        """Reads a key, valid in a leaf path; with `or_integer`, also an integer."""
        self._count(1)
        kind, size = self.head()
        if or_integer and kind == "number" and type(size) is int:
            return str(size)
        if kind == "str" and size > MAX_KEY_BYTES:
            raise self.fault(f"a key of {size} bytes")
        key = self.text(kind, size)
        if not key:
            raise self.fault("an empty key")
        if "\0" in key:
            raise self.fault(f"the key {key[:60]!r}, which contains a NUL")
        return key

    def enter(self, run: ByteRun) -> None:
        """Moves to a run of bytes, and confines the scan to the run."""
        self._seek(run.offset)
        self._end = run.offset + run.size

    def leave(self, *, end: int | None = None) -> None:
        """Raises an error unless at the end of the run; the scan may go on to `end`."""
        if self.position != self._end:
            raise self.fault(f"{self._end - self.position} extra bytes")
        self._end = self.size if end is None else end

    def fault(self, found: str, *, back: int = 0) -> errors.DamagedCheckpointError:
        """Returns the error for the content `found`, `back` bytes before here."""
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
        self._deepen(depth)
        if kind == "array":
            self._count(self._left(size), add=False)
            return [self._value(depth + 1) for _ in range(size)]
        return self._map(size, depth)

    def _map(self, size: int, depth: int) -> Value:
        self._count(self._left(2 * size), add=False)
        items: dict[str, Value] = {}
        for _ in range(size):
            key = self.key(or_integer=True)
            if key in items:
                raise self.fault(f"the key {key[:60]!r} for the second time")
            items[key] = self._value(depth + 1)
        return self._join_parts(items) if PARTS in items else items

    def _ext(self, size: int, depth: int) -> Value:
        code = self.value_type()
        self._left(size)
        end = self._end
        self.enter(ByteRun(self.position, size))
        value: Value
        if code in (NDARRAY, NUMPY_SCALAR):
            value = self._array(is_scalar=code == NUMPY_SCALAR)
        elif code == COMPLEX:
            value = self._complex()
        elif code == _TUPLE:
            self._deepen(depth)
            kind, count = self.head()
            if kind != "array":
                raise self.fault("a malformed tuple")
            self._count(self._left(count), add=False)
            value = [self._value(depth + 1) for _ in range(count)]
        elif code == _TIMESTAMP:
            raise self.fault("a timestamp")
        else:
            raise self.fault(f"a value of the unknown extension type {code}")
        self.leave(end=end)
        return value

    def _array(self, *, is_scalar: bool) -> Array:
        if self.head() != ("array", 3):
            raise self.fault("an array without its shape, type and values")
        shape = self._shape(self._value(_state.tree.MAX_DEPTH - 2))
        kind, size = self.head()
        name = self.text(kind, size)
        try:
            itemsize = _state.dtypes.item_size(name)
        except errors.OptionError:
            raise self.fault(f"an array of the element type {name[:40]!r}") from None
        kind, size = self.head()
        if kind != "bin" or math.prod(shape) * itemsize != size:
            raise self.fault(
                f"{size if kind == 'bin' else 'no'} bytes for {name}{list(shape)}"
            )
        if is_scalar and shape:
            raise self.fault(f"a numpy scalar of shape {list(shape)}")
        return Array((self._run(size),), shape, name, self._path, is_scalar)

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
        parts = [self._value(_state.tree.MAX_DEPTH) for _ in range(2)]
        for part in parts:
            if type(part) not in (int, float):
                raise self.fault("a complex number that is not two numbers")
        return complex(*parts)

    def _join_parts(self, items: Mapping[str, Value]) -> Array:
        parts = items.get("chunks")
        if set(items) != {PARTS, "shape", "chunks"} or not isinstance(parts, dict):
            raise self.fault("an array in parts, some of which are missing")
        shape = self._shape(items["shape"])
        if list(parts) != [str(i) for i in range(len(parts))] or not parts:
            raise self.fault("an array in parts, some of which are missing")
        arrays = list(parts.values())
        for part in arrays:
            if not isinstance(part, Array) or part.is_scalar or len(part.shape) != 1:
                raise self.fault("an array in parts that are not arrays")
        types = {part.dtype for part in arrays}
        count = sum(part.shape[0] for part in arrays)
        if len(types) != 1 or count != math.prod(shape):
            raise self.fault(
                f"an array {list(shape)} in parts of {count} elements and the types"
                f" {', '.join(sorted(types))}"
            )
        pieces = tuple(piece for part in arrays for piece in part.pieces)
        return Array(pieces, shape, arrays[0].dtype, self._path)

    def _deepen(self, depth: int) -> None:
        if depth >= _state.tree.MAX_DEPTH:
            raise self.fault(
                f"containers nested more than {_state.tree.MAX_DEPTH} deep"
            )

    # ---- bytes

    def _count(self, nodes: int, *, add: bool = True) -> None:
        if self._nodes + nodes > MAX_NODES:
            raise self.fault(f"more than {MAX_NODES} values")
        if add:
            self._nodes += nodes

    def _left(self, size: int) -> int:
        """Returns `size`, or raises the error if fewer bytes remain."""
        if size > self._end - self.position:
            raise self.fault(
                f"a value of at least {size} bytes, of which only"
                f" {self._end - self.position} follow"
            )
        return size

    def _run(self, size: int) -> ByteRun:
        run = ByteRun(self.position, self._left(size))
        self._seek(run.offset + size)
        return run

    def _seek(self, position: int) -> None:
        self._file.seek(position)
        self.position = position

    def _bytes(self, size: int) -> bytes:
        content = self._file.read(self._left(size))
        self.position += size
        if len(content) != size:
            raise self.fault("the end of the file, which became shorter")
        return content
