"""The points of charts: a diamond for the best, a circle for others."""

from __future__ import annotations

from flaxckpt._util import html


def draw_point(
    x: float, y: float, radius: float, tooltip: str, kind: str, **data: object
) -> html.Markup:
    """Draws a point.

    Args:
        x: The coordinate from the left.
        y: The coordinate from the top.
        radius: The radius of a circle; a diamond is larger.
        tooltip: The text of its tooltip.
        kind: `best`, `kept` or `goes`.
        **data: The data of the point, `data_step=…`.
    """
    title = html.element("title", tooltip)
    class_ = f"point {kind}"
    if kind != "best":
        center = {"cx": html.px(x), "cy": html.px(y)}
        return html.element("circle", title, **center, r=radius, class_=class_, **data)
    size = radius + 3
    corners = [(x, y - size), (x + size, y), (x, y + size), (x - size, y)]
    places = " ".join(f"{across:.1f},{down:.1f}" for across, down in corners)
    return html.element("polygon", title, points=places, class_=class_, **data)
