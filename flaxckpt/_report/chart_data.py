"""The data of the charts: numbers and short texts, which the script of the page draws.

Nothing in them is markup; the filter `tojson` fits them into a page.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flaxckpt import errors
from flaxckpt._report import flight_recorder, templates
from flaxckpt._report.data import LeafHistory, MetricValue, Report, last_good
from flaxckpt._types import JSON
from flaxckpt._util import folding, html, humanize

MOST_METRICS = 12
"""Further metrics are in the tables only."""

_MOST_POINTS = 1200
"""Points of a metric; of more, each part of the steps keeps its extremes."""

_MOST_LAYERS, _MOST_COLUMNS = 64, 150
"""The size of the heat map."""

_MOST_RIDGES = 64
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def chart_data(report: Report) -> dict[str, JSON]:
    """Returns what the script draws of a run.

    Returns:
        `metrics`: of each metric its name, mode, steps `x` and values `y`; None is not
        finite. `steps`: of each step that was ever saved, `x`, its time `t`, its
        `state`, a letter of `_letter`, and `why` some were deleted. `saves`: steps,
        seconds blocked and in the background. `events`: step, kind and text. `layers`:
        the heat map, or None. Metrics and saves without `x` have values at all steps.
    """
    data: dict[str, Any] = {
        "metrics": [curve(*each) for each in [*report.drawn.items()][:MOST_METRICS]],
        "steps": _steps(report),
        "saves": _saves(report),
        "events": _events(report),
        "layers": _layers(report),
    }
    for each in (data["saves"], *data["metrics"]):
        if each["x"] == data["steps"]["x"]:
            del each["x"]
    return data


def curve(name: str, points: Sequence[MetricValue]) -> dict[str, Any]:
    """Returns a metric over the steps, from values by ascending step."""
    shown = _thin(points)
    last = last_good(points) or points[-1]
    modes = [point.mode for point in points if point.mode is not None]
    return {
        "name": errors.printable(name),
        "mode": modes[-1] if modes else None,
        "x": [point.step for point in shown],
        "y": [_number(point.value) for point in shown],
        "state": "".join(
            _letter(p.is_deleted, p.is_bad, p.mode is not None, p.stays) for p in shown
        ),
        "facts": _facts(points, last),
    }


def _facts(points: Sequence[MetricValue], last: MetricValue) -> str:
    """Returns the best and the last value of a metric in a phrase."""
    drawn = [point for point in points if math.isfinite(point.value)]
    best = [point for point in drawn if point.mode is not None]
    facts = [
        f"{what} {humanize.number(point.value)} at step {point.step:,}"
        + (" (cannot be used)" if point.is_bad else "")
        for what, point in (*(("best", each) for each in best[-1:]), ("last", last))
    ]
    if bad := [f"{point.step:,}" for point in drawn if point.is_bad]:
        steps = "step" if len(bad) == 1 else "steps"
        facts.append(f"{steps} {errors.first_few(bad, 3)} damaged or not readable")
    return ", ".join(facts)


def _letter(is_deleted: bool, is_bad: bool, is_best: bool, is_kept: bool) -> str:
    """Returns the state of a step, whose meaning is in `charts.js`."""
    if is_deleted:
        return "d"
    return "x" if is_bad else "b" if is_best else "k" if is_kept else "g"


def _thin(points: Sequence[MetricValue]) -> Sequence[MetricValue]:
    """Returns about `_MOST_POINTS` of many points.

    Each part of the steps keeps its extremes, the best, and the first not finite.
    """
    if len(points) <= _MOST_POINTS:
        return points
    size = -(-len(points) // (_MOST_POINTS // 3))
    kept: list[MetricValue] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = [point for point in part if math.isfinite(point.value)]
        odd = [point for point in part if not math.isfinite(point.value)][:1]
        best = [point for point in part if point.is_ranked or point.mode is not None]
        value = operator.attrgetter("value")
        ends = [pick(finite, key=value) for pick in (min, max) if finite]
        chosen = {point.step for point in (*ends, *odd, *best)}
        kept += [point for point in part if point.step in chosen]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def _number(value: float | None, digits: int = 6) -> float | None:
    """Returns a rounded number for JSON; None for one that is not finite."""
    is_none = value is None or not math.isfinite(value)
    return None if is_none else float(f"{value:.{digits}g}")


def _steps(report: Report) -> dict[str, JSON]:
    best = {point.step for _, point in report.bests}
    kept = {step.step for step in report.steps if step.why or not report.policies}
    states = [
        _letter(not s.exists, s.step in report.faults, s.step in best, s.step in kept)
        for s in report.history
    ]
    return {
        "x": (steps := [saved.step for saved in report.history]),
        "t": _times(report, steps),
        "state": "".join(states),
        "why": _reasons(report),
    }


def _times(report: Report, steps: Iterable[int]) -> list[JSON]:
    """Returns the milliseconds from the first save to ascending steps, ascending."""
    saved = {each.step: each.saved for each in report.history if each.saved}
    first = min(saved.values(), default=0.0)
    times = (round(1e3 * (saved.get(step, first) - first)) for step in steps)
    # A run that went back has left newer steps of an earlier time.
    return [*itertools.accumulate(times, max)]


def _reasons(report: Report) -> dict[str, JSON]:
    """Returns deleted step -> why; the commonest reason is under "" for all others."""
    why = {
        str(saved.step): errors.printable(saved.reason or "not recorded")
        for saved in report.history
        if not saved.exists
    }
    if not why:
        return {}
    [(common, _)] = collections.Counter(why.values()).most_common(1)
    others = {step: reason for step, reason in why.items() if reason != common}
    return {"": common, **others}


def _saves(report: Report) -> dict[str, JSON]:
    durable = [save for save in report.saves if save.outcome == "durable"]
    rows = [(s.step, s.blocked_secs, s.total_secs) for s in durable[-_MOST_POINTS:]]
    return {
        "x": [step for step, *_ in rows],
        "blocked": [_number(blocked, 3) for _, blocked, _ in rows],
        "behind": [
            None if total is None else _number(max(0.0, total - (blocked or 0.0)), 3)
            for _, blocked, total in rows
        ],
    }


def _events(report: Report) -> list[JSON]:
    """Returns what happened to a run, by step, with a text for each."""
    found: list[tuple[int, str, str]] = []
    for resume in flight_recorder.find_resumes(report):
        if resume.stopped is not None and resume.stopped >= resume.step:
            text = f"the process ended after the save of step {resume.stopped:,}"
            found.append((resume.stopped, "stopped", text))
        text = f"resumed from step {resume.step:,}, {humanize.when(resume.time)}"
        found.append((resume.step, "resumed", text))
    for event in report.happened:
        if event.step is not None and event.kind in _HAPPENINGS:
            text = f"step {event.step:,}: {event.kind.replace('_', ' ')}"
            if why := event.details.get("reason") or event.details.get("error"):
                text += f", {errors.printable(str(why))}"
            found.append((event.step, event.kind, text))
    for save in report.saves:
        if save.failure is not None:
            text = f"step {save.step:,}: {errors.printable(save.failure)}"
            found.append((save.step, "failed", text))
    if (diverged := flight_recorder.find_divergence(report)) is not None:
        name = errors.printable(diverged.metric)
        text = f"{name} is not finite from step {diverged.step:,} on"
        found.append((diverged.step, "diverged", text))
    # An end comes before its resume.
    ordered = sorted(found, key=operator.itemgetter(0))[-_MOST_POINTS:]
    return [[*each] for each in ordered]


_HAPPENINGS = ("preempted", "fell_back", "found_damaged", "found_good")

# ---- several runs -----------------------------------------------------------------


_LIVE_SECS = 600.0


def draw_runs(
    metrics: Mapping[str, Mapping[str, Sequence[MetricValue]]],
    reports: Mapping[str, Report],
    groups: Mapping[str, Sequence[str]],
    is_whole: bool,
) -> html.Markup:
    """Returns the section with the metrics of several runs, a line for each run.

    Of several groups, the script also draws the mean of each.

    The oldest run gets its colour first, so that newer ones do not change it. Runs that
    have saved in the last minutes are drawn strongest. `is_whole` is False while
    reports are missing.
    """

    def age(run: str) -> float:
        return min((save.began for save in reports[run].saves), default=math.inf)

    def draw(run: str, points: Sequence[MetricValue]) -> dict[str, JSON]:
        report, line = reports[run], curve(run, points)
        is_live = any(report.made - s.began < _LIVE_SECS for s in report.saves[-1:])
        return line | {"live": is_live, "t": _times(report, line["x"])}

    drawn = [
        {"name": errors.printable(name), "lines": [draw(*r) for r in runs.items()]}
        for name, runs in metrics.items()
    ]
    names = [*map(errors.printable, sorted(reports, key=age))]
    shown = {run for lines in metrics.values() for run in lines}
    named = [[*map(errors.printable, runs)] for runs in groups.values()]
    pairs = [*zip(groups, named, strict=True)] if len(groups) > 1 else []
    data = {"names": names, "metrics": drawn, "is_whole": is_whole, "groups": pairs}
    return templates.render("runs.html", runs=sorted(shown), data={"runs": data})


# ---- layers -----------------------------------------------------------------------


def _layers(report: Report) -> dict[str, JSON] | None:
    """Returns the relative change of the norms of each layer at each save."""
    layers = report.layers
    steps = sorted({n for each in layers.values() for leaf in each for n in leaf.norms})
    found = {name: flight_recorder.find_changes(layers[name]) for name in layers}
    changes = {name: each for name, each in found.items() if each}
    if not changes:
        return None
    ranked = sorted(changes, key=lambda name: -max(changes[name].values()))
    size = -(-(len(steps) - 1) // _MOST_COLUMNS)
    columns = [steps[start : start + size] for start in range(1, len(steps), size)]
    shown = {*ranked[:_MOST_LAYERS]}
    names = folding.order_numbers([name for name in layers if name in shown])
    shown_names = [*map(errors.printable, names)]
    shared = os.path.commonprefix(shown_names)  # noqa: RUF071 - it is cut at a slash
    ridges = [(leaf, name) for name in names for leaf in layers[name]]
    return {
        "first": steps[0],
        "x": [column[-1] for column in columns],
        "names": shown_names,
        "shared": shared[: shared.rfind("/") + 1],
        "cells": [
            "".join(_cell(changes[name], column) for column in columns)
            for name in names
        ],
        "hidden": len(layers) - len(shown),
        "ridges": [_ridges(*each) for each in ridges[:_MOST_RIDGES]],
    }


def _cell(changes: Mapping[int, float], column: Iterable[int]) -> str:
    """Returns a digit of base 36 for a change, `!` if not finite, `.` for none."""
    value = max((changes[n] for n in column if n in changes), default=None)
    if value is None:
        return "."
    if not math.isfinite(value):
        return "!"
    return _DIGITS[round(35 * templates.log_share(value))]


def _ridges(leaf: LeafHistory, layer: str) -> JSON:
    """Returns the histograms of a leaf: each bin a digit of base 36."""
    rows: list[JSON] = []
    for step, sample in leaf.drawn.items():
        most = max(sample.histogram, default=0) or 1
        bins = "".join(_DIGITS[round(35 * n / most)] for n in sample.histogram)
        rows.append([step, _number(sample.min, 4), _number(sample.max, 4), bins])
    return {
        "path": errors.printable(leaf.path),
        "layer": errors.printable(layer),
        "rows": rows,
    }
