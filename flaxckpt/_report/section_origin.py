"""The sections on the dataset, the lineage and the integrity of steps."""

from __future__ import annotations

import collections
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flaxckpt._report import section, tables, templates
from flaxckpt._report.data import Integrity, Report, State
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize

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
        tables.Column("step", is_number=True),
        *[tables.Column(name, is_number=True) for name in names],
        tables.Column("processes", is_number=True),
        tables.Column("size", is_number=True),
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
        rows.append(tables.TableRow([step, *values, processes, size], data))
    return Section(
        "dataset",
        "Dataset",
        f"{summary} {note}".strip(),
        [tables.table("The newest first", columns, rows, what="steps")],
    )


# ---- lineage ----------------------------------------------------------------------


def lineage(
    report: Report, *, links: Mapping[str, html.Markup] = MappingProxyType({})
) -> Section | None:
    """Returns the section on the checkpoints that the run started from.

    Args:
        report: The data.
        links: Path of a run or checkpoint -> the address of its page.
    """
    if not report.lineage:
        return None
    picture = templates.render(
        "lineage.html",
        origins=report.lineage[::-1],
        links=links,
        outcome=report.source_outcome,
        name=section.display_name(report.path) or report.path,
        kind="this run" if report.is_run else "this checkpoint",
        display_name=section.display_name,
    )
    text = "The run started from another checkpoint, as each step records."
    return Section("lineage", "Lineage", text, [picture])


# ---- integrity --------------------------------------------------------------------


def integrity(report: Report, *, verify: html.Markup | None = None) -> Section | None:
    """Returns the section on damage, and on the checks made.

    Args:
        report: The data.
        verify: What to do if no array was read; by default, the command.
    """
    if not report.integrity:
        return None
    counts = collections.Counter(check.state for check in report.integrity)
    looked = report.checked_count
    total = len(report.integrity)
    parts = [f"{counts[state]:,} {name}" for state, name in _NAMES.items()]
    found = [part for part, state in zip(parts, _NAMES, strict=True) if counts[state]]
    what = humanize.count(total, "step") if report.is_run else "1 checkpoint"
    summary: object = f"{looked:,} of {what} looked at: {', '.join(found)}."
    if not any(check.bytes_checked for check in report.integrity):
        how = _verify_command(report) if verify is None else verify
        summary = html.join((summary, " No array was read. ", how))
    columns = [
        tables.Column("steps", is_number=True),
        tables.Column("count", is_number=True),
        tables.Column("state"),
        tables.Column("found"),
        tables.Column("finding", is_wide=True),
    ]
    ranges = _ranges(report.integrity)
    rows = [_range_row(checks) for checks in ranges[::-1]]
    rows.sort(key=lambda row: row.kind is None)  # problems come first
    shown = rows[:_MOST_ROWS]
    body = [_state_bar(ranges)] if total > 1 else []
    body.append(tables.table("Neighbouring steps in the same state", columns, shown))
    return Section("integrity", "Integrity", summary, body)


def _verify_command(report: Report) -> html.Markup:
    """Returns a sentence with the command that reads every byte."""
    text = f"flaxckpt verify {shlex.quote(report.path)}"
    parts: list[object] = [text]
    if report.is_run:
        parts += [" ", html.element("span", "--all", class_="whole")]
    command = html.element("code", *parts, class_="command")
    return html.join((command, " reads every byte."))


def _ranges(checks: Sequence[Integrity]) -> list[list[Integrity]]:
    """Returns runs of neighbouring steps in the same state; problems are alone."""
    ranges: list[list[Integrity]] = []
    for check in checks:
        is_same = ranges and ranges[-1][0].state == check.state
        if is_same and not check.is_bad:
            ranges[-1].append(check)
        else:
            ranges.append([check])
    return ranges


def _range_row(checks: Sequence[Integrity]) -> tables.TableRow:
    first, last = checks[0], checks[-1]
    state = html.element("span", _NAMES[last.state], class_=f"state {last.state}")
    name = "" if last.step is None else f"{last.step:,}"
    count = sum(check.bytes_checked for check in checks)
    detail = last.detail
    if first is not last:
        name = f"{first.step:,} – {last.step:,}"  # noqa: RUF001
        if last.state == "verified":
            detail = f"{humanize.size(count)} read"
    data: dict[str, object] = {
        "data_step": last.step,
        "data_first": first.step,
        "data_count": len(checks),
        "data_state": last.state,
        "data_bytes": count,
    }
    cells = [name, f"{len(checks):,}", state, _found(checks), detail]
    return tables.TableRow(cells, data, "bad" if last.is_bad else None)


def _found(checks: Sequence[Integrity]) -> html.Markup:
    """Returns when the state was found, of several steps the first and the last."""
    times = [check.found for check in checks if check.found is not None]
    if not times:
        return html.NOTHING
    ends = [html.moment(seconds) for seconds in (min(times), max(times))]
    return ends[0] if len({*ends}) == 1 else html.join((ends[0], " – ", ends[1]))  # noqa: RUF001


def _state_bar(ranges: Sequence[Sequence[Integrity]]) -> html.Markup:
    """Draws the steps from the oldest to the newest, coloured by their states."""
    total = sum(map(len, ranges))
    parts, left = [], 0.0
    for checks in ranges:
        width = 100 * len(checks) / total
        steps = humanize.count(len(checks), "step")
        text = f"{steps} to step {checks[-1].step}: {_NAMES[checks[0].state]}"
        parts.append(
            html.element(
                "rect",
                html.element("title", text),
                x=html.percent(left),
                width=html.percent(max(width, 0.2)),
                y=0,
                height=14,
                class_=f"check {checks[0].state}",
            )
        )
        left += width
    counts: collections.Counter[State] = collections.Counter()
    for checks in ranges:
        counts[checks[0].state] += len(checks)
    key = [(f"check {s}", f"{counts[s]:,} {n}") for s, n in _NAMES.items() if counts[s]]
    picture = html.plot(
        "Integrity of the steps, the oldest first",
        ", ".join(text for _, text in key),
        14,
        *parts,
    )
    return html.join([picture, section.legend(key)])


_NAMES: Mapping[State, str] = {
    "damaged": "damaged",
    "unread": "could not be read",
    "verified": "verified",
    "whole": "with all files and sizes",
    "unknown": "not looked at",
}

_MOST_ROWS = 250
