"""Restores steps of a run, and marks damaged steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from flaxckpt import (
    _checkpoint,
    _distributed,
    _formats,
    _state,
    _steps,
    _storage,
    _util,
    errors,
)
from flaxckpt._checkpoint.planner import RestoreOptions
from flaxckpt._formats import locate
from flaxckpt._formats.reader import CheckpointMetadata, Lineage, Stored
from flaxckpt._run import damage, run_steps
from flaxckpt._run.tiers import parts
from flaxckpt._transforms import base as _transforms
from flaxckpt._types import PyTree
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A restored step, with its state and recorded lineage."""

    step: int
    state: PyTree
    lineage: tuple[Lineage, ...]


class _Request(NamedTuple):
    """The request of a restore: an abstract state, an iterator and options."""

    state: PyTree | None
    dataset: Any
    options: RestoreOptions


_Marked: TypeAlias = dict[int, str]
"""Step marked as damaged -> reason."""


class Restores:
    """Restores steps of a run, together with other processes; see `Checkpointer`."""

    def __init__(
        self,
        run: run_steps.RunSteps,
        transforms: Sequence[Transform],
        processes: _distributed.agreement.Processes,
        wait: Callable[[], object],
        *,
        read_only: bool,
        max_concurrent_bytes: int,
        read_once: bool,
    ) -> None:
        self._run = run
        self._transforms = transforms
        self._processes = processes
        self._wait = wait
        self._read_only = read_only
        self._max_concurrent_bytes = max_concurrent_bytes
        self._read_once = read_once

    @_util.gc_pause.pause()
    def restore(
        self,
        abstract_state: PyTree | None,
        *,
        step: int | None,
        dataset: Any,
        fallback: bool,
        options: RestoreOptions,
    ) -> Restored:
        request = _Request(abstract_state, dataset, self._complete(options))
        with (
            _storage.read_errors.explain_errors(self._run.saves_in),
            _storage.paths.listing_cache(self._run.directory),
        ):
            candidates, marked = self._agree_on_steps(step)
            if not fallback:  # try both copies of a step
                if self._run.is_in_parts:  # the same in all processes
                    first = candidates[0][0]
                    candidates = [each for each in candidates if each[0] == first]
                else:
                    candidates = self._run.copies(*candidates[0])
                self._check_unmarked(candidates[0][0], marked)
            self._report_marked(marked)
            return self._restore_first(candidates, request, list(marked))

    def load_source(
        self,
        path: Path,
        step: int | None,
        abstract_state: PyTree,
        options: RestoreOptions,
    ) -> tuple[PyTree, tuple[Lineage, ...], int]:
        """Returns the state of another checkpoint, its lineage, and its step.

        With `optimizer="reinit"`, the state's step counters keep their values.
        """
        options = dataclasses.replace(self._complete(options), is_source=True)
        start = time.monotonic()
        counter = _util.progress.Counter(f"loading {path.name}")
        state, lineage, start_step, outcome = _checkpoint.restore.load_source(
            path, step, abstract_state, options, counter
        )
        origin = lineage[0]
        self._report_restored(origin.step, origin.path, counter, start, outcome=outcome)
        return state, lineage, start_step

    def _complete(self, options: RestoreOptions) -> RestoreOptions:
        """Returns `options` with the options that belong to the whole run."""
        return dataclasses.replace(
            options,
            max_concurrent_bytes=self._max_concurrent_bytes,
            read_once=self._read_once,
        )

    def _report_restored(
        self,
        step: int | None,
        path: Path | str,
        counter: _util.progress.Counter,
        start: float,
        **details: Any,
    ) -> None:
        secs = time.monotonic() - start
        self._run.events.emit(
            "restored", step, path=path, bytes=counter.total, secs=secs, **details
        )

    # ---- choosing a step -----------------------------------------------------

    def _agree_on_steps(
        self, step: int | None
    ) -> tuple[list[tuple[int, Path]], _Marked]:
        """Returns the steps that process 0 sees, best first, and newer damaged ones."""
        what = "the newest step" if step is None else f"step {step}"
        operation = self._processes.begin("find", what)
        with _distributed.agreement.closing(
            operation, _distributed.agreement.restore_error
        ):
            self._wait()
            tier = self._run.part_tier
            _distributed.agreement.check_same_request(operation, what, tier is not None)
            if tier is not None and (operation is not None or tier.has_parts()):
                candidates = self._agree_on_parts(operation, step)
                marked = _distributed.agreement.broadcast(
                    operation,
                    "marked",
                    lambda: [*self._marked_beyond(step, candidates).items()],
                )
                return candidates, dict(marked)
            if self._run.has_staging:
                candidates = self._run.candidates(step)
                return candidates, self._marked_beyond(step, candidates)

            def look() -> list[list[tuple[int, str]]]:
                candidates = self._run.candidates(step)
                marked = self._marked_beyond(step, candidates)
                named = [(number, path.name) for number, path in candidates]
                return [named, list(marked.items())]

            named, marked = _distributed.agreement.broadcast(operation, "found", look)
        candidates = [(number, self._run.directory / name) for number, name in named]
        return candidates, dict(marked)

    def _agree_on_parts(
        self, operation: _distributed.operation.Operation | None, step: int | None
    ) -> list[tuple[int, Path]]:
        """Returns the steps with all parts; raises CheckpointNotFoundError if none."""
        assert self._run.part_tier is not None
        if not self._read_only:
            self._run.ensure_staging()
        found, lost = self._run.part_tier.agree(operation, self._run.list_far, step)
        if _util.job.is_first() and not self._read_only:
            self._run.part_tier.adopt_steps()
        candidates = [each for each in found if step in (None, each[0])]
        newest = candidates[0][0] if candidates else -1
        reasons: dict[int, str] = {}
        for each in lost:
            if step in (None, number := each.step) and number > newest:
                why = reasons[number] = str(each)
                path = self._run.saves_in / self._run.format.name(number)
                self._run.events.emit("fell_back", number, path=path, error=why)
                _log.warning("step %d is left out: %s", number, why)
        if not candidates:
            if not reasons:
                raise self._no_step_error(operation, step)
            text = (
                f"no step of {self._run.directory} is whole: of\n"
                + errors.rows(f"step {n}, {why}" for n, why in reasons.items())
                + "\nand the run directory does not have them."
            )
            # Only of the steps asked for: others do not matter here.
            if any(each.step in reasons and each.is_damaged for each in lost):
                raise errors.DamagedCheckpointError(
                    f"{text} To go on without a damaged step, call delete(step) in all"
                    " processes."
                )
            raise errors.CheckpointNotFoundError(
                f"{text} Start as many processes as saved them, with their staging"
                " directories."
            )
        return candidates

    def _no_step_error(
        self, operation: _distributed.operation.Operation | None, step: int | None
    ) -> errors.CheckpointError:
        """Returns the error for steps that no process can restore, the same in all."""
        try:
            here = [path.name for _, path in self._run.candidates(step)]
        except errors.CheckpointError as error:
            own = error
        else:
            own = errors.CheckpointNotFoundError(
                f"no step of {self._run.directory} is whole; {self._run.saves_in} has"
                f" {errors.first_few(here)}, which no run has saved there: move them"
                " elsewhere"
            )
        if operation is None:
            return own
        found = operation.exchange(
            "no step", [type(own).__name__, errors.one_line(own)]
        )
        if len({kind for kind, _ in found}) == 1:
            return own
        rows = [f"process {number}: {why}" for number, (_, why) in enumerate(found)]
        return errors.DamagedCheckpointError(
            f"no step of {self._run.directory} is whole:\n{errors.rows(rows)}\nDelete"
            " what is damaged, then start again."
        )

    def _marked_beyond(
        self, step: int | None, candidates: Sequence[tuple[int, Path]]
    ) -> _Marked:
        """Returns damaged steps newer than all `candidates`: step -> reason."""
        if step is not None:
            return {}
        newest = candidates[0][0]
        marked = {s: why for s, why in self._run.damage_reasons().items() if s > newest}
        return dict(sorted(marked.items(), reverse=True))

    def _check_unmarked(self, newest: int, marked: _Marked) -> None:
        """Raises DamagedCheckpointError if a newer step has a damage marker."""
        if marked:
            raise errors.DamagedCheckpointError(
                f"{self._run.directory} has steps newer than {newest} that are marked"
                " as damaged:\n"
                + errors.rows(f"{step}: {why}" for step, why in marked.items())
                + f"\nfallback=True restores step {newest}. restore(step=…) tries a"
                " marked step, and delete(step) removes it."
            )

    def _report_marked(self, marked: _Marked) -> None:
        for step, why in marked.items():
            path = self._run.directory / self._run.format.name(step)
            self._run.events.emit("fell_back", step, path=path, error=why, marked=True)
            _log.warning(
                "step %d is left out, because it is marked as damaged: %s", step, why
            )

    def _restore_first(
        self,
        candidates: Sequence[tuple[int, Path]],
        request: _Request,
        marked: Sequence[int],
    ) -> Restored:
        """Restores the first undamaged candidate; `marked` are newer damaged steps."""
        first: errors.DamagedCheckpointError | None = None
        left_out: list[tuple[int, Path]] = []
        for number, path in candidates:
            start = time.monotonic()
            counter = _util.progress.Counter(f"loading {path.name}")
            restore = functools.partial(
                self._restore_one, number, path, request, counter
            )
            operation = self._processes.begin("restore", f"step {number}")
            try:
                stored, state = _distributed.agreement.attempt(operation, restore)
            except errors.DamagedCheckpointError as error:
                first = first or error
                left_out.append((number, path))
                text = _steps.event.first_lines(error, 1)
                self._run.events.emit("fell_back", number, path=path, error=text)
                _log.warning("step %d is left out: %s", number, error)
            else:
                details = self._describe_origin(number, path, counter)
                self._report_restored(number, path, counter, start, **details)
                # Mark damaged steps only after another step was restored.
                self._update_markers(number, path, left_out)
                self._warn_of_older(number, [*marked, *(n for n, _ in left_out)])
                if self._run.part_tier is not None:
                    self._run.part_tier.keep_restored(number, path, self._processes)
                return Restored(number, state, stored.metadata.lineage)
        assert first is not None
        raise first

    def _describe_origin(
        self, step: int, path: Path, counter: _util.progress.Counter
    ) -> dict[str, Any]:
        """Returns where the bytes of a step came from, for the event."""
        tier = self._run.part_tier
        if tier is None:
            return {}
        if self._run.tier(path) == "directory":
            return {"from_peers": 0, "from_directory": counter.total}
        copied: dict[str, Any] = tier.copied._asdict()
        if missing := tier.missing_parts(path):
            copied["missing"] = missing
            _log.warning(
                "step %d: the parts of %s are at no process, but in %s",
                step,
                parts.names_of(missing),
                self._run.directory,
            )
        return copied

    def _warn_of_older(self, number: int, newer: Sequence[int]) -> None:
        """Warns, as the last message, of a restore of an older step."""
        left_out = [step for step in dict.fromkeys(newer) if step != number]
        if not left_out:
            return
        names = ", ".join(map(str, left_out))
        _log.warning(
            "restored step %d of %s instead of the newer %s, damaged: %s of training"
            " lost",
            number,
            self._run.directory,
            f"step {names}" if len(left_out) == 1 else f"steps {names}",
            _util.humanize.count(max(left_out) - number, "step"),
        )

    # ---- a step -----------------------------------------------------------------

    def _restore_one(
        self,
        number: int,
        path: Path,
        request: _Request,
        counter: _util.progress.Counter,
        has_read: Callable[[], object],
    ) -> tuple[Stored, PyTree]:
        """Restores a step; calls `has_read` when the whole step is in memory.

        Raises DamagedCheckpointError for a damaged step, and OutOfMemoryError for one
        that is whole, and larger than the free memory.
        """
        tier = self._run.part_tier
        try:
            if tier is not None:
                tier.prepare(path)
            detected = _formats.identify(path)
            if detected is None:
                raise errors.DamagedCheckpointError(
                    f"{path} is named like a step, but is not a checkpoint"
                )
            located = locate.Located(path, number, detected)
            stored = located.open(request.options.types)
            options = self._with_undoing(stored.metadata, request)
            fetch = None
            if tier is not None and tier.has_sources(path):
                fetch = functools.partial(tier.fetch, path)
            state = _checkpoint.restore.restore(
                stored, request.state, options, counter, has_read, fetch
            )
            if request.dataset is not None:
                _checkpoint.restore.restore_dataset(stored, request.dataset)
        except errors.DamagedCheckpointError as error:
            if _util.memory.is_too_large(error):
                # A damaged file may claim any size.
                _checkpoint.completeness.check(path, number)
                raise errors.OutOfMemoryError(
                    f"{path} is not damaged, but cannot be restored with the memory"
                    f" that is free ({error.__cause__}): free memory, restore less of"
                    " it, or pass step= to restore another step"
                ) from error
            raise
        except OSError as error:
            if isinstance(error, errors.CheckpointError):
                raise
            raise errors.DamagedCheckpointError(
                f"cannot read {path}: {error}; check the disk, or restore another step"
            ) from error
        return stored, state

    def _with_undoing(
        self, metadata: CheckpointMetadata, request: _Request
    ) -> RestoreOptions:
        """Returns the options, with transforms that undo the transforms of the save."""
        if request.state is None:
            return request.options
        if not _transforms.is_described(metadata.transforms, self._transforms):
            if not request.options.transforms:  # the caller may undo them
                self._warn_of_others(metadata)
            return request.options
        undoing = _transforms.invert_for_restore(self._transforms)
        if undoing is None:
            if not request.options.transforms:
                self._check_unchanged(metadata, request.state)
            return request.options
        return dataclasses.replace(
            request.options, transforms=(*undoing, *request.options.transforms)
        )

    def _warn_of_others(self, metadata: CheckpointMetadata) -> None:
        """Logs a warning about values that transforms of others may have changed."""
        if unknown := _transforms.may_change_in_place(metadata.transforms):
            _log.warning(
                "%s was saved with %s, which this Checkpointer does not have, and which"
                " is not undone: if the values of its state were changed so, pass the"
                " transforms=[...] of that save to Checkpointer",
                metadata.path,
                ", ".join(unknown)[:500],
            )

    def _check_unchanged(self, metadata: CheckpointMetadata, state: PyTree) -> None:
        """Raises OptionError if transforms without inverse changed values."""
        changed = _transforms.changed_in_place(
            self._transforms, _state.flax_state.flatten(state).table
        )
        if changed:
            made = ", ".join(metadata.transforms)
            raise errors.OptionError(
                f"{metadata.path} was saved with {made[:500]}, which cannot be undone;"
                " the values of these leaves differ from those of the run:\n"
                + errors.rows(changed)
                + "\nPass transforms=[...] that undo it to restore, or pass inverse= to"
                " map_leaf. flaxckpt.load returns the values as saved."
            )

    # ---- damage markers ----------------------------------------------------------

    def _update_markers(
        self, number: int, path: Path, left_out: Sequence[tuple[int, Path]]
    ) -> None:
        """Marks steps proved to be damaged, and unmarks a step proved to be good.

        Reads each step once more: a disk or a network may fail for a moment. Of a step
        in parts, damage that any process finds counts.
        """
        if self._read_only:
            return
        tier = self._run.part_tier
        in_parts = [
            each for each in left_out if tier is not None and tier.has_sources(each[1])
        ]
        for worse, there in in_parts:
            self._mark_parts(worse, there)
        is_ours = tier is not None and tier.has_sources(path)
        if not _util.job.is_first() and not is_ours:
            return
        try:
            if (
                _steps.markers.is_damaged(path)
                and _checkpoint.verify.verify_checkpoint(path, number).ok
            ):
                damage.unmark(path, number, self._run.events)
            for worse, there in left_out:
                if _util.job.is_first() and (worse, there) not in in_parts:
                    why = _checkpoint.verify.find_damage(there, worse)
                    damage.mark(there, worse, why, self._run.events)
        except OSError as error:
            _log.warning("damaged steps could not be marked: %s", error)

    def _mark_parts(self, step: int, path: Path) -> None:
        """Marks a step at all processes if its part at one of them is damaged."""
        operation = self._processes.begin("mark", f"the damage of step {step}")
        with _distributed.agreement.closing(
            operation, _distributed.agreement.restore_error
        ):
            mine = None
            with contextlib.suppress(OSError):  # an unreadable file proves nothing
                if path.exists():
                    mine = _checkpoint.verify.find_damage(path, step)
            told = [mine]
            if operation is not None:
                told = operation.exchange("damage", mine)
        reasons = {n: why for n, why in enumerate(told) if why}
        if reasons and self._run.part_tier is not None:
            self._run.part_tier.forget(step)  # a save replaces it
        text = "; ".join(f"process {n}: {why}" for n, why in reasons.items())
        try:
            if path.exists():
                damage.mark(path, step, text or None, self._run.events)
        except OSError as error:
            _log.warning("step %d could not be marked as damaged: %s", step, error)
