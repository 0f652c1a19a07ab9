"""The plan of a restore: which stored leaf fills which wanted one, and how."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import difflib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxckpt import (
    _containers,
    _dtypes,
    _flax,
    _layout,
    _optax,
    _place,
    _read,
    _tree,
    _write,
    errors,
)
from flaxckpt._info import Leaf, LeafInfo, LeafTable, Role, Stored, StoredLeaf
from flaxckpt._types import LeafPath, PyTree
from flaxckpt.errors import Mismatch
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _table as _transforms

if TYPE_CHECKING:
    import rich.table

_log = logging.getLogger(__name__)

_NEAREST_AMONG = 5_000
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


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
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
    """

    missing: Literal["error", "init"] = "error"
    unused: Literal["warn", "error", "ignore"] = "warn"
    optimizer: Literal["match", "exact", "reinit"] = "match"
    transforms: Sequence[Transform] = ()
    types: Sequence[type] = ()
    verify: bool = True
    memory_map: Literal["auto"] | bool = "auto"
    max_concurrent_bytes: int = _write.DEFAULT_CONCURRENT_BYTES
    keeps_steps: bool = False

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
                    f"{name} must be one of {allowed}, got {getattr(self, name)!r}"
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

        table = Table("leaf", "action", "wanted", "found", title=self._summary())
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
        telling = [
            _row(path, leaf)
            for path, leaf in self.leaves.items()
            if leaf.actions != ("loaded",)
        ]
        if not telling:
            return []
        shown = [("leaf", "action", "wanted", "found"), *telling[:_ROWS_PRINTED]]
        if len(telling) > _ROWS_PRINTED:
            shown.append((f"… and {len(telling) - _ROWS_PRINTED} more", "", "", ""))
        return shown


def _row(path: LeafPath, leaf: LeafPlan) -> tuple[str, str, str, str]:
    found = str(leaf.found or "-")
    if leaf.sources and leaf.sources != (path,):
        found += f" from {leaf.sources[0]}"
        if len(leaf.sources) > 1:
            found += f" and {len(leaf.sources) - 1} more"
    actions = ", ".join(action for action in leaf.actions if action != "loaded")
    return path, actions, str(leaf.wanted or "-"), found


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
    """

    jobs: tuple[_read.ReadJob, ...]
    derived: tuple[Leaf, ...]
    given: Mapping[LeafPath, Any]
    fresh: tuple[LeafInfo, ...]
    flat: _flax.FlatState | None
    structure: _tree.Node | LeafPath
    as_asked: frozenset[LeafPath] = frozenset()


# ---- planning ---------------------------------------------------------------------


def make(
    stored: Stored, abstract_state: PyTree | None, options: Options
) -> tuple[RestorePlan, Recipe]:
    """Plans the restore of what `abstract_state` asks for, or of everything."""
    if abstract_state is None:
        return _plan_all(stored, _transforms.apply(options.transforms, stored.table))
    flat = _flax.flatten(abstract_state)
    wanted = None
    if options.transforms:  # with roles, so that moments go with their parameters
        roles = _optax.roles(flat.structure, flat.optimizer_states)
        wanted = _optax.with_roles(flat.table, roles)
    table = _transforms.apply(options.transforms, stored.table, wanted)
    return _Planner(stored, table, flat, abstract_state, options).plan()


def _plan_all(stored: Stored, table: LeafTable) -> tuple[RestorePlan, Recipe]:
    """Everything, as the checkpoint describes it."""
    if stored.unknown_types:
        _log.warning(
            "%s holds classes that are not known here and become dicts: %s;"
            " pass types=[...] or an abstract state to get them back",
            stored.metadata.path,
            ", ".join(sorted(stored.unknown_types)),
        )
    reading = _Reading()
    leaves: dict[LeafPath, LeafPlan] = {}
    problems = []
    usable_type = functools.cache(_usable_type)
    for path, leaf in table.items():
        if leaf.info.kind == "empty":
            continue
        wanted = leaf.info
        if wanted.sharding is not None:
            wanted = dataclasses.replace(wanted, sharding=None)
        if problem := _needs_x64(leaf.info, usable_type):
            problems.append(problem)
        size = reading.add(leaf, wanted)
        sources = _source_paths(leaf)
        actions = _actions(wanted, leaf, path, path)
        leaves[path] = LeafPlan(actions, sources, wanted, _found(leaf), size)
    structure = _containers.of(stored.structure, stored.table, table)
    total = reading.bytes_to_read
    return (
        RestorePlan(stored.metadata.path, leaves, total, total, tuple(problems)),
        reading.recipe((), None, structure),
    )


class _Reading:
    """What is to be read and computed."""

    def __init__(self) -> None:
        self.given: dict[LeafPath, Any] = {}
        self._jobs: list[_read.ReadJob] = []
        self._derived: list[Leaf] = []
        self._seen: set[int] = set()  # read for one of them

    def add(self, leaf: Leaf, wanted: LeafInfo) -> int:
        """Has a leaf of the table become what is wanted of it.

        Returns:
            The bytes that this process reads for it.
        """
        path = wanted.path
        stored = [s for s in leaf.sources if isinstance(s, StoredLeaf)]
        if leaf.fn is not None:
            self._derived.append(Leaf(wanted, leaf.sources, leaf.fn))
            new = {id(source): source for source in stored}
            new = {key: new[key] for key in new.keys() - self._seen}
            self._seen.update(new)
            return sum(_layout.stored_bytes(source.info) for source in new.values())
        if not stored:
            self.given[path] = _place.place(leaf.source, wanted)
            return 0
        if wanted.kind == "string":
            self.given[path] = stored[0].value
            return 0
        job = _read.ReadJob(stored[0], wanted)
        self._jobs.append(job)
        return _read.bytes_here(job)

    @property
    def bytes_to_read(self) -> int:
        """By all processes together; what is read for several leaves counts once."""
        once = {
            id(source): source
            for leaf in self._derived
            for source in leaf.sources
            if isinstance(source, StoredLeaf)
        }
        return sum(_layout.stored_bytes(job.found) for job in self._jobs) + sum(
            _layout.stored_bytes(source.info) for source in once.values()
        )

    def recipe(
        self,
        fresh: Sequence[LeafInfo],
        flat: _flax.FlatState | None,
        structure: _tree.Node | LeafPath,
        as_asked: Iterable[LeafPath] = (),
    ) -> Recipe:
        """How all of it is done."""
        return Recipe(
            tuple(self._jobs),
            tuple(self._derived),
            self.given,
            tuple(fresh),
            flat,
            structure,
            frozenset(as_asked),
        )


def _source_paths(leaf: Leaf) -> tuple[LeafPath, ...]:
    return tuple(s.info.path for s in leaf.sources if isinstance(s, StoredLeaf))


def _found(leaf: Leaf) -> LeafInfo:
    """What is stored for a leaf: of a computed one, the first of its sources."""
    source = next((s for s in leaf.sources if isinstance(s, StoredLeaf)), None)
    return leaf.info if source is None else source.info


def _needs_x64(info: LeafInfo, usable_type: Callable[[str], str]) -> Mismatch | None:
    if info.kind != "array" or info.python_type != "jax.Array":
        return None
    usable = usable_type(info.dtype or "")
    if usable == info.dtype:
        return None
    return Mismatch(info.path, f"at most {usable}, as jax is configured", str(info))


def _usable_type(dtype: str) -> str:
    """What jax makes of `dtype` as it is configured now."""
    return str(jax.dtypes.canonicalize_dtype(_dtypes.to_numpy(dtype)).name)


class _Planner:
    """Fits a checkpoint's leaf table to a wanted state."""

    def __init__(
        self,
        stored: Stored,
        table: LeafTable,
        flat: _flax.FlatState,
        abstract_state: PyTree,
        options: Options,
    ) -> None:
        self._stored = stored
        self._table = table
        self._abstract_state = abstract_state
        self._options = options
        self._flat = flat
        self._roles = _optax.roles(self._flat.structure, self._flat.optimizer_states)
        self._leaves: dict[LeafPath, LeafPlan] = {}
        self._reading = _Reading()
        self._fresh: list[LeafInfo] = []
        self._problems: list[Mismatch] = []
        self._used: set[LeafPath] = set()
        self._as_asked: set[LeafPath] = set()
        self._finder = _Finder(table)

    @functools.cached_property
    def _can_init(self) -> tuple[str, ...]:
        """How paths in optimizer states begin that `tx.init` can make anew."""
        return tuple(
            _tree.join(part.state_keys) + "/"
            for part in _flax.optimizers(self._abstract_state)
        )

    def plan(self) -> tuple[RestorePlan, Recipe]:
        """Decides every leaf."""
        chosen = self._choose()
        for path, leaf in self._flat.table.items():
            if leaf.info.kind != "empty":
                self._decide(path, leaf, chosen[path])
        self._drop_unused()
        plan = RestorePlan(
            self._stored.metadata.path,
            self._leaves,
            self._reading.bytes_to_read,
            sum(leaf.bytes for leaf in self._leaves.values()),
            tuple(self._problems),
        )
        recipe = self._reading.recipe(
            self._fresh, self._flat, self._flat.structure, self._as_asked
        )
        return plan, recipe

    def _choose(self) -> dict[LeafPath, list[LeafPath]]:
        """The stored leaves that may be meant by each wanted one.

        A moment of a parameter is nobody else's: the leaf in its old place has it, and
        several elsewhere cannot be told apart. Counters may be shared.
        """
        chosen = {
            path: self._candidates(path, self._roles.get(path))
            for path, leaf in self._flat.table.items()
            if leaf.info.kind != "empty"
        }
        takers: dict[LeafPath, list[LeafPath]] = {}
        for path, sources in chosen.items():
            known = self._roles.get(path)
            if len(sources) == 1 and known is not None and known.role(path).param:
                takers.setdefault(sources[0], []).append(path)
        for source, paths in takers.items():
            elsewhere = [path for path in paths if self._at(path) != source]
            if len(paths) > 1:
                is_kept = len(elsewhere) < len(paths)
                for path in elsewhere:
                    chosen[path] = [] if is_kept else [source, source]
        return chosen

    @functools.cached_property
    def _kept(self) -> set[LeafPath]:
        """Step counters that keep their values."""
        if not self._options.keeps_steps:
            return set()
        return step_counters(self._roles) & self._flat.table.keys()

    def _decide(self, path: LeafPath, leaf: Leaf, candidates: list[LeafPath]) -> None:
        known = self._roles.get(path)
        if path in self._kept:
            self._as_asked.add(path)
            self._used.update(candidates)
            value = leaf.source
            if isinstance(value, jax.ShapeDtypeStruct):
                value = _place.place(jnp.zeros(value.shape, value.dtype), leaf.info)
            self._reading.given[path] = value
            self._leaves[path] = LeafPlan(("init",), (), leaf.info, None, 0)
            return
        if known is not None and self._options.optimizer == "reinit":
            if path.startswith(self._can_init):
                self._as_asked.add(path)
            self._start_afresh(leaf, known)
            return
        if len(candidates) > 1:
            found = "several: " + ", ".join(candidates[:3])
            if len(set(candidates)) == 1:
                found = f"several leaves that ask for {candidates[0]}"
            problem = Mismatch(path, str(leaf.info), found)
            self._used.update(candidates)
            self._conflict(problem, leaf.info, None, tuple(candidates))
        elif candidates:
            self._take(path, leaf, candidates[0])
        else:
            self._start_afresh(leaf, known)

    def _candidates(self, path: LeafPath, known: _optax.Known | None) -> list[LeafPath]:
        """The stored leaves that may be meant: by path, else by role in the optimizer.

        A path counts only if the leaf there plays the same role: in another chain,
        another transform may stand in its place.
        """
        exact = self._at(path)
        if known is None or self._options.optimizer == "exact":
            return [] if exact is None else [exact]
        role = known.role(path)
        if exact is not None and self._finder.plays(exact, role, known.fields):
            return [exact]
        return self._finder.find(role, known.fields)

    def _at(self, path: LeafPath) -> LeafPath | None:
        """The stored leaf at `path`; Orbax ends those of boxes and NNX in `/value`."""
        for candidate in (path, f"{path}/value"):
            leaf = self._table.get(candidate)
            if leaf is not None and leaf.info.kind != "empty":
                return candidate
        return None

    def _take(self, path: LeafPath, leaf: Leaf, source_path: LeafPath) -> None:
        wanted, found = leaf.info, self._table[source_path]
        self._used.add(source_path)
        problem = _misfit(wanted, found.info)
        if problem and found.fn is not None and path in self._roles:
            # What a transform made of an optimizer's leaf, such as a placeholder.
            self._start_afresh(leaf, self._roles[path])
            return
        if problem:
            self._conflict(problem, wanted, found.info, (source_path,))
            return
        self._leaves[path] = LeafPlan(
            _actions(wanted, found, path, source_path),
            _source_paths(found),
            wanted,
            _found(found),
            self._reading.add(found, wanted),
        )

    def _start_afresh(self, leaf: Leaf, known: _optax.Known | None) -> None:
        """A leaf that is not to be had: its value in the state, or a new moment."""
        info = leaf.info
        is_optimizer = known is not None and self._options.optimizer != "exact"
        has_value = not isinstance(leaf.source, jax.ShapeDtypeStruct)
        if is_optimizer and info.path.startswith(self._can_init):
            self._fresh.append(info)
        elif (is_optimizer or self._options.missing == "init") and has_value:
            self._reading.given[info.path] = leaf.source
        else:
            # Finding the nearest name is slow, and only a few are shown.
            lacking = missing(
                info, self._table, nearest=len(self._problems) < errors.ROWS_SHOWN
            )
            if is_optimizer and self._at(info.path) is not None:
                found = (
                    f'{lacking.found} of another transform (optimizer="exact" takes it)'
                )
                lacking = dataclasses.replace(lacking, found=found)
            if self._options.missing == "init" or is_optimizer:
                lacking = dataclasses.replace(
                    lacking, found=f"{lacking.found}, and no value to start from"
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
        self._problems.append(problem)
        self._leaves[problem.leaf] = LeafPlan(("conflict",), sources, wanted, found, 0)

    def _drop_unused(self) -> None:
        for path, leaf in self._table.items():
            if path in self._used or leaf.info.kind == "empty":
                continue
            if self._options.unused == "error":
                self._problems.append(Mismatch(path, "nothing", str(leaf.info)))
            elif self._options.optimizer == "reinit" and leaf.info.role:
                continue
            name = path if path not in self._leaves else f"{path} (in the checkpoint)"
            self._leaves[name] = LeafPlan(("dropped",), (path,), None, leaf.info, 0)


def step_counters(roles: Mapping[LeafPath, _optax.Known]) -> set[LeafPath]:
    """Where step counters are, if there are any: beside the optimizers."""
    optimizers = {known.role(path).optimizer for path, known in roles.items()}
    return {"/".join((*path.split("/")[:-1], "step")) for path in optimizers}


class _Finder:
    """Finds optimizer leaves of a checkpoint by their role.

    Only leaves of the same optimizer are considered: those of a generator are never
    taken for a discriminator's. Where the checkpoint has no roles, as Orbax writes it,
    a leaf's surroundings tell: the fields beside it must be those of the transform.
    """

    def __init__(self, table: LeafTable) -> None:
        self._table = table
        self._found: dict[Role, list[LeafPath]] = {}

    @functools.cached_property
    def _by_role(self) -> dict[Role, list[LeafPath]]:
        by_role: dict[Role, list[LeafPath]] = {}
        for path, leaf in self._table.items():
            if leaf.info.role is not None and leaf.info.kind != "empty":
                by_role.setdefault(leaf.info.role, []).append(path)
        return by_role

    @functools.cached_property
    def _by_ending(self) -> dict[str, list[LeafPath]]:
        """Leaves without a role, sorted, by each end of their paths."""
        by_ending: dict[str, list[LeafPath]] = {}
        for path in sorted(self._table):
            info = self._table[path].info
            if info.role is None and info.kind != "empty":
                for ending in _endings(path.removesuffix("/value")):
                    by_ending.setdefault(ending, []).append(path)
        return by_ending

    @functools.cached_property
    def _children(self) -> dict[LeafPath, set[str]]:
        """What is right below each container, by its path."""
        children: dict[LeafPath, set[str]] = {}
        for path in self._table:
            inner = path.removesuffix("/value")
            while inner:
                container, _, name = inner.rpartition("/")
                names = children.setdefault(container, set())
                if name in names:
                    break  # and so are the containers around it
                names.add(name)
                inner = container
        return children

    def plays(self, path: LeafPath, role: Role, fields: frozenset[str]) -> bool:
        """Whether the stored leaf at `path` has the role of a wanted one.

        Optax renames the classes of its states now and then, so the same fields in the
        same place will do.

        Args:
            path: Of the stored leaf.
            role: That of the wanted one.
            fields: All fields of the state that the wanted one belongs to.
        """
        found = self._table[path].info.role
        if found is not None and found[:3] == role[:3]:
            return True
        if found is not None and _optax.exists(found.state_class):
            return False  # Adam's and AdaBelief's states have the same fields
        if not fields:
            return found is None or not found.state_class
        ending = _ending(role)
        bare = path.removesuffix("/value")
        if not bare.endswith(f"/{ending}") and bare != ending:
            return False
        container = bare[: -len(ending)].rstrip("/")
        return self._children.get(container, set()) == fields

    def find(self, role: Role, fields: frozenset[str]) -> list[LeafPath]:
        """All stored leaves that may be the wanted one, in whichever place."""
        if same := self._by_role.get(role):
            return same
        if not fields:
            return []
        if role not in self._found:
            inside = f"{role.optimizer}/" if role.optimizer else ""
            paths = self._by_ending.get(_ending(role), [])
            # Those of one optimizer stand together.
            start = stop = bisect.bisect_left(paths, inside)
            while stop < len(paths) and paths[stop].startswith(inside):
                stop += 1
            self._found[role] = [
                path for path in paths[start:stop] if self.plays(path, role, fields)
            ]
        return self._found[role]


def _endings(path: LeafPath) -> Iterator[str]:
    """`a/b/c`, `b/c` and `c`, of the path `a/b/c`."""
    yield path
    start = path.find("/")
    while start >= 0:
        yield path[start + 1 :]
        start = path.find("/", start + 1)


def _ending(role: Role) -> LeafPath:
    return f"{role.field}/{role.param}" if role.param else role.field


def _actions(
    wanted: LeafInfo, leaf: Leaf, path: LeafPath, source_path: LeafPath
) -> tuple[Action, ...]:
    """What is done to `leaf`, which the table has at `source_path`, for `path`."""
    if not _source_paths(leaf):
        return ("init",)  # made by a transform, of nothing that is stored
    actions: tuple[Action, ...] = ("loaded",)
    found = _found(leaf)
    if wanted.kind == "array" and wanted.dtype != found.dtype:
        actions += ("cast",)
    if source_path != found.path:
        actions += ("renamed",)
    if leaf.fn is not None:
        actions += ("transformed",)
    if source_path != path and source_path != f"{path}/value":
        actions += ("matched",)
    if wanted.shard_shape != found.shard_shape or (
        wanted.spec is not None and _ways(wanted.spec) != _ways(found.spec)
    ):
        actions += ("resharded",)
    return actions


def _ways(spec: PartitionSpec | None) -> tuple[Any, ...]:
    """What of a spec splits something; trailing Nones say nothing."""
    parts = list(spec or ())
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(parts)


def missing(wanted: LeafInfo, table: LeafTable, *, nearest: bool = True) -> Mismatch:
    """Says that `table` lacks a leaf, and which is called most alike."""
    found = "nothing"
    if wanted.path in table:
        found = str(table[wanted.path].info)
    elif nearest and len(table) <= _NEAREST_AMONG:
        near = difflib.get_close_matches(wanted.path, table, n=1)
        found = f"nothing (nearest: {near[0]})" if near else found
    return Mismatch(wanted.path, str(wanted), found)


def _misfit(wanted: LeafInfo, found: LeafInfo) -> Mismatch | None:
    """Says how `found` does not fit `wanted`; None if it does."""
    if _fits(wanted, found):
        return _sharding_misfit(wanted, found)
    return Mismatch(wanted.path, str(wanted), str(found))


def _fits(wanted: LeafInfo, found: LeafInfo) -> bool:
    if wanted.kind == "string" or found.kind == "string":
        return wanted.kind == found.kind
    if wanted.kind == "prng_key":
        if found.kind == "prng_key":
            return wanted.shape == found.shape and wanted.prng_impl == found.prng_impl
        # Raw key data, as Orbax has it without its array_metadatas.
        shape, dtype = _layout.stored_form(wanted)
        return found.shape == shape and found.dtype == dtype
    if found.kind == "prng_key" or wanted.shape != found.shape:
        return False
    assert wanted.dtype is not None
    assert found.dtype is not None
    if wanted.kind == "scalar" or found.kind == "scalar":
        # A Python number has no width; whether it fits is seen when it is read.
        return _number_kind(wanted.dtype) == _number_kind(found.dtype)
    return _dtypes.restores_as(found.dtype, wanted.dtype)


def _number_kind(dtype: str) -> str:
    return _dtypes.kind(dtype).removeprefix("u")


def _sharding_misfit(wanted: LeafInfo, found: LeafInfo) -> Mismatch | None:
    """Says why the wanted sharding cannot be had; None if it can."""
    sharding = wanted.sharding
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        asked = f"{wanted} on the mesh {dict(sharding.mesh.shape)} without devices"
        return Mismatch(wanted.path, asked, str(found))
    try:
        sharding.shard_shape(wanted.shape)
    except ValueError:
        asked = f"{wanted} split as {wanted.spec}, which does not divide it"
        return Mismatch(wanted.path, asked, str(found))
    return None


def advice(problems: Iterable[Mismatch], abstract_state: PyTree) -> str:
    """What to do about a plan that has `problems`."""
    found = list(problems)
    if abstract_state is None:
        return "Set jax_enable_x64, or pass an abstract state with numpy leaves."
    if any(m.wanted == "nothing" for m in found):
        return 'Ask for these leaves too, or pass unused="ignore".'
    if any(m.found.startswith("several") for m in found):
        return (
            'Load into the old optimizer first, or start it afresh: optimizer="reinit".'
        )
    if all(m.found.startswith("nothing") for m in found):
        return (
            "Ask only for leaves that the checkpoint has, or pass a state with values"
            ' and missing="init" to keep them.'
        )
    return (
        "Change the state to fit, or the checkpoint on the way: transforms=[...] can"
        " rename, drop, grow, slice and map leaves. Floating types are cast, integers"
        " only widened."
    )
