"""How arrays are cut: into chunks of a bounded size, and among replicas.

Integers only. First `replica_slices` says which part of a shard one replica writes,
then `choose_chunk_shape` cuts that part; so no chunk has two writers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Chunk counts that are never too many: this many in all, or this many times the
# least number that `max_bytes` allows.
_FEW_CHUNKS = 32
_FEW_TIMES_IDEAL = 4

_AS_GOOD = 2
"""Chunks without padding are preferred up to so many times the least number."""

_PAGE_BYTES = (16_384, 4_096)
"""Sizes of memory pages, the more general first."""


@dataclass(frozen=True, slots=True)
class ReplicaSlices:
    """Equal parts of a shard, which the replicas that hold it divide among them.

    There is a part for each replica, or for each of equal groups of them: of replicas
    0 to 7, in 2 parts, those from 0 to 3 have the first.

    Attributes:
        axis: The axis that is cut.
        bounds: For each part, where it starts and stops along `axis`.
        shape: Shape of each part: what one replica writes.
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
    """Cuts a shard that several replicas hold, so that several write an equal part.

    The first axis whose size `n_replicas` divides is cut. If there is none, or parts
    would be too small, there are fewer parts: as many as possible, so that each is for
    an equal number of replicas.

    Args:
        shape: Shape of one shard, in elements. `()` is a scalar.
        n_replicas: How many devices hold the same shard.
        itemsize: Bytes per element, as stored; may be a fraction.
        min_bytes: A part with fewer bytes is not worth a writer of its own.
        min_group_bytes: The same, where not every replica has a part.

    Returns:
        The parts, or None if one replica writes the whole shard: there is only one, no
        axis divides, or the parts would be empty or too small.

    Raises:
        ValueError: An argument is negative, or there is no replica.

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
) -> tuple[int, ...]:
    """Cuts `write_shape` into chunks of at most `max_bytes` each.

    An array that fits is one chunk. Others are cut along the first axis whose rows
    fit, axes before it into single rows: so each chunk is one run of bytes of what the
    writer writes. Where it can be had, a chunk is a whole number of memory pages (16
    KiB, or else 4 KiB), so that files of chunks can be mapped side by side.

    If `ragged`, the first of these is taken:

    1. Chunks of whole pages that divide, if there are at most twice as many of them as
       `max_bytes` asks for.
    2. Chunks of whole pages, (nearly) equal and no more than that; the last one is cut
       short by the edge of the array, but stored in full. That adds at most 5 % and as
       many rows as fill whole pages, and at most a tenth. Only if rows of the first
       axis fit: otherwise the runs would not follow one another.
    3. 1 and 2 without pages, in up to as many chunks as below; if rows of the first
       axis do not fit, up to a seventh is added.

    Otherwise chunk sizes divide those of `write_shape`, so that no chunk straddles two
    writers. Sizes with few divisors would make that cut absurdly fine (a prime number
    of rows: one row a chunk). The number of chunks is therefore bounded: 32 in all, or
    4 times the least number that `max_bytes` allows, whichever is more. The first of
    these that is within the bound is taken:

    1. The largest chunk of whole pages that is such a run, if there are at most 4
       times as many as needed; else the largest that is such a run.
    2. Cut the largest axis, the first one if several are, to its next smaller divisor
       until a chunk fits.
    3. The largest chunk that fits among all that divide `write_shape`.
    4. The smallest chunk that divides `write_shape`, though larger than `max_bytes`.

    Args:
        write_shape: What one writer writes of the array, in elements: one shard, or
            one replica's part of it. `()` is a scalar. A size of 0 counts as 1.
        itemsize: Bytes per element, as stored; may be a fraction.
        max_bytes: Bound on a chunk, in bytes before compression.
        ragged: Chunk sizes need not divide. Only safe where `write_shape` is the
            whole array: there is no other writer for the last chunk to reach into.

    Returns:
        A shape of the same rank, with no size below 1. A chunk is larger than
        `max_bytes` if it is one element, or by rule 4 (never if `ragged`).

    Raises:
        ValueError: `itemsize` or `max_bytes` is not positive, or a size is negative.

    Source: the second rule for what divides is the greedy search of T5X
        (`t5x/checkpoints.py`).
    """
    _check_shape(write_shape)
    if itemsize <= 0 or max_bytes <= 0:
        raise ValueError(f"want positive sizes, got {itemsize=} and {max_bytes=}")
    shape = tuple(max(1, dim) for dim in write_shape)
    size = math.prod(shape)
    limit = max(1, int(max_bytes // itemsize))
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


def chunk_count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    """Counts the chunks of shape `chunk` that cover `shape`, ragged ones included."""
    return math.prod(-(-dim // c) for dim, c in zip(shape, chunk, strict=True))


class _Cut(NamedTuple):
    """A cut of an array into runs of bytes in C order.

    Attributes:
        shape: Of the array.
        axis: Along which it is cut; every axis before it is cut into single rows.
        row: Elements of one row of that axis.
        most: Rows of it that fit in a chunk: at least 1, and not all.
    """

    shape: tuple[int, ...]
    axis: int
    row: int
    most: int

    @property
    def runs(self) -> int:
        """How often the axis is cut."""
        return math.prod(self.shape[: self.axis])

    def chunk(self, rows: int) -> tuple[int, ...]:
        """The chunk of `rows`."""
        return (*(1,) * self.axis, rows, *self.shape[self.axis + 1 :])

    def count(self, rows: int) -> int:
        """How many chunks of `rows` there are."""
        return self.runs * -(-self.shape[self.axis] // rows)

    def unit(self, page_bytes: int, itemsize: float) -> int:
        """The fewest rows that fill whole pages; more than fit if no number does."""
        row_bits, page_bits = self.row * itemsize * 8, page_bytes * 8
        if row_bits % 1:
            return self.most + 1
        return page_bits // math.gcd(page_bits, int(row_bits))

    def dividing(self, unit: int) -> int | None:
        """The most rows that fit and divide, a multiple of `unit`."""
        fitting = [
            rows
            for rows in _divisors(self.shape[self.axis])
            if rows <= self.most and rows % unit == 0
        ]
        return max(fitting, default=None)

    def nearly_equal(self, unit: int, at_most: int) -> int | None:
        """Rows of equal parts that fit, rounded up to a multiple of `unit`.

        Fewer where that would pad the last part too much, as long as there are no
        more than `at_most` chunks then.
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
    """Cuts a `shape` of more than `limit` elements along the first axis that will do.

    There need be no more than three times as many chunks as `limit` asks for.
    """
    row = math.prod(shape)
    for axis, dim in enumerate(shape):
        row //= dim
        if row <= limit:
            return _Cut(shape, axis, row, limit // row)
    raise AssertionError(shape)


def _ragged_rows(cut: _Cut, units: Sequence[int], ideal: int, few: int) -> int:
    """Rows of the chunks of a whole array; the last of `units` is 1."""
    for unit in units:
        dividing = cut.dividing(unit)
        if dividing and cut.count(dividing) <= _AS_GOOD * ideal:
            return dividing
        # Padding within an array would keep its runs apart, whole pages or not.
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
    """Maps each size, in elements, to a chunk of that size that divides `shape`.

    Of several, the one with the longest trailing axes: its bytes lie closest together.
    There are as many as the element count of `shape` has divisors, or fewer.
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
