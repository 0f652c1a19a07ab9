"""Output of the verbs: a JSON document, or text and tables.

Names in a checkpoint are untrusted: they are never interpreted as markup or as terminal
control sequences.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flaxckpt import errors
from flaxckpt._util import columns as _columns
from flaxckpt._util.humanize import count as count
from flaxckpt._util.humanize import duration as duration
from flaxckpt._util.humanize import number as number
from flaxckpt._util.humanize import same_decimals as same_decimals
from flaxckpt._util.humanize import secs as secs
from flaxckpt._util.humanize import size as size
from flaxckpt._util.humanize import when as when

if TYPE_CHECKING:
    from rich.console import Console

    from flaxckpt._state.leaf import LeafInfo


class TextColumn(NamedTuple):
    """A column of a table.

    Attributes:
        is_number: Whether cells are aligned to the right.
        is_whole: Whether cells never wrap, however narrow the terminal.
    """

    title: str
    is_number: bool = False
    is_whole: bool = False

    @property
    def heading(self) -> str:
        """The title as it is printed: it may be the name of a metric."""
        return errors.printable(self.title)


class Cell(NamedTuple):
    """A cell with a style for color terminals."""

    text: str
    style: str = ""


def print_document(value: Any) -> None:
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def fields_of(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _plain(value: Any) -> Any:
    """Converts a value to strict JSON types; NaN and infinities become strings."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        if hasattr(value, "_asdict"):
            return _plain(value._asdict())
        return [_plain(inner) for inner in value]
    if hasattr(value, "python_type"):
        return leaf(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(fields_of(value))
    if isinstance(value, complex):
        return str(value)
    return value if isinstance(value, str | int | None) else str(value)


def leaf(info: LeafInfo) -> dict[str, Any]:
    return {
        "type": str(info),
        "kind": info.kind,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "bytes": info.stored_bytes,
        "python_type": info.python_type,
        "weak_type": info.weak_type,
        "prng_impl": info.prng_impl,
        "spec": None if info.mesh_axes is None else _plain(list(info.mesh_axes)),
        "chunk_shape": None if info.chunk_shape is None else list(info.chunk_shape),
        "role": None if info.role is None else info.role._asdict(),
    }


def print_line(text: str = "") -> None:
    print(errors.printable(text))


def wrap(text: str, indent: str | None = None) -> list[str]:
    """Returns the lines of a paragraph, broken between words on a terminal.

    A word that is longer than a line stays whole. Each further line begins with
    `indent`, by default as the first.
    """
    text = errors.printable(text)
    if not is_terminal():
        return [text]
    spaces = text[: len(text) - len(text.lstrip(" "))]
    return _wrap(text, spaces if indent is None else indent)


def wrap_errors(text: str) -> list[str]:
    """Returns the lines of a message for stderr, broken between words on a terminal."""
    lines = text.split("\n")
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return lines
    return [part for line in lines for part in _wrap(line, "  ") or [""]]


def _wrap(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(
        _UNIT.sub(_JOINT, text),
        terminal_width(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_JOINT, " ") for line in lines]


_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|d|B|[kMGTP]B)\b)")
"""The space between a number and its unit, which stay together."""

_JOINT = "\xa0"


def count_rows(lines: Sequence[str]) -> int:
    """Returns the rows of a terminal that lines take: a long line takes several."""
    width = terminal_width()
    return sum(max(1, -(-_width(click.unstyle(line)) // width)) for line in lines)


def print_paragraph(text: str, indent: str | None = None) -> None:
    print("\n".join(wrap(text, indent)))


def print_command(purpose: str, command: str) -> None:
    """Prints a command to paste, never wrapped; a long one below its `purpose`."""
    line = f"{purpose}: {command}"
    if is_terminal() and len(line) > terminal_width():
        print_paragraph(f"{purpose}:")
        line = f"  {command}"
    print_line(line)


def print_lines(text: str) -> None:
    for line in text.split("\n"):
        print_line(line)


def print_table(
    columns: Sequence[TextColumn],
    rows: Sequence[Sequence[str | Cell]],
    most: int | None = None,
) -> None:
    """Prints a table: aligned text, which rich folds if the terminal is narrower.

    Omits empty columns, and rows beyond the first `most`, a number of --limit.
    """
    cells = [[_cell(cell) for cell in row] for row in rows[:most]]
    used = [n for n in range(len(columns)) if any(row[n].text for row in cells)]
    columns = [columns[n] for n in used]
    cells = [[row[n] for n in used] for row in cells]
    if not cells:
        return
    if is_terminal() and table_width(columns, cells) > terminal_width():
        titles = [column.heading for column in columns]
        numbers = [n for n, each in enumerate(columns) if each.is_number]
        whole = [n for n, each in enumerate(columns) if each.is_whole]
        width = terminal_width()
        table = _columns.fold(titles, cells, width, numbers=numbers, whole=whole)
        console(width).print(table)
    else:
        print("\n".join(table_lines(columns, cells)))
    print_more(len(rows), len(cells), f"--limit {len(rows)} shows all")


def print_more(total: int, shown: int, remedy: str) -> None:
    """Prints how many rows are not shown, and what shows all; nothing for none."""
    if total > shown:
        print_paragraph(f"… and {total - shown:,} more: {remedy}")


def _cell(cell: str | Cell) -> Cell:
    text, style = cell if isinstance(cell, Cell) else (cell, "")
    return Cell(errors.printable(text), style)


_GAP = " " * _columns.GAP


def table_width(
    columns: Sequence[TextColumn], rows: Sequence[Sequence[str | Cell]]
) -> int:
    """Returns the width of a table in which no cell is folded."""
    widths = _column_widths(columns, [[_cell(cell) for cell in row] for row in rows])
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def table_lines(
    columns: Sequence[TextColumn], rows: Sequence[Sequence[str | Cell]]
) -> list[str]:
    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = _column_widths(columns, cells)
    header = [Cell(column.heading, "bold") for column in columns]
    lines = [header, *cells] if any(column.title for column in columns) else cells
    return [_format_row(columns, widths, row) for row in lines]


def _column_widths(
    columns: Sequence[TextColumn], rows: Sequence[Sequence[Cell]]
) -> list[int]:
    return [
        max([_width(column.heading), *(_width(row[n].text) for row in rows)])
        for n, column in enumerate(columns)
    ]


def _format_row(
    columns: Sequence[TextColumn], widths: Sequence[int], row: Sequence[Cell]
) -> str:
    texts = []
    for column, width, cell in zip(columns, widths, row, strict=True):
        space = " " * (width - _width(cell.text))
        text = style_text(cell)
        texts.append(space + text if column.is_number else text + space)
    return _GAP.join(texts).rstrip()


def _width(text: str) -> int:
    """Returns the number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def style_text(cell: Cell) -> str:
    if not cell.style or not is_terminal() or os.environ.get("NO_COLOR"):
        return cell.text
    words = cell.style.split()
    colors = [word for word in words if word not in ("bold", "dim")]
    return click.style(
        cell.text,
        fg=colors[0] if colors else None,
        bold="bold" in words or None,
        dim="dim" in words or None,
    )


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def console(width: int | None = None) -> Console:
    """Returns a console for stdout without markup, by default as wide as stdout."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, width=width)


def is_terminal() -> bool:
    """Returns True for a terminal, or with `FORCE_COLOR` set."""
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


# ---- formatting -------------------------------------------------------------------


def format_metrics(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={number(value, 4)}" for name, value in values.items())


def format_spec(info: LeafInfo) -> str | None:
    """Formats the partition spec of a leaf, `P('data', None)`; None without a spec."""
    if info.mesh_axes is None:
        return None
    return f"P({', '.join(map(repr, info.mesh_axes))})"


def shorten_name(name: str, most: int = 24) -> str:
    """Returns a name, with an ellipsis in the middle if it is long."""
    half = most // 2
    return name if len(name) <= most else f"{name[: half - 1]}…{name[-half:]}"


def shorten_path(path: str) -> str:
    """Returns a path inside the current directory as a relative path."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # outside; the current directory is gone
        return path
