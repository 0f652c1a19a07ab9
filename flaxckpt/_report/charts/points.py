"""The points of plots: a diamond for the best, a circle for others."""

from __future__ import annotations

from flaxckpt._util import html


def draw_point(
    x: float, y: float, radius: float, tooltip: str, kind: str, **data: object
) -> html.Markup:
    """Draws a point.

    Args:
        x: The coordinate from the left, in percent.
        y: The coordinate from the top, in pixels.
        radius: The radius of a circle; a diamond is larger.
        tooltip: The text of its tooltip.
        kind: `best`, `kept`, `goes`, `deleted` or `unusable`.
        **data: The data of the point, `data_step=…`.
    """
    title = html.element("title", tooltip)
    class_ = f"point {kind}"
    center = {"cx": html.percent(x), "cy": html.px(y)}
    if kind != "best":
        return html.element("circle", title, **center, r=radius, class_=class_, **data)
    # A polygon has no coordinates in percent: a small picture has, around its middle.
    size = radius + 3
    corners = f"0,{-size} {size},0 0,{size} {-size},0"
    diamond = html.element("polygon", title, points=corners, class_=class_, **data)
    return html.element("svg", diamond, x=html.percent(x), y=html.px(y), class_="place")
