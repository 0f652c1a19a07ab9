"""The plan of a restore, as data: made by `planner`, carried out by `restore`."""

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
    """What to do where state and checkpoint differ; see `load`.

    Attributes:
        missing: What to do about leaves that the checkpoint lacks.
        unused: What to do about leaves that only the checkpoint has.
        optimizer: How optimizer leaves are found.
        transforms: What to change in the checkpoint's leaf table first.
        types: Classes of the caller's that a checkpoint may name.
        verify: Whether values are compared with their checksums.
        memory_map: Whether local files are mapped where that saves a copy; `auto` is
            where it is safe.
        max_concurrent_bytes: Bytes that are read at one time.
        keeps_steps: Whether step counters beside optimizers keep their values.
        read_once: Whether what several processes need is read by one of them.
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
                    f" {_util.arguments.found(getattr(self, name))}"
                )


@dataclasses.dataclass(frozen=True, slots=True)
class LeafPlan:
    """What happens to one leaf.

    Attributes:
        actions: `loaded`, and with it `cast`, `renamed` (its path in the checkpoint is
            another), `transformed` (its values are computed), `matched` (found by its
            role in the optimizer), `resharded`; or one of `init`, `dropped` (only the
            checkpoint has it), `conflict`.
        sources: Leaf paths in the checkpoint.
        wanted: What the state asks for; None if it is dropped.
        found: What the checkpoint holds; None if it holds nothing.
        bytes: What this process reads for it.
    """

    actions: tuple[Action, ...]
    sources: tuple[LeafPath, ...]
    wanted: LeafInfo | None
    found: LeafInfo | None
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore will do, leaf by leaf; `str()` and rich print it as a table.

    Attributes:
        path: The checkpoint.
        leaves: Leaf path in the state -> what happens to it; then the leaves that only
            the checkpoint has.
        bytes_to_read: By all processes together.
        bytes_here: By this process.
        problems: Why it cannot be done; empty if it can.
    """

    path: str
    leaves: Mapping[LeafPath, LeafPlan]
    bytes_to_read: int
    bytes_here: int
    problems: tuple[Mismatch, ...]

    def count(self, action: Action) -> int:
        """How many leaves have `action`."""
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
        from rich.table import Table  # only whoever prints with rich has it loaded

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
        """The leaves that are not simply loaded, the most telling columns of each."""
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
    """A Python number that is computed, and then becomes a leaf of another type.

    Attributes:
        found: The number, as it is computed.
        wanted: The leaf that it becomes.
    """

    found: LeafInfo
    wanted: LeafInfo


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How a plan is carried out.

    Attributes:
        jobs: Arrays to read.
        derived: Leaves to compute of what is read for them.
        given: Leaf path -> value that needs no reading.
        fresh: Optimizer leaves to make from the parameters, once those are read.
        flat: The wanted state; None to build what the checkpoint describes.
        structure: The containers of the result if `flat` is None.
        as_asked: Leaves that start afresh because the caller said so.
        numbers: Leaves among `derived` that are computed as Python numbers.
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
    """What is done to `leaf`, which the table has at `source_path`, for `path`."""
    if not source_paths(leaf):
        return ("init",)  # made by a transform, of nothing that is stored
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
    """Where what a leaf is made of is stored."""
    return tuple(s.info.path for s in leaf.sources if isinstance(s, StoredLeaf))


def stored_info(leaf: Leaf) -> LeafInfo:
    """What is stored for a leaf: of a computed one, the first of its sources."""
    source = next((s for s in leaf.sources if isinstance(s, StoredLeaf)), None)
    return leaf.info if source is None else source.info


def _ways(spec: PartitionSpec | None) -> tuple[Any, ...]:
    """What of a spec splits something; trailing Nones say nothing."""
    parts = list(spec or ())
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(parts)
