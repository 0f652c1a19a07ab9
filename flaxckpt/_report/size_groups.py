"""Divides a checkpoint's size into few parts for a picture."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

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

_GONE = -1


class _Node(NamedTuple):
    """A subtree, and the indices of its children."""

    tree: Subtree
    inner: Sequence[int]


def divide(trees: Sequence[Subtree]) -> tuple[Part, ...]:
    """Divides a checkpoint into parts that add up to the whole, group by group.

    Args:
        trees: Of a whole checkpoint, each container before its children.
    """
    nodes = _nodes(trees)
    groups, others = _choose_groups(nodes)
    name = {number: nodes[number].tree.shown_path for number in groups}
    single: list[tuple[str, int]] = [(name[number], number) for number in groups]
    queue = [(-nodes[n].tree.bytes, n, group) for group, n in single]
    heapq.heapify(queue)
    least = nodes[0].tree.bytes * _LEAST_SHARE
    while queue:
        size, number, group = heapq.heappop(queue)
        inner, rest = _split(nodes, number)
        room = _MOST_PARTS - len(single) - len(others)
        count = len(inner) + len(rest)
        if not count or count > room or -size < least:
            continue
        single.remove((group, number))
        for child in inner:
            single.append((group, child))
            heapq.heappush(queue, (-nodes[child].tree.bytes, child, group))
        others += [_combine(nodes, bundle, group) for bundle in rest]
    parts = [_single(nodes[number].tree, group) for group, number in single] + others
    return tuple(sorted(parts, key=lambda part: (part.group, -part.bytes)))


def _choose_groups(nodes: Sequence[_Node]) -> tuple[list[int], list[Part]]:
    """Returns the few large groups of a checkpoint, and parts for the rest."""
    base = 0
    while len(nodes[base].inner) == 1:
        base = nodes[base].inner[0]
    groups = list(nodes[base].inner)
    if not 0 < len(groups) <= _MOST_INNER:  # too many for groups
        return [base], []
    total = nodes[0].tree.bytes
    others: list[Part] = []
    for number in groups:  # the loop appends to the list
        tree = nodes[number].tree
        large = [n for n in nodes[number].inner if _is_large(nodes[n].tree, total)]
        if tree.bytes <= total * _SPLIT_SHARE or not 0 < len(large) <= _MOST_SPLIT:
            continue
        groups += large
        small = [n for n in nodes[number].inner if n not in large]
        if small:
            others.append(_combine(nodes, small, tree.shown_path))
        groups[groups.index(number)] = _GONE
    return [number for number in groups if number != _GONE], others


def _is_large(tree: Subtree, total: int) -> bool:
    return tree.bytes >= total * _LARGE_SHARE


def _nodes(trees: Sequence[Subtree]) -> list[_Node]:
    inner: list[list[int]] = [[] for _ in trees]
    for number, above in enumerate(copies.find_parents([t.depth for t in trees])):
        if above is not None:
            inner[above].append(number)
    return [_Node(tree, children) for tree, children in zip(trees, inner, strict=True)]


def _split(
    nodes: Sequence[_Node], number: int
) -> tuple[list[int], list[Sequence[int]]]:
    """Returns the large subtrees of a container, and the rest in bundles."""
    inner = nodes[number].inner
    if len(inner) <= _MOST_INNER:
        return list(inner), []
    size = nodes[number].tree.bytes
    ordered = sorted(inner, key=lambda n: -nodes[n].tree.bytes)[: _MOST_INNER // 2]
    large = [n for n in ordered if nodes[n].tree.bytes * _MOST_INNER >= size]
    rest = [n for n in inner if n not in large]
    room = _MOST_INNER - len(large)
    if sum(nodes[n].tree.bytes for n in rest) * room < size:
        room = 1
    count = -(-len(rest) // room)
    return large, [rest[n : n + count] for n in range(0, len(rest), count)]


def _single(tree: Subtree, group: str) -> Part:
    return Part(group, tree.shown_path, None, 1, tree.leaves, tree.bytes)


def _combine(nodes: Sequence[_Node], numbers: Sequence[int], group: str) -> Part:
    trees = [nodes[n].tree for n in numbers]
    if len(trees) == 1:
        return _single(trees[0], group)
    return Part(
        group,
        trees[0].shown_path,
        trees[-1].shown_path,
        len(trees),
        sum(tree.leaves for tree in trees),
        sum(tree.bytes for tree in trees),
    )
