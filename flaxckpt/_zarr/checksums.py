"""Recorded checksums of chunks, and of their segments.

The CRC-32C after a chunk proves that the chunk is whole; the manifest of the checkpoint
has it, too, which proves that the chunk is the one of this leaf, place and step.

A segment is a run of bytes of a raw chunk; all but the last have the same size, a power
of two. Its checksum is the CRC-32C of the chunk up to its end, which costs nothing. A
segment is intact if its bytes lead from the checksum of the one before to its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import crc32c

from flaxckpt._types import Shape

LEAST_BYTES = 2**16
"""Size of the smallest segments in bytes: whole pages on any machine."""

_MOST_CHECKSUMS = 2**17
"""Bound on the checksums of a checkpoint, which take 0.7 MB of its manifest."""

CHECKSUM_BYTES = 4


class ChunkChecksums(NamedTuple):
    """The recorded checksums of the chunks of an array.

    Checksums are 4 bytes each, little endian, in C order of the chunks.

    Attributes:
        grid: Number of chunks along each axis.
        whole: The checksum of each chunk; empty if not recorded.
        segment_bytes: Bytes of a segment; 0 without segments.
        inner: The checksums of all segments but the last of each chunk.
    """

    grid: Shape
    whole: bytes = b""
    segment_bytes: int = 0
    inner: bytes = b""

    def number(self, n: int) -> int | None:
        """Returns the checksum of chunk `n` in C order; None if not recorded."""
        start = n * CHECKSUM_BYTES
        part = self.whole[start : start + CHECKSUM_BYTES]
        return int.from_bytes(part, "little") if part else None

    def of_segments(self, n: int, chunk_bytes: int) -> tuple[int, ...]:
        """Returns the checksums of the segments of chunk `n`, without the last."""
        if not self.segment_bytes:
            return ()
        count = inner_count(chunk_bytes, self.segment_bytes)
        start = n * count * CHECKSUM_BYTES
        return struct.unpack_from(f"<{count}I", self.inner, start)

    def place(self, bounds: Iterable[tuple[int, int]], chunk_shape: Shape) -> int:
        """Returns the number of the chunk at the start of `bounds` in C order."""
        number = 0
        for (start, _), length, size in zip(
            bounds, chunk_shape, self.grid, strict=True
        ):
            number = number * size + start // length
        return number


def check_whole(name: str, found: int, tail: bytes, recorded: int | None) -> None:
    """Raises ValueError if a chunk, with the checksum `tail` after it, has changed."""
    if tail != found.to_bytes(CHECKSUM_BYTES, "little"):
        raise ValueError(
            f"{name} has changed since it was written: its CRC-32C differs"
        )
    check_place(name, found, recorded)


def check_place(name: str, found: int, recorded: int | None) -> None:
    """Raises ValueError if an intact chunk is not the recorded one."""
    if recorded is not None and found != recorded:
        raise ValueError(
            f"{name} is intact, but not the chunk saved here: its CRC-32C is"
            f" {found:08x}, and the manifest records {recorded:08x}; it is of another"
            " step, leaf or place"
        )


def inner_count(chunk_bytes: int, segment_bytes: int) -> int:
    return max(-(-chunk_bytes // segment_bytes) - 1, 0)


def checksums_bytes(chunks: int, chunk_bytes: int, segment_bytes: int) -> int:
    """Returns the size of `ChunkChecksums.inner` of an array."""
    return chunks * inner_count(chunk_bytes, segment_bytes) * CHECKSUM_BYTES


def choose_bytes(arrays: Iterable[tuple[int, int]]) -> int:
    """Returns the bytes of segments of a checkpoint: 64 KiB up to 8 GB, then more."""
    arrays = [*arrays]
    nbytes = LEAST_BYTES
    while sum(n * inner_count(size, nbytes) for n, size in arrays) > _MOST_CHECKSUMS:
        nbytes *= 2
    return nbytes


def to_bytes(checksums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(checksums)}I", *checksums)


def running_checksums(
    parts: Iterable[memoryview], segment_bytes: int, start: int = 0
) -> list[int]:
    """Returns the CRC-32C of `parts`, whole segments, up to the end of each segment.

    `start` is the checksum of the segment before them; 0 at the start of a chunk.
    """
    checksums: list[int] = []
    value, room = start, segment_bytes
    for part in parts:
        rest = part
        while rest:
            value = crc32c.crc32c(rest[:room], value)
            taken = min(room, len(rest))
            rest, room = rest[taken:], room - taken
            if not room:
                checksums.append(value)
                room = segment_bytes
    if room < segment_bytes or not checksums:
        checksums.append(value)
    return checksums
