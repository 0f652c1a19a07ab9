"""Data classes of a restore plan: `planner` makes the plan, `restore` executes it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from jax.sharding import PartitionSpec

from flaxckpt import _arrays, _state, _util, errors
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._types import LeafPath
from flaxckpt.errors import Mismatch
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _base as _transforms

if TYPE_CHECKING:
    import rich.table

_ROWS_PRINTED = 60

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """Options of a restore; see `load`.

    Attributes:
        missing: Treatment of leaves that the checkpoint lacks.
        unused: Treatment of leaves that only the checkpoint has.
        optimizer: Matching of optimizer leaves.
        transforms: Changes to apply to the checkpoint's leaf table.
        types: The caller's classes that a checkpoint may name.
        verify: Whether to verify checksums.
        memory_map: Whether to map local files if this avoids a copy; `auto` maps them
            where mapping is safe.
        max_concurrent_bytes: Bytes to read at one time.
        keeps_steps: Whether step counters beside optimizers keep their values.
        read_once: Whether only one process reads data that several processes need.
    """

    missing: Literal["error", "init"] = "error"
    unused: Literal["warn", "error", "ignore"] = "warn"
    optimizer: Literal["match", "exact", "reinit"] = "match"
    transforms: Sequence[Transform] = ()
    types: Sequence[type] = ()
    verify: bool = True
    memory_map: Literal["auto"] | bool = "auto"
    max_concurrent_bytes: int = _arrays.write.DEFAULT_CONCURRENT_BYTES
    keeps_steps: bool = False
    read_once: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", _transforms.checked(self.transforms))
        for name, allowed in (
            ("missing", ("error", "init")),
            ("unused", ("warn", "error", "ignore")),
            ("optimizer", ("match", "exact", "reinit")),
            ("memory_map", ("auto", True, False)),
        ):
            if getattr(self, name) not in allowed:
                raise errors.OptionError(
                    f"{name} must be one of {allowed}, got"
                    f" {_util.arguments.describe(getattr(self, name))}"
                )


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
    """

    actions: tuple[Action, ...]
    sources: tuple[LeafPath, ...]
    wanted: LeafInfo | None
    found: LeafInfo | None
    bytes: int


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
        widths = [max(len(row[i]) for row in rows) for i in range(4)] if rows else []
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
        for name in ("leaf", "action", "wanted", "found"):
            table.add_column(name, overflow="fold")
        for row in self._rows()[1:]:
            style = {"conflict": "red", "init": "yellow", "dropped": "dim"}.get(row[1])
            table.add_row(*row, style=style)
        return table

    def _summary(self) -> str:
        counts = collections.Counter(a for p in self.leaves.values() for a in p.actions)
        told = ", ".join(f"{n} {action}" for action, n in counts.items())
        size = f"{self.bytes_to_read:,} bytes to read"
        if self.bytes_here != self.bytes_to_read:
            size += f", {self.bytes_here:,} here"
        return f"{self.path}: {told or 'nothing to load'}; {size}"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """Returns table rows of all leaves with other actions than `loaded`."""
        problems = {problem.leaf: problem for problem in self.problems}
        telling = [
            _row(path, leaf, problems.get(path))
            for path, leaf in self.leaves.items()
            if leaf.actions != ("loaded",)
        ]
        if not telling:
            return []
        shown = [("leaf", "action", "wanted", "found"), *telling[:_ROWS_PRINTED]]
        if len(telling) > _ROWS_PRINTED:
            shown.append((f"… and {len(telling) - _ROWS_PRINTED} more", "", "", ""))
        return shown


def _row(
    path: LeafPath, leaf: LeafPlan, problem: Mismatch | None
) -> tuple[str, str, str, str]:
    found = str(leaf.found or "-")
    if leaf.sources and leaf.sources != (path,):
        found += f" from {leaf.sources[0]}"
        if len(leaf.sources) > 1:
            found += f" and {len(leaf.sources) - 1} more"
    actions = ", ".join(action for action in leaf.actions if action != "loaded")
    wanted = str(leaf.wanted or "-")
    if problem is not None and "conflict" in leaf.actions:
        wanted = problem.wanted
    return path, actions, wanted, found


class ComputedNumber(NamedTuple):
    """A computed Python number, to be converted to a leaf of another type.

    Attributes:
        found: The computed number.
        wanted: The leaf of the state.
    """

    found: LeafInfo
    wanted: LeafInfo


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """Steps to execute a plan.

    Attributes:
        jobs: Arrays to read.
        derived: Leaves to compute from arrays.
        given: Leaf path -> value known without reading.
        fresh: Optimizer leaves to initialize from the restored parameters.
        flat: The abstract state; None to restore the structure of the checkpoint.
        structure: The containers of the result if `flat` is None.
        as_asked: Leaves initialized because of an option of the caller.
        numbers: Leaves among `derived` to compute as Python numbers.
    """

    jobs: tuple[_arrays.read.ReadJob, ...]
    derived: tuple[Leaf, ...]
    given: Mapping[LeafPath, Any]
    fresh: tuple[LeafInfo, ...]
    flat: _state.flax_state.FlatState | None
    structure: _state.tree.Node | LeafPath
    as_asked: frozenset[LeafPath] = frozenset()
    numbers: tuple[ComputedNumber, ...] = ()


def actions(
    wanted: LeafInfo, leaf: Leaf, path: LeafPath, source_path: LeafPath
) -> tuple[Action, ...]:
    """Returns the actions that restore `leaf`, stored at `source_path`, to `path`."""
    if not source_paths(leaf):
        return ("init",)  # a transform made the leaf without stored sources
    done: tuple[Action, ...] = ("loaded",)
    stored = stored_info(leaf)
    if wanted.kind == "array" and wanted.dtype != stored.dtype:
        done += ("cast",)
    if source_path != stored.path:
        done += ("renamed",)
    if leaf.fn is not None:
        done += ("transformed",)
    if path not in (source_path, _state.tree.without_box(source_path)):
        done += ("matched",)
    if wanted.shard_shape != stored.shard_shape or (
        wanted.spec is not None and _ways(wanted.spec) != _ways(stored.spec)
    ):
        done += ("resharded",)
    return done


def source_paths(leaf: Leaf) -> tuple[LeafPath, ...]:
    """Returns the stored paths of the sources of a leaf."""
    return tuple(s.info.path for s in leaf.sources if isinstance(s, StoredLeaf))


def stored_info(leaf: Leaf) -> LeafInfo:
    """Returns the stored info of a leaf; for a computed leaf, of the first source."""
    source = next((s for s in leaf.sources if isinstance(s, StoredLeaf)), None)
    return leaf.info if source is None else source.info


def _ways(spec: PartitionSpec | None) -> tuple[Any, ...]:
    """Returns a spec without trailing Nones."""
    parts = list(spec or ())
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(parts)
