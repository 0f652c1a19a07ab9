"""Planner of a restore: assigns stored leaves to wanted leaves."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from flaxckpt import _arrays, _state, _util, errors
from flaxckpt._checkpoint import additions
from flaxckpt._checkpoint.match_optimizer import OptimizerMatcher
from flaxckpt._checkpoint.mismatch import (
    RESUME_ADVICE,
    describe_missing,
    find_excess_width,
    find_lack_of_devices,
    find_misfit,
    find_unreadable,
)
from flaxckpt._checkpoint.plan import Action, LeafPlan, RestorePlan
from flaxckpt._checkpoint.stored_paths import StoredPaths
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable, MeshAxes, StoredLeaf
from flaxckpt._transforms import base as _transforms
from flaxckpt._types import LeafPath, PyTree
from flaxckpt.errors import Mismatch
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)


class StepOptions(TypedDict, total=False):
    """Options of all restores: see `load`, and `RestoreOptions` for the defaults."""

    transforms: Sequence[Transform]
    missing: Literal["error", "init"]
    optimizer: Literal["match", "exact", "reinit"]
    types: Sequence[type]
    verify: bool
    memory_map: Literal["auto"] | bool


class LoadOptions(StepOptions, total=False):
    unused: Literal["warn", "error", "ignore"]
    read_once: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """Options of a restore, with their defaults; `load` documents its own.

    Attributes:
        unused: None for what `purpose` does: a resume brings leaves back, or fails.
        purpose: A `load` leaves out what the state has no leaf for. A `restore` of a
            step fills empty places of the state. A `resume` of a run also adds keys to
            mappings, and leaves nothing out.
        is_source: Whether a new run begins from the checkpoint: with `"reinit"`, the
            step counters of the state keep their values, too.
        has_values: Whether the program has an optimizer and values for the leaves of
            the abstract state, for plans only.
    """

    transforms: Sequence[Transform] = ()
    missing: Literal["error", "init"] = "error"
    unused: Literal["warn", "error", "ignore"] | None = "warn"
    optimizer: Literal["match", "exact", "reinit"] = "match"
    types: Sequence[type] = ()
    purpose: Literal["load", "restore", "resume"] = "load"
    verify: bool = True
    memory_map: Literal["auto"] | bool = "auto"
    max_concurrent_bytes: int = _arrays.write.DEFAULT_CONCURRENT_BYTES
    is_source: bool = False
    has_values: bool = False
    read_once: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", _transforms.check(self.transforms))
        for name, allowed in (
            ("missing", ("error", "init")),
            ("unused", (None, "warn", "error", "ignore")),
            ("optimizer", ("match", "exact", "reinit")),
            ("memory_map", ("auto", True, False)),
        ):
            if getattr(self, name) not in allowed:
                raise errors.OptionError(
                    f"{name} must be one of {allowed}, got"
                    f" {_util.arguments.describe(getattr(self, name))}"
                )

    @property
    def adds_leaves(self) -> bool:
        """Whether leaves that only the checkpoint has may be added to the state."""
        return self.unused is None and self.purpose != "load"

    @property
    def leaves_out(self) -> bool:
        """Whether the restore may go without leaves that only the checkpoint has."""
        return self.unused is not None or self.purpose != "resume"


class ComputedNumber(NamedTuple):
    """A computed Python number, to be converted to a wanted leaf of another type."""

    found: LeafInfo
    wanted: LeafInfo


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """Steps to execute a plan: arrays to read, leaves to compute and to initialize.

    `flat` is the abstract state; without one, `structure` has the containers of the
    result. `as_asked` leaves are initialized because of an option.
    """

    jobs: tuple[_arrays.read_plan.ReadJob, ...]
    derived: tuple[Leaf, ...]
    given: Mapping[LeafPath, Any]
    fresh: tuple[LeafInfo, ...]
    flat: _state.flax_state.FlatState | None
    structure: _state.tree.Node | LeafPath
    as_asked: frozenset[LeafPath]
    numbers: tuple[ComputedNumber, ...]


# ---- planning ---------------------------------------------------------------------


def make_plan(
    stored: Stored, abstract_state: PyTree | None, options: RestoreOptions
) -> tuple[RestorePlan, Recipe]:
    """Plans the restore of the leaves of `abstract_state`, or of all leaves."""
    if abstract_state is None:
        stored.check_items(stored.items.trees)
        table = _boxed_table(stored, options)
        return _plan_all(stored, _transforms.apply(options.transforms, table))
    if not options.transforms:
        _check_template(stored, abstract_state)
    # Items are whole, so variables that they share are in each of them.
    has_items = not isinstance(stored.items.state, str)
    flat = _flatten(abstract_state, whole_branches=has_items)
    try:
        planner = _Planner(stored, flat, abstract_state, options)
        if not planner.has_repeated():
            flat = _flatten(abstract_state, whole_branches=False)
            planner = _Planner(stored, flat, abstract_state, options)
    except errors.CheckpointError:  # perhaps because the leaves of an item are missing
        stored.check_items(stored.items.trees)
        raise
    return planner.plan()


def _flatten(
    abstract_state: PyTree, *, whole_branches: bool
) -> _state.flax_state.FlatState:
    """Returns the wanted leaves, on the current mesh if theirs has no devices."""
    flat = _state.flax_state.flatten(
        abstract_state, whole_branches=whole_branches, task="restored into"
    )
    return dataclasses.replace(flat, table=_state.meshes.with_devices(flat.table))


def _boxed_table(stored: Stored, options: RestoreOptions) -> LeafTable:
    if not options.transforms:
        return stored.table
    return _state.boxes.with_boxes(stored.table, stored.structure)


def _check_template(stored: Stored, abstract_state: PyTree) -> None:
    """Raises OptionError for a step or path as the state of several values."""
    if not isinstance(abstract_state, int | str | os.PathLike) or "" in stored.table:
        return
    way = ""
    if not isinstance(abstract_state, int):
        way = ": a path is the first argument of load and of Checkpointer"
    raise errors.OptionError(
        f"wanted a state to restore into, got {abstract_state!r:.80}{way}"
    )


def _plan_all(stored: Stored, table: LeafTable) -> tuple[RestorePlan, Recipe]:
    """Plans the restore of all leaves with the structure of the checkpoint."""
    if stored.unknown_types:
        _log.warning(
            "%s contains unknown classes, which become dicts: %s; pass types=[...] or"
            " an abstract state, or call register_leaf, to restore them",
            stored.metadata.path,
            ", ".join(sorted(stored.unknown_types)),
        )
    builder = _RecipeBuilder()
    leaves: dict[LeafPath, LeafPlan] = {}
    problems = []
    for path, leaf in table.items():
        if leaf.info.kind == "empty":
            continue
        wanted = leaf.info
        if wanted.sharding is not None:
            wanted = dataclasses.replace(wanted, sharding=None)
        if problem := find_unreadable(wanted, leaf):
            problems.append(problem)
        leaves[path] = builder.add(leaf, wanted, path)
    structure = _state.containers.build(stored.structure, stored.table, table)
    plan = RestorePlan(
        path=stored.metadata.path,
        leaves=leaves,
        bytes_to_read=builder.bytes_to_read,
        bytes_here=builder.bytes_to_read,
        problems=tuple(problems),
    )
    return plan, builder.build(structure)


class _RecipeBuilder:
    """Collects a recipe and its bytes to read; sources that leaves share count once."""

    def __init__(self) -> None:
        self.given: dict[LeafPath, Any] = {}
        self.fresh: list[LeafInfo] = []
        self.as_asked: set[LeafPath] = set()
        self.bytes_to_read = 0
        self._jobs: list[_arrays.read_plan.ReadJob] = []
        self._derived: list[Leaf] = []
        self._numbers: list[ComputedNumber] = []
        self._seen: set[int] = set()  # sources of computed leaves, already counted

    def add(self, leaf: Leaf, wanted: LeafInfo, source_path: LeafPath) -> LeafPlan:
        stored = leaf.stored
        size = self._add(leaf, wanted, stored)
        return _leaf_plan(wanted, leaf, stored, source_path, size)

    def _add(self, leaf: Leaf, wanted: LeafInfo, stored: Sequence[StoredLeaf]) -> int:
        """Adds the restore of a leaf; returns the bytes to read here."""
        path = wanted.path
        if leaf.fn is not None:
            computed = wanted
            if leaf.info.is_python_number and not wanted.is_python_number:
                # The range of the wanted type is checked after the computation.
                computed = dataclasses.replace(leaf.info, path=path, keys=wanted.keys)
                self._numbers.append(ComputedNumber(computed, wanted))
            self._derived.append(Leaf(computed, leaf.sources, leaf.fn))
            size = 0
            for source in stored:
                if id(source) not in self._seen:
                    self._seen.add(id(source))
                    size += source.info.stored_bytes
            self.bytes_to_read += size
            return size
        if not stored:
            self.given[path] = _arrays.to_device.place(leaf.source, wanted)
            return 0
        if wanted.kind == "string":
            self.given[path] = stored[0].value
            return 0
        job = _arrays.read_plan.ReadJob(stored[0], wanted)
        self._jobs.append(job)
        self.bytes_to_read += (
            job.nbytes if job.is_whole else stored[0].info.stored_bytes
        )
        return job.nbytes

    def build(
        self,
        structure: _state.tree.Node | LeafPath,
        flat: _state.flax_state.FlatState | None = None,
    ) -> Recipe:
        return Recipe(
            jobs=tuple(self._jobs),
            derived=tuple(self._derived),
            given=self.given,
            fresh=tuple(self.fresh),
            flat=flat,
            structure=structure,
            as_asked=frozenset(self.as_asked),
            numbers=tuple(self._numbers),
        )


class _Planner:
    """Plans the restore of a checkpoint's leaf table to a wanted state."""

    def __init__(
        self,
        stored: Stored,
        flat: _state.flax_state.FlatState,
        abstract_state: PyTree,
        options: RestoreOptions,
    ) -> None:
        wanted = flat.table_to_transform() if options.transforms else None
        table = _boxed_table(stored, options)
        table = _transforms.apply(options.transforms, table, wanted)
        self._stored = stored
        self._table = table
        self._abstract_state = abstract_state
        self._options = options
        self._flat = flat
        self._facts = flat.optimizer_facts
        self._leaves: dict[LeafPath, LeafPlan] = {}
        self._builder = _RecipeBuilder()
        self._problems: list[Mismatch] = []
        self._used: set[LeafPath] = set()
        self._damaged: set[str] = set()  # items with wanted leaves
        # Not a method of this object: without cycles, planning leaves no garbage.
        self._paths = StoredPaths(stored, table, flat)
        self._matcher = OptimizerMatcher(
            table, stored.structure, flat.optimizer_facts, self._paths.find
        )

    @_util.forks.lazy
    def _can_init(self) -> tuple[str, ...]:
        """Prefixes of optimizer leaf paths that `tx.init` can initialize."""
        return tuple(
            _state.tree.join(part.state_keys) + "/"
            for part in _state.flax_state.optimizers(self._abstract_state)
        )

    def has_repeated(self) -> bool:
        """Returns True if the checkpoint has all repeated variables of the state."""
        leaves = (self._flat.table.get(path) for path in self._flat.repeated)
        return all(
            self._candidates(leaf.info.path)
            for leaf in leaves
            if leaf is not None and leaf.info.kind != "empty"
        )

    def plan(self) -> tuple[RestorePlan, Recipe]:
        chosen = self._choose()
        for path, leaf in self._flat.table.items():
            if leaf.info.kind != "empty":
                self._decide(path, leaf, chosen[path])
        if not self._options.leaves_out:
            branches = self._stored.damaged_branches.values()
            self._damaged.update(set(branches) - self._stored.left_out.keys())
        self._stored.check_items(self._damaged)
        self._settle_unused()
        plan = RestorePlan(
            path=self._stored.metadata.path,
            leaves=self._leaves,
            bytes_to_read=self._builder.bytes_to_read,
            bytes_here=sum([leaf.bytes for leaf in self._leaves.values()]),
            problems=tuple(self._problems),
        )
        return plan, self._builder.build(self._flat.structure, self._flat)

    def _choose(self) -> dict[LeafPath, list[LeafPath]]:
        """Returns each wanted leaf -> the stored leaves that may match.

        A moment that matches several wanted leaves is ambiguous; counters are shared.
        """
        chosen = {
            path: self._candidates(path)
            for path, leaf in self._flat.table.items()
            if leaf.info.kind != "empty"
        }
        takers: dict[LeafPath, list[LeafPath]] = {}
        for path, sources in chosen.items():
            known = self._facts.get(path)
            if len(sources) == 1 and known is not None and known.role(path).param:
                takers.setdefault(sources[0], []).append(path)
        for source, paths in takers.items():
            if len(paths) > 1:
                chosen.update((path, [source, source]) for path in paths)
        return chosen

    @_util.forks.lazy
    def _kept(self) -> set[LeafPath]:
        """Step counters that keep the values of the state."""
        if not (self._options.is_source and self._options.optimizer == "reinit"):
            return set()
        return self._flat.step_counters

    def _decide(self, path: LeafPath, leaf: Leaf, candidates: list[LeafPath]) -> None:
        nearest = self._table[candidates[0]].info if candidates else None
        if problem := find_lack_of_devices(leaf.info, nearest):
            self._used.update(candidates)
            self._conflict(problem, leaf.info, nearest, tuple(candidates))
            return
        known = self._facts.get(path)
        if path in self._kept:
            self._builder.as_asked.add(path)
            self._used.update(candidates)
            value = leaf.source
            if isinstance(value, jax.ShapeDtypeStruct):
                if problem := find_excess_width(leaf.info, None):
                    self._conflict(problem, leaf.info, None, ())
                    return
                value = _arrays.to_device.place(
                    jnp.zeros(value.shape, value.dtype), leaf.info
                )
            self._builder.given[path] = value
            self._leaves[path] = LeafPlan(("init",), (), leaf.info, None, 0)
            return
        if known is not None and self._options.optimizer == "reinit":
            if path.startswith(self._can_init):
                self._builder.as_asked.add(path)
            self._initialize(leaf, known)
            return
        branches = self._damaged_branches
        if branches and (damaged := self._damaged_items(branches, path, candidates)):
            self._damaged |= damaged
            return
        if len(candidates) > 1:
            found = "several: " + ", ".join(candidates[:3])
            if len(set(candidates)) == 1:
                found = f"several leaves match {candidates[0]}"
            problem = Mismatch(path, str(leaf.info), found, "several")
            self._used.update(candidates)
            self._conflict(problem, leaf.info, None, tuple(candidates))
        elif candidates:
            self._take(path, leaf, candidates[0])
        elif self._options.missing == "error" and (
            why := self._stored.explain_missing(path)
        ):
            lacking = Mismatch(path, str(leaf.info), f"nothing: {why}", "missing")
            self._conflict(lacking, leaf.info, None, ())
        else:
            self._initialize(leaf, known)

    def _damaged_items(
        self,
        branches: Mapping[LeafPath, str],
        path: LeafPath,
        candidates: Sequence[LeafPath],
    ) -> set[str]:
        """Returns the damaged items that may have a leaf; empty if it is intact."""
        if not self._options.transforms:
            branch = path.partition("/")[0]
            return {branches[branch]} if branch in branches else set()
        stored = [s for p in candidates for s in self._table[p].stored]
        tops = {source.info.path.partition("/")[0] for source in stored}
        return {
            item
            for branch, item in branches.items()
            if (branch in tops or not candidates) and item not in self._stored.left_out
        }

    @_util.forks.lazy
    def _damaged_branches(self) -> Mapping[LeafPath, str]:
        """Branch of the state -> the item, if that is damaged, or missing.

        Leaves of missing items may be initialized, those of damaged items never.
        """
        branches = self._stored.damaged_branches
        if self._options.missing == "error":
            return branches
        left_out = self._stored.left_out
        return {branch: i for branch, i in branches.items() if i not in left_out}

    def _candidates(self, path: LeafPath) -> list[LeafPath]:
        """Returns stored leaves that may match: by path, in optimizers by role."""
        if path in self._facts and self._options.optimizer != "exact":
            return self._matcher.find(path)
        exact = self._paths.find(path)
        if exact is None or (
            self._options.optimizer != "exact"
            and self._matcher.is_of_another_state(exact, self._flat.structure)
        ):
            return []
        return [exact]

    def _take(self, path: LeafPath, leaf: Leaf, source_path: LeafPath) -> None:
        wanted, source = leaf.info, self._table[source_path]
        self._used.add(source_path)
        problem = find_misfit(wanted, source.info)
        if problem and source.fn is not None and path in self._facts:
            # A transform replaced the optimizer leaf, such as by a placeholder.
            self._initialize(leaf, self._facts[path])
            return
        if problem := problem or find_unreadable(wanted, source):
            self._conflict(problem, wanted, source.info, (source_path,))
            return
        if self._options.purpose == "resume" and self._records_weak_type(leaf, source):
            is_weak = source.info.weak_type  # as after the last step
            wanted = dataclasses.replace(wanted, weak_type=is_weak)
        self._leaves[path] = self._builder.add(source, wanted, source_path)

    def _records_weak_type(self, wanted: Leaf, found: Leaf) -> bool:
        """Returns True for an array that flaxckpt has saved as an array of jax."""
        return (
            found.fn is None
            and self._stored.metadata.format == "flaxckpt"
            and wanted.info.python_type == found.info.python_type == "jax.Array"
            and wanted.info.dtype == found.info.dtype
        )

    def _initialize(
        self, leaf: Leaf, known: _state.optimizer_roles.LeafFacts | None
    ) -> None:
        """Plans a leaf without a stored leaf: the state's value, or `tx.init`."""
        info = leaf.info
        is_optimizer = known is not None and self._options.optimizer != "exact"
        has_values = self._options.has_values
        has_value = has_values or not isinstance(leaf.source, jax.ShapeDtypeStruct)
        if is_optimizer and (has_values or info.path.startswith(self._can_init)):
            if problem := find_excess_width(info, None):
                self._conflict(problem, info, None, ())
                return
            self._builder.fresh.append(info)
        elif (is_optimizer or self._options.missing == "init") and has_value:
            self._builder.given[info.path] = leaf.source
        else:
            # Finding the nearest name is slow, and messages show only a few leaves.
            lacking = describe_missing(
                info, self._table, nearest=len(self._problems) < errors.ROWS_SHOWN
            )
            is_matched = self._options.optimizer != "exact"
            if is_matched and self._paths.find(info.path) is not None:
                found = (
                    f'{lacking.found} of another transform (optimizer="exact" takes it)'
                )
                lacking = dataclasses.replace(lacking, found=found)
            if self._options.missing == "init" or is_optimizer:
                lacking = dataclasses.replace(
                    lacking, found=f"{lacking.found}, and no initial value"
                )
            self._conflict(lacking, info, None, ())
            return
        self._leaves[info.path] = LeafPlan(("init",), (), info, None, 0)

    def _conflict(
        self,
        problem: Mismatch,
        wanted: LeafInfo,
        found: LeafInfo | None,
        sources: tuple[LeafPath, ...],
    ) -> None:
        done = self._table[sources[0]].transforms if sources else ()
        if done:
            found_after = f"{problem.found} after {' > '.join(done)}"
            problem = dataclasses.replace(problem, found=found_after)
        self._problems.append(problem)
        self._leaves[problem.leaf] = LeafPlan(
            ("conflict",), sources, wanted, found, 0, done
        )

    @_util.forks.lazy
    def _whole(self) -> tuple[str, ...]:
        """Prefixes of leaves of registered classes, which are restored whole."""
        return tuple(
            f"{_state.tree.join(keys)}/" if keys else ""
            for keys, node in _state.tree.containers(self._flat.structure)
            if node.leaf_type is not None
        )

    def _settle_unused(self) -> None:
        unused = {
            path: leaf
            for path, leaf in self._table.items()
            if path not in self._used and leaf.info.kind != "empty"
        }
        added, homeless = self._add(unused)
        option = self._options.unused
        for path, leaf in unused.items():
            if path in added or self._is_replaced(path, leaf):
                continue
            is_part = f"{path}/".startswith(self._whole)
            if option == "error" or (is_part and option != "ignore"):
                self._problems.append(
                    Mismatch(path, "nothing", str(leaf.info), "unused")
                )
            elif path in homeless and not self._options.leaves_out:
                self._problems.append(
                    Mismatch(path, "no place", str(leaf.info), "unused", RESUME_ADVICE)
                )
            name = path if path not in self._leaves else f"{path} (in the checkpoint)"
            self._leaves[name] = LeafPlan(
                ("dropped",), (path,), None, leaf.info, 0, leaf.transforms
            )

    def _is_replaced(self, path: LeafPath, leaf: Leaf) -> bool:
        """Returns True for a leaf of an optimizer that a new one takes the place of."""
        if self._options.optimizer != "reinit":
            return False
        return leaf.info.role is not None or is_in_any(path, self._flat.optimizers)

    def _add(self, unused: LeafTable) -> tuple[Set[LeafPath], Set[LeafPath]]:
        """Adds leaves to the state; returns those added, and those without a place."""
        if not unused or not self._options.adds_leaves:
            return set(), set()
        unused = {
            p: leaf for p, leaf in unused.items() if not self._is_replaced(p, leaf)
        }
        is_resume = self._options.purpose == "resume"
        places, homeless = additions.assign(
            unused, self._flat, self._stored, self._matcher, to_missing_keys=is_resume
        )
        if places:
            grown = additions.grow(self._flat, self._table, self._stored, places)
            self._flat = grown.flat
            for place, name in grown.unknown.items():
                self._report_unknown(place, name)
        for path in places:
            leaf = self._table[path]
            wanted = dataclasses.replace(leaf.info, sharding=None)
            if problem := find_unreadable(wanted, leaf):
                self._conflict(problem, wanted, leaf.info, (path,))
                continue
            self._leaves[path] = self._builder.add(leaf, wanted, path)
        return places.keys(), set(homeless)

    def _report_unknown(self, place: LeafPath, class_name: str) -> None:
        """Reports a class at an empty place that this process does not know."""
        if self._options.leaves_out:
            _log.warning(
                "%s of %s becomes a dict, as its class %s is unknown: pass types=[...]",
                place,
                self._stored.metadata.path,
                class_name,
            )
            return
        found = f"a {class_name}, which is rebuilt only where the state has one"
        self._problems.append(
            Mismatch(place, "an empty place", found, "unused", RESUME_ADVICE)
        )


def is_in_any(path: LeafPath, containers: Collection[LeafPath]) -> bool:
    return any(_state.tree.is_inside(path, each) for each in containers)


def _leaf_plan(
    wanted: LeafInfo,
    leaf: Leaf,
    sources: Sequence[StoredLeaf],
    source_path: LeafPath,
    size: int,
) -> LeafPlan:
    if not sources:  # a transform made the leaf without stored sources
        return LeafPlan(("init",), (), wanted, leaf.info, size, leaf.transforms)
    stored = sources[0].info
    actions: tuple[Action, ...] = ("loaded",)
    is_cast = wanted.dtype != stored.dtype and wanted.kind in ("array", "scalar")
    if is_cast and not wanted.is_python_number:  # which has no width
        actions += ("cast",)
    if source_path != stored.path:
        actions += ("renamed",)
    if leaf.fn is not None:
        actions += ("transformed",)
    is_here = wanted.path == source_path
    if not is_here and wanted.path != _state.tree.without_box(source_path):
        actions += ("matched",)
    if wanted.shard_shape != stored.shard_shape or (
        wanted.mesh_axes is not None
        and _trim_axes(wanted.mesh_axes) != _trim_axes(stored.mesh_axes)
    ):
        actions += ("resharded",)
    paths = tuple([source.info.path for source in sources])
    return LeafPlan(actions, paths, wanted, stored, size, leaf.transforms)


def _trim_axes(mesh_axes: Sequence[MeshAxes] | None) -> tuple[MeshAxes, ...]:
    """Returns the mesh axes of a leaf without trailing Nones."""
    parts = list(mesh_axes or ())
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(parts)
