"""The sections on the dataset, the lineage and the integrity of steps."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from flaxckpt import _util
from flaxckpt._report import section
from flaxckpt._report.data import Report, State
from flaxckpt._report.section import Section
from flaxckpt._util.html import Column, Markup, Row
from flaxckpt.formats._reader import Lineage

# ---- the dataset ------------------------------------------------------------------


def dataset(report: Report) -> Section | None:
    """Returns the section on the dataset positions at each step."""
    note = report.notes.get("dataset", "")
    if not report.positions:
        return Section("dataset", "Dataset", note) if note else None
    types = [each.type for each in report.positions if each.type]
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in types)
    said = (
        f"{_util.humanize.count(len(report.positions), 'step')} can go on where the"
        " data was"
    )
    said += f": {', '.join(kinds)}." if kinds else "."
    names = list(
        dict.fromkeys(name for each in report.positions for name in each.values)
    )[:4]
    columns = [
        Column("step", is_number=True),
        *[Column(name, is_number=True) for name in names],
        Column("processes", is_number=True),
        Column("size", is_number=True),
    ]
    rows = []
    for each in report.positions[::-1]:
        values = ["" if n not in each.values else str(each.values[n]) for n in names]
        size = "" if each.bytes is None else _util.humanize.size(each.bytes)
        step = "" if each.step is None else str(each.step)
        data: dict[str, object] = {
            "data_step": each.step,
            "data_values": "; ".join(f"{k}={v}" for k, v in each.values.items()),
        }
        processes = str(each.processes) if each.processes else ""
        rows.append(Row([step, *values, processes, size], data))
    return Section(
        "dataset",
        "Dataset",
        f"{said} {note}".strip(),
        section.table("Positions, the newest first", columns, rows),
    )


# ---- lineage ----------------------------------------------------------------------


def lineage(report: Report) -> Section | None:
    """Returns the section on the checkpoints that the run started from."""
    if not report.lineage:
        return None
    said = "This run began from another checkpoint; each step records it."
    here = _util.html.element(
        "li",
        _util.html.element("strong", section.last(report.path) or report.path),
        _util.html.element("p", "this run" if report.is_run else "this checkpoint"),
        class_="here",
    )
    items = [_origin(each) for each in reversed(report.lineage)]
    return Section(
        "lineage",
        "Lineage",
        said,
        [_util.html.element("ol", *items, here, class_="lineage")],
    )


def _origin(found: Lineage) -> Markup:
    parts: list[object] = [_util.html.element("strong", found.path)]
    told = [] if found.step is None else [f"step {found.step}"]
    if found.digest is not None:
        told.append(found.digest)
    if told:
        parts.append(_util.html.element("p", ", ".join(told), class_="digest"))
    if found.transforms:
        changes = [
            _util.html.element("li", _util.html.element("code", each))
            for each in found.transforms
        ]
        parts.append(_util.html.element("ul", *changes, aria_label="Changes"))
    return _util.html.element("li", *parts, data_path=found.path, data_step=found.step)


# ---- integrity --------------------------------------------------------------------


def integrity(report: Report) -> Section | None:
    """Returns the section on damage, and on the checks made."""
    if not report.integrity:
        return None
    counts = collections.Counter(each.state for each in report.integrity)
    told = [f"{counts[state]:,} {_SAID[state]}" for state in _SAID if counts[state]]
    said = f"{', '.join(told).capitalize()}."
    if known := counts["unknown"] and report.looked_at:
        said = f"{known:,} of {len(report.integrity):,} looked at: {', '.join(told)}."
    if not counts["verified"]:
        said += " Arrays were not read: --verify reads every byte."
    columns = [
        Column("step", is_number=True),
        Column("state"),
        Column("what was found"),
    ]
    rows = []
    for each in report.integrity[::-1]:
        state = _util.html.element(
            "span", _SAID[each.state], class_=f"state {each.state}"
        )
        step = "" if each.step is None else str(each.step)
        kind = "bad" if each.state in ("damaged", "unread") else None
        data: dict[str, object] = {
            "data_step": each.step,
            "data_state": each.state,
            "data_bytes": each.bytes_checked,
        }
        rows.append(Row([step, state, each.detail], data, kind))
    rows.sort(key=lambda row: row.kind is None)  # problems come first
    return Section(
        "integrity", "Integrity", said, section.table("Each step", columns, rows)
    )


_SAID: Mapping[State, str] = {
    "verified": "verified",
    "whole": "whole",
    "damaged": "damaged",
    "unread": "could not be read",
    "unknown": "not looked at",
}
