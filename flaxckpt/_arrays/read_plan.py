"""Plans a read: the parts of leaves, of chunks and of byte ranges. Pure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxckpt import _state, _util
from flaxckpt._state.leaf import LeafInfo, StoredLeaf
from flaxckpt._types import Shape
from flaxckpt._zarr import checksums
from flaxckpt._zarr import metadata as zarr_metadata
from flaxckpt._zarr.metadata import Array, ArrayForm, RawArray, Region

if TYPE_CHECKING:
    import numpy as np

    from flaxckpt._zarr.chunk_file import Bytes

_DECODED_AT_ONCE = 128 * 2**20
"""Bytes that TensorStore decodes at a time, beside the encoded bytes."""

_PART_BYTES = 8 * 2**20
"""Bytes per read: large enough for a disk, small enough for several cores."""


# ---- leaves ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ReadJob:
    """A stored leaf to read, and the type, sharding and kind of the wanted value."""

    stored: StoredLeaf
    wanted: LeafInfo

    @property
    def is_raw(self) -> bool:
        """True for values that need no decoding."""
        return self.stored.raw is not None or self.stored.span is not None

    @_util.forks.lazy
    def is_whole(self) -> bool:
        sharding = self.wanted.sharding
        return (
            sharding is None
            or self.wanted.kind != "array"
            or (len(sharding.device_set) == 1 and sharding.is_fully_addressable)
        )

    @_util.forks.lazy
    def nbytes(self) -> int:
        """Uncompressed size of the regions to read, in bytes."""
        if self.is_whole:
            return self.stored.info.stored_bytes
        bits = _state.dtypes.item_bits(self.stored.info.stored_dtype)
        sizes = [math.prod(zarr_metadata.extent(region)) for region in self.reads]
        return sum(sizes) * bits // 8

    @_util.forks.lazy
    def reads(self) -> Mapping[Region, list[Region]]:
        """Region to read -> regions in it that local devices need."""
        shape = self.stored.info.stored_shape
        if self.is_whole:
            whole = zarr_metadata.whole(shape)
            return {whole: [whole]}
        assert self.wanted.sharding is not None, self.wanted
        places = self.wanted.sharding.addressable_devices_indices_map(shape)
        regions = list(
            dict.fromkeys(
                zarr_metadata.region_of(index or (), shape) for index in places.values()
            )
        )
        chunk = self.stored.info.chunk_shape
        if (
            self.stored.raw is not None  # regions share its chunks
            or len(regions) < 2
            or (chunk and all(_fits_chunks(r, chunk, shape) for r in regions))
        ):
            return {region: [region] for region in regions}
        # Otherwise a chunk that overlaps two regions would be read twice.
        return {zarr_metadata.enclosing(regions): regions}

    @_util.forks.lazy
    def needed(self) -> StoredLeaf:
        """The stored leaf, which looks only at the chunks of `reads`."""
        stored, chunk_shape = self.stored, self.stored.info.chunk_shape
        if self.is_whole or stored.with_chunks is None or chunk_shape is None:
            return stored
        return stored.with_chunks(find_parts([*self.reads], chunk_shape))

    def dtype_to_read(self) -> str:
        """Returns the type of the read; numbers are cast later, to detect overflow."""
        wanted, found = self.wanted, self.stored.info
        stored = found.stored_dtype
        is_number = wanted.is_python_number or found.is_python_number
        if is_number or wanted.kind == "prng_key":
            return stored
        cast_to = wanted.dtype or ""
        kind = _state.dtypes.kind
        is_cast = (
            kind(cast_to) == kind(found.dtype or "") == "float"
            and _state.dtypes.stored_name(cast_to) == cast_to
            and stored == found.dtype
        )
        return cast_to if is_cast else stored


def _fits_chunks(region: Region, chunk: Shape, shape: Shape) -> bool:
    return all(
        start % part == 0 and (stop % part == 0 or stop == size)
        for (start, stop), part, size in zip(region, chunk, shape, strict=True)
    )


def batches(jobs: Sequence[ReadJob], max_bytes: int) -> Iterator[list[ReadJob]]:
    """Yields batches of raw arrays, and then of arrays to decode."""
    raw: list[tuple[ReadJob, int]] = []
    encoded: list[tuple[ReadJob, int]] = []
    for job in jobs:
        (raw if job.is_raw else encoded).append((job, job.nbytes))
    yield from _util.memory.batches(raw, max_bytes)
    yield from _util.memory.batches(encoded, min(max_bytes, _DECODED_AT_ONCE))


# ---- chunks ---------------------------------------------------------------------


class ChunkForm:
    """How the chunks of an array lie in its files: encoding, shapes, layout."""

    def __init__(self, encoding: zarr_metadata.Encoding, form: ArrayForm) -> None:
        self.encoding = encoding
        self.shape, self.stored, self.chunk_shape = shape, stored, chunk_shape = form
        self.only_chunk = zarr_metadata.whole(shape) if chunk_shape == shape else None
        self.dtype: np.dtype[Any] = _state.numpy_dtypes.to_numpy(stored)
        self.nbytes = math.prod(shape) * self.dtype.itemsize
        self.chunk_bytes = math.prod(chunk_shape) * self.dtype.itemsize
        checksum_bytes = checksums.CHECKSUM_BYTES * encoding.checksum
        self.stored_bytes = self.chunk_bytes + checksum_bytes

    def values(self, content: Bytes, region: Region) -> Array:
        """Returns the values of `region`; `content` begins with its first chunk."""
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
        """Returns the ranges of bytes of a chunk that cover regions of the array in it.

        They begin and end at multiples of `at_once`, and include gaps to `least_gap`.
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
        """Yields runs of bytes that cover a box in the chunk, with gaps below `gap`."""
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
        return chunks == 1 or self.chunk_shape[1:] == self.shape[1:]


_make_form = functools.lru_cache(maxsize=1024)(ChunkForm)  # many arrays are alike


def form_of(raw: RawArray) -> ChunkForm:
    return _make_form(raw.encoding, raw.form)


def find_parts(
    regions: Sequence[Region], chunk_shape: Shape
) -> dict[str, list[tuple[Region, Region]]]:
    """Returns the chunks that regions need: key -> each region, and its part of it."""
    parts: dict[str, list[tuple[Region, Region]]] = {}
    for region in regions:
        for key, bounds in zarr_metadata.chunks(region, chunk_shape):
            parts.setdefault(key, []).append((region, bounds))
    return parts


def group(
    regions: Sequence[Region], chunk_shape: Shape
) -> dict[Region, Sequence[Region]]:
    """Returns regions in groups without a common chunk: enclosing region -> regions."""
    needs = find_parts(regions, chunk_shape) if len(regions) > 1 else {}
    if all(len(parts) == 1 for parts in needs.values()):
        return {region: [region] for region in regions}
    return {zarr_metadata.enclosing(regions): regions}


# ---- byte ranges of a file ------------------------------------------------------


class Span(NamedTuple):
    """Byte range of an array in a file, in C order.

    Attributes:
        offset: Offset of the first element, in bytes.
        pieces: Offset and size in bytes of each run, for several consecutive runs;
            `offset` is then unused.
        identity: Identity of the file when its header was read (see `Stamp`); a file
            changed since then is not read.
        is_replaced_only: True if the file is never changed in place, so that it may be
            mapped: only files that flaxckpt wrote.
    """

    file: Path
    offset: int
    shape: Shape
    dtype: str
    pieces: tuple[tuple[int, int], ...] = ()
    identity: tuple[int, ...] | None = None
    is_big_endian: bool = False
    is_replaced_only: bool = False

    @property
    def nbytes(self) -> int:
        """Size of all elements, in bytes."""
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _state.dtypes.item_size(self.dtype)


def part_shape(shape: Shape, itemsize: int, max_bytes: int | None = None) -> Shape:
    """Returns the shape of the largest part of an array to read at once."""
    part = [1] * len(shape)
    room = max((max_bytes or _PART_BYTES) // itemsize, 1)
    for axis in reversed(range(len(shape))):
        part[axis] = max(min(shape[axis], room), 1)
        room //= part[axis]
        if part[axis] < shape[axis]:
            break
    return tuple(part)


def outer_axes(shape: Shape, extent: Shape) -> int:
    """Returns the number of leading axes before a contiguous part."""
    axis = len(shape)
    while axis > 0 and extent[axis - 1] == shape[axis - 1]:
        axis -= 1
    return max(axis - 1, 0)
