"""Rows of `remap`: the names of indices and axes."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from flaxckpt._suggest import forms
from flaxckpt._suggest.match import Link
from flaxckpt._suggest.patterns import Key, Pattern

Row: TypeAlias = tuple[str, str] | tuple[str, str, str]
"""A row of `remap`: the names in the source and in the state, and perhaps a form."""


def _as_row(source: str, target: str, form: str | None) -> Row:
    return (source, target) if form is None else (source, target, form)


def form_of(row: Row) -> str | None:
    return row[2] if len(row) == 3 else None


def as_code(row: Row) -> str:
    return f"({', '.join(map(_quoted, row))})"


def _quoted(text: str) -> str:
    """Returns a Python literal of a text, in double quotes if it has none itself."""
    literal = repr(text)
    return literal if '"' in literal else f'"{literal[1:-1]}"'


class RowNames:
    """Names indices and axes, alike in all rows where they have the same size.

    `sizes` are those of axes that the rows need.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._indices: dict[tuple[object, ...], str] = {}

    def rows(self, link: Link, form: forms.Candidate) -> list[Row]:
        """Returns the rows of a link, with as many indices as the numbers allow."""
        groups = [
            dict(zip([a for a, _ in link.paired], group.loop, strict=True))
            for group in link.groups
        ]
        return list(self._rows(link, form, {}, groups, [*link.source.members]))

    def _rows(
        self,
        link: Link,
        form: forms.Candidate,
        fixed: Mapping[int, int],
        groups: Sequence[Mapping[int, tuple[int, int]]],
        members: Sequence[Key],
    ) -> Iterator[Row]:
        """Yields rows in which the indices `fixed` of the source are numbers.

        `groups` and `members`, the leaves of the source, are those with these numbers.
        """
        open_loops = [a for a, _ in link.paired if a not in fixed]
        firsts = {a: _first_of_run({loop[a] for loop in groups}) for a in open_loops}
        counts = {a: len({loop[a][0] for loop in groups}) for a in open_loops}
        stored = {a: {key[a] for key in members} for a in open_loops}
        if math.prod(counts.values()) == len(groups) and all(
            first is not None and _is_start(stored[a], first[0], counts[a])
            for a, first in firsts.items()
        ):
            yield self._row(link, form, fixed, firsts, counts, stored, groups)  # type: ignore[arg-type]
            return
        at = open_loops[0]
        groups_of, members_of = defaultdict(list), defaultdict(list)
        for loop in groups:
            groups_of[loop[at][0]].append(loop)
        for key in members:
            members_of[key[at]].append(key)
        for value in sorted(groups_of):
            now = {**fixed, at: value}
            yield from self._rows(link, form, now, groups_of[value], members_of[value])

    def _row(
        self,
        link: Link,
        form: forms.Candidate,
        fixed: Mapping[int, int],
        firsts: Mapping[int, tuple[int, int]],
        counts: Mapping[int, int],
        stored: Mapping[int, set[int]],
        groups: Sequence[Mapping[int, tuple[int, int]]],
    ) -> Row:
        source, target = link.source, link.target
        taken: list[str] = []
        left: dict[int, str] = {at: str(value) for at, value in fixed.items()}
        right: dict[int, str] = {}
        for a, b in link.paired:
            if a in fixed:
                right[b] = str(groups[0][a][1])
                continue
            is_part = len(stored[a]) > counts[a]
            name = self._index(counts[a], taken, is_part=is_part)
            left[a], right[b] = (
                f"{{{name}{f'+{first}' if first else ''}}}" for first in firsts[a]
            )
        gathered = self._own_indices(source, left, taken)
        scattered = self._own_indices(target, right, taken)
        form = form._replace(
            left=_without_numbers(form.left, gathered),
            right=_without_numbers(form.right, scattered),
        )
        gathered, scattered = [*filter(None, gathered)], [*filter(None, scattered)]
        text = None
        if not form.is_plain or gathered or scattered:
            text = self._form(form, gathered, scattered)
        return _as_row(_filled(source, left), _filled(target, right), text)

    def _own_indices(
        self, pattern: Pattern, texts: dict[int, str], taken: list[str]
    ) -> list[str]:
        """Names the indices that only one side has; returns the names, in order."""
        own = []
        for at, words in enumerate(pattern.words):
            if at in texts:
                continue
            first = pattern.values[at][0]
            if len(pattern.values[at]) == 1:
                texts[at] = words[0] if words else str(first)
                own.append("")  # it needs no name
                continue
            name = self._index(len(pattern.values[at]), taken, is_word=bool(words))
            offset = f"+{first}" if first else ""
            texts[at] = (
                f"{{{name}:{'|'.join(words)}}}" if words else f"{{{name}{offset}}}"
            )
            own.append(name)
        return own

    def _index(
        self,
        count: int,
        taken: list[str],
        *,
        is_part: bool = False,
        is_word: bool = False,
    ) -> str:
        """Returns the name of an index with `count` values, new to the row."""
        for nth in itertools.count():
            key = (count, is_part, is_word, nth)
            if key not in self._indices:
                self._indices[key] = self._new(
                    "p" if is_word else "i j k l m n", self._indices.values()
                )
            name = self._indices[key]
            if name not in taken:
                taken.append(name)
                if is_part:
                    self.sizes[name] = count
                return name
        raise AssertionError

    def _form(
        self, form: forms.Candidate, gathered: Sequence[str], scattered: Sequence[str]
    ) -> str:
        named: dict[int, str] = {}
        for name, atoms in zip(gathered, form.left, strict=False):
            named[atoms[0]] = name
        for name, atoms in zip(scattered, form.right, strict=False):
            named[atoms[0]] = name
        for atoms in (*form.left, *form.right):
            free = [atom for atom in atoms if atom not in named]
            if len(free) > 1:
                for letter, atom in zip("pgh"[-len(free) + 1 :], free, strict=False):
                    named[atom] = self._sized(letter, form.sizes[atom])
                named[free[-1]] = "d"
        single = [a for atoms in form.left for a in atoms if a not in named]
        letters = {1: "e", 2: "oe", 3: "ocx", 4: "ocyx"}.get(len(single), "abcefxyz")
        named.update(zip(single, letters, strict=False))

        def text(side: Sequence[forms.Factors]) -> str:
            return " ".join(
                named[atoms[0]]
                if len(atoms) == 1
                else f"({' '.join(named[atom] for atom in atoms)})"
                if atoms
                else "1"
                for atoms in side
            )

        return f"{text(form.left)} -> {text(form.right)}"

    def _sized(self, letter: str, size: int) -> str:
        for nth in itertools.count(1):
            name = letter if nth == 1 else f"{letter}{nth}"
            if self.sizes.setdefault(name, size) == size:
                return name
        raise AssertionError

    def _new(self, letters: str, used: Iterable[str]) -> str:
        taken = {*used}
        for nth in itertools.count(1):
            for letter in letters.split():
                name = letter if nth == 1 else f"{letter}{nth}"
                if name not in taken:
                    return name
        raise AssertionError


def _first_of_run(pairs: set[tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the first numbers of both sides, if both count by 1; else None."""
    ordered = sorted(pairs)
    first = ordered[0]
    if [(a - first[0], b - first[1]) for a, b in ordered] != [
        (n, n) for n in range(len(ordered))
    ]:
        return None
    return first


def _is_start(stored: set[int], first: int, count: int) -> bool:
    """Returns True if `count` numbers from `first` on are the first of those stored."""
    return min(stored) == first and {*range(first, first + count)} <= stored


def _without_numbers(
    axes: Sequence[forms.Factors], names: Sequence[str]
) -> tuple[forms.Factors, ...]:
    """Returns `axes` without those of indices that have no name; they come first."""
    own = [atoms for atoms, name in zip(axes, names, strict=False) if name]
    return (*own, *axes[len(names) :])


def _filled(pattern: Pattern, texts: Mapping[int, str]) -> str:
    text = pattern.pieces[0]
    for at, piece in enumerate(pattern.pieces[1:]):
        text += texts[at] + piece
    return text
