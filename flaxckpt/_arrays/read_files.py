"""Reads plain values, which need no decoding, from chunks and byte ranges of files.

Chunks are mapped if possible without a copy, or else read into the array, or through a
buffer if not contiguous there. Values are cast while they are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import crc32c
import numpy as np

from flaxckpt import _state, _storage, _util
from flaxckpt._arrays import read_plan
from flaxckpt._arrays.read_plan import ChunkForm, ReadJob, Span
from flaxckpt._types import Shape
from flaxckpt._zarr import checksums, chunk_file
from flaxckpt._zarr import metadata as zarr_metadata
from flaxckpt._zarr import ocdbt as zarr_ocdbt
from flaxckpt._zarr.btree import Place, Value
from flaxckpt._zarr.chunk_file import Block, Bytes
from flaxckpt._zarr.metadata import Array, RawArray, Region

THREADS = 8
"""Threads that read files. More than cores: some wait for the disk."""

_THREADS_IN_STORES = 32
"""Threads that read objects: they mostly wait for the network."""

_SMALL_GAP_BYTES = 2**16
_SMALL_GAP_IN_STORES_BYTES = 2**22
"""Smaller gaps between bytes are read, too: another request would take longer."""

_VALUES_AT_ONCE = 2**20
"""Bytes of small values that are read in a call."""

_CAST_AT_ONCE = 2**20
"""Bytes that are read and cast at a time: few enough for the cache of a core."""

_MAX_METADATA_BYTES = 2**20

_SMALL_BYTES = 2**20
"""Size in bytes up to which arrays of a database are read together."""


# ---- readings in progress -------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Reading:
    """A read of a leaf: `run` its tasks, then call `result`, which raises errors."""

    tasks: Sequence[Callable[[], None]]
    arrays: Callable[[], Mapping[Region, Array]]
    errors: list[Exception] = dataclasses.field(default_factory=list)

    def result(self) -> Mapping[Region, Array]:
        if self.errors:
            raise self.errors[0]
        return self.arrays()


def _attempt(task: Callable[[], None], errors: list[Exception]) -> None:
    """Runs a task; adds an error that the reading is to raise to `errors`."""
    try:
        task()
    except (ValueError, OSError) as error:
        errors.append(error)
    except MemoryError:
        errors.append(_util.memory.TooLargeError())


def run(readings: Sequence[Reading], *, in_store: bool = False) -> None:
    tasks = [
        functools.partial(_attempt, task, reading.errors)
        for reading in readings
        for task in reading.tasks
    ]
    threads = _THREADS_IN_STORES if in_store else THREADS
    _util.threads.each(operator.call, tasks, threads=threads)


def small_gap(path: Path) -> int:
    """Returns the bytes below which a gap between values is read, too."""
    if _storage.of(path).costs_requests:
        return _SMALL_GAP_IN_STORES_BYTES
    return _SMALL_GAP_BYTES


# ---- databases ------------------------------------------------------------------


class Database:
    """A database, opened and checked; `root` has checked links.

    Its small values are not read through TensorStore, which takes several times as
    long. `request` values, run the tasks of `reading`, and take each from `value`.
    Large values have a `place`. `sizes` are the recorded bytes of its files with
    values.
    """

    def __init__(self, root: Path, sizes: Mapping[str, int] | None = None) -> None:
        self._root = root
        self._storage = _storage.of(root)
        self._index = zarr_ocdbt.open_index(root)
        self._sizes = sizes
        self._checked: set[str] = set()
        self._requested: dict[str, Place] = {}
        self._uses: dict[str, int] = {}
        self._read: dict[str, bytes | Exception] = {}

    def find(self, key: str) -> Value:
        """Returns a value, or its place; raises ValueError if it is missing."""
        found = self._index.find(key)
        if isinstance(found, Place) and self._sizes is not None:
            self._check_place(found, self._sizes)
        return found

    def holds(self, key: str) -> bool:
        """Returns True if a value is in the index; raises ValueError if missing."""
        return isinstance(self._index.find(key), bytes)

    def _check_place(self, place: Place, sizes: Mapping[str, int]) -> None:
        """Raises ValueError for an unrecorded place, or a file of another size."""
        size = sizes.get(place.file)
        if size is None:
            raise ValueError(f"the index names {place.file[:80]}, which was not saved")
        if place.offset + place.size > size:
            raise ValueError(
                f"the index has a place behind the {size} bytes of {place.file}"
            )
        if place.file not in self._checked:
            file = self._root / place.file
            found = self._storage.known_size(file, None)
            if found is not None and found != size:
                raise ValueError(f"{file.name} has {found} bytes instead of {size}")
            self._checked.add(place.file)

    def place(self, key: str, size: int) -> Place:
        """Returns the place of a value of `size` bytes that is not in the index."""
        found = self.find(key)
        found_bytes = len(found) if isinstance(found, bytes) else found.size
        if isinstance(found, bytes) or found.size != size:
            raise ValueError(f"{key} has {found_bytes} bytes instead of {size}")
        return found

    def request(self, key: str, max_bytes: int) -> None:
        """Requests a value for one call of `value`, or raises ValueError."""
        found = self.find(key)
        if isinstance(found, bytes):
            self._read[key] = found
        elif found.size > max_bytes:
            raise ValueError(f"{key} has {found.size} bytes instead of {max_bytes}")
        else:
            self._requested[key] = found
        self._uses[key] = self._uses.get(key, 0) + 1

    def reading(self) -> Reading:
        """Returns a reading with the tasks that read the requested values."""
        gap = small_gap(self._root)
        pieces: list[list[tuple[str, Place]]] = []
        start, end, file = 0, 0, ""
        by_place = sorted(self._requested.items(), key=operator.itemgetter(1))
        for key, place in by_place:
            stop = place.offset + place.size
            is_near = place.file == file and place.offset - end <= gap
            if not is_near or stop - start > _VALUES_AT_ONCE:
                pieces.append([])
                start, end, file = place.offset, stop, place.file
            pieces[-1].append((key, place))
            end = max(end, stop)
        self._requested = {}
        tasks = [functools.partial(self._read_piece, piece) for piece in pieces]
        return Reading(tasks, dict)

    def _read_piece(self, values: Sequence[tuple[str, Place]]) -> None:
        """Reads values that are near each other in a file, the first at the start."""
        start = values[0][1].offset
        stop = max(place.offset + place.size for _, place in values)
        file = self._root / values[0][1].file
        try:
            content = self._storage.read_range(file, start, stop - start)
        except (ValueError, OSError, MemoryError) as error:
            self._read.update((key, error) for key, _ in values)
            return
        for key, place in values:
            offset = place.offset - start
            self._read[key] = content[offset : offset + place.size]

    def value(self, key: str) -> bytes:
        """Returns a requested value after the tasks of `reading`.

        It is shorter than in the index if its file ends too early. Raises ValueError,
        OSError or MemoryError.
        """
        value = self._read[key]
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._read[key], self._uses[key]
        if isinstance(value, Exception):
            raise value
        return value


class Databases:
    """Databases of a restore, each opened and verified once."""

    def __init__(self) -> None:
        self._opened: dict[Path, Database | Exception] = {}

    def open(
        self,
        root: Path,
        checkpoint: Path,
        *,
        check: Callable[[], None] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Database:
        """Returns the opened database, or raises ValueError or OSError.

        Causes are `check`, a missing file, and a link that leaves `checkpoint`.
        """
        opened = self._opened.get(root)
        if opened is None:
            index = [root / name for name in zarr_metadata.INDEX_FILES]
            try:
                _storage.of(root).check_root(root, checkpoint)
                with _storage.paths.read_ahead(index):
                    if check is not None:
                        check()
                    opened = Database(root, sizes)
            except (ValueError, OSError) as error:
                opened = error
            self._opened[root] = opened
        if isinstance(opened, Exception):
            raise opened
        return opened

    def readings(self) -> list[Reading]:
        """Returns readings with the tasks that read the requested values."""
        opened = self._opened.values()
        return [each.reading() for each in opened if isinstance(each, Database)]


def check_digests(root: Path, digests: Mapping[str, str], *, max_bytes: int) -> None:
    """Raises ValueError if a file has changed or is too large, OSError if missing."""
    digest_file = _storage.of(root).digest_file

    def check(name: str) -> None:
        found = digest_file(root / name, max_bytes=max_bytes)
        _storage.files.check_digest(name, found, digests[name])

    # The index of a database is two files, one of them tiny: not worth a thread.
    threads = THREADS if len(digests) > len(zarr_metadata.INDEX_FILES) else 1
    _util.threads.each(check, digests, threads=threads)


def find_files(jobs: Iterable[ReadJob]) -> set[Path]:
    """Returns the files that a read opens, without the indexes, which this reads."""
    databases, found = Databases(), set()
    for job in jobs:
        raw, stored = job.stored.raw, job.stored
        if raw is not None and raw.ocdbt and stored.info.chunk_shape is not None:
            index = databases.open(raw.root, stored.root, check=raw.check_database)
            for key in read_plan.find_parts([*job.reads], stored.info.chunk_shape):
                place = index.find(zarr_metadata.database_key(raw.name, key))
                if isinstance(place, Place):
                    found.add(raw.root / place.file)
        elif (find_in := job.needed.find_files) is not None:
            found |= {stored.root / name for name in find_in()}
    return found


# ---- chunks ---------------------------------------------------------------------


def from_files(
    raw: RawArray,
    form: ChunkForm,
    regions: Sequence[Region],
    database: Database | None = None,
    *,
    dtype: str,
    memory_map: bool,
    verify: bool,
) -> Reading:
    """Reads `regions` of an array, cast to `dtype`, from files or an open `database`.

    The tasks of `Databases.readings` must run before the result of a database is taken.
    Raises ValueError or OSError for a file or value that is missing or has the wrong
    size.
    """
    tasks: list[Callable[[], None]] = []
    check = _metadata_check(raw, database) if verify else None
    verify = check is not None
    if check is not None and database is None:
        tasks.append(check)
    may_map = memory_map and dtype == form.stored and _storage.of(raw.root).can_map
    arrays: dict[Region, Array] = {}
    for box, inside in read_plan.group(regions, form.chunk_shape).items():
        needs = read_plan.find_parts(inside, form.chunk_shape)
        blocks = {
            chunk.key: _find_block(raw, form, chunk, database)
            for chunk in zarr_metadata.chunks(box, form.chunk_shape)
        }
        run = _map(form, [*blocks.values()]) if may_map and blocks else None
        if run is not None:
            values = form.values(run, box)
            for region in inside:
                arrays[region] = values[zarr_metadata.within(region, box)]
            for n, (key, block) in enumerate(blocks.items() if verify else ()):
                content = run[n * block.size : (n + 1) * block.size]
                needed = [bounds for _, bounds in needs.get(key, ())]
                tasks += [
                    functools.partial(chunk_file.verify_mapped, block, content, *part)
                    for part in form.byte_ranges(needed, block.verified_at_once, 0)
                ]
            continue
        for region in inside:
            extent = zarr_metadata.extent(region)
            arrays[region] = empty(extent, _state.numpy_dtypes.to_numpy(dtype))
        for key, places in needs.items():
            parts = [
                (arrays[region][zarr_metadata.within(bounds, region)], bounds)
                for region, bounds in places
            ]
            tasks.append(functools.partial(_fill, form, blocks[key], parts, verify))

    def result() -> Mapping[Region, Array]:
        if check is not None and database is not None:
            check()
        return arrays

    return Reading(tasks, result)


def _find_block(
    raw: RawArray,
    form: ChunkForm,
    chunk: zarr_metadata.Chunk,
    database: Database | None,
) -> Block:
    file, offset = raw.root / raw.name / chunk.key, None
    if database is not None:
        key = zarr_metadata.database_key(raw.name, chunk.key)
        place = database.place(key, form.stored_bytes)
        file, offset = raw.root / place.file, place.offset
    size, has_checksum = form.chunk_bytes, form.encoding.checksum
    if raw.checksums is None:
        return Block(file, size, has_checksum, offset=offset, key=chunk.key)
    n = raw.checksums.place(chunk.bounds, form.chunk_shape)
    return Block(
        file,
        size,
        has_checksum,
        raw.checksums.segment_bytes,
        raw.checksums.of_segments(n, size),
        raw.checksums.number(n),
        offset,
        chunk.key,
    )


def _recorded(raw: RawArray, form: ChunkForm, bounds: Region) -> int | None:
    """Returns the recorded checksum of the chunk at the start of `bounds`."""
    recorded = raw.checksums
    return recorded and recorded.number(recorded.place(bounds, form.chunk_shape))


def _map(form: ChunkForm, blocks: Sequence[Block]) -> Bytes | None:
    """Maps chunks contiguously; returns None if not possible."""
    if form.chunk_bytes < chunk_file.MAPPED_FROM or not form.is_run(len(blocks)):
        return None
    if not all(map(chunk_file.can_map, blocks)):
        return None
    try:
        if len(blocks) == 1:
            return chunk_file.map_block(blocks[0])
        if not chunk_file.can_join([form.chunk_bytes] * len(blocks)):
            return None
        return chunk_file.map_blocks(blocks)
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENODEV):
            return None  # no more maps, or no support by the file system
        raise


def empty(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Returns an uninitialized array, in memory that jax uses without a copy."""
    memory = chunk_file.empty(math.prod(shape) * dtype.itemsize)
    return memory.view(dtype).reshape(shape)


def _fill(
    form: ChunkForm, block: Block, parts: Sequence[tuple[Array, Region]], verify: bool
) -> None:
    """Reads parts of a chunk: each a target, and the region of its values."""
    at_once = block.verified_at_once if verify else 1
    gap = small_gap(block.path)
    ranges = form.byte_ranges([bounds for _, bounds in parts], at_once, gap)
    if len(parts) == 1 and len(ranges) == 1:
        [(target, bounds)], [(start, stop)] = parts, ranges
        (first, end), *others = form.byte_ranges([bounds], 1, gap)
        if (
            target.flags.c_contiguous
            and target.dtype == form.dtype
            and target.nbytes == end - first
            and not others
        ):
            before = np.empty(first - start, np.uint8)
            memory = target.reshape(-1).view(np.uint8)
            after = np.empty(stop - end, np.uint8)
            into = [before.data, memory.data, after.data]
            chunk_file.read(block, into, start=start, verify=verify)
            return
    buffer = chunk_file.empty(block.size)  # takes memory only where it is filled
    for start, stop in ranges:
        into = [buffer[start:stop].data]
        chunk_file.read(block, into, start=start, verify=verify)
    for target, bounds in parts:
        _state.numpy_dtypes.cast_into(target, form.values(buffer, bounds))


def is_small(raw: RawArray, form: ChunkForm, database: Database) -> bool:
    """Returns True if an array in a database is read together with others."""
    if form.nbytes <= _SMALL_BYTES:
        return True
    whole = zarr_metadata.chunks(zarr_metadata.whole(form.shape), form.chunk_shape)
    return database.holds(zarr_metadata.database_key(raw.name, whole[0].key))


def from_database(
    raw: RawArray,
    form: ChunkForm,
    regions: Sequence[Region],
    database: Database,
    *,
    verify: bool,
) -> Reading:
    """Reads `regions`; the tasks of `Databases.readings` must run before the result."""
    check = _metadata_check(raw, database) if verify else None
    verify = check is not None
    needs = read_plan.find_parts(regions, form.chunk_shape)
    names = {key: zarr_metadata.database_key(raw.name, key) for key in needs}
    for name in names.values():
        database.request(name, form.stored_bytes)

    def arrays() -> Mapping[Region, Array]:
        if check is not None:
            check()
        parts: dict[Region, list[tuple[Region, Array]]] = {r: [] for r in regions}
        for key, places in needs.items():
            content = database.value(names[key])
            if (size := len(content)) != form.stored_bytes:
                raise ValueError(
                    f"{names[key]} has {size} bytes instead of {form.stored_bytes}"
                )
            values = np.frombuffer(content, np.uint8, form.chunk_bytes)
            if verify and form.encoding.checksum:
                checksums.check_whole(
                    key,
                    crc32c.crc32c(values.data),
                    content[form.chunk_bytes :],
                    _recorded(raw, form, places[0][1]),
                )
            for region, bounds in places:
                parts[region].append((bounds, form.values(values, bounds)))
        found: dict[Region, Array] = {}
        for region, pieces in parts.items():
            if len(pieces) == 1:
                found[region] = pieces[0][1]
                continue
            found[region] = empty(zarr_metadata.extent(region), form.dtype)
            for bounds, piece in pieces:
                found[region][zarr_metadata.within(bounds, region)] = piece
        return found

    return Reading([], arrays)


def _metadata_check(
    raw: RawArray, database: Database | None
) -> Callable[[], None] | None:
    """Returns the check of the metadata, which it requests from an open database.

    None if digests cover the whole database: chunks need no check either.
    """
    if database is None:
        file = raw.root / raw.name / zarr_metadata.METADATA
        read = functools.partial(chunk_file.read_small, file)
    elif raw.has_digests:
        return None
    else:
        name = zarr_metadata.database_key(raw.name, zarr_metadata.METADATA)
        database.request(name, _MAX_METADATA_BYTES)
        read = functools.partial(database.value, name)
    return lambda: zarr_metadata.check_metadata(read(), raw.encoding, raw.form)


# ---- byte ranges of a file ------------------------------------------------------


def from_span(
    span: Span, regions: Sequence[Region], *, dtype: str, memory_map: bool
) -> Reading:
    """Reads `regions` of an array, cast to `dtype`, from a byte range.

    Raises OSError if the file has changed, and TooLargeError if memory is not free.
    """
    may_map = memory_map and dtype == span.dtype
    mapped = map_values(span) if may_map else None
    if mapped is not None:
        parts = {
            region: mapped[tuple(slice(*bounds) for bounds in region)]
            for region in regions
        }
        return Reading([], lambda: parts)
    form = _state.numpy_dtypes.to_numpy(dtype)
    sizes = [math.prod(zarr_metadata.extent(region)) for region in regions]
    _util.memory.check(sum(sizes) * form.itemsize)
    tasks: list[Callable[[], None]] = []
    arrays: dict[Region, Array] = {}
    part_shape = (
        read_plan.part_shape(span.shape, span.itemsize)
        if dtype == span.dtype
        else read_plan.part_shape(span.shape, span.itemsize, _CAST_AT_ONCE)
    )
    for region in regions:
        arrays[region] = target = empty(zarr_metadata.extent(region), form)
        for _, bounds in zarr_metadata.chunks(region, part_shape):
            part = target[zarr_metadata.within(bounds, region)]
            origin = [start for start, _ in bounds]
            tasks.append(functools.partial(_fill_part, part, span, origin))
    return Reading(tasks, lambda: arrays)


def _fill_part(target: Array, span: Span, origin: Sequence[int]) -> None:
    """Reads the values of `span` from the index `origin` on into `target`."""
    if target.dtype.name == span.dtype:
        read_into(target, span, origin)
    else:
        values = np.empty(target.shape, _state.numpy_dtypes.to_numpy(span.dtype))
        read_into(values, span, origin)
        _state.numpy_dtypes.cast_into(target, values)


def read_into(target: Array, span: Span, origin: Sequence[int]) -> None:
    """Fills `target` with the elements of `span` from the index `origin` on.

    Raises OSError if the file has changed, and ValueError for bools that are neither 0
    nor 1.
    """
    # A few whole rows of the array, or a part of a row: few runs of bytes.
    outer = read_plan.outer_axes(span.shape, target.shape)
    with _open_file(span) as descriptor:
        for index in np.ndindex(target.shape[:outer]):
            start = [*origin]
            for axis, i in enumerate(index):
                start[axis] += i
            _read_run(descriptor, span, start, target[(*index, ...)])


def map_values(span: Span) -> Array | None:
    """Maps an array, copy-on-write, or returns None; raises OSError if it changed."""
    if not span.is_replaced_only or span.pieces or span.is_big_endian:
        return None
    if span.offset % chunk_file.ALIGNMENT or span.nbytes < chunk_file.MAPPED_FROM:
        return None
    with _open_file(span) as descriptor:
        content = chunk_file.map_range(descriptor, span.offset, span.nbytes)
    if content is None:
        return None
    return content.view(_state.numpy_dtypes.to_numpy(span.dtype)).reshape(span.shape)


@contextlib.contextmanager
def _open_file(span: Span) -> Iterator[int]:
    """Yields the descriptor of the file, after checking its identity."""
    with _storage.of(span.file).open_file(span.file) as file:
        identity = _storage.files.identity(os.fstat(file.fileno()))
        if span.identity not in (None, identity):
            raise OSError(
                f"{span.file} was replaced or changed since it was opened; load it"
                " again"
            )
        yield file.fileno()


def _read_run(descriptor: int, span: Span, start: Sequence[int], target: Array) -> None:
    """Fills `target` with the elements from `start` on."""
    run = target if target.flags.c_contiguous else np.empty_like(target, order="C")
    element = 0
    for size, i in zip(span.shape, start, strict=True):
        element = element * size + i
    view = run.reshape(-1).view(np.uint8).data
    start_byte = element * span.itemsize
    for begin, size in span.pieces or ((span.offset, span.nbytes),):
        if view and start_byte < size:
            count = min(size - start_byte, len(view))
            _read_at(descriptor, span.file, begin + start_byte, view[:count])
            view = view[count:]
        start_byte = max(start_byte - size, 0)
    if span.is_big_endian:
        run.byteswap(inplace=True)
    _state.numpy_dtypes.check_bools(run)
    if run is not target:
        target[...] = run


def _read_at(descriptor: int, file: Path, position: int, view: memoryview) -> None:
    while view:
        count = os.preadv(descriptor, [view], position)
        if not count:
            raise OSError(f"{file} ends at byte {position}, in the middle of an array")
        view, position = view[count:], position + count
