"""Sections of a report: a summary sentence with pictures and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt import _util
from flaxckpt._util.html import Column, Markup, Row

WIDE, NARROW = 960, 340
"""Widths of pictures, on screens and on phones."""

_SHOWN = 8
"""Rows of a table that are visible at once; the reader opens the rest."""

_MOST_ROWS = 250
"""Row limit of a table, which keeps the page of a long run small."""


class Section(NamedTuple):
    """A part of the page.

    Attributes:
        name: For links.
        title: The heading.
        said: The summary, in a sentence or two.
        body: Pictures and tables.
    """

    name: str
    title: str
    said: object
    body: Sequence[Markup] = ()

    def markup(self) -> Markup:
        """Returns the section as HTML."""
        return _util.html.element(
            "section",
            _util.html.element("h2", self.title, id=f"{self.name}-title"),
            _util.html.element("p", _with_options(self.said), class_="said"),
            *self.body,
            id=self.name,
            aria_labelledby=f"{self.name}-title",
        )


def _with_options(said: object) -> Markup:
    """Returns a sentence with its command options unbroken by line ends."""
    if isinstance(said, Markup):
        return said
    parts = _OPTION.split(str(said))
    return _util.html.join(
        _util.html.element("code", part) if n % 2 else part
        for n, part in enumerate(parts)
    )


_OPTION = re.compile(r"(--[a-z][a-z-]*)")


def table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> list[Markup]:
    """Returns a table whose rows beyond the first few are collapsed."""
    parts = [_util.html.table(title, columns, rows[:_SHOWN])]
    more = rows[_SHOWN:_MOST_ROWS]
    if more:
        told = f"{_util.humanize.count(len(more), 'more row')}"
        parts.append(
            _util.html.element(
                "details",
                _util.html.element("summary", told),
                _util.html.table(f"{title}, continued", columns, more),
            )
        )
    if len(rows) > _MOST_ROWS:
        told = f"… and {len(rows) - _MOST_ROWS:,} more: --json lists them all."
        parts.append(_util.html.element("p", told, class_="note"))
    return parts


def legend(items: Sequence[tuple[str, str]]) -> Markup:
    """Returns the key of a picture from pairs of a mark's class and its meaning.

    An empty class shows no mark.
    """
    found = []
    for class_, name in items:
        swatch = _util.html.NOTHING
        if class_:  # drawn as in the picture
            square = _util.html.element(
                "rect", x=1, y=1, width=10, height=10, rx=2, class_=class_
            )
            if class_ == "point best":
                places = "6,0.5 11.5,6 6,11.5 0.5,6"
                square = _util.html.element("polygon", points=places, class_=class_)
            elif class_.startswith("point"):
                square = _util.html.element("circle", cx=6, cy=6, r=4.2, class_=class_)
            elif class_ == "gone":
                square = _util.html.element(
                    "line", x1=6, x2=6, y1=0, y2=12, class_=class_
                )
            swatch = _util.html.element(
                "svg", square, viewBox="0 0 12 12", class_="swatch", aria_hidden="true"
            )
        found.append(_util.html.element("li", swatch, name))
    return _util.html.element("ul", *found, class_="legend", aria_label="Key")


def last(path: str | None) -> str:
    """Returns the display name of a checkpoint."""
    name = (path or "").rstrip("/").rpartition("/")[2]
    return f"step {int(name)}" if name.isascii() and name.isdigit() else name
