"""A strip with a point for each existing step, and a line for each deleted step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from flaxckpt._report.charts import points, scales
from flaxckpt._util import html, humanize

_HEIGHT, _MIDDLE, _LEFT, _RIGHT = 62, 22, 14, 14
_MOST_GONE = 400
_LEAST_APART = 2.5


def strip(
    kept: Mapping[int, str], gone: Sequence[int], best: Collection[int], width: float
) -> html.Markup:
    """Draws a line with a point for each existing step.

    Args:
        kept: Existing step -> its description; at least one.
        gone: Deleted steps.
        best: Steps with the best value of a metric.
        width: The width of the picture.
    """
    steps = [*kept, *gone]
    x = scales.Scale(min(steps), max(steps), _LEFT, width - _RIGHT)
    parts = [html.line(_LEFT, _MIDDLE, width - _RIGHT, _MIDDLE, "baseline")]
    places = {html.px(x(step)) for step in sorted(gone)[-_MOST_GONE:]}
    parts += [
        html.element(
            "line", x1=at, x2=at, y1=_MIDDLE - 5, y2=_MIDDLE + 5, class_="gone"
        )
        for at in sorted(places, key=float)
    ]
    for step in _drawable(kept, best, x):
        kind = "best" if step in best else "kept"
        tooltip = f"step {step}: {kept[step]}"
        parts.append(
            points.draw_point(x(step), _MIDDLE, 5, tooltip, kind, data_step=step)
        )
    for step in scales.whole_ticks(x.low, x.high, max(2, int(width / 90))):
        shown = scales.short(step)
        parts.append(html.label(x(step), _MIDDLE + 28, shown, class_="tick middle"))
    return html.picture(
        "Existing and deleted steps",
        f"{humanize.count(len(kept), 'existing step')}, {len(gone)} deleted, from step"
        f" {min(steps)} to {max(steps)}.",
        (width, _HEIGHT),
        *parts,
    )


def _drawable(
    kept: Mapping[int, str], best: Collection[int], x: scales.Scale
) -> list[int]:
    """Returns one step for each place, ascending: the best there, else the newest."""
    places: dict[int, int] = {}
    for step in sorted(kept):
        place = round(x(step) / _LEAST_APART)
        if step in best or places.get(place) not in best:
            places[place] = step
    return sorted(places.values())
