"""Restore of a checkpoint: plans against the wanted state, then reads the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import numpy as np

from flaxckpt import _arrays, _formats, _state, _storage, _util, datasets, errors
from flaxckpt._checkpoint import (
    completeness,
    mismatch,
    optimizer_init,
    planner,
    restore_errors,
)
from flaxckpt._checkpoint.load_handle import LoadHandle
from flaxckpt._checkpoint.plan import RestorePlan, describe_outcomes
from flaxckpt._checkpoint.planner import LoadOptions, RestoreOptions
from flaxckpt._formats import locate, reader
from flaxckpt._formats.reader import CheckpointMetadata, Lineage, Stored
from flaxckpt._state.leaf import Leaf, LeafInfo, StoredLeaf
from flaxckpt._transforms import base as _transforms
from flaxckpt._transforms import from_text, mirrors
from flaxckpt._types import LeafPath, PathLike, PyTree
from flaxckpt.errors import Mismatch

if TYPE_CHECKING:
    import tensorstore as ts

_log = logging.getLogger(__name__)

_MAX_LINEAGE = 64
"""Maximal number of recorded origins, the nearest first."""

_DIGESTED_BYTES = 2**30
"""Limit on the size of a file to be read only for a digest."""

_takes_options = _util.guessed_names.spell_out(LoadOptions, RestoreOptions)

# ---- public functions -----------------------------------------------------------


@_util.gc_pause.pause()
@_util.guessed_names.explain
@_takes_options
def load(
    path: PathLike,
    abstract_state: PyTree | None = None,
    *,
    step: int | None = None,
    **options: Unpack[LoadOptions],
) -> PyTree:
    """Loads a state from a checkpoint in any supported format.

    Reads flaxckpt's own format, Orbax (new and old), T5X, safetensors, GGUF, numpy's
    `.npz`, Flax's msgpack, the streams of EasyLM and fjformer, and big_vision, and
    detects the format by itself (`formats.detect`). Code in a file is never executed.

    Args:
        path: A checkpoint directory or file, or a run directory.
        abstract_state: The state to load, with arrays or `jax.ShapeDtypeStruct`s as
            leaves: the result has its classes, shapes, dtypes and shardings. A smaller
            state loads less: `{"params": ...}` reads the parameters only. Without an
            abstract state, a flaxckpt checkpoint returns the saved classes; other
            formats return dicts and lists.
        step: Step of a run directory; by default the newest.
        transforms: Changes to apply to the checkpoint first, such as `transforms.cast`.
        missing: Treatment of leaves that the checkpoint lacks: raise an error, or keep
            the values of `abstract_state`, which must have them.
        unused: Treatment of leaves that only the checkpoint has: log a warning (if
            the state has leaves in the same branch), raise an error, or ignore. Parts
            of a leaf of a class of `register_leaf` are an error unless ignored.
        optimizer: How to find optimizer leaves: `match` finds leaves by their role
            (transform, field and parameter) if their path has changed, and initializes
            new leaves; `exact` finds leaves by path only; `reinit` initializes the
            whole optimizer; that of the checkpoint is left out.
        types: Your classes that the checkpoint may name, if there is no
            `abstract_state`; classes of optax and Flax are known.
        verify: Whether to compare all values with their checksums. Without, only data
            read by TensorStore is compared, which is compressed.
        memory_map: Whether to map the files of uncompressed arrays into memory instead
            of copying: pages that are never used are never read (if `verify` is off).
            Changes of the arrays never change the files, and the files may be deleted
            meanwhile; but no program may write into the files, which flaxckpt and
            Orbax never do. `auto` maps files of local file systems only.
        read_once: With several processes: whether to read large arrays that several
            processes need in parts, and exchange the parts between devices. All
            processes must then load at the same place of the program.

    Returns:
        A state like `abstract_state`, with values for all leaves. Arrays without a
        sharding are on the default device, uncommitted.

    Raises:
        CheckpointNotFoundError: `path` does not exist.
        CheckpointFormatError: `path` is not a checkpoint.
        DamagedCheckpointError: Parts are missing or do not match their checksums.
        RestoreMismatchError: The checkpoint does not fit `abstract_state`; all leaves
            are named.
    """
    wanted = RestoreOptions(**options)
    stored, counter = _open(path, step, wanted)
    return restore(stored, abstract_state, wanted, counter)


@_util.guessed_names.explain
@_takes_options
def load_async(
    path: PathLike,
    abstract_state: PyTree | None = None,
    *,
    step: int | None = None,
    **options: Unpack[LoadOptions],
) -> LoadHandle:
    """Starts a load like `load`, with its arguments, and reads on another thread.

    For example while the training step compiles:

    ```python
    loading = flaxckpt.load_async("checkpoints/first", abstract_state)
    step = jax.jit(train_step).lower(abstract_state, batch).compile()
    state = loading.wait()
    ```

    The plan is made before the return, so a checkpoint that does not exist or does not
    fit the state is an error of this call. Do not donate or change `abstract_state`
    before `wait` has returned, if the result takes values from it.

    With several processes, only the reading runs on the other thread, and `wait` does
    the rest: the exchange of `read_once`, transforms, and the initialization of
    optimizer leaves. All processes must then call `wait` at the same place of the
    program, as for `load`.

    Returns:
        A handle; its `wait()` returns the state.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError, RestoreMismatchError: As for
            `load`; `wait` raises errors of reading.
    """
    wanted = RestoreOptions(**options)
    with _util.gc_pause.pause():
        stored, counter = _open(path, step, wanted)
        planned = Restore(stored, abstract_state, wanted, counter)
    if _util.processes.process_count() > 1:
        # Threads of different processes start computations in different orders, and
        # would wait for each other forever.
        return LoadHandle(planned.read, planned.compute, planned.build, counter)

    def read_and_compute() -> None:
        planned.read()
        planned.compute()

    return LoadHandle(read_and_compute, lambda: None, planned.build, counter)


def _open(
    path: PathLike, step: int | None, options: RestoreOptions
) -> tuple[Stored, _util.progress.Counter]:
    """Opens a checkpoint to load; returns it with a counter of its bytes."""
    stored = locate.open_checkpoint(path, step, types=options.types)
    name = _storage.paths.from_text(stored.metadata.path).name
    return stored, _util.progress.Counter(f"loading {name}")


@_util.gc_pause.pause()
def load_source(
    path: Path,
    step: int | None,
    abstract_state: PyTree,
    options: RestoreOptions,
    counter: _util.progress.Counter,
) -> tuple[PyTree, tuple[Lineage, ...], int, str]:
    """Returns a state to begin with, its lineage, its step, and the outcome as text."""
    stored = locate.open_checkpoint(path, step)
    digest = _file_digest(stored)
    planned = Restore(stored, abstract_state, options, counter)
    with _util.progress.bar(counter):
        planned.read()
        planned.compute()
        state = planned.build()
    done = _transforms.describe(options.transforms)
    origin = Lineage(stored.metadata.path, stored.step, digest, done)
    lineage = (origin, *stored.metadata.lineage)[:_MAX_LINEAGE]
    start = planned.find_start(state, origin) if planned.continues_steps() else 0
    return state, lineage, start, planned.outcome


def _find_start(state: PyTree, origin: Lineage, fresh: Set[LeafPath]) -> int:
    """Returns the step at which a run begins that continues those of a source.

    It is the value of the step counter; else the source's step; else the optimizer's
    count.
    """
    flat = _state.flax_state.flatten(state)
    counters = flat.step_counters
    counts = [
        int(np.max(np.asarray(flat.table[path].source), initial=0))
        for path, known in flat.optimizer_facts.items()
        if known.field == "count" and flat.table[path].info.kind == "array"
    ]
    count = max(counts, default=0)
    if (step := _find_step(flat, counters)) is not None:
        if fresh.isdisjoint(counters) or step == count:
            _log.info("the run begins at step %d, as the step counter says", step)
        else:
            _log.warning(
                "the run begins at step %d, as the step counter says, which %s lacks;"
                " the optimizer that it continues counts %d updates: begin with that"
                ' step in the state, or pass optimizer="reinit"',
                step,
                origin.path,
                count,
            )
        return step
    step = count if origin.step is None else origin.step
    _log.warning(
        "the run begins at step %d, %s of %s, whose optimizer it continues, as the"
        " state has no step counter beside the optimizer%s",
        step,
        "the count of the optimizer" if origin.step is None else "the step",
        origin.path,
        f"; the optimizer counts {count} updates" if counts and count != step else "",
    )
    return step


def _find_step(flat: _state.flax_state.FlatState, paths: Set[LeafPath]) -> int | None:
    """Returns the value of the step counters at `paths`; None without any."""
    counters = {
        path: set(np.asarray(flat.table[path].source).ravel().tolist())
        for path in paths
        if path in flat.table
    }
    steps = set().union(*counters.values())
    if len(steps) > 1:
        raise errors.OptionError(
            "the step counters of the source disagree:\n"
            + errors.rows(
                f"{path}: {sorted(values)[:5]}" for path, values in counters.items()
            )
            + '\nPass optimizer="reinit" to begin at step 0.'
        )
    return int(steps.pop()) if steps else None


def _file_digest(stored: Stored) -> str | None:
    if stored.stamp is None:
        return None
    file = stored.stamp.path
    try:
        return _storage.of(file).digest_file(file, max_bytes=_DIGESTED_BYTES)
    except OSError:
        return None


@_util.gc_pause.pause()
@_util.guessed_names.explain
@_takes_options
def plan(
    path: PathLike,
    abstract_state: PyTree,
    *,
    step: int | None = None,
    **options: Unpack[LoadOptions],
) -> RestorePlan:
    """Returns the plan of `load` with the same arguments, without reading arrays.

    The plan's `problems` are the reasons why `load` would fail.

    Raises:
        CheckpointNotFoundError: `path` does not exist.
        CheckpointFormatError: `path` is not a checkpoint.
        DamagedCheckpointError: The metadata is missing or has changed.
    """
    wanted = RestoreOptions(**options)
    return _plan(locate.open_checkpoint(path, step), abstract_state, wanted)


def plan_for_target(
    path: PathLike,
    target: PyTree,
    *,
    step: int | None = None,
    as_source: bool = False,
    **options: Unpack[LoadOptions],
) -> RestorePlan:
    """Returns the plan of `load` into the state that was saved as `target`.

    Like `plan`, but the program that saved `target` has an optimizer and all values.
    With `as_source`, a new run begins from `path`, as with `restore_or_init(source=…)`.
    """
    wanted = RestoreOptions(**options, is_source=as_source, has_values=True)
    stored = locate.open_checkpoint(path, step)
    planned = _plan(stored, target, wanted)
    if planned.drops and not _succeeds_without(stored, target, wanted, planned.drops):
        planned = dataclasses.replace(planned, drops=())
    return planned


def plan_resume(state: PyTree, begin: PyTree, options: RestoreOptions) -> RestorePlan:
    """Returns the plan of a restore of `state`, once saved, into `begin`."""
    flat = _state.flax_state.flatten(state)
    table = flat.table_with_roles()
    unknown: set[str] = set()
    structure = _state.treedef.from_json(
        _state.treedef.to_json(flat.structure), _state.classes.resolver(), unknown
    )
    stored = Stored(
        CheckpointMetadata("the run", "flaxckpt", None, {}),
        {
            path: Leaf(leaf.info, (StoredLeaf(Path(), leaf.info, value=""),))
            for path, leaf in table.items()
        },
        structure,
        frozenset(unknown),
    )
    planned, _ = planner.make_plan(stored, begin, options)
    return dataclasses.replace(planned, advice=restore_errors.ADVICE_ON_TYPES)


def _succeeds_without(
    stored: Stored, target: PyTree, options: RestoreOptions, patterns: Sequence[str]
) -> bool:
    """Returns True if a restore that drops the leaves of `patterns` would succeed."""
    drops = [*from_text.parse(drop=patterns), *options.transforms]
    dropped = dataclasses.replace(options, transforms=drops, missing="init")
    try:
        return not planner.make_plan(stored, target, dropped)[0].problems
    except errors.CheckpointError:  # after other transforms, leaves have other names
        return False


def _plan(
    stored: Stored, abstract_state: PyTree, options: RestoreOptions
) -> RestorePlan:
    planned, _ = planner.make_plan(stored, abstract_state, options)
    if not planned.problems:
        return planned
    return restore_errors.advise(
        planned,
        stored,
        has_transforms=bool(options.transforms),
        has_state=abstract_state is not None,
        is_source=options.is_source,
    )


@_util.gc_pause.pause()
@_util.guessed_names.explain
def metadata(path: PathLike, *, step: int | None = None) -> CheckpointMetadata:
    """Returns the metadata of a checkpoint, without reading arrays.

    Args:
        path: A checkpoint, or a run directory.
        step: Step of a run directory; by default the newest.

    Raises:
        CheckpointNotFoundError: `path` does not exist.
        CheckpointFormatError: `path` is not a checkpoint.
        DamagedCheckpointError: The metadata is missing or has changed.
    """
    return locate.read_metadata(path, step)


@_util.guessed_names.explain
def open_leaf(
    path: PathLike, leaf_path: LeafPath, *, step: int | None = None
) -> ts.TensorStore:
    """Opens an array of a checkpoint, read-only.

    Values are read when you index the array. If the only checksum covers a whole file
    (zarr 2, numpy archives, small databases), the file is read and compared first.

    ```python
    kernel = open_leaf("run", "params/dense/kernel")
    first_rows = kernel[:10].read().result()
    ```

    Args:
        path: A checkpoint, or a run directory.
        leaf_path: Path of the leaf.
        step: Step of a run directory; by default the newest.

    Raises:
        RestoreMismatchError: The leaf does not exist, or is not an array.
        CheckpointError: As for `load`.
    """
    if not isinstance(leaf_path, str):
        raise errors.OptionError(
            "leaf_path must be a string such as 'params/dense/kernel', got"
            f" {_util.arguments.describe(leaf_path)}"
        )
    stored = locate.open_checkpoint(path, step)
    stored.check_leaf(leaf_path)
    leaf = stored.table.get(leaf_path)
    _arrays.read.check_supported([leaf] if leaf else [], stored.metadata.path)
    source = None if leaf is None else leaf.source
    if not isinstance(source, StoredLeaf) or source.open is None:
        wanted = LeafInfo(leaf_path, (), "array", "jax.Array")
        found = mismatch.describe_missing(wanted, stored.table).found
        if why := stored.explain_missing(leaf_path):
            found = f"nothing: {why}"
        raise errors.RestoreMismatchError(
            stored.metadata.path,
            [Mismatch(leaf_path, "an array", found)],
            "metadata(path).leaves lists all leaves.",
        )
    return _arrays.read.open_one(source)


# ---- restoring --------------------------------------------------------------------


class Restore:
    """A planned restore: call `read`, then `compute`, then `build`.

    With several processes, all call `compute` at the same place of the program; `read`
    does not communicate, so that it may run on a thread of its own.
    """

    def __init__(
        self,
        stored: Stored,
        abstract_state: PyTree | None,
        options: RestoreOptions,
        counter: _util.progress.Counter,
    ) -> None:
        self._start = time.monotonic()
        self._stored = stored
        self._abstract_state = abstract_state
        self._is_reinit = options.optimizer == "reinit"
        self._planned, self._recipe = planner.make_plan(stored, abstract_state, options)
        if self._planned.problems:
            raise restore_errors.make_error(
                self._planned,
                stored,
                has_transforms=bool(options.transforms),
                has_state=abstract_state is not None,
                is_source=options.is_source,
                is_resume=options.purpose == "resume",
            )
        self._jobs: Sequence[_arrays.read_plan.ReadJob] = self._recipe.jobs
        if options.read_once and _util.processes.process_count() > 1:
            self._jobs = _arrays.read_once.divide(self._recipe.jobs)
        counter.total = self._planned.bytes_here
        if abstract_state is not None:
            _warn_of_differences(self._planned, self._recipe, options)
            if options.purpose == "resume":
                _warn_of_static_fields(stored, self._recipe)
        self._reading = _read_options(self._planned.path, options, counter.add)
        self._values: dict[LeafPath, Any] = {}

    def find_start(self, state: PyTree, origin: Lineage) -> int:
        """Returns the step at which a run begins that continues the source's steps."""
        leaves = self._planned.leaves.items()
        fresh = {path for path, leaf in leaves if "init" in leaf.actions}
        return _find_start(state, origin, fresh)

    def continues_steps(self) -> bool:
        """Returns True if an optimizer, or a step counter, of a source is restored."""
        if self._is_reinit or self._recipe.flat is None:
            return False
        counters = self._recipe.flat.step_counters
        return any(
            leaf.wanted is not None
            and "init" not in leaf.actions
            and (
                leaf.wanted.path in counters
                or mirrors.is_optimizer_leaf(leaf.wanted.path, leaf.wanted)
            )
            for leaf in self._planned.leaves.values()
        )

    @property
    def outcome(self) -> str:
        """How many leaves have each outcome: `2 loaded (1 cast), 6 init, 3 dropped`.

        Unlike the plan, it counts the leaves that transforms drop. A new optimizer and
        its step drop none: they take the places of the stored ones.
        """
        wanted = [leaf for leaf in self._planned.leaves.values() if leaf.wanted]
        taken = {source for leaf in wanted for source in leaf.sources}
        replaced: Set[LeafPath] = set()
        if self._is_reinit and self._recipe.flat is not None:
            taken |= self._recipe.flat.step_counters
            replaced = self._recipe.flat.optimizers
        left = [
            path
            for path, leaf in self._stored.table.items()
            if path not in taken
            and leaf.info.kind != "empty"
            and not (self._is_reinit and leaf.info.role)
            and not planner.is_in_any(path, replaced)
        ]
        return describe_outcomes(self._planned, dropped=len(left))

    def find_files(self) -> set[Path]:
        sources = [s for leaf in self._recipe.derived for s in leaf.sources]
        derived = [
            _arrays.read_plan.ReadJob(source, source.info)
            for source in sources
            if isinstance(source, StoredLeaf)
        ]
        try:
            return _arrays.read_files.find_files([*self._jobs, *derived])
        except (ValueError, OSError) as error:
            if isinstance(error, errors.CheckpointError):
                raise
            raise errors.DamagedCheckpointError(
                f"{self._planned.path} is damaged: {error}; restore another step"
            ) from error

    def read(self) -> None:
        path = self._planned.path
        with (
            reader.replacements_reported(path, self._stored.stamp),
            _arrays.to_device.any_values(),
            completeness.explain_parts(Path(path)),
        ):
            self._values = _arrays.read.read(self._jobs, self._reading)

    def compute(self) -> None:
        """Exchanges the parts of `read_once`, and computes the other leaves."""
        recipe, path, values = self._recipe, self._planned.path, self._values
        with (
            reader.replacements_reported(path, self._stored.stamp),
            _arrays.to_device.any_values(),
        ):
            if self._jobs is not recipe.jobs:
                values = _arrays.read_once.gather(values, recipe.jobs)
            values = {**recipe.given, **values}
            if recipe.derived:
                values |= _arrays.evaluate.read(recipe.derived, self._reading)
                values |= _convert_numbers(path, recipe.numbers, values)
            if recipe.fresh:
                with _failed_build_reported(path):
                    fresh, kept = optimizer_init.init_leaves(
                        recipe, self._abstract_state, values, path
                    )
                if kept:
                    _warn(path, "keep the values of the state", kept)
                values |= fresh
        self._values = values
        reader.check_current(path, self._stored.stamp)
        if _log.isEnabledFor(logging.INFO):
            _log.info(
                "restored %s: %s; %d bytes in %.3f s",
                path,
                describe_outcomes(self._planned),
                self._planned.bytes_here,
                time.monotonic() - self._start,
            )

    def build(self) -> PyTree:
        flat, values = self._recipe.flat, self._values
        with _failed_build_reported(self._planned.path):
            if flat is None:
                return _state.tree.unflatten(self._recipe.structure, values)
            return flat.rebuild(values)


class Fetch(Protocol):
    """Copies files that a restore reads, if they are elsewhere."""

    def __call__(self, wanted: Collection[Path], *, is_again: bool) -> bool:
        """Returns True if files were copied; see `PartTier.fetch`."""
        ...


def _fetch_and_read(planned: Restore, fetch: Fetch) -> None:
    files = planned.find_files()
    fetch(files, is_again=False)
    try:
        planned.read()
    except errors.DamagedCheckpointError:
        if not fetch(files, is_again=True):
            raise
        planned.read()


def restore(
    stored: Stored,
    abstract_state: PyTree | None,
    options: RestoreOptions,
    counter: _util.progress.Counter,
    has_read: Callable[[], object] = lambda: None,
    fetch: Fetch | None = None,
) -> PyTree:
    """Loads the leaves of `abstract_state`, or all; calls `has_read` after the read."""
    planned = Restore(stored, abstract_state, options, counter)
    with _util.progress.bar(counter):
        if fetch is None:
            planned.read()
        else:
            _fetch_and_read(planned, fetch)
        has_read()
        planned.compute()
        return planned.build()


def _convert_numbers(
    path: str, numbers: Sequence[planner.ComputedNumber], values: Mapping[LeafPath, Any]
) -> dict[LeafPath, Any]:
    """Returns computed Python numbers, converted to the leaves of the state."""
    placed = {}
    too_large = []
    for found, wanted in numbers:
        number = np.asarray(values[wanted.path], found.dtype)
        try:
            placed[wanted.path] = _arrays.typed_values.assemble(
                {(): number}, found, wanted
            )
        except OverflowError as error:
            text = f"the number {error}"
            too_large.append(Mismatch(wanted.path, str(wanted), text))
    if too_large:
        raise errors.RestoreMismatchError(path, too_large)
    return placed


@contextlib.contextmanager
def _failed_build_reported(path: str) -> Iterator[None]:
    """Raises RestoreMismatchError if values cannot be built into the state."""
    try:
        yield
    except _state.leaf_types.UnbuiltLeavesError as error:
        raise restore_errors.make_unbuilt_error(path, error) from error
    except _state.nnx_objects.UnequalVariablesError as error:
        raise restore_errors.make_unequal_error(path, error) from error


def restore_dataset(stored: Stored, iterator: Any) -> None:
    """Moves an iterator to its saved position, or raises DatasetStateError."""
    path = _storage.paths.from_text(stored.metadata.path)
    if stored.items.dataset in stored.metadata.deleted_items:
        reason = (
            f"the dataset state of {path} was deleted by keep_dataset, keep_items or"
            " delete(step, item=…)"
        )
        advice = (
            "restore a newer step with metadata(step).has_dataset, or pass dataset=None"
            " to start the data from the beginning"
        )
    else:
        if files := _formats.native.read_dataset(
            path, stored.digests, stored.items.dataset
        ):
            # `read_dataset` has found each file of which there is a digest.
            name = stored.items.dataset
            is_whole = any(file.startswith(f"{name}/") for file in stored.digests)
            datasets.set_state(iterator, files, path=path, is_whole=is_whole)
            return
        reason = f"{path} was saved without a dataset iterator"
        advice = (
            "to start from the beginning, pass dataset=None, or, for later saves to"
            " include the data, dataset=flaxckpt.datasets.Restarting(iterator)"
        )
    if not isinstance(iterator, datasets.Restarting):
        raise errors.DatasetStateError(
            f"{reason}, so the data cannot continue; {advice}"
        )
    _log.warning("the data starts from the beginning: %s", reason)


def _read_options(
    path: str, options: RestoreOptions, report: Callable[[int], object]
) -> _arrays.read.ReadOptions:
    memory_map = options.memory_map
    if memory_map == "auto":
        checkpoint = _storage.paths.from_text(path)
        memory_map = _storage.filesystem.is_local(checkpoint)
    return _arrays.read.ReadOptions(
        memory_map=memory_map,
        verify=options.verify,
        max_concurrent_bytes=options.max_concurrent_bytes,
        report=report,
    )


def _warn_of_differences(
    planned: RestorePlan, recipe: planner.Recipe, options: RestoreOptions
) -> None:
    """Logs warnings about unread leaves and about newly initialized leaves."""
    assert recipe.flat is not None
    optimizers = [_state.tree.join(keys) for keys, _ in recipe.flat.optimizer_states]
    branches = {path.split("/")[0] for path in (*recipe.flat.table, *optimizers)}
    dropped, fresh = [], []
    for path, leaf in planned.leaves.items():
        if "dropped" in leaf.actions:
            dropped.append(path)
        elif "init" in leaf.actions and path not in recipe.as_asked:
            fresh.append(path)
    if options.purpose != "resume" and "" not in branches:  # a part of the state
        dropped = [path for path in dropped if path.split("/")[0] in branches]
    if dropped and options.unused != "ignore":
        _warn(planned.path, "not read, as missing in the state", dropped)
    if options.purpose == "resume" and (converted := find_converted(planned)):
        names = [f"{path} ({types})" for path, types in converted]
        _warn(planned.path, "converted to the types of the state", names)
    if fresh:
        _warn(planned.path, "not restored, but initialized", fresh)


def _warn_of_static_fields(stored: Stored, recipe: planner.Recipe) -> None:
    """Logs a warning about static fields with other values in the step to resume."""
    assert recipe.flat is not None
    saved = dict(_list_static(stored.structure))
    rows = [
        f"{field}: {value} in the step, {now} in the state"
        for field, now in _list_static(recipe.flat.structure)
        if (value := saved.get(field, now)) != now
    ]
    if rows:
        _log.warning(
            "%s of %s %s, which keeps its own:\n%s\nA value that training changes must"
            " be a leaf: a number, an array, or an nnx.Variable.",
            _util.humanize.count(len(rows), "static field"),
            stored.metadata.path,
            "differ from the state" if len(rows) > 1 else "differs from the state",
            errors.rows(rows),
        )


def _list_static(
    structure: _state.tree.Node | LeafPath,
) -> Iterator[tuple[LeafPath, str]]:
    """Yields the path and the JSON of each static field of classes, not of boxes."""
    for keys, node in _state.tree.containers(structure):
        for name, value in () if node.is_box else node.static.items():
            yield f"{_state.tree.join(keys)}/{name}".lstrip("/"), json.dumps(value)


def find_converted(planned: RestorePlan) -> list[tuple[LeafPath, str]]:
    """Returns leaves, no Python integers, that get another type, with both types."""
    return [
        (path, f"{leaf.found.dtype} to {leaf.wanted.dtype}")
        for path, leaf in planned.leaves.items()
        if "cast" in leaf.actions
        and leaf.wanted is not None
        and leaf.found is not None
        and not (leaf.found.is_python_number and leaf.found.python_type == "int")
    ]


def _warn(path: str, what: str, leaves: list[LeafPath]) -> None:
    count = _util.humanize.count(len(leaves), "leaf", "leaves")
    _log.warning("%s of %s %s: %s", count, path, what, errors.first_few(leaves))
