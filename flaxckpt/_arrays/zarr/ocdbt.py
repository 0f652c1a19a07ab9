"""OCDBT databases of TensorStore: opening, merging, and reading their trees.

The manifest and the nodes of a tree may be compressed: a few kilobytes may expand to
gigabytes, which TensorStore allocates. So a tree is read by our own decoder first, with
limits. `_storage.files` checks links.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path

import tensorstore as ts

from flaxckpt import _storage
from flaxckpt._arrays.zarr import btree, metadata
from flaxckpt._arrays.zarr.metadata import DATABASE

_MAX_MANIFEST_BYTES = 64 * 2**20
_FREE_BYTES = 64 * 2**20
_BEST_RATIO = 2048
"""Maximal ratio of unpacked to stored size of all nodes; many similar leaves reach
1200."""

_MAX_HEIGHT = 16
_MAX_NODES = 2**16

_checked: dict[tuple[Path, tuple[int, ...]], None] = {}
"""Databases whose trees were read, with the fingerprints of their manifests."""

_MOST_CHECKED = 64


def check(root: Path) -> None:
    """Checks that the tree of a database can be read in limited memory.

    Args:
        root: The directory of the database, with checked links.

    Raises:
        ValueError: The tree is damaged or too large.
        OSError: The database is missing or unreadable.
    """
    fingerprint, _ = _storage.of(root).fingerprint(root / DATABASE)
    if (root, fingerprint) not in _checked:
        read_tree(root)


def read_tree(root: Path) -> dict[bytes, btree.Value]:
    """Returns the values of a database: key -> value, or its place if not small.

    TensorStore takes five times as long to find them one by one.

    Args:
        root: The directory of the database, with checked links.

    Raises:
        ValueError: The tree is damaged or too large.
        OSError: The database is missing or unreadable.
    """
    manifest = root / DATABASE
    with _storage.paths.read_ahead([manifest]):
        fingerprint, size = _storage.of(root).fingerprint(manifest)
        if size > _MAX_MANIFEST_BYTES:
            raise ValueError(
                f"{DATABASE} has {size} bytes, wanted at most {_MAX_MANIFEST_BYTES}"
            )
        values = dict(_Tree(root).read(size))
    _checked[root, fingerprint] = None
    while len(_checked) > _MOST_CHECKED:
        _checked.pop(next(iter(_checked)), None)
    return values


def open(root: Path, context: ts.Context) -> ts.KvStore:
    """Opens a database, for reading or writing.

    Args:
        root: The directory of the database.
        context: Shared by databases that copy values from each other.
    """
    _storage.store_requests.use_threads()
    spec = metadata.kvstore(root, "", ocdbt=True)
    return _storage.paths.result(ts.KvStore.open(spec, context=context), root)


_DATABASES: weakref.WeakKeyDictionary[ts.Context, dict[Path, ts.KvStore]] = (
    weakref.WeakKeyDictionary()
)
"""The open databases of each context, shared by arrays that are read together."""


def open_shared(root: Path, context: ts.Context) -> ts.KvStore:
    """Opens a database once for all its arrays that are read with a context."""
    opened = _DATABASES.setdefault(context, {})
    if root not in opened:
        opened[root] = open(root, context)
    return opened[root]


class _Tree:
    """The tree of a database, read node by node within limits."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stored = self._unpacked = self._nodes = 0

    def read(self, manifest_bytes: int) -> Iterator[tuple[bytes, btree.Value]]:
        """Yields all keys and their values."""
        content = _read_part(self._root, btree.Place(DATABASE, 0, manifest_bytes))
        with _named(DATABASE):
            fields = btree.unpack_manifest(content)
            self._count(content, fields)
            root = btree.decode_manifest(fields)
            if root is None:
                return
            if root.height > _MAX_HEIGHT:
                raise ValueError(
                    f"it declares a tree of {root.height} levels, wanted at most"
                    f" {_MAX_HEIGHT}"
                )
        yield from self._values(root.place, root.base, root.height, b"")

    def _values(
        self, place: btree.Place, base: str, height: int, prefix: bytes
    ) -> Iterator[tuple[bytes, btree.Value]]:
        content = _read_part(self._root, place)
        with _named(place.file):
            fields = btree.unpack_node(content)
            self._count(content, fields)
            if height == 0:
                entries = btree.decode_leaf(fields, base)
            else:
                children = btree.decode_inner(fields, base, height)
        if height == 0:
            yield from ((prefix + key, value) for key, value in entries)
            return
        for child in children:
            below = prefix + child.prefix
            yield from self._values(child.place, child.base, height - 1, below)

    def _count(self, content: bytes, fields: bytes) -> None:
        """Adds a node or the manifest to the sums.

        Raises:
            ValueError: The sums are too large.
        """
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


def _read_part(root: Path, place: btree.Place) -> bytes:
    path = root / place.file
    if place.size > btree.MAX_NODE_BYTES:
        raise ValueError(
            f"{path.name} has a node of {place.size} bytes according to its manifest"
        )
    content = _storage.of(path).read_range(path, place.offset, place.size)
    if len(content) < place.size:
        raise ValueError(f"{path.name} is shorter than its manifest says")
    return content
