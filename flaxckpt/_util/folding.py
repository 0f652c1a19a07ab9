"""Folds rows that differ only in numbers in their names: `layers_{0..11}/kernel`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

_NUMBERS = re.compile(r"([0-9]+)")
_MOST_DIGITS = 18

_Numbers: TypeAlias = tuple[frozenset[str], ...]
"""The numbers at each position of a name."""


class LeafLine(NamedTuple):
    """A row of a table of leaves; folded rows have equal `cells`.

    `source` is a text with the same numbers as the name, such as another leaf path.
    """

    name: str
    cells: tuple[str, ...] = ()
    source: str = ""
    leaves: int = 1


class _Pattern(NamedTuple):
    """A row without its numbers; an int in `source` is the place of one in the name."""

    name: tuple[str, ...]
    source: tuple[str | int, ...]
    cells: tuple[str, ...]


def order_numbers(names: Sequence[str]) -> list[str]:
    """Returns the names, ordered by number if they were sorted as text.

    Keys of dicts are sorted as text; any other order is the order of the state.
    """
    if any(before > after for before, after in itertools.pairwise(names)):
        return list(names)
    return sorted(names, key=_natural_key)


def _natural_key(name: str) -> list[tuple[int, str]]:
    first, *parts = _NUMBERS.split(name)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    numbers = [(int(digits[:_MOST_DIGITS]), text) for digits, text in pairs]
    return [(-1, first), *numbers]


def fold(rows: Iterable[LeafLine]) -> list[LeafLine]:
    """Returns the rows, with one row for those that differ only in numbers.

    Such a row has the place of the first, and all combinations of numbers in braces.
    """
    groups: dict[_Pattern, dict[_Numbers, int]] = {}
    for place, row in enumerate(rows):
        pattern, numbers = _split(row)
        groups.setdefault(pattern, {})[numbers] = place
    folded = [
        (place, _join(pattern, numbers))
        for pattern, places in groups.items()
        for numbers, place in _merge(places, len(pattern.name) - 1).items()
    ]
    return [row for _, row in sorted(folded, key=lambda each: each[0])]


def _split(row: LeafLine) -> tuple[_Pattern, _Numbers]:
    parts = _NUMBERS.split(row.name)
    numbers = parts[1::2]
    source: list[str | int] = [*_NUMBERS.split(row.source)]
    last = len(numbers)
    for n in range(len(source) - 2, 0, -2):  # the last numbers are those of layers
        equal = [i for i in range(last) if numbers[i] == source[n]]
        if equal:
            source[n] = last = equal[-1]
    pattern = _Pattern(tuple(parts[::2]), tuple(source), row.cells)
    return pattern, tuple(frozenset((number,)) for number in numbers)


def _merge(places: Mapping[_Numbers, int], positions: int) -> dict[_Numbers, int]:
    """Unites the numbers at one position where all others are equal, in turn."""
    merged = dict(places)
    for position in reversed(range(positions)):
        united: dict[tuple[_Numbers, _Numbers], tuple[frozenset[str], int]] = {}
        for numbers, place in merged.items():
            others = (numbers[:position], numbers[position + 1 :])
            values, first = united.get(others, (frozenset(), place))
            united[others] = (values | numbers[position], min(first, place))
        merged = {
            (*before, values, *after): first
            for (before, after), (values, first) in united.items()
        }
    return merged


def _join(pattern: _Pattern, numbers: _Numbers) -> LeafLine:
    texts = [format_numbers(values) for values in numbers]
    name = pattern.name[0]
    for text, part in zip(texts, pattern.name[1:], strict=True):
        name += text + part
    source = "".join(
        texts[part] if isinstance(part, int) else part for part in pattern.source
    )
    count = 1
    for values in numbers:
        count *= len(values)
    return LeafLine(name, pattern.cells, source, count)


def format_numbers(numbers: Iterable[str]) -> str:
    """Formats numbers as `{0..11}` or `{0,2..4}`; a single number as itself."""
    ordered = sorted(numbers, key=lambda text: (int(text), text))
    if len(ordered) == 1:
        return ordered[0]
    runs: list[list[str]] = []
    for text in ordered:
        if runs and _follows(runs[-1][-1], text):
            runs[-1].append(text)
        else:
            runs.append([text])
    return f"{{{','.join(map(_format_run, runs))}}}"


def _follows(text: str, next_text: str) -> bool:
    """Returns True for the next number with the same width or without zeros."""
    same_form = len(text) == len(next_text) or not text.startswith("0") or text == "0"
    return int(next_text) == int(text) + 1 and same_form


def _format_run(run: Sequence[str]) -> str:
    return ",".join(run) if len(run) < 3 else f"{run[0]}..{run[-1]}"
