"""Blocks of bytes in files, each optionally followed by a checksum.

A block is an uncompressed chunk of zarr 3, written without a copy, read or mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import mmap
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import crc32c
import numpy as np

from flaxckpt import _storage
from flaxckpt._zarr import checksums as chunk_checksums

Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"

CHECKSUM_BYTES = chunk_checksums.CHECKSUM_BYTES
ALIGNMENT = 64
"""Alignment in bytes of memory that jax uses without a copy."""

MAPPED_FROM = 64 * 2**10
"""Size in bytes from which arrays are mapped: a map takes whole pages, and Linux allows
65,530 maps per process."""

PAGE_BYTES = 4096
"""Alignment of blocks in files with others, on all machines."""

_PAGE = mmap.PAGESIZE
_COMPARED_AT_ONCE = 2**20
_SMALL_BYTES = 2**16


class Block(NamedTuple):
    """A block in a file.

    Attributes:
        size: Size of the block in bytes, without the checksum.
        has_checksum: True if the CRC-32C of the block follows, little endian.
        segment_bytes: Size of segments that are verified on their own; 0 if there are
            none.
        checksums: Checksums of the segments, without the last.
        recorded: Checksum of the block in the manifest; None if not recorded.
        offset: Offset of the block in a file with others; None if it is alone there.
        key: Index of the chunk, for errors; by default the name of the file.
    """

    path: Path
    size: int
    has_checksum: bool
    segment_bytes: int = 0
    checksums: Sequence[int] = ()
    recorded: int | None = None
    offset: int | None = None
    key: str = ""

    @property
    def stored_bytes(self) -> int:
        """Size of the block and its checksum in bytes."""
        return self.size + CHECKSUM_BYTES * self.has_checksum

    @property
    def begin(self) -> int:
        """Offset of the block in its file, in bytes."""
        return self.offset or 0

    @property
    def file_size(self) -> int | None:
        """Size of the whole file in bytes; None with other blocks in the file."""
        return self.stored_bytes if self.offset is None else None

    @property
    def verified_at_once(self) -> int:
        """Bytes of the smallest part that can be verified; 1 without a checksum."""
        if not self.has_checksum:
            return 1
        return self.segment_bytes if self.checksums else max(self.size, 1)


# ---- writing --------------------------------------------------------------------


def write(path: Path, parts: Sequence[memoryview]) -> None:
    """Writes `parts` to a new file, and syncs a large one.

    So the disk works while other files are written; the caller syncs the rest.
    """
    _storage.of(path).write_parts(path, parts)


def link_if_equal(
    old: Path,
    new: Path,
    parts: Sequence[memoryview],
    *,
    compare_all: bool = True,
    mode: int | None = None,
) -> bool:
    """Makes `new` a hard link to the file `old` if its content equals `parts`.

    Unless `compare_all`, compares only size and checksums, for values that should be
    equal. The file must have the `mode`, if given. Returns True if the link was made.
    """
    size = sum(len(part) for part in parts)

    def is_equal() -> bool:
        with old.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            return (
                status.st_size == size > 0
                and (mode is None or stat.S_IMODE(status.st_mode) == mode)
                and _has_same_ends(file, parts)
                and (not compare_all or _is_equal(file, parts))
            )

    return _storage.files.link_if(old, new, is_equal)


def _has_same_ends(stored: io.FileIO, parts: Sequence[memoryview]) -> bool:
    """Returns True if a file has the last part, and all parts as short as checksums."""
    start = 0
    for part in parts:
        if part is parts[-1] or len(part) == CHECKSUM_BYTES:
            found = os.pread(stored.fileno(), CHECKSUM_BYTES, start)
            if found != part[:CHECKSUM_BYTES]:
                return False
        start += len(part)
    return True


def _is_equal(stored: io.FileIO, parts: Sequence[memoryview]) -> bool:
    """Returns True if the rest of a file starts with `parts`."""
    # Read, not mapped: another process may truncate the file.
    buffer = np.empty(_COMPARED_AT_ONCE, np.uint8)
    for part in parts:
        wanted = np.frombuffer(part, np.uint8)
        while wanted.size:
            count = stored.readinto(buffer[: wanted.size].data) or 0
            if count == 0 or not np.array_equal(buffer[:count], wanted[:count]):
                return False
            wanted = wanted[count:]
    return True


# ---- reading --------------------------------------------------------------------


def empty(size: int) -> Bytes:
    """Returns uninitialized memory of `size` bytes, aligned for jax."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def read(
    block: Block, into: Sequence[memoryview], *, verify: bool, start: int = 0
) -> None:
    """Reads a part of a block, from the byte `start`, into the memory `into`.

    If `verify`, the part begins and ends between segments, or is the whole block.
    Raises ValueError if the file has another size, or fails a checksum.
    """
    stop = start + sum(view.nbytes for view in into)
    verify = verify and block.has_checksum
    # Reading a whole file tells its size, also in stores.
    with_tail = stop == block.size and (verify or not start)
    tail = np.empty(CHECKSUM_BYTES * (block.has_checksum and with_tail), np.uint8)
    path = block.path
    _storage.of(path).read_into(
        path, [*into, tail.data], offset=block.begin + start, file_size=block.file_size
    )
    if verify:
        check(block, into, tail.tobytes(), start=start)


def read_small(path: Path) -> bytes:
    """Returns the content of a small file, or the first 64 KiB of a large file."""
    return _storage.of(path).read_small(path, _SMALL_BYTES, path.parent.parent)


def map_block(block: Block) -> Bytes:
    """Maps a block, copy-on-write; raises ValueError for a file of another size."""
    if block.size == 0:
        return np.empty(0, np.uint8)
    if _map_function() is not None:
        return map_blocks([block])  # Python's mmap keeps the file open
    with _open(block) as file:
        memory = mmap.mmap(
            file,
            block.size,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=block.begin,
        )
    return np.frombuffer(memory, np.uint8)


def can_map(block: Block) -> bool:
    """Returns True if a block begins at a page of its file."""
    return block.begin % mmap.ALLOCATIONGRANULARITY == 0


def can_join(sizes: Sequence[int]) -> bool:
    """Returns True if blocks of these sizes can be mapped contiguously."""
    return _map_function() is not None and all(s % _PAGE == 0 for s in sizes[:-1])


def map_blocks(blocks: Sequence[Block]) -> Bytes:
    """Maps blocks contiguously; raises ValueError for a file of another size."""
    map_at = _map_function()
    assert map_at is not None
    # Reserves the addresses; unmapping this also unmaps the blocks.
    memory = mmap.mmap(
        -1, sum(block.size for block in blocks), flags=mmap.MAP_PRIVATE | _NO_RESERVE
    )
    run = np.frombuffer(memory, np.uint8)
    start = run.ctypes.data
    for block in blocks:
        with _open(block) as file:
            address = map_at(
                start,
                block.size,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_PRIVATE | _MAP_FIXED,
                file,
                block.begin,
            )
        if address != start:
            raise OSError(ctypes.get_errno(), "cannot be mapped", str(block.path))
        start += block.size
    return run


def map_range(descriptor: int, offset: int, size: int) -> Bytes | None:
    """Maps a range of an open file, copy-on-write; None if that is impossible."""
    map_at = _map_function()
    if map_at is None:
        return None
    before = offset % _PAGE
    try:
        # Reserves the addresses; unmapping this also unmaps the range.
        memory = mmap.mmap(-1, before + size, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
    except OSError:  # no more maps
        return None
    content = np.frombuffer(memory, np.uint8)
    start = content.ctypes.data
    address = map_at(
        start,
        before + size,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | _MAP_FIXED,
        descriptor,
        offset - before,
    )
    return content[before:] if address == start and _can_read(content) else None


def verify_mapped(
    block: Block, content: Bytes, start: int = 0, stop: int | None = None
) -> None:
    """Compares a part of the mapped block `content` with its checksums.

    The part begins and ends at multiples of `block.verified_at_once`, or at the end.
    Raises ValueError if it has changed, and OSError if it cannot be read.
    """
    if not block.has_checksum:
        return
    stop = block.size if stop is None else stop
    part = content[start:stop]
    if not _can_read(part):
        raise OSError(errno.EIO, "a part of the file cannot be read", str(block.path))
    tail = b""
    if stop == block.size:
        with _open(block) as file:
            end = block.begin + block.size
            while left := os.pread(file, CHECKSUM_BYTES - len(tail), end + len(tail)):
                tail += left
    check(block, [part.data], tail, start=start)


def _can_read(content: Bytes) -> bool:
    """Reads all pages of mapped memory; returns False if a page is unreadable.

    Touching such a page would kill the process by SIGBUS: the disk fails, or the file
    was truncated.
    """
    if content.nbytes == 0 or sys.platform != "linux":
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.nbytes)
    failed = libc.madvise(*where, _POPULATE_READ) != 0
    # Linux before 5.14 lacks this advice, and returns EINVAL.
    return not (failed and ctypes.get_errno() == errno.EFAULT)


def check(
    block: Block, parts: Sequence[memoryview], tail: bytes, *, start: int = 0
) -> None:
    """Compares the content of a block, or of some of its segments, with the checksums.

    `start` is the first byte of the content in the block. `tail` is the checksum of the
    whole block; empty if the content ends before. Raises ValueError if the content has
    changed since it was written, or is another chunk.
    """
    name = block.key or block.path.name
    size = sum([part.nbytes for part in parts])
    if size == block.size:  # its own checksum covers all segments
        checksum = 0
        for part in parts:
            checksum = crc32c.crc32c(part, checksum)
        chunk_checksums.check_whole(name, checksum, tail, block.recorded)
        return
    first, nbytes = start // block.segment_bytes, block.segment_bytes
    recorded = [*block.checksums[first : -(-(start + size) // nbytes)]]
    recorded += [int.from_bytes(tail, "little")] * bool(tail)
    found = chunk_checksums.running_checksums(
        parts, nbytes, block.checksums[first - 1] if first else 0
    )
    for n, (actual, wanted) in enumerate(zip(found, recorded, strict=True), first):
        if actual != wanted:
            raise ValueError(
                f"{name} has changed since it was written: the CRC-32C of bytes"
                f" {n * nbytes} to {min((n + 1) * nbytes, block.size)} differs"
            )
    if tail:
        chunk_checksums.check_place(name, found[-1], block.recorded)


@contextlib.contextmanager
def _open(block: Block) -> Iterator[int]:
    """Yields the descriptor of a block's file, after checking the size."""
    path = block.path
    descriptor = _storage.files.open_regular_file(path, within=path.parent.parent)
    try:
        size = os.fstat(descriptor).st_size
        end = block.begin + block.stored_bytes
        if size < end or (size != end and block.offset is None):
            raise ValueError(f"{path.name} has {size} bytes instead of {end}")
        yield descriptor
    finally:
        os.close(descriptor)


_MAP_FIXED = 0x10
_POPULATE_READ = 22  # MADV_POPULATE_READ
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: addresses only


@functools.cache
def _map_function() -> Any:
    """Returns the C library's `mmap`, for maps at a given address; None if absent."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    return function
