"""Streams of records made to break a reader, or to make it mix leaves up.

Each case writes one under a directory and returns the path to load.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgpack

from tests.hostile.msgpack import GOOD, array, deep, file, parts, tree


def record(keys: Any, value: Any = GOOD) -> bytes:
    return msgpack.packb((keys, value))


A: Final = record(("a",))

FILES: Final[dict[str, bytes]] = {
    "a leaf twice": A + record(("b",)) + A,
    "a leaf below another": A + record(("a", "b")),
    "a leaf above another": record(("a", "b", "c")) + record(("a", "b")),
    "cut in the keys": A + record(("long key",))[:5],
    "cut in the value": A + A[:-1],
    "cut before the value": A + A[:3],
    "one byte more": A + b"\x92",
    "garbage behind": A + b"\0\0\0",
    "a map behind": A + tree(("b", GOOD)),
    "no keys": A + record(()),
    "65 keys": A + record(("k",) * 65),
    "keys of 2^32": A + b"\x92\xdd\xff\xff\xff\xff\xa1a",
    "keys that are a string": A + record("b"),
    "keys that are numbers": A + record((1, 2)),
    "keys that are bytes": A + record((b"b",)),
    "an empty key": A + record(("",)),
    "a key with a NUL": A + record(("b\0",)),
    "a value that is no bytes": A + record(("b",), 5),
    "a value that is text": A + record(("b",), "text"),
    "a value of 2^32": A + b"\x92\x91\xa1b\xc6\xff\xff\xff\xffabc",
    "an empty value": A + record(("b",), b""),
    "two values": A + record(("b",), GOOD + GOOD),
    "a value that is a tree": A + record(("b",), tree(("c", GOOD))),
    "a value that is a list": A + record(("b",), b"\x91\x01"),
    "a value that is bytes": A + record(("b",), b"\xc4\x01a"),
    "a value that is deep": A + record(("b",), deep(100_000)),
    "a record of three": A + msgpack.packb((("b",), GOOD, 1)),
    "shape 2^60": A + record(("b",), array((2**60,))),
    "dtype object": A + record(("b",), array(dtype="object")),
    "parts of 2^40": A + record(("b",), parts((2**40,), GOOD)),
    "a record within a value": A + record(("b",), A),
}

CASES: Final[dict[str, Callable[[Path], Path]]] = {
    name: file(content) for name, content in FILES.items()
}
