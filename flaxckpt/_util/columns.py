"""The columns of tables on terminals: their widths, and line breaks in paths.

Words are broken after slashes and underscores, unless they are very long.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

GAP = 2
"""Columns of a terminal between two columns of a table."""

_SHORT = 12
"""Words up to this length stay whole."""

_LONG = 20
"""Longer parts of words, which no language has, may be broken anywhere."""

_TYPE = re.compile(r"[a-z]\w*\[[\d, ]*\]")
"""An array in a cell: `float32[8, 4]`."""


def fold(
    titles: Sequence[str],
    rows: Sequence[Sequence[tuple[str, str]]],
    width: int,
    *,
    numbers: Collection[int] = (),
    whole: Collection[int] = (),
) -> Table | Text:
    """Returns what rich prints for a table: columns, or a paragraph for each row.

    Without `titles`, the table has no header. Each cell has its style. The columns
    `numbers` are aligned to the right and never folded, nor are the columns `whole`.
    """
    from rich.table import Table
    from rich.text import Text

    texts = [[text for text, _ in row] for row in rows]
    gaps = GAP * (len(titles) - 1)
    widths = fit_widths([titles, *texts], width - gaps, {*numbers, *whole})
    if sum(widths) + gaps > width:
        lines = []
        for row, cells in zip(rows, texts, strict=True):
            name, *others = to_paragraph(titles, cells, width)
            lines += [Text(name, row[0][1]), *map(Text, others)]
        return Text("\n").join(lines)
    table = Table(
        box=None,
        header_style="bold",
        show_header=any(titles),
        padding=(0, GAP, 0, 0),
        pad_edge=False,
    )
    for n, (title, each) in enumerate(zip(titles, widths, strict=True)):
        table.add_column(
            Text(title),
            width=each,
            justify="right" if n in numbers else "left",
            overflow="fold",
        )
    for row in rows:
        sized = zip(row, widths, strict=True)
        table.add_row(*[Text(break_paths(t, each), s) for (t, s), each in sized])
    return table


def fit_widths(
    rows: Sequence[Sequence[str]], width: int, whole: Collection[int] = ()
) -> list[int]:
    """Returns the widths of columns, together at most `width` if words allow it.

    Each column has its longest part of a word. The rest of the width goes to the
    longest type of each column, then to the leaf paths, in the first column, then to
    the other columns. `width` is without the gaps between columns; the cells of the
    columns `whole` are never folded.
    """
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(_least_width, column)) for column in columns]
    types = [
        max((len(each) for cell in column for each in _TYPE.findall(cell)), default=0)
        for column in columns
    ]
    longest = [max(map(len, column)) for column in columns]
    for n in whole:
        widths[n] = longest[n]
    for wanted in (types, longest):
        for n, most in enumerate(wanted):
            widths[n] += max(0, min(most - widths[n], width - sum(widths)))
    return widths


def break_paths(text: str, width: int) -> str:
    """Returns `text` with line breaks in words longer than `width`, as few as possible.

    They come after slashes, and after underscores where a part is still longer. Each
    line keeps the indent of the text.
    """
    indent = _indent(text)
    room = width - len(indent)
    words = []
    for word in text.removeprefix(indent).split(" "):
        lines = [""]
        for part in re.findall("[^/]*/|[^/]+", word):
            for piece in [part] if len(part) <= room else _PIECE.findall(part):
                if lines[-1] and len(lines[-1]) + len(piece) > room:
                    lines.append("")
                lines[-1] += piece
        words.append(f"\n{indent}".join(lines))
    return indent + " ".join(words)


def to_paragraph(titles: Sequence[str], cells: Sequence[str], width: int) -> list[str]:
    """Returns the lines of a row: the first cell, then each other with its title."""
    lines = break_paths(cells[0], width).split("\n")
    for title, cell in zip(titles[1:], cells[1:], strict=True):
        if cell:
            text = f"  {title}: {cell}" if title else f"  {cell}"
            lines += textwrap.wrap(
                text,
                width,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines


_PIECE = re.compile("[^/_]*[/_]|[^/_]+")
"""A part of a word that is never broken."""


def _least_width(text: str) -> int:
    """Returns the width of the longest part of a word, with the indent of the text."""
    words = text.split()
    pieces = [
        min(len(piece), _LONG) for word in words for piece in _PIECE.findall(word)
    ]
    short = [min(len(word), _SHORT) for word in words]
    return len(_indent(text)) + max([*pieces, *short], default=0)


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip(" "))]
