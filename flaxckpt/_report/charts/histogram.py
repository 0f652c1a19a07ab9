"""Histograms of values."""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt._report.charts import frame, scales
from flaxckpt._util import html, humanize

_HEIGHT = 200
_TOP, _BOTTOM = 12, 26
_GAP = 0.08
"""The gap between bars, as a share of a bin."""


def histogram(title: str, edges: Sequence[float], counts: Sequence[int]) -> html.Markup:
    """Draws the number of values in each bin.

    Args:
        title: The title, for screen readers.
        edges: The edges of the bins, ascending; one more than there are bins.
        counts: The number of values in each bin.
    """
    bottom = _HEIGHT - _BOTTOM
    largest = max(counts)
    y = scales.Axis(scales.Scale(0.0, scales.top(largest), bottom, _TOP), False, ())
    y = y._replace(ticks=_count_ticks(y.scale.high))
    bars = [_bar(n, edges, count, y) for n, count in enumerate(counts) if count]
    description = (
        f"{sum(counts):,} values from {edges[0]:.6g} to {edges[-1]:.6g}, at most"
        f" {largest:,} in a bin."
    )
    plot = html.plot(
        title,
        description,
        _HEIGHT,
        *frame.grid(y),
        *bars,
        frame.level(bottom, "baseline"),
        *_value_labels(edges, bottom + 18),
    )
    return frame.frame(frame.vertical_axis(_HEIGHT, y), plot)


def _bar(
    number: int, edges: Sequence[float], count: int, y: scales.Axis
) -> html.Markup:
    """Draws the bar of a bin; all bins are of equal width."""
    width = 100 / (len(edges) - 1)
    tip = (
        f"{edges[number]:.5g} to {edges[number + 1]:.5g}:"
        f" {humanize.count(count, 'value')}"
    )
    top = min(y(count), y.scale.start - 1)  # a single value is seen, too
    return html.element(
        "rect",
        html.element("title", tip),
        x=html.percent((number + _GAP / 2) * width),
        y=html.px(top),
        width=html.percent((1 - _GAP) * width),
        height=html.px(y.scale.start - top),
        class_="bar behind",
        data_count=count,
    )


def _count_ticks(high: float) -> list[tuple[float, str]]:
    found = [tick for tick in scales.ticks(0.0, high, 4) if tick == int(tick)]
    return [(tick, scales.short(tick)) for tick in found]


def _value_labels(edges: Sequence[float], y: float) -> list[html.Markup]:
    """Labels round values below the bars; values in the margins would be cut off."""
    place = {"y": html.px(y), "class_": "tick middle"}
    if len(edges) == 2:  # all values are equal
        return [html.element("text", f"{edges[0]:.6g}", x="50%", **place)]
    x = scales.Scale(edges[0], edges[-1], 0.0, 100.0)
    found = scales.ticks(x.low, x.high, 6)
    return [
        html.element("text", text, x=html.percent(x(tick)), **place)
        for tick, text in zip(found, scales.labels(found), strict=True)
        if _MARGIN < x(tick) < 100 - _MARGIN
    ]


_MARGIN = 3.0
"""Percent."""
