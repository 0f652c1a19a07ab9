"""The sections on the sizes in a step, and on changes between steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from flaxckpt import errors
from flaxckpt._report import copies, tables
from flaxckpt._report.data import Change, ChangedLeaf
from flaxckpt._util import html, humanize

_MOST_CHANGES = 100
"""Row limit of each part of the state."""

_MOST_LEAVES = 3000
"""Row limit of the tree of leaves."""

_MOST_SHARES = 7
_LEAST_SHARE = 0.002


# ---- changes ----------------------------------------------------------------------


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
