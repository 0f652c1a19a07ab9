"""Data classes of a restore plan: `planner` makes the plan, `restore` executes it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath
from flaxckpt.errors import Mismatch

if TYPE_CHECKING:
    import rich.table

_ROWS_PRINTED = 60
_HEADER: tuple[str, ...] = ("leaf", "action", "wanted", "found", "transforms")

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

    def __rich__(self) -> rich.table.Table:
        from rich.table import Table  # imported only when rich prints the plan

        table = Table(title=self._summary())
        header, *rows = self._rows() or [_HEADER]
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            style = {"conflict": "red", "init": "yellow", "dropped": "dim"}.get(row[1])
            table.add_row(*row, style=style)
        return table

    def _summary(self) -> str:
        counts = collections.Counter(a for p in self.leaves.values() for a in p.actions)
        listed = ", ".join(f"{n} {action}" for action, n in counts.items())
        size = f"{self.bytes_to_read:,} bytes to read"
        if self.bytes_here != self.bytes_to_read:
            size += f", {self.bytes_here:,} here"
        return f"{self.path}: {listed or 'nothing to load'}; {size}"

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns table rows of all leaves with other actions than `loaded`.

        The last column, with the transforms, is left out if it is empty.
        """
        problems = {problem.leaf: problem for problem in self.problems}
        rows = [
            _row(path, leaf, problems.get(path))
            for path, leaf in self.leaves.items()
            if leaf.actions != ("loaded",)
        ]
        if not rows:
            return []
        shown = [_HEADER, *rows[:_ROWS_PRINTED]]
        if len(rows) > _ROWS_PRINTED:
            shown.append((f"… and {len(rows) - _ROWS_PRINTED} more", "", "", "", ""))
        has_transforms = any(leaf.transforms for leaf in self.leaves.values())
        return shown if has_transforms else [row[:-1] for row in shown]


def _row(path: LeafPath, leaf: LeafPlan, problem: Mismatch | None) -> tuple[str, ...]:
    found = str(leaf.found or "-")
    if leaf.sources and leaf.sources != (path,):
        found += f" from {leaf.sources[0]}"
        if len(leaf.sources) > 1:
            found += f" and {len(leaf.sources) - 1} more"
    actions = ", ".join(action for action in leaf.actions if action != "loaded")
    wanted = str(leaf.wanted or "-")
    if problem is not None and "conflict" in leaf.actions:
        wanted = problem.wanted
        found = problem.found if problem.kind == "unsupported" else found
    return path, actions, wanted, found, " > ".join(leaf.transforms)
