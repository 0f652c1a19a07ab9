"""The views on a run, and on a directory of runs: a table, and their metrics."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from flaxckpt import errors, policies
from flaxckpt._report import chart_data, content, flight_recorder, templates
from flaxckpt._report.content import Content
from flaxckpt._report.data import MetricValue, Report
from flaxckpt._report.ui import feeds, frame
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._util import html

_MOST_CURVES = 12
_MOST_METRICS = 2
_MOST_COLUMNS = 4
_MOST_TAGS = 20
_MOST_RUNS = 60
"""More runs are only listed by name."""

_LIVE_SECS = 600.0


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the first page: all runs, or the only one."""
    places = workspace.places
    if places.is_single:
        (place,) = places.runs.values()
        return _show(workspace, place)
    return frame.render("ui/all_runs.html", workspace, None, version="")


def overview(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page on a run or a checkpoint, the field `run`."""
    return _show(workspace, workspace.places.find(query.text("run")))


def _show(workspace: Workspace, place: Location) -> html.Markup:
    workspace.feeds.latest(place)  # the first report has a version
    version = workspace.version(place)
    shown = _describe_run(workspace, place)
    return frame.render("ui/overview.html", workspace, place, version=version, **shown)


def sections(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the sections on a run as of now; with `all`, all of its steps."""
    place = workspace.places.find(query.text("run"))
    most = None if query.text("all") else content.MOST_STEPS
    shown = _describe_run(workspace, place, most)
    return templates.render("ui/sections.html", place=place, **shown)


def _describe_run(
    workspace: Workspace, place: Location, most: int | None = content.MOST_STEPS
) -> Content:
    shown = content.describe(workspace.report(place), most)
    return {**shown, "runs": workspace.places.runs.values()}


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
    names = [place.name for place in places]
    metrics = _metrics(reports)
    live = {run for run, report in reports.items() if _is_live(report)}
    curves = dict([*metrics.items()][:_MOST_CURVES])
    checkpoints = [report for report in reports.values() if not report.is_run]
    single = [name for each in checkpoints for s in each.steps for name in s.metrics]
    shown = list(dict.fromkeys([*metrics, *single]))[:_MOST_METRICS]
    rankings = _find_rankings(reports)
    rank, by = query.text("rank"), query.text("group")
    if rank[:4] in ("min:", "max:") and rank not in rankings:  # not read yet
        rankings[rank] = _Ranking(
            rank[4:] or None, "max" if rank[:4] == "max:" else "min"
        )
    default, *others = rankings.items()
    ranking = rankings.get(rank, default[1])
    tags = _find_tags(reports)
    choices = {**_GROUPS, **{f"tag:{name}": name for name in tags}}
    if by.startswith("tag:"):
        choices.setdefault(by, by[4:])
    groups: dict[str, list[str]] = {}
    for run in _rank(reports, ranking):
        groups.setdefault(_name_group(run, reports[run], by), []).append(run)
    if unread:
        groups.setdefault("cannot be read" if by in choices and by else "", [])
    return templates.render(
        "ui/runs.html",
        version=version,
        waiting=len(names) - len(reports) - len(unread),
        curves=chart_data.draw_runs(curves, names, live) if metrics else "",
        order=f"By {ranking.text}",
        orders=[("", default[1].text), *((key, each.text) for key, each in others)],
        rank=rank,
        group_choices=[*choices.items()],
        group=by,
        is_many=len(names) > 1,
        names=shown,
        metric=ranking.metric,
        tags=tags[:_MOST_COLUMNS],
        groups=groups,
        reports=reports,
        best={run: _find_best(reports[run], ranking) for run in reports},
        diverged=flight_recorder.find_divergence,
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


def _is_live(report: Report) -> bool:
    """Returns True if a run has saved in the last minutes."""
    return any(report.made - save.began < _LIVE_SECS for save in report.saves[-1:])


class _Ranking(NamedTuple):
    """The order of runs: by the lowest or highest values of a metric, or by name."""

    metric: str | None
    mode: Literal["min", "max"]

    @property
    def text(self) -> str:
        if self.metric is None:
            return "name"
        end = "highest" if self.mode == "max" else "lowest"
        return f"the best {errors.printable(self.metric)}, {end} first"


def _find_rankings(reports: Mapping[str, Report]) -> dict[str, _Ranking]:
    """Returns the choices of a ranking: those of the policies of most runs first.

    The next one is by name. A metric without a policy may be ranked either way.
    """
    counts = collections.Counter(
        _Ranking(name, best.mode)
        for report in reports.values()
        for name, best in report.bests
        if best.mode is not None
    )
    found = [ranking for ranking, _ in counts.most_common()]
    known = {ranking.metric for ranking in found}
    others = dict.fromkeys(name for each in reports.values() for name in each.metrics)
    modes: tuple[Literal["min", "max"], ...] = ("min", "max")
    found.append(_Ranking(None, "min"))
    found += [_Ranking(n, mode) for n in others if n not in known for mode in modes]
    return {f"{each.mode}:{each.metric or ''}": each for each in found}


def _rank(reports: Mapping[str, Report], ranking: _Ranking) -> list[str]:
    """Returns the runs in the order of a ranking; those without a value come last."""
    sign = -1 if ranking.mode == "max" else 1

    def place(run: str) -> tuple[float, bool, str]:
        best = _find_best(reports[run], ranking)
        is_bad = best is not None and bool(reports[run].faults)
        return math.inf if best is None else sign * best.value, is_bad, run

    return sorted(reports, key=place)


def _find_best(report: Report, ranking: _Ranking) -> MetricValue | None:
    """Returns the best value of a metric at the steps that can be used."""
    points = report.metrics.get(ranking.metric or "", ())
    usable = {p.step: p for p in points if not (p.is_bad or p.is_deleted)}
    values = {step: point.value for step, point in usable.items()}
    best = policies.rank(values, ranking.mode)[:1]
    return usable[best[0]] if best and ranking.metric is not None else None


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
        return flight_recorder.judge(report).state
    if by.startswith("tag:"):
        name = by[4:]
        return f"{name}={report.tags[name]}" if name in report.tags else f"no {name}"
    return ""
