"""Data classes of a restore plan: `planner` makes the plan, `restore` executes it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from flaxckpt import _util
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath
from flaxckpt.errors import Mismatch

if TYPE_CHECKING:
    import rich.console

_ROWS_PRINTED = 60
_HEADER: tuple[str, ...] = (
    *("leaf", "leaves", "action", "wanted", "found", "transforms"),
)
_LEAST_WIDTH = 40
"""Width in columns that longer leaf paths get on a narrow terminal."""

_STYLES = {"conflict": "red", "init": "yellow", "dropped": "dim"}

Action: TypeAlias = Literal[
    "loaded",
    "cast",
    "renamed",
    "transformed",
    "resharded",
    "matched",
    "init",
    "dropped",
    "conflict",
]


@dataclasses.dataclass(frozen=True, slots=True)
class LeafPlan:
    """Plan for a leaf.

    Attributes:
        actions: `loaded`, possibly with `cast`, `renamed` (another path in the
            checkpoint), `transformed` (computed values), `matched` (found by its role
            in the optimizer), `resharded`; or one of `init`, `dropped` (only in the
            checkpoint), `conflict`.
        sources: Leaf paths in the checkpoint.
        wanted: The leaf in the state; None for a dropped leaf.
        found: The leaf in the checkpoint; None for a missing leaf.
        bytes: Bytes that this process reads for the leaf.
        transforms: Names of the transforms that changed the leaf, in order; chains of
            joined leaves are in brackets if they differ, `(none | transpose)`.
    """

    actions: tuple[Action, ...]
    sources: tuple[LeafPath, ...]
    wanted: LeafInfo | None
    found: LeafInfo | None
    bytes: int
    transforms: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RestorePlan:
    """Plan of a restore, leaf by leaf; `str()` and rich print a table.

    Attributes:
        path: The checkpoint.
        leaves: Leaf path in the state -> plan of the leaf; then leaves that only the
            checkpoint has.
        bytes_to_read: Bytes read by all processes together.
        bytes_here: Bytes read by this process.
        problems: Reasons why the restore would fail; empty if it would succeed.
    """

    path: str
    leaves: Mapping[LeafPath, LeafPlan]
    bytes_to_read: int
    bytes_here: int
    problems: tuple[Mismatch, ...]

    def count(self, action: Action) -> int:
        """Returns the number of leaves with `action`."""
        return sum(action in leaf.actions for leaf in self.leaves.values())

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(w) for cell, w in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self._summary(), *lines])

    def __rich__(self) -> rich.console.RenderableType:
        from rich.console import Group  # imported only when rich prints the plan
        from rich.table import Table
        from rich.text import Text

        rows = self._rows()
        if not rows:
            return Text(self._summary())
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        longest = min(_LEAST_WIDTH, max(len(row[0]) for row in rows))
        for name in rows[0]:
            least = longest if name == "leaf" else None
            table.add_column(name, overflow="fold", min_width=least)
        for row in rows[1:]:
            style = next((s for action, s in _STYLES.items() if action in row), "")
            table.add_row(*[Text(cell, style) for cell in row])
        return Group(Text(self._summary()), table)

    def _summary(self) -> str:
        counts = collections.Counter(a for p in self.leaves.values() for a in p.actions)
        listed = ", ".join(f"{n} {action}" for action, n in counts.items())
        size = f"{self.bytes_to_read:,} bytes to read"
        if self.bytes_here != self.bytes_to_read:
            size += f", {self.bytes_here:,} here"
        return f"{self.path}: {listed or 'nothing to load'}; {size}"

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns a header, and rows of all leaves with other actions than `loaded`.

        Conflicts come first. Leaves that differ only in the numbers of their paths
        share a row. Columns without any text are left out.
        """
        problems = {problem.leaf: problem for problem in self.problems}
        leaves = [
            _row(path, leaf, problems.get(path))
            for path, leaf in self.leaves.items()
            if leaf.actions != ("loaded",)
        ]
        if not leaves:
            return []
        leaves.sort(key=lambda row: row.cells[0] != "conflict")
        folded = _util.folding.fold(leaves)
        rows = [_HEADER, *map(_cells, folded[:_ROWS_PRINTED])]
        if len(folded) > _ROWS_PRINTED:
            more = f"… and {len(folded) - _ROWS_PRINTED} more"
            rows.append((more, *[""] * (len(_HEADER) - 1)))
        used = [n for n in range(len(_HEADER)) if any(row[n] for row in rows[1:])]
        return [tuple(row[n] for n in used) for row in rows]


def _row(path: LeafPath, leaf: LeafPlan, problem: Mismatch | None) -> _util.folding.Row:
    found, source = str(leaf.found or "-"), ""
    if leaf.sources and leaf.sources != (path,):
        source = f" from {leaf.sources[0]}"
        if len(leaf.sources) > 1:
            source += f" and {len(leaf.sources) - 1} more"
    actions = ", ".join(action for action in leaf.actions if action != "loaded")
    wanted = str(leaf.wanted or "-")
    if problem is not None and "conflict" in leaf.actions:
        wanted = problem.wanted
        if leaf.found is None or problem.kind == "unsupported":
            found = problem.found
    cells = (actions, wanted, found, " > ".join(leaf.transforms))
    return _util.folding.Row(path, cells, source)


def _cells(row: _util.folding.Row) -> tuple[str, ...]:
    actions, wanted, found, transforms = row.cells
    count = f"{row.leaves:,}" if row.leaves > 1 else ""
    return row.name, count, actions, wanted, found + row.source, transforms
