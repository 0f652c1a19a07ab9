"""Databases of TensorStore whose tree is made to break a reader, or to lead elsewhere.

Each case writes one under a directory and returns the path to load: a checkpoint of
Orbax whose arrays are in that database. Its checksums are mostly right.
"""

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import crc32c
import numpy as np

from tests.hostile import later, orbax

MANIFEST: Final = 0x0CDB3A2A
NODE: Final = 0x0CDB20DE
VALUES: Final = np.arange(8, dtype="<f4")


class Place(NamedTuple):
    """Where a value or a node is: which file of the table, and what of it."""

    file: int = 0
    offset: int = 0
    size: int = 0


def number(value: int) -> bytes:
    """A number, seven bits to the byte."""
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def numbers(values: Sequence[int]) -> bytes:
    return b"".join(map(number, values))


def block(magic: int, content: bytes, *, kind: int = 0) -> bytes:
    """A manifest or a node; kind 1 is zstd."""
    inner = b"\0" + number(kind) + content
    data = struct.pack(">I", magic) + struct.pack("<Q", len(inner) + 16) + inner
    return data + struct.pack("<I", crc32c.crc32c(data))


def files(*names: tuple[str, str]) -> bytes:
    """A table of files: base and the rest of the path of each."""
    return (
        number(len(names))
        + bytes(len(names) - 1)
        + numbers([len(base) + len(name) for base, name in names])
        + numbers([len(base) for base, _ in names])
        + "".join(base + name for base, name in names).encode()
    )


TABLE: Final = files(("", "d/node"))


def keys(names: Sequence[str]) -> bytes:
    return number(len(names)) + bytes(len(names) - 1) + numbers([len(n) for n in names])


def leaf(entries: dict[str, bytes | Place], table: bytes) -> bytes:
    """A node without others below it: values that are in it, or elsewhere."""
    names, values = sorted(entries), [entries[name] for name in sorted(entries)]
    away = [value for value in values if isinstance(value, Place)]
    return b"".join(
        (
            b"\0" + table + keys(names) + "".join(names).encode(),
            numbers([v.size if isinstance(v, Place) else len(v) for v in values]),
            numbers([isinstance(value, Place) for value in values]),
            numbers([place.file for place in away]),
            numbers([place.offset for place in away]),
            b"".join(value for value in values if isinstance(value, bytes)),
        )
    )


def inner(entries: dict[str, Place], table: bytes, height: int) -> bytes:
    """A node with others below it."""
    names, places = sorted(entries), [entries[name] for name in sorted(entries)]
    parts = [bytes([height]) + table + keys(names) + bytes(len(names))]
    parts.append("".join(names).encode())
    parts += [numbers([place[i] for place in places]) for i in range(3)]
    return b"".join((*parts, numbers([1] * len(names)) * 3))


def manifest(root: Place, height: int, *, table: bytes = TABLE, kind: int = 0) -> bytes:
    config = bytes(16) + number(kind) + number(100) + number(2**23) + b"\4\0"
    return b"".join(
        (
            config,
            table,
            b"\1\1" + bytes([height]) + numbers(root) + b"\1\1\1",
            struct.pack("<Q", 1) + b"\0",
        )
    )


ZARRAY: Final = json.dumps(orbax.ZARRAY | {"compressor": None, "chunks": [8]}).encode()
SOUND: Final[dict[str, bytes | Place]] = {"w/.zarray": ZARRAY, "w/0": VALUES.tobytes()}


def write(root: Path, nodes: bytes, top: bytes, **more: bytes) -> Path:
    """A checkpoint with the array `w`, in a database of these two files and others."""
    step = root / "step"
    (step / "d").mkdir(parents=True)
    (step / "d/node").write_bytes(nodes)
    (step / "manifest.ocdbt").write_bytes(top)
    data = {"use_zarr3": False, "use_ocdbt": True, "tree_metadata": orbax.row("w")}
    (step / "_METADATA").write_text(json.dumps(data))
    for name, content in more.items():
        (step / "d" / name).write_bytes(content)
    return step


@later
def node(root: Path, content: bytes, *, height: int = 0, kind: int = 0) -> Path:
    """A tree of one node."""
    nodes = block(NODE, content, kind=kind)
    top = block(MANIFEST, manifest(Place(0, 0, len(nodes)), height))
    return write(root, nodes, top)


@later
def elsewhere(root: Path, base: str, name: str) -> Path:
    """The values of a good array, in a file outside."""
    (root / "secret").write_bytes(VALUES.tobytes())
    texts = [text.replace("ROOT", str(root)) for text in (base, name)]
    entries = SOUND | {"w/0": Place(0, 0, VALUES.nbytes)}
    return node(leaf(entries, files((texts[0], texts[1]))))(root)


@later
def node_elsewhere(root: Path, base: str, name: str) -> Path:
    """The root of the tree, in a file outside."""
    nodes = block(NODE, leaf(SOUND, files(("", "d/x"))))
    (root / "secret").write_bytes(nodes)
    table = files((base, name))
    top = block(MANIFEST, manifest(Place(0, 0, len(nodes)), 0, table=table))
    return write(root, nodes, top)


@later
def linked(root: Path, name: str, change: Callable[[Path, Path], object]) -> Path:
    """The values are in a file of the checkpoint, on the way to which is a link."""
    step = elsewhere("", name)(root)
    (root / "away").mkdir()
    (root / "away/secret").write_bytes(VALUES.tobytes())
    change(step, root / "away")
    return step


def deep(step: Path, away: Path) -> None:
    (step / "x/y").mkdir(parents=True)
    (step / "x/y/z").symlink_to(away, target_is_directory=True)


def deep_in_data(step: Path, away: Path) -> None:
    (step / "d/x/y").mkdir(parents=True)
    (step / "d/x/y/z").symlink_to(away, target_is_directory=True)


def by_way_of_another(step: Path, away: Path) -> None:
    (step / "other/y").mkdir(parents=True)
    (step / "other/y/z").symlink_to(away, target_is_directory=True)
    (step / "x").symlink_to(step / "other", target_is_directory=True)


def deep_pipe(step: Path, away: Path) -> None:
    (step / "x/y/z").mkdir(parents=True)
    os.mkfifo(step / "x/y/z/secret")


@later
def tower(root: Path, height: int) -> Path:
    """A tree as high as that, each node of which has one below it."""
    nodes = block(NODE, leaf(SOUND, TABLE))
    last = Place(0, 0, len(nodes))
    for level in range(1, height + 1):
        above = block(NODE, inner({"": last}, TABLE, level))
        last = Place(0, len(nodes), len(above))
        nodes += above
    return write(root, nodes, block(MANIFEST, manifest(last, height)))


@later
def wide(root: Path, count: int) -> Path:
    """A root with so many others below it, which are all the same one."""
    nodes = block(NODE, leaf(SOUND, TABLE))
    below = dict.fromkeys([f"{i:07}" for i in range(count)], Place(0, 0, len(nodes)))
    above = block(NODE, inner(below, TABLE, 1))
    top = manifest(Place(0, len(nodes), len(above)), 1)
    return write(root, nodes + above, block(MANIFEST, top))


def round_and_round(root: Path) -> Path:
    """A node that is said to be below itself."""
    size = 0
    for _ in range(4):  # until its own size is in it
        nodes = block(NODE, inner({"": Place(0, 0, size)}, TABLE, 1))
        size = len(nodes)
    return write(root, nodes, block(MANIFEST, manifest(Place(0, 0, size), 1)))


def zeros(before: bytes, size: int) -> bytes:
    """A frame of zstd with some bytes, and zeros behind them."""
    head = (len(before) << 3).to_bytes(3, "little") + before
    return orbax.zstd_bomb(size)[:6] + head + orbax.zstd_bomb(size)[6:]


@later
def top(root: Path, content: bytes, *, kind: int = 0) -> Path:
    return write(
        root, block(NODE, leaf(SOUND, TABLE)), block(MANIFEST, content, kind=kind)
    )


def many_bombs(root: Path) -> Path:
    """A hundred nodes, each of which is small enough."""
    one = block(NODE, zeros(b"\0" + number(2**22), 2**24), kind=1)
    places = {f"{i:03}": Place(0, i * len(one), len(one)) for i in range(100)}
    above = block(NODE, inner(places, TABLE, 1))
    at = Place(0, 100 * len(one), len(above))
    return write(root, one * 100 + above, block(MANIFEST, manifest(at, 1)))


@later
def damaged(root: Path, change: Callable[[bytes], bytes], name: str) -> Path:
    """A sound tree, one file of which has changed."""
    step = node(leaf(SOUND, files(("", "d/x"))))(root)
    path = step / name
    path.write_bytes(change(path.read_bytes()))
    return step


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :]


CONFIG: Final = bytes(16) + b"\0" + number(100) + number(2**23) + b"\4\0"

CASES: Final[dict[str, Callable[[Path], Path]]] = {
    **{
        f"values in {base!r} and {name!r}": elsewhere(base, name)
        for base, name in (
            ("../", "secret"),
            ("", "../secret"),
            ("d/../../", "secret"),
            ("", "ROOT/secret"),
            ("ROOT/", "secret"),
            ("file://ROOT/", "secret"),
            ("", "d"),
            ("", ""),
            ("", "d/none"),
            ("", "d/\0"),
        )
    },
    **{
        f"a node in {base!r} and {name!r}": node_elsewhere(base, name)
        for base, name in (
            ("../", "secret"),
            ("", "../secret"),
            ("http://127.0.0.1:9/", "x"),
            ("", "d"),
            ("", ""),
            ("", "d/none"),
        )
    },
    "a link deep below": linked("x/y/z/secret", deep),
    "a link deep in the data": linked("d/x/y/z/secret", deep_in_data),
    "a link by way of another": linked("x/y/z/secret", by_way_of_another),
    "a pipe deep below": linked("x/y/z/secret", deep_pipe),
    "a value of 2^40 bytes": node(leaf(SOUND | {"w/0": Place(0, 0, 2**40)}, TABLE)),
    "a value at 2^63": node(leaf(SOUND | {"w/0": Place(0, 2**63, 2**63 - 1)}, TABLE)),
    "a file that is none of the table": node(
        leaf(SOUND | {"w/0": Place(7, 0, 4)}, TABLE)
    ),
    "2^40 files": node(b"\0" + number(2**40)),
    "2^40 entries": node(b"\0" + TABLE + number(2**40)),
    "2^20 entries, none of them there": node(b"\0" + TABLE + number(2**20)),
    "no entries": node(b"\0" + TABLE + b"\0"),
    "a number that does not end": node(b"\0" + b"\xff" * 100),
    "a node of 8 kB that is a bomb": node(zeros(b"\0" + number(2**26), 2**28), kind=1),
    "a node of 200 kB that is a bomb": node(
        zeros(b"\0" + number(2**30), 6 * 2**30), kind=1
    ),
    "many nodes that are bombs": many_bombs,
    "a manifest that is a bomb": top(zeros(CONFIG + number(2**28), 2**30), kind=1),
    "zstd that is none": node(b"zstd", kind=1),
    "zstd that is cut short": node(orbax.zstd_bomb(2**20)[:-5], kind=1),
    "zstd that is empty": node(b"", kind=1),
    "compressed in another way": node(leaf(SOUND, TABLE), kind=7),
    "a node below itself": round_and_round,
    "another height than said": node(leaf(SOUND, TABLE), height=3),
    "a tree 200 nodes high": tower(200),
    "a root with 100,000 nodes below it": wide(100_000),
    "a node of 2^62 bytes": top(manifest(Place(0, 0, 2**62), 0)),
    "a node that is the manifest": top(
        manifest(Place(0, 0, 40), 0, table=files(("", "manifest.ocdbt")))
    ),
    "several manifests": top(manifest(Place(), 0, kind=1)),
    "manifests of a kind that is none": top(manifest(Place(), 0, kind=9)),
    "no version": top(CONFIG + TABLE + b"\0"),
    "2^40 versions": top(CONFIG + TABLE + number(2**40)),
    **{
        f"{name} with bit {at} flipped": damaged(flipped(at), name)
        for name in ("manifest.ocdbt", "d/node")
        for at in (0, 4, 12, 13, 14, 30, 40, -1)
    },
    **{
        f"{name} of {size} bytes": damaged(lambda data, n=size: data[:n], name)
        for name in ("manifest.ocdbt", "d/node")
        for size in (0, 3, 12, 16, 40)
    },
}
