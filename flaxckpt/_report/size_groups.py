"""Divides a checkpoint's size into few parts for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from flaxckpt._report import copies
from flaxckpt._report.data import Part
from flaxckpt._run.disk_usage import Subtree

_MOST_PARTS = 60
_MOST_INNER = 14
"""Limit for a container; its other children are combined."""

_LEAST_SHARE = 0.08
"""Parts with a smaller share of the whole are not divided."""

_SPLIT_SHARE, _LARGE_SHARE, _MOST_SPLIT = 0.4, 0.1, 4
"""A group above the first share is split if a few of its children exceed the second."""

_Bundle: TypeAlias = tuple[str, Sequence[int]]
"""A group, and the indices of the subtrees that are one part of it."""


def divide(trees: Sequence[Subtree]) -> tuple[Part, ...]:
    """Divides a checkpoint into parts that add up to the whole, group by group.

    Each container comes before its children.
    """
    inner: list[list[int]] = [[] for _ in trees]
    for number, above in enumerate(copies.find_parents([t.depth for t in trees])):
        if above is not None:
            inner[above].append(number)
    waiting, parts = _choose_groups(trees, inner), list[Part]()
    while waiting:  # the largest first, as there is room for few
        waiting.sort(key=lambda bundle: sum(trees[n].bytes for n in bundle[1]))
        group, numbers = waiting.pop()
        size = sum(trees[n].bytes for n in numbers)
        is_large = len(numbers) == 1 and size >= trees[0].bytes * _LEAST_SHARE
        inside = _split(trees, inner[numbers[0]], size) if is_large else []
        if inside and len(parts) + len(waiting) + len(inside) < _MOST_PARTS:
            waiting += [(group, bundle) for bundle in inside]
        else:
            first, last = trees[numbers[0]].shown_path, trees[numbers[-1]].shown_path
            until = last if len(numbers) > 1 else None
            leaves = sum(trees[n].leaves for n in numbers)
            parts.append(Part(group, first, until, len(numbers), leaves, size))
    return tuple(sorted(parts, key=lambda part: (part.group, -part.bytes)))


def _choose_groups(
    trees: Sequence[Subtree], inner: Sequence[Sequence[int]]
) -> list[_Bundle]:
    """Returns the few large groups of a checkpoint, and the rest of each."""
    base, total = 0, trees[0].bytes
    while len(inner[base]) == 1:
        base = inner[base][0]
    if not 0 < len(inner[base]) <= _MOST_INNER:  # too many for groups
        return [(trees[base].shown_path, [base])]
    groups: list[_Bundle] = []
    waiting = [*inner[base]]
    for number in waiting:  # the loop appends to the list
        name = trees[number].shown_path
        large = [n for n in inner[number] if trees[n].bytes >= total * _LARGE_SHARE]
        is_large = trees[number].bytes > total * _SPLIT_SHARE
        if not is_large or not 0 < len(large) <= _MOST_SPLIT:
            groups.append((name, [number]))
            continue
        waiting += large
        if small := [n for n in inner[number] if n not in large]:
            groups.append((name, small))
    return groups


def _split(
    trees: Sequence[Subtree], inner: Sequence[int], size: int
) -> list[Sequence[int]]:
    """Returns the large children of a container alone, and the rest in bundles."""
    if len(inner) <= _MOST_INNER:
        return [[n] for n in inner]
    ordered = sorted(inner, key=lambda n: -trees[n].bytes)[: _MOST_INNER // 2]
    large = [n for n in ordered if trees[n].bytes * _MOST_INNER >= size]
    rest = [n for n in inner if n not in large]
    room = _MOST_INNER - len(large)
    if sum(trees[n].bytes for n in rest) * room < size:
        room = 1
    count = -(-len(rest) // room)
    bundles = [rest[n : n + count] for n in range(0, len(rest), count)]
    return [*([n] for n in large), *bundles]
