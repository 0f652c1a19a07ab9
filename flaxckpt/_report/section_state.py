"""The sections on the sizes in a step, and on changes between steps."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Sequence

from flaxckpt import errors
from flaxckpt._report import copies, section, tables, tree
from flaxckpt._report.charts import share_bar, treemap
from flaxckpt._report.data import Change, ChangedLeaf, Part, Report
from flaxckpt._report.section import Section
from flaxckpt._util import html, humanize

_MOST_CHANGES = 100
"""Row limit of each part of the state."""

_MOST_LEAVES = 3000
"""Row limit of the tree of leaves."""

_MOST_SHARES = 7
_LEAST_SHARE = 0.002


# ---- sizes ------------------------------------------------------------------------


def sizes(report: Report, *, has_tree: bool = True) -> Section:
    """Returns the section on the sizes in the newest step.

    Args:
        report: The data.
        has_tree: False to leave out the tree of the leaves.
    """
    if not report.parts:
        return Section(
            "sizes", "Sizes", report.notes.get("sizes", "There are no arrays.")
        )
    leaves = humanize.count(report.leaves, "leaf", "leaves")
    summary = (
        f"{humanize.size(report.total_bytes)} of arrays, uncompressed, in {leaves} of"
        f" {section.display_name(report.shown)}."
    )
    body = [share_bar.share_bar("Parts of the state", _shares(report))]
    if len(report.parts) > 1:
        body.append(_picture(report))
    if has_tree:
        body += _tree(report)
    return Section("sizes", "Sizes", summary, body)


def _tree(report: Report) -> list[html.Markup]:
    body = [tree.tree(_branches(report), "Containers and leaves")]
    shown = sum(row.type is not None for row in report.tree)
    if shown > _MOST_LEAVES:
        note = (
            f"The first {_MOST_LEAVES:,} of {shown:,} leaves: flaxckpt show lists all."
        )
        body.append(html.element("p", note, class_="note"))
    return body


def _shares(report: Report) -> list[share_bar.Share]:
    """Returns the outermost containers, and the copies inside of them on their own."""
    depth = _outermost_depth(report)
    outermost = [row for row in report.tree if row.depth == depth]
    sized = [(row.path or row.name, row.bytes, "") for row in outermost]
    copied = [
        (c.path, c.bytes, f"the shapes of {c.of or 'all'}") for c in report.copies
    ]
    sized.sort(key=lambda share: -share[1])
    ranked = [*sized[: _MOST_SHARES - len(copied)], *copied]
    large = [s for s in ranked if s[1] >= report.total_bytes * _LEAST_SHARE]
    rest = report.total_bytes - sum(size for _, size, _ in large)
    if rest > 0:
        large.append(("other", rest, ""))
    return [
        share_bar.Share(*share, min(n, share_bar.COLOURS - 1))
        for n, share in enumerate(large)
    ]


def _outermost_depth(report: Report) -> int:
    """Returns the least depth with several containers or leaves."""
    counts = collections.Counter(row.depth for row in report.tree)
    return next((d for d in sorted(counts) if counts[d] > 1), min(counts))


def _picture(report: Report) -> html.Markup:
    groups: dict[str, list[Part]] = collections.defaultdict(list)
    for part in report.parts:
        groups[part.group].append(part)
    drawn = [
        treemap.TileGroup(name, [_tile(part) for part in parts])
        for name, parts in groups.items()
    ]
    caption = "Areas are bytes."
    if report.copies:
        originals = dict.fromkeys(
            copy.of or "the whole state" for copy in report.copies
        )
        names = ", ".join(copy.path for copy in report.copies)
        caption = (
            f"Areas are bytes. {names}: left out, because they have the same leaves and"
            f" shapes as {', '.join(originals)}."
        )
    return html.element(
        "figure",
        html.both(
            treemap.treemap(drawn, section.WIDE, 300),
            treemap.treemap(drawn, section.NARROW, 380),
        ),
        html.element("figcaption", caption, class_="note"),
    )


def _display_name(part: Part) -> str:
    if part.until is None:
        return part.path
    return f"{part.path} … {part.until.rpartition('/')[2]}"


def _tile(part: Part) -> treemap.Tile:
    name = _display_name(part)
    description = f"{name}, {humanize.count(part.leaves, 'leaf', 'leaves')}"
    inside = name.removeprefix(f"{part.group}/")
    return treemap.Tile(inside, description, name, part.bytes)


def _branches(report: Report) -> list[tree.Branch]:
    """Returns the outermost containers and leaves, and the copies as single entries."""
    inner: list[list[int]] = [[] for _ in report.tree]
    count = 0
    for n, above in enumerate(copies.find_parents([row.depth for row in report.tree])):
        count += report.tree[n].type is not None
        if above is not None and count <= _MOST_LEAVES:
            inner[above].append(n)

    def branch(n: int) -> tree.Branch:
        row = report.tree[n]
        inside = [branch(child) for child in inner[n]]
        inside.sort(key=lambda child: copies.is_optimizer(child.path))
        is_open = row.depth == 1 and not copies.is_optimizer(row.path)
        return tree.Branch(
            row.name, row.path, row.leaves, row.bytes, row.type or "", inside, is_open
        )

    whole = branch(0)
    outermost = list(whole.inner or [whole])
    return outermost + [
        tree.Branch(
            copy.path,
            copy.path,
            copy.leaves,
            copy.bytes,
            f"the leaves and shapes of {copy.of or 'the whole state'}",
        )
        for copy in report.copies
    ]


# ---- changes ----------------------------------------------------------------------


def change(report: Report) -> Section | None:
    """Returns the section on the leaves that differ between two steps."""
    diff = report.change
    title = "Change"
    if diff is None:
        if not report.is_run:
            return None
        return Section("change", title, report.notes.get("change", "Not compared."))
    names = f"step {diff.step_a:,}", f"step {diff.step_b:,}"
    return Section(
        "change", title, change_summary(diff, names), change_tables(diff, names)
    )


def change_summary(diff: Change, names: tuple[str, str]) -> str:
    """Returns a comparison in a sentence or two.

    Args:
        diff: The differences.
        names: The names of the two steps.
    """
    between = f"From {names[0]} to {names[1]}"
    unread = humanize.count(len(diff.unreadable), "leaf", "leaves")
    if not (diff.leaves or diff.unreadable or diff.damaged_items):
        equal = humanize.count(diff.equal, "leaf", "leaves")
        return f"{between}, nothing changed in {equal}."
    counts = _count_changes(diff.leaves)
    changed = humanize.count(counts.pop("changed", 0), "leaf", "leaves")
    equal = f" and {diff.equal:,} did not" if diff.equal else ""
    text = f"{between}, {changed} changed{equal}."
    for what, count in counts.items():
        text += f" {humanize.count(count, 'leaf', 'leaves')} {what}."
    if diff.unreadable:
        text += f" {unread} cannot be read, and may differ."
    if diff.damaged_items:
        items = humanize.count(len(diff.damaged_items), "item")
        text += f" {items} could not be compared."
    if any(leaf.different for leaf in diff.leaves):
        text += " The relative change is the norm of the difference / the norm before."
    return text


def _count_changes(leaves: Sequence[ChangedLeaf]) -> dict[str, int]:
    """Returns the change -> the number of its leaves: values, types, or only in one."""
    retyped = sum(leaf.is_retyped for leaf in leaves)
    only = sum(leaf.is_only_in_one for leaf in leaves)
    counts = {
        "changed": len(leaves) - retyped - only,
        f"{'has' if retyped == 1 else 'have'} another shape or dtype": retyped,
        f"{'is' if only == 1 else 'are'} in only one of them": only,
    }
    return {what: count for what, count in counts.items() if count}


def change_tables(
    diff: Change,
    names: tuple[str, str],
    *,
    most: int = _MOST_CHANGES,
    rest: str = "--json lists all",
) -> list[html.Markup]:
    """Returns the metrics of two steps, leaves that cannot be read, and changed leaves.

    Args:
        diff: The differences.
        names: The names of the two steps.
        most: Row limit of each table.
        rest: Where the leaves beyond are to be found.
    """
    tables_made = []
    if diff.metrics:
        tables_made.append(_metrics_table(diff, names))
    if diff.unreadable or diff.damaged_items:
        tables_made.append(_unreadable_table(diff, most, rest))
    if diff.leaves:
        tables_made += _changed_groups(diff, most, rest)
    return tables_made


def _metrics_table(diff: Change, names: tuple[str, str]) -> html.Markup:
    columns = [
        tables.Column("metric"),
        *[tables.Column(name, is_number=True) for name in names],
        tables.Column("difference", is_number=True),
    ]
    rows = []
    for name, (a, b) in diff.metrics.items():
        change = "" if a is None or b is None else _signed(b - a)
        values = ["none" if v is None else humanize.number(v) for v in (a, b)]
        rows.append(tables.TableRow([name, *values, change], {"data_compared": name}))
    return tables.table("Metrics", columns, rows, what="metrics")


def _signed(difference: float) -> object:
    sign = "+" if difference > 0 else ""
    return tables.TableCell(f"{sign}{humanize.number(difference)}", difference)


def _unreadable_table(diff: Change, most: int, rest: str) -> html.Markup:
    lost = {**diff.damaged_items, **diff.unreadable}
    columns = [
        tables.Column("leaf, or item"),
        tables.Column("cannot be read", is_wide=True),
    ]
    rows = [
        tables.TableRow([path, why], {"data_unreadable": path}, "bad")
        for path, why in [*lost.items()][:most]
    ]
    caption = "Not compared"
    if len(lost) > most:
        caption += f": the first {most} of {len(lost):,}; {rest}"
    return tables.table(caption, columns, rows, what="leaves")


def _changed_groups(diff: Change, most: int, rest: str) -> list[html.Markup]:
    """Returns the changed leaves by part of the state; the optimizer is folded."""
    groups: dict[str, list[ChangedLeaf]] = {name: [] for name in diff.equal_in}
    for leaf in diff.leaves:
        groups.setdefault(leaf.group, []).append(leaf)
    return [
        _changed_group(
            name,
            leaves,
            equal=diff.equal_in.get(name, 0),
            unreadable=diff.unreadable_in.get(name, 0),
            most=most,
            rest=rest,
        )
        for name, leaves in groups.items()
    ]


def _changed_group(
    name: str,
    leaves: Sequence[ChangedLeaf],
    *,
    equal: int,
    unreadable: int,
    most: int,
    rest: str,
) -> html.Markup:
    norms = [leaf.rel_norm for leaf in leaves if leaf.different]
    counts = _count_changes(leaves)
    text = f"{counts.pop('changed', 0):,} of"
    total = len(leaves) + equal + unreadable
    text += f" {humanize.count(total, 'leaf', 'leaves')} changed"
    text += "".join(f", {count:,} {what}" for what, count in counts.items())
    if unreadable:
        text += f", {unreadable:,} cannot be read"
    if norms:
        text += f"; relative change {max(norms):.3g}"
    if len(norms) > 1:
        text += f" at most, {statistics.median(norms):.3g} at median"
    heading = [html.element("strong", name), html.element("span", text, class_="facts")]
    if not leaves:
        return html.element("p", *heading, class_="group")
    shown = leaves[:most]
    largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    rows = [_change_row(leaf, largest) for leaf in shown]
    caption = "The largest relative changes first" if norms else "By name"
    if len(leaves) > len(shown):
        caption = f"The {len(shown)} that changed most of {len(leaves):,}; {rest}"
    return html.element(
        "details",
        html.element("summary", *heading),
        tables.table(caption, _CHANGE_COLUMNS, rows, what="leaves"),
        class_="group",
        open=None if copies.is_optimizer(name) else "",
    )


_CHANGE_COLUMNS = [
    tables.Column("leaf"),
    tables.Column("relative change", is_number=True),
    tables.Column("largest difference", is_number=True),
    tables.Column("changed elements", is_number=True),
    tables.Column("type"),
]


def _change_row(leaf: ChangedLeaf, largest: float) -> tables.TableRow:
    data: dict[str, object] = {"data_path": leaf.path, "data_what": leaf.what}
    name = errors.name_leaf(leaf.path.removeprefix(f"{leaf.group}/"))
    if not leaf.different:
        what = leaf.shown if leaf.what in ("kind", "shape") else leaf.what
        return tables.TableRow([name, "", "", "", what], data)
    part = min(leaf.rel_norm / largest, 1.0) if largest else 0.0
    if not math.isfinite(leaf.rel_norm):
        part = 1.0
    data |= {
        "data_rel": leaf.rel_norm,
        "data_abs": leaf.max_abs,
        "data_different": leaf.different,
    }
    shown = html.element(
        "div", f"{leaf.rel_norm:.3g}", _inline_bar(part), class_="with-bar"
    )
    cells = [
        name,
        tables.TableCell(shown, leaf.rel_norm),
        tables.TableCell(f"{leaf.max_abs:.3g}", leaf.max_abs),
        tables.TableCell(f"{leaf.different:,} of {leaf.elements:,}", leaf.different),
        leaf.shown,
    ]
    return tables.TableRow(cells, data)


def _inline_bar(part: float) -> html.Markup:
    return html.element(
        "svg",
        html.element("rect", y=1, width="100%", height=8, class_="track"),
        html.element(
            "rect", y=1, width=html.percent(100 * part), height=8, class_="bar behind"
        ),
        class_="inline-bar",
        aria_hidden="true",
    )
