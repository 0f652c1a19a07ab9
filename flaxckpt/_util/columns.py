"""The columns of tables on terminals: their widths, and line breaks in paths."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_LEAST_WIDTH = 8
"""Width of the first column on a terminal that is too narrow for words."""

_LONG = 12
"""Longer words may be folded."""

_TYPE = re.compile(r"[a-z]\w*\[[\d, ]*\]")
"""An array in a cell: `float32[8, 4]`."""


def fit_widths(
    rows: Sequence[Sequence[str]], width: int, whole: Collection[int] = ()
) -> list[int]:
    """Returns the widths of columns, together at most `width` if words allow it.

    Each column has its longest word, or most of it. The rest of the width goes to the
    longest type of each column, then to the leaf paths, in the first column, then to
    the other columns.

    Args:
        rows: The cells, with the titles.
        width: The width of the terminal, without the gaps between columns.
        whole: The columns whose cells are never folded, such as numbers.
    """
    columns = [*zip(*rows, strict=True)]
    words = [
        max(min(len(word), _LONG) for cell in column for word in cell.split() or [""])
        for column in columns
    ]
    types = [
        max((len(each) for cell in column for each in _TYPE.findall(cell)), default=0)
        for column in columns
    ]
    longest = [max(map(len, column)) for column in columns]
    widths = [min(_LEAST_WIDTH, words[0]), *words[1:]]
    for n in whole:
        widths[n] = longest[n]
    for wanted in (types, longest):
        for n, most in enumerate(wanted):
            widths[n] += max(0, min(most - widths[n], width - sum(widths)))
    return widths


def break_paths(text: str, width: int) -> str:
    """Returns `text` with line breaks after slashes in words longer than `width`."""
    words = []
    for word in text.split(" "):
        lines = [""]
        for part in re.findall("[^/]*/|[^/]+", word):
            if lines[-1] and len(lines[-1]) + len(part) > width:
                lines.append("")
            lines[-1] += part
        words.append("\n".join(lines))
    return " ".join(words)
