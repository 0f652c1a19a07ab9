"""The frame of a plot: axes in sizes that do not depend on the width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flaxckpt._report.charts import scales
from flaxckpt._util import html

_LETTER = 7.0
"""Pixels of a digit of a tick, at most."""


def frame(axis: html.Markup, plot: html.Markup) -> html.Markup:
    """Returns a plot with its vertical axis on the left."""
    return html.element("div", axis, plot, class_="chart")


def axis_width(*axes: scales.Axis) -> float:
    """Returns the pixels that the labels of vertical axes take."""
    texts = [text for axis in axes for _, text in axis.ticks]
    return max(24.0, _LETTER * max(map(len, texts), default=0) + 8)


def vertical_axis(
    height: float, *axes: scales.Axis, width: float | None = None
) -> html.Markup:
    """Draws the labels of a vertical axis; of several, the style sheet shows one.

    Args:
        height: The height in pixels.
        *axes: The axes.
        width: The width in pixels; by default as wide as the labels.
    """
    width = axis_width(*axes) if width is None else width
    return html.element(
        "svg",
        *[html.element("g", *_labels(axis, width), class_=kind(axis)) for axis in axes],
        width=html.px(width),
        height=html.px(height),
        class_="axis",
        aria_hidden="true",
    )


def kind(axis: scales.Axis) -> str:
    """Returns the class of what belongs to an axis: `linear` or `log`."""
    return "log" if axis.is_log else "linear"


def _labels(axis: scales.Axis, width: float) -> Iterable[html.Markup]:
    for value, text in axis.ticks:
        yield html.label(width - 7, axis(value) + 4, text, class_="tick end")


def grid(axis: scales.Axis) -> list[html.Markup]:
    """Draws a line for each tick of a vertical axis."""
    return [level(axis(value), "grid") for value, _ in axis.ticks]


def level(y: float, class_: str) -> html.Markup:
    """Draws a line across a plot."""
    return html.element(
        "line", x1="0%", x2="100%", y1=html.px(y), y2=html.px(y), class_=class_
    )


def step_axis(
    x: scales.Scale, y: float, count: int = 9, *, steps: Sequence[int] | None = None
) -> list[html.Markup]:
    """Labels steps below a plot; narrow plots show every other label.

    Args:
        x: Maps steps to percent.
        y: The baseline of the labels.
        count: About how many labels there are.
        steps: The steps to label instead of round ones.
    """
    chosen = scales.whole_ticks(x.low, x.high, count) if steps is None else steps
    parts = []
    for n, (step, text) in enumerate(
        zip(chosen, scales.step_labels(chosen), strict=True)
    ):
        extra = " extra" if n % 2 and len(chosen) > 3 else ""
        parts.append(
            html.element(
                "text",
                text,
                x=html.percent(x(step)),
                y=html.px(y),
                class_=f"tick middle{extra}",
            )
        )
    return parts
