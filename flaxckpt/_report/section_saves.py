"""The section on saves, with the time that training waited."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from flaxckpt._report import section, tables
from flaxckpt._report.charts import timeline
from flaxckpt._report.data import Report, Save
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize

_MOST_ROWS = 250
"""Row limit of the table of failures."""


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
    key = section.legend(
        [
            ("bar blocked", "training waited"),
            ("bar behind", "written in the background"),
            *_glyphs(report),
        ]
    )
    body = [timeline.timeline(report.saves, others), key]
    bad = [_failed_row(s) for s in report.saves[::-1] if s.outcome != "durable"]
    if bad:
        title = "Saves that did not become durable, the newest first"
        body.append(tables.table(title, _FAILED_COLUMNS, bad[:_MOST_ROWS]))
    return Section("saves", "Saves", _summary(report.saves), body)


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
        "found_damaged": "▼ found damaged",
        "found_good": "△ found good",
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


_FAILED_COLUMNS = [
    tables.Column("step", is_number=True),
    tables.Column("began"),
    tables.Column("blocked", is_number=True),
    tables.Column("failure"),
]


def _failed_row(save: Save) -> tables.TableRow:
    cells = [
        "" if save.step is None else str(save.step),
        html.moment(save.began, humanize.TO_THE_SECOND),
        "" if save.blocked_secs is None else humanize.secs(save.blocked_secs),
        save.failure or "",
    ]
    data = {"data_step": save.step, "data_outcome": save.outcome}
    return tables.TableRow(cells, data, "bad" if save.has_failed else None)
