"""Writes arrays from host memory into storage, within a byte budget.

Raw chunks (see `_arrays.zarr.metadata`) have the layout of the memory. They are written
without a copy if possible: into files by several threads, or as values of a database.
Other chunks go through TensorStore.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import tensorstore as ts

from flaxckpt import _state, _storage, _util
from flaxckpt._arrays import to_host
from flaxckpt._arrays.to_host import HostArray, HostShard
from flaxckpt._arrays.zarr import checksums as chunk_checksums
from flaxckpt._arrays.zarr import chunk_file
from flaxckpt._arrays.zarr import metadata as zarr_metadata
from flaxckpt._arrays.zarr import ocdbt as zarr_ocdbt
from flaxckpt._arrays.zarr.metadata import Array, Encoding, Region
from flaxckpt._storage import Stamp
from flaxckpt._util.pace import Pace

DEFAULT_CONCURRENT_BYTES = 2 * 2**30
"""Default of the bytes in transfer between memory and storage at a time."""

_THREADS = 8
"""Threads that write files. More than cores: threads mostly wait for the disk."""

_THREADS_OF_STORES = 32
"""Threads that write objects; threads mostly wait for the network."""

_COPIES_IN_REQUESTS = 3
"""Copies of an object in memory during a write: ours, and TensorStore's."""

_COPIES_IN_UPLOADS = 1 + _COPIES_IN_REQUESTS
"""Copies in memory of what TensorStore writes to memory first."""

_UPLOADED_AT_ONCE = 64 * 2**20
"""Bytes of a part of a database that is uploaded while the next is made."""

_ENCODED_AT_ONCE = 64 * 2**20
"""Bytes that TensorStore compresses at a time, and holds until written."""

_ENCODED_PART = 16 * 2**20
"""Bytes of the parts of an array that TensorStore gets one by one."""

_SHARED_BYTES = 16 * 2**20
"""Size in bytes from which several threads share the chunks of an array."""

_DATABASE_VALUE_BYTES = 2**20
"""Size in bytes up to which raw arrays are written to a database as values, without
TensorStore's array driver: a copy, but less time."""


Count: TypeAlias = Callable[[int], object]


class Previous(NamedTuple):
    """The arrays of an earlier checkpoint, to link unchanged files.

    Attributes:
        root: The directory with the arrays.
        sources: Name -> weak reference to the saved jax array, and its saved type.
        stamp: Stamp to detect a replaced checkpoint; None without sources.
        file_mode: Mode of files that may be linked, as names of a file share its mode;
            None for any.
    """

    root: Path
    sources: Mapping[str, tuple[weakref.ref[jax.Array], str]]
    stamp: Stamp | None = None
    file_mode: int | None = None

    def is_current(self) -> bool:
        """Returns True unless another checkpoint has replaced this checkpoint."""
        return self.stamp is None or self.stamp.is_current()


class _Target(NamedTuple):
    """The place and the form of the arrays to write; see `write`."""

    root: Path
    encoding: Encoding
    context: ts.Context
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES
    report: Count = _util.progress.ignore
    previous: Previous | None = None
    writer: int | None = None
    segment_bytes: int = sys.maxsize
    pace: Pace | None = None


Checksums: TypeAlias = dict[str, dict[str, bytes]]
"""Array -> chunk key -> checksums of the segments of the chunk: the last is its own."""


def write(
    root: Path,
    arrays: Iterable[HostArray],
    *,
    encoding: Encoding,
    ocdbt: bool,
    previous: Previous | None = None,
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES,
    count: Count = _util.progress.ignore,
    writer: int | None = None,
    segment_bytes: int = sys.maxsize,
    pace: Pace | None = None,
    observe: Callable[[list[HostArray]], object] | None = None,
) -> Checksums:
    """Writes `arrays` under `root` as zarr.

    Args:
        root: A directory without arrays of these names.
        arrays: The arrays to write. Arrays on devices are moved to the host in batches,
            and their memory is freed.
        encoding: Encoding of the chunks.
        ocdbt: True to write a single database instead of a directory per array.
        previous: An earlier checkpoint on the same file system. Equal files are linked
            instead of written, if each array has its own directory.
        max_concurrent_bytes: Bytes copied or passed to TensorStore and not yet written.
            A larger array is written alone.
        count: Called with the bytes of written values, as in memory.
        writer: Index of this process, if other processes write other chunks or arrays
            to the same `root`; otherwise None. Process 0 writes the metadata of all
            arrays. Each process writes its own database, for
            `_arrays.zarr.ocdbt.merge`.
        segment_bytes: Bytes of the segments of chunks that are verified on their own.
        pace: The pace of the threads that write chunk files to a disk; None for full
            speed. Threads of TensorStore serve the whole program, so they have none.
        observe: Called with the arrays of each batch after the write, while they are in
            host memory; None for no call.

    Returns:
        The checksums of raw chunks and of their segments.

    Raises:
        OSError, ValueError: An array could not be written.
    """
    context = _storage.store_requests.context()
    if not _storage.of(root).has_hard_links:
        previous = None
    target = _Target(
        root,
        encoding,
        context,
        max_concurrent_bytes,
        count,
        previous,
        writer,
        segment_bytes,
        pace,
    )
    at_once = min(max_concurrent_bytes, to_host.STAGED_BYTES)
    with contextlib.closing(to_host.staged(arrays, at_once)) as staged:
        batches: Iterable[list[HostArray]]
        batches = staged if observe is None else _observed(staged, observe)
        checksums: Checksums = {}
        if ocdbt:
            _write_databases(target, batches, checksums)
            return checksums
        for batch in batches:
            checksums |= _write_directories(target, batch)
        return checksums


def _observed(
    batches: Iterable[list[HostArray]], observe: Callable[[list[HostArray]], object]
) -> Iterator[list[HostArray]]:
    """Yields the batches; calls `observe` with each when the caller has written it."""
    for batch in batches:
        yield batch
        observe(batch)


def _write_directories(target: _Target, arrays: Iterable[HostArray]) -> Checksums:
    """Writes a directory for each array; returns the checksums of raw chunks."""
    root, previous = target.root, target.previous
    raw: list[HostArray] = []
    encoded: list[HostArray] = []
    for array in arrays:
        (raw if is_raw(array, target.encoding) else encoded).append(array)
    checksums = _write_files(target, raw)
    at_once = min(target.max_concurrent_bytes, _ENCODED_AT_ONCE)
    if encoded and _storage.upload.is_needed(root):
        at_once = min(at_once, target.max_concurrent_bytes // _COPIES_IN_UPLOADS)
        for batch in _util.memory.batches(_sized(encoded), at_once):
            with _storage.upload.memory_directory(root) as memory:
                _write_encoded(target._replace(root=memory.path), batch, at_once)
        return checksums
    is_shared = target.writer is not None
    _write_encoded(target, encoded, at_once, may_exist=is_shared)
    # Other processes may still be writing these files.
    if previous is not None and not is_shared:
        for array in encoded:
            _link_files(previous, root / array.name, array.name)
    return checksums


def _sized(arrays: Iterable[HostArray]) -> Iterator[tuple[HostArray, int]]:
    return ((array, array.nbytes) for array in arrays)


def write_parts(
    root: Path,
    arrays: Sequence[HostArray],
    *,
    encoding: Encoding,
    ocdbt: bool,
    max_concurrent_bytes: int = DEFAULT_CONCURRENT_BYTES,
) -> None:
    """Writes or overwrites parts of arrays that may exist.

    Args:
        root: The directory or the database with the arrays.
        arrays: Whole chunks of each array; other chunks stay unchanged.
        encoding: Encoding of the chunks.
        ocdbt: True if `root` is a database.
        max_concurrent_bytes: Bytes passed to TensorStore and not yet written.

    Raises:
        OSError, ValueError: An array could not be written.
    """
    transaction = ts.Transaction(atomic=True) if ocdbt else None
    target = _Target(root, encoding, _storage.store_requests.context())
    at_once = min(max_concurrent_bytes, _ENCODED_AT_ONCE)
    _write_encoded(target, arrays, at_once, transaction, may_exist=True)
    if transaction is not None:
        transaction.commit_async().result()


# ---- raw chunks -----------------------------------------------------------------


def is_raw(array: HostArray, encoding: Encoding) -> bool:
    """Returns True if an array is written without TensorStore."""
    return zarr_metadata.is_raw(encoding, array.shape, array.stored_dtype)


def chunk_files(root: Path, array: HostArray) -> Iterator[Path]:
    """Yields the chunk files of a raw array to be written by this process."""
    for chunk in _chunks(array):
        yield root / array.name / chunk.key


def _metadata_text(array: HostArray, encoding: Encoding) -> bytes:
    return zarr_metadata.metadata_text(
        encoding, array.shape, array.stored_dtype, array.chunk_shape
    )


class _Chunk(NamedTuple):
    """A chunk to write.

    Attributes:
        array: The array of the chunk.
        shard: The shard with the values.
        key: Index of the chunk.
        bounds: Region of the values in the whole array, without padding.
    """

    array: HostArray
    shard: HostShard
    key: str
    bounds: Region

    @property
    def size(self) -> int:
        """Stored bytes without the checksum."""
        bits = _state.dtypes.item_bits(self.array.dtype)
        return math.prod(self.array.chunk_shape) * bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the values in memory."""
        itemsize: int = self.shard.data.dtype.itemsize
        return math.prod(zarr_metadata.extent(self.bounds)) * itemsize

    def needs_copy(self) -> bool:
        """Returns True if writing needs a copy of the values in storage layout."""
        data = self._data()
        return not (
            data.dtype.name == self.array.dtype
            and data.dtype.isnative
            and data.flags.c_contiguous
        )

    def parts_and_checksums(
        self, encoding: Encoding, segment_bytes: int
    ) -> tuple[list[memoryview], bytes]:
        """Returns the bytes to store and the checksums of the segments.

        The bytes are the values, padding and checksum, as views where possible. The
        last checksum is that of the chunk.
        """
        parts = self._content()
        if not encoding.checksum:
            return parts, b""
        values = chunk_checksums.running_checksums(parts, segment_bytes)
        packed = chunk_checksums.to_bytes(values)
        tail = memoryview(packed)[-chunk_file.CHECKSUM_BYTES :]
        return [*parts, tail], packed

    def _content(self) -> list[memoryview]:
        array = self.array
        data = _state.numpy_dtypes.to_stored(
            _state.numpy_dtypes.convert(self._data(), array.dtype)
        )
        missing = self.size - data.nbytes
        if missing and data.shape[1:] != array.chunk_shape[1:]:
            # The chunk extends beyond the array along an axis after the first.
            padded = np.zeros(array.chunk_shape, data.dtype)
            padded[tuple(slice(size) for size in data.shape)] = data
            data, missing = padded, 0
        run = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return [run.data, memoryview(bytes(missing))]

    def _data(self) -> Array:
        values = np.asarray(self.shard.data)
        data: Array = values[zarr_metadata.within(self.bounds, self.shard.region)]
        return data


def _chunks(array: HostArray) -> Iterator[_Chunk]:
    """Yields the chunks of an array to be written by this process."""
    for shard in array.shards:
        for key, bounds in zarr_metadata.chunks(shard.region, array.chunk_shape):
            yield _Chunk(array, shard, key, bounds)


def _write_files(target: _Target, arrays: Sequence[HostArray]) -> Checksums:
    """Writes each array as a directory of chunk files, on several threads.

    Returns:
        The checksums of all chunks and of their segments.
    """
    checksums: Checksums = {}
    root, previous, encoding = target.root, target.previous, target.encoding
    file_mode = None if previous is None else previous.file_mode
    budget = _util.threads.Budget(target.max_concurrent_bytes)
    costs_requests = _storage.of(root).costs_requests

    def begin(array: HostArray) -> bool:
        """Makes the directory; returns True if the array is unchanged."""
        directory = root / array.name
        # The directory of an array without a name is its parent's.
        is_whole_item = "/" not in array.name
        directory.mkdir(exist_ok=is_whole_item or target.writer is not None)
        content = _metadata_text(array, encoding)
        if not target.writer:
            chunk_file.write(directory / zarr_metadata.METADATA, [memoryview(content)])
        return previous is not None and _is_unchanged(array, content, previous)

    def write_chunk(chunk: _Chunk, is_unchanged: bool) -> None:
        name = chunk.array.name
        new = root / name / chunk.key
        old = None if previous is None else previous.root / name / chunk.key
        # A jax array may share memory with a numpy array that its owner has changed.
        # jax does not report this, so compare checksums.
        compare_all = not (is_unchanged and encoding.checksum)
        copies = chunk.needs_copy() + _COPIES_IN_REQUESTS * costs_requests
        with budget.hold(chunk.size * copies):
            parts, packed = chunk.parts_and_checksums(encoding, target.segment_bytes)
            if packed:
                checksums.setdefault(name, {})[chunk.key] = packed
            if old is None or not chunk_file.link_if_equal(
                old, new, parts, compare_all=compare_all, mode=file_mode
            ):
                chunk_file.write(new, parts)
        target.report(chunk.nbytes)

    tasks = _tasks(arrays, begin, write_chunk, in_store=costs_requests)
    # A thread of low priority must not be the first to use TensorStore, whose threads
    # would inherit the priority.
    threads, pace = (
        (_THREADS_OF_STORES, None) if costs_requests else (_THREADS, target.pace)
    )
    _util.threads.each(lambda task: task(), tasks, threads=threads, pace=pace)
    if previous is not None and not previous.is_current():
        # Files of another checkpoint may have been linked.
        raise OSError(f"{previous.root} was replaced during the save")
    return checksums


def _tasks(
    arrays: Sequence[HostArray],
    begin: Callable[[HostArray], bool],
    write_chunk: Callable[[_Chunk, bool], None],
    *,
    in_store: bool,
) -> list[Callable[[], object]]:
    """Returns the tasks that write arrays, in the order to start them.

    Large arrays are shared among the threads, chunk by chunk, and come first. In a
    store they come last: a server busy with them answers small requests late.

    Args:
        arrays: The arrays.
        begin: Makes the directory of an array; returns True if it is unchanged.
        write_chunk: Writes a chunk of an array that is unchanged, or not.
        in_store: True for objects, which need no directory before them.
    """

    def write(array: HostArray) -> None:
        is_unchanged = begin(array)
        for chunk in _chunks(array):
            write_chunk(chunk, is_unchanged)

    tasks: list[Callable[[], object]] = []
    ordered = sorted(arrays, key=lambda array: -array.nbytes)
    for array in ordered:
        if not in_store and array.nbytes < _SHARED_BYTES:
            tasks.append(functools.partial(write, array))
            continue
        is_unchanged = False if in_store else begin(array)
        tasks += [
            functools.partial(write_chunk, chunk, is_unchanged)
            for chunk in _chunks(array)
        ]
    if not in_store:
        return tasks
    return [functools.partial(begin, array) for array in ordered] + tasks[::-1]


def _is_unchanged(array: HostArray, metadata: bytes, previous: Previous) -> bool:
    """Returns True if the same jax object was saved before, in the same form."""
    source = array.source and array.source()
    saved, dtype = previous.sources.get(array.name, (None, ""))
    if source is None or saved is None or saved() is not source:
        return False
    if dtype != array.dtype:
        return False
    try:
        path = previous.root / array.name / zarr_metadata.METADATA
        return chunk_file.read_small(path) == metadata
    except (ValueError, OSError):
        return False


def _link_files(previous: Previous, new: Path, name: str) -> None:
    """Replaces files of an array by links to equal files of an earlier checkpoint."""
    for file in [path for path in new.iterdir() if path.is_file()]:
        link = file.with_name(file.name + ".link")
        if chunk_file.link_if_equal(
            previous.root / name / file.name,
            link,
            [memoryview(file.read_bytes())],
            mode=previous.file_mode,
        ):
            link.replace(file)


# ---- databases, and TensorStore -------------------------------------------------


def _write_databases(
    target: _Target, batches: Iterable[list[HostArray]], checksums: Checksums
) -> None:
    """Writes a database; one of this process alone, if others write, too."""
    if target.writer is not None:
        part = f"{zarr_metadata.DATABASE_PART}{target.writer}"
        target = target._replace(root=target.root / part)
        target.root.mkdir()
    if _storage.upload.is_needed(target.root):
        _upload_database(target, batches, checksums)
        return
    for arrays in batches:
        for batch in _util.memory.batches(_sized(arrays), target.max_concurrent_bytes):
            _write_database(target, batch, checksums)


def _upload_database(
    target: _Target, batches: Iterable[list[HostArray]], checksums: Checksums
) -> None:
    """Writes arrays into a database in memory, and uploads it part by part.

    The files with values are uploaded while the next arrays are written. The nodes of
    the tree, and the manifest, change with each part and are uploaded last.
    """
    at_once = min(_UPLOADED_AT_ONCE, target.max_concurrent_bytes // _COPIES_IN_UPLOADS)
    budget = _util.threads.Budget(target.max_concurrent_bytes)
    one_at_a_time = threading.Lock()
    with _storage.upload.memory_directory(target.root) as memory:
        in_memory = target._replace(root=memory.path)

        def write(batch: Sequence[HostArray]) -> None:
            size = sum(array.nbytes for array in batch)
            with budget.hold(size * _COPIES_IN_UPLOADS):
                with one_at_a_time:
                    _write_database(in_memory, batch, checksums)
                    values = memory.take(zarr_metadata.DATABASE_VALUES)
                memory.send(values)

        for arrays in batches:
            ordered = sorted(arrays, key=lambda array: -array.nbytes)
            parts = _util.memory.batches(_sized(ordered), at_once)
            _util.threads.each(write, parts, threads=_THREADS_OF_STORES)


def _write_database(
    target: _Target, arrays: Sequence[HostArray], checksums: Checksums
) -> None:
    """Writes arrays into a database, in a single transaction.

    Args:
        target: The database.
        arrays: The arrays.
        checksums: Receives the checksums of raw chunks.
    """
    encoding = target.encoding
    transaction = ts.Transaction(atomic=True)
    database = zarr_ocdbt.open(target.root, target.context)
    values = database.with_transaction(transaction)
    large = []
    for array in arrays:
        if not is_raw(array, encoding):
            large.append(array)
            continue
        is_large = array.nbytes > _DATABASE_VALUE_BYTES
        for chunk in _chunks(array):
            parts, packed = chunk.parts_and_checksums(encoding, sys.maxsize)
            if packed:
                checksums.setdefault(array.name, {})[chunk.key] = packed
            if not is_large:
                key = zarr_metadata.database_key(array.name, chunk.key)
                values.write(key, b"".join(parts))
        if is_large:
            large.append(array)
            continue
        key = zarr_metadata.database_key(array.name, zarr_metadata.METADATA)
        values.write(key, _metadata_text(array, encoding))
        target.report(array.nbytes)
    _write_encoded(target, large, target.max_concurrent_bytes, transaction)
    transaction.commit_async().result()


def _write_encoded(
    target: _Target,
    arrays: Sequence[HostArray],
    bytes_at_once: int,
    transaction: ts.Transaction | None = None,
    *,
    may_exist: bool = False,
) -> None:
    """Writes arrays by TensorStore, in the transaction if given."""
    encoding = target.encoding
    if arrays:
        _storage.store_requests.use_threads()
    opened = [
        ts.open(
            {
                "driver": "zarr3" if encoding.version == 3 else "zarr",
                "kvstore": zarr_metadata.kvstore(
                    target.root, array.name, ocdbt=transaction is not None
                ),
                # Orbax treats a missing chunk as damage, so write zeros too.
                "store_data_equal_to_fill_value": True,
                "metadata": zarr_metadata.metadata(
                    encoding, array.shape, array.stored_dtype, array.chunk_shape
                ),
            },
            create=True,
            open=may_exist,
            context=target.context,
            transaction=transaction,
        )
        for array in arrays
    ]
    started: list[ts.Future[Any]] = []
    pending: collections.deque[tuple[ts.Future[Any], int]] = collections.deque()
    in_flight = 0
    try:
        for array, future in zip(arrays, opened, strict=True):
            store = future.result()
            for part in _parts(array):
                while pending and in_flight + part.data.nbytes > bytes_at_once:
                    oldest, size = pending.popleft()
                    oldest.result()
                    in_flight -= size
                    target.report(size)
                write = _start_write(array, part, store, transaction)
                started.append(write)
                pending.append((write, part.data.nbytes))
                in_flight += part.data.nbytes
        for write, size in pending:
            write.result()
            target.report(size)
    finally:
        # After a failure, wait for all writes before the caller cleans up.
        for future in (*opened, *started):
            future.exception()


def _parts(array: HostArray) -> Iterator[HostShard]:
    """Yields the shards of an array, large ones in parts of whole rows of chunks."""
    for shard in array.shards:
        if shard.data.nbytes <= _ENCODED_PART:
            yield shard
            continue
        data = np.asarray(shard.data)
        (start, stop), *others = shard.region
        rows_at_once = _ENCODED_PART * (stop - start) // data.nbytes
        step = max(rows_at_once // array.chunk_shape[0], 1) * array.chunk_shape[0]
        cuts = [start, *range((start // step + 1) * step, stop, step), stop]
        for low, high in itertools.pairwise(cuts):
            region = ((low, high), *others)
            yield HostShard(region, data[low - start : high - start])


def _start_write(
    array: HostArray,
    shard: HostShard,
    store: ts.TensorStore,
    transaction: ts.Transaction | None,
) -> ts.Future[Any]:
    part = store[tuple(slice(*bounds) for bounds in shard.region)]
    data = _state.numpy_dtypes.to_stored(
        _state.numpy_dtypes.convert(np.asarray(shard.data), array.dtype)
    )
    write = part.write(data, can_reference_source_data_indefinitely=True)
    # In a transaction, nothing is written before the commit.
    return write.copy if transaction else write.commit
