"""GGUF files made to break a reader, or to make it read what it must not.

Each case writes one under a directory and returns the path to load.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.hostile import later

F32, Q8_0, Q4_K = 0, 8, 12
UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10
FORMS: Final = {UINT8: "B", UINT32: "I", FLOAT32: "f", BOOL: "B", UINT64: "Q"}


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def value(key: bytes, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def number(key: bytes, kind: int, content: Any) -> bytes:
    return value(key, kind, struct.pack(f"<{FORMS[kind]}", content))


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


def tensor(
    name: bytes = b"a",
    shape: tuple[int, ...] = (2,),
    kind: int = F32,
    offset: int = 0,
    rank: int | None = None,
) -> bytes:
    """The description of a tensor; sizes as in numpy, the slowest axis first."""
    rank = len(shape) if rank is None else rank
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return (
        text(name) + struct.pack("<I", rank) + sizes + struct.pack("<IQ", kind, offset)
    )


def content(
    *tensors: bytes,
    values: tuple[bytes, ...] = (),
    data: bytes = bytes(64),
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of these descriptions, key-values and data."""
    counts = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def file(root: Path, data: bytes) -> Path:
    path = root / "model.gguf"
    path.write_bytes(data)
    return path


def one(*args: Any, **options: Any) -> Callable[[Path], Path]:
    """A file of the good tensor `a`, unless there are others."""
    return lambda root: file(root, content(*(args or (tensor(),)), **options))


def valued(*values: bytes, **options: Any) -> Callable[[Path], Path]:
    return one(values=values, **options)


@later
def cut(root: Path, keep: Callable[[bytes], int]) -> Path:
    whole = content(tensor(), values=(number(b"k", UINT32, 1),), data=bytes(8))
    return file(root, whole[: keep(whole)])


@later
def changed(root: Path, at: int, form: str, number: int) -> Path:
    """A good file, but for a number in it."""
    whole = bytearray(content(tensor(), values=(value(b"k", STRING, text(b"t")),)))
    struct.pack_into(form, whole, at, number)
    return file(root, bytes(whole))


@later
def sparse(root: Path, size: int, *args: bytes, **options: Any) -> Path:
    """A file whose end is not stored."""
    path = one(*args, **options)(root)
    os.truncate(path, size)
    return path


def nested(depth: int) -> bytes:
    inner = array(UINT8, 1, b"\1")
    for _ in range(depth):
        inner = array(ARRAY, 1, inner)
    return value(b"k", ARRAY, inner)


ALIGNMENT: Final = b"general.alignment"
EMPTY_TEXTS: Final = 12 * 10**6

CASES: Final[dict[str, Callable[[Path], Path]]] = {
    "only the magic": lambda root: file(root, b"GGUF"),
    "cut off in the version": cut(lambda whole: 6),
    "cut off in the counts": cut(lambda whole: 20),
    "cut off in a key": cut(lambda whole: 30),
    "cut off in a value": cut(lambda whole: 38),
    "cut off in a tensor": cut(lambda whole: 60),
    "cut off before the data": cut(lambda whole: len(whole) - 8),
    "cut off in the data": cut(lambda whole: len(whole) - 1),
    "version 0": one(version=0),
    "version 1": one(version=1),
    "version 4": one(version=4),
    "big endian": one(version=0x03000000),
    "2^63 tensors": one(counts=(2**63, 0)),
    "2^64 - 1 tensors": one(counts=(2**64 - 1, 0)),
    "a million tensors": one(counts=(10**6, 0)),
    "a tensor too many": one(counts=(2, 0)),
    "2^63 key-values": one(counts=(1, 2**63)),
    "a million key-values": one(counts=(1, 10**6)),
    "a key of 2^63 bytes": changed(24, "<Q", 2**63),
    "a key of 2^64 - 1 bytes": changed(24, "<Q", 2**64 - 1),
    "a key longer than the file": changed(24, "<Q", 60_000),
    "a key that is not UTF-8": valued(number(b"\xff\xfe", UINT32, 1)),
    "a key twice": valued(number(b"k", UINT32, 1), number(b"k", UINT32, 1)),
    "a value of an unknown type": valued(value(b"k", 13, b"")),
    "a bool of 2": valued(number(b"k", BOOL, 2)),
    "a text of 2^63 bytes": valued(value(b"k", STRING, struct.pack("<Q", 2**63))),
    "a text of 2^64 - 1 bytes": valued(
        value(b"k", STRING, struct.pack("<Q", 2**64 - 1))
    ),
    "an array of 2^63 numbers": valued(value(b"k", ARRAY, array(UINT64, 2**63))),
    "an array of 2^61 numbers": valued(value(b"k", ARRAY, array(UINT64, 2**61))),
    "an array of 2^63 texts": valued(value(b"k", ARRAY, array(STRING, 2**63))),
    "an array of 2^63 arrays": valued(value(b"k", ARRAY, array(ARRAY, 2**63))),
    "an array of an unknown type": valued(value(b"k", ARRAY, array(99, 1, b"\0"))),
    "an array of bools of 2": valued(value(b"k", ARRAY, array(BOOL, 2, b"\1\2"))),
    "an array longer than the file": valued(value(b"k", ARRAY, array(UINT8, 10**6))),
    "arrays nested 5 deep": valued(nested(5)),
    "arrays nested 100k deep": valued(nested(10_000)),
    "a header over the limit": lambda root: sparse(
        2 * 10**8, tensor(), values=(value(b"k", ARRAY, array(UINT8, 10**8)),)
    )(root),
    "an array of twelve million texts": lambda root: valued(
        value(b"k", ARRAY, array(STRING, EMPTY_TEXTS, bytes(8 * EMPTY_TEXTS)))
    )(root),
    "arrays of twelve million numbers": lambda root: valued(
        *(
            value(
                b"%d" % i,
                ARRAY,
                array(ARRAY, 2**15, array(UINT64, 32, b"\xff" * 256) * 2**15),
            )
            for i in range(11)
        ),
        data=b"",
    )(root),
    "an alignment of 0": valued(number(ALIGNMENT, UINT32, 0)),
    "an alignment of 24": valued(number(ALIGNMENT, UINT32, 24)),
    "an alignment of 2^31": valued(number(ALIGNMENT, UINT32, 2**31)),
    "an alignment of 64 bits": valued(number(ALIGNMENT, UINT64, 32)),
    "an alignment that is true": valued(number(ALIGNMENT, BOOL, 1)),
    "an alignment that is a text": valued(value(ALIGNMENT, STRING, text(b"32"))),
    "a name of 2^63 bytes": one(struct.pack("<Q", 2**63) + bytes(64)),
    "a name of 70 thousand bytes": lambda root: one(tensor(b"a" * 70_000))(root),
    "a name that is not UTF-8": one(tensor(b"\xc3")),
    "a name that is half a character": one(tensor(b"\xed\xa0\x80")),
    "a name twice": one(tensor(), tensor(offset=32)),
    "2^32 - 1 axes": one(tensor(rank=2**32 - 1)),
    "9 axes": one(tensor(shape=(1,) * 9)),
    "an axis of 2^63": one(tensor(shape=(2**63,))),
    "an axis of 2^64 - 1": one(tensor(shape=(2**64 - 1,))),
    "sizes whose product is 0 and others": one(tensor(shape=(2**60, 0))),
    "sizes whose product wraps around": one(tensor(shape=(2**33, 2**33, 2))),
    "a product of 2^64": one(tensor(shape=(2**32, 2**32))),
    "an array larger than the file": one(tensor(shape=(2**40,))),
    "an array one element too long": one(tensor(shape=(17,))),
    "blocks that are not whole": one(tensor(shape=(4, 8), kind=Q8_0)),
    "blocks of a number": one(tensor(shape=(), kind=Q8_0)),
    "blocks larger than the file": one(tensor(shape=(64,), kind=Q8_0)),
    "an offset that is not aligned": one(tensor(offset=4)),
    "an offset of 2^63": one(tensor(offset=2**63)),
    "an offset behind the file": one(tensor(offset=96)),
    "an empty array behind the file": one(tensor(shape=(0,), offset=96)),
    "the same bytes twice": one(tensor(), tensor(b"b")),
    "an overlap": one(tensor(shape=(12,)), tensor(b"b", offset=32)),
    "an overlap with a quantized array": one(
        tensor(shape=(32,), kind=Q8_0), tensor(b"b", offset=32)
    ),
    "only an array that is not read": one(
        tensor(shape=(1, 256), kind=Q4_K), data=bytes(160)
    ),
    "an array of elements of an unknown type": one(tensor(kind=1000)),
    "a huge array of an unknown type": one(tensor(shape=(2**40,), kind=1000)),
    "an array not read behind the file": one(tensor(shape=(512,), kind=Q4_K)),
    "names in many lines": one(tensor(b"a\n" * 50, kind=Q4_K, shape=(256,))),
    "a name of 30 thousand parts": one(tensor(b".".join([b"a"] * 30_000), kind=1000)),
    "an array that is not allocated": sparse(2**41, tensor(shape=(2**38,))),
    "blocks that are not allocated": sparse(
        2**41, tensor(shape=(2**35, 32), kind=Q8_0)
    ),
}
