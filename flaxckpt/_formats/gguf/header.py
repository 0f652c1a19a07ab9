"""Headers of GGUF files: key-values, and the descriptions of tensors.

A header has no length: it ends where its last field ends. Every count, length and
offset is compared with the size of the file, and with limits, before it is used.

Source: https://github.com/ggml-org/ggml/blob/01f0d4da/docs/gguf.md, and the sizes of
blocks in the gguf package 0.19.0 (`GGML_QUANT_SIZES`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, NamedTuple

from flaxckpt import errors
from flaxckpt._types import JSON, Shape

MAGIC: Final = b"GGUF"

_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 100 * 10**6
_MAX_TENSORS = 5 * 10**5
_MAX_VALUES = 2**16
_MAX_STRINGS = 2**22
"""The most strings in all arrays of a header."""

_MAX_NAME_BYTES = 2**16 - 1
_MAX_RANK = 8
_MAX_SIZE = 2**48
_MAX_ELEMENTS = 2**63
_MAX_DEPTH = 4
"""Arrays in arrays; known writers have none."""

_SHOWN = 64
"""Longer arrays are described, not returned: most are the tokens of a vocabulary."""

_SHOWN_BYTES = 2**20
"""Bytes of texts and arrays to return for a file; what follows is described."""

_READ_BYTES = 2**20
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_FIXED = {
    0: ("uint8", struct.Struct("<B")),
    1: ("int8", struct.Struct("<b")),
    2: ("uint16", struct.Struct("<H")),
    3: ("int16", struct.Struct("<h")),
    4: ("uint32", _U32),
    5: ("int32", struct.Struct("<i")),
    6: ("float32", struct.Struct("<f")),
    7: ("bool", struct.Struct("<B")),
    10: ("uint64", _U64),
    11: ("int64", struct.Struct("<q")),
    12: ("float64", struct.Struct("<d")),
}
"""Type number of a value of fixed size -> its name, and how it is stored."""

_BOOL, _STRING, _ARRAY = 7, 8, 9


class ElementType(NamedTuple):
    """Element type of a tensor, such as `Q8_0`; `dtype` is our name for its values.

    A block has `block` elements along the last axis and `block_bytes`, 0 if unknown.
    """

    name: str
    dtype: str
    block: int = 1
    block_bytes: int = 0


_TYPES = {
    0: ElementType("F32", "float32", 1, 4),
    1: ElementType("F16", "float16", 1, 2),
    8: ElementType("Q8_0", "float32", 32, 34),
    24: ElementType("I8", "int8", 1, 1),
    25: ElementType("I16", "int16", 1, 2),
    26: ElementType("I32", "int32", 1, 4),
    27: ElementType("I64", "int64", 1, 8),
    28: ElementType("F64", "float64", 1, 8),
    30: ElementType("BF16", "bfloat16", 1, 2),
}
"""Number of an element type that is read -> the type."""

_UNREAD = {
    number: ElementType(name, "float32", block, size)
    for number, name, block, size in (
        *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22)),
        *((7, "Q5_1", 32, 24), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84)),
        *((11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176)),
        *((14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66)),
        *((17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50)),
        *((20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82)),
        *((23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54)),
        *((35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36)),
        *((41, "Q1_0", 128, 18),),
    )
}
"""Number of a quantization that is not read -> the type."""


class GgufTensor(NamedTuple):
    """A tensor; the slowest axis is first, as in numpy, and `offset` is in the file."""

    shape: Shape
    type: ElementType
    offset: int
    is_read: bool

    @property
    def nbytes(self) -> int:
        """Bytes in the file; 0 for an unknown element type."""
        return math.prod(self.shape) // self.type.block * self.type.block_bytes


class GgufHeader(NamedTuple):
    """The header of a file; `values` describes long arrays and texts only."""

    tensors: Mapping[str, GgufTensor]
    values: Mapping[str, JSON]


class UnsupportedVersionError(ValueError):
    """An intact file of a version or a byte order that is not read."""


def parse(file: BinaryIO, *, file_size: int) -> GgufHeader:
    """Parses the header of a file, and compares it with the size of the file in bytes.

    Raises UnsupportedVersionError for another version or byte order; ValueError for a
    malformed header, or tensors beyond the end of the file.
    """
    scan = _Scanner(file, file_size)
    if scan.take(4, "its first bytes") != MAGIC:
        raise ValueError(f"it does not begin with {MAGIC!r}")
    _check_version(scan.number(_U32))
    tensor_count, value_count = scan.number(_U64), scan.number(_U64)
    scan.check_count("tensors", tensor_count, _MAX_TENSORS, least_bytes=24)
    scan.check_count("key-values", value_count, _MAX_VALUES, least_bytes=13)
    values: dict[str, JSON] = {}
    for _ in range(value_count):
        key = scan.name()
        if key in values:
            raise ValueError(f"it has the key {short(key)} twice")
        kind = scan.number(_U32)
        parse_value = _parse_alignment if key == _ALIGNMENT else _parse_value
        values[key] = parse_value(scan, kind)
    tensors = _parse_tensors(scan, tensor_count)
    alignment = values.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    assert isinstance(alignment, int)
    start = -(-scan.position // alignment) * alignment
    return GgufHeader(_place(tensors, start, alignment, file_size), values)


def _check_version(version: int) -> None:
    if version in _VERSIONS:
        return
    if version and version & 0xFFFF == 0:
        raise UnsupportedVersionError(
            "a GGUF file of big-endian numbers: convert the model again on a machine"
            " with little-endian numbers, or without --bigendian"
        )
    if version > max(_VERSIONS):
        raise UnsupportedVersionError(
            f"a GGUF file of version {version}; wanted {_VERSIONS}: use a newer"
            " flaxckpt"
        )
    raise UnsupportedVersionError(
        f"a GGUF file of version {version}; wanted {_VERSIONS}: convert the model"
        " again with a newer llama.cpp"
    )


# ---- the bytes ----------------------------------------------------------------------


class _Scanner:
    """Reads numbers and texts from a file, within limits on strings and bytes."""

    def __init__(self, file: BinaryIO, file_size: int) -> None:
        self._file = file
        self._size = file_size
        self._end = min(file_size, _MAX_HEADER_BYTES)
        self._buffer = b""
        self._start = 0  # of the buffer, in the file
        self._at = 0  # in the buffer
        self.strings_left = _MAX_STRINGS
        self.shown_left = _SHOWN_BYTES

    @property
    def position(self) -> int:
        return self._start + self._at

    def require(self, count: int, what: str) -> None:
        """Raises ValueError if fewer than `count` bytes follow."""
        if count <= self._end - self.position:
            return
        if self.position + count <= self._size:
            raise ValueError(
                f"its header has more than {_MAX_HEADER_BYTES} bytes, in {what}"
            )
        raise ValueError(
            f"{what} has {count} bytes from byte {self.position} on, and the file"
            f" ends at byte {self._size}"
        )

    def check_count(
        self, what: str, count: int, most: int, *, least_bytes: int
    ) -> None:
        """Raises ValueError for too many fields, or more than fit the file."""
        if count > most:
            raise ValueError(f"it has {count} {what}; at most {most} are read")
        self.require(count * least_bytes, f"the list of {what}")

    def take(self, count: int, what: str = "a number in its header") -> bytes:
        end = self._at + count
        if end > len(self._buffer):
            self.require(count, what)
            rest = self._buffer[self._at :]
            wanted = max(count - len(rest), _READ_BYTES)
            self._start, self._at, end = self.position, 0, count
            self._buffer = rest + self._file.read(wanted)
            if len(self._buffer) < count:
                raise ValueError("it became shorter while it was read")
        taken = self._buffer[self._at : end]
        self._at = end
        return taken

    def skip(self, count: int, what: str) -> None:
        """Leaves out the next `count` bytes."""
        if self._at + count <= len(self._buffer):
            self._at += count
            return
        self.require(count, what)
        self._start, self._at = self.position + count, 0
        self._buffer = b""
        self._file.seek(self._start)

    def skip_texts(self, count: int) -> None:
        """Leaves out the next `count` texts, often some hundred thousand."""
        buffer, at = self._buffer, self._at
        for _ in range(count):
            start = at + _U64.size
            if start <= len(buffer):
                end = start + _U64.unpack_from(buffer, at)[0]
                if end <= len(buffer):
                    at = end
                    continue
            self._at = at
            self.skip(self.number(_U64), "a text in its header")
            buffer, at = self._buffer, self._at
        self._at = at

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def name(self) -> str:
        size = self.number(_U64)
        if size > _MAX_NAME_BYTES:
            raise ValueError(
                f"it has a name of {size} bytes; at most {_MAX_NAME_BYTES} are read"
            )
        try:
            return self.take(size, "a name in its header").decode()
        except UnicodeDecodeError:
            raise ValueError("it has a name that is not UTF-8") from None


def short(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}…")


# ---- key-values ---------------------------------------------------------------------


def _parse_alignment(scan: _Scanner, kind: int) -> int:
    value = _parse_value(scan, kind)
    is_number = _FIXED.get(kind, ("", None))[0] == "uint32"
    if not is_number or not isinstance(value, int) or value.bit_count() != 1:
        raise ValueError(
            f"{_ALIGNMENT} is {errors.one_line(value, 80)}; wanted a uint32 that is a"
            " power of two"
        )
    return value


def _parse_value(scan: _Scanner, kind: int) -> JSON:
    if kind in _FIXED:
        return _parse_fixed(scan, kind, 1)[0]
    if kind == _STRING:
        return _parse_text(scan)
    if kind == _ARRAY:
        return _parse_array(scan, 1)
    raise ValueError(f"it has a value of the unknown type {kind}")


def _parse_fixed(scan: _Scanner, kind: int, count: int) -> list[JSON]:
    """Parses several values of a type of fixed size."""
    _, form = _FIXED[kind]
    values = [number for (number,) in form.iter_unpack(scan.take(form.size * count))]
    if kind != _BOOL:
        return values
    if any(value > 1 for value in values):
        raise ValueError(f"it has a bool of the byte {max(values)}, wanted 0 or 1")
    return [bool(value) for value in values]


def _parse_text(scan: _Scanner) -> str:
    """Parses a text; returns a description if there is too much text."""
    size = scan.number(_U64)
    if size > scan.shown_left:
        scan.skip(size, "a text in its header")
        return f"text of {size} bytes"
    scan.shown_left -= size
    # Writers do not check texts, of which nothing depends.
    return scan.take(size, "a text in its header").decode(errors="replace")


def _parse_array(scan: _Scanner, depth: int) -> JSON:
    """Parses an array; returns a description of a long one, `float32[32000]`."""
    kind, count = scan.number(_U32), scan.number(_U64)
    if kind in _FIXED:
        name, form = _FIXED[kind]
        if count <= _SHOWN and count * form.size <= scan.shown_left:
            scan.shown_left -= count * form.size
            return _parse_fixed(scan, kind, count)
        scan.skip(count * form.size, f"an array of {name}")
        return f"{name}[{count}]"
    if kind == _STRING:
        return _parse_texts(scan, count)
    if kind != _ARRAY:
        raise ValueError(f"it has an array of the unknown type {kind}")
    if depth == _MAX_DEPTH:
        raise ValueError(f"it has arrays nested more than {_MAX_DEPTH} deep")
    scan.check_count("arrays in an array", count, _MAX_VALUES, least_bytes=12)
    scan.strings_left -= count
    _check_strings(scan)
    values = [_parse_array(scan, depth + 1) for _ in range(count)]
    return values if count <= _SHOWN else f"array[{count}]"


def _parse_texts(scan: _Scanner, count: int) -> JSON:
    scan.require(count * _U64.size, "an array of texts")
    scan.strings_left -= count
    _check_strings(scan)
    if count <= _SHOWN:
        return [_parse_text(scan) for _ in range(count)]
    scan.skip_texts(count)
    return f"string[{count}]"


def _check_strings(scan: _Scanner) -> None:
    if scan.strings_left < 0:
        raise ValueError(f"its arrays hold more than {_MAX_STRINGS} texts")


# ---- tensors ------------------------------------------------------------------------


def _parse_tensors(scan: _Scanner, count: int) -> dict[str, GgufTensor]:
    """Parses the descriptions of tensors; offsets are from the start of the data."""
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = scan.name()
        if name in tensors:
            raise ValueError(f"it has the tensor {short(name)} twice")
        rank = scan.number(_U32)
        if rank > _MAX_RANK:
            raise ValueError(
                f"{short(name)} has {rank} axes; at most {_MAX_RANK} are read"
            )
        # ggml names the fastest axis first.
        shape = tuple([scan.number(_U64) for _ in range(rank)][::-1])
        number = scan.number(_U32)
        offset = scan.number(_U64)
        tensors[name] = _make_tensor(name, shape, number, offset)
    return tensors


def _make_tensor(name: str, shape: Shape, number: int, offset: int) -> GgufTensor:
    unknown = ElementType(f"type {number}", "float32")
    known = _TYPES.get(number) or _UNREAD.get(number) or unknown
    if max(shape, default=0) >= _MAX_SIZE or math.prod(shape) >= _MAX_ELEMENTS:
        raise ValueError(f"{short(name)} has the shape {list(shape)}")
    if (shape[-1] if shape else 1) % known.block:
        raise ValueError(
            f"{short(name)} is {known.name}{list(shape)}: wanted a multiple of"
            f" {known.block} elements along the last axis"
        )
    return GgufTensor(shape, known, offset, number in _TYPES)


def _place(
    tensors: Mapping[str, GgufTensor], start: int, alignment: int, file_size: int
) -> dict[str, GgufTensor]:
    placed: dict[str, GgufTensor] = {}
    for name, tensor in tensors.items():
        if tensor.offset % alignment:
            raise ValueError(
                f"{short(name)} has the offset {tensor.offset}; wanted a multiple of"
                f" {alignment}"
            )
        placed[name] = tensor._replace(offset=start + tensor.offset)
    end, last = start, ""
    for name, tensor in sorted(placed.items(), key=lambda item: item[1].offset):
        # Empty tensors share the offset of the next tensor.
        if tensor.offset < end and tensor.nbytes:
            raise ValueError(f"{short(name)} overlaps {short(last)}")
        if tensor.offset + tensor.nbytes > file_size:
            raise ValueError(
                f"{short(name)} ends at byte {tensor.offset + tensor.nbytes}, the file"
                f" at {file_size}"
            )
        if tensor.nbytes:
            end, last = tensor.offset + tensor.nbytes, name
    return placed
