"""`flaxckpt top`."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from flaxckpt import errors
from flaxckpt.cli import _app, _output
from flaxckpt.cli._parameters import Option

if TYPE_CHECKING:
    from flaxckpt._inspect.history import SavedStep
    from flaxckpt._report.data import MetricValue, Report

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_COLUMNS = 48
_RECENT = 20
"""Saves that tell when the next one is due."""


@_app.verb
def top(
    path: _app.PathArgument,
    once: Annotated[
        bool, Option("--once", help="Show the run once, instead of until Ctrl-C.")
    ] = False,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Shows how a run goes, until Ctrl-C.

    Shows a verdict, the newest and the best step, the metric that ranks steps as a
    curve, how long training waited for saves, and when the next save is due. Exits with
    1 if the run has diverged, a step is damaged, or the last save has failed.

    Example:
      flaxckpt top runs/7
    """
    from rich import console, live, text

    from flaxckpt import _report

    def look(known: Report | None) -> Report:
        checks = () if known is None else known.integrity
        options = _report.ReportOptions(
            diff=False, step_format=step_format, known=checks
        )
        return _report.gather(path, options)

    def draw(report: Report) -> text.Text:
        return text.Text("\n".join(describe(report, time.time())))

    report = look(None)
    if not report.is_run:
        raise errors.OptionError(f"{path} is a single checkpoint: pass a run directory")
    if json:
        _output.print_document(_document(report))
    elif once or not _output.is_terminal():
        print("\n".join(describe(report, time.time())))
    else:
        with (
            contextlib.suppress(KeyboardInterrupt),
            live.Live(
                draw(report), console=console.Console(), auto_refresh=False
            ) as on,
        ):

            def update() -> None:
                nonlocal report
                report = look(report)
                on.update(draw(report), refresh=True)

            _app.repeat(update)
    verdict = _report.flight_recorder.judge(report)
    return _app.FINDING if verdict.state == "bad" else _app.SUCCESS


def _document(report: Report) -> dict[str, object]:
    from flaxckpt import _report

    verdict = _report.flight_recorder.judge(report)
    expected = _expect_save(report.saves)
    stalls = report.stalls
    return {
        "ok": verdict.state != "bad",
        "verdict": verdict.text,
        "newest": max((s.step for s in report.steps if s.step), default=None),
        "blocked_secs": stalls[-1].blocked_secs if stalls else None,
        "next_step": None if expected is None else expected.step,
        "next_time": None if expected is None else expected.time,
    }


def describe(report: Report, now: float) -> list[str]:
    """Returns the lines on a run at the time `now`, in seconds since 1970."""
    from flaxckpt import _report

    verdict = _report.flight_recorder.judge(report)
    sign = {"good": "●", "unverified": "●", "bad": "✖", "idle": "○"}[verdict.state]
    metrics = {
        _output.shorten_name(errors.printable(name)): points
        for name, points in list(report.metrics.items())[:_MOST_METRICS]
    }
    width = max(map(len, ["newest", *metrics]))
    room = _output.terminal_width() - width - 4 if _output.is_terminal() else None
    rows = [
        ("newest", _newest(report, now)),
        ("saves", _stalls(report.stalls)),
        *[(name, curve(points, room)) for name, points in metrics.items()],
        ("next", _next_save(report.saves, now)),
    ]
    name = _output.shorten_path(report.path)
    lines = _output.wrap(f"{name}  {sign} {verdict.text}", "  ")
    for name, text in filter(operator.itemgetter(1), rows):
        lines += _output.wrap(f"  {name:{width}}  {text}", " " * (width + 4))
    return lines


_MOST_METRICS = 3


def _newest(report: Report, now: float) -> str:
    newest = next((step for step in reversed(report.steps) if step.step), None)
    if newest is None:
        return ""
    parts = [f"step {newest.step:,}"]
    if newest.created is not None:
        parts.append(f"saved {_ago(now - newest.created)} ago")
    if newest.bytes is not None:
        parts.append(_output.size(newest.bytes))
    return ", ".join(parts)


def _ago(secs: float) -> str:
    secs = max(0.0, secs)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= length:
            return f"{secs / length:.0f} {unit}"
    return f"{secs:.0f} s"


def curve(points: Sequence[MetricValue], room: int | None = None) -> str:
    """Returns a metric as characters, from the first step to the last.

    A value that is not finite is a `!`. The text has `room` for so many characters.
    """
    if not points:
        return ""
    ends = " → ".join(_output.number(points[n].value, 4) for n in (0, -1))
    free = _CURVE_COLUMNS if room is None else room - len(ends) - 2
    size = -(-len(points) // max(1, min(_CURVE_COLUMNS, free)))
    parts = [points[n : n + size] for n in range(0, len(points), size)]
    finite = [point.value for point in points if math.isfinite(point.value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    drawn = "".join(_bar([p.value for p in part], low, high) for part in parts)
    return f"{drawn}  {ends}"


def _bar(values: Sequence[float], low: float, high: float) -> str:
    if not all(map(math.isfinite, values)):
        return "!"
    mean = statistics.fmean(values)
    part = (mean - low) / (high - low) if high > low else 0.0
    return _BARS[min(len(_BARS) - 1, int(part * len(_BARS)))]


def _stalls(saves: Sequence[SavedStep]) -> str:
    waits = [save.blocked_secs or 0.0 for save in saves]
    if not waits:
        return ""
    last, most = _output.secs(waits[-1]), _output.secs(max(waits))
    return f"training waited {last} for the last, {most} at most"


class _ExpectedSave(NamedTuple):
    """The save that comes next, if a run goes on as before.

    Attributes:
        time: When it is due, in seconds since 1970.
        every_secs: The interval of the saves before.
        last: When the last save began.
    """

    step: int
    time: float
    every_secs: float
    last: float


def _expect_save(saves: Sequence[SavedStep]) -> _ExpectedSave | None:
    """Returns the next save by the intervals of the last ones; None of few saves."""
    recent = [(save.step, save.began) for save in saves[-_RECENT:]]
    if len(recent) < 3:
        return None
    pairs = [*itertools.pairwise(recent)]
    secs = statistics.median(after[1] - before[1] for before, after in pairs)
    steps = statistics.median(after[0] - before[0] for before, after in pairs)
    step, began = recent[-1]
    return _ExpectedSave(step + int(steps), began + secs, secs, began)


def _next_save(saves: Sequence[SavedStep], now: float) -> str:
    expected = _expect_save(saves)
    if expected is None:
        return ""
    step, wait = f"step {expected.step:,}", expected.time - now
    if wait >= 0:
        return f"{step} in {_ago(wait)}"
    if -wait < max(expected.every_secs, 2 * _app.POLL_SECS):
        return f"{step} is due"
    secs = expected.every_secs
    every = _ago(secs) if secs >= 60 else _output.secs(secs)
    return f"no save for {_ago(now - expected.last)}, one came every {every} before"
