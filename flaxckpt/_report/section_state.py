"""The sections on the sizes in a step, and on changes between steps."""

from __future__ import annotations

import collections
import math

from flaxckpt._report import section
from flaxckpt._report.charts import treemap
from flaxckpt._report.data import ChangedLeaf, Part, Report
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize

_MOST_CHANGES = 20


# ---- sizes ------------------------------------------------------------------------


def sizes(report: Report) -> Section:
    """Returns the section on the sizes in the newest step."""
    if not report.parts:
        return Section(
            "sizes", "Sizes", report.notes.get("sizes", "There are no arrays.")
        )
    groups: dict[str, list[Part]] = collections.defaultdict(list)
    for part in report.parts:
        groups[part.group].append(part)
    drawn = [
        treemap.Group(name, [_tile(part) for part in parts])
        for name, parts in groups.items()
    ]
    pictures = [
        treemap.treemap(drawn, section.WIDE, 400),
        treemap.treemap(drawn, section.NARROW, 420),
    ]
    ordered = sorted(report.parts, key=lambda part: -part.bytes)
    rows = [_part_row(part, report.total_bytes) for part in ordered]
    leaves = humanize.count(report.leaves, "leaf", "leaves")
    summary = (
        f"{humanize.size(report.total_bytes)} of arrays, uncompressed, in"
        f" {leaves} of"
        f" {section.display_name(report.shown)}."
    )
    columns = [
        html.Column("subtree"),
        html.Column("leaves", is_number=True),
        html.Column("size", is_number=True),
        html.Column("share", is_number=True),
    ]
    as_table = html.element(
        "details",
        html.element("summary", "The sizes as a table"),
        html.table("Sizes by subtree", columns, rows),
    )
    return Section("sizes", "Sizes", summary, [html.both(*pictures), as_table])


def _display_name(part: Part) -> str:
    if part.until is None:
        return part.path or "(all)"
    return f"{part.path} … {part.until.rpartition('/')[2]}"


def _tile(part: Part) -> treemap.Tile:
    name = _display_name(part)
    description = f"{name}, {humanize.count(part.leaves, 'leaf', 'leaves')}"
    inside = name.removeprefix(f"{part.group}/")
    return treemap.Tile(inside, description, name, part.bytes)


def _part_row(part: Part, total: int) -> html.Row:
    share = part.bytes / total if total else 0.0
    cells = [
        _display_name(part),
        f"{part.leaves:,}",
        humanize.size(part.bytes),
        f"{share:.1%}",
    ]
    return html.Row(cells, {"data_path": _display_name(part), "data_bytes": part.bytes})


# ---- changes ----------------------------------------------------------------------


def change(report: Report) -> Section | None:
    """Returns the section on the leaves that differ between two steps."""
    diff = report.change
    title = "Change"
    if diff is None:
        if not report.is_run:
            return None
        return Section("change", title, report.notes.get("change", "Not compared."))
    between = f"From step {diff.step_a} to step {diff.step_b}"
    if not diff.leaves:
        return Section("change", title, f"{between}, nothing changed.")
    count = humanize.count(len(diff.leaves), "leaf", "leaves")
    summary = f"{between}, {count} changed and {diff.equal:,} did not."
    shown = diff.leaves[:_MOST_CHANGES]
    if len(diff.leaves) > len(shown):
        summary += f" The {len(shown)} that changed most are shown; --json lists all."
    finite = [leaf.rel_norm for leaf in shown if math.isfinite(leaf.rel_norm)]
    largest = max(finite, default=0.0)
    columns = [
        html.Column("leaf"),
        html.Column("relative change", is_number=True),
        html.Column("at most", is_number=True),
        html.Column("elements", is_number=True),
        html.Column("type"),
    ]
    rows = [_change_row(leaf, largest) for leaf in shown]
    caption = "Largest relative changes first: norm of the change / norm before"
    return Section("change", title, summary, [html.table(caption, columns, rows)])


def _change_row(leaf: ChangedLeaf, largest: float) -> html.Row:
    data: dict[str, object] = {"data_path": leaf.path, "data_what": leaf.what}
    if not leaf.different:
        what = leaf.shown if leaf.what in ("kind", "shape") else leaf.what
        return html.Row([leaf.path, "", "", "", what], data)
    part = min(leaf.rel_norm / largest, 1.0) if largest else 0.0
    if not math.isfinite(leaf.rel_norm):
        part = 1.0
    bar = html.element(
        "svg",
        html.element("rect", x=0, y=1, width=100, height=8, class_="track"),
        html.element(
            "rect", x=0, y=1, width=html.px(100 * part), height=8, class_="bar behind"
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
        html.element("div", f"{leaf.rel_norm:.3g}", bar, class_="with-bar"),
        f"{leaf.max_abs:.3g}",
        f"{leaf.different:,}",
        leaf.shown,
    ]
    return html.Row(cells, data)
