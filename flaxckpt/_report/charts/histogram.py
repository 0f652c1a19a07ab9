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
    x = scales.Scale(edges[0], edges[-1], 0.0, 100.0)
    largest = max(counts)
    y = scales.Axis(scales.Scale(0.0, scales.top(largest), bottom, _TOP), False, ())
    y = y._replace(ticks=_count_ticks(y.scale.high))
    bars = [
        _bar(edges[n], edges[n + 1], count, x, y)
        for n, count in enumerate(counts)
        if count
    ]
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
        *_value_labels(x, bottom + 18),
    )
    return frame.frame(frame.vertical_axis(_HEIGHT, y), plot)


def _bar(
    low: float, high: float, count: int, x: scales.Scale, y: scales.Axis
) -> html.Markup:
    width = x(high) - x(low)
    tip = f"{low:.5g} to {high:.5g}: {humanize.count(count, 'value')}"
    top = min(y(count), y.scale.start - 1)  # a single value is seen, too
    return html.element(
        "rect",
        html.element("title", tip),
        x=html.percent(x(low) + width * _GAP / 2),
        y=html.px(top),
        width=html.percent(width * (1 - _GAP)),
        height=html.px(y.scale.start - top),
        class_="bar behind",
        data_count=count,
    )


def _count_ticks(high: float) -> list[tuple[float, str]]:
    found = [tick for tick in scales.ticks(0.0, high, 4) if tick == int(tick)]
    return [(tick, scales.short(tick)) for tick in found]


def _value_labels(x: scales.Scale, y: float) -> list[html.Markup]:
    """Labels round values below the bars; values in the margins would be cut off."""
    found = scales.ticks(x.low, x.high, 6)
    if x.high - x.low <= abs(x.low) * _NARROW:  # all values are equal
        text = f"{x.low:.6g}"
        return [html.element("text", text, x="50%", y=html.px(y), class_="tick middle")]
    return [
        html.element(
            "text", text, x=html.percent(x(tick)), y=html.px(y), class_="tick middle"
        )
        for tick, text in zip(found, scales.labels(found), strict=True)
        if _MARGIN < x(tick) < 100 - _MARGIN
    ]


_MARGIN = 3.0
"""Percent."""

_NARROW = 1e-12
"""Of the values: labels cannot tell the ends of such a range apart."""
