"""The part of a `Checkpointer` that saves, and that ends."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from flaxckpt import _checkpoint, _distributed, _steps, _storage, _util, errors
from flaxckpt._checkpoint.handle import SaveHandle
from flaxckpt._checkpoint.result import SaveResult
from flaxckpt._run import retention, run_directory, saving
from flaxckpt._run.events import sinks as events_sinks
from flaxckpt._types import JSON, PathLike, PyTree
from flaxckpt.formats import _native
from flaxckpt.formats._reader import Lineage
from flaxckpt.policies import PreservationPolicy

_log = logging.getLogger(__name__)

_MOST_SAVES_BY_SINKS = 8
"""How many saves, one begun because of another, the end of a run waits for."""


class Trainer(Protocol):
    """Who saves by a `Checkpointer` and wants to know of its end."""

    def before_close(self) -> None:
        """Saves what is still to be saved."""
        ...

    def after_close(self) -> None:
        """All saves are durable, or have failed."""
        ...

    def abandon(self, error: BaseException) -> None:
        """The block ends by an error: nothing more is to be saved."""
        ...


class RunSaver(run_directory.RunDirectory):
    """Saves the steps of a run, and tells its trainers of the end.

    Args:
        directory: Of the run.
        rules: What is to stay.
        options: What all saves have in common.
        step_format: Names of steps.
        read_only: Refuses to save or delete.
        metadata: JSON of the user about the whole run.
        sinks: Who is told of events.
        peer_timeout_secs: How long one process waits for others.
        staging: Where steps are saved first; None: in the directory.
        keep_staging: What stays there.
    """

    def __init__(
        self,
        directory: PathLike,
        rules: retention.Rules,
        options: _checkpoint.request.SaveOptions,
        *,
        step_format: str,
        read_only: bool,
        metadata: Mapping[str, JSON] | None,
        sinks: Sequence[events_sinks.Sink],
        peer_timeout_secs: float,
        staging: PathLike | None,
        keep_staging: Sequence[PreservationPolicy],
    ) -> None:
        super().__init__(
            directory,
            rules,
            step_format=step_format,
            read_only=read_only,
            staging=staging,
            keep_staging=keep_staging,
        )
        for name, value in (
            ("max_concurrent_bytes", options.max_concurrent_bytes),
            ("peer_timeout_secs", peer_timeout_secs),
        ):
            _util.arguments.positive(name, value)
        self._processes = _distributed.agreement.Processes(
            self.directory, peer_timeout_secs
        )
        self._saves = saving.Saves(self._run, options, self._processes)
        self._trainers: list[Trainer] = []
        for sink in events_sinks.listed(sinks):
            self.events.subscribe(sink)
        if not read_only:
            self._run.make_directory()
            if _util.processes.is_first():
                self._tidy()
        if metadata is not None:
            self.check_writable("keep metadata")
            taken = _checkpoint.save.json_of(metadata)
            if _util.processes.is_first():
                self._write_metadata(taken)
        _distributed.operation.attend(self.directory)

    def _tidy(self) -> None:
        """Removes what crashes have left."""
        with _storage.paths.looking(self.directory):
            items = (_native.checkpoint.METRICS, "metadata")
            _steps.delete.tidy(self.saves_in, self._run.format, items)
            tiers = self._run.tiers
            if tiers is None or tiers.uploads.open():
                self._saves.aside.tidy()

    def _write_metadata(self, metadata: Mapping[str, JSON]) -> None:
        try:
            _native.checkpoint.write_run_metadata(self.saves_in, metadata)
        except (OSError, ValueError) as error:
            raise errors.SaveFailedError(
                f"the metadata of {self.saves_in} cannot be written: {error}; see that"
                " the directory is writable and has space, then try again"
            ) from error

    @property
    def lineage(self) -> tuple[Lineage, ...]:
        """What this run began from, the nearest first; recorded in every step."""
        return self._saves.lineage

    @lineage.setter
    def lineage(self, origins: tuple[Lineage, ...]) -> None:
        self._saves.lineage = origins

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
        self.check_writable("save")
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

    def has_saved(self, step: int) -> bool:
        """Whether this object has saved or restored a step, or is about to have."""
        return self._saves.has_saved(_steps.names.check(step))

    def rehearse(self, state: PyTree, *, dataset: Any = None) -> tuple[int, float]:
        """Does what `save` does before it returns, and writes nothing.

        Returns:
            The size of all arrays as they would be stored, in bytes, and for how many
            seconds `save` would hold up its caller.

        Raises:
            CheckpointError: As `save` says of what cannot be saved.
        """
        start = time.monotonic()
        size = self._saves.rehearse(state, dataset)
        return size, time.monotonic() - start

    def save_params_only(self, step: int, state: PyTree) -> Path | None:
        """Saves a state without its optimizer, beside the steps, and waits for it.

        For when there is no time for the whole. It is no step: nothing restores it by
        itself, and no policy counts it. It replaces the one before it.

        Returns:
            Where it is, for `load(path, …)` or `source=path`. None if the state has no
            optimizer, and nothing was saved.
        """
        number = _steps.names.check(step)
        self.check_writable("save")
        return self._saves.save_params_only(number, state)

    def params_only(self) -> tuple[int, Path] | None:
        """The step and path of what `save_params_only` has left; None if nothing."""
        return self._saves.aside.latest()

    # ---- waiting ----------------------------------------------------------------

    def wait(self) -> SaveResult | None:
        """Waits for the save under way.

        Returns:
            What it did; None if there is none, or it was waited for already.

        Raises:
            CheckpointError: It failed.
        """
        return self._saves.wait()

    def settle(self) -> None:
        """Waits for the save under way, and for those that sinks begin meanwhile.

        Sinks may save when they are told of events. Those that would go on so for ever
        are told no more.

        Raises:
            CheckpointError: A save has failed.
        """
        for _ in range(_MOST_SAVES_BY_SINKS):
            self.wait()
            if not self._saves.is_under_way():
                return
        _log.warning(
            "a sink of events begins a save whenever one has ended: it is told no more"
        )
        self._saves.end()

    def wait_for_uploads(self, timeout_secs: float | None = None) -> None:
        """Waits until the directory has all that is to be uploaded from `staging`.

        What could not be uploaded before is tried once more. `close` does the same.

        Raises:
            CheckpointTimeoutError: It is still going on after `timeout_secs`.
            SaveFailedError: Something could not be uploaded, and is in `staging` still.
            CheckpointError: The save under way failed.
        """
        with self._delivering():
            self._saves.end()
            if self._run.tiers is not None and not self.read_only:
                self._run.tiers.uploads.wait(timeout_secs)

    def raise_if_failed(self) -> None:
        """Raises the error of a save that has failed, without waiting for one."""
        if self._saves.has_failed():
            self.wait()

    @contextlib.contextmanager
    def _delivering(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.events.deliver()

    def by_first(self, what: str, act: Callable[[], Any]) -> Any:
        """Has process 0 do something, and gives what it gave, as JSON, to all.

        Where several processes train, all of them call this at the same place.
        """
        together = self._processes.begin("once", what)
        with _distributed.agreement.ending(together):
            return _distributed.agreement.first_says(together, "done", act)

    def has_steps(self) -> bool:
        """Whether there are steps, good or damaged, so that a run does not begin anew.

        Where several processes train, all of them call this, and process 0 looks.
        """
        together = self._processes.begin("look", "the steps")
        with _distributed.agreement.ending(together, saving=False):
            self._saves.end()
            return bool(
                _distributed.agreement.first_says(together, "there", self._run.has_any)
            )

    # ---- lifetime ---------------------------------------------------------------

    def attach(self, trainer: Trainer) -> None:
        """Has `close` and the end of the `with` block tell a trainer."""
        if trainer not in self._trainers:
            self._trainers.append(trainer)

    @property
    def trainers(self) -> tuple[Trainer, ...]:
        """Who is told."""
        return tuple(self._trainers)

    def detach(self, trainer: Trainer) -> None:
        """Tells it no more."""
        if trainer in self._trainers:
            self._trainers.remove(trainer)

    def close(self) -> None:
        """Waits for the save under way and raises its error, if it failed.

        With `staging`, then for the uploads, and raises theirs.
        """
        with contextlib.ExitStack() as last:  # each is done, whatever the others raise
            last.callback(self._saves.end)  # whatever a sink has begun at the last
            last.callback(self.events.close)
            last.callback(self.settle)
            for trainer in self.trainers:
                last.callback(trainer.after_close)
            last.callback(self.wait_for_uploads)
            last.callback(self.wait)
            for trainer in self.trainers:
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
            self.settle()
        except errors.CheckpointError as failure:
            _log.error("the save under way failed, too: %s", failure)
            error.add_note(f"The save under way failed, too: {failure}")
        for trainer in self.trainers:
            trainer.abandon(error)
