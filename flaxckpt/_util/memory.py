"""Checks memory before large arrays are allocated, and splits work by size."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

_CHECKED_FROM = 2**30
"""Smaller arrays are not checked."""


class TooLargeError(ValueError):
    """An array needs more memory than is free, which proves no damage."""

    def __init__(self, message: str = "it is larger than the memory") -> None:
        super().__init__(message)


def is_too_large(error: BaseException) -> bool:
    """Returns True if an error, or its cause, reports a lack of memory."""
    kinds = (TooLargeError, MemoryError)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


def check(size: int) -> None:
    """Raises TooLargeError if `size` bytes exceed the free memory.

    TensorStore aborts the process if an allocation fails, and a system that overcommits
    memory kills the process once zeros are written.
    """
    if size <= _CHECKED_FROM:
        return
    free = free_bytes()
    if free is not None and size > free:
        raise TooLargeError(
            f"it is larger than the memory: {size} bytes, {free} are free"
        )


def free_bytes() -> int | None:
    """Returns the bytes still available to this process, None if unknown."""
    limits = [_system_bytes(), _process_bytes()]
    return min((limit for limit in limits if limit is not None), default=None)


def _system_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines)
    free = [sizes[name] for name in ("MemAvailable", "SwapFree") if name in sizes]
    return sum(int(size.split()[0]) * 1024 for size in free) if free else None


def _process_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return max(limit - pages * resource.getpagesize(), 0)


def batches(sized: Iterable[tuple[_T, int]], max_bytes: int) -> Iterator[list[_T]]:
    """Divides items into batches of at most `max_bytes`; a larger one is alone."""
    batch: list[_T] = []
    total = 0
    for item, size in sized:
        if batch and total + size > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
