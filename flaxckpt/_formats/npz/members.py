"""Finds, checks and reads the members of numpy's archives (`.npz`).

The directory of the archive is not trusted, and headers of arrays are parsed here, as
numpy fails on malformed ones in many ways. Pickles are never opened.

Source: the ZIP specification (APPNOTE), and `numpy.lib.format`.
"""

from __future__ import annotations

import ast
import errno
import math
import os
import re
import reprlib
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from flaxckpt import _state, _storage, _util, errors
from flaxckpt._formats import signatures
from flaxckpt._types import Shape
from flaxckpt._zarr.metadata import Array

SUFFIX = ".npy"
"""Suffix of the names of all members."""

_MAX_DIRECTORY_BYTES = 8 * 2**20
_MAX_HEADER_BYTES = 10_000
_MAX_NAME_BYTES = 4096
_MAX_RANK = 32
_MAX_SIZE = 2**48
_BEST_RATIO = 1032
"""The highest compression ratio of deflate."""

_LOCAL = struct.Struct("<4s2xHH16xHH")
"""A member's own header: signature, flags, method, and the lengths of its name and its
extra fields. It repeats the sizes in the directory, or leaves them out."""

_ENCRYPTED = 0x1
_UTF_8 = 0x800
_AT_FIRST = 256  # enough for most headers
_KEYS = ("shape", "fortran_order", "descr")
_LONG = re.compile(r"([0-9])L\b")
_NUMBER = re.compile(r"[<>|=][A-Za-z][0-9]{0,6}")
_OVERHEAD_BYTES = 1024
"""The most bytes by which a deflated header may exceed the header itself."""

_PART_BYTES = 2**20


class Member(NamedTuple):
    """A file in an archive: where it is, its sizes in bytes and its CRC-32."""

    name: str
    archive: _storage.Stamp
    offset: int
    stored_bytes: int
    nbytes: int
    crc: int
    is_deflated: bool


class NpyHeader(NamedTuple):
    """The numpy header of a member, of `nbytes` itself."""

    nbytes: int
    shape: Shape
    dtype: str
    is_fortran: bool
    is_big_endian: bool


class UnsupportedError(ValueError):
    """An intact array of an unsupported type."""


# ---- the archive ------------------------------------------------------------------


def read_members(
    file: IO[bytes], stamp: _storage.Stamp, size: int
) -> tuple[list[Member], dict[str, str]]:
    """Returns intact members and faults; raises ValueError if members overlap."""
    try:
        with zipfile.ZipFile(cast("IO[bytes]", _LimitedReads(file))) as archive:
            infos, start = archive.infolist(), archive.start_dir
    except (
        *(zipfile.BadZipFile, NotImplementedError, struct.error),
        *(OverflowError, EOFError),
    ) as error:
        if str(error) == "File is not a zip file":
            raise ValueError("its end, which holds its directory, is missing") from None
        raise ValueError(f"its directory cannot be read ({error})") from None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError("the recorded place of its directory is invalid") from None
    if not 0 <= start <= size:
        raise ValueError("its directory is not within the file")
    intact: list[Member] = []
    faults: dict[str, str] = {}
    seen: set[str] = set()
    end, before = 0, ""
    for info in sorted(infos, key=lambda info: info.header_offset):
        name = info.filename[:100]
        if info.header_offset < 0:
            raise ValueError(f"its member {name!r} is not at the recorded place")
        if info.header_offset < end:
            raise ValueError(f"its members {before!r} and {name!r} overlap")
        member = _locate_member(file, stamp, info)
        end, before = member.offset + member.stored_bytes, name
        if end > start:
            raise ValueError(f"its member {name!r} does not end before the directory")
        if info.is_dir() and not info.file_size:
            continue  # other programs write entries for directories
        fault = "appears twice" if info.filename in seen else _fault(info, member)
        seen.add(info.filename)
        if fault:
            faults[info.filename] = fault
        else:
            intact.append(member)
    return intact, faults


def _locate_member(
    file: IO[bytes], stamp: _storage.Stamp, info: zipfile.ZipInfo
) -> Member:
    """Locates a member; raises ValueError if its header contradicts the directory."""
    file.seek(info.header_offset)
    content = file.read(_LOCAL.size)
    if len(content) < _LOCAL.size or not content.startswith(signatures.ARCHIVE):
        raise ValueError(
            f"its member {info.filename[:100]!r} is not at the recorded place"
        )
    _, flags, method, name_bytes, extra_bytes = _LOCAL.unpack(content)
    name = file.read(name_bytes)
    wanted = info.orig_filename.encode("utf-8" if flags & _UTF_8 else "cp437", "ignore")
    if name != wanted or method != info.compress_type:
        raise ValueError(
            f"its member {info.filename[:100]!r} has another name or method in its own"
            " header than in the directory"
        )
    return Member(
        info.filename.removesuffix(SUFFIX),
        stamp,
        info.header_offset + _LOCAL.size + name_bytes + extra_bytes,
        info.compress_size,
        info.file_size,
        info.CRC,
        info.compress_type == zipfile.ZIP_DEFLATED,
    )


def _fault(info: zipfile.ZipInfo, member: Member) -> str | None:
    """Returns the reason why an archive member cannot be an array, or None."""
    parts = member.name.split("/")
    if not info.filename.endswith(SUFFIX):
        return f"is not an array: its name does not end in {SUFFIX}"
    if len(member.name) > _MAX_NAME_BYTES:
        return f"has a name of {len(member.name)} characters"
    if not all(parts):
        return "has a name with an empty part"
    if not {".", ".."}.isdisjoint(parts):
        return "has a name with '.' or '..' as a part"
    if info.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"is compressed by method {info.compress_type}, which numpy never uses"
    if not member.is_deflated and member.nbytes != member.stored_bytes:
        return f"has {member.stored_bytes} bytes, wanted {member.nbytes}"
    if member.nbytes > _BEST_RATIO * member.stored_bytes:
        return (
            f"has {member.nbytes} bytes according to the directory, more than"
            f" {member.stored_bytes} bytes can expand to"
        )
    return None


class _LimitedReads:
    """A file that limits each read to the largest size of an archive directory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek = file.seek
        self.tell = file.tell
        self.seekable = file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > _MAX_DIRECTORY_BYTES:
            raise ValueError(
                f"its directory has {size} bytes; at most {_MAX_DIRECTORY_BYTES} are"
                " read"
            )
        return self._file.read(_MAX_DIRECTORY_BYTES if size < 0 else size)


# ---- headers ----------------------------------------------------------------------


def read_header(file: IO[bytes], member: Member) -> NpyHeader:
    """Reads the numpy header of a member, or raises ValueError if it is malformed.

    Raises UnsupportedError for an array of objects, texts, dates or structures.
    """
    head = _read_start(file, member, _AT_FIRST)
    start, size = locate_header(head)
    if size > len(head):
        head = _read_start(file, member, size)
    shape, is_fortran, dtype = parse_header(head[start:size])
    name = _dtype_name(dtype)
    wanted = size + math.prod(shape) * _state.dtypes.item_size(name)
    if wanted != member.nbytes:
        raise ValueError(f"has {member.nbytes} bytes, wanted {wanted} by its header")
    is_big_endian = dtype.kind != "V" and not dtype.isnative
    return NpyHeader(size, shape, name, is_fortran, is_big_endian)


def _read_start(file: IO[bytes], member: Member, count: int) -> bytes:
    file.seek(member.offset)
    if not member.is_deflated:
        return file.read(min(count, member.nbytes))
    content = file.read(min(count + _OVERHEAD_BYTES, member.stored_bytes))
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, count)
    except zlib.error as error:
        raise ValueError(f"cannot be expanded ({error})") from None


def locate_header(head: bytes) -> tuple[int, int]:
    """Returns the start and the end of the header's text in the `head` of a file."""
    if (
        not head.startswith(signatures.ARRAY)
        or len(head) < 12
        or head[6] not in (1, 2, 3)
    ):
        raise ValueError("is not a numpy array")
    start = 10 if head[6] == 1 else 12
    size = int.from_bytes(head[8:start], "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"has a header of {size} bytes")
    return start, start + size


def parse_header(text: bytes) -> tuple[Shape, bool, np.dtype[Any]]:
    """Parses the text of a header to shape, Fortran order and dtype."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from Python's parser
            # Python 2 wrote sizes as 3L.
            data = ast.literal_eval(_LONG.sub(r"\1", text.decode("latin-1")))
        shape, is_fortran, descr = (data[key] for key in _KEYS)
    except (ValueError, TypeError, KeyError, SyntaxError):
        raise ValueError("has a header that numpy did not write") from None
    except (RecursionError, MemoryError):
        raise ValueError("has a header that is nested too deep") from None
    if (
        type(shape) is not tuple
        or len(shape) > _MAX_RANK
        or not all(type(size) is int and 0 <= size < _MAX_SIZE for size in shape)
    ):
        raise ValueError(f"has the shape {reprlib.repr(shape)}")
    if type(is_fortran) is not bool or type(descr) not in (str, list, tuple):
        raise ValueError("has a header that numpy did not write")
    if type(descr) is not str or not _NUMBER.fullmatch(descr):
        raise UnsupportedError(f"has the element type {reprlib.repr(descr)}")
    if descr[1] == "O":
        raise UnsupportedError("holds Python objects, which are pickled")
    try:
        return shape, is_fortran, np.dtype(descr)
    except TypeError:
        raise UnsupportedError(f"has the unknown element type {descr!r}") from None


def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "V" and dtype.itemsize == 2:
        return "bfloat16"  # the only type of two bytes that numpy writes as `V2`
    if dtype.kind == "V":
        raise UnsupportedError(
            f"has elements of {dtype.itemsize} bytes without a recorded type"
        )
    if dtype.kind not in "biufc" or _state.dtypes.stored_name(dtype.name) is None:
        raise UnsupportedError(f"is an array of {dtype.name}")
    return dtype.name


# ---- values -----------------------------------------------------------------------


def expand(member: Member, start: int, stop: int) -> Array:
    """Expands and checks a whole member; returns the bytes from `start` to `stop`."""
    _util.memory.check(stop - start)
    values = np.empty(stop - start, np.uint8)
    position = 0
    for part in _read_parts(member):
        first, last = max(start, position), min(stop, position + len(part))
        if first < last:
            content = part[first - position : last - position]
            values[first - start : last - start] = np.frombuffer(content, np.uint8)
        position += len(part)
    return values


def check_member(member: Member) -> None:
    """Compares a member with the recorded CRC-32."""
    for _ in _read_parts(member):
        pass


def _read_parts(member: Member) -> Iterator[bytes]:
    """Yields the content of a member in parts; compares the CRC-32 at the end."""
    with _storage.of(member.archive.path).open_file(member.archive.path) as file:
        check_unchanged(file.fileno(), member.archive)
        file.seek(member.offset)
        codec = zlib.decompressobj(-zlib.MAX_WBITS) if member.is_deflated else None
        crc = size = 0
        left = member.stored_bytes
        waiting = b""
        while True:
            if not waiting and left:
                waiting = file.read(min(left, _PART_BYTES))
                left -= len(waiting)
                if not waiting:
                    raise ValueError(f"{member.archive.path} ends inside it")
            if codec is None:
                part, waiting = waiting, b""
            else:
                try:
                    part = codec.decompress(waiting, _PART_BYTES)
                except zlib.error as error:
                    raise ValueError(f"it cannot be expanded ({error})") from None
                waiting = codec.unconsumed_tail
            crc, size = zlib.crc32(part, crc), size + len(part)
            if size > member.nbytes:
                break
            yield part
            is_last = codec is None or codec.eof or not part
            if is_last and not waiting and not left:
                break
            if codec is not None and codec.eof:
                break
        is_whole = codec is None or (codec.eof and not codec.unused_data)
        if size != member.nbytes or left or not is_whole:
            raise ValueError(
                f"it does not expand to the recorded {member.nbytes} bytes"
            )
        if crc != member.crc:
            raise ValueError(
                f"it has changed since it was written: wanted the CRC-32"
                f" {member.crc:08x}, found {crc:08x}"
            )


def check_unchanged(descriptor: int, stamp: _storage.Stamp) -> None:
    """Raises OSError if an open file differs from the stamped file."""
    if _storage.files.identity(os.fstat(descriptor)) != stamp.identity:
        raise OSError(
            f"{stamp.path} was replaced or changed since it was opened; load it again"
        )


def damaged_error(path: Path, error: object) -> errors.DamagedCheckpointError:
    return errors.DamagedCheckpointError(
        f"{path} is not an intact archive of numpy: {errors.one_line(error)};"
        " get another"
        " copy"
    )
