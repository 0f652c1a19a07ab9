"""Table of the runs below a directory, one line per run."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flaxckpt import _formats, _inspect, _storage, errors
from flaxckpt.cli import _app, _output
from flaxckpt.cli._output import Cell, TextColumn

if TYPE_CHECKING:
    from flaxckpt._inspect.run_search import Location
    from flaxckpt._report.data import MetricValue, Report, RunRanking
    from flaxckpt.policies import PreservationPolicy

_COLUMNS = (
    TextColumn("run"),
    TextColumn("verdict"),
    TextColumn("best"),
    TextColumn("steps", is_number=True),
    TextColumn("newest", is_number=True),
    TextColumn("saved"),
    TextColumn("size", is_number=True),
)
_BEST = 2
_NAME_WIDTH = 24
"""Longer names are folded before other cells are, or columns are left out."""

_LEAST_COLUMNS = 4
"""Narrow terminals have at least these, and no others that do not fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Best:
    step: int
    value: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """A run or a checkpoint below a directory.

    Attributes:
        name: The path relative to the directory.
        is_run: True for a run directory.
        steps: The number of steps, damaged ones among them; None of a checkpoint.
        newest: The newest undamaged step, or None.
        created: The start of its save, in seconds since 1970, or None.
        best: Metric that policies rank steps by, or all runs are ranked by -> the best
            undamaged step.
        damaged: The damaged steps; None for a checkpoint.
        verdict: How it goes: `healthy`, `diverged at 110`; empty if unknown.
        bytes: The size of all files; None in object stores.
        error: The reason why it could not be listed; empty without one.
    """

    name: str
    path: str
    is_run: bool
    steps: int | None = None
    newest: int | None = None
    created: float | None = None
    best: Mapping[str, _Best] = dataclasses.field(default_factory=dict)
    damaged: Sequence[int | None] = ()
    verdict: str = ""
    bytes: int | None = None
    error: str = ""


def find_runs(path: str) -> list[Location]:
    """Returns the runs and checkpoints below a directory; empty without any."""
    try:
        root = _formats.follow(_storage.paths.resolve(path))
        found = _inspect.run_search.find(root, {})
    except errors.CheckpointError:
        return []
    return [place for place in found.values() if place.path != root]


def show(
    path: str,
    places: Sequence[Location],
    keep: Sequence[PreservationPolicy] | None,
    step_format: str | None,
    *,
    sort: str | None,
    json: bool,
) -> int:
    """Prints the runs, and returns the exit code: 1 if one is damaged or unreadable.

    Raises OptionError if no run has the metric to `sort` by.
    """
    from flaxckpt import _report

    reports: dict[str, Report] = {}
    unread: list[_Run] = []
    for place in places:
        try:
            options = _report.ReportOptions(
                keep, diff=False, step_format=step_format if place.is_run else None
            )
            reports[place.name] = _report.gather(place.path, options)
        except (errors.CheckpointError, OSError) as error:
            why = errors.one_line(error)
            unread.append(_Run(place.name, str(place.path), place.is_run, error=why))
    ranking = _choose_ranking(_report.data.find_rankings(reports), sort)
    ranked = ranking.rank(reports)
    runs = [_describe(name, reports[name], ranking) for name in ranked] + unread
    order = ranking.text if ranking.metric else ""
    if sort in _ATTRIBUTES:
        attribute = operator.attrgetter(_ATTRIBUTES[sort])
        runs.sort(key=lambda run: attribute(run) or 0)
        order = sort
    is_bad = any(run.damaged or run.error for run in runs)
    if json:
        _output.print_document({"path": path, "runs": runs})
    else:
        columns, metrics = [*_COLUMNS], {metric for run in runs for metric in run.best}
        [metric] = metrics if len(metrics) == 1 else [""]
        if metric:
            columns[_BEST] = TextColumn(f"best {_output.shorten_name(metric)}")
        rows = [_row(run, metric) for run in runs]
        room = _output.terminal_width() if _output.is_terminal() else math.inf
        while len(columns) > _LEAST_COLUMNS:
            short = [[str(row[0])[:_NAME_WIDTH], *row[1:]] for row in rows]
            if _output.table_width(columns, short) <= room:
                columns[1:] = [column._replace(is_whole=True) for column in columns[1:]]
                break
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        _output.print_table(columns, rows)
        for run in runs:
            if run.error:
                _output.print_paragraph(f"{run.name} cannot be listed: {run.error}")
        total = [run.bytes for run in runs if run.bytes is not None]
        size = f", {_output.size(sum(total))}" if total else ""
        count = sum(run.is_run for run in runs)
        parts = [_output.count(count, "run")] if count else []
        if others := len(runs) - count:
            parts.append(_output.count(others, "checkpoint"))
        by = f"; by {order}" if order else ""
        _output.print_paragraph(f"{' and '.join(parts)}{size}{by}")
    return _app.FINDING if is_bad else _app.SUCCESS


def _choose_ranking(rankings: Mapping[str, RunRanking], sort: str | None) -> RunRanking:
    """Returns the order of --sort; that of the policies without a metric."""
    if sort is None or sort in _ATTRIBUTES:
        return next(iter(rankings.values()))
    for name, ranking in rankings.items():
        if sort in (ranking.metric, name):
            return ranking
    names = dict.fromkeys(each.metric for each in rankings.values() if each.metric)
    raise errors.OptionError(
        f"--sort {sort} is neither saved, size nor a metric of a run: the metrics are"
        f" {errors.first_few([*names], _MOST_NAMED) or 'none'}"
    )


_ATTRIBUTES = {"saved": "created", "size": "bytes"}
_MOST_NAMED = 12


def _describe(name: str, report: Report, ranking: RunRanking) -> _Run:
    from flaxckpt import _report

    # The metric of the ranking comes first, as the ranking knows its best.
    first: dict[str | None, MetricValue | None]
    first = {ranking.metric: ranking.find_best(report)}
    newest = report.good[-1] if report.good else None
    return _Run(
        name,
        report.path,
        report.is_run,
        steps=len(report.steps) if report.is_run else None,
        newest=None if newest is None else newest.step,
        created=None if newest is None else newest.created,
        best={
            m: _Best(p.step, p.value)
            for m, p in (first | dict(report.bests) | first).items()
            if m and p
        },
        damaged=[*report.faults],
        verdict=_report.flight_recorder.describe_state(report),
        bytes=report.bytes,
    )


def _row(run: _Run, metric: str) -> list[str | Cell]:
    """Returns the cells of a run; `metric` is the only one, whose name is above."""
    best = [
        f"{'' if name == metric else f'{_output.shorten_name(name)} '}"
        f"{_output.number(found.value, 4)} at {found.step}"
        for name, found in run.best.items()
    ]
    is_bad = run.verdict not in ("healthy", "no steps")
    return [
        run.name,
        Cell("unreadable" if run.error else run.verdict, "red" if is_bad else ""),
        ", ".join(best),
        "" if run.steps is None else f"{run.steps:,}",
        "" if run.newest is None else str(run.newest),
        _output.when(run.created),
        "" if run.bytes is None else _output.size(run.bytes),
    ]
