"""The section on saves, with the time that training waited."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from flaxckpt import _util
from flaxckpt._report import section
from flaxckpt._report.charts import timeline
from flaxckpt._report.data import Report, Save
from flaxckpt._report.section import Section
from flaxckpt._util.html import Column, Row


def saves(report: Report) -> Section:
    """Returns the section on the duration of saves, and the blocked time."""
    if not report.saves:
        note = report.notes.get("saves", "The journal tells of no saves.")
        return Section("saves", "Saves", note)
    bars = [
        timeline.Bar(
            save.step,
            save.began,
            save.blocked_secs or 0.0,
            save.behind_secs,
            _trouble(save),
        )
        for save in report.saves
    ]
    others = [
        timeline.Happening(each.time, each.kind, _told(each.step, each.why))
        for each in report.happened
        if each.kind != "deleted"
    ]
    others += [
        timeline.Happening(save.began, "failed", _told(save.step, save.error or ""))
        for save in report.saves
        if save.outcome == "failed"
    ]
    pictures = [
        timeline.timeline(bars, others, w) for w in (section.WIDE, section.NARROW)
    ]
    key = section.legend(
        [
            ("bar blocked", "training waited"),
            ("bar behind", "written behind it"),
            *_glyphs(report),
        ]
    )
    rows = section.table(
        "Saves, the newest first",
        _SAVE_COLUMNS,
        [_save_row(s) for s in report.saves[::-1]],
    )
    return Section(
        "saves",
        "Saves",
        _saves_said(report.saves),
        [key, _util.html.both(*pictures), *rows],
    )


def _trouble(save: Save) -> str | None:
    if save.outcome == "durable":
        return None
    return f"failed: {save.error}" if save.error else "never became durable"


def _told(step: int | None, why: str) -> str:
    at = "" if step is None else f"step {step}"
    return ", ".join(filter(None, (at, why)))


def _glyphs(report: Report) -> list[tuple[str, str]]:
    kinds = {each.kind for each in report.happened}
    if any(save.outcome == "failed" for save in report.saves):
        kinds.add("failed")
    named = {
        "restored": "▲ restored",
        "preempted": "■ preempted",
        "fell_back": "◆ fell back",
        "failed": "× failed",  # noqa: RUF001
    }
    return [("", name) for kind, name in named.items() if kind in kinds]


def _saves_said(found: Sequence[Save]) -> str:
    durable = [save for save in found if save.total_secs is not None]
    blocked = sum(save.blocked_secs or 0.0 for save in durable)
    total = sum(save.total_secs or 0.0 for save in durable)
    longest = max((save.blocked_secs or 0.0 for save in durable), default=0.0)
    told = f"{_util.humanize.count(len(durable), 'save')} became durable."
    if total:
        told += (
            f" Training waited {_util.humanize.secs(blocked)} of the"
            f" {_util.humanize.secs(total)}"
            f" that they took ({blocked / total:.0%}), {_util.humanize.secs(longest)}"
            " at most"
            " for one."
        )
    counts = collections.Counter(save.outcome for save in found)
    if counts["failed"]:
        told += f" {_util.humanize.count(counts['failed'], 'save')} failed."
    if counts["unfinished"]:
        told += f" {counts['unfinished']} did not come to an end."
    return told


_SAVE_COLUMNS = [
    Column("step", is_number=True),
    Column("began"),
    Column("blocked", is_number=True),
    Column("behind", is_number=True),
    Column("durable after", is_number=True),
    Column("written", is_number=True),
    Column("upload", is_number=True),
    Column("trouble"),
]


def _save_row(save: Save) -> Row:
    cells = [
        "" if save.step is None else str(save.step),
        _util.html.moment(save.began, _util.humanize.TO_THE_SECOND),
        *map(_secs, (save.blocked_secs, save.behind_secs, save.total_secs)),
        "" if save.bytes is None else _util.humanize.size(save.bytes),
        _secs(save.uploaded_secs),
        _trouble(save) or "",
    ]
    data = {
        "data_step": save.step,
        "data_blocked": save.blocked_secs,
        "data_behind": save.behind_secs,
        "data_total": save.total_secs,
        "data_bytes": save.bytes,
        "data_outcome": save.outcome,
    }
    return Row(cells, data, None if save.outcome == "durable" else "bad")


def _secs(value: float | None) -> str:
    return "" if value is None else _util.humanize.secs(value)
