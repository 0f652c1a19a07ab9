"""The checkpoints of a run: a directory of steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Unpack

from flaxckpt import (
    _arrays,
    _checkpoint,
    _distributed,
    _formats,
    _steps,
    _storage,
    _util,
    errors,
    policies,
)
from flaxckpt._checkpoint.planner import RestoreOptions, StepOptions
from flaxckpt._checkpoint.save_handle import SaveHandle, SaveResult
from flaxckpt._checkpoint.verify_report import VerifyReport
from flaxckpt._formats import locate
from flaxckpt._formats.reader import CheckpointMetadata, Lineage
from flaxckpt._run import card, damage, edit, judge, restoring, run_steps, saving, watch
from flaxckpt._run import events as run_events
from flaxckpt._run import metrics as run_metrics
from flaxckpt._run.session import Session
from flaxckpt._run.tiers import part_tier
from flaxckpt._run.tiers import staging as run_staging
from flaxckpt._types import JSON, Closing, PathLike, PyTree
from flaxckpt._zarr.array_layout import ArrayLayout, check_layout
from flaxckpt.policies import PreservationPolicy
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)


@_util.guessed_names.explain
class Checkpointer(Closing):
    """Saves, finds, restores and deletes the steps in a run directory.

    At most one save is in progress. Steps are always listed from the directory itself,
    so a restart or another process sees the same steps. All methods about steps wait
    for a save in progress; if it fails, `save`, `wait`, `close` and the methods that
    change steps raise its error. Functions called by the save itself, such as
    policies, see the steps before it.

    ```python
    with Checkpointer("run", keep=[LatestN(3), BestN(1, "eval/loss", "min")]) as ckpt:
        ckpt.save(100, state, metrics={"eval/loss": 0.7})
    ```

    Args:
        directory: The run directory. Made if missing, unless `read_only`.
        keep: Preservation policies; a step stays if any policy keeps it. The newest
            step and pinned steps always stay. Without policies, only temporary steps
            are deleted.
        keep_dataset: Policies for the states of dataset iterators. A step that stays
            loses its dataset state if none of these policies keeps the step. Without
            policies, dataset states stay as long as their steps.
        keep_items: Item -> policies for the item, as `keep_dataset` for the dataset:
            `{"opt_state": [LatestN(2)]}` keeps the optimizer of the two newest steps.
        metrics_from: Returns metrics measured elsewhere, step -> name -> number; called
            whenever steps are ranked. Metrics stored with a step take precedence.
        items: The name of the item with the state, a directory in each step. Or several
            names: the top-level branches of the state, each saved as an item of its own
            that Orbax restores by name.
        dataset_item: The name of the item with the state of the dataset iterator.
        layout: Chunks and encoding of arrays.
        max_concurrent_bytes: Bytes in transfer to or from storage at a time.
        snapshot: Where a save copies arrays on accelerators before the loop goes on, to
            be written from there: "host", pinned memory if there is any; "device",
            faster, but the state is in the device's memory twice until it is written;
            "auto", the device if a training step still has enough memory.
        transforms: Transforms of the state at every save. A restore into a state undoes
            the invertible transforms.
        step_format: Names of steps: `{step}`, `step_{step}`, `{step:08d}`.
        read_only: True to forbid saves and deletions.
        metadata: Your own JSON about the whole run, stored as Orbax's root metadata.
            Replaces existing metadata.
        sinks: Receivers of events: functions of an `Event`, or loggers of clu, W&B,
            MLflow or TensorBoard. Sinks are called on the thread of the caller.
        peer_timeout_secs: With several processes, seconds to wait for late processes
            in a save or a restore.
        read_once: With several processes, True to read large arrays that several
            processes need in parts, and exchange the parts between devices.
        staging: A directory on a fast disk of this machine. Steps are saved there, and
            uploaded to `directory` in the background. Steps in either directory are
            found and restored. With several processes, each has a directory of its
            own with its part of each step, such as `"/local/run-{process}"`, or a
            function of the process index: a restore reads what a process lacks from
            the other processes.
        keep_staging: Policies for the steps in `staging`; steps with pending uploads
            stay as well.
        staging_copies: With several processes, the number of other processes that get a
            copy of each part, in the background.
        failure_domain: Returns the name of what fails together with a process, given
            its index, by default its host: copies are in other domains.
        peer_network: The network on which processes exchange parts, such as
            `10.1.0.0/16`; by default the one by which process 0 is reached.
        peer_certificate: A PEM file with a certificate and its private key, the same at
            all processes, to exchange parts by TLS; by default without.
        permissions: Mode of all directories that are made, such as 0o750, whatever the
            umask; files have the same without the bits to execute, 0o640. By default
            as the umask says.

    Attributes:
        directory: The run directory.
        keep: The policies for the steps in the run directory.
        read_only: True if saves and deletions are forbidden.
        events: The events of the run. Unless `read_only`, events are also written to
            `events.jsonl` in the directory.
        restored_step: The last restored step; None before the first restore.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        keep: Sequence[PreservationPolicy] = (),
        layout: ArrayLayout | None = None,
        max_concurrent_bytes: int = _arrays.write.DEFAULT_CONCURRENT_BYTES,
        snapshot: Literal["host", "device", "auto"] = "host",
        transforms: Sequence[Transform] = (),
        step_format: str = "{step}",
        read_only: bool = False,
        metadata: Mapping[str, JSON] | None = None,
        sinks: Sequence[run_events.Sink] = (),
        keep_dataset: Sequence[PreservationPolicy] = (),
        keep_items: Mapping[str, Sequence[PreservationPolicy]] = MappingProxyType({}),
        items: str | Sequence[str] = _formats.items.STATE,
        dataset_item: str = _formats.items.DATASET,
        metrics_from: Callable[[], run_metrics.MetricsByStep] | None = None,
        peer_timeout_secs: float = _distributed.operation.TIMEOUT_SECS,
        read_once: bool = False,
        staging: run_staging.Staging | None = None,
        keep_staging: Sequence[PreservationPolicy] = run_staging.KEEP,
        staging_copies: int = 0,
        failure_domain: Callable[[int], str] | None = None,
        peer_network: str | None = None,
        peer_certificate: PathLike | None = None,
        permissions: int | None = None,
    ) -> None:
        path = _storage.paths.resolve(directory)
        options = _checkpoint.commit.SaveOptions(
            layout=check_layout(layout),
            transforms=transforms,
            max_concurrent_bytes=max_concurrent_bytes,
            snapshot=_util.arguments.check_choice(
                "snapshot", snapshot, _arrays.to_host.SNAPSHOTS
            ),
            items=_formats.native_names.make_items(items, dataset_item),
            mode=_storage.modes.check(permissions, path),
        )
        rules = judge.Rules.of(
            keep, keep_dataset, keep_items, metrics_from, options.items
        )
        _util.arguments.check_positive("max_concurrent_bytes", max_concurrent_bytes)
        _util.arguments.check_positive("peer_timeout_secs", peer_timeout_secs)
        processes = _distributed.agreement.Processes(path, peer_timeout_secs)
        peers = part_tier.PeerOptions(
            staging_copies, failure_domain, peer_network, peer_certificate
        )
        with _distributed.operation.opening(path):
            self._run = run_staging.open_steps(
                path,
                rules,
                step_format=step_format,
                read_only=read_only,
                staging=staging,
                keep_staging=keep_staging,
                peers=peers.check(),
                processes=processes,
                mode=options.mode,
            )
        _check_layout_of_parts(self._run, options.layout)
        self.directory = self._run.directory
        self.events = self._run.events
        self.keep = rules.keep
        self.read_only = read_only
        self.restored_step: int | None = None
        self._options = options
        self._peer_timeout_secs = peer_timeout_secs
        self._read_once = read_once
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
            self._run, self._saves, self._restores, processes, read_only
        )
        for sink in run_events.list_sinks(sinks):
            self.events.subscribe(sink)
        with _distributed.operation.opening(path):
            self._prepare_directory(metadata)
        _distributed.operation.note_opened(path)

    def _prepare_directory(self, metadata: Mapping[str, JSON] | None) -> None:
        """Makes the directory, removes leftovers, and writes the run metadata."""
        if not self.read_only:
            self._run.make_directory()
            if self._run.changes_steps:
                if self._run.has_pending_uploads():
                    self._saves.settings.record()  # after those in the old journal
                self._run.tidy()
        if metadata is not None:
            self._session.check_writable("write metadata")
            self._saves.check_directory()
            plain = _checkpoint.save.copy_json(metadata)
            if _util.job.is_first():
                edit.write_run_metadata(self._run.saves_in, plain, self._run.mode)

    # ---- saving --------------------------------------------------------------

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        metrics: Mapping[str, float] | None = None,
        dataset: Any = None,
        metadata: Mapping[str, JSON] | None = None,
        json: Mapping[str, JSON] | None = None,
        on_exists: Literal["error", "skip", "overwrite"] | None = None,
        overwrite: bool | None = None,
        temporary: bool = False,
    ) -> SaveHandle:
        """Saves `state` as `step`; returns when a snapshot of the state is taken.

        Waits for the previous save if still in progress. The caller may change or
        donate the state after the return.

        Args:
            step: The number of completed training steps.
            state: A TrainState, NNX objects, or any pytree.
            metrics: Name -> number; policies rank steps by metrics.
            dataset: An iterator; its position is saved in the same commit.
            metadata: Your own JSON about this step.
            json: Item -> JSON to save as an item of its own; see `metadata(step).json`.
            on_exists: Action for an existing step, by default "error". An overwritten
                step keeps its pin. A skipped step becomes permanent unless `temporary`.
            overwrite: True is `on_exists="overwrite"`.
            temporary: True to delete the step after the next permanent step, or after
                two newer steps. A policy such as `BestN` may still keep the step.

        Returns:
            A handle; `wait()` returns when the step is durable, in `staging` if set.

        Raises:
            CheckpointExistsError: The step exists and `on_exists` is "error", or its
                directory has files of others.
            CheckpointError: This save cannot begin, or the previous save failed.
        """
        started = time.monotonic()
        self._session.check_writable("save")
        step = _steps.names.check(step)
        request = self._saves.request(
            step,
            metrics={} if metrics is None else metrics,
            dataset=dataset,
            metadata=metadata or {},
            json=json or {},
            on_exists=_choose_action(on_exists, overwrite),
            temporary=temporary,
            started=started,
        )
        try:
            return self._saves.save(request, state)
        finally:
            self.events.deliver(step)

    def save_params_only(self, step: int, state: PyTree) -> Path | None:
        """Saves a state without its optimizer, beside the steps, and waits.

        For short notice, with no time to save the whole state. The result is not a
        step: `restore` and policies ignore it. Replaces the previous such save.
        Returns the path, for `load(path, …)` or `source=path`; None, without a save,
        if the state has no optimizer.
        """
        number = _steps.names.check(step)
        self._session.check_writable("save")
        return self._saves.save_params_only(number, state)

    def wait(self) -> SaveResult | None:
        """Waits for the save in progress, and returns its result.

        Returns None without a save, if cancelled, or if already returned.

        Raises:
            CheckpointError: The save failed.
        """
        return self._saves.wait()

    def raise_if_failed(self) -> None:
        """Raises the error of a failed save, without waiting."""
        if self._saves.has_failed():
            self.wait()

    def wait_for_uploads(self, timeout_secs: float | None = None) -> None:
        """Waits until no uploads from `staging` are pending.

        Retries failed uploads once. `close` does the same.

        Raises:
            CheckpointTimeoutError: Uploads are still pending after `timeout_secs`.
            SaveFailedError: An upload failed; the step stays in `staging`.
            CheckpointError: The save in progress failed.
        """
        with self.events.delivery():
            self._saves.end()
            if not self.read_only:
                self._run.wait_for_uploads(timeout_secs)

    def wait_for_copies(self, timeout_secs: float | None = None) -> None:
        """Waits until the newest step has its `staging_copies` at other processes.

        After a restore, waits until the restored step has. All processes call it.
        `close` does the same.

        Raises:
            CheckpointTimeoutError: Copies are still being made after `timeout_secs`.
            SaveFailedError: A copy failed; the step is whole without it.
            CheckpointError: The save in progress failed.
        """
        with self.events.delivery():
            self._saves.end()
            if not self.read_only:
                self._saves.wait_for_copies(timeout_secs)

    # ---- restoring -----------------------------------------------------------

    @_util.guessed_names.spell_out(StepOptions, RestoreOptions)
    def restore(
        self,
        abstract_state: PyTree | None = None,
        *,
        step: int | None = None,
        dataset: Any = None,
        fallback: bool = True,
        unused: Literal["warn", "error", "ignore"] | None = None,
        **options: Unpack[StepOptions],
    ) -> PyTree:
        """Restores a step, by default the newest.

        The options without a description here are those of `flaxckpt.load`.

        Args:
            abstract_state: The state to restore; see `flaxckpt.load`.
            step: Exactly this step; None for the newest step.
            dataset: An iterator to move to the saved position.
            fallback: True to restore an older step, with a warning, if the newest is
                damaged and `step` is None. Steps that are proved to be damaged are
                marked then, unless `read_only`: see `damaged`.
            unused: Treatment of leaves that only the step has. By default, those in an
                empty place of the state (None, `{}`, `()`, `[]`) come back in the
                classes that the step records, and others cause a warning, as in
                `flaxckpt.load`; `warn` and `ignore` leave out all, and `error` raises
                an error.

        Returns:
            A state like `abstract_state`, with values for all leaves.

        Raises:
            CheckpointNotFoundError: The run has no steps, or not this step.
            CheckpointError: See `flaxckpt.load`.
        """
        wanted = RestoreOptions(**options, unused=unused, purpose="restore")
        return self._restore(
            abstract_state, wanted, step=step, dataset=dataset, fallback=fallback
        )

    def _restore(
        self,
        abstract_state: PyTree | None,
        options: RestoreOptions,
        *,
        step: int | None = None,
        dataset: Any = None,
        fallback: bool = True,
    ) -> PyTree:
        with self.events.delivery():
            restored = self._restores.restore(
                abstract_state,
                step=step,
                dataset=dataset,
                fallback=fallback,
                options=options,
            )
            self.lineage, self.restored_step = restored.lineage, restored.step
            self._saves.add_own(restored.step)
        return restored.state

    def restore_latest(
        self, abstract_state: PyTree, *, dataset: Any = None
    ) -> tuple[PyTree, int]:
        """Restores the newest undamaged step; returns the state and the step.

        Raises:
            CheckpointError: As for `restore`.
        """
        options = RestoreOptions(unused=None, purpose="restore")
        return self._restore_latest(abstract_state, options, dataset)

    def _restore_latest(
        self, abstract_state: PyTree, options: RestoreOptions, dataset: Any
    ) -> tuple[PyTree, int]:
        state = self._restore(abstract_state, options, dataset=dataset)
        assert self.restored_step is not None
        self._saves.forget_beyond(self.restored_step)
        return state, self.restored_step

    def restore_dataset(self, dataset: Any, *, step: int | None = None) -> None:
        """Moves an iterator to its position at a step, by default the newest.

        Raises:
            CheckpointNotFoundError: The run has no steps, or not this step.
            DatasetStateError: The step has no dataset state, or the iterator rejects
                the state.
        """
        self.wait()
        number = self.latest_step() if step is None else step
        if number is None:
            raise errors.CheckpointNotFoundError(f"{self.directory} has no steps")
        path = self._run.path(number)
        _checkpoint.restore.restore_dataset(locate.read_step(path, number), dataset)

    # ---- finding -------------------------------------------------------------

    @property
    def _ended(self) -> run_steps.RunSteps:
        """The steps of the run, once the save in progress has ended."""
        self._saves.finish()
        return self._run

    def _paths(self) -> dict[int, Path]:
        """Returns the steps and their paths; warns of newer checkpoints left out."""
        paths = self._ended.paths()
        self._run.warn_of_left_out(paths)
        return paths

    def steps(self) -> list[int]:
        """Returns the committed steps without damage markers, ascending."""
        return list(self._paths())

    def latest_step(self) -> int | None:
        """Returns the newest of `steps()`; None without steps."""
        return max(self._paths(), default=None)

    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """Returns the newest step with the best finite `metric`; None without any.

        Warns if the steps have other metrics only: the name may be wrong.
        """
        best = self._ended.find_best(policies.BestN(1, metric, mode))
        if best is None:
            self._run.warn_of_unknown(metric)
            self._run.warn_of_left_out(self._run.paths())
        return best

    def damaged(self) -> dict[int, str]:
        """Returns the steps marked as damaged, ascending: step -> reason.

        `restore` marks a damaged step after restoring an older step instead, and
        `verify` marks a step that it proves to be damaged. Policies neither count nor
        delete a marked step. A later save of the same step replaces the marked step,
        `delete` deletes it, and `restore(step=…)` still tries it.
        """
        return self._ended.damage_reasons()

    def verify(self, step: int) -> VerifyReport:
        """Reads a whole step, and compares the content with its checksums.

        Marks the step as damaged, unless `read_only`, if its state is proved to be:
        see `damaged`. Removes the marker of a step that is good. See `flaxckpt.verify`
        for a verification that changes nothing.

        Raises:
            CheckpointNotFoundError: The step does not exist.
            SaveFailedError: The marker cannot be written or removed.
        """
        step = _steps.names.check(step)
        self.wait()
        path = self._run.path(step)
        report = _checkpoint.verify.verify_checkpoint(path, step)
        if not self.read_only and _util.job.is_first():
            with self._run.events.delivery():
                damage.update_marker(path, report, self._run.events)
        return report

    def metadata(self, step: int) -> CheckpointMetadata:
        """Returns a description of a step, without reading arrays."""
        step = _steps.names.check(step)
        return locate.read_stored(self._ended.path(step), step).metadata

    def has_dataset(self, step: int) -> bool:
        """Returns True if the directory of a step has a dataset state."""
        return _formats.items.find_dataset(self._ended.path(step)) is not None

    def metrics(self, step: int) -> Mapping[str, float]:
        """Returns the metrics stored with a step."""
        return dict(self._run.metrics(self._ended.path(step)))

    @property
    def run_metadata(self) -> Mapping[str, JSON]:
        """The metadata of the whole run."""
        for directory in (self._run.saves_in, self.directory):
            with _storage.read_errors.explain_errors(directory):
                if metadata := _formats.native_metadata.read_run_metadata(directory):
                    return metadata
        return {}

    @property
    def lineage(self) -> tuple[Lineage, ...]:
        """The checkpoints that this run began from, nearest first.

        Every step records the lineage; a restore sets the lineage of the step.
        """
        return self._saves.lineage

    @lineage.setter
    def lineage(self, origins: tuple[Lineage, ...]) -> None:
        self._saves.lineage = origins

    def reload(self) -> None:
        """Forgets cached metrics and times of steps, to see changes by others."""
        self._run.forget()

    def new_steps(
        self, *, timeout_secs: float | None = None, poll_secs: float = 1.0
    ) -> Iterator[int]:
        """Yields every step, oldest first, then each new step after its commit.

        For a job that evaluates checkpoints while another job trains. A lease, a file
        in the step, keeps all processes from deleting the step until the next
        iteration. In a read-only directory, steps are unprotected, with a warning.

        Args:
            timeout_secs: Seconds without a new step after which the iteration ends;
                None never ends.
            poll_secs: Seconds between two listings of the directory.
        """
        return watch.new_steps(
            self._paths, timeout_secs=timeout_secs, poll_secs=poll_secs
        )

    # ---- keeping and deleting ------------------------------------------------

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to a committed step, for example from a later evaluation.

        Raises:
            SaveFailedError: The metrics could not be written.
        """
        self._session.check_writable("add metrics")
        self.wait()
        added: list[dict[str, float]] = []

        def add(path: Path) -> None:
            number = _steps.names.check(step)
            added.append(edit.add_metrics(path, metrics, number))

        if (path := self._run.change(step, add)) is not None:
            self.events.emit("measured", step, path=path, metrics=added[0])

    def explain(self) -> dict[int, list[str]]:
        """Returns the reasons for keeping each step, oldest first.

        `prune` deletes steps without reasons. The reasons come from `policies.decide`.
        Further reasons are "metrics damaged", for a step that may be the best but has
        unreadable metrics; "dataset state deleted"; and "damaged: …", see `damaged`.
        With a staging directory, "staging: …" is a reason for keeping the step there,
        and "staging: not uploaded" means a pending upload.

        A `read_only` object without policies uses those that the run has recorded.
        """
        return self._ended.explain_all(self._session.rules())

    def prune(self, *, dry_run: bool = False) -> tuple[int, ...]:
        """Deletes the steps and dataset states that no policy keeps.

        Before the first deletion, verifies the whole newest step.

        Args:
            dry_run: True to only return the steps, those without reasons in `explain`.
                The newest step is not verified: only the sizes of its files are.

        Returns:
            The deleted steps, or the steps to delete with `dry_run`.

        Raises:
            SaveFailedError: The newest step is damaged or unreadable; older steps stay.
        """
        self.wait()
        if dry_run:
            self._run.retention.decide()
            return tuple(step for step, why in self.explain().items() if not why)
        self._session.check_writable("prune")
        return self._run.prune()

    def delete(self, step: int, *, item: str | None = None) -> None:
        """Deletes a step, even a pinned one, or an item of a step.

        Args:
            step: The step.
            item: An item to delete instead of the step; others must remain. A missing
                item is recorded as deleted, and no longer counts as damage.

        Raises:
            CheckpointNotFoundError: The step or the item does not exist.
            OptionError: The item is the only one with arrays, or of an unknown kind.
            SaveFailedError: A loop over `new_steps` in any process reads the step, or
                the step could not be deleted.
        """
        self._session.check_writable("delete")
        self.wait()
        if item is not None:
            self._run.change(step, lambda path: edit.delete_item(path, item))
        elif self._run.changes_steps:
            self._run.delete(step)

    def make_permanent(self, step: int) -> None:
        """Makes a temporary step permanent: only policies delete it.

        Raises:
            SaveFailedError: The marker could not be changed.
        """
        self._session.check_writable("keep a step")
        self.wait()
        self._run.make_permanent(step)

    def pin(self, step: int) -> None:
        """Keeps a step regardless of the policies.

        Raises:
            SaveFailedError: The marker could not be written.
        """
        self._session.check_writable("pin")
        self.wait()
        self._run.pin(step)

    def unpin(self, step: int) -> None:
        """Removes the pin of a step; raises the errors of `pin`."""
        self._session.check_writable("unpin")
        self.wait()
        self._run.unpin(step)

    # ---- the end -------------------------------------------------------------

    def close(self) -> None:
        """Waits for the save in progress and all uploads, and raises their errors."""
        trainers, settle = self._session.trainers, self._session.settle
        with contextlib.ExitStack() as last:  # all run, even after an error
            last.callback(self._run.close)
            last.callback(self._saves.end)  # for a save begun by a sink
            last.callback(self.events.close)
            last.callback(settle)
            for trainer in trainers:
                last.callback(trainer.after_close)
            last.callback(self.wait_for_uploads)
            last.callback(self.wait_for_copies)
            last.callback(self.wait)
            for trainer in trainers:
                last.callback(trainer.before_close)

    def _close_after(self, error: BaseException) -> None:
        # After a failed block, finish the save in progress and begin no other.
        try:
            self._session.settle()
        except errors.CheckpointError as failure:
            _log.error("the save in progress also failed: %s", failure)
            error.add_note(f"The save in progress also failed: {failure}")
        for trainer in self._session.trainers:
            trainer.abandon(error)

    def __reduce__(self) -> tuple[Any, ...]:
        raise errors.ArgumentError(
            "a Checkpointer cannot be pickled or copied, as its threads and locks are"
            " those of this process: pass its directory, and make a Checkpointer there,"
            " with read_only=True if it only reads"
        )

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """Returns an HTML card of the current steps, without reading arrays."""
        return card.of_run(self, self._session.rules, self._run.path)


def _check_layout_of_parts(run: run_steps.RunSteps, layout: ArrayLayout) -> None:
    """Raises OptionError for zarr 2 in the staging directories of several processes."""
    if run.is_in_parts and layout.zarr_version == 2:
        raise errors.OptionError(
            "ArrayLayout(zarr_version=2) needs a digest of each file, and no process"
            " can read those in the staging directories of the others: leave out"
            " zarr_version, or leave out staging"
        )


def _choose_action(
    on_exists: Literal["error", "skip", "overwrite"] | None, overwrite: bool | None
) -> Literal["error", "skip", "overwrite"]:
    """Returns the action; raises OptionError if the arguments contradict each other."""
    if overwrite is not None:
        _util.arguments.check_choice("overwrite", overwrite, (True, False))
    if on_exists is None:
        return "overwrite" if overwrite else "error"
    _util.arguments.check_choice("on_exists", on_exists, ("error", "skip", "overwrite"))
    if overwrite is not None and overwrite != (on_exists == "overwrite"):
        raise errors.OptionError(
            f"on_exists={on_exists!r} and overwrite={overwrite} contradict each other:"
            " pass one of them"
        )
    return on_exists


def session_of(checkpointer: Checkpointer) -> Session:
    """Returns the parts of a checkpointer for a training loop."""
    return checkpointer._session


def resume(
    checkpointer: Checkpointer,
    state: PyTree,
    *,
    dataset: Any,
    unused: Literal["warn", "error", "ignore"] | None = None,
) -> tuple[PyTree, int]:
    """Restores the newest undamaged step whole, for a run that continues.

    Returns the state and the step. See `CheckpointCallback.restore_or_init`.
    """
    options = RestoreOptions(purpose="resume", unused=unused)
    return checkpointer._restore_latest(state, options, dataset)


def beside(checkpointer: Checkpointer, directory: PathLike) -> Checkpointer:
    """Returns a checkpointer with the options for arrays, which keeps all steps."""
    options = checkpointer._options
    return Checkpointer(
        directory,
        layout=options.layout,
        max_concurrent_bytes=options.max_concurrent_bytes,
        snapshot=options.snapshot,
        transforms=options.transforms,
        step_format=checkpointer._run.format.template,
        peer_timeout_secs=checkpointer._peer_timeout_secs,
        read_once=checkpointer._read_once,
    )
