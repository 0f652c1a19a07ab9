"""Restores of the steps of a run, which tell what is damaged from what is good."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt import (
    _collector,
    _events,
    _flax,
    _joint,
    _locate,
    _marks,
    _multihost,
    _plan,
    _progress,
    _remote,
    _restore,
    _run_steps,
    _verify,
    errors,
    formats,
)
from flaxckpt._info import CheckpointMetadata, Lineage, Stored
from flaxckpt._types import PyTree
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _table as _transforms

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a restore has given.

    Attributes:
        step: The number of the step.
        state: What was restored of it.
        lineage: What its run began from, as is recorded there.
    """

    step: int
    state: PyTree
    lineage: tuple[Lineage, ...]


class _Wanted(NamedTuple):
    """What is restored: a state, and the position of a dataset, or neither."""

    state: PyTree | None
    dataset: Any
    options: _plan.Options


class Restores:
    """Restores steps of one run.

    Args:
        run: The steps that are there.
        transforms: What this run changes at its saves.
        processes: Who restores together.
        wait: Waits for the save under way.
        read_only: Whether damaged steps are not marked.
    """

    def __init__(
        self,
        run: _run_steps.RunSteps,
        transforms: Sequence[Transform],
        processes: _joint.Processes,
        wait: Callable[[], object],
        *,
        read_only: bool,
    ) -> None:
        self._run = run
        self._transforms = transforms
        self._processes = processes
        self._wait = wait
        self._read_only = read_only

    @_collector.paused()
    def restore(
        self,
        abstract_state: PyTree | None,
        *,
        step: int | None,
        dataset: Any,
        fallback: bool,
        options: _plan.Options,
    ) -> Restored:
        """Restores a step; see `Checkpointer.restore`."""
        with _remote.looking(self._run.directory):
            candidates = self._agreed(step)
            if not fallback:  # where there are two of the same step, both are tried
                candidates = self._copies(candidates)
            wanted = _Wanted(abstract_state, dataset, options)
            return self._first(candidates, wanted)

    def load_source(
        self,
        path: Path,
        step: int | None,
        abstract_state: PyTree,
        options: _plan.Options,
    ) -> tuple[PyTree, tuple[Lineage, ...]]:
        """Loads another checkpoint, and says what a run has begun from then."""
        start, counter = time.monotonic(), _progress.Counter(f"loading {path.name}")
        state, lineage = _restore.load_source(
            path, step, abstract_state, options, counter
        )
        self._tell(lineage[0].step, lineage[0].path, counter, start)
        return state, lineage

    def _tell(
        self,
        step: int | None,
        path: Path | str,
        counter: _progress.Counter,
        start: float,
    ) -> None:
        secs = time.monotonic() - start
        self._run.events.emit(
            "restored", step, path=path, bytes=counter.total, secs=secs
        )

    # ---- which step ---------------------------------------------------------------

    def _agreed(self, step: int | None) -> list[tuple[int, Path]]:
        """The steps to restore, as process 0 sees them."""
        what = "the newest step" if step is None else f"step {step}"
        together = self._processes.begin("find", what)
        with _joint.ending(together, saving=False):
            self._wait()
            if self._run.tiers is not None:
                return self._run.candidates(step)
            _joint.check_asked(together, what)
            found = _joint.first_says(
                together,
                "found",
                lambda: [(n, path.name) for n, path in self._run.candidates(step)],
            )
        return [(number, self._run.directory / name) for number, name in found]

    def _copies(self, candidates: list[tuple[int, Path]]) -> list[tuple[int, Path]]:
        """The first of `candidates`, and the copies of it."""
        tiers = self._run.tiers
        return candidates[:1] if tiers is None else tiers.copies(*candidates[0])

    def _first(
        self, candidates: Sequence[tuple[int, Path]], wanted: _Wanted
    ) -> Restored:
        """Restores the first of `candidates` that is not damaged."""
        damage: errors.DamagedCheckpointError | None = None
        left_out: list[tuple[int, Path]] = []
        for number, path in candidates:
            start, counter = time.monotonic(), _progress.Counter(f"loading {path.name}")
            one = functools.partial(self._one, number, path, wanted, counter)
            together = self._processes.begin("restore", f"step {number}")
            try:
                stored, state = _joint.attempt(together, one)
            except errors.DamagedCheckpointError as error:
                damage = damage or error
                left_out.append((number, path))
                text = _events.first_lines(error, 1)
                self._run.events.emit("fell_back", number, path=path, error=text)
                _log.warning("step %d is damaged and left out: %s", number, error)
            else:
                self._tell(number, path, counter, start)
                # Not before there is another to go on from.
                self._settle_marks(number, path, left_out)
                return Restored(number, state, stored.metadata.lineage)
        assert damage is not None
        raise damage

    # ---- one step -----------------------------------------------------------------

    def _one(
        self,
        number: int,
        path: Path,
        wanted: _Wanted,
        counter: _progress.Counter,
        has_read: Callable[[], object],
    ) -> tuple[Stored, PyTree]:
        """Restores a step; `has_read` is called when all of it is in memory.

        Raises:
            DamagedCheckpointError: It is damaged, or cannot be read.
            CheckpointError: It does not fit.
        """
        try:
            if not formats.recognises(path):
                raise errors.DamagedCheckpointError(
                    f"{path} is called like a step, but holds no checkpoint"
                )
            stored = _locate.read_step(path, number, wanted.options.types)
            undone = self._undone(stored.metadata, wanted)
            state = _restore.restore(stored, wanted.state, undone, counter, has_read)
            if wanted.dataset is not None:
                _restore.restore_dataset(stored, wanted.dataset)
        except OSError as error:
            if isinstance(error, errors.CheckpointError):
                raise
            raise errors.DamagedCheckpointError(
                f"{path} cannot be read: {error}; see that the disk is sound, or"
                " restore another step"
            ) from error
        return stored, state

    def _undone(self, metadata: CheckpointMetadata, wanted: _Wanted) -> _plan.Options:
        """The options to restore a state from what was made of it at the save."""
        if wanted.state is None or not self._transforms:
            return wanted.options
        if metadata.transforms != _transforms.describe(self._transforms):
            return wanted.options
        undoing = _transforms.undoing(self._transforms)
        if undoing is None:
            if not wanted.options.transforms:  # which may undo them
                self._check_unchanged(metadata, wanted.state)
            return wanted.options
        return dataclasses.replace(
            wanted.options, transforms=(*undoing, *wanted.options.transforms)
        )

    def _check_unchanged(self, metadata: CheckpointMetadata, state: PyTree) -> None:
        """Refuses to take values that transforms have changed for those of `state`."""
        changed = _transforms.changed_in_place(
            self._transforms, _flax.flatten(state).table
        )
        if changed:
            made = ", ".join(metadata.transforms)
            raise errors.OptionError(
                f"{metadata.path} was saved with {made[:500]}, which cannot be undone:"
                f" {len(changed)} leaves of it are not what the run had:\n"
                + errors.rows(changed)
                + "\nPass to restore what undoes that, as transforms=[...], or give"
                " map_leaf its inverse=. flaxckpt.load takes the values as they are."
            )

    # ---- what is damaged ----------------------------------------------------------

    def _settle_marks(
        self, number: int, path: Path, left_out: Sequence[tuple[int, Path]]
    ) -> None:
        """Marks what is proved to be damaged, and unmarks what is proved to be good.

        Each is read once more for that: a disk or a network may fail for a moment.
        """
        if self._read_only or not _multihost.is_first():
            return
        try:
            if _marks.is_damaged(path) and _verify.verify(path, number).ok:
                _marks.unmark_damaged(path)
                _log.warning("step %d is good, and marked as damaged no more", number)
            for worse, there in left_out:
                if (reason := _verify.damage(there, worse)) is None:
                    _log.warning("step %d may be good: it is not marked", worse)
                    continue
                _marks.mark_damaged(there, reason)
                _log.warning(
                    "step %d is marked as damaged: it is not counted as a step any"
                    " more, and replaced when the run gets there",
                    worse,
                )
        except OSError as error:
            _log.warning("damaged steps could not be marked: %s", error)
