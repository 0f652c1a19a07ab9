"""Layout of a file that consists of literal bytes and the bytes of arrays.

With the layout known, the parts of the file can be written in any order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt._types import LeafPath

_AT_MOST = 2**30  # bytes per system call


class Run(NamedTuple):
    """A run of an array's bytes, from `start` to `stop`, and its offset in a file."""

    start: int
    stop: int
    offset: int


class FileLayout:
    """The contents of a file, in order: literal bytes, and runs of leaves' bytes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        self.literals: list[tuple[int, bytes]] = []
        self.runs: dict[LeafPath, list[Run]] = {}

    def add(self, content: bytes) -> None:
        self.literals.append((self.size, content))
        self.size += len(content)

    def add_values(self, path: LeafPath, start: int, stop: int) -> None:
        """Appends the bytes from `start` to `stop` of a leaf."""
        self.runs.setdefault(path, []).append(Run(start, stop, self.size))
        self.size += stop - start


def write_literals(descriptor: int, layout: FileLayout) -> None:
    for offset, content in layout.literals:
        _write_at(descriptor, memoryview(content), offset)


def write_values(
    descriptor: int, runs: Sequence[Run], start: int, content: memoryview
) -> None:
    """Writes `content`, which begins at the byte `start` of an array, to a file."""
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
