"""The values of OCDBT databases, read by our own decoder.

The manifest and the nodes of a tree may be compressed: a few kilobytes may expand to
gigabytes, which TensorStore allocates. So a tree is read within limits before
TensorStore opens the database. `_storage.files` checks links.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flaxckpt import _storage
from flaxckpt._zarr import btree
from flaxckpt._zarr.metadata import DATABASE

if TYPE_CHECKING:
    import tensorstore as ts

_MAX_MANIFEST_BYTES = 64 * 2**20
_FREE_BYTES = 64 * 2**20
_BEST_RATIO = 2048
"""Maximal ratio of unpacked to stored size of all nodes; many similar leaves reach
1200."""

_MAX_HEIGHT = 16
_MAX_NODES = 2**16


class DatabaseIndex:
    """The values of a database, which is not changed meanwhile.

    TensorStore takes five times as long to find them one by one. The links of `root`
    must be checked, and `size` is that of its manifest. `values` is key -> value, or
    its place if not small; in ascending order. Raises ValueError if the tree is damaged
    or too large.
    """

    def __init__(self, root: Path, size: int) -> None:
        self._root = root
        self.values = _Tree(root).read(size)
        self._keys = list(self.values)

    def keys(self, prefix: str) -> list[str]:
        start = prefix.encode()
        rest = itertools.islice(self._keys, bisect.bisect_left(self._keys, start), None)
        return [
            key.decode()
            for key in itertools.takewhile(lambda key: key.startswith(start), rest)
        ]

    def find(self, key: str) -> btree.Value:
        """Returns a value, or its place; raises ValueError if it is missing."""
        found = self.values.get(key.encode())
        if found is None:
            raise ValueError(f"{key} is missing")
        return found

    def read(self, key: str, part: slice = slice(None)) -> bytes:
        """Returns a value, or a part of it; raises ValueError if missing or cut off."""
        value = self.find(key)
        if isinstance(value, bytes):
            return value[part]
        start, stop, _ = part.indices(value.size)
        file = self._root / value.file
        content = _storage.of(file).read_range(file, value.offset + start, stop - start)
        if len(content) != stop - start:
            raise ValueError(f"{file.name} ends before {key} does")
        return content


_INDEXES: weakref.WeakValueDictionary[tuple[Path, tuple[int, ...]], DatabaseIndex] = (
    weakref.WeakValueDictionary()
)
"""The database, with the fingerprint of its manifest -> the index in use."""


class _Held:
    """The indexes that arrays opened with a context use.

    Threads that open such arrays at the same time wait for the one that reads an index.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.indexes: dict[Path, DatabaseIndex] = {}


_HELD: weakref.WeakKeyDictionary[ts.Context, _Held] = weakref.WeakKeyDictionary()


def open_index(root: Path, context: ts.Context | None = None) -> DatabaseIndex:
    """Returns the index of a database, read once for all who use it at a time.

    The context holds the index as long as it exists itself; within it, the database
    counts as unchanged. See `DatabaseIndex` for `root` and errors.
    """
    if context is None:
        return _find_index(root)
    held = _HELD.setdefault(context, _Held())
    with held.lock:
        if root not in held.indexes:
            held.indexes[root] = _find_index(root)
        return held.indexes[root]


def _find_index(root: Path) -> DatabaseIndex:
    manifest = root / DATABASE
    with _storage.paths.read_ahead([manifest]):
        fingerprint, size = _storage.of(root).fingerprint(manifest)
        index = _INDEXES.get((root, fingerprint))
        if index is None:
            index = _INDEXES[root, fingerprint] = DatabaseIndex(root, size)
    return index


def read_tree(root: Path) -> dict[bytes, btree.Value]:
    """Returns the values of a database: key -> value, or its place if not small.

    See `DatabaseIndex` for `root` and errors.
    """
    manifest = root / DATABASE
    with _storage.paths.read_ahead([manifest]):
        return _Tree(root).read(_storage.of(root).fingerprint(manifest)[1])


class _Tree:
    """The tree of a database, read node by node within limits."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._storage = _storage.of(root)
        self._stored = self._unpacked = self._nodes = 0
        self._least = b""  # no later key may be before it

    def read(self, manifest_bytes: int) -> dict[bytes, btree.Value]:
        if manifest_bytes > _MAX_MANIFEST_BYTES:
            raise ValueError(
                f"{DATABASE} has {manifest_bytes} bytes, wanted at most"
                f" {_MAX_MANIFEST_BYTES}"
            )
        content = self._read_part(btree.Place(DATABASE, 0, manifest_bytes))
        with _named(DATABASE):
            fields = btree.unpack_manifest(content)
            self._count(content, fields)
            root = btree.decode_manifest(fields)
            if root is not None and root.height > _MAX_HEIGHT:
                raise ValueError(
                    f"it declares a tree of {root.height} levels, wanted at most"
                    f" {_MAX_HEIGHT}"
                )
        values: dict[bytes, btree.Value] = {}
        if root is not None:
            self._add(values, root.place, root.base, root.height, b"")
        return values

    def _add(
        self,
        values: dict[bytes, btree.Value],
        place: btree.Place,
        base: str,
        height: int,
        prefix: bytes,
    ) -> None:
        """Adds the keys and values in a node, and in all nodes below it."""
        content = self._read_part(place)
        with _named(place.file):
            fields = btree.unpack_node(content)
            self._count(content, fields)
            if height == 0:
                entries = btree.decode_leaf(fields, base)
                self._check_order(prefix + entries[0][0])
            else:
                children = btree.decode_inner(fields, base, height)
        if height == 0:
            values.update([(prefix + key, value) for key, value in entries])
            self._least = prefix + entries[-1][0] + b"\0"
            return
        for child in children:
            self._check_order(prefix + child.first)
            self._least = prefix + child.first
            below = prefix + child.prefix
            self._add(values, child.place, child.base, height - 1, below)

    def _read_part(self, place: btree.Place) -> bytes:
        path = self._root / place.file
        if place.size > btree.MAX_NODE_BYTES:
            raise ValueError(
                f"{path.name} has a node of {place.size} bytes according to its"
                " manifest"
            )
        content = self._storage.read_range(path, place.offset, place.size)
        if len(content) < place.size:
            raise ValueError(f"{path.name} is shorter than its manifest says")
        return content

    def _check_order(self, key: bytes) -> None:
        if key < self._least:
            raise ValueError("its keys are not in ascending order over all nodes")

    def _count(self, content: bytes, fields: bytes) -> None:
        """Adds a node or the manifest to the sums; raises ValueError if too large."""
        self._nodes += 1
        self._stored += len(content)
        self._unpacked += len(fields)
        if (
            self._nodes > _MAX_NODES
            or self._unpacked > _FREE_BYTES + _BEST_RATIO * self._stored
        ):
            raise ValueError(
                f"it expands to {len(fields)} bytes; the {self._nodes} nodes so far"
                f" expand from {self._stored} to {self._unpacked} bytes, more than is"
                " supported"
            )


@contextlib.contextmanager
def _named(file: str) -> Iterator[None]:
    """Puts the name of a file before what is said of it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
