"""Archives of numpy made to break a reader, or to make it read what it must not.

Each case writes one under a directory and returns the path to load.
"""

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.hostile import later

ZEROS: Final = np.zeros(2, np.float32)


def npy(value: Any) -> bytes:
    content = io.BytesIO()
    np.save(content, np.asarray(value))
    return content.getvalue()


def header(text: bytes, data: bytes = b"\0" * 8, version: int = 1) -> bytes:
    """An array with this text in its header."""
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes((version, 0)) + length + text + data


def described(**changes: Any) -> bytes:
    good = {"descr": "<f4", "fortran_order": False, "shape": (2,)}
    return header(repr(good | changes).encode())


def archive(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        for name, data in members:
            file.writestr(zipfile.ZipInfo(name), data, method)
    return content.getvalue()


def one(data: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    return archive(("a.npy", npy(ZEROS)), ("b.npy", data), method=method)


def named(*names: str) -> bytes:
    """A good archive but for its names, each of which may be there several times."""
    plain = [f"{i:0{len(name) - 4}}.npy" for i, name in enumerate(names)]
    content = archive(*((name, npy(ZEROS)) for name in plain))
    for before, name in zip(plain, names, strict=True):
        content = content.replace(before.encode(), name.encode())
    return content


def entries(content: bytes) -> list[int]:
    """Where the entries of the directory begin."""
    found, at = [], content.find(b"PK\1\2")
    while at >= 0:
        found.append(at)
        at = content.find(b"PK\1\2", at + 1)
    return found


def lie(at: int, form: str, value: int, *, entry: int = 1, content: bytes = b""):
    """A good archive, but for a number in an entry of its directory."""
    changed = bytearray(content or one(npy(ZEROS)))
    struct.pack_into(form, changed, entries(bytes(changed))[entry] + at, value)
    return bytes(changed)


def end(at: int, form: str, value: int) -> bytes:
    """A good archive, but for a number in what ends it."""
    changed = bytearray(one(npy(ZEROS)))
    struct.pack_into(form, changed, changed.rfind(b"PK\5\6") + at, value)
    return bytes(changed)


def bomb(size: int, said: int) -> bytes:
    """An array of zeros that expands to `size` bytes, and says another size."""
    head = header(
        repr({"descr": "|u1", "fortran_order": False, "shape": (said,)}).encode(), b""
    )
    codec = zlib.compressobj(9, zlib.DEFLATED, -15)
    data, crc = codec.compress(head), zlib.crc32(head)
    for _ in range(size // 2**20):
        data, crc = data + codec.compress(bytes(2**20)), zlib.crc32(bytes(2**20), crc)
    data += codec.flush()
    total = len(head) + said
    name = b"a.npy"
    numbers = struct.pack("<LLL", crc, len(data), total)
    local = struct.pack("<4sHHHHH", b"PK\3\4", 20, 0, 8, 0, 0x21) + numbers
    local += struct.pack("<HH", len(name), 0) + name + data
    entry = struct.pack("<4sHHHHHH", b"PK\1\2", 20, 20, 0, 8, 0, 0x21) + numbers
    entry += struct.pack("<HHHHHLL", len(name), 0, 0, 0, 0, 0, 0) + name
    last = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(local), 0)
    return local + entry + last


def deflated(changed: Callable[[bytearray, int], object]) -> bytes:
    """A compressed archive, in which the data of the only member are changed."""
    values = np.arange(1000, dtype=np.float32)
    content = bytearray(archive(("a.npy", npy(values)), method=zipfile.ZIP_DEFLATED))
    changed(content, 30 + len("a.npy"))
    return bytes(content)


def flip(at: int) -> Callable[[bytearray, int], object]:
    def change(content: bytearray, start: int) -> None:
        content[start + at] ^= 0x55

    return change


def overlapping() -> bytes:
    """Two members, of which the second begins in the first."""
    inner = archive(("b.npy", npy(ZEROS)))
    local = inner[: inner.find(b"PK\1\2")]
    outer = npy(np.frombuffer(local, np.uint8))
    content = bytearray(archive(("a.npy", outer), ("b.npy", npy(ZEROS))))
    struct.pack_into(
        "<L", content, entries(bytes(content))[1] + 42, content.find(local[4:]) - 4
    )
    return bytes(content)


def flipped_value() -> bytes:
    content = bytearray(archive(("a.npy", npy(np.arange(9.0)))))
    content[content.find(b"PK\1\2") - 1] ^= 1
    return bytes(content)


def deep(text: bytes, depth: int = 4000) -> bytes:
    return one(header(text * depth))


FILES: Final[dict[str, Callable[[], bytes]]] = {
    "objects": lambda: archive(("a.npy", npy(np.array([{}], object)))),
    "objects among numbers": lambda: one(npy(np.array([{}, 1], object))),
    "a pickle among arrays": lambda: archive(
        ("a.npy", npy(ZEROS)), ("data.pkl", pickle.dumps({"a": 1}))
    ),
    "a pickle that is called an array": lambda: one(pickle.dumps({"a": 1})),
    "structures": lambda: one(npy(np.zeros(2, [("x", "<f4"), ("y", "<i4")]))),
    "structures with other names": lambda: one(npy(np.zeros(2, [("é", "<f4")]))),
    "texts": lambda: one(npy("text")),
    "bytes": lambda: one(npy(b"text")),
    "dates": lambda: one(npy(np.array("2020", "M8[D]"))),
    "elements of 16 bytes": lambda: one(npy(np.zeros(2, np.longdouble))),
    "elements of unknown type": lambda: one(described(descr="|V1")),
    "elements of no type": lambda: one(described(descr="<x4")),
    "a type that is a file": lambda: one(described(descr="/etc/passwd")),
    "a type of many numbers": lambda: one(described(descr="(9,9)f4")),
    "a type that is a number": lambda: one(described(descr=4)),
    "a negative size": lambda: one(described(shape=(-2,))),
    "a huge size": lambda: one(described(shape=(2**60,))),
    "sizes whose product wraps around": lambda: one(described(shape=(2**33, 2**33, 2))),
    "a size that is no integer": lambda: one(described(shape=(2.0,))),
    "a size that is true": lambda: one(described(shape=(True, 2))),
    "a size of 4000 digits": lambda: one(header(b"{'shape': (%b,)}" % (b"9" * 4000))),
    "a shape that is a list": lambda: one(described(shape=[2])),
    "rank 1000": lambda: one(described(shape=(1,) * 999 + (2,))),
    "an order that is no bool": lambda: one(described(fortran_order=1)),
    "a key missing": lambda: one(header(b"{'descr': '<f4', 'shape': (2,)}")),
    "a header that is a call": lambda: one(header(b"__import__('os').system('true')")),
    "a header that is a list": lambda: one(header(b"[1]")),
    "a header that is no UTF-8": lambda: one(header(b"\xff\xfe")),
    "a header that does not end": lambda: one(header(b"{'descr': '")),
    "a header of lists in lists": lambda: deep(b"["),
    "a header of minuses": lambda: deep(b"-"),
    "a header of dicts in dicts": lambda: deep(b"{1:", 2000),
    "a header of 2^31 bytes": lambda: one(
        b"\x93NUMPY\2\0" + (2**31).to_bytes(4, "little") + b"\0" * 64
    ),
    "a header beyond the member": lambda: one(b"\x93NUMPY\1\0\xff\x00{}"),
    "another version": lambda: one(header(b"{}", version=4)),
    "shape and bytes disagree": lambda: one(described(shape=(3,))),
    "an empty member": lambda: one(b""),
    "a member without array": lambda: one(b"text"),
    "a name twice": lambda: named("a.npy", "b.npy", "b.npy"),
    "a name that leads up": lambda: named("a.npy", "../b.npy"),
    "a name that leads up below": lambda: named("a.npy", "x/../b.npy"),
    "an absolute name": lambda: named("a.npy", "/etc/b.npy"),
    "a name with an empty part": lambda: named("a.npy", "x//b.npy"),
    "a name of nothing": lambda: named("a.npy", "x/.npy"),
    "a name that ends in a NUL": lambda: named("a.npy", "b\0c.npy"),
    "a name in many lines": lambda: named("a.npy", "\n" * 50 + ".txt"),
    "a name of 60,000 characters": lambda: named("a.npy", "b" * 60_000 + ".npy"),
    "a first name of 60,000 characters": lambda: named("b" * 60_000 + ".npy"),
    "another name in the directory": lambda: lie(46, "<B", ord("c")),
    "another place": lambda: lie(42, "<L", 7),
    "a place behind the end": lambda: lie(42, "<L", 2**31),
    "the place of another member": lambda: lie(42, "<L", 0),
    "an entry that is encrypted": lambda: lie(8, "<H", 1),
    "another method": lambda: lie(10, "<H", 8),
    "an unknown method": lambda: lie(10, "<H", 97),
    "members in bz2": lambda: one(npy(ZEROS), zipfile.ZIP_BZIP2),
    "members in lzma": lambda: one(npy(ZEROS), zipfile.ZIP_LZMA),
    "a size that is too large": lambda: lie(24, "<L", 2**31),
    "stored bytes that are too many": lambda: lie(20, "<L", 2**31),
    "sizes of zip64 that are not there": lambda: lie(24, "<L", 2**32 - 1),
    "a version to come": lambda: lie(6, "<H", 99),
    "a directory that is too long": lambda: end(12, "<L", 2**31),
    "a directory that is too short": lambda: end(12, "<L", 40),
    "a directory behind the end": lambda: end(16, "<L", 2**31),
    "overlapping members": overlapping,
    "values that have changed": flipped_value,
    "compressed values that have changed": lambda: deflated(flip(900)),
    "a compressed header that has changed": lambda: deflated(flip(2)),
    "a bomb that says so": lambda: bomb(2**30, 2**32 - 200),
    "a bomb that says less": lambda: bomb(2**30, 2**20),
    "a stream that ends early": lambda: bomb(2**20, 2**20 + 1),
    "holes that are compressed to nothing": lambda: bomb(0, 2**20),
    "many members without arrays": lambda: archive(
        *((f"{i}.npy", b"") for i in range(100_000))
    ),
    "a directory of 9 MiB": lambda: archive(
        *((f"{i:0900}.npy", b"") for i in range(10_000))
    ),
    "nothing behind the first member": lambda: one(npy(ZEROS))[:150],
    "no directory": lambda: one(npy(ZEROS))[:-30],
    "a bare array": lambda: npy(ZEROS),
    "a bare array of objects": lambda: npy(np.array([{}], object)),
    "an archive of something else": lambda: archive(("notes.txt", b"text")),
    "an empty archive": lambda: archive(),
}


@later
def made(root: Path, make: Callable[[], bytes]) -> Path:
    (root / "a.npz").write_bytes(make())
    return root / "a.npz"


CASES: Final[dict[str, Callable[[Path], Path]]] = {
    name: made(make) for name, make in FILES.items()
}
