"""The sections on the sizes in a step, and on changes between steps."""

from __future__ import annotations

import collections
import math

from flaxckpt import _util
from flaxckpt._report import section
from flaxckpt._report.charts import treemap
from flaxckpt._report.data import Changed, Part, Report
from flaxckpt._report.section import Section
from flaxckpt._util.html import Column, Row

_MOST_CHANGES = 20


# ---- sizes ------------------------------------------------------------------------


def sizes(report: Report) -> Section:
    """Returns the section on the sizes in the newest step."""
    if not report.parts:
        return Section("sizes", "Sizes", report.notes.get("sizes", "There is nothing."))
    groups: dict[str, list[Part]] = collections.defaultdict(list)
    for part in report.parts:
        groups[part.group].append(part)
    drawn = [
        treemap.Group(name, [_tile(part) for part in found])
        for name, found in groups.items()
    ]
    pictures = [
        treemap.treemap(drawn, section.WIDE, 400),
        treemap.treemap(drawn, section.NARROW, 420),
    ]
    ordered = sorted(report.parts, key=lambda part: -part.bytes)
    rows = [_part_row(part, report.total_bytes) for part in ordered]
    leaves = _util.humanize.count(report.leaves, "leaf", "leaves")
    said = (
        f"{_util.humanize.size(report.total_bytes)} of arrays, uncompressed, in"
        f" {leaves} of"
        f" {section.last(report.shown)}."
    )
    columns = [
        Column("subtree"),
        Column("leaves", is_number=True),
        Column("size", is_number=True),
        Column("share", is_number=True),
    ]
    opened = _util.html.element(
        "details",
        _util.html.element("summary", "The same as a table"),
        _util.html.table("Sizes by subtree", columns, rows),
    )
    return Section("sizes", "Sizes", said, [_util.html.both(*pictures), opened])


def _named(part: Part) -> str:
    if part.until is None:
        return part.path or "(all)"
    return f"{part.path} … {part.until.rpartition('/')[2]}"


def _tile(part: Part) -> treemap.Tile:
    name = _named(part)
    told = f"{name}, {_util.humanize.count(part.leaves, 'leaf', 'leaves')}"
    inside = name.removeprefix(f"{part.group}/")
    return treemap.Tile(inside, told, name, part.bytes)


def _part_row(part: Part, total: int) -> Row:
    share = part.bytes / total if total else 0.0
    cells = [
        _named(part),
        f"{part.leaves:,}",
        _util.humanize.size(part.bytes),
        f"{share:.1%}",
    ]
    return Row(cells, {"data_path": _named(part), "data_bytes": part.bytes})


# ---- changes ----------------------------------------------------------------------


def change(report: Report) -> Section | None:
    """Returns the section on the leaves that differ between two steps."""
    found = report.change
    title = "Change"
    if found is None:
        if not report.is_run:
            return None
        return Section("change", title, report.notes.get("change", "Not compared."))
    between = f"From step {found.step_a} to step {found.step_b}"
    if not found.leaves:
        return Section("change", title, f"{between}, nothing has changed.")
    count = _util.humanize.count(len(found.leaves), "leaf", "leaves")
    said = f"{between}, {count} changed and {found.equal:,} did not."
    shown = found.leaves[:_MOST_CHANGES]
    if len(found.leaves) > len(shown):
        said += f" The {len(shown)} that changed most; --json lists all."
    finite = [leaf.rel_norm for leaf in shown if math.isfinite(leaf.rel_norm)]
    largest = max(finite, default=0.0)
    columns = [
        Column("leaf"),
        Column("relative change", is_number=True),
        Column("at most", is_number=True),
        Column("elements", is_number=True),
        Column("type"),
    ]
    rows = [_change_row(leaf, largest) for leaf in shown]
    caption = "Largest relative changes first: norm of the change / norm before"
    return Section("change", title, said, [_util.html.table(caption, columns, rows)])


def _change_row(leaf: Changed, largest: float) -> Row:
    data: dict[str, object] = {"data_path": leaf.path, "data_what": leaf.what}
    if not leaf.different:
        what = leaf.shown if leaf.what in ("kind", "shape") else leaf.what
        return Row([leaf.path, "", "", "", what], data)
    part = min(leaf.rel_norm / largest, 1.0) if largest else 0.0
    if not math.isfinite(leaf.rel_norm):
        part = 1.0
    bar = _util.html.element(
        "svg",
        _util.html.element("rect", x=0, y=1, width=100, height=8, class_="track"),
        _util.html.element(
            "rect",
            x=0,
            y=1,
            width=_util.html.px(100 * part),
            height=8,
            class_="bar behind",
        ),
        viewBox="0 0 100 10",
        preserveAspectRatio="none",
        class_="inline-bar",
        aria_hidden="true",
    )
    data |= {
        "data_rel": leaf.rel_norm,
        "data_abs": leaf.max_abs,
        "data_different": leaf.different,
    }
    cells = [
        leaf.path,
        _util.html.element("div", f"{leaf.rel_norm:.3g}", bar, class_="with-bar"),
        f"{leaf.max_abs:.3g}",
        f"{leaf.different:,}",
        leaf.shown,
    ]
    return Row(cells, data)
