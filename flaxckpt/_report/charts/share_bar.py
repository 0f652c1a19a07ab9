"""A bar that a whole divides into shares, with a legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt._util import html, humanize

_HEIGHT = 26

COLOURS = 6


class Share(NamedTuple):
    """A part of a whole.

    Attributes:
        name: The name in the legend.
        bytes: The size.
        note: A further text in the legend, or empty.
        colour: The number of the colour.
    """

    name: str
    bytes: int
    note: str
    colour: int


def share_bar(title: str, shares: Sequence[Share]) -> html.Markup:
    """Draws shares side by side, with a legend of names, sizes and percentages."""
    total = sum(share.bytes for share in shares) or 1
    parts, entries, left = [], [], 0.0
    for share in shares:
        width = 100 * share.bytes / total
        text = f"{humanize.size(share.bytes)}, {share.bytes / total:.1%}"
        parts.append(
            html.element(
                "rect",
                html.element("title", f"{share.name}: {text}"),
                x=html.percent(left),
                width=html.percent(width),
                y=0,
                height=_HEIGHT,
                class_=f"share s{share.colour}",
                data_path=share.name,
                data_bytes=share.bytes,
            )
        )
        left += width
        swatch = html.element(
            "svg",
            html.element("rect", width=12, height=12, rx=2, class_=f"s{share.colour}"),
            viewBox="0 0 12 12",
            class_="swatch",
            aria_hidden="true",
        )
        note = html.element("span", share.note, class_="note") if share.note else ""
        entries.append(
            html.element(
                "li", swatch, html.element("strong", share.name), f" {text}", note
            )
        )
    described = ", ".join(f"{s.name} {humanize.size(s.bytes)}" for s in shares[:6])
    return html.join(
        [
            html.plot(title, f"{described}.", _HEIGHT, *parts),
            html.element("ul", *entries, class_="legend shares"),
        ]
    )
