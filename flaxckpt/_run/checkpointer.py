"""The checkpoints of one run: a directory of steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from flaxckpt import (
    _arrays,
    _checkpoint,
    _distributed,
    _steps,
    _storage,
    _util,
    errors,
    policies,
)
from flaxckpt._arrays.zarr.array_layout import ArrayLayout, checked_layout
from flaxckpt._checkpoint.handle import SaveHandle
from flaxckpt._checkpoint.result import SaveResult
from flaxckpt._checkpoint.verify_report import VerifyReport
from flaxckpt._run import (
    card,
    edit,
    restoring,
    retention,
    saving,
    watch,
)
from flaxckpt._run import metrics as run_metrics
from flaxckpt._run import staging as run_staging
from flaxckpt._run.events import sinks as events_sinks
from flaxckpt._run.session import Session
from flaxckpt._types import JSON, PathLike, PyTree
from flaxckpt.formats import _locate, _native
from flaxckpt.formats._reader import CheckpointMetadata, Lineage
from flaxckpt.policies import PreservationPolicy
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _base as _transforms

_log = logging.getLogger(__name__)


class Checkpointer:
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
        sinks: Who is told of events: functions of an `Event`, or loggers of clu, W&B,
            MLflow or TensorBoard. They are told on the thread that calls.
        peer_timeout_secs: Where several processes train, how long one waits in a save
            or a restore for others that are behind.
        read_once: Where several processes train, whether large arrays that several of
            them need are read in parts, and sent by the devices from one to another.
        staging: A directory on a fast disk of this machine. Steps are saved there, and
            uploaded to `directory` behind the training; what is only in one of them is
            found and restored all the same. For one process.
        keep_staging: Policies for the steps in `staging`; those that are not uploaded
            stay there, too.

    Attributes:
        directory: The directory of the run.
        keep: The policies that keep steps there.
        read_only: Whether it refuses to save or delete.
        events: What happens to the checkpoints. Unless `read_only`, it is also kept in
            `events.jsonl` in the directory.
        restored_step: The step that was restored last; None if none was.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        keep: Sequence[PreservationPolicy] = (),
        layout: ArrayLayout | None = None,
        max_concurrent_bytes: int = _arrays.write.DEFAULT_CONCURRENT_BYTES,
        transforms: Sequence[Transform] = (),
        step_format: str = "{step}",
        read_only: bool = False,
        metadata: Mapping[str, JSON] | None = None,
        sinks: Sequence[events_sinks.Sink] = (),
        keep_dataset: Sequence[PreservationPolicy] = (),
        metrics_from: Callable[[], run_metrics.MetricsByStep] | None = None,
        peer_timeout_secs: float = _distributed.operation.TIMEOUT_SECS,
        read_once: bool = False,
        staging: PathLike | None = None,
        keep_staging: Sequence[PreservationPolicy] = run_staging.KEEP,
    ) -> None:
        options = _checkpoint.request.SaveOptions(
            layout=checked_layout(layout),
            transforms=_transforms.checked(transforms),
            max_concurrent_bytes=max_concurrent_bytes,
        )
        rules = retention.Rules.of(keep, keep_dataset, metrics_from)
        self._run = run_staging.open_steps(
            directory,
            rules,
            step_format=step_format,
            read_only=read_only,
            staging=staging,
            keep_staging=keep_staging,
        )
        _util.arguments.positive("max_concurrent_bytes", max_concurrent_bytes)
        _util.arguments.positive("peer_timeout_secs", peer_timeout_secs)
        self.directory = self._run.directory
        self.events = self._run.events
        self.keep = rules.keep
        self.read_only = read_only
        self.restored_step: int | None = None
        self._options = options
        self._peer_timeout_secs = peer_timeout_secs
        self._read_once = read_once
        processes = _distributed.agreement.Processes(self.directory, peer_timeout_secs)
        self._saves = saving.Saves(self._run, options, processes)
        self._restores = restoring.Restores(
            self._run,
            options.transforms,
            processes,
            self._saves.end,
            read_only=read_only,
            max_concurrent_bytes=max_concurrent_bytes,
            read_once=read_once,
        )
        self._session = Session(
            self._run, self._saves, self._restores, processes, read_only=read_only
        )
        for sink in events_sinks.listed(sinks):
            self.events.subscribe(sink)
        self._prepare_directory(metadata)
        _distributed.operation.attend(self.directory)

    def _prepare_directory(self, metadata: Mapping[str, JSON] | None) -> None:
        """Makes the directory, tidies it, and writes the metadata of the run."""
        if not self.read_only:
            self._run.make_directory()
            if _util.processes.is_first():
                self._saves.tidy()
        if metadata is not None:
            self._session.check_writable("keep metadata")
            plain = _checkpoint.save.json_of(metadata)
            if _util.processes.is_first():
                edit.write_run_metadata(self._run.saves_in, plain)

    # ---- saving --------------------------------------------------------------

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
            temporary: Whether the step goes as soon as there is a newer one that is not
                temporary, or two newer ones. A policy such as `BestN` may keep it all
                the same.

        Returns:
            A handle; its `wait()` returns when the step is durable: in `staging`, if
            there is one, as `SaveResult.tier` says.

        Raises:
            CheckpointExistsError: The step is there, and `on_exists` is "error"; or it
                is not replaced, as files of others are in its directory.
            CheckpointError: Why this save cannot begin, or why the last one failed.
        """
        started = time.monotonic()
        self._session.check_writable("save")
        if on_exists not in ("error", "skip", "overwrite"):
            raise errors.OptionError(
                f"on_exists must be 'error', 'skip' or 'overwrite', got {on_exists!r}"
            )
        step = _steps.names.check(step)
        request = self._saves.request(
            step,
            metrics={} if metrics is None else metrics,
            dataset=dataset,
            metadata=metadata or {},
            on_exists=on_exists,
            temporary=temporary,
            started=started,
        )
        try:
            return self._saves.save(request, state)
        finally:
            self.events.deliver(step)

    def save_params_only(self, step: int, state: PyTree) -> Path | None:
        """Saves a state without its optimizer, beside the steps, and waits for it.

        For when there is no time for the whole. It is no step: nothing restores it by
        itself, and no policy counts it. It replaces the one before it.

        Returns:
            Where it is, for `load(path, …)` or `source=path`. None if the state has no
            optimizer, and nothing was saved.
        """
        number = _steps.names.check(step)
        self._session.check_writable("save")
        return self._saves.save_params_only(number, state)

    def wait(self) -> SaveResult | None:
        """Waits for the save under way.

        Returns:
            What it did; None if there is none, or it was waited for already.

        Raises:
            CheckpointError: It failed.
        """
        return self._saves.wait()

    def raise_if_failed(self) -> None:
        """Raises the error of a save that has failed, without waiting for one."""
        if self._saves.has_failed():
            self.wait()

    def wait_for_uploads(self, timeout_secs: float | None = None) -> None:
        """Waits until the directory has all that is to be uploaded from `staging`.

        What could not be uploaded before is tried once more. `close` does the same.

        Raises:
            CheckpointTimeoutError: It is still going on after `timeout_secs`.
            SaveFailedError: Something could not be uploaded, and is in `staging` still.
            CheckpointError: The save under way failed.
        """
        with self.events.delivery():
            self._saves.end()
            if not self.read_only:
                self._run.wait_for_uploads(timeout_secs)

    # ---- restoring -----------------------------------------------------------

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
                damaged. Never if `step` is given. What is proved to be damaged is then
                marked, unless `read_only`: see `damaged`.
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
        return self._restored(
            abstract_state,
            step=step,
            dataset=dataset,
            fallback=fallback,
            missing=missing,
            unused=unused,
            optimizer=optimizer,
            transforms=transforms,
            types=types,
            verify=verify,
            memory_map=memory_map,
        )

    def restore_latest(
        self, abstract_state: PyTree, *, dataset: Any = None
    ) -> tuple[PyTree, int]:
        """Restores the newest step that is not damaged, and says which it is.

        Raises:
            CheckpointError: As for `restore`.
        """
        state = self._restored(
            abstract_state, step=None, dataset=dataset, fallback=True
        )
        assert self.restored_step is not None
        self._saves.forget_beyond(self.restored_step)
        return state, self.restored_step

    def _restored(
        self,
        abstract_state: PyTree | None,
        *,
        step: int | None,
        dataset: Any,
        fallback: bool,
        **options: Unpack[restoring.RestoreKeywords],
    ) -> PyTree:
        with self.events.delivery():
            restored = self._restores.restore(
                abstract_state,
                step=step,
                dataset=dataset,
                fallback=fallback,
                **options,
            )
            self.lineage, self.restored_step = restored.lineage, restored.step
            self._saves.own(restored.step)
        return restored.state

    def restore_dataset(self, dataset: Any, *, step: int | None = None) -> None:
        """Puts an iterator where it stood at a step, by default the newest.

        Raises:
            CheckpointNotFoundError: There is no step, or not this one.
            DatasetStateError: None was saved, or the iterator does not take its state.
        """
        self.wait()
        number = self.latest_step() if step is None else step
        if number is None:
            raise errors.CheckpointNotFoundError(f"{self.directory} has no steps")
        path = self._run.path(number)
        _checkpoint.restore.restore_dataset(_locate.read_step(path, number), dataset)

    # ---- finding -------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps that are not marked as damaged, ascending."""
        return list(self._run.listed())

    def latest_step(self) -> int | None:
        """The newest of `steps()`; None if there is none."""
        return max(self._run.listed(), default=None)

    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """The step with the best finite `metric`, the newer of equals; None if none."""
        best = self._run.best(policies.BestN(1, metric, mode))
        return next(iter(best), None)

    def damaged(self) -> dict[int, str]:
        """Step -> reason, of those that are marked as damaged, ascending.

        `restore` marks a step when it had to take an older one in its place. No policy
        counts or deletes it. A later save of the same step replaces it, `delete`
        deletes it, and `restore(step=…)` tries it all the same.
        """
        return self._run.reasons()

    def verify(self, step: int) -> VerifyReport:
        """Reads all of a step, and compares it with its checksums.

        See `flaxckpt.verify`.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        step = _steps.names.check(step)
        self.wait()
        return _checkpoint.verify.verify_checkpoint(self._run.path(step), step)

    def metadata(self, step: int) -> CheckpointMetadata:
        """Describes a step without reading any array."""
        step = _steps.names.check(step)
        return _locate.read_stored(self._run.path(step), step).metadata

    def has_dataset(self, step: int) -> bool:
        """Whether the state of a dataset is there, by a look into the directory."""
        return (self._run.path(step) / _native.checkpoint.DATASET).is_dir()

    def metrics(self, step: int) -> Mapping[str, float]:
        """What was measured at a step and is stored with it."""
        return dict(self._run.metrics(self._run.path(step)))

    @property
    def run_metadata(self) -> Mapping[str, JSON]:
        """The metadata of the whole run."""
        for directory in (self._run.saves_in, self.directory):
            with _storage.permissions.explained(directory):
                if found := _native.checkpoint.read_run_metadata(directory):
                    return found
        return {}

    @property
    def lineage(self) -> tuple[Lineage, ...]:
        """The checkpoints that this run began from, the nearest first.

        Every step records it; restoring a step sets it to the lineage recorded there.
        """
        return self._saves.lineage

    @lineage.setter
    def lineage(self, origins: tuple[Lineage, ...]) -> None:
        self._saves.lineage = origins

    def reload(self) -> None:
        """Forgets what was read of steps, so that changes by others are seen."""
        self._run.forget()

    def new_steps(
        self, *, timeout_secs: float | None = None, poll_secs: float = 1.0
    ) -> Iterator[int]:
        """Yields every step, oldest first, and then each new one as it is committed.

        For a job that evaluates checkpoints while another one trains. Until the loop
        goes on, no policy of any process deletes the step: a file in it tells of the
        reader. Where nothing can be written, steps come unprotected, with a warning.

        Args:
            timeout_secs: Ends after so long without a new step; None never ends.
            poll_secs: How often the directory is looked at.
        """
        return watch.new_steps(
            self._run.listed,
            timeout_secs=timeout_secs,
            poll_secs=poll_secs,
        )

    # ---- keeping and deleting ------------------------------------------------

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to a committed step, as of an evaluation after its save.

        Raises:
            SaveFailedError: They could not be written.
        """
        self._session.check_writable("add metrics")
        self.wait()
        if _util.processes.is_first():
            with self._run.changing(step) as path:
                edit.add_metrics(path, metrics)

    def explain(self) -> dict[int, list[str]]:
        """Why each step stays, oldest first; a step without a reason would go.

        The reasons are those of `policies.decide`; "metrics damaged", of a step that
        may be the best for all that can be read; "dataset let go", which says that its
        dataset state did not stay with it; and "damaged: …", of a step that no policy
        counts, see `damaged`. With a staging directory, "staging: …" says why it stays
        there, and "staging: not uploaded" that it is still to be uploaded.
        """
        found = self._run.explain()
        found |= {step: [f"damaged: {why}"] for step, why in self.damaged().items()}
        return dict(sorted(found.items()))

    def prune(self, *, dry_run: bool = False) -> tuple[int, ...]:
        """Deletes the steps, and the dataset states, that no policy keeps.

        If there are any, the newest step is read first, all of it.

        Args:
            dry_run: Only say which steps: those to which `explain` gives no reason.

        Returns:
            The steps.

        Raises:
            SaveFailedError: The newest step is damaged or cannot be read, so that older
                ones stay.
        """
        self.wait()
        if dry_run:
            return tuple(step for step, why in self.explain().items() if not why)
        self._session.check_writable("prune")
        return self._run.prune()

    def delete(self, step: int) -> None:
        """Deletes a step, even a pinned one.

        Raises:
            SaveFailedError: It is being read, by a loop over `new_steps` anywhere; or
                it could not be deleted.
        """
        self._session.check_writable("delete")
        self.wait()
        if _util.processes.is_first():
            self._run.delete(step)

    def make_permanent(self, step: int) -> None:
        """Has a temporary step stay as long as the policies say.

        Raises:
            SaveFailedError: That could not be written down.
        """
        self._session.check_writable("keep a step")
        self._run.make_permanent(step)

    def pin(self, step: int) -> None:
        """Keeps a step, whatever the policies say.

        Raises:
            SaveFailedError: That could not be written down.
        """
        self._session.check_writable("pin")
        if _util.processes.is_first():
            with self._run.changing(step) as path:
                edit.pin(path)

    def unpin(self, step: int) -> None:
        """Leaves a step to the policies again; raises as `pin` does."""
        self._session.check_writable("unpin")
        if _util.processes.is_first():
            with self._run.changing(step, _steps.markers.PIN) as path:
                edit.unpin(path)

    # ---- the end -------------------------------------------------------------

    def close(self) -> None:
        """Waits for the save under way and raises its error, if it failed.

        With `staging`, then for the uploads, and raises theirs.
        """
        trainers, settle = self._session.trainers, self._session.settle
        with contextlib.ExitStack() as last:  # each is done, whatever the others raise
            last.callback(self._saves.end)  # whatever a sink has begun at the last
            last.callback(self.events.close)
            last.callback(settle)
            for trainer in trainers:
                last.callback(trainer.after_close)
            last.callback(self.wait_for_uploads)
            last.callback(self.wait)
            for trainer in trainers:
                last.callback(trainer.before_close)

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
            self._session.settle()
        except errors.CheckpointError as failure:
            _log.error("the save under way failed, too: %s", failure)
            error.add_note(f"The save under way failed, too: {failure}")
        for trainer in self._session.trainers:
            trainer.abandon(error)

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """A card for notebooks, of what is there now; no array is read."""
        return card.of_run(self, self._run.path)


def session_of(checkpointer: Checkpointer) -> Session:
    """Returns the parts of a checkpointer that only a training loop needs."""
    return checkpointer._session


def beside(checkpointer: Checkpointer, directory: PathLike) -> Checkpointer:
    """Returns a checkpointer of another directory, with the same options for arrays.

    It writes steps as `checkpointer` does, and keeps them all.
    """
    options = checkpointer._options
    return Checkpointer(
        directory,
        layout=options.layout,
        max_concurrent_bytes=options.max_concurrent_bytes,
        transforms=options.transforms,
        step_format=checkpointer._run.format.template,
        peer_timeout_secs=checkpointer._peer_timeout_secs,
        read_once=checkpointer._read_once,
    )
