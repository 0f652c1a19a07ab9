"""Databases of TensorStore: opened, merged, and looked through before they are read.

The manifest and the nodes of the tree are mostly compressed: some kilobytes may expand
to gigabytes, and TensorStore takes memory for whatever comes of them. So how much that
is at most is found first, in their frames of zstd. Paths that lead out of a database
TensorStore refuses itself; links are left to `_storage.symlinks`.

Source: TensorStore's description of the format, and RFC 8878.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from flaxckpt import _storage
from flaxckpt._arrays.zarr import metadata

MANIFEST = "manifest.ocdbt"
PART = "ocdbt.process_"
"""How the database of one process is called, for Orbax as for us."""

_MAX_MANIFEST_BYTES = 64 * 2**20
_MAX_NODE_BYTES = 128 * 2**20
"""Orbax makes nodes of at most 100 MB."""

_MAX_INNER_BYTES = 3 * 2**19
"""Of a node with others below it: there are some ten thousands of them at most."""

_FREE_BYTES = 64 * 2**20
_BEST_RATIO = 2048
"""How many times their size all nodes may hold; a great many leaves that are alike
come to 1200."""

_MAX_HEIGHT = 16
_MAX_NODES = 2**16
_PLACE = re.compile(
    r"btreenode:([A-Za-z0-9._/-]*):([A-Za-z0-9._/-]*):([0-9]{1,19}):([0-9]{1,19})"
)
_HEADER_BYTES = 12  # magic number and length
_CHECKSUM_BYTES = 4
_FRAME = b"\x28\xb5\x2f\xfd"
_BLOCK_BYTES = 2**17


def check(root: Path) -> None:
    """Asserts that the tree of a database can be read in sensible memory.

    Args:
        root: Its directory, whose links have been checked.

    Raises:
        ValueError: It cannot.
        OSError: It is missing, or cannot be read.
    """
    _checked(root, *_storage.of(root).fingerprint(root / MANIFEST))


@functools.lru_cache(maxsize=64)
def _checked(root: Path, fingerprint: tuple[int, ...], size: int) -> None:
    del fingerprint  # a key only
    if size > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST} has {size} bytes")
    tree = _Tree(root)
    tree.count(MANIFEST, _content(root / MANIFEST, 0, size))
    for height, place in tree.roots():
        if height > _MAX_HEIGHT:
            raise ValueError(f"the tree of {root} is said to be {height} nodes high")
        tree.walk(place, height)


def opened(root: Path, context: ts.Context) -> ts.KvStore:
    """A database, to be read or written.

    Args:
        root: Its directory.
        context: Shared by databases that take values over from each other.
    """
    _storage.client.use_threads()
    spec = metadata.kvstore(root, "", ocdbt=True)
    return _storage.paths.result(ts.KvStore.open(spec, context=context), root)


def merge(root: Path, writers: int) -> None:
    """Makes one database of those that single processes have written, in one step.

    Their values stay where they are, and are to be found by the whole only.
    """
    context = _storage.client.context()  # the same for all, or nothing is taken over
    whole = opened(root, context)
    transaction = ts.Transaction(atomic=True)
    taken = [
        opened(root / f"{PART}{writer}", context).experimental_copy_range_to(
            whole.with_transaction(transaction)
        )
        for writer in range(writers)
    ]
    for future in taken:
        _storage.paths.result(future, root)
    _storage.paths.result(transaction.commit_async(), root)
    for writer in range(writers):
        (root / f"{PART}{writer}" / MANIFEST).unlink(missing_ok=True)


def keys(root: Path) -> set[str]:
    """All keys of a database.

    Args:
        root: Its directory, whose links have been checked.

    Raises:
        ValueError: It is damaged, or cannot be read in sensible memory.
        OSError: It is missing, or cannot be read.
    """
    check(root)
    store = opened(root, _storage.client.context())
    found = _storage.paths.result(store.list(), root)
    return {key.decode(errors="surrogateescape") for key in found}


class _Place(NamedTuple):
    """Where a node is.

    Attributes:
        text: As TensorStore says it.
        file: Within the database.
        offset: In the file, in bytes.
        size: In bytes.
    """

    text: str
    file: str
    offset: int
    size: int


class _Tree:
    """The tree of a database, and what its nodes may come to."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stored = self._decoded = self._nodes = 0
        self._store: ts.KvStore | None = None

    def count(self, name: str, content: bytes) -> None:
        """Adds what a node or the manifest may expand to.

        Raises:
            ValueError: It is too much.
        """
        size = _decoded_bytes(name, content)
        self._nodes += 1
        self._stored += len(content)
        self._decoded += size
        if (
            size > _MAX_NODE_BYTES
            or self._nodes > _MAX_NODES
            or self._decoded > _FREE_BYTES + _BEST_RATIO * self._stored
        ):
            raise ValueError(
                f"{name} expands to {size} bytes, and with the {self._nodes - 1} nodes"
                f" before it, which have {self._stored} bytes, to {self._decoded}"
            )

    def roots(self) -> Iterator[tuple[int, _Place]]:
        """Height and root of the version that is read, if there is anything in it."""
        found = self._dump(None)
        versions = found.get("versions")
        if not versions:
            raise ValueError(f"{MANIFEST} is split into several files, not as usual")
        newest = versions[-1]
        if "root" in newest and "location" in newest["root"]:
            yield newest["root_height"], _place(newest["root"]["location"])

    def walk(self, place: _Place, height: int) -> None:
        """Counts a node and all below it."""
        path = self._root / place.file
        content = _content(path, place.offset, place.size)
        self.count(place.file, content)
        if height == 0:
            return
        if (size := _decoded_bytes(place.file, content)) > _MAX_INNER_BYTES:
            raise ValueError(f"{place.file} has {size} bytes of nodes below one")
        for entry in self._dump(place.text)["entries"]:
            # Of a node without others below it, these are values.
            self.walk(_place(str(entry.get("location"))), height - 1)

    def _dump(self, node: str | None) -> Any:
        if self._store is None:
            _storage.client.use_threads()
            spec = metadata.kvstore(self._root, "", ocdbt=False)
            opening = ts.KvStore.open(spec, context=_storage.client.context())
            self._store = _storage.paths.result(opening, self._root)
        return _storage.paths.result(ts.ocdbt.dump(self._store, node), self._root)


def _place(text: str) -> _Place:
    match = _PLACE.fullmatch(text)
    if match is None or ".." in text:
        raise ValueError(f"a node is said to be in {text[:80]!r}")
    base, name, offset, size = match.groups()
    return _Place(text, base + name, int(offset), int(size))


def _content(path: Path, offset: int, size: int) -> bytes:
    if size > _MAX_NODE_BYTES:
        raise ValueError(f"{path.name} is said to have a node of {size} bytes")
    content = _storage.of(path).read_range(path, offset, size)
    if len(content) < size:
        raise ValueError(f"{path.name} is shorter than its manifest says")
    return content


def _decoded_bytes(name: str, content: bytes) -> int:
    """How many bytes a manifest or a node has at most, decoded.

    Raises:
        ValueError: It is none.
    """
    # Two numbers follow the header, a byte each: its version, and how it is compressed.
    inner = content[_HEADER_BYTES:-_CHECKSUM_BYTES]
    if len(inner) < 2 or inner[0] != 0 or inner[1] > 1:
        raise ValueError(f"{name} is neither a manifest nor a node of a tree")
    return len(inner) if inner[1] == 0 else _frame_bytes(name, inner[2:])


def _frame_bytes(name: str, frame: bytes) -> int:
    """How many bytes a frame of zstd comes to at most: block by block, undecoded."""
    if frame[:4] != _FRAME or len(frame) < 6:
        raise ValueError(f"{name} is damaged: no zstd is where it should be")
    kind = frame[4]
    is_single = kind >> 5 & 1
    size_bytes = (is_single, 2, 4, 8)[kind >> 6]
    at = 5 + (1 - is_single) + (0, 1, 2, 4)[kind & 3] + size_bytes
    total = 0
    while True:
        header = int.from_bytes(frame[at : at + 3], "little")
        if at + 3 > len(frame):
            raise ValueError(f"{name} is damaged: its zstd is cut short")
        size = header >> 3
        is_compressed, is_repeated = header >> 1 & 2, header >> 1 & 1
        total += _BLOCK_BYTES if is_compressed else size
        if header & 1:
            return total
        at += 3 + (1 if is_repeated and not is_compressed else size)
