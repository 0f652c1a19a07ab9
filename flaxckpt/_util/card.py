"""What notebooks show: cards, of HTML that fits light and dark pages, and reports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from flaxckpt._util import html

# Notebooks have their own style sheets, and are light or dark by their own switches.
_FRAME = (
    "display:inline-block;box-sizing:border-box;max-width:100%;overflow-x:auto;"
    "padding:10px 14px;border:1px solid rgba(128,128,128,.4);border-radius:8px;"
    "font:13px/1.45 system-ui,sans-serif"
)
SOFT = "opacity:.7;font-size:12px"
_LEFT = "text-align:left;padding:2px 18px 2px 0"
_RIGHT = (
    "text-align:right;white-space:nowrap;padding:2px 18px 2px 0;"
    "font-variant-numeric:tabular-nums"
)


def frame(title: str, path: object, *parts: html.Markup) -> html.Markup:
    """Returns a card for notebooks: a title, a path and `parts` in a frame."""
    return html.element(
        "div",
        html.element("strong", title),
        html.element("div", path, style=SOFT),
        *parts,
        style=_FRAME,
    )


def table(*rows: html.Markup) -> html.Markup:
    return html.element("table", *rows, style="border-collapse:collapse;margin:0")


def row(
    cells: Sequence[str],
    numbers: Collection[int],
    *,
    tag: str = "td",
    is_bold: bool = False,
    **attributes: object,
) -> html.Markup:
    """Returns a row of the table of a card, with the attributes of its element.

    The columns `numbers` are aligned to the right; `tag` of cells is `td` or `th`.
    """
    weight = ";font-weight:600" if is_bold else ""
    elements = [
        html.element(tag, cell, style=(_RIGHT if n in numbers else _LEFT) + weight)
        for n, cell in enumerate(cells)
    ]
    return html.element("tr", *elements, **attributes)


def show_printed(report: object, printer: Any, is_cycle: bool) -> None:
    """Shows a report in IPython and notebooks as `print` does, not by its fields.

    A class has it as `_repr_pretty_`.
    """
    printer.text(str(report))
