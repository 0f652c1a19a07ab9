"""Sections of a page: a summary sentence with pictures and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt._util import html

WIDE, NARROW = 960, 340
"""Widths of treemaps, on screens and on phones."""


class Section(NamedTuple):
    """A part of the page, which a reader may fold.

    Attributes:
        name: For links.
        title: The heading.
        summary: A sentence or two.
        body: Pictures and tables.
    """

    name: str
    title: str
    summary: object
    body: Sequence[html.Markup] = ()

    def markup(self) -> html.Markup:
        """Returns the section as HTML."""
        heading = html.element("h2", self.title, id=f"{self.name}-title")
        return html.element(
            "section",
            html.element(
                "details",
                html.element("summary", heading),
                html.element(
                    "p", _keep_options_whole(self.summary), class_="summary-text"
                ),
                *self.body,
                open="",
            ),
            id=self.name,
            aria_labelledby=f"{self.name}-title",
        )


def _keep_options_whole(summary: object) -> html.Markup:
    """Marks up command options in a sentence, so that no line ends within one."""
    if isinstance(summary, html.Markup):
        return summary
    parts = _OPTION.split(str(summary))
    return html.join(
        html.element("code", part) if n % 2 else part for n, part in enumerate(parts)
    )


_OPTION = re.compile(r"(--[a-z][a-z-]*(?: [a-z]+:[\w:/]+)?)")
"""An option, with a value such as `best:1:NAME:min`."""


def legend(items: Sequence[tuple[str, str]]) -> html.Markup:
    """Returns the key of a picture from pairs of a mark's class and its meaning."""
    entries = [html.element("li", _swatch(class_), name) for class_, name in items]
    return html.element("ul", *entries, class_="legend", aria_label="Key")


def _swatch(class_: str) -> html.Markup:
    """Draws a small mark of a class, as in the picture."""
    mark = html.element("rect", x=1, y=1, width=10, height=10, rx=2, class_=class_)
    return html.element(
        "svg", mark, viewBox="0 0 12 12", class_="swatch", aria_hidden="true"
    )


def drawn(name: str, **attributes: object) -> html.Markup:
    """Returns a place in which the script draws; see `PAINTERS` in `charts.js`."""
    class_ = f"drawn {name}"
    return html.element("div", class_=class_, data_draw=name, **attributes)


def display_name(path: str | None) -> str:
    """Returns the display name of a checkpoint."""
    name = (path or "").rstrip("/").rpartition("/")[2]
    return f"step {int(name):,}" if name.isascii() and name.isdigit() else name
