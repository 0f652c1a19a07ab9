"""Small pictures in the cells of tables: a line over steps, the bars of a histogram."""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt._util import html

_WIDTH, _HEIGHT = 120.0, 22.0
_MOST_PLACES = 60
_LARGEST = 1e300
"""The differences of larger values may overflow."""


def line(points: Sequence[tuple[int, float]], description: str) -> html.Markup:
    """Draws finite values over steps; few of them for many steps."""
    finite = [(step, value) for step, value in points if abs(value) < _LARGEST]
    every = max(1, -(-len(finite) // _MOST_PLACES))
    shown = [*finite[:-1:every], *finite[-1:]]
    if not shown:
        return html.NOTHING
    steps = [step for step, _ in shown]
    values = [value for _, value in shown]
    across = (max(steps) - min(steps)) or 1
    up = (max(values) - min(values)) or 1.0
    places = [
        f"{(step - min(steps)) / across * _WIDTH:.1f},"
        f"{_HEIGHT - 2 - (value - min(values)) / up * (_HEIGHT - 4):.1f}"
        for step, value in shown
    ]
    drawn = html.element(
        "polyline", points=html.Markup(" ".join(places)), class_="curve"
    )
    return _picture(drawn, description)


def bars(counts: Sequence[int], description: str) -> html.Markup:
    """Draws a bar for each count."""
    most = max(counts, default=0)
    if not 0 < most < _LARGEST:
        return html.NOTHING
    pitch = _WIDTH / len(counts)
    drawn = [
        html.element(
            "rect",
            x=html.px(n * pitch),
            y=html.px(_HEIGHT * (1 - count / most)),
            width=html.px(pitch * 0.85),
            height=html.px(_HEIGHT * count / most),
            class_="bar behind",
        )
        for n, count in enumerate(counts)
        if count > 0
    ]
    return _picture(html.join(drawn), description)


def _picture(drawn: html.Markup, description: str) -> html.Markup:
    return html.element(
        "svg",
        html.element("title", description),
        drawn,
        viewBox=f"0 0 {html.px(_WIDTH)} {html.px(_HEIGHT)}",
        role="img",
        aria_label=description,
        class_="small",
    )
