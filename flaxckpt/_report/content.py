"""The page of a report, and the content of its parts for the templates."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flaxckpt._inspect import best_step
from flaxckpt._report import assets, chart_data, flight_recorder, parts, templates
from flaxckpt._report.data import MetricValue, Report
from flaxckpt._report.parts import Copy
from flaxckpt._types import LeafPath

if TYPE_CHECKING:  # it imports numpy, which only a comparison needs
    from flaxckpt._inspect.diff import CheckpointDiff

MOST_STEPS = 100
"""Row limit of the table of steps, which keeps the page of a long run small."""

_MOST_LEAVES = 3000
"""Limit of the tree of leaves."""

Content: TypeAlias = Mapping[str, Any]
"""The variables of a template."""


def page(report: Report) -> str:
    """Returns the page of a report: one file that loads nothing."""
    return templates.render("report.html", assets=assets, **describe(report))


def describe(report: Report, most: int | None = MOST_STEPS) -> Content:
    """Returns the content of all parts of a page, with `most` rows of steps, or all."""
    return {
        "report": report,
        "verdict": flight_recorder.judge(report),
        "data": chart_data.chart_data(report),
        "step": flight_recorder.choose_step(report) if report.is_run else None,
        "describe_best": _describe_best,
        "most_steps": most,
        "tree": functools.partial(_tree, report),
        "most_leaves": _MOST_LEAVES,
        "changes": group_changes(report.change, report.copies),
    }


# ---- the headline -----------------------------------------------------------------


def _describe_best(
    report: Report, points: Sequence[MetricValue], best: MetricValue
) -> str:
    """Returns which good value is the best, and better ones that are lost."""
    assert best.mode is not None  # a policy ranks by the metric
    faults = report.faults
    values = {p.step: p.value for p in points if math.isfinite(p.value)}
    gone = {point.step for point in points if point.is_deleted}
    found = best_step.find(values, faults, best.mode, gone)
    detail = ""
    if best.step in faults:
        detail = "; no good step has a value"
    elif found.damaged is None and found.deleted is None:
        detail = f", of {len(values):,} "
        detail += "saved" if len(values) == len(points) else "finite values"
    elif found.damaged is None:
        detail = f", of {len(values.keys() - gone):,} that exist"
    counted = [step.step for step in report.steps if step.is_counted]
    return "; ".join([detail, *found.describe_better(values, faults, counted, "{:,}")])


# ---- the state --------------------------------------------------------------------


def group_changes(diff: CheckpointDiff | None, repeated: Sequence[Copy]) -> Content:
    """Returns part of the state -> its leaves by what a comparison says of them.

    `repeated` are the copies in the second checkpoint. The optimizer comes last. The
    `layers` are those of the leaves that differ.
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
            name = parts.group_of(path, repeated)
            groups.setdefault(name, {each: [] for each in found})[what].append(path)
    layer_of = diff.layer_of
    for group in groups.values():
        group["layers"] = [*{layer_of.get(path, "") for path in group["differing"]}]
    return {name: groups[name] for name in sorted(groups, key=parts.rank)}


def _tree(report: Report) -> Content:
    """Returns the containers and leaves, as many as a page has room for."""
    inner = parts.find_children(report.tree)
    optimizer = {n for n, t in enumerate(report.tree) if parts.is_optimizer(t.path)}
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
