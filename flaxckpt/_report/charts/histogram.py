"""Histograms of values."""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt._util import html, humanize

_HEIGHT, _BOTTOM = 200, 26
_GAP = 0.08
"""The gap between bars, as a share of a bin."""


def histogram(title: str, edges: Sequence[float], counts: Sequence[int]) -> html.Markup:
    """Draws the number of values in each bin.

    Args:
        title: The title, for screen readers.
        edges: The edges of the bins, ascending; one more than there are bins.
        counts: The number of values in each bin.
    """
    largest = max(counts)
    bars = [_bar(n, edges, count, largest) for n, count in enumerate(counts) if count]
    ends = edges[0], edges[-1]
    places = [("0%", "tick"), ("100%", "tick end")]
    if ends[0] == ends[1] or len(edges) == 2:
        places = [("50%", "tick middle")]
    labels = [
        html.element("text", f"{value:.6g}", x=x, y=_HEIGHT - 8, class_=class_)
        for value, (x, class_) in zip(ends, places, strict=False)
    ]
    return html.plot(
        title,
        f"{sum(counts):,} values from {ends[0]:.6g} to {ends[1]:.6g}, at most"
        f" {largest:,} in a bin.",
        _HEIGHT,
        *bars,
        *labels,
    )


def _bar(number: int, edges: Sequence[float], count: int, largest: int) -> html.Markup:
    """Draws the bar of a bin; all bins are of equal width."""
    width = 100 / (len(edges) - 1)
    values = humanize.count(count, "value")
    tip = f"{edges[number]:.5g} to {edges[number + 1]:.5g}: {values}"
    height = max(1.0, (_HEIGHT - _BOTTOM) * count / largest)  # one value is seen, too
    return html.element(
        "rect",
        html.element("title", tip),
        x=html.percent((number + _GAP / 2) * width),
        y=html.px(_HEIGHT - _BOTTOM - height),
        width=html.percent((1 - _GAP) * width),
        height=html.px(height),
        class_="bar behind",
        data_count=count,
    )
