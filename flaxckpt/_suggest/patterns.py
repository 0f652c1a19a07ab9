"""Patterns of leaf paths: the leaves of repeated modules together."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from flaxckpt._suggest import alike, names
from flaxckpt._types import LeafPath, Shape

Scope: TypeAlias = tuple[str, ...]
"""Components of the path of a module."""

Key: TypeAlias = tuple[int, ...]
"""Values of the indices of a pattern; of an index over words, the word's position."""

_Rest: TypeAlias = tuple[names.Meaning, int]
"""The concepts of a part without its own, and the number of components."""

FEWEST = 4
"""See `find_patterns`."""

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """Leaves whose paths differ only in the numbers of repeated modules.

    Attributes:
        pieces: The text of the paths, between the indices.
        members: The values of the indices -> the leaf path.
        shapes: The same -> the shape.
        words: Of each index the words that it runs over; empty for numbers.
        series: Of each index the numbers of all modules that are counted with it, also
            those without such a leaf; empty for words.
        meanings: The meanings of the paths.
        parts: Of leaves that are joined, the patterns of each.
    """

    pieces: tuple[str, ...]
    members: Mapping[Key, LeafPath]
    shapes: Mapping[Key, Shape]
    words: tuple[tuple[str, ...], ...]
    series: tuple[tuple[int, ...], ...]
    meanings: tuple[names.Meaning, ...]
    parts: tuple[Pattern, ...] = ()

    @functools.cached_property
    def components(self) -> tuple[str, ...]:
        return tuple(names.HOLE.join(self.pieces).split("/"))

    @functools.cached_property
    def values(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(sorted({key[at] for key in self.members}))
            for at in range(len(self.words))
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(at for at, words in enumerate(self.words) if not words)

    @functools.cached_property
    def sizes(self) -> frozenset[int]:
        """The numbers of elements of the leaves."""
        return frozenset(map(math.prod, self.shapes.values()))

    @functools.cached_property
    def total(self) -> int:
        """The number of elements of all leaves together."""
        return sum(map(math.prod, self.shapes.values()))

    @functools.cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """The modules around the leaf, the innermost first; three at most."""
        parts = self.components
        ends = range(len(parts) - 1, max(len(parts) - 4, 0), -1)
        return tuple(parts[:end] for end in ends)

    def __str__(self) -> str:
        text = self.pieces[0]
        for words, piece in zip(self.words, self.pieces[1:], strict=True):
            text += f"{{{'|'.join(words)}}}{piece}"
        return text


def find_patterns(
    shapes: Mapping[LeafPath, Shape], fewest: int = FEWEST
) -> list[Pattern]:
    """Groups leaves by path, without the numbers of repeated modules.

    A number is that of a repeated module if the modules of several numbers hold much
    the same leaves. `1` and `2` of `ln_1` and `ln_2` are not. `fewest` is the least
    number of modules that are taken for repeated, unless their name is that of layers.
    """
    split = {path: _NUMBER.split(path) for path in shapes}
    templates = dict.fromkeys(shapes, "")
    holes: dict[LeafPath, list[int]] = {path: [] for path in shapes}  # places of holes
    series: dict[LeafPath, list[tuple[int, ...]]] = {path: [] for path in shapes}
    ordinals: dict[LeafPath, list[str]] = {path: [] for path in shapes}
    depth = max((len(pieces) // 2 for pieces in split.values()), default=0)
    for at in range(depth):
        groups: dict[str, list[LeafPath]] = defaultdict(list)
        for path, pieces in split.items():
            templates[path] += pieces[2 * at] if 2 * at < len(pieces) else ""
            if 2 * at + 1 < len(pieces):
                groups[templates[path]].append(path)
        for before, paths in groups.items():
            modules: dict[int, dict[str, Shape]] = defaultdict(dict)
            for path in paths:
                number = int(split[path][2 * at + 1])
                rest = names.HOLE.join(split[path][2 * at + 2 :: 2])
                modules[number][rest] = shapes[path]
            is_hole = _is_repeated(modules, before, fewest)
            numbers = tuple(sorted(modules))
            for path in paths:
                text = split[path][2 * at + 1]
                if is_hole:
                    holes[path].append(at)
                    series[path].append(numbers)
                elif len(numbers) > 1:
                    ordinals[path] += names.places(int(text), numbers)
                templates[path] += "{}" if is_hole else text
    found: dict[tuple[str, ...], dict[Key, LeafPath]] = defaultdict(dict)
    for path, pieces in split.items():
        cut, last = [], 0
        for at in holes[path]:
            cut.append("".join(pieces[last : 2 * at + 1]))
            last = 2 * at + 2
        cut.append("".join(pieces[last:]))
        key = tuple(int(pieces[2 * at + 1]) for at in holes[path])
        found[tuple(cut)][key] = path
    return [
        _pattern(pieces, members, shapes, tuple(series[path]), ordinals[path])
        for pieces, members in found.items()
        for path in itertools.islice(members.values(), 1)
    ]


def number_places(path: LeafPath) -> Iterator[tuple[str, int]]:
    """Yields the numbers in a leaf path, each after the path before it.

    Modules that are counted together have the same path, as earlier numbers are left
    out of it.
    """
    pieces = _NUMBER.split(path)
    for at in range(1, len(pieces), 2):
        yield names.HOLE.join(pieces[:at:2]), int(pieces[at])


def _pattern(
    pieces: tuple[str, ...],
    members: Mapping[Key, LeafPath],
    shapes: Mapping[LeafPath, Shape],
    series: tuple[tuple[int, ...], ...],
    ordinals: Sequence[str],
) -> Pattern:
    meanings = names.meanings(names.HOLE.join(pieces).split("/"))
    return Pattern(
        pieces,
        members,
        {key: shapes[path] for key, path in members.items()},
        ((),) * (len(pieces) - 1),
        series,
        tuple(one | {*ordinals} for one in meanings),
    )


def _is_repeated(
    modules: Mapping[int, Mapping[str, Shape]], before: str, fewest: int
) -> bool:
    """Returns True if the numbers are those of repeated modules; see `find_patterns`.

    `modules` has the leaves of each number, by the rest of their paths, and their
    shapes.
    """
    ordered = [modules[number] for number in sorted(modules)]
    is_whole = before[-1:] in ("/", "")
    if any("/" in rest.lstrip("/") for module in ordered for rest in module):
        alike = [
            len(a.keys() & b.keys()) / len(a.keys() | b.keys())
            for a, b in itertools.pairwise(ordered)
        ]
        if not alike:
            return is_whole
        is_named = is_whole or _LAYERS.search(before) is not None
        is_long = is_named or len(modules) >= fewest
        return is_long and sum(alike) / len(alike) >= _ALIKE
    is_run = max(modules) - min(modules) == len(modules) - 1
    is_long = len(modules) >= max(fewest, FEWEST)
    return is_long and is_run and all(m == ordered[0] for m in ordered)


_LAYERS = re.compile(
    r"(layers?|blocks?|stages?|experts?|units?|/h|^h)_?$", re.IGNORECASE
)
"""Names of repeated modules, before their number."""

_ALIKE = 0.4
"""The least part of the leaves that repeated modules share."""


class Parts:
    """Patterns of query, key and value whose meanings differ in nothing else."""

    def __init__(self, roles: names.Words, patterns: Sequence[Pattern]) -> None:
        self._roles = roles
        found: dict[_Rest, dict[str, list[Pattern]]] = defaultdict(dict)
        for one in patterns:
            for rest, role in self._places(one):
                found[rest].setdefault(role, []).append(one)
        self._found = [one for one in found.items() if len(one[1]) == len(roles)]
        self._by_rest = dict(self._found)
        self._index = alike.Index([(rest[0],) for rest, _ in self._found])

    def _places(self, one: Pattern) -> Iterator[tuple[_Rest, str]]:
        for meaning in () if one.parts else one.meanings:
            mine = meaning & {*self._roles}
            if len(mine) == 1:
                yield (meaning - mine, len(one.components)), next(iter(mine))

    def near(self, fused: tuple[names.Meaning, ...]) -> Iterator[tuple[Pattern, ...]]:
        """Yields the parts that may be those of a fused leaf, each role once."""
        bare = tuple(meaning - names.FUSED for meaning in fused)
        for at in self._index.near(bare):
            parts = self._found[at][1]
            if all(parts.values()):
                yield tuple(parts[role][0] for role in self._roles)

    def remove(self, parts: Iterable[Pattern]) -> None:
        for one in parts:
            for rest, role in self._places(one):
                left = self._by_rest.get(rest, {}).get(role, [])
                left[:] = [other for other in left if other is not one]


def join(parts: Sequence[Pattern], fused: str) -> Pattern | None:
    """Returns the patterns of query, key and value as one, with an index over words.

    Returns None if they differ in more than a component, or in shapes. `fused` is the
    concept of the joined leaves.
    """
    first = parts[0]
    texts = [names.HOLE.join(part.pieces).split("/") for part in parts]
    if (
        any(part.shapes != first.shapes for part in parts)
        or len({*map(len, texts)}) > 1
    ):
        return None
    levels = [[text[at] for text in texts] for at in range(len(texts[0]))]
    differing = [at for at, level in enumerate(levels) if len({*level}) > 1]
    if len(differing) != 1 or any(names.HOLE in text for text in levels[differing[0]]):
        return None
    [at] = differing
    above, below = texts[0][:at], texts[0][at + 1 :]
    before = names.HOLE.join(["/".join([*above, ""])])
    after = "".join(f"/{part}" for part in below)
    index = before.count(names.HOLE)
    pieces = (*before.split(names.HOLE), *after.split(names.HOLE))
    shared = frozenset.intersection(*(frozenset().union(*p.meanings) for p in parts))
    return Pattern(
        pieces,
        {
            (*key[:index], word, *key[index:]): part.members[key]
            for word, part in enumerate(parts)
            for key in part.members
        },
        {
            (*key[:index], word, *key[index:]): part.shapes[key]
            for word, part in enumerate(parts)
            for key in part.members
        },
        (*first.words[:index], tuple(levels[at]), *first.words[index:]),
        (*first.series[:index], (), *first.series[index:]),
        (shared | {fused},),
        tuple(parts),
    )
