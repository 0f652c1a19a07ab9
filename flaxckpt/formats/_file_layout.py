"""Files put together of given bytes and of the bytes of arrays.

The counterpart of `_arrays.byte_ranges`: formats that keep many arrays in one file say
here where in it everything goes, and it can then be written in any order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt._types import LeafPath

_AT_MOST = 2**30  # what one system call writes


class Run(NamedTuple):
    """Where a run of an array's bytes goes.

    Attributes:
        start: The first of them, counted from the array's first.
        stop: The first that is no longer of it.
        offset: Where in the file the first is written.
    """

    start: int
    stop: int
    offset: int


class FileLayout:
    """What a file is made of, in its order.

    Attributes:
        name: Of the file.
        size: Of all of it so far, in bytes.
        literals: Where given bytes begin, and these.
        runs: Leaf path -> where its bytes go.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        self.literals: list[tuple[int, bytes]] = []
        self.runs: dict[LeafPath, list[Run]] = {}

    def add(self, content: bytes) -> None:
        """Appends given bytes."""
        self.literals.append((self.size, content))
        self.size += len(content)

    def add_values(self, path: LeafPath, start: int, stop: int) -> None:
        """Appends the bytes from `start` to `stop` of a leaf."""
        self.runs.setdefault(path, []).append(Run(start, stop, self.size))
        self.size += stop - start


def write_literals(descriptor: int, layout: FileLayout) -> None:
    """Writes all given bytes of a file."""
    for offset, content in layout.literals:
        _write_at(descriptor, memoryview(content), offset)


def write_values(
    descriptor: int, runs: Sequence[Run], start: int, content: memoryview
) -> None:
    """Writes some of the bytes of an array to where they go.

    Args:
        descriptor: Of the file.
        runs: Where the bytes of this array go in it.
        start: Which byte of the array is the first of `content`.
        content: Bytes.
    """
    for run in runs:
        first = max(run.start, start)
        last = min(run.stop, start + len(content))
        if first < last:
            part = content[first - start : last - start]
            _write_at(descriptor, part, run.offset + first - run.start)


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content[:_AT_MOST], offset)
        content, offset = content[written:], offset + written
