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

_FEWEST_PLACES = 6
"""Fewer bars do not fill the width."""

_MOST_LABELS = 12
_LANE_AXIS = 36.0
"""Pixels of the name of the time line."""

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
    panels = [
        _Panel("training waited", "blocked", groups, blocked),
        _Panel("written in the background", "behind", groups, behind),
    ]
    # One width, so that the bars of a save are below each other.
    axes = [panel.axis()[1] for panel in panels]
    width = max(_LANE_AXIS, frame.axis_width(*axes))
    parts = [*[panel.draw(width) for panel in panels], _lane(saves, events, width)]
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


class _Panel(NamedTuple):
    """A row of bars.

    Attributes:
        title: The title.
        name: The class of the bars.
        groups: The saves of each bar.
        values: The heights, in seconds.
    """

    title: str
    name: str
    groups: Sequence[Sequence[Save]]
    values: Sequence[float]

    def axis(self) -> tuple[str, scales.Axis]:
        """Returns the unit and the vertical axis."""
        top = scales.top(max(self.values))
        unit, write = scales.seconds(top)
        scale = scales.Scale(0.0, top, _TOP + _PANEL, _TOP)
        ticks = [(tick, write(tick)) for tick in scales.ticks(0.0, top, 4)]
        return unit, scales.Axis(scale, False, ticks)

    def draw(self, width: float) -> html.Markup:
        """Draws the bars beside an axis of `width` pixels."""
        unit, axis = self.axis()
        bottom = _TOP + _PANEL
        bars = _Bars(len(self.groups))
        title = f"{self.title}, {unit}"
        parts = [html.label(0, _TOP - 9, title, class_="axis-title")]
        parts += frame.grid(axis)
        for n, (group, value) in enumerate(zip(self.groups, self.values, strict=True)):
            left = bars.left(n)
            parts += _bar(self.title, self.name, group, value, left, bars.width, axis)
        parts.append(frame.level(bottom, "baseline"))
        height = bottom + _STEPS
        parts += _step_labels(self.groups, bars, bottom + 16)
        plot = html.plot(
            f"Saves: {self.title}",
            f"{humanize.count(sum(map(len, self.groups)), 'save')}, the oldest first;"
            f" {humanize.secs(max(self.values))} at most.",
            height,
            *parts,
        )
        return frame.frame(frame.vertical_axis(height, axis, width=width), plot)


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
    """Labels a few bars with a step; a step that was saved again only once.

    Of many bars, those with round steps are labelled, if the steps ascend.
    """
    last = [group[-1].step for group in groups]
    labelled = [(n, step) for n, step in enumerate(last) if step is not None]
    if len(groups) > _MOST_LABELS:
        every = -(-len(groups) // _MOST_LABELS)
        labelled = _round_steps(groups) or labelled[::every]
    places: dict[int, float] = {}
    for n, step in labelled:
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


def _round_steps(groups: Sequence[Sequence[Save]]) -> list[tuple[int, int]]:
    """Returns the bars with round steps, and these steps; empty for too few."""
    bars = {
        save.step: n
        for n, group in enumerate(groups)
        for save in group
        if save.step is not None
    }
    steps = list(bars)
    if len(steps) < 2 or steps != sorted(steps):
        return []
    ticks = scales.whole_ticks(steps[0], steps[-1], _MOST_LABELS - 2)
    found = [(bars[tick], tick) for tick in ticks if tick in bars]
    return found if len(found) > 2 else []


# ---- the time line ----------------------------------------------------------------


def _lane(
    saves: Sequence[Save], events: Sequence[TimelineEvent], width: float
) -> html.Markup:
    """Draws the time line of saves and events, beside an axis of `width` pixels."""
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
    name = html.label(width - 7, 16, "when", class_="tick end")
    axis = html.element(
        "svg",
        name,
        width=html.px(width),
        height=_LANE,
        class_="axis",
        aria_hidden="true",
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


_GLYPHS = {
    "restored": "▲",
    "preempted": "■",
    "fell_back": "◆",
    "found_damaged": "▼",
    "found_good": "△",
    "failed": "×",  # noqa: RUF001
}
