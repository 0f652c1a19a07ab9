"""The checkpoints of one run: a directory of steps."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from flaxckpt import (
    _collector,
    _directory,
    _locate,
    _plan,
    _restore,
    _retention,
    _save,
    _steps,
    _storage,
    _write,
    errors,
    formats,
)
from flaxckpt._info import ArrayLayout, CheckpointMetadata, Lineage, SaveResult
from flaxckpt._save import SaveHandle
from flaxckpt._types import JSON, PathLike, PyTree
from flaxckpt.formats import _orbax
from flaxckpt.policies import PreservationPolicy
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _table as _transforms

_log = logging.getLogger(__name__)


class Checkpointer(_directory.RunDirectory):
    """Saves, finds, restores and retires the steps under one directory.

    One save is under way at a time. Steps are always listed from the directory
    itself, so that a restart, or another process, sees the same.

    ```python
    with Checkpointer("run", keep=[LatestN(3), BestN(1, "eval/loss", "min")]) as ckpt:
        ckpt.save(100, state, metrics={"eval/loss": 0.7})
    ```

    Args:
        directory: Made if it is missing, unless `read_only`.
        keep: Preservation policies; a step stays if any keeps it. The newest and
            pinned steps always stay, and without policies only temporary steps go.
        keep_dataset: Policies for the states of dataset iterators: of a step that stays
            and that none of them keeps, the state is deleted alone. Without any, states
            stay as long as their steps.
        metrics_from: Gives metrics that are measured elsewhere, step -> name -> number,
            whenever steps are ranked. Those stored with a step count first.
        layout: How arrays are cut and encoded.
        max_concurrent_bytes: Bytes on their way to or from storage at one time.
        transforms: What to change on the way to the checkpoint, at every save. A
            restore into a state undoes those that can be undone.
        step_format: Names of steps: `{step}`, `step_{step}`, `{step:08d}`.
        read_only: Refuses to save or delete.
        metadata: JSON of your own about the whole run, kept where Orbax keeps its
            root metadata. It replaces what is there.

    Attributes:
        lineage: What this run began from, the nearest first; recorded in every step.
            Restoring a step sets it to what is recorded there.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        keep: Sequence[PreservationPolicy] = (),
        layout: ArrayLayout | None = None,
        max_concurrent_bytes: int = _write.DEFAULT_CONCURRENT_BYTES,
        transforms: Sequence[Transform] = (),
        step_format: str = "{step}",
        read_only: bool = False,
        metadata: Mapping[str, JSON] | None = None,
        keep_dataset: Sequence[PreservationPolicy] = (),
        metrics_from: Callable[[], _retention.MetricsByStep] | None = None,
    ) -> None:
        super().__init__(
            directory,
            _retention.Rules(tuple(keep), tuple(keep_dataset), metrics_from),
            step_format=step_format,
            read_only=read_only,
        )
        self._layout = layout or ArrayLayout()
        self._transforms = _transforms.checked(transforms)
        self._max_concurrent_bytes = max_concurrent_bytes
        self._lock = threading.RLock()  # one save at a time, whichever thread asks
        self._pending: SaveHandle | None = None
        self._saved: _write.Previous | None = None  # by the last save of ours
        self.lineage: tuple[Lineage, ...] = ()
        self._before_close: list[Callable[[], None]] = []
        if max_concurrent_bytes <= 0:
            raise errors.OptionError(
                f"max_concurrent_bytes must be positive, got {max_concurrent_bytes}"
            )
        if not read_only:
            self._make_directory()
        if metadata is not None:
            self._check_writable("keep metadata")
            _save.check_json(metadata)
            _orbax.write_run_metadata(self.directory, metadata)

    # ---- saving -----------------------------------------------------------------

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        metrics: Mapping[str, float] | None = None,
        dataset: Any = None,
        metadata: Mapping[str, JSON] | None = None,
        on_exists: Literal["error", "skip", "overwrite"] = "error",
        temporary: bool = False,
    ) -> SaveHandle:
        """Saves `state` as `step`, and returns once it is safe from changes.

        Waits for the save before it, if that is still under way.

        Args:
            step: The number of completed training steps.
            state: A TrainState, NNX objects, or any pytree.
            metrics: Numbers by name; policies rank by them.
            dataset: An iterator whose position is saved in the same commit.
            metadata: JSON of your own about this step.
            on_exists: What to do if the step is there already. One that is replaced
                stays pinned if it was, and one that is skipped is temporary no more
                unless this save is.
            temporary: Whether the step goes as soon as there is a newer one. A policy
                such as `BestN` may keep it all the same.

        Returns:
            A handle; its `wait()` returns when the step is durable.

        Raises:
            CheckpointExistsError: The step is there, and `on_exists` is "error".
            CheckpointError: Why this save cannot begin, or why the last one failed.
        """
        start = time.monotonic()
        self._check_writable("save")
        if on_exists not in ("error", "skip", "overwrite"):
            raise errors.OptionError(
                f"on_exists must be 'error', 'skip' or 'overwrite', got {on_exists!r}"
            )
        number = _steps.check(step)
        with self._lock:
            self.wait()
            return self._begin(
                number, state, metrics, dataset, metadata, on_exists, temporary, start
            )

    def _begin(
        self,
        number: int,
        state: PyTree,
        metrics: Mapping[str, float] | None,
        dataset: Any,
        metadata: Mapping[str, JSON] | None,
        on_exists: Literal["error", "skip", "overwrite"],
        temporary: bool,
        start: float,
    ) -> SaveHandle:
        final = self.directory / self._format.name(number)
        if on_exists == "skip" and number in self._listed():
            if not temporary:
                self._retention.make_permanent(final)
            return self._skipped(number, final, start)
        snapshot = _save.take(
            final,
            state,
            _save.Options(
                number,
                self._layout,
                self._transforms,
                _retention.as_metrics(metrics),
                metadata or {},
                dataset,
                on_exists == "overwrite",
                self._max_concurrent_bytes,
                self.lineage,
                temporary,
            ),
        )
        blocked = time.monotonic() - start

        def work() -> SaveResult:
            written, self._saved = _save.execute(snapshot, self._previous())
            deleted = self._retention.apply(just_saved=number)
            total = time.monotonic() - start
            _log.info(
                "saved step %d: %d bytes, durable after %.3f s, blocked %.3f s%s",
                number,
                written,
                total,
                blocked,
                f", deleted {list(deleted)}" if deleted else "",
            )
            return SaveResult(number, str(final), written, blocked, total, deleted)

        self._pending = SaveHandle(work, name=f"save of {final}")
        return self._pending

    def _previous(self) -> _write.Previous | None:
        """The arrays of the newest step, which those of the next may equal."""
        try:
            listed = self._listed()
        except OSError:
            return None
        if not listed:
            return None
        newest = listed[max(listed)]
        saved = self._saved
        if saved is not None and saved.root.parent == newest and saved.is_current():
            return saved
        return _write.Previous(newest / _orbax.STATE, {})

    def _skipped(self, step: int, final: Path, start: float) -> SaveHandle:
        reason = f"step {step} exists"
        _log.warning("step %d is not saved: %s has one already", step, self.directory)
        elapsed = time.monotonic() - start
        result = SaveResult(step, str(final), 0, elapsed, elapsed, skipped=reason)
        return SaveHandle(lambda: result, name=f"save of {final}")

    def wait(self) -> SaveResult | None:
        """Waits for the save under way.

        Returns:
            What it did; None if there is none, or it was waited for already.

        Raises:
            CheckpointError: It failed.
        """
        with self._lock:
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

    def raise_if_failed(self) -> None:
        """Raises the error of a save that has failed, without waiting for one."""
        if self._pending is not None and self._pending.has_untold_error():
            self.wait()

    # ---- restoring --------------------------------------------------------------

    def restore(
        self,
        abstract_state: PyTree | None = None,
        *,
        step: int | None = None,
        dataset: Any = None,
        fallback: bool = True,
        transforms: Sequence[Transform] = (),
        missing: Literal["error", "init"] = "error",
        unused: Literal["warn", "error", "ignore"] = "warn",
        optimizer: Literal["match", "exact", "reinit"] = "match",
        types: Sequence[type] = (),
        verify: bool = True,
        memory_map: Literal["auto"] | bool = "auto",
    ) -> PyTree:
        """Restores a step, by default the newest.

        Args:
            abstract_state: What to restore; see `flaxckpt.load`.
            step: Exactly this step.
            dataset: An iterator to put where the saved one stood.
            fallback: Whether an older step is taken, with a warning, if the newest is
                damaged. Never if `step` is given.
            transforms: As in `flaxckpt.load`, like those that follow.
            missing: See there.
            unused: See there.
            optimizer: See there.
            types: See there.
            verify: See there.
            memory_map: See there.

        Returns:
            A state like `abstract_state`, every leaf filled.

        Raises:
            CheckpointNotFoundError: There is no step, or not this one.
            CheckpointError: As `flaxckpt.load` says.
        """
        state, _ = self._restore(
            abstract_state,
            step,
            dataset,
            fallback,
            self._options(
                missing=missing,
                unused=unused,
                optimizer=optimizer,
                transforms=transforms,
                types=types,
                verify=verify,
                memory_map=memory_map,
            ),
        )
        return state

    def restore_latest(
        self, abstract_state: PyTree, *, dataset: Any = None
    ) -> tuple[PyTree, int]:
        """Restores the newest step that is not damaged, and says which it is.

        Raises:
            CheckpointError: As for `restore`.
        """
        return self._restore(abstract_state, None, dataset, True, self._options())

    def load_source(
        self,
        source: PathLike,
        abstract_state: PyTree,
        *,
        step: int | None = None,
        transforms: Sequence[Transform] = (),
        missing: Literal["error", "init"] = "error",
        unused: Literal["warn", "error", "ignore"] = "warn",
        optimizer: Literal["match", "exact", "reinit"] = "reinit",
    ) -> tuple[PyTree, int]:
        """Loads another checkpoint for this run to begin from.

        What it began from is recorded in every step that is saved from here on.

        Args:
            source: A checkpoint in any format, or a run directory.
            abstract_state: What to load; see `flaxckpt.load`.
            step: Which step of a run directory; by default the newest.
            transforms: What to change in it first.
            missing: See `flaxckpt.load`.
            unused: See there.
            optimizer: See there. With `reinit`, the step counter beside the optimizer
                keeps its value in `abstract_state`, too.

        Returns:
            The state, and the step that its counters say: 0 with `reinit`, or if it has
            none.

        Raises:
            OptionError: Its counters disagree.
            CheckpointError: As for `flaxckpt.load`.
        """
        options = self._options(
            missing=missing,
            unused=unused,
            optimizer=optimizer,
            transforms=transforms,
            keeps_steps=optimizer == "reinit",
        )
        path = _storage.resolve(source)
        state, self.lineage = _restore.load_source(path, step, abstract_state, options)
        return state, 0 if options.keeps_steps else _restore.step_of(state)

    def _options(self, **given: Any) -> _plan.Options:
        return _plan.Options(max_concurrent_bytes=self._max_concurrent_bytes, **given)

    @_collector.paused()
    def _restore(
        self,
        abstract_state: PyTree | None,
        step: int | None,
        dataset: Any,
        fallback: bool,
        options: _plan.Options,
    ) -> tuple[PyTree, int]:
        """Restores a step, and says which."""
        self.wait()
        if step is None:
            candidates = sorted(self._listed().items(), reverse=True)
        else:
            candidates = [(step, self._path(step))]
        if not candidates:
            raise errors.CheckpointNotFoundError(
                f"{self.directory} has no steps called like {self._format.template!r}:"
                " save one first, or see that directory and step_format are right"
            )
        damage: errors.DamagedCheckpointError | None = None
        for number, path in candidates:
            try:
                if not formats.recognises(path):
                    raise errors.DamagedCheckpointError(
                        f"{path} is called like a step, but holds no checkpoint"
                    )
                stored = _locate.read_stored(path, number, options.types)
                undone = self._undone(stored.metadata, abstract_state, options)
                state = _restore.restore(stored, abstract_state, undone)
                if dataset is not None:
                    _restore.restore_dataset(stored, dataset)
                self.lineage = stored.metadata.lineage
            except errors.DamagedCheckpointError as error:
                if not fallback:
                    raise
                damage = damage or error
                _log.warning("step %d is damaged and left out: %s", number, error)
            else:
                return state, number
        assert damage is not None
        raise damage

    def _undone(
        self,
        metadata: CheckpointMetadata,
        abstract_state: PyTree | None,
        options: _plan.Options,
    ) -> _plan.Options:
        """The options to restore a state from what was made of it at the save."""
        if abstract_state is None or not self._transforms:
            return options
        if metadata.transforms != _transforms.describe(self._transforms):
            return options
        undoing = _transforms.undoing(self._transforms)
        return dataclasses.replace(options, transforms=(*undoing, *options.transforms))

    # ---- lifetime ---------------------------------------------------------------

    def before_close(self, action: Callable[[], None]) -> None:
        """Has `close` call `action` first; a trainer's last save."""
        self._before_close.append(action)

    def close(self) -> None:
        """Waits for the save under way and raises its error, if it failed."""
        actions, self._before_close = self._before_close, []
        try:
            for action in actions:
                action()
        finally:
            self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # What the failing block leaves behind is not saved, but what was begun is.
        try:
            self.wait()
        except errors.CheckpointError as failure:
            _log.error("the save under way failed, too: %s", failure)
