"""The view on a directory of runs: a table, and their metrics side by side."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from flaxckpt import errors
from flaxckpt._inspect.listing import Step
from flaxckpt._report import data, flight_recorder, tables
from flaxckpt._report.data import MetricValue, Report
from flaxckpt._report.ui import feeds, frame, overview
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Query, Workspace, address
from flaxckpt._util import html, humanize

_MOST_CURVES = 12
_MOST_COLUMNS = 2
_MOST_BEST = 4
_MOST_RUNS = 60
"""More runs are only listed by name."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the first page: all runs, or the only one."""
    places = workspace.places
    if places.is_single:
        (place,) = places.runs.values()
        return overview.show(workspace, place)
    content = html.element(
        "div",
        html.element("div", data_version="", hidden=""),
        _reading(len(places.runs)),
        id="runs",
        hx_get="/runs",
        hx_trigger="load, run-changed from:body",
        hx_swap="morph:innerHTML",
    )
    name = places.root.name or str(places.root)
    return frame.page(workspace, name, content, version="")


def _reading(count: int) -> html.Markup:
    what = humanize.count(count, "run or checkpoint", "runs and checkpoints")
    return frame.message(f"Reading {what} …")


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
    names = [place.name for place in listed(workspace)]
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
    waiting = len(names) - len(reports) - len(unread)
    metrics = _metrics(reports)
    checkpoints = [report for report in reports.values() if not report.is_run]
    single = [name for each in checkpoints for s in each.steps for name in s.metrics]
    shown = list(dict.fromkeys([*metrics, *single]))[:_MOST_COLUMNS]
    ranked, order = _rank(reports)
    rows = [_row(run, reports[run], shown) for run in ranked]
    rows += [_unread_row(run, error, shown) for run, error in unread.items()]
    more = list(workspace.places.runs)[_MOST_RUNS:]
    return html.join(
        [
            html.element("div", data_version=version, hidden=""),
            _reading(waiting) if waiting else html.NOTHING,
            _metrics_section(metrics, names, _live(reports)),
            html.element(
                "section",
                html.element("h2", "Runs"),
                tables.table(order, _columns(shown), rows, what="runs"),
                _more(more),
                id="all-runs",
            ),
        ]
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


def _metrics_section(
    metrics: Mapping[str, Mapping[str, Sequence[MetricValue]]],
    runs: Sequence[str],
    live: Collection[str],
) -> html.Markup:
    """Returns the metrics of all runs, and buttons that show and hide runs.

    Args:
        metrics: Metric -> run -> its values.
        runs: The names of all runs; the place of a name decides its colour.
        live: The runs that have saved a moment ago.
    """
    if not metrics:
        return html.NOTHING
    shown = dict([*metrics.items()][:_MOST_CURVES])
    return flight_recorder.draw_runs(shown, runs, live)


def _rank(reports: Mapping[str, Report]) -> tuple[list[str], str]:
    """Returns the runs by the metric that most of them rank steps by, and their order.

    Runs without a value come last, by name.
    """
    bests = {
        run: {p.name: p for p in _bests(report)} for run, report in reports.items()
    }
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


class _Best(NamedTuple):
    """The best value of a metric that a policy ranks steps by."""

    name: str
    value: float
    step: int
    mode: str


def _bests(report: Report) -> list[_Best]:
    return [
        _Best(name, point.value, point.step, point.mode)
        for name, points in report.metrics.items()
        for point in points
        if point.mode is not None and not point.is_bad
    ]


def _live(reports: Mapping[str, Report]) -> set[str]:
    """Returns the runs that have saved in the last minutes."""
    return {
        run
        for run, report in reports.items()
        if any(report.made - save.began < _LIVE_SECS for save in report.saves[-1:])
    }


_LIVE_SECS = 600.0

# ---- the table --------------------------------------------------------------------


def _columns(names: Sequence[str]) -> list[tables.Column]:
    column = tables.Column
    return [
        column("run"),
        column("steps", is_number=True),
        column("newest", is_number=True),
        column("best"),
        *[column(f"last {name}", is_number=True) for name in names],
        column("saved"),
        column("size", is_number=True),
        column("state", is_wide=True),
    ]


def _row(run: str, report: Report, names: Sequence[str]) -> tables.TableRow:
    cell = tables.TableCell
    faults = report.faults
    good = [step for step in report.steps if step.step not in faults]
    newest = good[-1] if good else None
    saved = None if newest is None else newest.created
    number = None if newest is None else newest.step
    cells = [
        html.element("a", run, href=address("/run", run=run)),
        f"{len(report.steps):,}" if report.is_run else "checkpoint",
        "" if number is None else f"{number:,}",
        _best(report),
        *[_last(report, name) for name in names],
        "" if saved is None else cell(html.moment(saved), saved),
        "" if report.bytes is None else cell(humanize.size(report.bytes), report.bytes),
        _state(report, newest),
    ]
    data = {"data_run": run}
    return tables.TableRow(cells, data, "bad" if faults else None)


def _best(report: Report) -> html.Markup:
    """Returns a line for each metric with a policy: its best value, and the step."""
    lines = [
        f"{best.name} {humanize.number(best.value)}, step {best.step:,}"
        for best in _bests(report)
    ]
    if len(lines) > _MOST_BEST:
        lines[_MOST_BEST:] = [f"and {len(lines) - _MOST_BEST:,} more"]
    return html.join([html.element("div", line) for line in lines])


def _last(report: Report, name: str) -> object:
    """Returns the metric of a checkpoint, or of the newest step that can be used."""
    if report.is_run:
        last = data.last_good(report.metrics.get(name, ()))
        value = None if last is None else last.value
    else:
        good = [step for step in report.steps if step.step not in report.faults]
        value = good[-1].metrics.get(name) if good else None
    if value is None:
        return ""
    return tables.TableCell(humanize.number(value), value)


def _state(report: Report, newest: Step | None) -> str:
    """Describes the damage of a run: the steps after the newest good one are named.

    Args:
        report: The report on the run.
        newest: The newest good step, or None.
    """
    faults = report.faults
    diverged = flight_recorder.find_divergence(report)
    if diverged is not None and not faults:
        return f"diverged at step {diverged.step:,}"
    if not faults or not report.is_run:
        return next(iter(faults.values()), "")
    steps = [step.step for step in report.steps if step.step is not None]
    first = None if newest is None else newest.step
    newer = [n for n in steps if n in faults and first is not None and n > first]
    counts = collections.Counter(faults.values())
    text = ", ".join(f"{humanize.count(n, f'{why} step')}" for why, n in counts.items())
    if first is None:
        return f"{text}: no step can be used"
    if newer:
        named = errors.first_few([f"{n:,}" for n in newer], _MOST_NAMED)
        text += f"; after step {first:,}: {named}"
    return text


_MOST_NAMED = 3


def _unread_row(run: str, error: Exception, names: Sequence[str]) -> tables.TableRow:
    link = html.element("a", run, href=address("/run", run=run))
    blank = [""] * (len(_columns(names)) - 2)
    return tables.TableRow([link, *blank, str(error)], {"data_run": run}, "bad")


def _more(names: Sequence[str]) -> html.Markup:
    if not names:
        return html.NOTHING
    links = [
        html.element("li", html.element("a", name, href=address("/run", run=name)))
        for name in names
    ]
    return html.element("ul", *links, class_="more")
