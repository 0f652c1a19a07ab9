"""The sections on the metrics of steps, and on the reasons to keep or delete them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from flaxckpt._inspect.history import SavedStep, Verdict
from flaxckpt._inspect.listing import Step
from flaxckpt._report import flight_recorder, section, tables
from flaxckpt._report.data import Mark, Report
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize

_MOST_COLUMNS = 4
_MOST_KEPT = 4
_MOST_ROWS = 200
"""Row limit of the table, which keeps the page of a long run small."""


# ---- metrics ----------------------------------------------------------------------


def metrics(report: Report) -> Section:
    """Returns the section with each metric over the steps, or of a checkpoint."""
    if not report.is_run:
        return _checkpoint_metrics(report)
    if not report.metrics:
        return Section("metrics", "Metrics", "No metrics are stored with the steps.")
    drawn = [
        name
        for name, values in report.metrics.items()
        if any(math.isfinite(point.value) for point in values)
    ]
    others = [section.drawn("metrics")] if len(drawn) > 1 else []
    return Section("metrics", "Metrics", _metrics_summary(report, drawn), others)


def _checkpoint_metrics(report: Report) -> Section:
    """Returns the section with the metrics of a checkpoint outside of a run."""
    found = {name: v for step in report.steps for name, v in step.metrics.items()}
    if not found:
        text = "No metrics are stored with the checkpoint."
        return Section("metrics", "Metrics", text)
    columns = [tables.Column("metric"), tables.Column("value", is_number=True)]
    rows = [
        tables.TableRow(
            [name, tables.TableCell(humanize.number(value), value)],
            {"data_metric": name, "data_value": value},
        )
        for name, value in found.items()
    ]
    stored = humanize.count(len(found), "metric is", "metrics are")
    table = tables.table("Values", columns, rows, what="metrics")
    text = f"{stored} stored with the checkpoint."
    return Section("metrics", "Metrics", text, [table])


def _metrics_summary(report: Report, drawn: Sequence[str]) -> str:
    points = [point for values in report.metrics.values() for point in values]
    steps = len({point.step for point in points})
    gone = len({point.step for point in points if point.is_deleted})
    text = humanize.count(steps, "saved step")
    text += f", {gone:,} of them deleted since." if gone else "."
    if not any(point.best == "best" for point in points):
        text += (
            " Only a policy defines which step is best: pass --keep best:1:NAME:min, or"
            " --config."
        )
    if len(drawn) > flight_recorder.MOST_METRICS:
        text += f" The first {flight_recorder.MOST_METRICS} of {len(drawn)} are drawn."
    missing = [name for name in report.metrics if name not in drawn]
    if missing:
        text += f" Never finite: {', '.join(missing[:5])}."
    return text


# ---- steps ------------------------------------------------------------------------


def steps(
    report: Report, *, most: int = _MOST_ROWS, rest: object = "--json lists them all."
) -> Section | None:
    """Returns the section on all steps and the reasons to keep or delete them.

    Args:
        report: The data.
        most: Row limit of the table.
        rest: Where the steps beyond are to be found.
    """
    if not report.is_run:
        return None
    if not report.history:
        return Section("steps", "Steps", "There are no steps yet.")
    existing = {s.step: s for s in report.steps if s.step is not None}
    gone = sum(not saved.exists for saved in report.history)
    return Section(
        "steps",
        "Steps",
        _steps_summary(report, gone),
        _table(report, existing, most, rest),
    )


def _steps_summary(report: Report, gone: int) -> str:
    if report.policies:
        policies = f"The policies are {', '.join(report.policies)}."
    elif report.policies is not None:
        policies = "The run deletes no steps."
    else:
        policies = (
            "The policies of the run are unknown: pass --keep or --config to show the"
            " reasons to keep each step."
        )
    existing = humanize.count(len(report.steps), "existing step")
    text = f"{existing}, {gone:,} deleted. " if gone else f"{existing}. "
    text += policies
    unkept = [s for s in report.steps if not s.why]
    if unkept and report.policies:
        text += f" No policy keeps {len(unkept)} of them."
    return text


def _table(
    report: Report, existing: Mapping[int, Step], most: int, rest: object
) -> list[html.Markup]:
    names = list(report.metrics)[:_MOST_COLUMNS]
    columns = [
        tables.Column("step", is_number=True),
        *[tables.Column(name, is_number=True) for name in names],
        tables.Column("marks"),
        tables.Column("kept by, or why deleted", is_wide=True),
        tables.Column("saved"),
        tables.Column("size", is_number=True),
        tables.Column("blocked", is_number=True),
        tables.Column("durable in", is_number=True),
        tables.Column("format"),
    ]
    rows = []
    marks, faults = report.marks, report.faults
    best = {number for number, step in existing.items() if "best" in step.marks}
    known = {saved.step: saved.metrics for saved in report.history}
    for saved in _shown(report.history, most, best):
        step = existing.get(saved.step)
        verdicts = report.verdicts.get(saved.step, ())
        lines = [_verdict(verdict, saved, known) for verdict in verdicts]
        rows.append(
            _deleted_row(saved, lines, names)
            if step is None
            else _step_row(
                step,
                saved,
                names,
                marks=marks[step.step],
                why=_why(report, step, faults.get(step.step)),
                has_format=len(report.formats) > 1,
            )
        )
    parts = [tables.table("The newest first", columns, rows, what="steps")]
    if len(report.history) > len(rows):
        more = len(report.history) - len(rows)
        note = html.element("p", f"… and {more:,} more: ", rest, class_="note")
        parts.append(note)
    return parts


def _shown(
    history: Sequence[SavedStep], most: int, best: Collection[int]
) -> list[SavedStep]:
    """Returns the steps to list, the newest first.

    Of too many, the best steps stay, and existing before deleted ones.
    """
    ranked = sorted(history, key=lambda s: (s.step not in best, not s.exists, -s.step))
    return sorted(ranked[:most], key=lambda s: -s.step)


def _step_row(
    step: Step,
    saved: SavedStep,
    names: Sequence[str],
    *,
    marks: Sequence[Mark],
    why: str,
    has_format: bool,
) -> tables.TableRow:
    cells = [
        str(saved.step),
        *_metric_cells(step.metrics, names),
        html.join(map(_mark, marks)),
        why,
        _moment(step.created),
        _size(step.bytes),
        _secs(saved.blocked_secs),
        _secs(saved.total_secs),
        step.format if has_format else "",
    ]
    data: dict[str, object] = {
        "id": row_name(saved.step),
        "data_step": step.step,
        "data_bytes": step.bytes,
        "data_why": "; ".join(step.why) or None,
        "data_blocked": saved.blocked_secs,
        "data_total": saved.total_secs,
    }
    return tables.TableRow(
        cells, data, "bad" if not _BAD.isdisjoint(m.kind for m in marks) else None
    )


def _deleted_row(
    saved: SavedStep, verdicts: Sequence[html.Markup], names: Sequence[str]
) -> tables.TableRow:
    when = humanize.when(saved.deleted) if math.isfinite(saved.deleted or 0) else ""
    why = ", ".join(filter(None, (saved.reason or "not recorded", when)))
    cells = [
        str(saved.step),
        *_metric_cells(saved.metrics, names),
        _mark(Mark("deleted", "deleted")),
        _folded(why, verdicts),
        _moment(saved.saved),
        _size(saved.bytes),
        _secs(saved.blocked_secs),
        _secs(saved.total_secs),
        "",
    ]
    data: dict[str, object] = {
        "id": row_name(saved.step),
        "data_step": saved.step,
        "data_deleted": saved.reason or "yes",
        "data_blocked": saved.blocked_secs,
        "data_total": saved.total_secs,
    }
    return tables.TableRow(cells, data, "deleted")


def row_name(step: int) -> str:
    """Returns the identifier of a step's row, for links."""
    return f"step-{step}"


def _mark(mark: Mark) -> html.Markup:
    kind = mark.kind.replace(" ", "-")
    return html.element("span", mark.text, class_=f"mark {kind}")


def _folded(text: str, lines: Sequence[html.Markup]) -> object:
    if not lines:
        return text
    return html.element("details", html.element("summary", text), *lines)


def _verdict(
    verdict: Verdict, step: SavedStep, metrics: Mapping[int, Mapping[str, float]]
) -> html.Markup:
    """Returns a line with the steps that a policy kept instead of `step`.

    Args:
        verdict: The choice of the policy.
        step: The deleted step.
        metrics: Step -> its metrics, of all steps.
    """
    kept = verdict.kept
    values = [metrics.get(number, {}).get(verdict.metric or "") for number in kept]
    if len(kept) > _MOST_KEPT:
        shown = f"{len(kept)} steps from {kept[0]:,} to {kept[-1]:,}"
        finite = [value for value in values if value is not None]
        if finite:
            ends = humanize.number(min(finite)), humanize.number(max(finite))
            shown += f" ({ends[0]} to {ends[1]})"
    else:
        each = zip(kept, values, strict=True)
        shown = ", ".join(
            f"{n:,}" if value is None else f"{n:,} ({humanize.number(value)})"
            for n, value in each
        )
    text = f"{verdict.policy} kept {shown or 'none'}"
    if verdict.metric is not None:
        own = step.metrics.get(verdict.metric)
        value = "none" if own is None else humanize.number(own)
        text += f"; step {step.step:,} had {value}"
    return html.element("div", text)


def _metric_cells(values: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [f"{values[name]:.6g}" if name in values else "" for name in names]


def _moment(seconds: float | None) -> object:
    shown = html.moment(seconds)
    return tables.TableCell(shown, seconds) if shown and seconds is not None else ""


def _size(count: int | None) -> object:
    return "" if count is None else tables.TableCell(humanize.size(count), count)


def _secs(value: float | None) -> object:
    return "" if value is None else tables.TableCell(humanize.secs(value), value)


_BAD = frozenset(("damaged", "not readable"))


def _why(report: Report, step: Step, fault: str | None) -> str:
    """Returns the reasons to keep a step, without "no policy"."""
    if step.damage is not None:
        if not step.is_counted:
            return "damaged: no policy counts it"
        return "damaged, but not marked as damaged: policies count it"
    why = [reason for reason in step.why if reason != "no policy"]
    if not report.policies:
        return ", ".join(why)
    if why and fault == "damaged":
        why[-1] += ", because it is not marked as damaged"
    return ", ".join(why) or "nothing: would be deleted"
