"""The sections on the dataset, the lineage and the integrity of steps."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from flaxckpt._report import section
from flaxckpt._report.data import Report, State
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize
from flaxckpt.formats._reader import Lineage

# ---- the dataset ------------------------------------------------------------------


def dataset(report: Report) -> Section | None:
    """Returns the section on the dataset positions at each step."""
    note = report.notes.get("dataset", "")
    if not report.positions:
        return Section("dataset", "Dataset", note) if note else None
    types = [position.type for position in report.positions if position.type]
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in types)
    steps = humanize.count(len(report.positions), "step")
    summary = f"The dataset position is stored with {steps}"
    summary += f": {', '.join(kinds)}." if kinds else "."
    names = list(
        dict.fromkeys(name for position in report.positions for name in position.values)
    )[:4]
    columns = [
        html.Column("step", is_number=True),
        *[html.Column(name, is_number=True) for name in names],
        html.Column("processes", is_number=True),
        html.Column("size", is_number=True),
    ]
    rows = []
    for position in report.positions[::-1]:
        values = [
            "" if n not in position.values else str(position.values[n]) for n in names
        ]
        size = "" if position.bytes is None else humanize.size(position.bytes)
        step = "" if position.step is None else str(position.step)
        data: dict[str, object] = {
            "data_step": position.step,
            "data_values": "; ".join(f"{k}={v}" for k, v in position.values.items()),
        }
        processes = str(position.processes) if position.processes else ""
        rows.append(html.Row([step, *values, processes, size], data))
    return Section(
        "dataset",
        "Dataset",
        f"{summary} {note}".strip(),
        section.table("Positions, the newest first", columns, rows),
    )


# ---- lineage ----------------------------------------------------------------------


def lineage(report: Report) -> Section | None:
    """Returns the section on the checkpoints that the run started from."""
    if not report.lineage:
        return None
    here = html.element(
        "li",
        html.element("strong", section.display_name(report.path) or report.path),
        html.element("p", "this run" if report.is_run else "this checkpoint"),
        class_="here",
    )
    items = [_origin(source) for source in reversed(report.lineage)]
    return Section(
        "lineage",
        "Lineage",
        "The run started from another checkpoint, as each step records.",
        [html.element("ol", *items, here, class_="lineage")],
    )


def _origin(source: Lineage) -> html.Markup:
    parts: list[object] = [html.element("strong", source.path)]
    identity = [] if source.step is None else [f"step {source.step}"]
    if source.digest is not None:
        identity.append(source.digest)
    if identity:
        parts.append(html.element("p", ", ".join(identity), class_="digest"))
    if source.transforms:
        changes = [
            html.element("li", html.element("code", transform))
            for transform in source.transforms
        ]
        parts.append(html.element("ul", *changes, aria_label="Changes"))
    return html.element("li", *parts, data_path=source.path, data_step=source.step)


# ---- integrity --------------------------------------------------------------------


def integrity(report: Report) -> Section | None:
    """Returns the section on damage, and on the checks made."""
    if not report.integrity:
        return None
    counts = collections.Counter(check.state for check in report.integrity)
    parts = [f"{counts[state]:,} {_NAMES[state]}" for state in _NAMES if counts[state]]
    summary = f"{', '.join(parts).capitalize()}."
    if checked := counts["unknown"] and report.checked_count:
        total = len(report.integrity)
        summary = f"{checked:,} of {total:,} checked: {', '.join(parts)}."
    if not counts["verified"]:
        summary += " Arrays were not read: --verify reads every byte."
    columns = [
        html.Column("step", is_number=True),
        html.Column("state"),
        html.Column("finding"),
    ]
    rows = []
    for check in report.integrity[::-1]:
        state = html.element("span", _NAMES[check.state], class_=f"state {check.state}")
        step = "" if check.step is None else str(check.step)
        kind = "bad" if check.state in ("damaged", "unread") else None
        data: dict[str, object] = {
            "data_step": check.step,
            "data_state": check.state,
            "data_bytes": check.bytes_checked,
        }
        rows.append(html.Row([step, state, check.detail], data, kind))
    rows.sort(key=lambda row: row.kind is None)  # problems come first
    return Section(
        "integrity", "Integrity", summary, section.table("Each step", columns, rows)
    )


_NAMES: Mapping[State, str] = {
    "verified": "verified",
    "whole": "whole",
    "damaged": "damaged",
    "unread": "could not be read",
    "unknown": "not checked",
}
