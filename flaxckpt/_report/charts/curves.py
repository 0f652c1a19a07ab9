"""Charts of a metric over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flaxckpt._report.charts import points, scales
from flaxckpt._report.data import MetricValue
from flaxckpt._util import html, humanize

_WIDTH, _HEIGHT = 320, 206
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 14, 34
_MARKERS = 150
"""With more points, only the best points and the ends get markers."""

_PLACES = 400
"""The maximal number of points in a line."""


def curve(name: str, series: Sequence[MetricValue]) -> html.Markup:
    """Draws a metric as a line through its finite values, at least one."""
    drawn = [point for point in series if math.isfinite(point.value)]
    steps = [point.step for point in drawn]
    values = [point.value for point in drawn]
    low, high = _range(values)
    x = scales.Scale(min(steps), max(steps), _LEFT + 6, _WIDTH - _RIGHT)
    y = scales.Scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    description = (
        f"{humanize.count(len(drawn), 'value')} from step {min(steps)} to"
        f" {max(steps)}, from {min(values):.6g} to {max(values):.6g}."
    )
    return html.picture(
        f"{name} over steps",
        description,
        (_WIDTH, _HEIGHT),
        *_axes(x, y),
        *_lines(series, x, y),
        *[_draw_point(name, point, x, y) for point in _with_markers(drawn)],
        *_best_labels(drawn, x, y),
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        wider = abs(low) / 10 or 1.0
        return low - wider, high + wider
    room = high / 6 - low / 6  # for the labels of the extremes
    return low - room, high + room


def _axes(x: scales.Scale, y: scales.Scale) -> list[html.Markup]:
    parts = []
    for tick in scales.ticks(y.low, y.high, 5):
        at = y(tick)
        parts.append(html.line(_LEFT, at, _WIDTH - _RIGHT, at, "grid"))
        shown = f"{tick:.4g}" if abs(tick) > 1e-12 * (y.high - y.low) else "0"
        parts.append(html.label(_LEFT - 6, at + 4, shown, class_="tick end"))
    bottom = _HEIGHT - _BOTTOM
    parts.append(html.line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, "baseline"))
    for step in scales.whole_ticks(x.low, x.high, 5):
        shown = scales.short(step)
        parts.append(html.label(x(step), bottom + 16, shown, class_="tick middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(html.label(middle, _HEIGHT - 3, "step", class_="tick middle"))
    return parts


def _lines(
    series: Sequence[MetricValue], x: scales.Scale, y: scales.Scale
) -> list[html.Markup]:
    """Draws the line, with gaps at values that are not finite."""
    pieces: list[list[str]] = [[]]
    for point in _thin_out(series):
        if math.isfinite(point.value):
            pieces[-1].append(f"{x(point.step):.1f},{y(point.value):.1f}")
        elif pieces[-1]:
            pieces.append([])
    return [
        html.element("polyline", points=html.Markup(" ".join(piece)), class_="curve")
        for piece in pieces
        if len(piece) > 1
    ]


def _thin_out(series: Sequence[MetricValue]) -> Sequence[MetricValue]:
    """Thins out many points to the lowest and highest of each small group."""
    size = 2 * -(-len(series) // _PLACES)
    if size <= 2:
        return series
    thinned: list[MetricValue] = []
    for n in range(0, len(series), size):
        few = series[n : n + size]
        ends = {min(few, key=lambda p: p.value), max(few, key=lambda p: p.value)}
        thinned += [point for point in few if point in ends]
    return thinned


def _with_markers(drawn: Sequence[MetricValue]) -> Sequence[MetricValue]:
    if len(drawn) <= _MARKERS:
        return drawn
    return [p for p in drawn if p.best or p in (drawn[0], drawn[-1])][-_MARKERS:]


def _draw_point(
    name: str, point: MetricValue, x: scales.Scale, y: scales.Scale
) -> html.Markup:
    fate = "kept" if point.stays else "would be deleted"
    best = f", {point.best}" if point.best else ""
    kind = "kept" if point.stays else "goes"
    return points.draw_point(
        x(point.step),
        y(point.value),
        3.5,
        f"step {point.step}: {name} {point.value:.6g} ({fate}{best})",
        "best" if point.best in ("best", "among the best") else kind,
        data_step=point.step,
        data_value=point.value,
        data_kept="yes" if point.stays else "no",
        data_best=point.best,
    )


def _best_labels(
    drawn: Sequence[MetricValue], x: scales.Scale, y: scales.Scale
) -> list[html.Markup]:
    """Labels the best value or the extremes, if space allows."""
    parts = []
    for point in drawn:
        if point.best in (None, "among the best"):
            continue
        across = x(point.step)
        is_right = across > _WIDTH * 0.6
        is_low = y(point.value) > (_TOP + _HEIGHT - _BOTTOM) / 2
        down = y(point.value) + (18 if is_low else -10)
        parts.append(
            html.label(
                across + (4 if is_right else -4),
                down,
                f"{point.best} {point.value:.4g}",
                class_=f"{'best' if point.best == 'best' else 'extreme'}-label"
                f"{' end' if is_right else ''}",
            )
        )
    return parts
