"""The section on saves, with the time that training waited."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from flaxckpt._report import section
from flaxckpt._report.charts import timeline
from flaxckpt._report.data import Report, Save
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize


def saves(report: Report) -> Section:
    """Returns the section on the duration of saves, and the blocked time."""
    if not report.saves:
        note = report.notes.get("saves", "The journal records no saves.")
        return Section("saves", "Saves", note)
    others = [
        timeline.TimelineEvent(event.time, event.kind, _describe(event.step, event.why))
        for event in report.happened
        if event.kind != "deleted"
    ]
    others += [
        timeline.TimelineEvent(
            save.began, "failed", _describe(save.step, save.error or "")
        )
        for save in report.saves
        if save.outcome == "failed"
    ]
    pictures = [
        timeline.timeline(report.saves, others, w)
        for w in (section.WIDE, section.NARROW)
    ]
    key = section.legend(
        [
            ("bar blocked", "training waited"),
            ("bar behind", "written in the background"),
            *_glyphs(report),
        ]
    )
    rows = section.table(
        "Saves, the newest first",
        _SAVE_COLUMNS,
        [_save_row(s) for s in report.saves[::-1]],
    )
    return Section(
        "saves", "Saves", _summary(report.saves), [key, html.both(*pictures), *rows]
    )


def _describe(step: int | None, why: str) -> str:
    name = "" if step is None else f"step {step}"
    return ", ".join(filter(None, (name, why)))


def _glyphs(report: Report) -> list[tuple[str, str]]:
    kinds = {event.kind for event in report.happened}
    if any(save.outcome == "failed" for save in report.saves):
        kinds.add("failed")
    labels = {
        "restored": "▲ restored",
        "preempted": "■ preempted",
        "fell_back": "◆ fell back",
        "failed": "× failed",  # noqa: RUF001
    }
    return [("", label) for kind, label in labels.items() if kind in kinds]


def _summary(saves: Sequence[Save]) -> str:
    durable = [save for save in saves if save.total_secs is not None]
    blocked = sum(save.blocked_secs or 0.0 for save in durable)
    total = sum(save.total_secs or 0.0 for save in durable)
    longest = max((save.blocked_secs or 0.0 for save in durable), default=0.0)
    text = f"{humanize.count(len(durable), 'save')} became durable."
    if total:
        text += (
            f" Training waited {humanize.secs(blocked)} of the"
            f" {humanize.secs(total)}"
            f" that they took ({blocked / total:.0%}), {humanize.secs(longest)}"
            " at most"
            " for one."
        )
    counts = collections.Counter(save.outcome for save in saves)
    if counts["failed"]:
        text += f" {humanize.count(counts['failed'], 'save')} failed."
    if counts["cancelled"]:
        verb = "was" if counts["cancelled"] == 1 else "were"
        text += f" {counts['cancelled']} {verb} cancelled."
    if counts["unfinished"]:
        text += f" {counts['unfinished']} did not finish."
    return text


_SAVE_COLUMNS = [
    html.Column("step", is_number=True),
    html.Column("began"),
    html.Column("blocked", is_number=True),
    html.Column("background", is_number=True),
    html.Column("durable after", is_number=True),
    html.Column("written", is_number=True),
    html.Column("upload", is_number=True),
    html.Column("failure"),
]


def _save_row(save: Save) -> html.Row:
    cells = [
        "" if save.step is None else str(save.step),
        html.moment(save.began, humanize.TO_THE_SECOND),
        *map(_secs, (save.blocked_secs, save.behind_secs, save.total_secs)),
        "" if save.bytes is None else humanize.size(save.bytes),
        _secs(save.uploaded_secs),
        save.failure or "",
    ]
    data = {
        "data_step": save.step,
        "data_blocked": save.blocked_secs,
        "data_behind": save.behind_secs,
        "data_total": save.total_secs,
        "data_bytes": save.bytes,
        "data_outcome": save.outcome,
    }
    return html.Row(cells, data, "bad" if save.has_failed else None)


def _secs(value: float | None) -> str:
    return "" if value is None else humanize.secs(value)
