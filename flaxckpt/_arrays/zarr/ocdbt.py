"""OCDBT databases of TensorStore: opening, merging, and checks before reading.

The manifest and the nodes of the tree are mostly compressed: a few kilobytes may expand
to gigabytes, and TensorStore allocates the expanded size. So the maximal expanded size
is first computed from the zstd frames. Paths that lead out of a database are rejected;
`_storage.files` checks links.

Source: TensorStore's description of the format, and RFC 8878.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from flaxckpt import _storage
from flaxckpt._arrays.zarr import metadata
from flaxckpt._arrays.zarr.metadata import DATABASE, DATABASE_PART
from flaxckpt._types import JSON

_MAX_MANIFEST_BYTES = 64 * 2**20
_MAX_NODE_BYTES = 128 * 2**20
"""Orbax makes nodes of at most 100 MB."""

_MAX_INNER_BYTES = 3 * 2**19
"""Limit on a node with child nodes: at most some ten thousand children."""

_FREE_BYTES = 64 * 2**20
_BEST_RATIO = 2048
"""Maximal ratio of decoded to stored size of all nodes; many similar leaves reach
1200."""

_MAX_HEIGHT = 16
_MAX_NODES = 2**16
_PLACE = re.compile(
    r"(?:btreenode|value):([A-Za-z0-9._/-]*):([A-Za-z0-9._/-]*)"
    r":([0-9]{1,19}):([0-9]{1,19})"
)
_HEADER_BYTES = 12  # magic number and length
_CHECKSUM_BYTES = 4
_FRAME = b"\x28\xb5\x2f\xfd"
_BLOCK_BYTES = 2**17


class Place(NamedTuple):
    """The location of a node or of a value.

    Attributes:
        text: TensorStore's name of the location.
        file: File in the database.
        offset: Offset in the file, in bytes.
        size: Size in bytes.
    """

    text: str
    file: str
    offset: int
    size: int


class Root(NamedTuple):
    """The root of a tree.

    Attributes:
        height: Levels of the tree above the nodes with values.
        place: The location of the root.
    """

    height: int
    place: Place


def check(root: Path) -> Sequence[Root]:
    """Checks that the tree of a database can be read in limited memory.

    Args:
        root: The directory of the database, with checked links.

    Returns:
        The root of the tree; nothing for an empty tree.

    Raises:
        ValueError: The tree is damaged or too large.
        OSError: The database is missing or unreadable.
    """
    with _storage.paths.read_ahead([root / DATABASE]):
        return _check_tree(root, *_storage.of(root).fingerprint(root / DATABASE))


@functools.lru_cache(maxsize=64)
def _check_tree(root: Path, fingerprint: tuple[int, ...], size: int) -> Sequence[Root]:
    del fingerprint  # only a key of the cache
    if size > _MAX_MANIFEST_BYTES:
        raise ValueError(
            f"{DATABASE} has {size} bytes, wanted at most {_MAX_MANIFEST_BYTES}"
        )
    tree = _Tree(root)
    manifest = _read_part(root / DATABASE, 0, size)
    tree.count(DATABASE, manifest)
    roots = _roots(manifest)
    for height, place in roots:
        if height > _MAX_HEIGHT:
            raise ValueError(
                f"{DATABASE} declares a tree of {height} levels,"
                f" wanted at most {_MAX_HEIGHT}"
            )
        tree.walk(place, height)
    return roots


def index(root: Path, roots: Sequence[Root]) -> dict[bytes, bytes | str]:
    """Returns the values of a database: key -> value, or its location if not small.

    TensorStore takes five times as long to find them one by one.

    Args:
        root: The directory of the database, with checked links.
        roots: The result of `check`.

    Raises:
        ValueError, OSError: A node is damaged, or cannot be read.
    """
    tree = _Tree(root)
    return {
        key: value
        for height, place in roots
        for key, value in tree.values(place, height)
    }


def open(root: Path, context: ts.Context) -> ts.KvStore:
    """Opens a database, for reading or writing.

    Args:
        root: The directory of the database.
        context: Shared by databases that copy values from each other.
    """
    _storage.store_requests.use_threads()
    spec = metadata.kvstore(root, "", ocdbt=True)
    return _storage.paths.result(ts.KvStore.open(spec, context=context), root)


MANIFESTS: dict[str, JSON] = {"memory_key_value_store#manifests": {}}
"""The context resource that `open_checked` needs: the manifests of stores in memory."""


class Checked(NamedTuple):
    """A database, opened after `check`.

    Attributes:
        store: The database.
        roots: The result of `check`.
    """

    store: ts.KvStore
    roots: Sequence[Root]


def open_checked(root: Path, context: ts.Context) -> Checked:
    """Opens a database for reading, after `check`.

    TensorStore compares the manifest of a store with the present one before each read.
    It gets the manifest that was checked instead, from memory.

    Args:
        root: The directory of the database, with checked links.
        context: A context with `MANIFESTS`.

    Raises:
        ValueError, OSError: As for `check`.
    """
    manifest = root / DATABASE
    with _storage.paths.read_ahead([manifest]):
        roots = check(root)
        if not _storage.of(root).costs_requests:
            return Checked(open(root, context), roots)
        content = manifest.read_bytes()
    [resource] = MANIFESTS
    spec_in_memory: dict[str, JSON] = {
        "driver": "memory",
        "memory_key_value_store": resource,
        "path": f"{root}/",
    }
    in_memory = ts.KvStore.open(spec_in_memory, context=context).result()
    in_memory.write(DATABASE, content).result()
    spec = metadata.kvstore(root, "", ocdbt=True) | {"manifest": spec_in_memory}
    store = _storage.paths.result(ts.KvStore.open(spec, context=context), root)
    return Checked(store, roots)


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


def merge(root: Path, writers: int) -> None:
    """Merges the databases of all processes into a single database, atomically.

    Values stay in their files, and can be found only by the merged database.
    """
    context = _storage.store_requests.context()  # must be shared, or nothing is copied
    whole = open(root, context)
    transaction = ts.Transaction(atomic=True)
    taken = [
        open(root / f"{DATABASE_PART}{writer}", context).experimental_copy_range_to(
            whole.with_transaction(transaction)
        )
        for writer in range(writers)
    ]
    for future in taken:
        _storage.paths.result(future, root)
    _storage.paths.result(transaction.commit_async(), root)
    for writer in range(writers):
        (root / f"{DATABASE_PART}{writer}" / DATABASE).unlink(missing_ok=True)


def keys(root: Path) -> set[str]:
    """Returns all keys of a database.

    Args:
        root: The directory of the database, with checked links.

    Raises:
        ValueError: The database is damaged, or too large to read.
        OSError: The database is missing or unreadable.
    """
    check(root)
    store = open(root, _storage.store_requests.context())
    found = _storage.paths.result(store.list(), root)
    return {key.decode(errors="surrogateescape") for key in found}


class _Tree:
    """The tree of a database, with the maximal decoded size of its nodes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stored = self._decoded = self._nodes = 0
        self._store: ts.KvStore | None = None

    def count(self, name: str, content: bytes) -> None:
        """Adds the maximal decoded size of a node or the manifest.

        Raises:
            ValueError: The node or the sum is too large.
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
                f"{name} expands to {size} bytes; the {self._nodes} nodes so far expand"
                f" from {self._stored} to {self._decoded} bytes, more than is supported"
            )

    def values(
        self, place: Place, height: int, prefix: bytes = b""
    ) -> Iterator[tuple[bytes, bytes | str]]:
        """Yields the keys below a node, each with its value or the value's location.

        Args:
            place: The location of the node.
            height: Levels of the tree below the node.
            prefix: The start of all keys, which the node omits.
        """
        for entry in self._dump(place.text)["entries"]:
            if height == 0:
                value = entry.get("inline_value")
                yield (
                    prefix + entry["key"],
                    entry["indirect_value"] if value is None else value,
                )
            else:
                child = parse_place(str(entry.get("location")))
                inner = prefix + entry["subtree_common_prefix"]
                yield from self.values(child, height - 1, inner)

    def walk(self, place: Place, height: int) -> None:
        """Counts a node and its descendants."""
        path = self._root / place.file
        content = _read_part(path, place.offset, place.size)
        self.count(place.file, content)
        if height == 0:
            return
        if (size := _decoded_bytes(place.file, content)) > _MAX_INNER_BYTES:
            raise ValueError(f"{place.file} has an inner node of {size} bytes")
        for entry in self._dump(place.text)["entries"]:
            # At height 0, entries are values instead of nodes.
            self.walk(parse_place(str(entry.get("location"))), height - 1)

    def _dump(self, node: str) -> Any:
        if self._store is None:
            _storage.store_requests.use_threads()
            spec = metadata.kvstore(self._root, "", ocdbt=False)
            opening = ts.KvStore.open(spec, context=_storage.store_requests.context())
            self._store = _storage.paths.result(opening, self._root)
        return _storage.paths.result(ts.ocdbt.dump(self._store, node), self._root)


def _roots(manifest: bytes) -> Sequence[Root]:
    """Returns the root of the newest version; nothing for an empty tree."""
    spec: dict[str, JSON] = {"driver": "memory"}
    memory = ts.KvStore.open(spec).result()
    memory.write(DATABASE, manifest).result()
    versions = ts.ocdbt.dump(memory, None).result().get("versions")
    if not versions:
        raise ValueError(
            f"{DATABASE} is split into several files, which is not supported"
        )
    newest = versions[-1]
    if "root" in newest and "location" in newest["root"]:
        place = parse_place(newest["root"]["location"])
        return (Root(newest["root_height"], place),)
    return ()


def parse_place(text: str) -> Place:
    """Parses TensorStore's name of the location of a node or a value.

    Raises:
        ValueError: `text` is not such a name, or leads out of the database.
    """
    match = _PLACE.fullmatch(text)
    if match is not None:
        base, name, offset, size = match.groups()
        file = base + name
        if ".." not in file and not file.startswith("/"):
            return Place(text, file, int(offset), int(size))
    raise ValueError(f"{text[:80]!r} is not a location in a database")


def _read_part(path: Path, offset: int, size: int) -> bytes:
    if size > _MAX_NODE_BYTES:
        raise ValueError(
            f"{path.name} has a node of {size} bytes according to its manifest"
        )
    content = _storage.of(path).read_range(path, offset, size)
    if len(content) < size:
        raise ValueError(f"{path.name} is shorter than its manifest says")
    return content


def _decoded_bytes(name: str, content: bytes) -> int:
    """Returns the maximal decoded size of a manifest or a node, in bytes.

    Raises:
        ValueError: `content` is not a manifest or a node.
    """
    # Two bytes follow the header: version and compression.
    inner = content[_HEADER_BYTES:-_CHECKSUM_BYTES]
    if len(inner) < 2 or inner[0] != 0 or inner[1] > 1:
        raise ValueError(f"{name} is neither a manifest nor a node of a tree")
    return len(inner) if inner[1] == 0 else _frame_bytes(name, inner[2:])


def _frame_bytes(name: str, frame: bytes) -> int:
    """Returns the maximal decoded size of a zstd frame, without decoding."""
    if frame[:4] != _FRAME or len(frame) < 6:
        raise ValueError(f"{name} is damaged: the zstd frame is missing")
    kind = frame[4]
    is_single = kind >> 5 & 1
    size_bytes = (is_single, 2, 4, 8)[kind >> 6]
    at = 5 + (1 - is_single) + (0, 1, 2, 4)[kind & 3] + size_bytes
    total = 0
    while True:
        header = int.from_bytes(frame[at : at + 3], "little")
        if at + 3 > len(frame):
            raise ValueError(f"{name} is damaged: the zstd frame is cut short")
        size = header >> 3
        is_compressed, is_repeated = header >> 1 & 2, header >> 1 & 1
        total += _BLOCK_BYTES if is_compressed else size
        if header & 1:
            return total
        at += 3 + (1 if is_repeated and not is_compressed else size)
