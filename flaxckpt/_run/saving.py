"""The saves of a run, one under way at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flaxckpt import _arrays, _checkpoint, _distributed, _steps, _storage, _util
from flaxckpt._checkpoint.handle import SaveHandle
from flaxckpt._checkpoint.result import SaveResult
from flaxckpt._run import metrics as run_metrics
from flaxckpt._run import params_only, run_steps
from flaxckpt._types import JSON, PyTree
from flaxckpt.formats import _native
from flaxckpt.formats._reader import Lineage

_log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """A save that is asked for; see `Checkpointer.save`.

    Attributes:
        step: Its number.
        state: What to save.
        metrics: Numbers by name.
        dataset: An iterator.
        metadata: JSON of the user.
        on_exists: What to do if the step is there.
        temporary: Whether it goes as soon as there is a newer one.
        start: When it was asked for, in monotonic seconds.
    """

    step: int
    state: PyTree
    metrics: Mapping[str, float] | None
    dataset: Any
    metadata: Mapping[str, JSON] | None
    on_exists: Literal["error", "skip", "overwrite"]
    temporary: bool
    start: float


class Saves:
    """Saves steps of a run, and knows which are its own.

    Args:
        run: The steps that are there.
        options: What all saves have in common.
        processes: Who saves together.

    Attributes:
        lineage: What the run began from.
        aside: What was saved beside the steps.
    """

    def __init__(
        self,
        run: run_steps.RunSteps,
        options: _checkpoint.commit.Options,
        processes: _distributed.agreement.Processes,
    ) -> None:
        self.lineage: tuple[Lineage, ...] = ()
        self._run = run
        self._shared = options
        self._processes = processes
        self.aside = params_only.Aside(run.directory, run.format)
        # One save at a time, whichever thread asks.
        self._lock = _util.forks.PerProcess(threading.RLock)
        self._pending: SaveHandle | None = None
        self._pending_step: int | None = None
        self._saved: _arrays.write.Previous | None = None  # by the last save of ours
        self._own: set[int] = set()
        self._has_undone = False  # its transforms, on trial

    def save(self, asked: Asked) -> SaveHandle:
        """Begins a save when the one before it has ended."""
        with self._lock.get():
            together = self._processes.begin("save", f"step {asked.step}")
            with _distributed.agreement.telling(together):
                self.end()
                return self._begin(asked, together)

    def _begin(
        self, asked: Asked, together: _distributed.operation.Operation | None
    ) -> SaveHandle:
        final = self._run.saves_in / self._run.format.name(asked.step)
        with _checkpoint.commit.beginning(final):
            return self._begun(asked, final, together)

    def _begun(
        self,
        asked: Asked,
        final: Path,
        together: _distributed.operation.Operation | None,
    ) -> SaveHandle:
        if asked.on_exists == "skip" and _distributed.agreement.first_says(
            together, "there", lambda: asked.step in self._run.seen()
        ):
            if together is not None:
                together.close()
            if not asked.temporary:
                self._run.make_permanent(asked.step)
            return self._skipped(asked, final)
        counter = _util.progress.Counter(f"saving step {asked.step}")
        with self._failing(asked.step, final):
            snapshot = self._snapshot(asked, final, counter, together)
        counter.total = snapshot.nbytes
        blocked = time.monotonic() - asked.start
        self._run.events.emit("snapshot", asked.step, path=final, blocked_secs=blocked)

        @self._failing(asked.step, final)
        @_distributed.agreement.ending(together)
        def work() -> SaveResult:
            return self._execute(asked, snapshot, blocked)

        self._pending = SaveHandle(work, name=f"save of {final}", counter=counter)
        self._pending_step = asked.step
        return self._pending

    def _snapshot(
        self,
        asked: Asked,
        final: Path,
        counter: _util.progress.Counter,
        together: _distributed.operation.Operation | None,
    ) -> _checkpoint.commit.Snapshot:
        if not self._own:
            self._run.check_no_checkpoint()
        is_damaged = _steps.markers.is_damaged(final)
        if is_damaged and (together is None or together.is_first):
            _checkpoint.overwrite.set_aside(final)
        overwrite = asked.on_exists == "overwrite" or is_damaged
        if overwrite:
            self._run.check_replaceable(asked.step)
        else:
            self._run.check_free(asked.step)

        def planned(**found: Any) -> None:
            self._run.events.emit(
                "started", asked.step, path=final, overwrite=overwrite, **found
            )

        options = self._options(
            asked.step,
            metrics=run_metrics.as_metrics(asked.metrics),
            metadata=asked.metadata or {},
            dataset=asked.dataset,
            overwrite=overwrite,
            planned=planned,
            temporary=asked.temporary,
            count=counter.add,
            together=together,
            marks=self._run.marks_of_new(overwrite=overwrite),
        )
        snapshot = _checkpoint.save.take(final, asked.state, options)
        self._try_undoing(asked.state)
        return snapshot

    def _try_undoing(self, state: PyTree) -> None:
        """Warns, once, of leaves that the run's own restores would not bring back."""
        if self._has_undone or not self._shared.transforms:
            return
        self._has_undone = True
        if problem := _checkpoint.save.trouble_undoing(state, self._shared.transforms):
            _log.warning("%s", problem)

    def _options(self, step: int, **given: Any) -> _checkpoint.commit.Options:
        return dataclasses.replace(
            self._shared, step=step, lineage=self.lineage, **given
        )

    def _execute(
        self, asked: Asked, snapshot: _checkpoint.commit.Snapshot, blocked: float
    ) -> SaveResult:
        """Writes a snapshot, and deletes what is not kept any more."""
        step, final, options = asked.step, snapshot.final, snapshot.options
        with self._run.replacing(final):
            written, self._saved = _checkpoint.save.execute(snapshot, self._previous())
        self._own.add(step)
        tier = self._run.tier(final)
        said = {} if self._run.tiers is None else {"tier": tier}
        self._run.events.emit(
            "committed",
            step,
            path=final,
            bytes=written,
            blocked_secs=blocked,
            total_secs=time.monotonic() - asked.start,
            metrics=len(options.metrics),
            **said,
        )
        deleted = tuple(
            _distributed.agreement.first_says(
                options.together, "deleted", lambda: self._retired(step)
            )
        )
        total = time.monotonic() - asked.start
        _log.info(
            "saved step %d: %d bytes, durable after %.3f s, blocked %.3f s%s",
            step,
            written,
            total,
            blocked,
            f", deleted {list(deleted)}" if deleted else "",
        )
        self._run.upload()
        return SaveResult(step, str(final), written, blocked, total, deleted, tier=tier)

    def _previous(self) -> _arrays.write.Previous | None:
        """The arrays of the newest step, which those of the next may equal."""
        if not _storage.of(self._run.saves_in).has_hard_links:
            return None
        try:
            # In staging, too: links lead nowhere else.
            listed = self._run.retention.steps.listed()
        except OSError:
            return None
        if not listed:
            return None
        newest = listed[max(listed)]
        saved = self._saved
        if saved is not None and saved.root.parent == newest and saved.is_current():
            return saved
        return _arrays.write.Previous(newest / _native.checkpoint.STATE, {})

    def _retired(self, just_saved: int) -> tuple[int, ...]:
        return self._run.retire(just_saved=just_saved, is_awaited=self._is_awaited)

    def _is_awaited(self) -> bool:
        """Whether somebody waits for the save under way."""
        return self._pending is not None and self._pending.is_awaited()

    def _skipped(self, asked: Asked, final: Path) -> SaveHandle:
        step, reason = asked.step, f"step {asked.step} exists"
        self._run.events.emit("skipped", step, path=final, reason=reason)
        directory = self._run.directory
        _log.warning("step %d is not saved: %s has one already", step, directory)
        elapsed = time.monotonic() - asked.start
        path = self._run.seen().get(step, final)
        tier = self._run.tier(path)
        result = SaveResult(
            step, str(path), 0, elapsed, elapsed, skipped=reason, tier=tier
        )
        counter = _util.progress.Counter(reason)
        return SaveHandle(lambda: result, name=f"save of {final}", counter=counter)

    @contextlib.contextmanager
    def _failing(self, step: int, final: Path) -> Iterator[None]:
        """Tells what fails within."""
        try:
            yield
        except BaseException as error:
            text = _steps.event.first_lines(error)
            self._run.events.emit("failed", step, path=final, error=text)
            raise

    # ---- beside the steps -------------------------------------------------------

    def rehearse(self, state: PyTree, dataset: Any) -> int:
        """Does what a save does at first, and returns how many bytes it would store."""
        path = self._run.saves_in / "rehearsal" / self._run.format.name(0)
        options = self._options(0, dataset=dataset)
        size = _checkpoint.save.take(path, state, options).stored_bytes
        self._try_undoing(state)
        return size

    def save_params_only(self, step: int, state: PyTree) -> Path | None:
        """See `Checkpointer.save_params_only`."""
        if not _checkpoint.save.has_optimizer(state):
            return None
        what = f"the parameters of step {step}"
        together = self._processes.begin("params", what)
        with self._lock.get(), _distributed.agreement.ending(together):
            self.wait()
            path = self.aside.path(step)
            options = self._options(step, overwrite=True, together=together)
            options = dataclasses.replace(
                options,
                transforms=(_checkpoint.save.without_optimizer, *options.transforms),
            )
            with _checkpoint.commit.beginning(path):
                snapshot = _checkpoint.save.take(path, state, options)
            _checkpoint.save.execute(snapshot)
            if _util.processes.is_first():
                self.aside.keep_only(path)
        return path

    # ---- under way --------------------------------------------------------------

    def wait(self) -> SaveResult | None:
        """Waits for the save under way, and tells the sinks what has happened."""
        try:
            return self.end()
        finally:
            self._run.events.deliver()

    def end(self) -> SaveResult | None:
        """Waits for the save under way.

        Returns:
            What it did; None if there is none, or it was waited for already.

        Raises:
            CheckpointError: It failed.
        """
        with self._lock.get():
            pending = self._pending
            if pending is None:
                return None
            is_told = pending.done() and not pending.has_untold_error()
            # Forgotten at the end: an interrupted wait can be taken up again.
            try:
                result = pending.wait()
            except Exception:
                self._pending = None
                if is_told:
                    return None
                raise
            self._pending = None
            return result

    def is_under_way(self) -> bool:
        """Whether a save has begun that nobody has waited for."""
        return self._pending is not None

    def has_failed(self) -> bool:
        """Whether the last save has failed, and nobody knows."""
        return self._pending is not None and self._pending.has_untold_error()

    # ---- its own ----------------------------------------------------------------

    def has_saved(self, step: int) -> bool:
        """Whether this object has saved or restored a step, or is about to have."""
        pending = self._pending
        if pending is not None and self._pending_step == step:
            return not pending.has_untold_error()
        # Of several processes, some may see it later than others.
        is_there = _util.processes.is_together() or step in self._run.seen()
        return step in self._own and is_there

    def own(self, step: int) -> None:
        """Counts a step as its own, as it was restored."""
        self._own.add(step)

    def forget_beyond(self, step: int) -> None:
        """What was saved beyond belongs to a run that is not gone on with."""
        self._own = {own for own in self._own if own <= step}
