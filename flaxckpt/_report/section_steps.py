"""The sections on the metrics of steps, and on the reasons to keep them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flaxckpt._inspect.listing import Step
from flaxckpt._report import save_history, section
from flaxckpt._report.charts import curves, step_strip
from flaxckpt._report.data import Report
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize

_MOST_CURVES = 12
_MOST_COLUMNS = 3


# ---- metrics ----------------------------------------------------------------------


def metrics(report: Report) -> Section:
    """Returns the section with each metric over the existing steps."""
    drawn = {
        name: values
        for name, values in report.metrics.items()
        if any(math.isfinite(point.value) for point in values)
    }
    if not report.metrics:
        return Section("metrics", "Metrics", "No metrics are stored with the steps.")
    figures = []
    for name, points in list(drawn.items())[:_MOST_CURVES]:
        caption = html.element("figcaption", name)
        figures.append(
            html.element(
                "figure", caption, curves.curve(name, points), data_metric=name
            )
        )
    items = [("point kept", "kept")]
    if any(not p.stays for points in report.metrics.values() for p in points):
        items.append(("point goes", "would be deleted"))
    if _has_best(report):
        items.append(("point best", "best by a policy"))
    key = section.legend(items)
    summary = "Metrics of the existing steps: a metric is deleted with its step."
    if not _has_best(report):
        summary += (
            " Only a policy defines which step is best: pass --keep best:1:NAME:min or"
            " --config."
        )
    if len(drawn) > _MOST_CURVES:
        summary += f" The first {_MOST_CURVES} of {len(drawn)} are drawn."
    missing = [name for name in report.metrics if name not in drawn]
    if missing:
        summary += f" Never finite: {', '.join(missing[:5])}."
    grid = html.element("div", *figures, class_="figures")
    return Section("metrics", "Metrics", summary, [key, grid])


def _has_best(report: Report) -> bool:
    return any(p.best == "best" for points in report.metrics.values() for p in points)


# ---- retention --------------------------------------------------------------------


def retention(report: Report) -> Section | None:
    """Returns the section on existing steps and the reasons to keep them."""
    if not report.is_run:
        return None
    if not report.steps:
        return Section("retention", "Retention", "There are no steps yet.")
    existing = {s.step for s in report.steps}
    deleted = save_history.deleted_steps(report.happened)
    gone = [step for step in deleted if step not in existing]
    kept = {s.step: _why(report, s) for s in report.steps if s.step is not None}
    best = {s.step for s in report.steps if "best" in s.marks and s.step is not None}
    pictures = [
        step_strip.strip(kept, gone, best, width)
        for width in (section.WIDE, section.NARROW)
    ]
    items = [("point kept", "exists"), ("gone", "deleted")]
    if best:
        items.insert(1, ("point best", "best"))
    metrics = list(report.metrics)[:_MOST_COLUMNS]
    rows = [_step_row(report, step, metrics) for step in report.steps[::-1]]
    return Section(
        "retention",
        "Retention",
        _retention_summary(report, len(gone)),
        [
            section.legend(items if gone or best else items[:1]),
            html.both(*pictures),
            *section.table("Steps, the newest first", _columns(metrics), rows),
        ],
    )


def _retention_summary(report: Report, gone: int) -> str:
    if report.policies:
        policies = f"The policies are {', '.join(report.policies)}."
    else:
        policies = (
            "A run does not record its policies: pass --keep or --config to show the"
            " reasons to keep each step."
        )
    existing = humanize.count(len(report.steps), "existing step")
    text = f"{existing}, {gone:,} deleted. " if gone else f"{existing}. "
    text += policies
    unkept = [s for s in report.steps if not s.why]
    if unkept and report.policies:
        text += f" No policy keeps {len(unkept)} of them."
    return text


def _columns(metrics: Sequence[str]) -> list[html.Column]:
    return [
        html.Column("step", is_number=True),
        html.Column("saved"),
        html.Column("kept by"),
        html.Column("marks"),
        *[html.Column(name, is_number=True) for name in metrics],
        html.Column("size", is_number=True),
        html.Column("format"),
    ]


def _step_row(report: Report, step: Step, metrics: Sequence[str]) -> html.Row:
    marks = [
        html.element("span", mark, class_=f"mark {mark.replace(' ', '-')}")
        for mark in step.marks
    ]
    cells = [
        "" if step.step is None else str(step.step),
        html.moment(step.created),
        _why(report, step),
        html.join(marks),
        *[f"{step.metrics[m]:.4g}" if m in step.metrics else "" for m in metrics],
        "" if step.bytes is None else humanize.size(step.bytes),
        step.format if len(report.formats) > 1 else "",
    ]
    data: dict[str, object] = {
        "data_step": step.step,
        "data_bytes": step.bytes,
        "data_why": "; ".join(step.why),
    }
    return html.Row(cells, data, "bad" if step.damage is not None else None)


def _why(report: Report, step: Step) -> str:
    """Returns the reasons to keep a step, without "no policy"."""
    if step.damage is not None:
        return "damaged: no policy counts it"
    why = [reason for reason in step.why if reason != "no policy"]
    if report.policies:
        return ", ".join(why) or "nothing: would be deleted"
    return ", ".join(why)
