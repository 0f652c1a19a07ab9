"""A timeline of saves: blocked time and background time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from flaxckpt._report.charts import frame, scales
from flaxckpt._report.data import Save
from flaxckpt._util import html, humanize

_MOST_BARS = 250
"""With more saves, several share a bar."""

_FEWEST_PLACES = 12
"""Fewer bars do not fill the width."""

_MOST_LABELS = 10

_MOST_EVENTS = 200

_PANEL, _TOP = 104, 24
_STEPS, _LANE = 22, 44


class TimelineEvent(NamedTuple):
    """Another event with its time: `restored`, `failed`."""

    time: float
    kind: str
    text: str


def timeline(saves: Sequence[Save], events: Sequence[TimelineEvent]) -> html.Markup:
    """Draws two rows of bars for the saves above a time line.

    Args:
        saves: The saves, in order; at least one.
        events: Further events on the time line.
    """
    groups = _grouped(saves)
    blocked = [max(save.blocked_secs or 0.0 for save in group) for group in groups]
    behind = [max(save.behind_secs or 0.0 for save in group) for group in groups]
    parts = [
        _panel("training waited", "blocked", groups, blocked),
        _panel("written in the background", "behind", groups, behind),
        _lane(saves, events),
    ]
    return html.element("div", *parts, class_="timeline")


class _Bars(NamedTuple):
    """The places of bars, in percent of the width."""

    number: int

    @property
    def pitch(self) -> float:
        """The distance between bars."""
        return 100 / max(self.number, _FEWEST_PLACES)

    def left(self, n: int) -> float:
        """Returns the left edge of the `n`th bar."""
        return n * self.pitch

    @property
    def width(self) -> float:
        """The width of a bar; many bars touch each other."""
        return self.pitch * (0.74 if self.number <= 100 else 1.0)


def _grouped(saves: Sequence[Save]) -> list[Sequence[Save]]:
    size = -(-len(saves) // _MOST_BARS)
    return [saves[n : n + size] for n in range(0, len(saves), size)]


def _panel(
    title: str, name: str, groups: Sequence[Sequence[Save]], values: Sequence[float]
) -> html.Markup:
    """Draws a row of bars with its axis; `values` are the heights."""
    top = scales.top(max(values))
    unit, write = scales.seconds(top)
    bottom = _TOP + _PANEL
    scale = scales.Scale(0.0, top, bottom, _TOP)
    ticks = [(tick, write(tick)) for tick in scales.ticks(0.0, top, 4)]
    axis = scales.Axis(scale, False, ticks)
    bars = _Bars(len(groups))
    parts = [html.label(0, _TOP - 9, f"{title}, {unit}", class_="axis-title")]
    parts += frame.grid(axis)
    for n, (group, value) in enumerate(zip(groups, values, strict=True)):
        parts += _bar(title, name, group, value, bars.left(n), bars.width, axis)
    parts.append(frame.level(bottom, "baseline"))
    height = bottom + _STEPS
    parts += _step_labels(groups, bars, bottom + 16)
    plot = html.plot(
        f"Saves: {title}",
        f"{humanize.count(sum(map(len, groups)), 'save')}, the oldest first;"
        f" {humanize.secs(max(values))} at most.",
        height,
        *parts,
    )
    return frame.frame(frame.vertical_axis(height, axis), plot)


def _bar(
    title: str,
    name: str,
    group: Sequence[Save],
    value: float,
    left: float,
    width: float,
    axis: scales.Axis,
) -> list[html.Markup]:
    bottom, at = axis.scale.start, axis(value)
    has_failed = any(save.has_failed for save in group)
    bar = html.element(
        "rect",
        html.element("title", _describe(group, title, humanize.secs(value))),
        x=html.percent(left),
        y=html.px(min(at, bottom - 0.8)),
        width=html.percent(width),
        height=html.px(max(bottom - at, 0.8)),
        class_=f"bar {name}{' failed' if has_failed else ''}",
        data_step=group[-1].step,
        data_count=len(group),
        data_secs=value,
    )
    if not has_failed or name != "behind":
        return [bar]
    cross = html.element(
        "text",
        "×",  # noqa: RUF001
        x=html.percent(left + width / 2),
        y=html.px(bottom - 5),
        class_="cross",
    )
    return [bar, cross]


def _describe(group: Sequence[Save], title: str, value: str) -> str:
    first, last = group[0], group[-1]
    if first is last:
        failure = f"; {last.failure}" if last.failure else ""
        return f"step {last.step}: {title} {value}{failure}"
    steps = f"steps {first.step} to {last.step}, {len(group)} saves"
    return f"{steps}: {title} at most {value}"


def _step_labels(
    groups: Sequence[Sequence[Save]], bars: _Bars, y: float
) -> list[html.Markup]:
    """Labels a few bars with their steps; a step that was saved again only once."""
    every = max(1, -(-len(groups) // _MOST_LABELS))
    if len(groups) <= _FEWEST_PLACES:
        every = max(1, -(-len(groups) // _FEWEST_PLACES))
    places: dict[int, float] = {}
    for n in range(0, len(groups), every):
        step = groups[n][-1].step
        if step is not None:
            places.setdefault(step, bars.left(n) + bars.width / 2)
    texts = scales.step_labels(list(places))
    return [
        html.element(
            "text",
            text,
            x=html.percent(x),
            y=html.px(y),
            class_=f"tick middle{' extra' if n % 2 else ''}",
        )
        for n, (x, text) in enumerate(zip(places.values(), texts, strict=True))
    ]


# ---- the time line ----------------------------------------------------------------


def _lane(saves: Sequence[Save], events: Sequence[TimelineEvent]) -> html.Markup:
    """Draws the time line of saves and events."""
    times = [save.began for save in saves] + [event.time for event in events]
    scale = scales.Scale(min(times), max(times), 0.0, 100.0)
    parts = [frame.level(12, "baseline")]
    places = {round(scale(save.began), 1) for save in saves}
    parts += [_save_mark(x) for x in sorted(places)]
    parts += [_event_mark(e, scale(e.time)) for e in events[-_MOST_EVENTS:]]
    ends = (min(times), max(times))
    texts = [humanize.when(time, humanize.TO_THE_SECOND) for time in ends]
    for (text, _), x, anchor in zip(
        itertools.groupby(texts), ("0%", "100%"), ("", " end"), strict=False
    ):
        parts.append(
            html.element("text", text, x=x, y=_LANE - 6, class_=f"tick{anchor}")
        )
    plot = html.plot(
        "When each save began", f"From {texts[0]} to {texts[-1]}.", _LANE, *parts
    )
    width = 36
    name = html.label(width - 7, 16, "when", class_="tick end")
    axis = html.element(
        "svg", name, width=width, height=_LANE, class_="axis", aria_hidden="true"
    )
    return frame.frame(axis, plot)


def _save_mark(x: float) -> html.Markup:
    across = html.percent(x)
    return html.element("line", x1=across, x2=across, y1=5, y2=19, class_="save")


def _event_mark(event: TimelineEvent, x: float) -> html.Markup:
    glyph = html.element(
        "text",
        _GLYPHS.get(event.kind, "•"),
        x=html.percent(x),
        y=17,
        class_="happening",
    )
    title = html.element("title", f"{event.kind}: {event.text}")
    return html.element("g", title, glyph, class_=event.kind)


_GLYPHS = {"restored": "▲", "preempted": "■", "fell_back": "◆", "failed": "×"}  # noqa: RUF001
