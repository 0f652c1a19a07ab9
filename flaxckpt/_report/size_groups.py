"""Divides a checkpoint's size into few parts, the largest containers first."""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt._report import copies
from flaxckpt._report.data import Part
from flaxckpt._run.disk_usage import Subtree

_MOST_PARTS = 60
_MOST_INNER = 14
"""Limit for a container; its smaller children are combined."""

_LEAST_SHARE = 0.08
"""Parts with a smaller share of the whole are not divided."""


def divide(trees: Sequence[Subtree]) -> tuple[Part, ...]:
    """Divides a checkpoint into parts that add up to the whole, the largest first.

    Each container comes before its children.
    """
    inner = copies.find_children(trees)

    def size_of(numbers: Sequence[int]) -> int:
        return sum(trees[n].bytes for n in numbers)

    waiting, parts = [[0]], list[Part]()
    while waiting:  # the largest first, as there is room for few
        waiting.sort(key=size_of)
        numbers = waiting.pop()
        size = size_of(numbers)
        is_large = len(numbers) == 1 and size >= trees[0].bytes * _LEAST_SHARE
        inside = _split(trees, inner[numbers[0]]) if is_large else []
        if inside and len(parts) + len(waiting) + len(inside) < _MOST_PARTS:
            waiting += inside
        else:
            name, last = trees[numbers[0]].shown_path, trees[numbers[-1]].name
            name += f" … {last}" if len(numbers) > 1 else ""
            parts.append(Part(name, sum(trees[n].leaves for n in numbers), size))
    return tuple(sorted(parts, key=lambda part: (-part.bytes, part.name)))


def _split(trees: Sequence[Subtree], inner: Sequence[int]) -> list[list[int]]:
    """Returns the large children of a container alone, and the rest together."""
    if len(inner) <= _MOST_INNER:
        return [[n] for n in inner]
    alone = sorted(inner, key=lambda n: -trees[n].bytes)[: _MOST_INNER - 1]
    return [*([n] for n in alone), [n for n in inner if n not in alone]]
