"""The views on a run, and on a directory of runs: a table, and their metrics."""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Mapping
from typing import Literal

from flaxckpt import errors
from flaxckpt._inspect.run_search import Location
from flaxckpt._report import chart_data, content, data, flight_recorder, templates
from flaxckpt._report.data import MetricValue, Report
from flaxckpt._report.ui import feeds, frame
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._util import html

_MOST_CURVES = 12
_MOST_METRICS = 2
_MOST_COLUMNS = 4
_MOST_TAGS = 20
_MOST_RUNS = 60
"""More runs are only listed by name."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the first page: all runs, or the only one."""
    if workspace.places.is_single:
        return _show(workspace, *workspace.places.runs.values())
    return frame.render("ui/all_runs.html", workspace, None, version="")


def overview(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page on a run or a checkpoint, the field `run`."""
    return _show(workspace, workspace.places.find(query.text("run")))


def _show(workspace: Workspace, place: Location) -> html.Markup:
    workspace.feeds.latest(place)  # the first report has a version
    version = workspace.version(place)
    shown = _render_sections(workspace, place, content.MOST_STEPS, version)
    return frame.render(
        "ui/overview.html", workspace, place, version=version, sections=shown
    )


def sections(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the sections on a run as of now; with `all`, all of its steps."""
    place = workspace.places.find(query.text("run"))
    most = None if query.text("all") else content.MOST_STEPS
    workspace.feeds.latest(place)  # of which the version tells
    return _render_sections(workspace, place, most, workspace.version(place))


@functools.lru_cache(maxsize=8)
def _render_sections(
    workspace: Workspace, place: Location, most: int | None, version: str
) -> html.Markup:
    """Returns the sections on a run; renders them once for all who ask of a version."""
    shown = content.describe(workspace.report(place), most)
    runs = workspace.places.runs.values()
    return templates.render("ui/sections.html", place=place, runs=runs, **shown)


def listed(workspace: Workspace) -> list[Location]:
    """Returns the runs and checkpoints that are described."""
    return list(workspace.places.runs.values())[:_MOST_RUNS]


def news(workspace: Workspace, query: Query) -> feeds.News:
    """Returns the last change of a `run`, or of all runs, also of new ones.

    Raises CheckpointNotFoundError if the run does not exist any more.
    """
    workspace.places.look_again()
    workspace.verifications.look_again()
    name = query.text("run")
    found = [workspace.places.find(name)] if name else listed(workspace)
    latest = workspace.feeds.news(found)
    return latest._replace(version=workspace.complete(latest.version))


def table(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the metrics of all runs, and a table of the runs.

    Names the runs whose report is not ready; the page updates when it is.
    """
    version = news(workspace, query).version
    reports: dict[str, Report] = {}
    unread: dict[str, Exception] = {}
    places = listed(workspace)
    for place in places:
        try:
            if (snapshot := workspace.feeds.available(place)) is not None:
                report = workspace.verifications.update(place, snapshot.report)
                reports[place.name] = report
        except (errors.CheckpointError, OSError) as error:
            unread[place.name] = error
    waiting = len(places) - len(reports) - len(unread)
    metrics = _metrics(reports)
    curves = dict([*metrics.items()][:_MOST_CURVES])
    checkpoints = (report for report in reports.values() if not report.is_run)
    single = [name for each in checkpoints for s in each.steps for name in s.metrics]
    shown = list(dict.fromkeys([*metrics, *single]))[:_MOST_METRICS]
    rankings = data.find_rankings(reports)
    rank, by = query.text("rank"), query.text("group")
    if rank[:4] in ("min:", "max:") and rank not in rankings:  # not read yet
        mode: Literal["min", "max"] = "max" if rank[:4] == "max:" else "min"
        rankings[rank] = data.RunRanking(rank[4:] or None, mode)
    default, *others = rankings.items()
    ranking = rankings.get(rank, default[1])
    tags = _find_tags(reports)

    def divides(key: str) -> bool:  # not into single runs, or into one group
        groups = {_name_group(run, reports[run], key) for run in reports}
        return not key or 1 < len(groups) < len(reports)

    choices = {**_GROUPS, **{f"tag:{name}": name for name in tags}}
    choices = {key: choices[key] for key in choices if key == by or divides(key)}
    if by.startswith("tag:"):
        choices.setdefault(by, by[4:])
    ranked = ranking.rank(reports)
    groups: dict[str, list[str]] = {}
    for run in ranked:
        groups.setdefault(_name_group(run, reports[run], by), []).append(run)
    if unread:
        groups.setdefault("cannot be read" if by in choices and by else "", [])
    return templates.render(
        "ui/runs.html",
        version=version,
        waiting=waiting,
        curves=chart_data.draw_runs(curves, reports, groups, not waiting)
        if metrics
        else "",
        ranking=ranking,
        ranked=ranked,
        find_divergence=flight_recorder.find_divergence,
        orders=[("", default[1].text), *((key, each.text) for key, each in others)],
        rank=rank,
        group_choices=[*choices.items()],
        group=by,
        is_many=len(places) > 1,
        names=shown,
        tags=tags[:_MOST_COLUMNS],
        groups=groups,
        reports=reports,
        describe_state=flight_recorder.describe_state,
        unread=unread,
        more=list(workspace.places.runs)[_MOST_RUNS:],
    )


def _metrics(reports: Mapping[str, Report]) -> dict[str, dict[str, list[MetricValue]]]:
    """Returns metric -> run -> its finite values, the metrics of most runs first."""
    metrics: dict[str, dict[str, list[MetricValue]]] = {}
    for run, report in reports.items():
        for name, values in report.drawn.items():
            finite = [point for point in values if math.isfinite(point.value)]
            metrics.setdefault(name, {})[run] = finite
    return dict(sorted(metrics.items(), key=lambda item: -len(item[1])))


def _find_tags(reports: Mapping[str, Report]) -> list[str]:
    """Returns the tags that differ between the runs; those of most runs first."""
    values: dict[str, collections.Counter[str]] = {}
    for report in reports.values():
        for name, value in report.tags.items():
            values.setdefault(name, collections.Counter())[value] += 1
    differing = [n for n, each in values.items() if max(each.values()) < len(reports)]
    return sorted(differing, key=lambda n: -values[n].total())[:_MOST_TAGS]


_GROUPS = {
    "": "nothing",
    "name": "the start of the name",
    "metrics": "the metrics",
    "state": "the state",
}


def _name_group(run: str, report: Report, by: str) -> str:
    """Returns the group of a run: `adam` of `adam-3`, `sweep` of `sweep/lr=0.1`."""
    if by == "name":
        folder = run.rpartition("/")[0]
        return folder or re.sub(r"[-_=.]?\d.*$", "", run) or run
    if by == "metrics":
        return ", ".join(report.metrics) or "no metrics"
    if by == "state":
        state = flight_recorder.judge(report).state
        return "good" if state == "unverified" else state
    if by.startswith("tag:"):
        name = by[4:]
        return f"{name}={report.tags[name]}" if name in report.tags else f"no {name}"
    return ""
