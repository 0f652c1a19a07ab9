"""Fused leaves with parts of unequal sizes, such as those of grouped queries."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flaxckpt._suggest import names
from flaxckpt._suggest.patterns import Parts, Pattern
from flaxckpt._transforms.base import TableTransform
from flaxckpt._types import LeafPath
from flaxckpt.transforms import split


class Cut(NamedTuple):
    """A fused leaf of the source that is split before leaves are matched.

    `wholes`: path of a part -> path of the fused leaf. The parts are for `targets`.
    """

    transform: TableTransform
    wholes: Mapping[LeafPath, LeafPath]
    targets: tuple[LeafPath, ...]


def find_cuts(sources: Sequence[Pattern], targets: Sequence[Pattern]) -> list[Cut]:
    """Returns the splits of fused leaves whose parts have unequal sizes.

    Parts of one size need no split: an index of `remap` runs over them.
    """
    cuts = []
    parts_of = {roles: Parts(roles, targets) for roles in names.PARTS}
    for fused in sources:
        role = next(filter(None, map(names.fused_roles, fused.meanings)), None)
        if role is None:
            continue
        found = parts_of[role[1]].near(fused.meanings)
        cut = next(filter(None, (_cut(fused, role[1], each) for each in found)), None)
        if cut is not None:
            cuts.append(cut)
    return cuts


def _cut(fused: Pattern, roles: names.Words, parts: Sequence[Pattern]) -> Cut | None:
    """Returns the split of a fused leaf into parts; None if the sizes do not fit."""
    totals = [part.total for part in parts]
    whole = fused.total
    kinds = [next(iter(one.meanings)) & names.KINDS for one in (fused, *parts)]
    shapes = {*fused.shapes.values()}
    is_fit = len(shapes) == 1 and sum(totals) == whole and whole > 0
    if not is_fit or len({*totals}) == 1 or len({*kinds}) > 1:
        return None
    [shape] = shapes
    axes = [
        axis
        for axis, size in enumerate(shape)
        if all(total * size % whole == 0 for total in totals)
    ]
    components = fused.components
    at = next(
        (
            at
            for at in reversed(range(len(components)))
            if any(names.fused_roles(one) for one in names.meanings([components[at]]))
        ),
        None,
    )
    if not axes or at is None:
        return None
    sizes = [total * shape[axes[0]] // whole for total in totals]
    renamed = ["/".join(_with(components, at, f"{role}_proj")) for role in roles]
    pattern = "([0-9]+)".join(map(re.escape, fused.pieces))
    replacements = [_numbered(name) for name in renamed]
    wholes = {
        _filled(name, key): path
        for name in renamed
        for key, path in fused.members.items()
    }
    leaves = itertools.chain.from_iterable(one.members.values() for one in parts)
    transform = split(pattern, replacements, axis=axes[0], sizes=sizes)
    return Cut(transform, wholes, tuple(leaves))


def _with(components: Sequence[str], at: int, name: str) -> list[str]:
    return [*components[:at], name, *components[at + 1 :]]


def _numbered(name: str) -> str:
    """Returns a replacement, with references to groups for the numbers."""
    first, *rest = name.replace("\\", r"\\").split(names.HOLE)
    return first + "".join(
        rf"\g<{at}>{piece}" for at, piece in enumerate(rest, start=1)
    )


def _filled(name: str, key: Sequence[int]) -> LeafPath:
    first, *rest = name.split(names.HOLE)
    return first + "".join(f"{n}{piece}" for n, piece in zip(key, rest, strict=True))
