"""Where a run begins: at its own newest step, from another checkpoint, or anew."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from flaxckpt import errors
from flaxckpt._run.checkpointer import Checkpointer
from flaxckpt._types import PathLike, PyTree
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """What a new run begins from, and how; see `Checkpointer.load_source`.

    Attributes:
        path: A checkpoint or a run directory; None for no source.
        step: Which step of a run directory.
        transforms: What to change in it first.
        missing: What to do about leaves that it lacks.
        unused: What to do about leaves that are not asked for.
        optimizer: How those of the optimizer are found.
    """

    path: PathLike | None
    step: int | None
    transforms: Sequence[Transform]
    missing: Literal["error", "init"]
    unused: Literal["warn", "error", "ignore"]
    optimizer: Literal["match", "exact", "reinit"]


def restore_or_init(
    checkpointer: Checkpointer, state: PyTree, source: Source, *, dataset: Any
) -> tuple[PyTree, int]:
    """The state to begin with, and how many steps it has completed.

    Raises:
        CheckpointError: There are checkpoints, but none that fits.
    """
    checkpointer.wait()
    _tell_of_params_only(checkpointer)
    # Damaged steps are no reason to begin anew: restoring says what is to be done.
    if checkpointer.has_steps():
        restored, step = checkpointer.restore_latest(state, dataset=dataset)
        if dataset is None and checkpointer.has_dataset(step):
            _log.warning(
                "step %d has the state of a dataset, and no dataset is restored: the"
                " data begin anew. Pass dataset= to go on where they stood",
                step,
            )
        return restored, step
    if source.path is not None:
        return checkpointer.load_source(
            source.path,
            state,
            step=source.step,
            transforms=source.transforms,
            missing=source.missing,
            unused=source.unused,
            optimizer=source.optimizer,
        )
    checkpointer.check_other_names()
    leaves = jax.tree.leaves(state)
    abstract = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if abstract:
        raise errors.CheckpointNotFoundError(
            f"{checkpointer.directory} has no checkpoint to restore, and"
            f" {len(abstract)} leaves of the state have no values to begin with: pass"
            " an initialised state"
        )
    _log.info("no checkpoint in %s: starting anew", checkpointer.directory)
    return state, 0


def _tell_of_params_only(checkpointer: Checkpointer) -> None:
    """Says what a run that had too little time has left behind."""
    latest, left = checkpointer.latest_step(), checkpointer.params_only()
    if left is not None and (latest is None or left[0] > latest):
        _log.warning(
            "there was no time to save step %d whole: its parameters, without the"
            " optimizer, are in %s. The run goes on from %s",
            *left,
            "the beginning" if latest is None else f"step {latest}",
        )


def check(
    checkpointer: Checkpointer, step: int, began_at: int | None, *, again: bool
) -> int:
    """Sees that a run does not mix its steps with those that are there.

    Args:
        checkpointer: Of the run.
        step: The first that it completes.
        began_at: Where `restore_or_init` has found it; None if nothing was restored
            so. Steps beyond are damaged.
        again: Whether the loop has begun before, so that they may be its own.

    Returns:
        The step that it goes on from, as far as can be told; 0 if it is new.

    Raises:
        CheckpointExistsError: The directory has steps of another run.
        OptionError: The steps are counted from the beginning again.
    """
    checkpointer.wait()
    directory, latest = checkpointer.directory, checkpointer.latest_step()
    begun = checkpointer.restored_step if began_at is None else began_at
    if begun is None:
        if latest is not None and latest >= step:
            raise errors.CheckpointExistsError(
                f"{directory} holds steps up to {latest} of an earlier run, and this"
                f" one is at {step}: go on from there with restore_or_init, or choose"
                " another directory"
            )
        return latest or 0
    if step < begun:
        raise errors.OptionError(
            f"this run has restored step {begun}, and is at {step} now: begin the loop"
            " at the step that restore_or_init returns"
        )
    if latest is not None and latest > begun and (again or began_at is None):
        raise errors.CheckpointExistsError(
            f"{directory} holds steps up to {latest}, beyond step {begun} that this run"
            f" goes on from; a restart would go on from {latest}. Delete what is beyond"
            " (checkpointer.delete(step)), call restore_or_init, or begin another run"
            " with source="
        )
    return begun
