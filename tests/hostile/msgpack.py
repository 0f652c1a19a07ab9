"""Files of msgpack made to break a reader, or to make it read what is not there.

Each case writes one under a directory and returns the path to load.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np

from tests.hostile import later

NESTED = 100_000
TEXT = 40 * 2**20


def ext(code: int, payload: bytes) -> bytes:
    return b"\xc9" + struct.pack(">Ib", len(payload), code) + payload


def array(
    shape: Any = (2,), dtype: Any = "float32", data: bytes = b"\0" * 8, code: int = 1
) -> bytes:
    return ext(code, msgpack.packb((shape, dtype, data)))


GOOD: Final = array()


def tree(*pairs: tuple[Any, bytes]) -> bytes:
    """A map of packed values."""
    head = b"\xde" + struct.pack(">H", len(pairs))
    return head + b"".join(
        (key if isinstance(key, bytes) else msgpack.packb(key)) + value
        for key, value in pairs
    )


def parts(shape: Any, *chunks: bytes, **more: bytes) -> bytes:
    inner = tree(*((str(i), chunk) for i, chunk in enumerate(chunks)))
    return tree(
        ("__msgpack_chunked_array__", b"\xc3"),
        ("shape", msgpack.packb(shape)),
        ("chunks", inner),
        *more.items(),
    )


def one(value: bytes) -> bytes:
    """A state of one leaf."""
    return tree(("a", value))


def deep(depth: int) -> bytes:
    return b"\x81\xa1a" * depth + b"\x01"


def tuples(depth: int) -> bytes:
    """Orbax's extension for tuples, each right inside another."""
    value = b"\x90"
    for _ in range(depth):
        value = ext(4, value)
    return value


def torch_like() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
    return content.getvalue()


FILES: Final[dict[str, bytes]] = {
    "depth 65": deep(65),
    "depth 100k": deep(NESTED),
    "arrays nested 100k": one(b"\x91" * NESTED + b"\x01"),
    "tuples right in each other": one(tuples(3)),
    "tuples nested 10k": one(tuples(10_000)),
    "array of 2^32": one(b"\xdd\xff\xff\xff\xff\x01"),
    "map of 2^32": b"\xdf\xff\xff\xff\xff\xa1a\x01",
    "string of 2^32": one(b"\xdb\xff\xff\xff\xffabc"),
    "bytes of 2^32": one(b"\xc6\xff\xff\xff\xffabc"),
    "extension of 2^32": one(b"\xc9\xff\xff\xff\xff\x01abc"),
    "many empty maps": one(b"\xdd" + struct.pack(">I", 2**22) + b"\x80" * 2**22),
    "long keys over many leaves": (
        b"\x81\xda\x0f\xff" + b"k" * 4095 + b"\xdf" + struct.pack(">I", 100_000)
        + b"".join(msgpack.packb(f"{i}x") + b"\xc0" for i in range(100_000))
    ),
    "much text": one(b"\x92" + 2 * (b"\xdb" + struct.pack(">I", TEXT) + bytes(TEXT))),
    "a key of 5000 bytes": tree(("k" * 5000, GOOD)),
    "a key twice": tree(("a", GOOD), ("a", GOOD)),
    "an empty key": tree(("", GOOD)),
    "the first key is empty": tree(("", GOOD), ("b", GOOD)),
    "a key with a NUL": tree(("a\0b", GOOD)),
    "a key that is a float": tree(("b", GOOD), (1.5, GOOD)),
    "a key as a number, too": tree(("1", GOOD), (1, GOOD)),
    "a key that is bytes": tree(("b", GOOD), (b"\xc4\x01a", GOOD)),
    "a key that is no UTF-8": tree(("b", GOOD), (b"\xa2\xff\xfe", GOOD)),
    "garbage behind": one(GOOD) + b"\0",
    "another map behind": one(GOOD) * 2,
    "the byte that is nothing": one(b"\xc1"),
    "bare bytes": one(b"\xc4\x02ab"),
    "shape 2^60": one(array((2**60,))),
    "shape 2^60 and 0": one(array((2**60, 0), data=b"")),
    "a negative dimension": one(array((-1, -2))),
    "shape -1": one(array((-1,))),
    "a shape of floats": one(array((2.0,))),
    "a shape of 100 axes": one(array((1,) * 100, data=b"\0" * 4)),
    "a shape that is nested": one(array(((2,),))),
    "a shape that is a map": one(array({"a": 2})),
    "fewer bytes than the shape": one(array((3,))),
    "more bytes than the shape": one(array((1,))),
    "dtype object": one(array(dtype="object")),
    "dtype S4": one(array(dtype="S4")),
    "dtype U1": one(array(dtype="<U1")),
    "dtype structured": one(array(dtype="f4,f4", shape=(1,))),
    "dtype datetime64": one(array(dtype="datetime64[s]", shape=(1,))),
    "dtype void": one(array(dtype="V8", shape=(1,))),
    "dtype longdouble": one(array(dtype="float128", shape=(), data=bytes(16))),
    "dtype that is no text": one(array(dtype=4)),
    "dtype nonsense": one(array(dtype="float31")),
    "values that are text": one(ext(1, msgpack.packb(((2,), "uint8", "ab")))),
    "an array of two": one(ext(1, msgpack.packb(((2,), "uint8")))),
    "an array of four": one(ext(1, msgpack.packb(((2,), "uint8", b"ab", 1)))),
    "an array and more": one(ext(1, msgpack.packb(((2,), "uint8", b"ab")) + b"\0")),
    "a payload of map": one(ext(1, b"\x81\xa1a\x01")),
    "a payload that lies": one(ext(1, b"\x93\x91\x02\xa5uint8\xc6\xff\xff\xff\xffab")),
    "an empty payload": one(ext(1, b"")),
    "a scalar with a shape": one(array(code=3)),
    "a complex of text": one(ext(2, msgpack.packb(("1", "2")))),
    "a complex of three": one(ext(2, msgpack.packb((1.0, 2.0, 3.0)))),
    "a complex of lists": one(ext(2, msgpack.packb(([1.0], [2.0])))),
    "a tuple that is a map": one(ext(4, b"\x81\xa1a\x01")),
    "a timestamp": one(b"\xd6\xff\0\0\0\0"),
    "extension 7": one(ext(7, b"abc")),
    "extension -5": one(ext(-5, b"abc")),
    "parts of 2^40": one(parts((2**40,), GOOD)),
    "parts that are too few": one(parts((2**20, 2**20), GOOD, GOOD)),
    "parts of two types": one(parts((6,), GOOD, array((4,), "uint16"))),
    "parts of two axes": one(parts((2,), array((1, 2)))),
    "parts that are numbers": one(parts((2,), b"\x01", b"\x02")),
    "parts that are none": one(parts((0,))),
    "parts and more": one(parts((2,), GOOD, other=GOOD)),
    "parts without a shape": one(parts(None, GOOD)),
    "parts without chunks": one(
        tree(("__msgpack_chunked_array__", b"\xc3"), ("shape", b"\x91\x02"))
    ),
    "arrays of other processes": one(msgpack.packb("//GDAPlaceholder:a")),
    "a pickle": pickle.dumps({"a": np.zeros(2)}, protocol=4),
    "a pickle, protocol 0": pickle.dumps({"a": 1}, protocol=0),
    "an archive with a pickle": torch_like(),
    "nothing": b"",
    "zeros": bytes(100),
    "the first byte of a map": b"\x81",
    "a bare number": b"\x05",
    "a bare array": GOOD,
    "two states, the first empty": b"\x80\x80",
}  # fmt: skip


@later
def file(root: Path, content: bytes) -> Path:
    (root / "checkpoint_1").write_bytes(content)
    return root / "checkpoint_1"


def beside(root: Path) -> Path:
    (root / "checkpoint_1_gda").mkdir()
    return file(one(GOOD))(root)


def pipe(root: Path) -> Path:
    import os

    os.mkfifo(root / "checkpoint_1")
    return root / "checkpoint_1"


CASES: Final[dict[str, Callable[[Path], Path]]] = {
    **{name: file(content) for name, content in FILES.items()},
    "a directory of arrays beside it": beside,
    "a pipe": pipe,
}
