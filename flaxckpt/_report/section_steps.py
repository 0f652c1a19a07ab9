"""The sections on the metrics of steps, and on the reasons to keep them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flaxckpt import _util
from flaxckpt._inspect.listing import Step
from flaxckpt._report import save_history, section
from flaxckpt._report.charts import curves, step_strip
from flaxckpt._report.data import Report
from flaxckpt._report.section import Section
from flaxckpt._util.html import Column, Row

_MOST_CURVES = 12
_MOST_COLUMNS = 3


# ---- metrics ----------------------------------------------------------------------


def metrics(report: Report) -> Section:
    """Returns the section with each metric over the existing steps."""
    drawn = {
        name: [curves.Point(p.step, p.value, p.stays, p.best) for p in points]
        for name, points in report.metrics.items()
        if any(math.isfinite(point.value) for point in points)
    }
    if not report.metrics:
        return Section("metrics", "Metrics", "No metrics are stored with the steps.")
    figures = []
    for name, points in list(drawn.items())[:_MOST_CURVES]:
        caption = _util.html.element("figcaption", name)
        figures.append(
            _util.html.element(
                "figure", caption, curves.curve(name, points), data_metric=name
            )
        )
    items = [("point kept", "stays")]
    if any(not p.stays for points in report.metrics.values() for p in points):
        items.append(("point goes", "would go"))
    if _has_best(report):
        items.append(("point best", "best by a policy"))
    key = section.legend(items)
    said = "Of the steps that are there; a metric is gone with its step."
    if not _has_best(report):
        said += (
            " Which is the best, only a policy says: --keep best:1:NAME:min or a"
            " --config."
        )
    if len(drawn) > _MOST_CURVES:
        said += f" The first {_MOST_CURVES} of {len(drawn)} are drawn."
    missing = [name for name in report.metrics if name not in drawn]
    if missing:
        said += f" Never finite: {', '.join(missing[:5])}."
    grid = _util.html.element("div", *figures, class_="figures")
    return Section("metrics", "Metrics", said, [key, grid])


def _has_best(report: Report) -> bool:
    return any(p.best == "best" for points in report.metrics.values() for p in points)


# ---- retention --------------------------------------------------------------------


def retention(report: Report) -> Section | None:
    """Returns the section on existing steps and the reasons to keep them."""
    if not report.is_run:
        return None
    if not report.steps:
        return Section("retention", "Retention", "There are no steps yet.")
    there = {s.step for s in report.steps}
    gone = [s for s in save_history.deleted(report.happened) if s not in there]
    kept = {s.step: _why(report, s) for s in report.steps if s.step is not None}
    best = {s.step for s in report.steps if "best" in s.marks and s.step is not None}
    pictures = [
        step_strip.strip(kept, gone, best, width)
        for width in (section.WIDE, section.NARROW)
    ]
    items = [("point kept", "there"), ("gone", "deleted")]
    if best:
        items.insert(1, ("point best", "best"))
    metrics = list(report.metrics)[:_MOST_COLUMNS]
    rows = [_step_row(report, step, metrics) for step in report.steps[::-1]]
    return Section(
        "retention",
        "Retention",
        _retention_said(report, len(gone)),
        [
            section.legend(items if gone or best else items[:1]),
            _util.html.both(*pictures),
            *section.table("Steps, the newest first", _columns(metrics), rows),
        ],
    )


def _retention_said(report: Report, gone: int) -> str:
    if report.policies:
        told = f"The policies are {', '.join(report.policies)}."
    else:
        told = (
            "No run records its policies: --keep or --config has the page say what"
            " each step stays for."
        )
    there = f"{_util.humanize.count(len(report.steps), 'step')}"
    going = [s for s in report.steps if not s.why]
    told = f"{there} here" + (f", {gone:,} deleted. " if gone else ". ") + told
    if going and report.policies:
        told += f" Nothing keeps {len(going)} of them."
    return told


def _columns(metrics: Sequence[str]) -> list[Column]:
    return [
        Column("step", is_number=True),
        Column("saved"),
        Column("stays for"),
        Column("marks"),
        *[Column(name, is_number=True) for name in metrics],
        Column("size", is_number=True),
        Column("format"),
    ]


def _step_row(report: Report, step: Step, metrics: Sequence[str]) -> Row:
    marks = [
        _util.html.element("span", mark, class_=f"mark {mark.replace(' ', '-')}")
        for mark in step.marks
    ]
    cells = [
        "" if step.step is None else str(step.step),
        _util.html.moment(step.created),
        _why(report, step),
        _util.html.join(marks),
        *[f"{step.metrics[m]:.4g}" if m in step.metrics else "" for m in metrics],
        "" if step.bytes is None else _util.humanize.size(step.bytes),
        step.format if len(report.formats) > 1 else "",
    ]
    data: dict[str, object] = {
        "data_step": step.step,
        "data_bytes": step.bytes,
        "data_why": "; ".join(step.why),
    }
    return Row(cells, data, "bad" if step.damage is not None else None)


def _why(report: Report, step: Step) -> str:
    """Returns the reasons to keep a step, without "no policy"."""
    if step.damage is not None:
        return "damaged: it counts for no policy"
    why = [reason for reason in step.why if reason != "no policy"]
    if report.policies:
        return ", ".join(why) or "nothing: it would go"
    return ", ".join(why)
