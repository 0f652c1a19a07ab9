"""Tables that a reader sorts and searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flaxckpt._util import html

_SEARCHED = 8
"""Shorter tables are not searched."""

_FITTING = 10
"""Rows that the box shows without scrolling, if each has one line."""

_FEW_MORE = 3
"""So many more rows are shown, too: scrolling to them would be more work."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: The heading.
        is_number: True if the column is aligned to the right.
        is_wide: True if the column has sentences.
    """

    title: str
    is_number: bool = False
    is_wide: bool = False


class TableCell(NamedTuple):
    """A cell whose text is not its value.

    Attributes:
        shown: The text or markup.
        value: The number that the column is sorted by.
    """

    shown: object
    value: float


class TableRow(NamedTuple):
    """A row of a table.

    Attributes:
        cells: The cells; the first is the heading of the row.
        data: HTML attributes of the row, for the script and for programs.
        kind: A CSS class: `bad`, `deleted`, or None.
    """

    cells: Sequence[object]
    data: Mapping[str, object]
    kind: str | None = None


def table(
    title: str, columns: Sequence[Column], rows: Sequence[TableRow], *, what: str = ""
) -> html.Markup:
    """Returns a table in a box that scrolls; columns without any text are left out.

    Args:
        title: The caption.
        columns: One for each cell of a row.
        rows: The rows, all of which are in the page.
        what: The kind of the rows, for the search field above a long table:
            `steps`; without it there is no search.
    """
    shown = [
        n for n in range(len(columns)) if any(str(_text(r.cells[n])) for r in rows)
    ]
    heads = [
        html.element(
            "th",
            html.element("button", columns[n].title, type="button", class_="sort"),
            scope="col",
            class_=_class(columns[n]),
        )
        for n in shown
    ]
    content = html.element(
        "table",
        html.element("caption", title),
        html.element("thead", html.element("tr", *heads)),
        html.element("tbody", *[_row(row, columns, shown) for row in rows]),
    )
    box = html.element(
        "div", content, class_="scroll", tabindex=0, role="region", aria_label=title
    )
    controls: list[html.Markup] = []
    if what and len(rows) > _SEARCHED:
        controls.append(search_field(what))
    is_whole = _FITTING < len(rows) <= _FITTING + _FEW_MORE
    if len(rows) > _FITTING and not is_whole:
        controls.append(_show_all(len(rows)))
    class_ = "table whole" if is_whole else "table"
    return html.element("div", *controls, box, class_=class_, data_scope="")


def _show_all(count: int) -> html.Markup:
    """Returns a button that makes the box of a table as high as all of its rows."""
    return html.element(
        "button",
        f"Show all {count:,} rows",
        type="button",
        data_action="expand",
        aria_pressed="false",
        class_="control",
    )


def _row(row: TableRow, columns: Sequence[Column], shown: Sequence[int]) -> html.Markup:
    cells = []
    for n in shown:
        cell = row.cells[n]
        value = f"{cell.value:.10g}" if isinstance(cell, TableCell) else None
        cells.append(
            html.element(
                "td" if n else "th",
                _text(cell) if n else _break_path(_text(cell)),
                scope=None if n else "row",
                class_=_class(columns[n]),
                data_v=value,
            )
        )
    return html.element("tr", *cells, class_=row.kind, **row.data)


def _break_path(name: object) -> object:
    """Returns the heading of a row; a narrow column breaks a path after a slash."""
    if isinstance(name, html.Markup) or not isinstance(name, str):
        return name
    return html.Markup(html.text(name).replace("/", f"/{html.element('wbr')}"))


def _text(cell: object) -> object:
    return cell.shown if isinstance(cell, TableCell) else cell


def _class(column: Column) -> str | None:
    if column.is_number:
        return "n"
    return "w" if column.is_wide else None


def search_field(what: str) -> html.Markup:
    """Returns a field that searches the rows and leaves of its `data-scope`."""
    return html.element(
        "div",
        html.element(
            "input",
            type="search",
            placeholder=f"Search {what}",
            aria_label=f"Search {what}",
            data_search="",
        ),
        html.element("output", class_="found"),
        class_="control",
    )
