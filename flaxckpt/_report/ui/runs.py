"""The view on a directory of runs: a table, and their metrics side by side."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence

from flaxckpt import errors
from flaxckpt._inspect.listing import Step
from flaxckpt._report import flight_recorder, templates
from flaxckpt._report.content import Content
from flaxckpt._report.data import MetricValue, Report, last_good
from flaxckpt._report.ui import feeds, frame, overview
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._util import html, humanize

_MOST_CURVES = 12
_MOST_COLUMNS = 2
_MOST_BEST = 4
_MOST_NAMED = 3
_MOST_RUNS = 60
"""More runs are only listed by name."""

_LIVE_SECS = 600.0


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the first page: all runs, or the only one."""
    places = workspace.places
    if places.is_single:
        (place,) = places.runs.values()
        return overview.show(workspace, place)
    return frame.render("ui/all_runs.html", workspace, None, version="")


def listed(workspace: Workspace) -> list[Location]:
    """Returns the runs and checkpoints that are described."""
    return list(workspace.places.runs.values())[:_MOST_RUNS]


def news(workspace: Workspace, query: Query) -> feeds.News:
    """Returns the last change of a `run`, or of all runs, also of new ones.

    Raises:
        CheckpointNotFoundError: The run does not exist any more.
    """
    workspace.places.look_again()
    workspace.verifications.look_again()
    verified = workspace.verifications.version
    if name := query.text("run"):
        latest = workspace.feeds.news([workspace.places.find(name)])
        return latest._replace(version=f"{latest.version}.{verified}")
    latest = workspace.feeds.news(listed(workspace))
    version = f"{workspace.places.version}.{latest.version}.{verified}"
    return latest._replace(version=version)


def content(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the metrics of all runs, and a table of the runs.

    Names the runs whose report is not ready; the page updates when it is.
    """
    version = news(workspace, query).version
    reports: dict[str, Report] = {}
    unread: dict[str, Exception] = {}
    for place in listed(workspace):
        try:
            snapshot = workspace.feeds.available(place)
        except (errors.CheckpointError, OSError) as error:
            unread[place.name] = error
        else:
            if snapshot is not None:
                report = workspace.verifications.update(place, snapshot.report)
                reports[place.name] = report
    names = [place.name for place in listed(workspace)]
    metrics = _metrics(reports)
    live = {run for run, report in reports.items() if _is_live(report)}
    curves = dict([*metrics.items()][:_MOST_CURVES])
    checkpoints = [report for report in reports.values() if not report.is_run]
    single = [name for each in checkpoints for s in each.steps for name in s.metrics]
    shown = list(dict.fromkeys([*metrics, *single]))[:_MOST_COLUMNS]
    ranked, order = _rank(reports)
    return templates.render(
        "ui/runs.html",
        version=version,
        waiting=len(names) - len(reports) - len(unread),
        curves=flight_recorder.draw_runs(curves, names, live) if metrics else "",
        order=order,
        names=shown,
        rows=[_describe(run, reports[run], shown) for run in ranked],
        unread=unread,
        more=list(workspace.places.runs)[_MOST_RUNS:],
    )


def _metrics(reports: Mapping[str, Report]) -> dict[str, dict[str, list[MetricValue]]]:
    """Returns metric -> run -> its finite values, the metrics of most runs first."""
    metrics: dict[str, dict[str, list[MetricValue]]] = {}
    for run, report in reports.items():
        for name, values in report.metrics.items():
            finite = [point for point in values if math.isfinite(point.value)]
            if finite:
                metrics.setdefault(name, {})[run] = finite
    return dict(sorted(metrics.items(), key=lambda item: -len(item[1])))


def _is_live(report: Report) -> bool:
    """Returns True if a run has saved in the last minutes."""
    return any(report.made - save.began < _LIVE_SECS for save in report.saves[-1:])


def _bests(report: Report) -> list[tuple[str, MetricValue]]:
    """Returns each metric that a policy ranks steps by, with its best value."""
    return [
        (name, point)
        for name, points in report.metrics.items()
        for point in points
        if point.mode is not None and not point.is_bad
    ]


def _rank(reports: Mapping[str, Report]) -> tuple[list[str], str]:
    """Returns the runs by the metric that most of them rank steps by, and their order.

    Runs without a value come last, by name.
    """
    bests = {run: dict(_bests(report)) for run, report in reports.items()}
    names = collections.Counter(name for best in bests.values() for name in best)
    if not names:
        return sorted(reports), "By name"
    [(metric, _)] = names.most_common(1)
    values = {run: best[metric] for run, best in bests.items() if metric in best}
    is_max = any(best.mode == "max" for best in values.values())
    sign = -1 if is_max else 1
    ranked = sorted(
        values,
        key=lambda run: (sign * values[run].value, bool(reports[run].faults), run),
    )
    end = "highest" if is_max else "lowest"
    others = sorted(reports.keys() - values.keys())
    return ranked + others, f"By the best {errors.printable(metric)}, {end} first"


def _describe(run: str, report: Report, names: Sequence[str]) -> Content:
    """Returns the row of a run, with its newest good step."""
    good = [step for step in report.steps if step.step not in report.faults]
    newest = good[-1] if good else None
    bests = [
        f"{name} {humanize.number(best.value)}, step {best.step:,}"
        for name, best in _bests(report)
    ]
    if len(bests) > _MOST_BEST:
        bests[_MOST_BEST:] = [f"and {len(bests) - _MOST_BEST:,} more"]
    return {
        "run": run,
        "report": report,
        "newest": newest,
        "bests": bests,
        "lasts": [_last(report, newest, name) for name in names],
        "state": _state(report, newest),
    }


def _last(report: Report, newest: Step | None, name: str) -> float | None:
    """Returns the metric of a checkpoint, or of the newest step that can be used."""
    if not report.is_run:
        return None if newest is None else newest.metrics.get(name)
    last = last_good(report.metrics.get(name, ()))
    return None if last is None else last.value


def _state(report: Report, newest: Step | None) -> str:
    """Describes the damage of a run: the steps after the newest good one are named."""
    faults = report.faults
    diverged = flight_recorder.find_divergence(report)
    if diverged is not None and not faults:
        return f"diverged at step {diverged.step:,}"
    if not faults or not report.is_run:
        return next(iter(faults.values()), "")
    counts = collections.Counter(faults.values())
    text = ", ".join(humanize.count(n, f"{why} step") for why, n in counts.items())
    if newest is None or newest.step is None:
        return f"{text}: no step can be used"
    first = newest.step
    newer = [n for n in faults if n is not None and n > first]
    if newer:
        named = errors.first_few([f"{n:,}" for n in newer], _MOST_NAMED)
        text += f"; after step {first:,}: {named}"
    return text
