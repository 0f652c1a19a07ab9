"""A timeline of saves: blocked time and background time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt._report.charts import scales
from flaxckpt._report.data import Save
from flaxckpt._util import html, humanize

_LEAST_PITCH = 3.5
"""The least distance between bars; with more saves, several share a bar."""

_LEAST_LABELLED = 20.0
"""The label of a narrower first bar would overlap the name of the axis."""

_MOST_EVENTS = 200

_LEFT, _RIGHT = 58, 10
_PANEL, _GAP, _TOP = 92, 40, 24
_LANE = 26


class TimelineEvent(NamedTuple):
    """Another event with its time: `restored`, `failed`."""

    time: float
    kind: str
    text: str


def timeline(
    saves: Sequence[Save], events: Sequence[TimelineEvent], width: float
) -> html.Markup:
    """Draws two rows of bars for the saves above a time line.

    Args:
        saves: The saves, in order; at least one.
        events: Further events on the time line.
        width: The width of the picture; a narrow picture has the same font size.
    """
    groups = _grouped(saves, int((width - _LEFT - _RIGHT) / _LEAST_PITCH))
    height = _TOP + 2 * _PANEL + 2 * _GAP + _LANE + 22
    place = _Place(_LEFT, width - _RIGHT, len(groups))
    blocked = [max(save.blocked_secs or 0.0 for save in group) for group in groups]
    behind = [max(save.behind_secs or 0.0 for save in group) for group in groups]
    second = _TOP + _PANEL + _GAP
    return html.picture(
        "Timeline of saves",
        f"{humanize.count(len(saves), 'save')}, the oldest first: how long"
        " training waited (top), how long the background wrote (middle), and when each"
        " save began (bottom).",
        (width, height),
        *_panel("training waited", "blocked", groups, blocked, place, _TOP),
        *_panel("written in the background", "behind", groups, behind, place, second),
        *_step_labels(groups, place, second + _PANEL + 18),
        *_lane(saves, events, width, second + _PANEL + _GAP),
    )


class _Place(NamedTuple):
    """The positions of bars between `start` and `stop`."""

    start: float
    stop: float
    bars: int

    @property
    def pitch(self) -> float:
        """The distance between bars; few bars do not fill the whole width."""
        return min((self.stop - self.start) / self.bars, 44.0)

    def left(self, n: int) -> float:
        """Returns the left edge of the `n`th bar."""
        return self.start + n * self.pitch

    @property
    def width(self) -> float:
        """The width of a bar."""
        return max(self.pitch * 0.72, min(self.pitch, 1.2))


def _grouped(saves: Sequence[Save], most: int) -> list[Sequence[Save]]:
    size = -(-len(saves) // most)
    return [saves[n : n + size] for n in range(0, len(saves), size)]


def _panel(
    title: str,
    name: str,
    groups: Sequence[Sequence[Save]],
    values: Sequence[float],
    place: _Place,
    y: float,
) -> list[html.Markup]:
    """Draws a row of bars with its axis; `values` are the heights."""
    top = scales.top(max(values))
    unit, write = scales.seconds(top)
    scale = scales.Scale(0.0, top, y + _PANEL, y)
    parts = [html.label(place.start, y - 8, f"{title}, {unit}", class_="axis-title")]
    for tick in scales.ticks(0.0, top, 4):
        at = scale(tick)
        parts.append(html.line(place.start, at, place.stop, at, "grid"))
        parts.append(
            html.label(place.start - 6, at + 4, write(tick), class_="tick end")
        )
    for n, (group, value) in enumerate(zip(groups, values, strict=True)):
        at = scale(value)
        has_failed = any(save.has_failed for save in group)
        parts.append(
            html.element(
                "rect",
                html.element("title", _describe(group, title, humanize.secs(value))),
                x=html.px(place.left(n)),
                y=html.px(min(at, y + _PANEL - 0.8)),
                width=html.px(place.width),
                height=html.px(max(y + _PANEL - at, 0.8)),
                class_=f"bar {name}{' failed' if has_failed else ''}",
                data_step=group[-1].step,
                data_count=len(group),
                data_secs=value,
            )
        )
        if has_failed and name == "behind":
            x = place.left(n) + place.width / 2
            parts.append(html.label(x, y + _PANEL - 5, "×", class_="cross"))  # noqa: RUF001
    parts.append(html.line(place.start, y + _PANEL, place.stop, y + _PANEL, "baseline"))
    return parts


def _describe(group: Sequence[Save], title: str, value: str) -> str:
    first, last = group[0], group[-1]
    if first is last:
        failure = f"; {last.failure}" if last.failure else ""
        return f"step {last.step}: {title} {value}{failure}"
    steps = f"steps {first.step} to {last.step}, {len(group)} saves"
    return f"{steps}: {title} at most {value}"


def _step_labels(
    groups: Sequence[Sequence[Save]], place: _Place, y: float
) -> list[html.Markup]:
    most = max(2, int((place.stop - place.start) / 70))
    every = max(1, -(-len(groups) // most))
    parts = [html.label(place.start - 6, y, "step", class_="tick end")]
    for n in range(0, len(groups), every):
        step = groups[n][-1].step
        if step is not None:
            is_tight = n == 0 and place.pitch < _LEAST_LABELLED
            x = place.left(n) + (0 if is_tight else place.width / 2)
            class_ = "tick" if is_tight else "tick middle"
            parts.append(html.label(x, y, scales.short(step), class_=class_))
    return parts


def _lane(
    saves: Sequence[Save], events: Sequence[TimelineEvent], width: float, y: float
) -> list[html.Markup]:
    """Draws the time line of saves and events."""
    times = [save.began for save in saves] + [event.time for event in events]
    scale = scales.Scale(min(times), max(times), _LEFT + 4, width - _RIGHT - 4)
    middle = y + _LANE / 2
    parts = [
        html.label(_LEFT - 6, middle + 4, "when", class_="tick end"),
        html.line(_LEFT, middle, width - _RIGHT, middle, "baseline"),
    ]
    ticks = {html.px(scale(save.began)) for save in saves}
    parts += [
        html.element("line", x1=x, x2=x, y1=y + 5, y2=y + _LANE - 5, class_="save")
        for x in sorted(ticks, key=float)
    ]
    for event in events[-_MOST_EVENTS:]:
        glyph = _GLYPHS.get(event.kind, "•")
        tooltip = html.element("title", f"{event.kind}: {event.text}")
        parts.append(
            html.element(
                "g",
                tooltip,
                html.label(scale(event.time), middle + 5, glyph, class_="happening"),
                class_=event.kind,
            )
        )
    bottom = y + _LANE + 14
    first, last = (
        humanize.when(time, humanize.TO_THE_SECOND) for time in (min(times), max(times))
    )
    parts.append(html.label(_LEFT, bottom, first, class_="tick"))
    if last != first:
        parts.append(html.label(width - _RIGHT, bottom, last, class_="tick end"))
    return parts


_GLYPHS = {"restored": "▲", "preempted": "■", "fell_back": "◆", "failed": "×"}  # noqa: RUF001
