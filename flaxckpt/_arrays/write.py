"""Writes arrays from host memory into a database, within a byte budget.

Its files have chunks side by side; the tree of their places comes last.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _storage, _util
from flaxckpt._arrays import chunks_to_write, encode, to_host
from flaxckpt._arrays.chunks_to_write import COPIES_IN_REQUESTS
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._arrays.written import Previous, Written
from flaxckpt._util.pace import Pace
from flaxckpt._zarr import btree, chunk_file
from flaxckpt._zarr import metadata as zarr_metadata
from flaxckpt._zarr import ocdbt as zarr_ocdbt
from flaxckpt._zarr.btree import Place, Value
from flaxckpt._zarr.metadata import Encoding

DEFAULT_CONCURRENT_BYTES = 2 * 2**30
"""Default of the bytes in transfer between memory and storage at a time."""

_OWN_FILE_BYTES = 2**20
"""Smaller arrays never have files of their own, which a later save may link."""

_FILE_BYTES = 64 * 2**20
"""A file ends with the chunk that makes it as large."""

_LARGE_FILES = 1024
"""The arrays of a state have no more files of their own; others share them."""

_FILE_NAME = re.compile(r"(?!\.{1,2}$)[\w.+@=~-]{1,200}(?<!\.__lock)", re.ASCII)
"""Arrays with other names have no files of their own.

TensorStore reads no file called `….__lock`.
"""


class WriteOptions(NamedTuple):
    """How arrays are written.

    Attributes:
        max_concurrent_bytes: Bytes copied or passed to TensorStore and not yet written.
            A larger array is written alone.
        report: Called with the bytes of written values, as in memory.
        previous: An earlier checkpoint on the same file system. Equal files are linked
            instead of written.
        writer: Number of this process or call, if others write other chunks or arrays
            to the same database.
        with_metadata: Whether this writer writes the metadata of the arrays.
        pace: The pace of the threads that write chunk files to a disk; None for full
            speed. Threads of TensorStore serve the whole program, so they have none.
        total_bytes: Bytes of all arrays of the checkpoint, by all calls and processes,
            which decide about the files.
    """

    encoding: Encoding
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES
    report: _util.progress.Count = _util.progress.ignore
    previous: Previous | None = None
    writer: int = 0
    with_metadata: bool = True
    segment_bytes: int = sys.maxsize
    pace: Pace | None = None
    total_bytes: int = 0


class FileSizes(NamedTuple):
    """Bytes from which an array has its `own` files, and a file is `full`."""

    own: int
    full: int
    full_shared: int


def choose_sizes(total_bytes: int, *, in_store: bool = False) -> FileSizes:
    """Returns the sizes of files; `total_bytes` are of all arrays of the checkpoint."""
    own = max(_OWN_FILE_BYTES, total_bytes // _LARGE_FILES)
    if in_store:
        return FileSizes(own, _FILE_BYTES, _FILE_BYTES)
    full = max(_FILE_BYTES, min(own, to_host.STAGED_BYTES))
    return FileSizes(own, full, min(own, full))  # a later save links most of them


def write(
    root: Path,
    arrays: Iterable[HostArray],
    options: WriteOptions,
    *,
    observe: Callable[[list[HostArray]], object] | None = None,
) -> Written:
    """Writes the files of a database of zarr arrays, except its index (`make_index`).

    `observe` gets the arrays of each batch after the write, while in host memory.
    Raises OSError or ValueError if an array could not be written.
    """
    at_once = min(options.max_concurrent_bytes, to_host.STAGED_BYTES)
    with contextlib.closing(to_host.staged(arrays, at_once)) as staged:
        batches: Iterable[list[HostArray]]
        batches = staged if observe is None else _observed(staged, observe)
        return DatabaseWriter(root, options).write(batches)


def _observed(
    batches: Iterable[list[HostArray]], observe: Callable[[list[HostArray]], object]
) -> Iterator[list[HostArray]]:
    """Yields the batches; calls `observe` with each when the caller has written it."""
    for batch in batches:
        yield batch
        observe(batch)


class DatabaseWriter:
    """Writes the files of a database, without the tree.

    A large array has files of its own, `d/WRITER.PART/NAME`; small arrays share files,
    `d/WRITER.small.PART`. All values in a file are held by the same processes: one that
    copies the file needs all of it.
    """

    def __init__(self, root: Path, options: WriteOptions) -> None:
        self._root = root
        self._options = options
        self._in_store = _storage.of(root).costs_requests
        self._budget = _util.threads.Budget(options.max_concurrent_bytes)
        self._sizes = choose_sizes(options.total_bytes, in_store=self._in_store)
        self._parts: collections.Counter[str] = collections.Counter()
        self._names: dict[str, str] = {}
        self._written = Written({}, {})
        self._previous = _previous_values(options.previous)

    def write(self, batches: Iterable[list[HostArray]]) -> Written:
        encoding = self._options.encoding
        for batch in batches:
            raw: list[HostArray] = []
            encoded: list[HostArray] = []
            for array in batch:
                form = array.form
                is_raw = zarr_metadata.is_raw(encoding, form)
                (raw if is_raw else encoded).append(array)
                if self._options.with_metadata:
                    text = zarr_metadata.metadata_text(encoding, form)
                    self._written.values[_metadata_key(array, encoding)] = text
            self._write_files(self._raw_chunks(raw))
            if encoded:
                self._write_encoded(encoded)
        previous = self._options.previous
        if previous is not None and not previous.is_current():
            raise OSError(f"{previous.root} was replaced during the save")
        return self._written

    def _raw_chunks(self, arrays: Iterable[HostArray]) -> Iterator[_Stored]:
        encoding = self._options.encoding
        tail = chunk_file.CHECKSUM_BYTES * encoding.checksum
        requests = COPIES_IN_REQUESTS * self._in_store
        for array in arrays:
            for chunk in chunks_to_write.chunks(array):
                size = chunk.size
                yield _Stored(
                    array,
                    chunk.key,
                    chunk.shard.holders,
                    chunk.data.nbytes,
                    size + tail,
                    size * (chunk.needs_copy() + requests),
                    functools.partial(
                        chunk.parts_and_checksums, encoding, self._options.segment_bytes
                    ),
                )

    def _write_encoded(self, arrays: Iterable[HostArray]) -> None:
        """Writes the chunks that TensorStore encodes, in parts of limited size."""
        shards = [(array, shard) for array in arrays for shard in array.shards]
        # Safe names; sorted, so that the chunks of an array stay together.
        by_number = {f"{n:09}": each for n, each in enumerate(shards)}
        pieces = (
            array._replace(name=number, shards=(part,))
            for number, (array, shard) in by_number.items()
            for part in encode.parts(array, shard)
        )
        sized = ((piece, piece.nbytes) for piece in pieces)
        encoding = self._options.encoding
        at_once = min(self._options.max_concurrent_bytes, encode.ENCODED_AT_ONCE)
        for batch in _util.memory.batches(sized, at_once):
            with _storage.paths.new_memory() as memory:
                encode.write_encoded(memory, batch, encoding, self._options.report)
                chunks = [
                    self._encoded_chunk(*by_number[number], key, content)
                    for path, content in _storage.paths.take_files(memory)
                    for number, _, key in [path.rpartition("/")]
                    if key not in zarr_metadata.METADATA_FILES.values()
                ]
            self._write_files(chunks)
            del chunks  # or they would stay while the next are encoded

    def _encoded_chunk(
        self, array: HostArray, shard: HostShard, key: str, content: bytes
    ) -> _Stored:
        return _Stored(
            array,
            key,
            shard.holders,
            0,  # reported by `encode.write_encoded`
            len(content),
            COPIES_IN_REQUESTS * self._in_store * len(content),
            functools.partial(
                _as_parts, memoryview(content), self._options.encoding.checksum
            ),
        )

    # ---- files --------------------------------------------------------------------

    def _write_files(self, chunks: Iterable[_Stored]) -> None:
        # Large files first, so that the last writes are short.
        files = sorted(
            self._plan(chunks), key=operator.attrgetter("size"), reverse=True
        )
        parents = {(self._root / file.path).parent for file in files}
        # Not their parents, too: another process may have removed the root.
        for directory in sorted({self._root / "d", *parents} if files else ()):
            directory.mkdir(exist_ok=True)
        threads, pace = (
            (chunks_to_write.THREADS_OF_STORES, None)
            if self._in_store
            else (chunks_to_write.THREADS, self._options.pace)
        )
        _util.threads.each(self._write_file, files, threads=threads, pace=pace)

    def _plan(self, chunks: Iterable[_Stored]) -> Iterator[_DataFile]:
        """Yields the files for some chunks, which are in the order of their arrays."""
        files: dict[tuple[str, bytes], list[_Stored]] = {}
        for array, group in itertools.groupby(chunks, operator.attrgetter("array")):
            is_large = array.nbytes >= self._sizes.own
            name = self._file_name(array) if is_large else ""
            for chunk in group:
                files.setdefault((name, chunk.holders), []).append(chunk)
        writer, sizes = self._options.writer, self._sizes
        for (name, _), some in files.items():
            if name:
                yield from self._fill(f"{writer}.{{}}/{name}", some, sizes.full)
            else:
                yield from self._fill(f"{writer}.small.{{}}", some, sizes.full_shared)

    def _fill(
        self, path: str, chunks: Iterable[_Stored], full: int
    ) -> Iterator[_DataFile]:
        """Yields files of `full` bytes; larger chunks begin at a page."""
        placed: list[tuple[int, _Stored]] = []
        end = 0
        for chunk in chunks:
            if end >= full:
                yield self._data_file(path, placed)
                placed, end = [], 0
            if chunk.size >= chunk_file.MAPPED_FROM:
                end += -end % chunk_file.PAGE_BYTES
            placed.append((end, chunk))
            end += chunk.size
        if placed:
            yield self._data_file(path, placed)

    def _data_file(self, path: str, chunks: list[tuple[int, _Stored]]) -> _DataFile:
        part = self._parts[path]
        self._parts[path] += 1
        return _DataFile(f"d/{path.format(part)}", chunks)

    def _file_name(self, array: HostArray) -> str:
        """Returns the name of an array's files; empty if it can have none."""
        name = array.name
        if not _FILE_NAME.fullmatch(name):
            return ""
        return name if self._names.setdefault(name.casefold(), name) == name else ""

    def _write_file(self, file: _DataFile) -> None:
        previous = self._options.previous
        with self._budget.hold(sum([chunk.copied_bytes for _, chunk in file.chunks])):
            parts: list[memoryview] = []
            end = 0
            for offset, chunk in file.chunks:
                parts.append(memoryview(bytes(offset - end)))
                stored, packed = chunk.content()
                parts += stored
                end = offset + chunk.size
                name, key = chunk.array.name, chunk.key
                if packed:
                    self._written.checksums.setdefault(name, {})[key] = packed
                place = Place(file.path, offset, chunk.size)
                found = zarr_metadata.database_key(name, key).encode()
                self._written.values[found] = place
            new = self._root / file.path
            if previous is None or not chunk_file.link_if_equal(
                previous.root / file.path,
                new,
                [part for part in parts if part],
                compare_all=not self._is_unchanged(file),
                mode=previous.file_mode,
            ):
                chunk_file.write(new, parts)
        for _, chunk in file.chunks:
            self._options.report(chunk.nbytes)

    def _is_unchanged(self, file: _DataFile) -> bool:
        """Returns True if the same jax objects were saved before, in the same form."""
        encoding, previous = self._options.encoding, self._options.previous
        if previous is None or not encoding.checksum:
            return False
        for array in {
            id(chunk.array): chunk.array for _, chunk in file.chunks
        }.values():
            form = array.form
            text = zarr_metadata.metadata_text(encoding, form)
            if (
                not zarr_metadata.is_raw(encoding, form)
                or not chunks_to_write.has_same_source(array, previous)
                or self._previous.get(_metadata_key(array, encoding)) != text
            ):
                return False
        return True


class _Stored(NamedTuple):
    """A chunk as it is stored; `content` returns its bytes and checksums.

    `nbytes` are those in memory, and `copied_bytes` those copied during the write.
    """

    array: HostArray
    key: str
    holders: bytes
    nbytes: int
    size: int
    copied_bytes: int
    content: Callable[[], tuple[list[memoryview], bytes]]


class _DataFile(NamedTuple):
    """A file of a database, with its chunks at offsets in bytes."""

    path: str
    chunks: list[tuple[int, _Stored]]

    @property
    def size(self) -> int:
        offset, last = self.chunks[-1]
        return offset + last.size


def _as_parts(
    content: memoryview, has_checksum: bool
) -> tuple[list[memoryview], bytes]:
    """Returns an encoded chunk, and the checksum at its end."""
    tail = content[-chunk_file.CHECKSUM_BYTES :] if has_checksum else b""
    return [content], bytes(tail)


def _previous_values(previous: Previous | None) -> Mapping[bytes, Value]:
    if previous is None:
        return {}
    try:
        return zarr_ocdbt.read_tree(previous.root)
    except (ValueError, OSError):
        return {}


def _metadata_key(array: HostArray, encoding: Encoding) -> bytes:
    name = zarr_metadata.METADATA_FILES[encoding.version]
    return zarr_metadata.database_key(array.name, name).encode()


class IndexFiles(NamedTuple):
    """The files of a database's index, if any, and the bytes of files with values."""

    files: dict[str, bytes]
    sizes: dict[str, int]


def make_index(values: Mapping[bytes, Value]) -> IndexFiles:
    """Returns the index of a database, to be written after all other files."""
    if not values:
        return IndexFiles({}, {})
    sizes = file_sizes(values)
    tree = btree.encode(values, zarr_metadata.TREE)
    names = (zarr_metadata.TREE, zarr_metadata.DATABASE)
    return IndexFiles(dict(zip(names, (tree.nodes, tree.manifest), strict=True)), sizes)


def file_sizes(values: Mapping[bytes, Value]) -> dict[str, int]:
    """Returns the files with values, sorted, with their sizes in bytes."""
    sizes: dict[str, int] = {}
    for value in values.values():
        if isinstance(value, Place):
            end = value.offset + value.size
            sizes[value.file] = max(end, sizes.get(value.file, 0))
    return dict(sorted(sizes.items()))  # not in the order in which threads ended


def writer(file: str) -> int:
    return int(file.removeprefix("d/").partition(".")[0])
