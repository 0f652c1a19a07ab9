"""A strip with a mark for each existing step, and a faint one for each deleted step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from flaxckpt._report.charts import frame, points, scales
from flaxckpt._util import html, humanize

_HEIGHT, _MIDDLE = 58, 20
FEW = 60
"""Up to as many existing steps are points; more are lines."""

_APART = 0.2
"""Percent of the width: the least distance of two marks."""


def strip(
    kept: Mapping[int, str], gone: Sequence[int], kinds: Mapping[int, str]
) -> html.Markup:
    """Draws a line with a mark for each step.

    Args:
        kept: Existing step -> its description.
        gone: Deleted steps.
        kinds: Step -> `best` or `unusable`, which are always drawn.
    """
    steps = [*kept, *gone]
    x = scales.Scale(min(steps), max(steps), 0.0, 100.0)
    parts = [frame.level(_MIDDLE, "baseline")]
    parts += [_tick(x(step), 5, "gone", None) for step in _apart(gone, (), x)]
    for step in _apart(kept, kinds, x):
        text = f"step {step:,}: {kept[step]}"
        if step in kinds or len(kept) <= FEW:
            kind = kinds.get(step, "kept")
            parts.append(
                points.draw_point(x(step), _MIDDLE, 5, text, kind, data_step=step)
            )
        else:
            parts.append(_tick(x(step), 9, "exists", text, data_step=step))
    parts += frame.step_axis(x, _MIDDLE + 28, 12)
    plot = html.plot(
        "Existing and deleted steps",
        f"{humanize.count(len(kept), 'existing step')}, {len(gone)} deleted, from step"
        f" {min(steps)} to {max(steps)}.",
        _HEIGHT,
        *parts,
    )
    return html.element("div", plot, class_="chart bare")


def _tick(
    x: float, half: float, class_: str, tooltip: str | None, **data: object
) -> html.Markup:
    title = html.NOTHING if tooltip is None else html.element("title", tooltip)
    across = html.percent(x)
    return html.element(
        "line",
        title,
        x1=across,
        x2=across,
        y1=html.px(_MIDDLE - half),
        y2=html.px(_MIDDLE + half),
        class_=class_,
        **data,
    )


def _apart(
    steps: Collection[int], first: Collection[int], x: scales.Scale
) -> list[int]:
    """Returns one step for each place, ascending: the newest, of `first` if any."""
    places: dict[int, int] = {}
    for step in sorted(steps):
        place = round(x(step) / _APART)
        if step in first or places.get(place) not in first:
            places[place] = step
    return sorted(places.values())
