"""Charts of a metric over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flaxckpt import errors
from flaxckpt._report import data
from flaxckpt._report.charts import frame, points, scales
from flaxckpt._report.data import MetricValue
from flaxckpt._util import html, humanize

_TALL, _LOW = 320, 216
_TOP, _BOTTOM = 16, 26

_MARKERS = 150
"""With more points, only existing steps or, of too many, the best get markers."""

_PLACES = 400
"""The maximal number of points in a line."""

_MOST_VALUES = 2000
"""The maximal number of values that the script shows."""

_UNITS = 1000.0
"""The width of a line's own coordinates, which are stretched over the plot."""


def curve(
    name: str, series: Sequence[MetricValue], *, is_main: bool = False
) -> html.Markup:
    """Draws a metric as a line through its finite values, at least one.

    Args:
        name: The name of the metric.
        series: The values, by ascending step.
        is_main: True for a taller figure.
    """
    drawn = [point for point in series if math.isfinite(point.value)]
    steps = [point.step for point in drawn]
    values = [point.value for point in drawn]
    height = _TALL if is_main else _LOW
    bottom = height - _BOTTOM
    x = scales.Scale(min(steps), max(steps), 0.0, 100.0)
    linear = scales.linear_axis(values, bottom, _TOP)
    log = scales.log_axis(values, bottom, _TOP)
    axes = [linear] if log is None else [linear, log]
    description = (
        f"{humanize.count(len(drawn), 'value')} from step {min(steps)} to"
        f" {max(steps)}, from {min(values):.6g} to {max(values):.6g}."
    )
    plot = html.plot(
        f"{name} over steps",
        description,
        height,
        html.element("rect", width="100%", height=height, class_="ground"),
        *[_layer(name, series, x, axis, height) for axis in axes],
        frame.level(bottom, "baseline"),
        *frame.step_axis(x, bottom + 18, 11 if is_main else 6),
        tabindex=0,
        data_name=name,
        data_series=_data(drawn),
        data_x=f"{min(steps)},{max(steps)}",
        data_y=_ends(linear),
        data_log=None if log is None else _ends(log),
    )
    return html.element(
        "figure",
        _caption(name, series, drawn, has_log=log is not None),
        frame.frame(frame.vertical_axis(height, *axes), plot),
        class_="main" if is_main else None,
        data_metric=name,
    )


def _caption(
    name: str,
    series: Sequence[MetricValue],
    drawn: Sequence[MetricValue],
    *,
    has_log: bool,
) -> html.Markup:
    """Returns the name of a metric, and its best and last values of usable steps."""
    best = [point for point in drawn if point.best == "best"]
    last = data.last_good(series) or series[-1]
    facts = [_fact("best", point) for point in best[-1:]]
    facts.append(_fact("last", last))
    if deleted := sum(point.is_deleted for point in drawn):
        facts.append(f"{deleted:,} of {len(drawn):,} deleted since")
    if bad := [f"{point.step:,}" for point in drawn if point.is_bad]:
        steps = "step" if len(bad) == 1 else "steps"
        facts.append(f"{steps} {errors.first_few(bad, 3)} damaged or not readable")
    return html.element(
        "figcaption",
        html.element("strong", name),
        html.element(
            "span",
            html.element("span", ", ".join(facts), class_="facts"),
            html.element("output"),
            class_="reading",
        ),
        log_switch(name) if has_log else html.NOTHING,
    )


def _fact(what: str, point: MetricValue) -> str:
    value = f"{humanize.number(point.value)} at step {point.step:,}"
    return f"{what} {value}{_reservation(point)}"


def _reservation(point: MetricValue) -> str:
    return " (cannot be used)" if point.is_bad else ""


def log_switch(name: str) -> html.Markup:
    """Returns the button that makes the vertical axis of a metric logarithmic."""
    return html.element(
        "button",
        "log",
        type="button",
        data_action="log",
        aria_pressed="false",
        aria_label=f"Logarithmic axis for {name}",
        class_="control",
    )


def _ends(axis: scales.Axis) -> str:
    scale = axis.scale
    return f"{scale.low!r},{scale.high!r},{html.px(scale.start)},{html.px(scale.stop)}"


def _data(drawn: Sequence[MetricValue]) -> html.Markup:
    """Returns the values for the script: step, value and kind of each."""
    most = _thin_out(drawn, _MOST_VALUES)
    values = [f"{p.step},{p.value:.6g},{_kind(p)[0]}" for p in most]
    return html.Markup(" ".join(values))  # other texts are shortened


def _kind(point: MetricValue) -> str:
    """Returns `unusable`, `best`, `among the best`, `deleted`, `kept` or `goes`."""
    if point.is_bad:
        return "unusable"
    if point.best in ("best", "among the best"):
        return point.best
    return _existence(point)


def _existence(point: MetricValue) -> str:
    """Returns `deleted`, `kept` or `goes`."""
    if point.is_deleted:
        return "deleted"
    return "kept" if point.stays else "goes"


# ---- the marks --------------------------------------------------------------------


def _layer(
    name: str,
    series: Sequence[MetricValue],
    x: scales.Scale,
    y: scales.Axis,
    height: float,
) -> html.Markup:
    """Draws what depends on the vertical axis: grid, line and points."""
    drawn = [point for point in series if math.isfinite(point.value)]
    marks = [_draw_point(name, p, x, y) for p in _with_markers(drawn)]
    return html.element(
        "g",
        *frame.grid(y),
        line(series, x, y, height),
        *marks,
        *_best_labels(drawn, x, y),
        class_=frame.kind(y),
    )


def line(
    series: Sequence[MetricValue], x: scales.Scale, y: scales.Axis, height: float
) -> html.Markup:
    """Draws a line through values, with gaps at those that are not finite.

    Args:
        series: The values, by ascending step.
        x: Maps steps to percent.
        y: The vertical axis.
        height: The height of the plot, in pixels.
    """
    pieces: list[list[str]] = [[]]
    for point in _thin_out(series, _PLACES):
        if math.isfinite(point.value):
            across = x(point.step) / 100 * _UNITS
            pieces[-1].append(f"{across:.1f},{y(point.value):.1f}")
        elif pieces[-1]:
            pieces.append([])
    has_deleted = any(point.is_deleted for point in series)
    lines = [
        html.element(
            "polyline",
            points=html.Markup(" ".join(piece)),
            class_="curve faint" if has_deleted else "curve",
        )
        for piece in pieces
        if len(piece) > 1
    ]
    return html.element(
        "svg",
        *lines,
        viewBox=f"0 0 {html.px(_UNITS)} {html.px(height)}",
        preserveAspectRatio="none",
        width="100%",
        height=html.px(height),
        class_="place",
    )


def _thin_out(series: Sequence[MetricValue], most: int) -> Sequence[MetricValue]:
    """Thins out many points to the lowest and highest of each small group."""
    size = 2 * -(-len(series) // most)
    if size <= 2:
        return series
    thinned: list[MetricValue] = []
    for n in range(0, len(series), size):
        few = series[n : n + size]
        ends = {min(few, key=lambda p: p.value), max(few, key=lambda p: p.value)}
        thinned += [point for point in few if point in ends]
    return thinned


def _with_markers(drawn: Sequence[MetricValue]) -> Sequence[MetricValue]:
    existing = [point for point in drawn if not point.is_deleted]
    best = [p for p in drawn if p.best or p.is_bad or p in (drawn[0], drawn[-1])]
    shown = (drawn, existing, best)
    return next((some for some in shown if len(some) <= _MARKERS), best[-_MARKERS:])


def is_going(point: MetricValue) -> bool:
    """Returns True for a step that can be read, and that no reason keeps."""
    return _kind(point) == "goes"


_FATES = {
    "unusable": "damaged, or not readable",
    "deleted": "deleted since",
    "goes": "would be deleted",
}


def _draw_point(
    name: str, point: MetricValue, x: scales.Scale, y: scales.Axis
) -> html.Markup:
    kind = _kind(point)
    fate = _FATES.get(kind, "kept" if point.stays else "would be deleted")
    best = f", {point.best}" if point.best else ""
    return points.draw_point(
        x(point.step),
        y(point.value),
        2.6 if point.is_deleted else 4.0,
        f"step {point.step}: {name} {point.value:.6g} ({fate}{best})",
        _existence(point) if kind == "among the best" else kind,
        data_step=point.step,
        data_value=point.value,
        data_kept="yes" if point.stays else "no",
        data_best=point.best,
    )


def _best_labels(
    drawn: Sequence[MetricValue], x: scales.Scale, y: scales.Axis
) -> list[html.Markup]:
    """Labels the best value or the extremes."""
    parts = []
    for point in drawn:
        if point.best in (None, "among the best"):
            continue
        is_right = x(point.step) > 60
        is_low = y(point.value) > (y.scale.start + y.scale.stop) / 2
        is_best = point.best == "best"
        parts.append(
            html.element(
                "text",
                f"{point.best} {humanize.number(point.value)}{_reservation(point)}",
                x=html.percent(x(point.step)),
                y=html.px(y(point.value) + (17 if is_low else -10)),
                dx=4 if is_right else 8 if x(point.step) < 5 else -4,
                class_=f"{'best' if is_best else 'extreme'}-label"
                f"{' end' if is_right else ''}",
            )
        )
    return parts
