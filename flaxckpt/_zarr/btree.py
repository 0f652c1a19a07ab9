"""Trees of OCDBT databases, as bytes.

A database maps keys to values. Its manifest has the place of the root of a B+tree.
Nodes of height 0 have the values, or the places of values in files; all others have the
places of nodes. Numbers are stored column by column, each in as few bytes as it needs,
and keys without what they share with the key before.

Source: TensorStore's description of the format (`kvstore/ocdbt/index.rst`). It leaves
out that the kind of the manifest follows the identifier of the database.
"""

from __future__ import annotations

import functools
import io
import itertools
import operator
import struct
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import crc32c
import numpy as np
import zstandard

_T = TypeVar("_T")

MAX_NODE_BYTES = 128 * 2**20
"""Limit on a node or a manifest, unpacked; Orbax makes nodes of at most 100 MB."""

_MAX_FILE_BYTES = 2**63 - 1

_MAX_ENTRIES = 2**22
"""Limit on the keys of a node."""

_MANIFEST_MAGIC = b"\x0c\xdb\x3a\x2a"
_NODE_MAGIC = b"\x0c\xdb\x20\xde"
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = 12  # magic number and length
_ID_BYTES = 16
_LEVEL_BYTES = 4

_VERSION = 0

_NODE_BYTES = 2**20
"""A node ends with the entry that makes it as large, before compression."""

_COMPRESSED_FROM = 4096
_COMPRESSION_LEVEL = 1
"""Of nodes, most of which is metadata of arrays: a tenth of the bytes are left."""

_PLACE_BYTES = 16
"""About the size of a place in a node."""

_LEAST_CHILDREN = 2
_MAX_NUMBER_BYTES = 10
_NOWHERE = 2**64 - 1
"""Offset and size of the root of an empty tree."""

_INLINE_BYTES, _NODE_BYTES_OF_OTHERS, _VERSION_ARITY = 100, 100_000_000, 4
"""Settings for programs that change the database."""


class Place(NamedTuple):
    """The place of a value or a node: a file in the database, and bytes in it."""

    file: str
    offset: int
    size: int


Value: TypeAlias = bytes | Place


class Root(NamedTuple):
    """The root of a tree, with the levels below, and the directory of its files."""

    place: Place
    base: str
    height: int


class Child(NamedTuple):
    """A node below another one, of keys from `first` on, without `prefix`.

    `first` lacks the prefix of the parent; `base` is the directory of its files.
    """

    first: bytes
    prefix: bytes
    place: Place
    base: str


# ---- encoding -----------------------------------------------------------------------


class Tree(NamedTuple):
    nodes: bytes
    manifest: bytes


class _WrittenNode(NamedTuple):
    """What a parent has of a node: key, place, and sums over all nodes below."""

    first: bytes
    place: Place
    keys: int
    tree_bytes: int
    value_bytes: int


def encode(
    values: Mapping[bytes, Value], file: str, *, node_bytes: int = _NODE_BYTES
) -> Tree:
    """Returns the tree of a database, whose nodes will be in `file`."""
    nodes: list[bytes] = []
    end = 0

    def add(node: bytes, first: bytes, sums: Sequence[int]) -> _WrittenNode:
        nonlocal end
        place = Place(file, end, len(node))
        nodes.append(node)
        end += len(node)
        keys, tree_bytes, value_bytes = sums
        return _WrittenNode(first, place, keys, tree_bytes + len(node), value_bytes)

    level = []
    rows = sorted(values.items())
    sizes = [
        len(key) + (len(value) if isinstance(value, bytes) else _PLACE_BYTES)
        for key, value in rows
    ]
    for entries in _split(rows, sizes, node_bytes, 1):
        size = sum([value.size for _, value in entries if isinstance(value, Place)])
        level.append(add(_leaf(entries), entries[0][0], (len(entries), 0, size)))
    height = 0
    while len(level) > 1:
        height += 1
        below, level = level, []
        sizes = [len(node.first) + _PLACE_BYTES for node in below]
        for children in _split(below, sizes, node_bytes, _LEAST_CHILDREN):
            columns = list(zip(*[node[2:] for node in children], strict=True))
            node = _inner(children, height)
            level.append(add(node, children[0].first, [*map(sum, columns)]))
    return Tree(b"".join(nodes), _manifest(level[0], height))


def _split(
    rows: Iterable[_T], sizes: Iterable[int], most: int, least: int
) -> Iterator[list[_T]]:
    """Yields the rows of each node: `least` at least, and then up to `most` bytes."""
    group: list[_T] = []
    total = 0
    for row, size in zip(rows, sizes, strict=True):
        if total >= most and len(group) >= least:
            yield group
            group, total = [], 0
        group.append(row)
        total += size
    if group:
        yield group


_Field: TypeAlias = bytes | int
"""A field is stored as it is; or a number, in as few bytes as it needs."""


def _leaf(entries: Sequence[tuple[bytes, Value]]) -> bytes:
    keys, values = zip(*entries, strict=True)
    places = [value for value in values if isinstance(value, Place)]
    names, offsets, _ = zip(*places, strict=True) if places else ((), (), ())
    files = sorted({*names}, key=str.encode)
    numbers = dict(zip(files, range(len(files)), strict=True))
    inline = [value for value in values if isinstance(value, bytes)]
    sizes = [v.size if isinstance(v, Place) else len(v) for v in values]
    return _frame(
        _NODE_MAGIC,
        b"\0",
        *_file_table(files),
        *_texts(keys),
        *sizes,
        *[int(isinstance(value, Place)) for value in values],
        *map(numbers.__getitem__, names),
        *offsets,
        *inline,
    )


def _inner(nodes: Sequence[_WrittenNode], height: int) -> bytes:
    firsts, places, *sums = zip(*nodes, strict=True)
    files, offsets, sizes = zip(*places, strict=True)
    zeros = [0] * len(nodes)  # common prefixes; and the number of the only file
    return _frame(
        _NODE_MAGIC,
        bytes([height]),
        *_file_table(files[:1]),
        *_texts(firsts, zeros),
        *itertools.chain(zeros, offsets, sizes, *sums),
    )


def _manifest(root: _WrittenNode, height: int) -> bytes:
    single = uncompressed = file = no_older_versions = 0
    versions = generation = 1
    return _frame(
        _MANIFEST_MAGIC,
        uuid.uuid4().bytes,
        single,
        _INLINE_BYTES,
        _NODE_BYTES_OF_OTHERS,
        bytes([_VERSION_ARITY]),
        uncompressed,
        *_file_table([root.place.file]),
        versions,
        generation,
        bytes([height]),
        file,
        root.place.offset,
        root.place.size,
        root.keys,
        root.tree_bytes,
        root.value_bytes,
        _LENGTH.pack(time.time_ns() // 10**6),
        no_older_versions,
    )


def _frame(magic: bytes, *body: _Field) -> bytes:
    fields, compression = bytearray(), 0
    for field in body:
        if isinstance(field, bytes):
            fields += field
            continue
        while field > 0x7F:
            fields.append(field & 0x7F | 0x80)
            field >>= 7
        fields.append(field)
    if len(fields) >= _COMPRESSED_FROM:
        compressor = zstandard.ZstdCompressor(_COMPRESSION_LEVEL)
        fields, compression = bytearray(compressor.compress(fields)), 1
    content = bytes([_VERSION, compression]) + fields
    size = _HEADER_BYTES + len(content) + _CHECKSUM.size
    framed = magic + _LENGTH.pack(size) + content
    return framed + _CHECKSUM.pack(crc32c.crc32c(framed))


def _file_table(names: Sequence[str]) -> list[_Field]:
    # The last column: nodes below have whole names, too.
    return _texts([*map(str.encode, names)], [0] * len(names))


def _texts(texts: Sequence[bytes], column: Iterable[int] = ()) -> list[_Field]:
    """Returns what each text but the first shares with the last, and what it adds."""
    shared, rests, last = [], [], b""
    for text in texts:
        size = min(len(last), len(text))
        differing = int.from_bytes(last[:size]) ^ int.from_bytes(text[:size])
        shared.append(size - (differing.bit_length() + 7) // 8)
        rests.append(text[shared[-1] :])
        last = text
    return [len(texts), *shared[1:], *map(len, rests), *column, *rests]


# ---- decoding -----------------------------------------------------------------------


def _unpack(content: bytes, magic: bytes) -> bytes:
    size = len(content)
    if size < _HEADER_BYTES + 2 + _CHECKSUM.size or content[:4] != magic:
        raise ValueError("it is neither a manifest nor a node of a tree")
    if _LENGTH.unpack_from(content, len(magic))[0] != size:
        raise ValueError("it has another size than it says")
    framed, checksum = content[: -_CHECKSUM.size], content[-_CHECKSUM.size :]
    if _CHECKSUM.unpack(checksum)[0] != crc32c.crc32c(framed):
        raise ValueError("it has changed since it was written: its CRC-32C differs")
    version, compression = framed[_HEADER_BYTES : _HEADER_BYTES + 2]
    if version != _VERSION or compression > 1:
        raise ValueError("it is of a version that is not supported")
    fields = framed[_HEADER_BYTES + 2 :]
    if compression:
        fields = _decompress(fields)
    elif len(fields) > MAX_NODE_BYTES:
        raise ValueError(f"it has more than {MAX_NODE_BYTES} bytes")
    return fields


unpack_manifest = functools.partial(_unpack, magic=_MANIFEST_MAGIC)
"""Returns the fields of a manifest, decompressed; raises ValueError if damaged."""

unpack_node = functools.partial(_unpack, magic=_NODE_MAGIC)
"""Returns the fields of a node, likewise."""


def _decompress(frame: bytes) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frame)) as reader:
            content = reader.read(MAX_NODE_BYTES + 1)
    except zstandard.ZstdError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    if len(content) > MAX_NODE_BYTES:
        raise ValueError(f"it expands to more than {MAX_NODE_BYTES} bytes")
    return content


def decode_manifest(fields: bytes) -> Root | None:
    """Returns the newest root, or None if empty; raises ValueError if damaged."""
    body = _Fields(fields)
    body.take(_ID_BYTES)
    kind, _, _ = body.numbers(3)
    if kind:
        raise ValueError("it is split into several files, which is not supported")
    body.take(1)
    [compression] = body.numbers(1)
    if compression:
        body.take(_LEVEL_BYTES)
    files = body.files("")
    [versions] = body.numbers(1)
    if not versions:
        raise ValueError("it has no version")
    body.numbers(versions)  # generations
    height = body.take(versions)[-1]
    file, offset, size = body.numbers(3 * versions)[versions - 1 :: versions]
    if offset == size == _NOWHERE:
        return None
    [place] = _places(files, [file], [offset], [size])
    return Root(place, files[file].base, height)


def decode_leaf(fields: bytes, base: str) -> list[tuple[bytes, Value]]:
    """Returns the entries of a node of height 0: key without the prefix, and value."""
    body = _Fields(fields)
    files, count = body.begin_node(0, base)
    shared, lengths = body.numbers(count - 1), body.numbers(count)
    keys = body.keys(shared, lengths)
    sizes, kinds = body.numbers(count), body.numbers(count)
    if not {0, 1}.issuperset(kinds):
        raise ValueError("it has a value of an unknown kind")
    far = [size for size, kind in zip(sizes, kinds, strict=True) if kind]
    numbers, offsets = body.numbers(len(far)), body.numbers(len(far))
    places = iter(_places(files, numbers, offsets, far))
    values = [
        next(places) if kind else body.take(size)
        for size, kind in zip(sizes, kinds, strict=True)
    ]
    body.end()
    return list(zip(keys, values, strict=True))


def decode_inner(fields: bytes, base: str, height: int) -> list[Child]:
    """Returns the children of a node with `height` levels below it."""
    body = _Fields(fields)
    files, count = body.begin_node(height, base)
    shared, lengths = body.numbers(count - 1), body.numbers(count)
    common = body.numbers(count)
    keys = body.keys(shared, lengths)
    if any(n > len(key) for n, key in zip(common, keys, strict=True)):
        raise ValueError("a prefix is longer than its key")
    numbers = body.numbers(count)
    places = _places(files, numbers, body.numbers(count), body.numbers(count))
    body.numbers(3 * count)  # sums over all nodes below
    body.end()
    return [
        Child(key, key[:n], place, files[number].base)
        for key, n, place, number in zip(keys, common, places, numbers, strict=True)
    ]


class _NamedFile(NamedTuple):
    """A file in a table: its path, and the directory of what a node there names."""

    path: str
    base: str


def _places(
    files: Sequence[_NamedFile],
    numbers: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> list[Place]:
    if max(numbers, default=-1) >= len(files):
        raise ValueError("it refers to a file that it does not name")
    if max(map(operator.add, offsets, sizes), default=0) > _MAX_FILE_BYTES:
        raise ValueError("a place is behind the end of any file")
    columns = zip(numbers, offsets, sizes, strict=True)
    return [Place(files[number].path, *rest) for number, *rest in columns]


class _Fields:
    """Reads the fields of a manifest or node; methods raise ValueError if damaged."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._content):
            raise ValueError("it is cut short")
        taken = self._content[self._at : end]
        self._at = end
        return taken

    def numbers(self, count: int) -> list[int]:
        """Returns `count` numbers below 2^64; none if `count` is negative."""
        if count <= 0:
            return []
        most = min(count * _MAX_NUMBER_BYTES, len(self._content) - self._at)
        content = np.frombuffer(self._content, np.uint8, most, self._at)
        ends = np.flatnonzero(content < 0x80)[:count]
        if len(ends) < count:
            raise ValueError("a number is cut short or too large")
        starts = np.concatenate(([0], ends[:-1] + 1))
        sizes = ends - starts + 1
        longest = int(sizes.max())
        if longest > _MAX_NUMBER_BYTES or (
            longest == _MAX_NUMBER_BYTES
            and content[ends[sizes == _MAX_NUMBER_BYTES]].max() > 1
        ):
            raise ValueError("a number is cut short or too large")
        values = np.zeros(count, np.uint64)
        for n in range(longest):
            has = sizes > n
            digits = (content[starts[has] + n] & 0x7F).astype(np.uint64)
            values[has] |= digits << np.uint64(7 * n)
        self._at += int(ends[-1]) + 1
        found: list[int] = values.tolist()
        return found

    def keys(self, shared: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Returns keys, given what each shares with the last."""
        keys = self._texts(shared, lengths)
        if any(map(operator.ge, keys, keys[1:])):
            raise ValueError("its keys are not in ascending order")
        return keys

    def _texts(self, shared: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        texts, last, at = [], b"", 0
        rests = self.take(sum(lengths))
        total = len(rests)
        for n, length in zip((0, *shared), lengths, strict=False):
            total += n
            if n > len(last) or total > MAX_NODE_BYTES:
                raise ValueError("its texts are longer than is possible or supported")
            last = last[:n] + rests[at : at + length]
            at += length
            texts.append(last)
        return texts

    def files(self, base: str) -> list[_NamedFile]:
        """Returns a table of files, which are in the directory `base`."""
        [count] = self.numbers(1)
        shared, lengths = self.numbers(count - 1), self.numbers(count)
        bases = self.numbers(count)
        files = []
        for text, size in zip(self._texts(shared, lengths), bases, strict=True):
            path = base + text.decode()
            if ".." in path.split("/") or path.startswith("/") or "\0" in path:
                raise ValueError(f"{path[:80]!r} is not a file in the database")
            files.append(_NamedFile(path, base + text[:size].decode()))
        return files

    def begin_node(self, height: int, base: str) -> tuple[list[_NamedFile], int]:
        """Checks the height of a node; returns its files and the number of keys."""
        if self.take(1)[0] != height:
            raise ValueError(f"it has another height than {height}")
        files, [count] = self.files(base), self.numbers(1)
        if not 1 <= count <= _MAX_ENTRIES:
            raise ValueError(f"it has {count} keys, wanted 1 to {_MAX_ENTRIES}")
        return files, count

    def end(self) -> None:
        if self._at != len(self._content):
            raise ValueError("it has more than its fields")
