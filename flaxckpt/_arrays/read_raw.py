"""Reads plain values, which need no decoding, for `_arrays.read`.

Chunks in files are mapped if possible without a copy. Otherwise chunks are read
directly into the array, or through a buffer if not contiguous there. Small arrays of a
database are read together with others. Arrays in byte ranges of a file are mapped, or
read in parts. Values of another type than the wanted are cast while they are read.
"""

from __future__ import annotations

import errno
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flaxckpt import _state, _storage, _util
from flaxckpt._arrays import byte_ranges, forms, read_tasks
from flaxckpt._arrays.databases import Database
from flaxckpt._arrays.read_tasks import Reading
from flaxckpt._arrays.spans import Span
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import Shape
from flaxckpt._zarr import chunk_file
from flaxckpt._zarr import metadata as zarr_metadata
from flaxckpt._zarr.chunk_file import Block, Bytes
from flaxckpt._zarr.metadata import Array, RawArray, Region

_CAST_AT_ONCE = 2**20
"""Bytes that are read and cast at a time: few enough for the cache of a core."""

_MAX_METADATA_BYTES = 2**20

_SMALL_BYTES = 2**20
"""Size in bytes up to which arrays of a database are read together."""


class _Form:
    """Form of an array's chunks."""

    def __init__(
        self,
        encoding: zarr_metadata.Encoding,
        shape: Shape,
        stored: str,
        chunk_shape: Shape,
    ) -> None:
        self.encoding = encoding
        self.shape = shape
        self.stored = stored
        self.chunk_shape = chunk_shape
        self.only_chunk = zarr_metadata.whole(shape) if chunk_shape == shape else None
        self.dtype: np.dtype[Any] = _state.numpy_dtypes.to_numpy(stored)
        self.chunk_bytes = math.prod(chunk_shape) * self.dtype.itemsize
        checksum_bytes = chunk_file.CHECKSUM_BYTES * encoding.checksum
        self.stored_bytes = self.chunk_bytes + checksum_bytes

    def check_metadata(self, text: bytes) -> None:
        """Compares the array's `zarr.json` with the recorded form."""
        zarr_metadata.check_metadata(
            text, self.encoding, self.shape, self.stored, self.chunk_shape
        )

    def values(self, content: Bytes, region: Region) -> Array:
        """Returns the values of `region` in `content`.

        Args:
            content: Chunks along the first axis, from the first chunk of `region` on.
            region: Region of the array.
        """
        if region == self.only_chunk:
            return content.view(self.dtype).reshape(self.shape)
        rows = content.view(self.dtype).reshape((-1, *self.chunk_shape[1:]))
        inner = (
            slice(start - start // size * size, stop - start // size * size)
            for (start, stop), size in zip(region, self.chunk_shape, strict=True)
        )
        return rows[tuple(inner)]

    def byte_ranges(
        self, regions: Sequence[Region], at_once: int, least_gap: int
    ) -> list[tuple[int, int]]:
        """Returns the ranges of bytes of a chunk that cover regions in it.

        Ranges begin and end at multiples of `at_once`, or at the end of the chunk.

        Args:
            regions: Regions of the array within the chunk.
            at_once: A number of bytes.
            least_gap: Smaller gaps between the bytes of a region are included.
        """
        if any(zarr_metadata.extent(r) == self.chunk_shape for r in regions):
            return [(0, self.chunk_bytes)]
        gap = max(at_once, least_gap)
        runs: list[tuple[int, int]] = []
        for region in regions:
            inner = [
                (start % size, start % size + stop - start)
                for (start, stop), size in zip(region, self.chunk_shape, strict=True)
            ]
            for start, stop in self._runs(inner, gap):
                end = min(-(-stop // at_once) * at_once, self.chunk_bytes)
                runs.append((start // at_once * at_once, end))
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(runs):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        return merged

    def _runs(
        self, inner: Sequence[tuple[int, int]], gap: int
    ) -> Iterator[tuple[int, int]]:
        """Yields the runs of bytes of a box in the chunk, with gaps of `gap` or more.

        Shorter gaps are included, so the runs are few, even if the box is narrow.
        """
        run, stride = self.dtype.itemsize, self.dtype.itemsize
        first = 0
        steps: list[tuple[int, int]] = []  # (runs, stride) of the outer axes
        for (start, stop), size in reversed(
            [*zip(inner, self.chunk_shape, strict=True)]
        ):
            first += start * stride
            if stop - start == 1 or (not steps and stride - run < gap):
                run += (stop - start - 1) * stride
            else:
                steps.insert(0, (stop - start, stride))
            stride *= size
        for index in itertools.product(*[range(count) for count, _ in steps]):
            start = first + sum(
                i * stride for i, (_, stride) in zip(index, steps, strict=True)
            )
            yield start, start + run

    def is_run(self, chunks: int) -> bool:
        """Returns True if adjacent chunks form a contiguous part of the array."""
        if chunks == 1:
            return True
        return self.chunk_shape[1:] == self.shape[1:] and chunk_file.can_join(
            [self.chunk_bytes] * chunks
        )


_make_form = functools.lru_cache(maxsize=1024)(_Form)  # many arrays are alike


def _form_of(raw: RawArray, info: LeafInfo) -> _Form:
    assert info.chunk_shape is not None, info
    return _make_form(raw.encoding, *forms.stored_form(info), info.chunk_shape)


# ---- from files -----------------------------------------------------------------


def from_files(
    raw: RawArray,
    info: LeafInfo,
    regions: Sequence[Region],
    database: Database | None = None,
    *,
    dtype: str,
    memory_map: bool,
    verify: bool,
) -> Reading:
    """Reads `regions` of an array from files.

    Args:
        raw: The array.
        info: The stored leaf.
        regions: The regions.
        database: The open database of the array; None for a directory with its chunks.
            The tasks of `Databases.readings` must run before the result is taken.
        dtype: Name of the type to return: the stored type, or one to cast to.
        memory_map: True to map files if possible without a copy.
        verify: True to compare chunks with their checksums.

    Raises:
        ValueError, OSError: A file or a value is missing or has the wrong size.
    """
    form = _form_of(raw, info)
    tasks: list[Callable[[], None]] = []
    check: Callable[[], None] | None = None
    if database is not None:
        check = metadata_check(raw, info, database, verify=verify)
        verify = verify and not raw.has_digests  # digests cover the whole database
    elif verify:
        metadata = raw.root / raw.name / zarr_metadata.METADATA
        tasks.append(lambda: form.check_metadata(chunk_file.read_small(metadata)))
    may_map = memory_map and dtype == form.stored and _storage.of(raw.root).can_map
    arrays: dict[Region, Array] = {}
    for box, inside in _group(regions, form.chunk_shape).items():
        needs: dict[str, list[tuple[Region, Region]]] = {}
        for region in inside:
            for key, bounds in zarr_metadata.chunks(region, form.chunk_shape):
                needs.setdefault(key, []).append((region, bounds))
        blocks = {
            chunk.key: _block(raw, form, chunk, database)
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
        if check is not None:
            check()
        return arrays

    return Reading(tasks, result)


def _group(
    regions: Sequence[Region], chunk_shape: Shape
) -> dict[Region, Sequence[Region]]:
    """Returns regions in groups without a common chunk: enclosing region -> regions."""
    keys = [
        chunk.key for r in regions for chunk in zarr_metadata.chunks(r, chunk_shape)
    ]
    if len(keys) == len(set(keys)):
        return {region: [region] for region in regions}
    return {zarr_metadata.enclosing(regions): regions}


def _block(
    raw: RawArray,
    form: _Form,
    chunk: zarr_metadata.Chunk,
    database: Database | None = None,
) -> Block:
    """Returns the place of a chunk: in its own file, or in one of the database."""
    block = Block(
        raw.root / raw.name / chunk.key, form.chunk_bytes, form.encoding.checksum
    )
    if database is not None:
        key = zarr_metadata.database_key(raw.name, chunk.key)
        place = database.place(key, form.stored_bytes)
        path = raw.root / place.file
        block = block._replace(path=path, offset=place.offset, key=chunk.key)
    if raw.checksums is None:
        return block
    index = [
        start // size
        for (start, _), size in zip(chunk.bounds, form.chunk_shape, strict=True)
    ]
    return block._replace(
        segment_bytes=raw.checksums.segment_bytes,
        checksums=raw.checksums.of_segments(index, block.size),
        recorded=raw.checksums.of_chunk(index),
    )


def _map(form: _Form, blocks: Sequence[Block]) -> Bytes | None:
    """Maps chunks contiguously; returns None if not possible."""
    if form.chunk_bytes < chunk_file.MAPPED_FROM or not form.is_run(len(blocks)):
        return None
    if not all(map(chunk_file.can_map, blocks)):
        return None
    try:
        if len(blocks) == 1:
            return chunk_file.map_block(blocks[0])
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
    form: _Form, block: Block, parts: Sequence[tuple[Array, Region]], verify: bool
) -> None:
    """Reads parts of a chunk: each a target, and the region of its values."""
    at_once = block.verified_at_once if verify else 1
    gap = read_tasks.small_gap(block.path)
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


# ---- from byte ranges of a file -------------------------------------------------


def from_span(
    span: Span, regions: Sequence[Region], *, dtype: str, memory_map: bool
) -> Reading:
    """Reads `regions` of an array from a byte range.

    Args:
        span: The array.
        regions: The regions.
        dtype: Name of the type to return: the stored type, or one to cast to.
        memory_map: True to map the file if possible without a copy.

    Raises:
        OSError: The file has changed since its header was read.
        TooLargeError: The memory is not free.
    """
    may_map = memory_map and dtype == span.dtype
    mapped = byte_ranges.map_values(span) if may_map else None
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
        byte_ranges.part_shape(span.shape, span.itemsize)
        if dtype == span.dtype
        else byte_ranges.part_shape(span.shape, span.itemsize, _CAST_AT_ONCE)
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
        byte_ranges.read_into(target, span, origin)
    else:
        values = np.empty(target.shape, _state.numpy_dtypes.to_numpy(span.dtype))
        byte_ranges.read_into(values, span, origin)
        _state.numpy_dtypes.cast_into(target, values)


# ---- from a database ------------------------------------------------------------


def is_small(raw: RawArray, info: LeafInfo, database: Database) -> bool:
    """Returns True if an array in a database is read together with others.

    Raises:
        ValueError: The database lacks a value.
    """
    form = _form_of(raw, info)
    if forms.stored_bytes(info) <= _SMALL_BYTES:
        return True
    whole = zarr_metadata.chunks(zarr_metadata.whole(form.shape), form.chunk_shape)
    first = next(iter(whole))
    return database.is_inline(zarr_metadata.database_key(raw.name, first.key))


def from_database(
    raw: RawArray,
    info: LeafInfo,
    regions: Sequence[Region],
    database: Database,
    *,
    verify: bool,
) -> Reading:
    """Reads `regions` of an array from an open database.

    The tasks of `Databases.readings` must run before the result is taken.

    Raises:
        ValueError: The database lacks a value.
    """
    form = _form_of(raw, info)
    check = metadata_check(raw, info, database, verify=verify)
    verify = verify and not raw.has_digests  # digests cover the whole database
    chunks: dict[str, list[tuple[Region, zarr_metadata.Chunk]]] = {}
    for region in regions:
        for chunk in zarr_metadata.chunks(region, form.chunk_shape):
            name = zarr_metadata.database_key(raw.name, chunk.key)
            chunks.setdefault(name, []).append((region, chunk))
    for name in chunks:
        database.request(name, form.stored_bytes)

    def arrays() -> Mapping[Region, Array]:
        if check is not None:
            check()
        parts: dict[Region, list[tuple[Region, Array]]] = {r: [] for r in regions}
        for name, places in chunks.items():
            content = np.frombuffer(database.value(name), np.uint8)
            if len(content) != form.stored_bytes:
                raise ValueError(
                    f"{name} has {len(content)} bytes instead of {form.stored_bytes}"
                )
            values, tail = content[: form.chunk_bytes], content[form.chunk_bytes :]
            if verify and form.encoding.checksum:
                block = _block(raw, form, places[0][1])
                chunk_file.check(block, [values.data], tail.tobytes())
            for region, chunk in places:
                parts[region].append((chunk.bounds, form.values(values, chunk.bounds)))
        return {region: _join(form, region, parts[region]) for region in regions}

    return Reading([], arrays)


def _join(form: _Form, region: Region, parts: Sequence[tuple[Region, Array]]) -> Array:
    """Returns the values of `region`, given the values of all parts of it."""
    if len(parts) == 1:
        return parts[0][1]
    target = empty(zarr_metadata.extent(region), form.dtype)
    for bounds, part in parts:
        target[zarr_metadata.within(bounds, region)] = part
    return target


def metadata_check(
    raw: RawArray, info: LeafInfo, database: Database, *, verify: bool
) -> Callable[[], None] | None:
    """Requests the metadata of an array in an open database.

    Returns:
        A function to call after the tasks of `Databases.readings`, which compares the
        metadata with the recorded form, and raises ValueError if it differs; None if
        it need not be compared.

    Raises:
        ValueError: The metadata is missing.
    """
    if not verify or raw.has_digests:  # digests cover the whole database
        return None
    form = _form_of(raw, info)
    name = zarr_metadata.database_key(raw.name, zarr_metadata.METADATA)
    database.request(name, _MAX_METADATA_BYTES)
    return lambda: form.check_metadata(database.value(name))
