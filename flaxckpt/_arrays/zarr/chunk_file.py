"""Blocks: runs of bytes in files of their own, which may end in a checksum.

Such a file is what zarr 3 makes of a chunk without compression. Blocks are written
without a copy in between, read into memory of the caller's, or mapped.
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
"""Of memory that jax takes over as it is, in bytes."""

_PAGE = mmap.PAGESIZE
_COMPARED_AT_ONCE = 2**20
_SMALL_BYTES = 2**16


class Block(NamedTuple):
    """A block in a file.

    Attributes:
        path: The file.
        size: Bytes of it, less the checksum.
        has_checksum: Whether its CRC-32C follows, little endian.
    """

    path: Path
    size: int
    has_checksum: bool

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.size + CHECKSUM_BYTES * self.has_checksum


def checksum(parts: Sequence[memoryview]) -> bytes:
    """The CRC-32C of `parts`, one after another."""
    value = 0
    for part in parts:
        value = crc32c.crc32c(part, value)
    return value.to_bytes(CHECKSUM_BYTES, "little")


# ---- writing --------------------------------------------------------------------


def write(path: Path, parts: Sequence[memoryview]) -> None:
    """Writes a new file of `parts`. A large one is durable, a small one not yet.

    Syncing a large file here lets the disk work while others are written. Its name is
    made durable with its directory, by the caller.
    """
    _storage.of(path).write_parts(path, parts)


def link_equal(old: Path, new: Path, parts: Sequence[memoryview]) -> bool:
    """Makes `new` another name of the file `old`, if that holds exactly `parts`.

    The last part, which is the checksum of blocks that have one, is compared first.

    Returns:
        Whether it did.
    """
    return _link_if_alike(old, new, parts, compare_all=True)


def link_unchanged(old: Path, new: Path, parts: Sequence[memoryview]) -> bool:
    """Like `link_equal`, but compares the checksum only, which the last part must be.

    For values that are known to be those of the file unless somebody has changed them
    in memory.
    """
    return _link_if_alike(old, new, parts, compare_all=False)


def _link_if_alike(
    old: Path, new: Path, parts: Sequence[memoryview], *, compare_all: bool
) -> bool:
    size = sum(len(part) for part in parts)
    try:
        if not stat.S_ISREG(os.lstat(old).st_mode):
            return False
        with old.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != size or size == 0:
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
    """Makes `new` another name of the file `old`, if that has `size` bytes.

    Returns:
        Whether it did.
    """
    try:
        found = os.lstat(old)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return False
        os.link(old, new, follow_symlinks=False)
    except OSError:  # no links here, too many, or `old` is gone
        return False
    return True


def _is_equal(stored: io.FileIO, parts: Sequence[memoryview]) -> bool:
    """Whether a file goes on with exactly `parts`."""
    # Read, not mapped: somebody else may cut the file short.
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
    """New memory for `size` bytes, aligned as jax wants it."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def read(block: Block, into: Sequence[memoryview], *, verify: bool) -> None:
    """Fills the memory `into`, as much as the block has bytes, from its file.

    Raises:
        ValueError: The file has another size, or fails its checksum.
        OSError: It is missing, or cannot be read.
    """
    tail = np.empty(block.file_size - block.size, np.uint8)
    path = block.path
    _storage.of(path).read_into(path, [*into, tail.data])
    if verify and block.has_checksum:
        check(path.name, into, tail.tobytes())


def small(path: Path) -> bytes:
    """The content of a small file, or its beginning if it is not small.

    Raises:
        OSError: It is missing, or cannot be read.
    """
    return _storage.of(path).read_small(path, _SMALL_BYTES, path.parent.parent)


def mapped(block: Block) -> Bytes:
    """Maps a block into memory. What is written to it there stays in memory.

    Raises:
        ValueError: The file has another size.
        OSError: It is missing, or cannot be mapped.
    """
    if block.size == 0:
        return np.empty(0, np.uint8)
    if _map_function() is not None:
        return mapped_as_one([block])  # Python's own map keeps the file open
    with _open(block) as file:
        memory = mmap.mmap(
            file,
            block.size,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    return np.frombuffer(memory, np.uint8)


def can_join(sizes: Sequence[int]) -> bool:
    """Whether blocks of these sizes can be mapped as one run of bytes."""
    return _map_function() is not None and all(s % _PAGE == 0 for s in sizes[:-1])


def mapped_as_one(blocks: Sequence[Block]) -> Bytes:
    """Maps blocks side by side, as one run of bytes; see `can_join`.

    Raises:
        ValueError: A file has another size.
        OSError: One is missing, or cannot be mapped.
    """
    map_at = _map_function()
    assert map_at is not None
    # Holds the addresses; unmapping it unmaps what is put in its place.
    memory = mmap.mmap(
        -1, sum(block.size for block in blocks), flags=mmap.MAP_PRIVATE | _NO_RESERVE
    )
    run = np.frombuffer(memory, np.uint8)
    start = run.ctypes.data
    for block in blocks:
        with _open(block) as file:
            found = map_at(
                start,
                block.size,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_PRIVATE | _MAP_FIXED,
                file,
                0,
            )
        if found != start:
            raise OSError(ctypes.get_errno(), "cannot be mapped", str(block.path))
        start += block.size
    return run


def verify_mapped(block: Block, content: Bytes) -> None:
    """Compares what is mapped of a block with its checksum.

    Raises:
        ValueError: It has changed since it was written.
        OSError: It, or its checksum, cannot be read.
    """
    if not block.has_checksum:
        return
    _populate(block, content)
    with _open(block) as file:
        tail = b""
        while part := os.pread(
            file, CHECKSUM_BYTES - len(tail), block.size + len(tail)
        ):
            tail += part
    check(block.path.name, [content.data], tail)


def _populate(block: Block, content: Bytes) -> None:
    """Has pages read here: one that cannot be would end the process when touched.

    Raises:
        OSError: One cannot be: the disk fails, or the file was cut short.
    """
    if content.nbytes == 0 or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.nbytes)
    failed = libc.madvise(*where, _POPULATE_READ) != 0
    # Linux before 5.14 knows no such advice, and says EINVAL.
    if failed and ctypes.get_errno() == errno.EFAULT:
        raise OSError(errno.EIO, "a part of it cannot be read", str(block.path))


def check(name: str, parts: Sequence[memoryview], recorded: bytes) -> None:
    """Compares the content of the block called `name` with its checksum.

    Raises:
        ValueError: It has changed since it was written.
    """
    found = checksum(parts)
    if found != recorded:
        raise ValueError(
            f"{name} has changed since it was written: its CRC-32C is"
            f" {found[::-1].hex()} instead of {recorded[::-1].hex()}"
        )


@contextlib.contextmanager
def _open(block: Block) -> Iterator[int]:
    """The descriptor of a block's file, which has the right size."""
    path = block.path
    descriptor = _storage.files.open_regular_file(path, within=path.parent.parent)
    try:
        found = os.fstat(descriptor).st_size
        if found != block.file_size:
            raise ValueError(
                f"{path.name} has {found} bytes instead of {block.file_size}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


_MAP_FIXED = 0x10
_POPULATE_READ = 22  # MADV_POPULATE_READ
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: addresses only


@functools.cache
def _map_function() -> Any:
    """The C library's `mmap`, which unlike Python's can be told where; or None."""
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
