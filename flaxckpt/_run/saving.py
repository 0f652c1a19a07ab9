"""The saves of a run, at most one in progress at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flaxckpt import (
    _arrays,
    _checkpoint,
    _distributed,
    _steps,
    _storage,
    _util,
    datasets,
    errors,
)
from flaxckpt._checkpoint import save_handle
from flaxckpt._checkpoint.commit import SaveRequest
from flaxckpt._checkpoint.save_handle import SaveHandle, SaveResult
from flaxckpt._formats.items import Items
from flaxckpt._formats.reader import Lineage
from flaxckpt._run import metrics as run_metrics
from flaxckpt._run import params_only, run_steps, sample_log, settings
from flaxckpt._types import JSON, PyTree

_log = logging.getLogger(__name__)


class Saves:
    """Saves steps of a run, and remembers its own steps."""

    def __init__(
        self,
        run: run_steps.RunSteps,
        options: _checkpoint.commit.SaveOptions,
        processes: _distributed.agreement.Processes,
    ) -> None:
        self.lineage: tuple[Lineage, ...] = ()
        self.has_statistics = False
        self._run = run
        self._options = options
        self._processes = processes
        self.params_only = params_only.ParamsOnly(run.directory, run.format)
        self.settings = settings.Recorder(run.events, run.rules, run.format.template)
        # One save at a time, for all threads.
        self._lock = _util.forks.PerProcess(threading.RLock)
        self._handle: SaveHandle | None = None
        self._handle_step: int | None = None
        self._last_arrays: _arrays.written.Previous | None = None  # by our last save
        self._own_steps: set[int] = set()
        self._begun: int | None = None  # the restored step, until a warning
        self._saved_since: set[int] = set()
        self._last_own: int | None = None  # the last saved or restored step
        self._has_tried_undoing = False  # its transforms, as a test
        self._has_met = False  # process 0, in the same tier
        self._standstill = datasets.Standstill()

    def request(self, step: int, **fields: Any) -> SaveRequest:
        return SaveRequest(
            path=self._run.saves_in / self._run.format.name(step),
            options=self._options,
            step=step,
            lineage=self.lineage,
            is_part=self._run.is_in_parts,
            **fields,
        )

    def check_directory(self) -> None:
        """Raises OptionError if the directory of the run is itself a checkpoint.

        Call this before anything is written: a checkpoint with other files in it, such
        as a journal, is not deleted or replaced.
        """
        if not self._own_steps:
            self._run.check_no_checkpoint()

    def save(self, request: SaveRequest, state: PyTree) -> SaveHandle:
        with self._lock.get():
            operation = self._processes.begin("save", f"step {request.step}")
            with _distributed.agreement.report_failure(operation):
                self.end()
                with _checkpoint.commit.store_errors(request.path):
                    return self._begin(request, state, operation)

    def _begin(
        self,
        request: SaveRequest,
        state: PyTree,
        operation: _distributed.operation.Operation | None,
    ) -> SaveHandle:
        step, path = request.number, request.path
        if not self._has_met or _util.job.is_first():  # process 0 may be asked again
            _distributed.agreement.check_same_tier(operation, request.is_part)
            self._has_met = True
        if request.on_exists == "skip" and self._is_there(request, operation):
            if operation is not None:
                operation.close()
            is_here = not request.is_part or step in self._run.known_paths()
            if is_here and not request.temporary:
                self._run.make_permanent(step)
            return self._skip(request)
        self.check_directory()
        counter = _util.progress.Counter(f"saving step {step}")
        with self._failure_event(step, path):
            with _storage.paths.listing_cache(path):
                request = self._complete_request(request, counter, operation)
                snapshot = _checkpoint.save.take_snapshot(request, state)
            self._try_undoing(state)
            self._standstill.note(step, snapshot.contents.dataset)
        counter.total = snapshot.nbytes
        blocked = request.elapsed()
        self._run.events.emit("snapshot", step, path=path, blocked_secs=blocked)

        @self._failure_event(step, path)
        @_distributed.agreement.closing(operation)
        def work() -> SaveResult:
            return self._execute(snapshot, blocked)

        self._handle = SaveHandle(
            work,
            name=f"save of {path}",
            counter=counter,
            cancellation=request.cancellation,
            pace=request.pace,
        )
        self._handle_step = step
        return self._handle

    def _is_there(
        self, request: SaveRequest, operation: _distributed.operation.Operation | None
    ) -> bool:
        """Returns True in all processes if a step exists, and is not lost."""
        step, tier = request.number, self._run.part_tier

        def look() -> bool:
            is_lost = tier is not None and step in tier.lost
            return not is_lost and step in self._run.known_paths()

        if _distributed.agreement.broadcast(operation, "there", look):
            return True
        if not request.is_part:
            return False
        assert tier is not None
        assert operation is not None
        return tier.is_whole(request.path, operation, "whole")

    def _complete_request(
        self,
        request: SaveRequest,
        counter: _util.progress.Counter,
        operation: _distributed.operation.Operation | None,
    ) -> SaveRequest:
        """Returns the request with the fields that depend on the steps that exist.

        Raises CheckpointExistsError if the step exists and may not be replaced.
        """
        step, path = request.number, request.path
        is_damaged = _steps.markers.is_damaged(path)
        if is_damaged and (operation is None or operation.is_first or request.is_part):
            _checkpoint.overwrite.set_aside(path)
        tier = self._run.part_tier
        is_asked = request.overwrite or is_damaged
        overwrite = is_asked or (tier is not None and step in tier.lost)
        if request.is_part and not _util.job.is_first():
            overwrite = True  # process 0 knows whether there is such a step
        elif overwrite:
            self._run.check_replaceable(step)
        else:
            self._run.check_free(step)
        replaces, make_room = overwrite, None
        if request.is_part:
            assert tier is not None
            is_asked, replaces = _distributed.agreement.broadcast(
                operation, "overwrite", lambda: [is_asked, overwrite]
            )
            if not is_asked:
                make_room = functools.partial(tier.make_room, path)

        earliest = 0.0
        if tier is not None:
            is_read = replaces and _util.job.is_first()
            there = self._run.known_paths().get(step) if is_read else None
            earliest = tier.earliest_time(step, there)

        def emit_started(**details: Any) -> None:
            self._run.events.emit(
                "started", step, path=path, overwrite=replaces, **details
            )

        return dataclasses.replace(
            request,
            metrics=run_metrics.as_metrics(request.metrics),
            on_exists="overwrite" if overwrite else "error",
            on_planned=emit_started,
            count=counter.add,
            operation=operation,
            make_room=make_room,
            markers=self._run.markers_of_new(step, overwrite=replaces),
            not_before=earliest,
            sampler=_arrays.sample.Sampler() if self.has_statistics else None,
        )

    def _try_undoing(self, state: PyTree) -> None:
        """Warns, once, of leaves that a restore by this run would not bring back."""
        if self._has_tried_undoing or not self._options.transforms:
            return
        self._has_tried_undoing = True
        if problem := _checkpoint.save.find_undo_problem(state, self._options):
            _log.warning("%s", problem)

    def _execute(
        self, snapshot: _checkpoint.commit.Snapshot, blocked: float
    ) -> SaveResult:
        """Writes a snapshot, and deletes steps that no policy keeps."""
        request = snapshot.request
        step, final = request.number, request.path
        self._run.ensure_staging()
        if request.operation is not None and self._run.part_tier is not None:
            self._run.part_tier.meet(request.operation)
        with self._run.upload_pause(final):
            written, self._last_arrays = _checkpoint.save.write_snapshot(
                snapshot, self._previous()
            )
        self._own_steps.add(step)
        if self._run.part_tier is not None:
            self._run.part_tier.forget(step)
        tier = self._run.tier(final)
        details: dict[str, Any] = {"tier": tier} if self._run.has_staging else {}
        if request.temporary:
            details["temporary"] = True
        self.settings.record()  # before the first deletion
        self._run.events.emit(
            "committed",
            step,
            path=final,
            bytes=written,
            blocked_secs=blocked,
            total_secs=request.elapsed(),
            metrics=request.metrics,
            **details,
        )
        self._record_statistics(snapshot)

        def is_awaited() -> bool:
            return self._handle is not None and self._handle.is_awaited()

        def delete_unkept() -> list[Sequence[int]]:
            deleted = self._run.delete_unkept(just_saved=step, is_awaited=is_awaited)
            return [deleted, [*self._run.retention.index.paths()]]  # and what is left

        # The step is committed: a slow deletion must not fail the other processes.
        deleted, left = _distributed.agreement.broadcast(
            request.operation, "deleted", delete_unkept, is_patient=True
        )
        if request.is_part and not _util.job.is_first():
            self._run.follow(deleted, left)
        self._warn_of_newer(step, left)
        self._warn_of_lost(step, left)
        self._last_own = None if step in deleted else step
        total = request.elapsed()
        _log.info(
            "saved step %d: %d bytes, durable after %.3f s, blocked %.3f s%s",
            step,
            written,
            total,
            blocked,
            f", deleted {list(deleted)}" if deleted else "",
        )
        if self._run.part_tier is not None:
            self._run.part_tier.copy(step, final, self._processes)
        self._run.upload()
        return SaveResult(
            step, str(final), written, blocked, total, tuple(deleted), tier=tier
        )

    def _warn_of_newer(self, step: int, left: Sequence[int]) -> None:
        """Warns, once, if the run has gone back: a resume would not find this save."""
        self._saved_since.add(step)
        newest = max(set(left) - self._saved_since, default=0)
        if self._begun is None or not self._begun < step < newest:
            return
        _log.warning(
            "step %d of %s is saved, which continues step %d; but a resume continues"
            " the newest, step %d: delete the steps after %d with"
            " checkpointer.delete(step), or save in another directory",
            step,
            self._run.directory,
            self._begun,
            newest,
            self._begun,
        )
        self._begun = None

    def _warn_of_lost(self, step: int, left: Sequence[int]) -> None:
        """Warns if the own step before this one is gone, and no one has deleted it."""
        run, last = self._run, self._last_own
        if last is None or last in left or not _util.job.is_first():
            return
        if last in run.known_paths() or last in run.damaged_paths():
            return
        if _steps.journal.describe_deletion(run.saves_in, last):
            return
        _log.warning(
            "step %d of this run is gone from %s, whose journal has no deletion of it:"
            " was the directory renamed, moved or removed? Step %d is saved there now,"
            " and a resume finds only the steps there: move the others back",
            last,
            run.saves_in,
            step,
        )

    def _record_statistics(self, snapshot: _checkpoint.commit.Snapshot) -> None:
        """Records the statistics of the leaves, if sampled; logs failures."""
        sampler, manifest = snapshot.request.sampler, snapshot.contents.manifest
        if sampler is None or not _util.job.is_first():
            return
        paths = {manifest.items.array_directory(i): i.path for i in manifest.infos}
        created = snapshot.contents.created
        step = sample_log.StepSamples(
            snapshot.request.number, created, sampler.result(paths)
        )
        try:
            sample_log.append(self._run.saves_in, step, self._run.mode)
        except OSError as error:
            _log.warning("the statistics of step %d are missing: %s", step.step, error)

    def _previous(self) -> _arrays.written.Previous | None:
        """Returns the arrays of the newest step, for hard links to unchanged files."""
        if not _storage.of(self._run.saves_in).can_rename:  # nor link
            return None
        try:
            # Only in `saves_in`: hard links cannot leave a file system.
            paths = self._run.retention.index.paths()
        except OSError:
            return None
        if not paths:
            return None
        newest = paths[max(paths)]
        last = self._last_arrays
        if last is not None and last.root == newest and last.is_current():
            return last
        return _arrays.written.Previous(newest, {})

    def _skip(self, request: SaveRequest) -> SaveHandle:
        step, final = request.number, request.path
        reason = f"step {step} exists"
        self._run.events.emit("skipped", step, path=final, reason=reason)
        _log.warning(
            "step %d is not saved: %s already has it", step, self._run.directory
        )
        elapsed = request.elapsed()
        path = self._run.known_paths().get(step, final)
        tier = self._run.tier(path)
        result = SaveResult(
            step, str(path), 0, elapsed, elapsed, skipped=reason, tier=tier
        )
        return SaveHandle(
            lambda: result,
            name=f"save of {final}",
            counter=_util.progress.Counter(reason),
            cancellation=request.cancellation,
            pace=request.pace,
        )

    @contextlib.contextmanager
    def _failure_event(self, step: int, final: Path) -> Iterator[None]:
        """Emits an event for a failure of the block, and raises the error."""
        try:
            yield
        except errors.SaveCancelledError:
            self._run.events.emit("cancelled", step, path=final)
            raise
        except BaseException as error:
            text = _steps.event.first_lines(error)
            self._run.events.emit("failed", step, path=final, error=text)
            raise

    def wait_for_copies(self, timeout_secs: float | None) -> None:
        """Waits for the copies at other processes; see `Checkpointer`."""
        tier = self._run.part_tier
        if tier is None or not tier.copies:
            return
        operation = self._processes.begin("wait for copies", "the wait for copies")
        with _distributed.agreement.closing_background(operation):
            left = tier.copier.wait(timeout_secs)
            if left:
                raise errors.CheckpointTimeoutError(
                    f"step {max(left)} of {self._run.directory} is still being copied"
                    f" to other processes after {timeout_secs} s; call"
                    " wait_for_copies() again to wait longer"
                )
            if (why := tier.copier.failure) is not None:
                raise errors.SaveFailedError(
                    "the newest step is whole, but lacks copies at other processes:"
                    f" {why}"
                )
            if operation is not None:
                operation.exchange("copied")

    # ---- beside the steps -------------------------------------------------------

    def rehearse(
        self,
        state: PyTree,
        dataset: Any,
        json: Mapping[str, JSON] = MappingProxyType({}),
    ) -> int:
        """Does the work of `save` before its return, without writing.

        Returns the stored size of all arrays, in bytes.
        """
        self.check_directory()
        request = self.request(0, dataset=dataset, json=json)
        path = self._run.saves_in / "rehearsal" / self._run.format.name(0)
        request = dataclasses.replace(request, path=path)
        size = _checkpoint.save.take_snapshot(request, state).stored_bytes
        self._try_undoing(state)
        return size

    def save_params_only(self, step: int, state: PyTree) -> Path | None:
        """Saves a state without its optimizer; see `Checkpointer.save_params_only`."""
        if not _checkpoint.save.has_optimizer(state):
            return None
        operation = self._processes.begin("params", f"the parameters of step {step}")
        with self._lock.get(), _distributed.agreement.closing(operation):
            self.wait()
            self.check_directory()
            path = self.params_only.path(step)
            request = self.request(step, on_exists="overwrite", operation=operation)
            options = dataclasses.replace(
                request.options,
                transforms=(
                    _checkpoint.save.without_optimizer,
                    *self._options.transforms,
                ),
                items=Items(),  # a branch of the optimizer is missing
                snapshot="host",  # the caller waits
            )
            request = dataclasses.replace(
                request, path=path, options=options, is_part=False
            )
            with _checkpoint.commit.store_errors(path):
                snapshot = _checkpoint.save.take_snapshot(request, state)
            request.pace.lift()  # the caller waits
            _checkpoint.save.write_snapshot(snapshot)
            if _util.job.is_first():
                self.params_only.keep_only(path)
        return path

    # ---- in progress --------------------------------------------------------------

    def wait(self) -> SaveResult | None:
        """Waits for the save in progress, and delivers events to the sinks."""
        try:
            return self.end()
        finally:
            self._run.events.deliver()

    def end(self) -> SaveResult | None:
        """Waits for the save, as `Checkpointer.wait`; not on the save's own thread."""
        if _util.threads.is_background():
            return None
        with self._lock.get():
            handle = self._handle
            if handle is None:
                return None
            has_raised = handle.done() and not handle.has_unreported_error()
            # Forget the save last: a wait may be interrupted and repeated.
            try:
                result = handle.wait()
            except Exception:
                self._handle = None
                if has_raised or handle.is_cancelled():
                    return None
                raise
            self._handle = None
            return result

    def finish(self) -> None:
        """Waits until the save in progress has ended; `end` raises its error."""
        handle = self._handle
        if handle is not None and not _util.threads.is_background():
            save_handle.join(handle)

    def is_under_way(self) -> bool:
        """Returns True if a save has begun and no caller has waited for the save."""
        return self._handle is not None

    def has_failed(self) -> bool:
        """Returns True if the last save failed and the error was not yet raised."""
        return self._handle is not None and self._handle.has_unreported_error()

    # ---- own steps ----------------------------------------------------------------

    def has_saved(self, step: int) -> bool:
        """Returns True if this object saved, restored or is about to save a step."""
        step = _steps.names.check(step)
        if self._handle is not None and self._handle_step == step:
            return not self._handle.has_failed()
        # Processes may see a new step at different times.
        is_there = _util.job.is_distributed() or step in self._run.known_paths()
        return step in self._own_steps and is_there

    def add_own(self, step: int) -> None:
        self._own_steps.add(step)
        self._begun, self._last_own, self._saved_since = step, step, set()
        if self._run.part_tier is not None:
            self._run.part_tier.forget(step)

    def forget_beyond(self, step: int) -> None:
        """Forgets own steps after `step`: the run continues from `step`."""
        self._own_steps = {s for s in self._own_steps if s <= step}
