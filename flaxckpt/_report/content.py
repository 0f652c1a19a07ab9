"""The content of a page on a report, for `cards.html` and `sections.html`.

Functions choose, rank and count; texts and tables are in the templates.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flaxckpt._inspect import best_step
from flaxckpt._report import chart_data, copies, flight_recorder
from flaxckpt._report.copies import Copy
from flaxckpt._report.data import Integrity, MetricValue, Report, last_good
from flaxckpt._types import LeafPath

if TYPE_CHECKING:  # it imports numpy, which only a comparison needs
    from flaxckpt._inspect.diff import CheckpointDiff

MOST_STEPS = 200
"""Row limit of the table of steps, which keeps the page of a long run small."""

_MOST_ROWS = 250
_MOST_HISTORIES = 300
_MOST_LEAVES = 3000
"""Limit of the tree of leaves."""

_MOST_BEST, _MOST_COLUMNS = 3, 4
_MOST_SHARES, _LEAST_SHARE = 7, 0.002

Content: TypeAlias = Mapping[str, Any]
"""The variables of a template."""


def describe(report: Report, most: int | None = MOST_STEPS) -> Content:
    """Returns the content of all parts of a page, with `most` rows of steps, or all."""
    return {
        "report": report,
        "verdict": flight_recorder.judge(report),
        "data": chart_data.chart_data(report),
        "step": flight_recorder.choose_step(report) if report.is_run else None,
        "actions": flight_recorder.actions(report),
        "has_track": report.is_run and bool(report.history),
        "bests": _bests(report),
        "facts": _count_metrics(report),
        "layers": _layers(report),
        "steps": _steps(report, most),
        "checks": list_checks(report),
        "sizes": _sizes(report) if report.parts else None,
        "changes": group_changes(report.change, report.copies),
    }


# ---- the headline -----------------------------------------------------------------


def _bests(report: Report) -> list[Content]:
    """Returns the cards of the metrics that rank steps, or of the first metric."""
    cards: list[Content] = []
    for name, points in report.metrics.items():
        best = [point for point in points if point.mode is not None]
        if best and len(cards) < _MOST_BEST:
            is_bad = best[-1].step in report.faults
            kind = "bad" if is_bad else "best" if cards else "main best"
            detail = _describe_best(report, points, best[-1])
            card = {"card": "best", "title": f"Best {name}", "kind": kind}
            cards.append(card | {"point": best[-1], "detail": detail})
    for name, points in report.metrics.items():
        last = last_good(points) or points[-1]
        if not cards and math.isfinite(last.value):
            card = {"card": "last-metric", "title": f"Last {name}", "kind": "main"}
            cards.append(card | {"point": last, "detail": _at_step(report, last)})
    return cards


def _describe_best(
    report: Report, points: Sequence[MetricValue], best: MetricValue
) -> str:
    """Returns the place of the best good value, and better ones that are lost."""
    assert best.mode is not None  # a policy ranks by the metric
    faults = report.faults
    values = {p.step: p.value for p in points if math.isfinite(p.value)}
    gone = {point.step for point in points if point.is_deleted}
    found = best_step.find(values, faults, best.mode, gone)
    detail = f"{best_step.end(best.mode)}, {_at_step(report, best)}"
    if best.step in faults:
        detail += "; no good step has a value"
    elif found.damaged is None and found.deleted is None:
        detail += f", of {len(values):,} "
        detail += "saved" if len(values) == len(points) else "finite values"
    elif found.damaged is None:
        detail += f", of {len(values.keys() - gone):,} that exist"
    counted = [step.step for step in report.steps if step.is_counted]
    return "; ".join([detail, *found.describe_better(values, faults, counted, "{:,}")])


def _at_step(report: Report, point: MetricValue) -> str:
    """Returns the place of a value, with the state of a step that cannot be read."""
    fault = report.faults.get(point.step)
    return f"at step {point.step:,}" + (f", which is {fault}" if fault else "")


# ---- the run ----------------------------------------------------------------------


def _count_metrics(report: Report) -> Content:
    points = [point for values in report.metrics.values() for point in values]
    return {
        "steps": len({point.step for point in points}),
        "gone": len({point.step for point in points if point.is_deleted}),
        "drawn": len(report.drawn),
        "most": chart_data.MOST_METRICS,
        "missing": [name for name in report.metrics if name not in report.drawn][:5],
        "single": {n: v for step in report.steps for n, v in step.metrics.items()},
    }


def _layers(report: Report) -> Content:
    histories = report.leaf_histories
    return {
        "count": len(histories),
        "saves": len({step for leaf in histories for step in leaf.norms}),
        "bad": sum(bool(leaf.nonfinite_steps) for leaf in histories),
        "leaves": histories[:_MOST_HISTORIES],
    }


def _steps(report: Report, most: int | None) -> Content:
    """Returns the steps to list: of too many, the best and the existing ones."""
    existing = {step.step: step for step in report.steps}
    best = {point.step for _, point in report.bests}
    ranked = sorted(
        report.history, key=lambda s: (s.step not in best, not s.exists, -s.step)
    )
    return {
        "names": [*report.metrics][:_MOST_COLUMNS],
        "shown": sorted(ranked[:most], key=lambda s: -s.step),
        "existing": existing,
        "marks": report.marks,
        "known": {saved.step: saved.metrics for saved in report.history},
        "gone": sum(not saved.exists for saved in report.history),
        "unkept": sum(not step.why for step in report.steps),
    }


def list_checks(report: Report) -> Content:
    """Returns runs of neighbouring steps in the same state; problems are alone."""
    ranges: list[list[Integrity]] = []
    for check in report.integrity:
        is_same = ranges and ranges[-1][0].state == check.state
        if is_same and not check.is_bad:
            ranges[-1].append(check)
        else:
            ranges.append([check])
    ranked = ranges[::-1]
    ranked.sort(key=lambda checks: not checks[0].is_bad)  # problems come first
    return {
        "ranges": ranges,
        "ranked": ranked[:_MOST_ROWS],
        "counts": collections.Counter(check.state for check in report.integrity),
        "bytes": sum(check.bytes_checked for check in report.integrity),
    }


# ---- the state --------------------------------------------------------------------


def group_changes(diff: CheckpointDiff | None, repeated: Sequence[Copy]) -> Content:
    """Returns part of the state -> its leaves by what a comparison says of them.

    `repeated` are the copies in the second checkpoint. The optimizer comes last.
    """
    if diff is None:
        return {}
    only = (*diff.only_in_a, *diff.only_in_b)
    found: Mapping[str, Iterable[LeafPath]] = {
        "differing": (*diff.changed, *only),
        "retyped": diff.retyped,
        "only": only,
        "equal": diff.same,
        "unreadable": diff.unreadable,
    }
    groups: dict[str, dict[str, list[LeafPath]]] = {}
    for what, paths in found.items():
        for path in paths:
            name = copies.group_of(path, repeated)
            group = groups.setdefault(name, {each: [] for each in found})
            group[what].append(path)
    return {name: groups[name] for name in sorted(groups, key=copies.rank)}


def _sizes(report: Report) -> Content:
    return {
        "shares": _shares(report),
        "tree": functools.partial(_tree, report),
        "shown": sum(tree.info is not None for tree in report.tree),
        "most": _MOST_LEAVES,
    }


def _shares(report: Report) -> list[tuple[str, int, str]]:
    """Returns the outermost containers, and the copies in them; name, size, note."""
    counts = collections.Counter(row.depth for row in report.tree)
    depth = next((d for d in sorted(counts) if counts[d] > 1), min(counts))
    outermost = [row for row in report.tree if row.depth == depth]
    sized = [(row.shown_path, row.bytes, "") for row in outermost]
    copied = [
        (c.path, c.bytes, f"the shapes of {c.of or 'all'}") for c in report.copies
    ]
    sized.sort(key=lambda share: -share[1])
    ranked = [*sized[: _MOST_SHARES - len(copied)], *copied]
    large = [s for s in ranked if s[1] >= report.total_bytes * _LEAST_SHARE]
    rest = report.total_bytes - sum(size for _, size, _ in large)
    return [*large, ("other", rest, "")] if rest > 0 else large


def _tree(report: Report) -> Content:
    """Returns the containers and leaves, as many as a page has room for."""
    inner = copies.find_children(report.tree)
    optimizer = {n for n, t in enumerate(report.tree) if copies.is_optimizer(t.path)}
    leaves = [n for n, tree in enumerate(report.tree) if tree.info is not None]
    end = leaves[_MOST_LEAVES] if len(leaves) > _MOST_LEAVES else len(report.tree)
    shown = [
        sorted((n for n in inside if n < end), key=optimizer.__contains__)
        for inside in inner
    ]
    return {
        "rows": report.tree,
        "inner": shown,
        "top": shown[0] or [0],
        "open": {*shown[0]} - optimizer,
    }
