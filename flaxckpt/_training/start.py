"""Start of a run: from the run's newest step, another checkpoint, or a new state."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from flaxckpt import _checkpoint, _state, _steps, _storage, _util, errors
from flaxckpt._checkpoint.planner import RestoreOptions
from flaxckpt._maps import named
from flaxckpt._run.checkpointer import Checkpointer, resume, session_of
from flaxckpt._run.run_steps import RunSteps
from flaxckpt._run.session import Session
from flaxckpt._training import kept_state, step_counter
from flaxckpt._transforms import base as _transforms
from flaxckpt._types import LeafPath, PathLike, PyTree
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)


def restore_or_init(
    checkpointer: Checkpointer,
    state: PyTree,
    *,
    dataset: Any,
    source: PathLike | None,
    source_step: int | None,
    source_map: str | Sequence[Transform],
    options: RestoreOptions,
) -> tuple[PyTree, int]:
    """Returns the initial state and step; see `CheckpointCallback.restore_or_init`."""
    source_map = _check_map(source_map, source)
    session = session_of(checkpointer)
    checkpointer.wait()
    latest = max(session.run.paths(), default=None)
    params_only = session.saves.params_only.latest()
    if params_only is not None and (latest is None or params_only[0] > latest):
        _log.warning(
            "there was no time to save all of step %d: its parameters, without the"
            " optimizer, are in %s. The run continues from %s",
            *params_only,
            "the beginning" if latest is None else f"step {latest}",
        )
    left_out = session.run.find_left_out(only_usual=source is not None)
    # Restoring only warns about other names.
    _raise_for(session, {n: path for n, path in left_out.items() if path.is_symlink()})
    # With damaged steps, do not begin anew: restoring raises an error with advice.
    if session.has_steps():
        restored, step = resume(
            checkpointer, state, dataset=dataset, unused=options.unused
        )
        if dataset is None and checkpointer.has_dataset(step):
            _log.warning(
                "step %d has the state of a dataset, but no dataset was passed: the"
                " data start from the beginning. Pass dataset= to restore their"
                " position",
                step,
            )
        if source is not None:
            _warn_of_ignored(checkpointer, source)
        _warn_of_lost(session.run, step)
        return restored, step
    if source is None or not _is_within(source, session.run):
        _raise_for(session, left_out)
    _warn_of_lost(session.run, None)
    if source is not None:
        options = _with_map(options, source_map, source, state)
        return session.load_source(source, state, options, step=source_step)
    leaves = _state.flax_state.leaves_by_path(state).values()
    abstract = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if abstract:
        raise errors.CheckpointNotFoundError(
            f"{checkpointer.directory} has no checkpoint to restore, and leaves of the"
            f" state are abstract ({len(abstract)}): pass an initialized state"
        )
    _log.info("no checkpoint in %s: starting a new run", checkpointer.directory)
    return state, 0


def _warn_of_ignored(checkpointer: Checkpointer, source: PathLike) -> None:
    """Logs a warning if a run with steps did not begin from `source`."""
    path = _storage.paths.resolve(source)
    origin = checkpointer.lineage[0].path if checkpointer.lineage else None
    if origin is not None:
        began = _storage.paths.from_text(origin)
        is_pointer = origin.startswith(f"{path}-")  # checkpoint.bv -> checkpoint.bv-1
        if path in (began, *began.parents) or is_pointer:
            return
    _log.warning(
        "source=%r is not read: %s has steps, and the run continues; it began %s. To"
        " begin from the source, choose another directory",
        str(source),
        checkpointer.directory,
        "without a source" if origin is None else f"from {origin}",
    )


def _warn_of_lost(run: RunSteps, begun: int | None) -> None:
    """Logs a warning if the journal has a newer step that no one has deleted."""
    if not _util.job.is_first() or (begun is not None and run.is_in_parts):
        return
    last = {
        event.step: event
        for directory in {run.saves_in, run.directory}
        for event in _steps.journal.recent(directory / _steps.journal.NAME)
        if event.kind in ("committed", "deleted")
        and run.format.step(event.path.rstrip("/").rpartition("/")[2]) == event.step
    }
    oldest, here = begun or 0, {*run.paths(), *run.damaged_paths()}
    lost = [
        (step, event.path)
        for step, event in last.items()
        if step and step > oldest and step not in here and event.kind == "committed"
    ]
    if lost:
        _log.warning(
            "%s has no step %d, although its journal has the save of this step to %s,"
            " and no deletion: the training %s. Was it saved with staging=, are all"
            " files here, and is this the disk of the run? To begin anew on purpose,"
            " choose another directory",
            run.directory,
            *max(lost),
            "begins anew" if begun is None else f"continues from step {begun}",
        )


def _check_map(
    source_map: str | Sequence[Transform], source: PathLike | None
) -> str | Sequence[Transform]:
    """Returns the name or transforms of a map; raises OptionError without a source."""
    if isinstance(source_map, str):
        named.check_name("source_map", source_map)
    else:
        source_map = _transforms.check(source_map, "source_map")
    if source_map and source is None:
        raise errors.OptionError(
            "source_map needs a source: pass the directory of the model as source="
        )
    return source_map


def _with_map(
    options: RestoreOptions,
    source_map: str | Sequence[Transform],
    source: PathLike,
    state: PyTree,
) -> RestoreOptions:
    if isinstance(source_map, str):
        source_map = named.find_for_state(source_map, source, state)
    return dataclasses.replace(options, transforms=(*source_map, *options.transforms))


def _raise_for(session: Session, left_out: Mapping[int, Path]) -> None:
    """Raises CheckpointFormatError for checkpoints that a new run would hide."""
    if left_out:
        raise errors.CheckpointFormatError(session.run.describe_left_out(left_out))


def _is_within(source: PathLike, run: RunSteps) -> bool:
    """Returns True for a source in the directory of the run, which is known then."""
    path = _storage.paths.resolve(source)
    return run.directory in (path, *path.parents)


def check(
    checkpointer: Checkpointer, step: int, began_at: int | None, *, again: bool
) -> int:
    """Returns the step from which the run continues, if known; 0 for a new run.

    Steps newer than `began_at`, the restored step, are damaged, or the loop's own if it
    has begun before. Raises CheckpointExistsError for steps of another run, and
    OptionError if the loop counts from the beginning again.
    """
    checkpointer.wait()
    directory, latest = checkpointer.directory, checkpointer.latest_step()
    begun = checkpointer.restored_step if began_at is None else began_at
    if begun is None:
        if latest is not None and latest >= step:
            if again:
                raise errors.OptionError(
                    f"the loop is at step {step}, although it has saved step {latest}:"
                    " count completed steps up, or call restore_or_init to go back"
                )
            raise errors.CheckpointExistsError(
                f"{directory} has steps up to {latest} of an earlier run, and this run"
                f" is at {step}: continue the earlier run with restore_or_init, or"
                " choose another directory. To go back to an earlier step, delete those"
                " after it first"
            )
        return latest or 0
    if step < begun:
        raise errors.OptionError(
            f"this run restored step {begun}, and is at step {step} now: begin the loop"
            " at the step that restore_or_init returns"
        )
    if latest is not None and latest > begun and (again or began_at is None):
        raise errors.CheckpointExistsError(
            f"{directory} has steps up to {latest}, but this run continues from step"
            f" {begun}; a restart would continue from {latest}. Delete the newer steps"
            " (checkpointer.delete(step)), call restore_or_init, or begin another run"
            " with source="
        )
    return begun


class FirstState:
    """The state that a loop begins with, to detect a loop that counts from 0."""

    def __init__(self, state: PyTree, step: int) -> None:
        self._step = step
        self._trace = kept_state.Trace(state)

    def check_counted(self, state: PyTree, step: int) -> None:
        """Raises OptionError if the same step is reported again with another state."""
        if self._step != step or step_counter.read_counters(state):
            return
        if self._trace.has_changed(state):
            raise errors.OptionError(
                f"the run began with {step} completed steps, and the loop calls its"
                f" first step {step} too, although the state has changed: each restart"
                " would repeat a step. If the loop counts from 0, pass"
                " step_is='index' to CheckpointCallback; otherwise begin it at"
                f" start + 1, as in range({step + 1}, total + 1). If no step was"
                " trained yet, pass check_step=False"
            )


class BeginTypes:
    """The types of the state with which a run begins, and begins again."""

    def __init__(
        self, state: PyTree, unused: Literal["warn", "error", "ignore"] | None
    ) -> None:
        flat = _state.flax_state.flatten(state)
        abstract = {path: _abstract(leaf.source) for path, leaf in flat.table.items()}
        self._begin = flat.rebuild(abstract, in_parts=True)
        self._options = RestoreOptions(purpose="resume", unused=unused)
        self._types = _types(state)
        self._told: set[str] = set()

    def check(self, checkpointer: Checkpointer, state: PyTree) -> None:
        """Warns, once for each leaf, if a restart would not bring `state` back."""
        if (types := _types(state)) == self._types:
            return
        self._types = types
        planned = _checkpoint.restore.plan_resume(state, self._begin, self._options)
        problems = {problem.leaf: problem.row for problem in planned.problems}
        converted = _checkpoint.restore.find_converted(planned)
        problems |= {path: f"{path}: converted, {types}" for path, types in converted}
        rows = [row for leaf, row in problems.items() if leaf not in self._told]
        if not rows:
            return
        self._told |= problems.keys()
        _log.warning(
            "a restart of the run in %s would not bring back %s: the state has other"
            " types than the state that restore_or_init was given:\n%s\n%s",
            checkpointer.directory,
            _util.humanize.count(len(rows), "leaf", "leaves"),
            errors.rows(rows),
            planned.advice,
        )


def _types(state: PyTree) -> dict[LeafPath, tuple[Any, ...]]:
    return {
        path: (type(x), getattr(x, "dtype", None), getattr(x, "shape", None))
        for path, x in _state.flax_state.leaves_by_path(state).items()
    }


def _abstract(value: Any) -> Any:
    """Returns a value of the same type without its memory."""
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(
            value.shape, value.dtype, weak_type=getattr(value, "weak_type", False)
        )
    if isinstance(value, np.ndarray):
        return np.broadcast_to(np.zeros((), value.dtype), value.shape)
    return value


def warn_of_other_numbers(checkpointer: Checkpointer, state: PyTree, step: int) -> None:
    """Logs a warning if the step counters of a restored state have other values."""
    if counters := step_counter.describe_mismatch(state, step):
        _log.warning(
            "step %d of %s is restored, but %s: its steps were numbered differently,"
            " such as from 0. The next step is the number in the state plus 1; pass"
            " check_step=False if the state counts something else",
            step,
            checkpointer.directory,
            counters,
        )
