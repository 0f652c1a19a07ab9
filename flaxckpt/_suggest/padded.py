"""Vocabularies of another size: embeddings and heads that are padded, or cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flaxckpt._suggest.patterns import Pattern
from flaxckpt._transforms.base import TableTransform
from flaxckpt._types import LeafPath, Shape
from flaxckpt.transforms import pad, slice

_EMBEDDING = frozenset(("embed", "token", "weight"))
_HEAD = frozenset(("head",))


class Resize(NamedTuple):
    """A leaf of the source that gets the rows of the state's vocabulary.

    `reason` is what is not known of it.
    """

    transform: TableTransform
    target: LeafPath
    reason: str


def find_resizes(
    sources: Sequence[Pattern], targets: Sequence[Pattern]
) -> list[Resize]:
    """Returns the changes of the embedding, and of the head and its bias.

    They are changed only if the embeddings of both sides have the same width, and all
    of these leaves the same vocabularies.
    """
    embeddings = [_find(side, _EMBEDDING) for side in (sources, targets)]
    if any(len(found) != 1 for found in embeddings):
        return []
    [(path, stored)], [(target, wanted)] = (found.items() for found in embeddings)
    if not len(stored) == len(wanted) == 2 or stored[1] != wanted[1]:
        return []
    old, new, width = stored[0], wanted[0], stored[1]
    if old == new or width in (old, new):
        return []
    resizes = [_resize(path, (new, None), target, old, new)]
    heads = _find(sources, _HEAD), _find(targets, _HEAD)
    for path, target, shape in _pairs(*heads, old, new, width):
        changed = tuple(new if size == old else None for size in shape)
        resizes.append(_resize(path, changed, target, old, new))
    return resizes


def _find(side: Sequence[Pattern], concepts: frozenset[str]) -> dict[LeafPath, Shape]:
    """Returns the leaves, not those of layers, whose names have some concepts."""
    return {
        path: one.shapes[key]
        for one in side
        if len(one.members) == 1 and any(concepts <= m for m in one.meanings)
        for key, path in one.members.items()
    }


def _pairs(
    sources: Mapping[LeafPath, Shape],
    targets: Mapping[LeafPath, Shape],
    old: int,
    new: int,
    width: int,
) -> Iterator[tuple[LeafPath, LeafPath, Shape]]:
    """Yields leaves of a head with the same axes but for the vocabulary."""
    for axes in ((width,), ()):
        mine = [p for p, shape in sources.items() if sorted(shape) == _with(axes, old)]
        theirs = [
            p for p, shape in targets.items() if sorted(shape) == _with(axes, new)
        ]
        if len(mine) == len(theirs) == 1:
            yield mine[0], theirs[0], sources[mine[0]]


def _with(axes: Shape, vocabulary: int) -> list[int]:
    return sorted((*axes, vocabulary))


def _resize(
    path: LeafPath, shape: tuple[int | None, ...], target: LeafPath, old: int, new: int
) -> Resize:
    pattern = re.escape(path)
    if new > old:
        reason = f"the vocabulary grows from {old} to {new} rows, with zeros"
        return Resize(pad(pattern, shape), target, reason)
    reason = (
        f"the vocabulary is cut from {old} to {new} rows: are the last ones unused?"
    )
    return Resize(slice(pattern, shape), target, reason)
