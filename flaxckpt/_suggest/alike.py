"""Finds names that are alike, without comparing all with all."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from flaxckpt._suggest import names

ALL = 256
"""Tables of as many names are compared as a whole."""

_MOST = 8
"""In larger tables, the most names that one is compared with."""

_LOOKED_AT, _WINDOW = 12 * _MOST, 3 * _MOST
"""About the most names that are looked at to find these, and of each concept."""


class Index:
    """Names by the concepts that they share: all, all but one, and one.

    `tags` are what else is known of each name, such as its sizes. Names that have a tag
    in common come first.
    """

    def __init__(
        self,
        meanings: Sequence[tuple[names.Meaning, ...]],
        tags: Sequence[Iterable[Hashable]] | None = None,
    ) -> None:
        self._size = len(meanings)
        self._found: dict[Hashable, list[int]] = defaultdict(list)
        for at, one in enumerate(meanings):
            for key in _keys(one, tags[at] if tags else ()):
                self._found[key].append(at)

    def near(
        self,
        meanings: tuple[names.Meaning, ...],
        place: float = 0.0,
        tags: Iterable[Hashable] = (),
        fits: Callable[[int], bool] = lambda _: True,
    ) -> list[int]:
        """Returns the names that are the most alike; all of them, of a small table.

        `place` is where the name is in its own table, from 0 to 1: of many names that
        are as much alike, those around this place are taken. `fits` returns False for a
        name that is of no use.
        """
        if self._size <= ALL:
            return [at for at in range(self._size) if fits(at)]
        lists = [
            self._found[key] for key in _keys(meanings, tags) if key in self._found
        ]
        middle, looked = place * self._size, 0
        shared: Counter[int] = Counter()
        for found in sorted(lists, key=len):
            around = _around(found, middle)
            shared.update(around)
            looked += len(around)
            if looked >= _LOOKED_AT:
                break
        best = sorted(shared, key=lambda at: (-shared[at], abs(at - middle)))
        return sorted(itertools.islice(filter(fits, best), _MOST))


def _keys(meanings: Iterable[names.Meaning], tags: Iterable[Hashable]) -> set[Hashable]:
    keys: set[Hashable] = set()
    for meaning in meanings:
        rest = meaning - names.KINDS
        keys |= {rest, *(rest - {one} for one in rest), *(frozenset([w]) for w in rest)}
    return {*keys, *((tag, key) for tag in tags for key in keys)}


def _around(places: Sequence[int], middle: float) -> Sequence[int]:
    """Returns as many places as are looked at, those around a place."""
    first = bisect.bisect_left(places, middle) - _WINDOW // 2
    first = max(0, min(first, len(places) - _WINDOW))
    return places[first : first + _WINDOW]
