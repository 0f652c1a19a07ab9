"""Data classes of a restore plan: `planner` makes the plan, `restore` executes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from flaxckpt import _util, errors
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath, row
from flaxckpt.errors import Mismatch

if TYPE_CHECKING:
    import rich.console

_ROWS_PRINTED = 60
_HEADER: tuple[str, ...] = (
    *("leaf", "leaves", "action", "wanted", "found", "transforms"),
)
_NEAREST = " (nearest: "
"""Begins the nearest leaf in the text of a missing leaf."""

_FAILING = ("conflict", "missing")
_STYLES = {**dict.fromkeys(_FAILING, "red"), "init": "yellow", "dropped": "dim"}

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


@row
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
        advice: What to do about the problems, as in the error of `load`; empty if the
            restore would succeed.
        renames: The pattern and the replacement of each `rename` that the advice
            names.
        drops: The pattern of each `drop` that, with `missing="init"`, begins leaves
            of other shapes anew, such as of a head, and their moments.
    """

    path: str
    leaves: Mapping[LeafPath, LeafPlan]
    bytes_to_read: int
    bytes_here: int
    problems: tuple[Mismatch, ...]
    advice: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    drops: tuple[str, ...] = ()

    def count(self, action: Action) -> int:
        """Returns the number of leaves with `action`."""
        return sum(action in leaf.actions for leaf in self.leaves.values())

    @property
    def outcomes(self) -> dict[LeafPath, tuple[str, ...]]:
        """Leaf path -> its actions; of a conflict with no stored leaf, `missing`."""
        missing = {each.leaf for each in self.problems if each.kind == "missing"}
        return {
            path: ("missing",)
            if path in missing and leaf.actions == ("conflict",)
            else leaf.actions
            for path, leaf in self.leaves.items()
        }

    @property
    def summary(self) -> str:
        """The number of leaves of each outcome, and the size to read, in a line."""
        size = f"{_util.humanize.size(self.bytes_to_read)} to read"
        if self.bytes_here != self.bytes_to_read:
            size += f", {_util.humanize.size(self.bytes_here)} here"
        return f"{self.path}: {describe_outcomes(self)}; {size}"

    _repr_pretty_ = _util.card.show_printed

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(w) for cell, w in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.summary, *lines, *self._conclusion()])

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.console.RenderableType]:
        from rich.text import Text  # imported only when rich prints the plan

        yield Text(self.summary)
        if rows := self._rows():
            styled = []
            for row in rows[1:]:
                style = next((s for action, s in _STYLES.items() if action in row), "")
                styled.append([(cell, style) for cell in row])
            yield _util.columns.fold(rows[0], styled, options.max_width)
        if conclusion := self._conclusion():
            yield Text("\n".join(conclusion))

    def _conclusion(self) -> list[str]:
        """Returns lines that say whether the restore fails, and what to do then."""
        if not self.problems:
            return []
        leaves = _util.humanize.count(len(self.problems), "leaf", "leaves")
        shown = {p for p, leaf in self.leaves.items() if "conflict" in leaf.actions}
        others = [p.row for p in self.problems if p.leaf not in shown]
        end = f":\n{errors.rows(others)}" if others else ""
        lines = [f"{leaves} cannot be restored{end}"]
        return [*lines, self.advice] if self.advice else lines

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns a header, and rows of all leaves with other actions than `loaded`.

        Conflicts and missing leaves come first. Leaves whose paths differ only in
        numbers share a row.
        """
        problems = {problem.leaf: problem for problem in self.problems}
        leaves = [
            _row(path, self.leaves[path], actions, problems.get(path))
            for path, actions in self.outcomes.items()
            if actions != ("loaded",)
        ]
        if not leaves:
            return []
        leaves.sort(key=lambda row: row.cells[0] not in _FAILING)
        folded = _util.folding.fold(leaves)
        rows = [
            _HEADER,
            *[
                tuple(map(errors.printable, _cells(row, problems.get(row.name))))
                for row in folded[:_ROWS_PRINTED]
            ],
        ]
        if len(folded) > _ROWS_PRINTED:
            more = f"… and {len(folded) - _ROWS_PRINTED} more"
            rows.append((more, *[""] * (len(_HEADER) - 1)))
        used = [n for n in range(len(_HEADER)) if any(row[n] for row in rows[1:])]
        return [tuple(row[n] for n in used) for row in rows]


def count_outcomes(restore_plan: RestorePlan) -> dict[str, tuple[int, dict[str, int]]]:
    """Returns how many leaves have each outcome: every leaf counts once.

    The first action of leaves -> their number, and the number of each further action
    among them: of the loaded leaves, those that are cast.
    """
    found: dict[str, tuple[int, dict[str, int]]] = {}
    for first, *others in restore_plan.outcomes.values():
        total, parts = found.get(first, (0, {}))
        for action in others:
            parts[action] = parts.get(action, 0) + 1
        found[first] = total + 1, parts
    return found


def describe_outcomes(restore_plan: RestorePlan, dropped: int = 0) -> str:
    """Returns a text for plans and logs of restores: `2 loaded (1 cast), 6 init`.

    `dropped` leaves take the place of those that the plan names.
    """
    counts = count_outcomes(restore_plan)
    if dropped:
        counts["dropped"] = dropped, {}
    listed = ", ".join(
        f"{total} {action}" + (f" ({_list_counts(parts)})" if parts else "")
        for action, (total, parts) in counts.items()
    )
    return listed or "nothing to load"


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {action}" for action, n in counts.items())


def _row(
    path: LeafPath, leaf: LeafPlan, outcome: Sequence[str], problem: Mismatch | None
) -> _util.folding.LeafLine:
    found, source = str(leaf.found or "-"), ""
    if leaf.sources and leaf.sources != (path,):
        source = f" from {leaf.sources[0]}"
        if len(leaf.sources) > 1:
            source += f" and {len(leaf.sources) - 1} more"
    actions = ", ".join(action for action in outcome if action != "loaded")
    wanted = str(leaf.wanted or "-")
    if problem is not None and "conflict" in leaf.actions:
        wanted = problem.wanted
        if leaf.found is None or problem.kind == "unsupported":
            found = problem.found.partition(_NEAREST)[0]
    cells = (actions, wanted, found, " > ".join(leaf.transforms))
    return _util.folding.LeafLine(path, cells, source)


def _cells(row: _util.folding.LeafLine, problem: Mismatch | None) -> tuple[str, ...]:
    """Returns the cells of a row; a leaf that is alone names the nearest leaf."""
    actions, wanted, found, transforms = row.cells
    if problem is not None and found != "-":
        found += "".join(problem.found.partition(_NEAREST)[1:])
    if row.source and found == wanted:
        found = ""  # the types are the same
    count = f"{row.leaves:,}" if row.leaves > 1 else ""
    name, found = errors.name_leaf(row.name), (found + row.source).strip()
    return name, count, actions, wanted, found, transforms
