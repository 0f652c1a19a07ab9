"""Chunk files: a block of bytes in a file, optionally followed by a checksum.

Such a file is an uncompressed chunk of zarr 3. Blocks are written without a copy, read
into the caller's memory, or mapped.
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

Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"

CHECKSUM_BYTES = 4
ALIGNMENT = 64
"""Alignment in bytes of memory that jax uses without a copy."""

MAPPED_FROM = 64 * 2**10
"""Size in bytes from which arrays are mapped: a map takes whole pages, and Linux allows
65,530 maps per process."""

_PAGE = mmap.PAGESIZE
_COMPARED_AT_ONCE = 2**20
_SMALL_BYTES = 2**16


class Block(NamedTuple):
    """A block in a file.

    Attributes:
        path: The file.
        size: Size of the block in bytes, without the checksum.
        has_checksum: True if the CRC-32C of the block follows, little endian.
    """

    path: Path
    size: int
    has_checksum: bool

    @property
    def file_size(self) -> int:
        """Size of the whole file in bytes."""
        return self.size + CHECKSUM_BYTES * self.has_checksum


def checksum(parts: Sequence[memoryview]) -> bytes:
    """Returns the CRC-32C of the concatenated `parts`."""
    value = 0
    for part in parts:
        value = crc32c.crc32c(part, value)
    return value.to_bytes(CHECKSUM_BYTES, "little")


# ---- writing --------------------------------------------------------------------


def write(path: Path, parts: Sequence[memoryview]) -> None:
    """Writes `parts` to a new file, and syncs a large file.

    The sync lets the disk work while other files are written. The caller syncs small
    files, and the directory with the names of all files.
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

    Args:
        old: An earlier file.
        new: The path of the link.
        parts: The content; in blocks with a checksum, the last part is the checksum.
        compare_all: False to compare only the size and the last part, for values that
            equal the file unless changed in memory since.
        mode: The mode that the file must have; None for any.

    Returns:
        True if the link was made.
    """
    size = sum(len(part) for part in parts)
    try:
        if not stat.S_ISREG(os.lstat(old).st_mode):
            return False
        with old.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size != size or size == 0:
                return False
            if mode is not None and stat.S_IMODE(status.st_mode) != mode:
                return False
            tail = parts[-1][:CHECKSUM_BYTES]
            start = size - len(parts[-1])
            if os.pread(file.fileno(), CHECKSUM_BYTES, start) != tail:
                return False
            if compare_all and not _is_equal(file, parts):
                return False
    except OSError:
        return False
    return link(old, new, size)


def link(old: Path, new: Path, size: int) -> bool:
    """Makes `new` a hard link to the file `old` if its size is `size` bytes.

    Returns:
        True if the link was made.
    """
    try:
        status = os.lstat(old)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return False
        os.link(old, new, follow_symlinks=False)
    except OSError:  # no support, too many links, or `old` is gone
        return False
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


def read(block: Block, into: Sequence[memoryview], *, verify: bool) -> None:
    """Reads a block into the memory `into`, of the size of the block.

    Raises:
        ValueError: The file has another size, or fails its checksum.
        OSError: The file is missing or unreadable.
    """
    tail = np.empty(block.file_size - block.size, np.uint8)
    path = block.path
    _storage.of(path).read_into(path, [*into, tail.data])
    if verify and block.has_checksum:
        check(path.name, into, tail.tobytes())


def read_small(path: Path) -> bytes:
    """Returns the content of a small file, or the first 64 KiB of a large file.

    Raises:
        OSError: The file is missing or unreadable.
    """
    return _storage.of(path).read_small(path, _SMALL_BYTES, path.parent.parent)


def map_block(block: Block) -> Bytes:
    """Maps a block into memory, copy-on-write.

    Raises:
        ValueError: The file has another size.
        OSError: The file is missing, or cannot be mapped.
    """
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
        )
    return np.frombuffer(memory, np.uint8)


def can_join(sizes: Sequence[int]) -> bool:
    """Returns True if blocks of these sizes can be mapped contiguously."""
    return _map_function() is not None and all(s % _PAGE == 0 for s in sizes[:-1])


def map_blocks(blocks: Sequence[Block]) -> Bytes:
    """Maps blocks contiguously; see `can_join`.

    Raises:
        ValueError: A file has another size.
        OSError: A file is missing, or cannot be mapped.
    """
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
                0,
            )
        if address != start:
            raise OSError(ctypes.get_errno(), "cannot be mapped", str(block.path))
        start += block.size
    return run


def map_range(descriptor: int, offset: int, size: int) -> Bytes | None:
    """Maps a range of bytes of an open file, copy-on-write.

    Returns:
        The bytes; None if the range cannot be mapped, or cannot be read.
    """
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


def verify_mapped(block: Block, content: Bytes) -> None:
    """Compares a mapped block with its checksum.

    Raises:
        ValueError: The block has changed since it was written.
        OSError: The block or its checksum cannot be read.
    """
    if not block.has_checksum:
        return
    if not _can_read(content):
        raise OSError(errno.EIO, "a part of the file cannot be read", str(block.path))
    with _open(block) as file:
        tail = b""
        while part := os.pread(
            file, CHECKSUM_BYTES - len(tail), block.size + len(tail)
        ):
            tail += part
    check(block.path.name, [content.data], tail)


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


def check(name: str, parts: Sequence[memoryview], recorded: bytes) -> None:
    """Compares the content of the block `name` with its checksum.

    Raises:
        ValueError: The block has changed since it was written.
    """
    actual = checksum(parts)
    if actual != recorded:
        raise ValueError(
            f"{name} has changed since it was written: its CRC-32C is"
            f" {actual[::-1].hex()} instead of {recorded[::-1].hex()}"
        )


@contextlib.contextmanager
def _open(block: Block) -> Iterator[int]:
    """Yields the descriptor of a block's file, after checking the size."""
    path = block.path
    descriptor = _storage.files.open_regular_file(path, within=path.parent.parent)
    try:
        size = os.fstat(descriptor).st_size
        if size != block.file_size:
            raise ValueError(
                f"{path.name} has {size} bytes instead of {block.file_size}"
            )
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
