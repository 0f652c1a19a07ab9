"""The sections on saves: the time that training waited, and the layers at each."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from flaxckpt._report import section, tables
from flaxckpt._report.data import LeafHistory, Report, Save
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize

_MOST_ROWS = 250
"""Row limit of the table of failures."""


def saves(report: Report) -> Section:
    """Returns the section on the duration of saves, and the blocked time."""
    if not report.saves:
        note = report.notes.get("saves", "The journal records no saves.")
        return Section("saves", "Saves", note)
    body = [section.drawn("saves")]
    bad = [_failed_row(s) for s in report.saves[::-1] if s.outcome != "durable"]
    if bad:
        title = "Saves that did not become durable, the newest first"
        body.append(tables.table(title, _FAILED_COLUMNS, bad[:_MOST_ROWS]))
    return Section("saves", "Saves", _summary(report.saves), body)


def _summary(saves: Sequence[Save]) -> str:
    durable = [save for save in saves if save.total_secs is not None]
    blocked = sum(save.blocked_secs or 0.0 for save in durable)
    total = sum(save.total_secs or 0.0 for save in durable)
    longest = max((save.blocked_secs or 0.0 for save in durable), default=0.0)
    text = f"{humanize.count(len(durable), 'save')} became durable."
    if total:
        text += (
            f" Training waited {humanize.secs(blocked)} of the"
            f" {humanize.secs(total)} that they took ({blocked / total:.0%}),"
            f" {humanize.secs(longest)} at most for one."
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


# ---- layers -----------------------------------------------------------------------

_MOST_LEAVES = 300


def leaves(report: Report) -> Section | None:
    """Returns the section on recorded statistics; None if there are none."""
    histories = report.leaf_histories
    if not histories:
        return None
    steps = {step for leaf in histories for step in leaf.norms}
    summary = (
        f"Statistics of {humanize.count(len(histories), 'leaf', 'leaves')} at"
        f" {humanize.count(len(steps), 'save')}, from samples that the saves took."
    )
    bad = [leaf for leaf in histories if leaf.nonfinite or _lost(leaf)]
    if bad:
        verb = "has" if len(bad) == 1 else "have"
        count = humanize.count(len(bad), "leaf", "leaves")
        summary += f" {count} {verb} NaNs or infinities."
    shown = histories[:_MOST_LEAVES]
    caption = "The parameters first; the norm, and the last values"
    if len(histories) > len(shown):
        caption += f" ({len(shown)} of {len(histories):,} leaves)"
    table = tables.table(
        caption, _LEAF_COLUMNS, [_leaf_row(leaf) for leaf in shown], what="leaves"
    )
    folded = html.element("details", html.element("summary", "Numbers"), table)
    return Section(
        "leaves",
        "Layers over steps",
        f"{summary} {_HOW}",
        [section.drawn("layers"), folded],
    )


_HOW = (
    "Colours are the relative change of a layer's norm since the save before; a layer"
    " unfolds the histograms of its leaves."
)


_LEAF_COLUMNS = [
    tables.Column("leaf"),
    tables.Column("norm", is_number=True),
    tables.Column("since the first", is_number=True),
    tables.Column("min", is_number=True),
    tables.Column("mean", is_number=True),
    tables.Column("max", is_number=True),
    tables.Column("not finite", is_number=True),
]


def _lost(leaf: LeafHistory) -> bool:
    return not all(math.isfinite(norm) for norm in leaf.norms.values())


def _leaf_row(leaf: LeafHistory) -> tables.TableRow:
    norms = [*leaf.norms.values()]
    first, last = norms[0], norms[-1]
    growth = last / first if first else math.nan
    cells = [
        leaf.path,
        _number(last),
        tables.TableCell(f"× {growth:.3g}", growth) if math.isfinite(growth) else "",  # noqa: RUF001
        *map(_number, (leaf.min, leaf.mean, leaf.max)),
        f"{leaf.nonfinite:,}" if leaf.nonfinite else "",
    ]
    data: dict[str, object] = {"data_path": leaf.path, "data_norm": last}
    return tables.TableRow(
        cells, data, "bad" if leaf.nonfinite or _lost(leaf) else None
    )


def _number(value: float) -> tables.TableCell:
    return tables.TableCell(f"{value:.3g}", value)
