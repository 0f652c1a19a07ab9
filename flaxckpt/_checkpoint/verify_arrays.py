"""The checks of the arrays of a flaxckpt checkpoint: each file is read once."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import crc32c

from flaxckpt import _formats, _state, _storage, _zarr
from flaxckpt._checkpoint import inventory, verify_report
from flaxckpt._checkpoint.inventory import Inventory, StoredFile
from flaxckpt._checkpoint.verify_report import Check, Findings
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import LeafPath
from flaxckpt._zarr.metadata import Encoding, Region

if TYPE_CHECKING:
    from flaxckpt._zarr.btree import Place, Value

_CHECKSUM_BYTES = _zarr.checksums.CHECKSUM_BYTES


class ArrayChecks(NamedTuple):
    """The checks of arrays in files without digests, and leaves without checksums."""

    checks: list[Check]
    undigested: dict[LeafPath, Leaf]
    files: dict[str, FileCheck]


def find_checks(
    path: Path, stored: Stored, listed: Inventory, findings: Findings
) -> ArrayChecks:
    """Returns the checks of arrays, after the files with digests were checked."""
    return _Finder(path, stored, listed, findings).find()


class _Finder:
    """Finds the checks; see `find_checks`."""

    def __init__(
        self, path: Path, stored: Stored, listed: Inventory, findings: Findings
    ) -> None:
        assert stored.manifest is not None, path
        self._path = path
        self._stored = stored
        self._files, self._unlisted = listed
        self._findings = findings
        self._manifest = stored.manifest
        self._found = ArrayChecks([], {}, {})

    def find(self) -> ArrayChecks:
        encoding = self._manifest.encoding
        for item in self._stored.items.trees:
            leaves = arrays_of(self._stored, item)
            if self._manifest.ocdbt or encoding is None:
                self._add_database(item, leaves)
                continue
            for leaf_path, leaf in leaves.items():
                self._add_directory(leaf_path, leaf, encoding)
        return self._found

    # ---- directories ----------------------------------------------------------------

    def _add_directory(
        self, leaf_path: LeafPath, leaf: Leaf, encoding: Encoding
    ) -> None:
        info, digests = leaf.info, self._stored.digests
        root = _formats.items.prefix(self._stored.items.array_directory(info))
        names = inventory.array_files(encoding, info)
        metadata, *chunks = [f"{root}{name}" for name in names]
        if metadata not in digests:

            def check_metadata() -> None:
                text = _zarr.chunk_file.read_small(self._path / metadata)
                _check_metadata(text, encoding, info)

            self._found.checks.append(Check(leaf_path, check_metadata, metadata))
        wanted = _wanted_chunks(leaf, encoding)
        for chunk, name in zip(wanted, chunks, strict=True):
            if name not in digests:
                check = functools.partial(
                    _check_chunk_file, self._path / name, self._path, chunk, encoding
                )
                count = self._findings.counter.add
                run = functools.partial(check, count)
                self._found.checks.append(Check(leaf_path, run, name))
        if not encoding.checksum and not {metadata, *chunks} <= digests.keys():
            self._found.undigested[leaf_path] = leaf

    # ---- databases ------------------------------------------------------------------

    def _add_database(self, item: str, leaves: Mapping[LeafPath, Leaf]) -> None:
        if not leaves:
            return
        digests, encoding = self._stored.digests, self._manifest.encoding
        is_digested = _formats.items.has_chunk_digests(digests, item)
        if encoding is None or not (encoding.checksum or is_digested):
            self._found.undigested.update(leaves)
        if encoding is None:
            return
        values = self._read_tree(item)
        if values is None:
            return
        files: dict[str, list[_FileChunk]] = {}
        for leaf_path, leaf in leaves.items():
            for chunk in self._chunks_of(leaf_path, leaf, values, encoding):
                if not is_digested:
                    files.setdefault(chunk.place.file, []).append(chunk)
        start, is_listed = _formats.items.prefix(item), item not in self._unlisted
        for file, chunks in files.items():
            name = f"{start}{file}"
            unknown = StoredFile(name, size=0 if is_listed else None)
            check = FileCheck(
                name,
                chunks,
                has_checksum=encoding.checksum,
                size=self._files.get(name, unknown).size,
            )
            self._found.files[name] = check
            run = functools.partial(check.run, self._path, self._findings)
            self._found.checks.append(Check(name, run))

    def _read_tree(self, item: str) -> dict[bytes, Value] | None:
        """Returns the values of a database; None if it is not read, or damaged."""
        faults = {**self._findings.problems, **self._findings.unread}
        if self._findings.is_enough or any(
            self._stored.items.tree_of_file(name) == item for name in faults
        ):
            return None
        values: dict[bytes, Value] = {}
        name, root = _formats.items.database(item), self._path / item

        def read() -> None:
            _storage.of(root).check_root(root, self._path)
            values.update(_zarr.ocdbt.read_tree(root))

        self._findings.attempt(name, read)
        faults = {**self._findings.problems, **self._findings.unread}
        return None if name in faults else values

    def _chunks_of(
        self,
        leaf_path: LeafPath,
        leaf: Leaf,
        values: Mapping[bytes, Value],
        encoding: Encoding,
    ) -> Iterator[_FileChunk]:
        """Yields the chunks of a leaf in files; checks what is in the tree."""
        info, name = leaf.info, self._stored.items.param_name(leaf.info)
        keys = inventory.array_files(encoding, info)
        found = [
            values.get(_zarr.metadata.database_key(name, key).encode()) for key in keys
        ]
        missing = [key for key, value in zip(keys, found, strict=True) if value is None]
        if missing:
            rest = f" and {len(missing) - 1} more are" if missing[1:] else " is"
            why = f"{missing[0]}{rest} missing from the database"
            self._findings.add(self._findings.problems, leaf_path, why)
            return
        text, *parts = [value for value in found if value is not None]
        if encoding.version == 3:
            item = self._stored.items.item_of(info)
            root, start = self._path / item, _formats.items.prefix(item)
            check = functools.partial(_check_value, root, text, encoding, info)
            file = "" if isinstance(text, bytes) else f"{start}{text.file}"
            self._found.checks.append(Check(leaf_path, check, file))
        wanted = _wanted_chunks(leaf, encoding)
        for chunk, value in zip(wanted, parts, strict=True):
            if not isinstance(value, bytes):
                yield _FileChunk(value, leaf_path, chunk)
                continue
            content = _Content(encoding.checksum)
            content.take(memoryview(value))
            check = functools.partial(content.check, chunk, chunk.key)
            self._found.checks.append(Check(leaf_path, check))


def leaves_in(
    name: str, path: Path, stored: Stored, listed: Inventory
) -> Sequence[LeafPath]:
    """Returns the leaves that a restore cannot read without the file `name`."""
    item, file = stored.items.tree_of_file(name), listed.files.get(name)
    if file is not None and not file.is_shared:
        return file.leaves
    if item is None or _formats.items.database(item) not in listed.files:
        return ()
    arrays = arrays_of(stored, item)
    try:
        values = _zarr.ocdbt.read_tree(path / item)
    except (ValueError, OSError):
        return list(arrays)
    below = name.removeprefix(_formats.items.prefix(item))
    keys = {
        key.decode(errors="surrogateescape").rpartition("/c")[0]
        for key, value in values.items()
        if not isinstance(value, bytes) and value.file == below
    }
    return [
        p for p, leaf in arrays.items() if stored.items.param_name(leaf.info) in keys
    ]


def arrays_of(stored: Stored, item: str) -> dict[LeafPath, Leaf]:
    return {
        path: leaf
        for path, leaf in stored.table.items()
        if is_array(leaf) and stored.items.item_of(leaf.info) == item
    }


def is_array(leaf: Leaf) -> bool:
    return isinstance(leaf.source, StoredLeaf) and leaf.source.open is not None


# ---- chunks -----------------------------------------------------------------------


class _Chunk(NamedTuple):
    """A chunk as it must be; its stored `size` is 0 if that varies."""

    key: str
    region: Region
    size: int
    max_bytes: int
    recorded: int | None


class _FileChunk(NamedTuple):
    place: Place
    leaf: LeafPath
    chunk: _Chunk


def _wanted_chunks(leaf: Leaf, encoding: Encoding) -> list[_Chunk]:
    info, source = leaf.info, leaf.source
    assert isinstance(source, StoredLeaf), info.path
    dtype = info.stored_dtype
    size, extent = inventory.chunk_bytes(encoding, info), info.chunk_shape or ()
    max_bytes = size or math.prod(extent) * _state.dtypes.item_bits(dtype) // 8
    recorded = source.checksums
    return [
        _Chunk(
            chunk.key,
            chunk.bounds,
            size,
            max_bytes,
            None if recorded is None else recorded.number(n),
        )
        for n, chunk in enumerate(_zarr.metadata.chunks_of(info))
    ]


def _check_value(root: Path, value: Value, encoding: Encoding, info: LeafInfo) -> None:
    if not isinstance(value, bytes):
        size = min(value.size, _zarr.metadata.MAX_METADATA_BYTES)
        value = _storage.of(root).read_range(root / value.file, value.offset, size)
    _check_metadata(value, encoding, info)


def _check_metadata(text: bytes, encoding: Encoding, info: LeafInfo) -> None:
    """Raises ValueError if `zarr.json` differs from the record of the leaf."""
    _zarr.metadata.check_metadata(text, encoding, _zarr.metadata.form_of(info))
    _zarr.metadata.check_compact(text)


class _Content:
    """The content of a chunk, of which only the size and the checksum are kept."""

    def __init__(self, has_checksum: bool) -> None:
        self._has_checksum = has_checksum
        self._value = 0
        self._tail = b""
        self._size = 0

    def take(self, part: memoryview) -> None:
        self._size += len(part)
        if not self._has_checksum:
            return
        if len(part) < _CHECKSUM_BYTES:
            part, self._tail = memoryview(self._tail + bytes(part)), b""
        self._value = crc32c.crc32c(self._tail, self._value)
        self._value = crc32c.crc32c(part[:-_CHECKSUM_BYTES], self._value)
        self._tail = bytes(part[-_CHECKSUM_BYTES:])  # unless a part follows

    def check(self, chunk: _Chunk, name: str) -> None:
        """Raises ValueError for a wrong size or checksum, or another chunk."""
        _check_size(name, self._size, chunk.size)
        if not self._has_checksum:
            return
        _zarr.checksums.check_whole(name, self._value, self._tail, chunk.recorded)


def _check_size(name: str, size: int, wanted: int) -> None:
    """Raises ValueError for an empty chunk, or a size that is not `wanted`."""
    if size != (wanted or size) or not size:
        raise ValueError(f"{name} has {size} bytes instead of {wanted or 'some'}")


def _check_chunk_file(
    file: Path,
    root: Path,
    chunk: _Chunk,
    encoding: Encoding,
    count: Callable[[int], object],
) -> None:
    """Raises ValueError if a file is not a chunk; counts the bytes read."""
    known_size = _storage.of(file).known_size(file, root)
    if known_size is not None:
        _check_size(file.name, known_size, chunk.size)  # before reading all of it
        if not encoding.checksum:
            return
    content = _Content(encoding.checksum)
    for part in _storage.of(file).stream(file, root, chunk.max_bytes):
        content.take(part)
        count(len(part))
    content.check(chunk, file.name)


class FileCheck:
    """Checks a file with chunks of several leaves; `size` is None if it has others."""

    def __init__(
        self,
        name: str,
        chunks: Sequence[_FileChunk],
        *,
        has_checksum: bool,
        size: int | None,
    ) -> None:
        self._name = name
        self._base = name.rpartition("/")[2]
        self._has_checksum = has_checksum
        self._size = size
        self._chunks = sorted(chunks, key=lambda chunk: chunk.place.offset)

    def run(self, root: Path, findings: Findings) -> None:
        file = root / self._name
        known_size = _storage.of(file).known_size(file, root)
        if known_size is not None and known_size > (self._size or known_size):
            self._fault_of_file(
                findings, f"has {known_size} bytes instead of {self._size}"
            )
        places = [chunk.place for chunk in self._chunks]
        most = max((place.offset + place.size for place in places), default=0)
        parts = _storage.of(file).stream(file, root, self._size or most)
        size = self.take(parts, findings)
        if known_size is None and size > (self._size or size):
            self._fault_of_file(findings, f"has {size} bytes instead of {self._size}")

    def take(self, parts: Iterable[memoryview], findings: Findings) -> int:
        """Takes the content of the file, in parts; returns its size in bytes."""
        segments = collections.deque(self._segments(findings))
        content, position, size = _Content(self._has_checksum), 0, 0
        for part in parts:
            size += len(part)
            if self._has_checksum:  # or the values are decoded, and counted there
                findings.counter.add(len(part))
            rest = part
            while rest and segments and not findings.is_enough:
                stop, chunk = segments[0]
                piece, rest = rest[: stop - position], rest[stop - position :]
                position += len(piece)
                if chunk is not None:
                    content.take(piece)
                elif self._size is not None and any(piece):
                    self._fault_of_file(findings, "has changed between its chunks")
                if position == stop:
                    self._finish(findings, chunk, content)
                    content = _Content(self._has_checksum)
                    segments.popleft()
        for _, chunk in segments:
            if chunk is not None and not findings.is_enough:
                why = f"{self._base} ends before the chunk {chunk.chunk.key} does"
                self._fault(findings, chunk, why)
        return size

    def _segments(self, findings: Findings) -> Iterator[_Segment]:
        """Yields the chunks of the file, and the bytes between them, in order."""
        end = 0
        for chunk in self._chunks:
            place = chunk.place
            if place.offset < end:
                why = f"{chunk.chunk.key} overlaps another chunk"
                self._fault(findings, chunk, why)
                continue
            if place.offset > end:
                yield _Segment(place.offset, None)
            end = place.offset + place.size
            yield _Segment(end, chunk)

    def _finish(
        self, findings: Findings, chunk: _FileChunk | None, content: _Content
    ) -> None:
        if chunk is not None:
            place = verify_report.StoredPlace(self._name, chunk.chunk.region)
            check = functools.partial(content.check, chunk.chunk, chunk.chunk.key)
            findings.attempt(chunk.leaf, check, place)

    def _fault(self, findings: Findings, chunk: _FileChunk, why: str) -> None:
        place = verify_report.StoredPlace(self._name, chunk.chunk.region)
        findings.add(findings.problems, chunk.leaf, why, place)

    def _fault_of_file(self, findings: Findings, why: str) -> None:
        findings.add(findings.problems, self._name, f"{self._base} {why}")


class _Segment(NamedTuple):
    """A chunk of a file, or the bytes before it, that ends at the byte `stop`."""

    stop: int
    chunk: _FileChunk | None
