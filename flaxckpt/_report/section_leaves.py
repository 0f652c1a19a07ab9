"""The section on the statistics of leaves over the saves of a run."""

from __future__ import annotations

import math

from flaxckpt._report import tables
from flaxckpt._report.charts import small
from flaxckpt._report.data import LeafHistory, Report
from flaxckpt._report.section import Section
from flaxckpt._util import humanize

_MOST_ROWS = 300


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
    shown = histories[:_MOST_ROWS]
    caption = "The parameters first; the norm over the steps, and the last values"
    if len(histories) > len(shown):
        caption += f" ({len(shown)} of {len(histories):,} leaves)"
    table = tables.table(
        caption, _COLUMNS, [_row(leaf) for leaf in shown], what="leaves"
    )
    return Section("leaves", "Leaves over steps", summary, [table])


_COLUMNS = [
    tables.Column("leaf"),
    tables.Column("norm over steps"),
    tables.Column("norm", is_number=True),
    tables.Column("since the first", is_number=True),
    tables.Column("values"),
    tables.Column("min", is_number=True),
    tables.Column("mean", is_number=True),
    tables.Column("max", is_number=True),
    tables.Column("not finite", is_number=True),
]


def _lost(leaf: LeafHistory) -> bool:
    return not all(math.isfinite(norm) for norm in leaf.norms.values())


def _row(leaf: LeafHistory) -> tables.TableRow:
    norms = [*leaf.norms.values()]
    first, last = norms[0], norms[-1]
    growth = last / first if first else math.nan
    ends = f"{min(leaf.norms):,} to {max(leaf.norms):,}"
    cells = [
        leaf.path,
        small.line(list(leaf.norms.items()), f"norm at steps {ends}"),
        _number(last),
        tables.TableCell(f"× {growth:.3g}", growth) if math.isfinite(growth) else "",  # noqa: RUF001
        small.bars(leaf.histogram, f"from {leaf.min:.3g} to {leaf.max:.3g}"),
        *map(_number, (leaf.min, leaf.mean, leaf.max)),
        f"{leaf.nonfinite:,}" if leaf.nonfinite else "",
    ]
    data: dict[str, object] = {"data_path": leaf.path, "data_norm": last}
    return tables.TableRow(
        cells, data, "bad" if leaf.nonfinite or _lost(leaf) else None
    )


def _number(value: float) -> tables.TableCell:
    return tables.TableCell(f"{value:.3g}", value)
