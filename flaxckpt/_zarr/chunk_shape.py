"""Cuts arrays into chunks of bounded size, and into parts for replicas.

`replica_slices` cuts a shard into parts for replicas, then `choose_chunk_shape` cuts a
part into chunks; so no chunk has two writers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

# Chunk counts that are never too many: in all, and as a multiple of the minimal
# number for `max_bytes`.
_FEW_CHUNKS = 32
_FEW_TIMES_IDEAL = 4

_AS_GOOD = 2
"""Chunks without padding are preferred up to this multiple of the minimal count."""

_PAGE_BYTES = (16_384, 4_096)
"""Sizes of memory pages; multiples of the first suit more machines."""


_LEAST_TILE_BYTES = 2**20
"""Parts for later cuts are not smaller."""

_LEAST_ROW_BYTES = 8 * _LEAST_TILE_BYTES

_MOST_PARTS = 32
"""Parts along an axis that is cut later, at most."""


@dataclass(frozen=True, slots=True)
class ReplicaSlices:
    """Equal parts of a shard, cut along `axis`, divided among its replicas.

    Each replica has a part, or each of equal groups: of replicas 0 to 7 and 2 parts,
    replicas 0 to 3 have the first part. `bounds` are the start and stop of each part,
    and `shape` is the shape of a part.
    """

    axis: int
    bounds: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]


def replica_slices(
    shape: Sequence[int],
    n_replicas: int,
    *,
    itemsize: float = 1,
    min_bytes: float = 0,
    min_group_bytes: float = math.inf,
) -> ReplicaSlices | None:
    """Cuts a shard into equal parts, written by different replicas.

    Cuts the first axis with a size divisible by `n_replicas`. Without such an axis, or
    with too small parts, cuts into the largest possible number of parts, each for an
    equal number of replicas.

    Args:
        shape: Shape of a shard, in elements. `()` is a scalar.
        n_replicas: Number of devices with the same shard.
        itemsize: Bytes per element, as stored; may be a fraction.
        min_bytes: Minimal size of a part if each replica has a part.
        min_group_bytes: Minimal size of a part for groups of replicas.

    Returns:
        The parts; None if a single replica writes the whole shard: a single replica, no
        divisible axis, or empty or too small parts.

    Raises:
        ValueError: An argument is negative, or `n_replicas` is 0.

    Source: replica-parallel saving in Orbax.
    """
    _check_shape(shape)
    if n_replicas < 1 or itemsize <= 0 or min(min_bytes, min_group_bytes) < 0:
        raise ValueError(
            f"want at least one replica and positive sizes, got {n_replicas=},"
            f" {itemsize=}, {min_bytes=} and {min_group_bytes=}"
        )
    size = math.prod(shape) * itemsize
    if size == 0:
        return None
    for parts in sorted(_divisors(n_replicas), reverse=True):
        least = min_bytes if parts == n_replicas else min_group_bytes
        if parts == 1 or size < least * parts:
            continue
        for axis, dim in enumerate(shape):
            if dim % parts == 0:
                part = dim // parts
                bounds = tuple((i * part, (i + 1) * part) for i in range(parts))
                return ReplicaSlices(
                    axis, bounds, (*shape[:axis], part, *shape[axis + 1 :])
                )
    return None


def choose_chunk_shape(
    write_shape: Sequence[int],
    *,
    itemsize: float,
    max_bytes: float,
    ragged: bool = False,
    cuts: Mapping[int, int] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Cuts `write_shape` into chunks of at most `max_bytes` each.

    With `cuts`, the rules below apply to a tile: see `tile_shape`.

    An array that fits is a single chunk. Other arrays are cut along the first axis with
    rows that fit, and axes before into single rows: so each chunk is a contiguous run
    of bytes of the writer's part. If possible, a chunk is a whole number of memory
    pages (16 KiB, or else 4 KiB), so that files of chunks can be mapped contiguously.

    If `ragged`, the first possible rule applies:

    1. Chunks of whole pages that divide the array, at most twice the minimal number for
       `max_bytes`.
    2. (Nearly) equal chunks of whole pages, at most the same number; the last chunk
       extends beyond the array, and is stored in full. The padding is at most 5 % plus
       the rows of a page, and at most a tenth. Rows of the first axis must fit:
       otherwise the runs would not be adjacent.
    3. Rules 1 and 2 without pages, with at most the number of chunks below; if rows of
       the first axis do not fit, the padding is at most a seventh.

    Otherwise chunk sizes divide the sizes of `write_shape`, so that no chunk has two
    writers. Sizes with few divisors would give tiny chunks (a prime number of rows: a
    row per chunk). The number of chunks is therefore bounded by 32, or by 4 times the
    minimal number for `max_bytes` if larger. The first rule within the bound applies:

    1. The largest contiguous chunk of whole pages, with at most 4 times the minimal
       number; else the largest contiguous chunk.
    2. Cut the largest axis, the first of equals, to its next smaller divisor until a
       chunk fits.
    3. The largest chunk that fits and divides `write_shape`.
    4. The smallest chunk that divides `write_shape`, though larger than `max_bytes`.

    Args:
        write_shape: Shape of the part of a writer, in elements: a shard, or a replica's
            part of a shard. `()` is a scalar. A size of 0 counts as 1.
        itemsize: Bytes per element, as stored; may be a fraction.
        max_bytes: Bound on a chunk, in bytes before compression.
        ragged: True if chunk sizes need not divide. Only safe if `write_shape` is the
            whole array, without another writer next to the last chunk.
        cuts: Axis that will be cut when the array is read -> number of parts along it,
            of all writers.

    Returns:
        A shape of the same rank, with sizes of at least 1. A chunk is larger than
        `max_bytes` only as a single element, or by rule 4 (never if `ragged`).

    Raises:
        ValueError: `itemsize` or `max_bytes` is not positive, or a size is negative.

    Source: the second rule without `ragged` is the greedy search of T5X
        (`t5x/checkpoints.py`).
    """
    _check_shape(write_shape)
    if itemsize <= 0 or max_bytes <= 0:
        raise ValueError(f"want positive sizes, got {itemsize=} and {max_bytes=}")
    whole = tuple(max(1, dim) for dim in write_shape)
    shape = tile_shape(whole, itemsize, cuts)
    # A chunk that does not divide its tile is no part of a tile.
    sizes = zip(shape, whole, strict=True)
    ragged = ragged and all(size in (1, dim) for size, dim in sizes)
    size = math.prod(shape)
    # In bits: a float would round the number of elements of a huge array.
    limit = max(1, int(8 * max_bytes // max(1, round(8 * itemsize))))
    if size <= limit:
        return shape
    ideal = -(-size // limit)
    few = max(_FEW_CHUNKS, _FEW_TIMES_IDEAL * ideal)

    cut = _cut(shape, limit)
    units = (*[cut.unit(page, itemsize) for page in _PAGE_BYTES], 1)
    if ragged:
        return cut.chunk(_ragged_rows(cut, units, ideal, few))
    for unit in units:
        rows = cut.dividing(unit)
        if rows and cut.count(rows) <= (few if unit == 1 else _FEW_TIMES_IDEAL * ideal):
            return cut.chunk(rows)
    chunk = _greedy(shape, limit)
    if chunk_count(shape, chunk) <= few:
        return chunk
    dividing = _dividing_chunks(shape)
    chunk = dividing[max(size for size in dividing if size <= limit)]
    if chunk_count(shape, chunk) <= few:
        return chunk
    return dividing[min(n for n in dividing if n * few >= size)]


def tile_shape(
    shape: Sequence[int], itemsize: float, cuts: Mapping[int, int]
) -> tuple[int, ...]:
    """Returns the shape of the tiles of a part of an array that is cut later.

    Tiles divide the part, into 1 MiB or more each. A cut along the first axis of a tile
    leaves runs of bytes, so it needs no tiles. Along the other axes of `cuts`, the
    array is divided by its smallest prime factors into up to 32 tiles, first along the
    axis with the fewest. The first of `cuts` becomes the first axis of the tiles if a
    single row of the axes before has 8 MiB. The part has at least 1 element along each
    axis, and `itemsize` may be a fraction.
    """
    tile = list(shape)
    axes = sorted(axis for axis in cuts if shape[axis] > 1)
    if axes and math.prod(shape[axes[0] :]) * itemsize >= _LEAST_ROW_BYTES:
        tile[: axes[0]] = [1] * axes[0]
        axes = axes[1:]
    elif axes and math.prod(shape[: axes[0]]) == 1:
        axes = axes[1:]

    def parts(axis: int) -> int:
        return cuts[axis] * (shape[axis] // tile[axis])

    while axes:
        axis = min(axes, key=parts)
        factor = next((n for n in _divisors(tile[axis]) if n > 1), _MOST_PARTS + 1)
        smallest = math.prod(tile) * itemsize / factor
        if parts(axis) * factor > _MOST_PARTS or smallest < _LEAST_TILE_BYTES:
            axes.remove(axis)
        else:
            tile[axis] //= factor
    return tuple(tile)


def chunk_count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    return math.prod(-(-dim // c) for dim, c in zip(shape, chunk, strict=True))


class _Cut(NamedTuple):
    """A cut of an array into runs of bytes in C order.

    Attributes:
        axis: The axis that is cut; axes before are cut into single rows.
        row: Elements of a row of the axis.
        most: Rows that fit in a chunk: at least 1, and not all.
    """

    shape: tuple[int, ...]
    axis: int
    row: int
    most: int

    @property
    def runs(self) -> int:
        """Number of times that the axis is cut: the product of the axes before."""
        return math.prod(self.shape[: self.axis])

    def chunk(self, rows: int) -> tuple[int, ...]:
        return (*(1,) * self.axis, rows, *self.shape[self.axis + 1 :])

    def count(self, rows: int) -> int:
        return self.runs * -(-self.shape[self.axis] // rows)

    def unit(self, page_bytes: int, itemsize: float) -> int:
        """Returns the fewest rows that fill whole pages; more than fit if none do."""
        row_bits, page_bits = self.row * itemsize * 8, page_bytes * 8
        if row_bits % 1:
            return self.most + 1
        return page_bits // math.gcd(page_bits, int(row_bits))

    def dividing(self, unit: int) -> int | None:
        """Returns the most rows that fit and divide the axis, a multiple of `unit`."""
        fitting = [
            rows
            for rows in _divisors(self.shape[self.axis])
            if rows <= self.most and rows % unit == 0
        ]
        return max(fitting, default=None)

    def nearly_equal(self, unit: int, at_most: int) -> int | None:
        """Returns the rows of equal parts that fit, rounded up to a multiple of `unit`.

        Returns fewer rows if the last part would have too much padding, with at most
        `at_most` chunks.
        """
        if unit > self.most:
            return None
        dim = self.shape[self.axis]
        parts = -(-dim // (self.most // unit * unit))
        rows = -(-dim // (parts * unit)) * unit
        second_best = (dim, -rows)
        while rows and self.count(rows) <= at_most:
            padding = -dim % rows
            if padding <= min(dim // 20 + unit, dim // 10):
                return rows
            second_best = min(second_best, (padding, -rows))
            rows -= unit
        return -second_best[1] if unit == 1 else None


def _cut(shape: tuple[int, ...], limit: int) -> _Cut:
    """Cuts a `shape` of more than `limit` elements along the first suitable axis.

    The cut needs at most three times the minimal number of chunks for `limit`.
    """
    row = math.prod(shape)
    for axis, dim in enumerate(shape):
        row //= dim
        if row <= limit:
            return _Cut(shape, axis, row, limit // row)
    raise AssertionError(shape)


def _ragged_rows(cut: _Cut, units: Sequence[int], ideal: int, few: int) -> int:
    """Returns the rows of the chunks of a whole array; the last of `units` is 1."""
    for unit in units:
        dividing = cut.dividing(unit)
        if dividing and cut.count(dividing) <= _AS_GOOD * ideal:
            return dividing
        # Padding inside an array separates its runs, even with whole pages.
        if cut.runs == 1 or unit == 1:
            rows = cut.nearly_equal(unit, few if unit == 1 else _AS_GOOD * ideal)
            if rows:
                return rows
    raise AssertionError(cut)


def _greedy(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    chunk = list(shape)
    while math.prod(chunk) > limit:
        axis = chunk.index(max(chunk))
        chunk[axis] = max(d for d in _divisors(shape[axis]) if d < chunk[axis])
    return tuple(chunk)


def _dividing_chunks(shape: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Returns chunks that divide `shape`: size in elements -> chunk.

    Of chunks of the same size, prefers the longest trailing axes: its bytes are closest
    together. The number of sizes is at most the number of divisors of the element
    count.
    """
    chunks: dict[int, tuple[int, ...]] = {1: ()}
    for dim in reversed(shape):
        wider: dict[int, tuple[int, ...]] = {}
        for d in _divisors(dim):
            for size, tail in chunks.items():
                best = wider.get(size * d)
                if best is None or best[:0:-1] < tail[::-1]:
                    wider[size * d] = (d, *tail)
        chunks = wider
    return chunks


@functools.lru_cache(maxsize=1024)
def _divisors(n: int) -> tuple[int, ...]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return (*low, *(n // d for d in reversed(low) if d * d != n))


def _check_shape(shape: Sequence[int]) -> None:
    if any(dim < 0 for dim in shape):
        raise ValueError(f"want sizes of at least 0, got the shape {tuple(shape)}")
