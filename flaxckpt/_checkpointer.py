"""The checkpoints of one run: a directory of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from flaxckpt import (
    _card,
    _collector,
    _commit,
    _directory,
    _events,
    _joint,
    _locate,
    _measured,
    _multihost,
    _plan,
    _progress,
    _remote,
    _restore,
    _retention,
    _save,
    _steps,
    _storage,
    _tiers,
    _together,
    _verify,
    _write,
    errors,
    formats,
)
from flaxckpt._handle import SaveHandle
from flaxckpt._info import (
    ArrayLayout,
    CheckpointMetadata,
    Lineage,
    SaveResult,
    Stored,
)
from flaxckpt._types import JSON, PathLike, PyTree
from flaxckpt.formats import _orbax
from flaxckpt.policies import PreservationPolicy
from flaxckpt.transforms import Transform
from flaxckpt.transforms import _table as _transforms

_log = logging.getLogger(__name__)

_PARAMS_ONLY = "params_only"
"""The directory, beside the steps, of what was saved without its optimizer."""


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
        events: What happens to the checkpoints. Unless `read_only`, it is also kept in
            `events.jsonl` in the directory.
        lineage: What this run began from, the nearest first; recorded in every step.
            Restoring a step sets it to what is recorded there.
        restored_step: The step that was restored last; None if none was.
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
        sinks: Sequence[_events.Sink] = (),
        keep_dataset: Sequence[PreservationPolicy] = (),
        metrics_from: Callable[[], _measured.MetricsByStep] | None = None,
        peer_timeout_secs: float = _together.TIMEOUT_SECS,
        read_once: bool = False,
        staging: PathLike | None = None,
        keep_staging: Sequence[PreservationPolicy] = _tiers.KEEP,
    ) -> None:
        super().__init__(
            directory,
            _retention.Rules.of(keep, keep_dataset, metrics_from),
            step_format=step_format,
            read_only=read_only,
            staging=staging,
            keep_staging=keep_staging,
        )
        self._layout = layout or ArrayLayout()
        self._transforms = _transforms.checked(transforms)
        self._max_concurrent_bytes = max_concurrent_bytes
        self._lock = threading.RLock()  # one save at a time, whichever thread asks
        self._pending: SaveHandle | None = None
        self._pending_step: int | None = None
        self._saved: _write.Previous | None = None  # by the last save of ours
        self.lineage: tuple[Lineage, ...] = ()
        self.restored_step: int | None = None
        self._own_steps: set[int] = set()  # saved or restored by this object
        self._trainers: list[Trainer] = []
        if max_concurrent_bytes <= 0:
            raise errors.OptionError(
                f"max_concurrent_bytes must be positive, got {max_concurrent_bytes}"
            )
        if peer_timeout_secs <= 0:
            raise errors.OptionError(
                f"peer_timeout_secs must be positive, got {peer_timeout_secs}"
            )
        self._peer_timeout_secs = peer_timeout_secs
        self._read_once = read_once
        for sink in sinks:
            self.events.subscribe(sink)
        if not read_only:
            self._make_directory()
            if _multihost.is_first():
                self._tidy()
        if metadata is not None:
            self.check_writable("keep metadata")
            _save.check_json(metadata)
            if _multihost.is_first():
                self._write_metadata(metadata)
        _together.attend(self.directory)

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
            CheckpointExistsError: The step is there, and `on_exists` is "error".
            CheckpointError: Why this save cannot begin, or why the last one failed.
        """
        start = time.monotonic()
        self.check_writable("save")
        if on_exists not in ("error", "skip", "overwrite"):
            raise errors.OptionError(
                f"on_exists must be 'error', 'skip' or 'overwrite', got {on_exists!r}"
            )
        number = _steps.check(step)
        try:
            with self._lock, self._jointly("save", number) as together:
                self._wait()
                return self._begin(
                    number,
                    state,
                    metrics,
                    dataset,
                    metadata,
                    on_exists,
                    temporary,
                    start,
                    together,
                )
        finally:
            self.events.deliver(number)

    @contextlib.contextmanager
    def _jointly(self, kind: str, step: int) -> Iterator[_together.Operation | None]:
        """Begins what all processes do, who are told if it fails within."""
        together = self._begun(kind, f"step {step}")
        with _joint.telling(together):
            yield together

    def _begun(self, kind: str, what: str) -> _together.Operation | None:
        text = f"{what} of {self.directory}"
        return _joint.begin(kind, self.directory, text, self._peer_timeout_secs)

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
        together: _together.Operation | None,
    ) -> SaveHandle:
        final = self.saves_in / self._format.name(number)
        if on_exists == "skip" and _joint.first_says(
            together, "there", lambda: number in self._seen()
        ):
            if together is not None:
                together.close()
            if not temporary:
                self.make_permanent(number)
            return self._skipped(number, final, start)
        overwrite = on_exists == "overwrite" or _steps.is_damaged(final)
        tell = functools.partial(self.events.emit, step=number, path=final)
        counter = _progress.Counter(f"saving step {number}")
        tier = self._tier(final)
        with self._failing(number, final):
            if self._tiers is not None and not overwrite:
                self._tiers.check_free(number)
            options = self._save_options(
                number,
                metrics=_measured.as_metrics(metrics),
                metadata=metadata or {},
                dataset=dataset,
                overwrite=overwrite,
                planned=functools.partial(tell, "started", overwrite=overwrite),
                temporary=temporary,
                count=counter.add,
                together=together,
                marks=self._marks(overwrite),
            )
            snapshot = _save.take(final, state, options)
        counter.total = snapshot.nbytes
        blocked = time.monotonic() - start
        tell("snapshot", blocked_secs=blocked)

        @self._failing(number, final)
        @_joint.ending(together)
        def work() -> SaveResult:
            with self._replacing(final):
                written, self._saved = _save.execute(snapshot, self._previous())
            self._own_steps.add(number)
            tell(
                "committed",
                bytes=written,
                blocked_secs=blocked,
                total_secs=time.monotonic() - start,
                metrics=len(options.metrics),
                **self._said_of(tier),
            )
            deleted = tuple(
                _joint.first_says(together, "deleted", lambda: self._retired(number))
            )
            total = time.monotonic() - start
            _log.info(
                "saved step %d: %d bytes, durable after %.3f s, blocked %.3f s%s",
                number,
                written,
                total,
                blocked,
                f", deleted {list(deleted)}" if deleted else "",
            )
            if self._tiers is not None:
                self._tiers.uploads.start()
            return SaveResult(
                number, str(final), written, blocked, total, deleted, tier=tier
            )

        self._pending = SaveHandle(work, name=f"save of {final}", counter=counter)
        self._pending_step = number
        return self._pending

    def _tier(self, path: Path) -> _tiers.Tier:
        return "directory" if self._tiers is None else self._tiers.tier(path)

    def _said_of(self, tier: _tiers.Tier) -> dict[str, Any]:
        return {} if self._tiers is None else {"tier": tier}

    def _marks(self, overwrite: bool) -> dict[str, bytes]:
        """What says of a new step that it is still to be uploaded."""
        if self._tiers is None:
            return {}
        return {_steps.NOT_UPLOADED: _steps.Waiting(overwrite).content()}

    def _replacing(self, path: Path) -> contextlib.AbstractContextManager[None]:
        if self._tiers is None:
            return contextlib.nullcontext()
        return self._tiers.replacing(path)

    def _retired(self, just_saved: int) -> tuple[int, ...]:
        return self._retire(just_saved=just_saved, is_awaited=self._is_awaited)

    def has_saved(self, step: int) -> bool:
        """Whether this object has saved or restored a step, or is about to have."""
        pending = self._pending
        if pending is not None and self._pending_step == step:
            return not pending.has_untold_error()
        # Of several processes, some may see it later than others.
        is_there = _multihost.is_together() or step in self._seen()
        return step in self._own_steps and is_there

    def _is_awaited(self) -> bool:
        """Whether somebody waits for the save under way."""
        return self._pending is not None and self._pending.is_awaited()

    @contextlib.contextmanager
    def _failing(self, step: int, final: Path) -> Iterator[None]:
        """Tells what fails within."""
        try:
            yield
        except BaseException as error:
            text = _events.first_lines(error)
            self.events.emit("failed", step, path=final, error=text)
            raise

    def rehearse(self, state: PyTree, *, dataset: Any = None) -> tuple[int, float]:
        """Does what `save` does before it returns, and writes nothing.

        Returns:
            The size of all arrays as they would be stored, in bytes, and for how many
            seconds `save` would hold up its caller.

        Raises:
            CheckpointError: As `save` says of what cannot be saved.
        """
        start = time.monotonic()
        snapshot = _save.take(
            self.saves_in / "rehearsal" / self._format.name(0),
            state,
            self._save_options(0, dataset=dataset),
        )
        return snapshot.stored_bytes, time.monotonic() - start

    def save_params_only(self, step: int, state: PyTree) -> Path | None:
        """Saves a state without its optimizer, beside the steps, and waits for it.

        For when there is no time for the whole. It is no step: nothing restores it by
        itself, and no policy counts it. It replaces the one before it.

        Returns:
            Where it is, for `load(path, …)` or `source=path`. None if the state has no
            optimizer, and nothing was saved.
        """
        number = _steps.check(step)
        self.check_writable("save")
        if not _save.has_optimizer(state):
            return None
        together = self._begun("params", f"the parameters of step {number}")
        with self._lock, _joint.ending(together):
            self.wait()
            path = self._aside(_PARAMS_ONLY, number)
            if path.parent.is_symlink():  # what lies there is somebody else's
                raise errors.SaveFailedError(
                    f"{path.parent} is a symbolic link, and nothing is written or"
                    " deleted behind one: remove it, then save again"
                )
            options = self._save_options(number, overwrite=True, together=together)
            options = dataclasses.replace(
                options, transforms=(_save.without_optimizer, *options.transforms)
            )
            _save.execute(_save.take(path, state, options))
            if _multihost.is_first():
                self._delete_other_params(path)
        return path

    def _delete_other_params(self, path: Path) -> None:
        others = _steps.listed(path.parent, self._format).values()
        for other in [other for other in others if other != path]:
            try:
                _steps.delete(other)
            except OSError as error:
                _log.warning("%s stays for now: %s", other, error)

    def params_only(self) -> tuple[int, Path] | None:
        """The step and path of what `save_params_only` has left; None if nothing."""
        listed = _steps.listed(self.directory / _PARAMS_ONLY, self._format)
        return max(listed.items(), default=None)

    def _aside(self, name: str, step: int) -> Path:
        return self.directory / name / self._format.name(step)

    def _save_options(self, step: int, **given: Any) -> _commit.Options:
        return _commit.Options(
            step,
            self._layout,
            self._transforms,
            max_concurrent_bytes=self._max_concurrent_bytes,
            lineage=self.lineage,
            **given,
        )

    def _write_metadata(self, metadata: Mapping[str, JSON]) -> None:
        try:
            _orbax.write_run_metadata(self.saves_in, metadata)
        except (OSError, ValueError) as error:
            raise errors.SaveFailedError(
                f"the metadata of {self.saves_in} cannot be written: {error}; see that"
                " the directory is writable and has space, then try again"
            ) from error

    def _tidy(self) -> None:
        """Removes what crashes have left."""
        with _remote.looking(self.directory):
            _steps.tidy(self.saves_in, self._format, (_orbax.METRICS, "metadata"))
            if self._tiers is not None and not self._tiers.uploads.open():
                return
            aside = self.directory / _PARAMS_ONLY
            with contextlib.suppress(OSError):  # another time
                if aside.is_dir() and not aside.is_symlink():
                    _steps.tidy(aside, self._format, ())

    def sibling(self, directory: PathLike) -> Checkpointer:
        """Another directory, whose steps are written as these are, and all kept."""
        return Checkpointer(
            directory,
            layout=self._layout,
            max_concurrent_bytes=self._max_concurrent_bytes,
            transforms=self._transforms,
            step_format=self._format.template,
            peer_timeout_secs=self._peer_timeout_secs,
            read_once=self._read_once,
        )

    def _previous(self) -> _write.Previous | None:
        """The arrays of the newest step, which those of the next may equal."""
        if _remote.is_remote(self.saves_in):  # where there are no links
            return None
        try:
            listed = self._retention.listed()  # in staging: links lead nowhere else
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
        self.events.emit("skipped", step, path=final, reason=reason)
        _log.warning("step %d is not saved: %s has one already", step, self.directory)
        elapsed = time.monotonic() - start
        path = self._seen().get(step, final)
        result = SaveResult(
            step, str(path), 0, elapsed, elapsed, skipped=reason, tier=self._tier(path)
        )
        counter = _progress.Counter(reason)
        return SaveHandle(lambda: result, name=f"save of {final}", counter=counter)

    def wait(self) -> SaveResult | None:
        """Waits for the save under way.

        Returns:
            What it did; None if there is none, or it was waited for already.

        Raises:
            CheckpointError: It failed.
        """
        with self._delivering():
            return self._wait()

    def _wait(self) -> SaveResult | None:
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

    def wait_for_uploads(self, timeout_secs: float | None = None) -> None:
        """Waits until the directory has all that is to be uploaded from `staging`.

        What could not be uploaded before is tried once more. `close` does the same.

        Raises:
            CheckpointTimeoutError: It is still going on after `timeout_secs`.
            SaveFailedError: Something could not be uploaded, and is in `staging` still.
            CheckpointError: The save under way failed.
        """
        with self._delivering():
            self._wait()
            if self._tiers is not None and not self.read_only:
                self._tiers.uploads.wait(timeout_secs)

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
        state, step = self._restore(
            abstract_state, None, dataset, True, self._options()
        )
        # What was saved beyond belongs to a run that is not gone on with.
        self._own_steps = {own for own in self._own_steps if own <= step}
        return state, step

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
        start, counter = time.monotonic(), _progress.Counter(f"loading {path.name}")
        state, self.lineage = _restore.load_source(
            path, step, abstract_state, options, counter
        )
        origin = self.lineage[0]
        with self._delivering():
            self._restored(origin.step, origin.path, counter.total, start)
        return state, 0 if options.keeps_steps else _restore.step_of(state)

    def _restored(
        self, step: int | None, path: Path | str, size: int, start: float
    ) -> None:
        secs = time.monotonic() - start
        self.events.emit("restored", step, path=path, bytes=size, secs=secs)

    @contextlib.contextmanager
    def _delivering(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.events.deliver()

    def _options(self, **given: Any) -> _plan.Options:
        return _plan.Options(
            max_concurrent_bytes=self._max_concurrent_bytes,
            read_once=self._read_once,
            **given,
        )

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
        with self._delivering(), _remote.looking(self.directory):
            candidates = self._agreed(step)
            if not fallback:  # where there are two of the same step, both are tried
                candidates = [c for c in candidates if c[0] == candidates[0][0]]
            return self._restore_first(candidates, abstract_state, dataset, options)

    def _agreed(self, step: int | None) -> list[tuple[int, Path]]:
        """The steps to restore, as process 0 sees them."""
        what = "the newest step" if step is None else f"step {step}"
        together = self._begun("find", what)
        with _joint.ending(together, saving=False):
            self._wait()
            if self._tiers is not None:
                return self._candidates(step)
            _joint.check_asked(together, what)
            found = _joint.first_says(
                together,
                "found",
                lambda: [(n, path.name) for n, path in self._candidates(step)],
            )
        return [(number, self.directory / name) for number, name in found]

    def by_first(self, what: str, act: Callable[[], Any]) -> Any:
        """Has process 0 do something, and gives what it gave, as JSON, to all.

        Where several processes train, all of them call this at the same place.
        """
        together = self._begun("once", what)
        with _joint.ending(together):
            return _joint.first_says(together, "done", act)

    def has_steps(self) -> bool:
        """Whether there are steps, good or damaged, so that a run does not begin anew.

        Where several processes train, all of them call this, and process 0 looks.
        """
        together = self._begun("look", "the steps")
        with _joint.ending(together, saving=False):
            self._wait()
            return bool(_joint.first_says(together, "there", self._sees_steps))

    def _sees_steps(self) -> bool:
        return bool(self._listed() or self._damaged())

    def _candidates(self, step: int | None) -> list[tuple[int, Path]]:
        """The steps to restore, the first that is good."""
        if step is not None:
            path = self._path(step)
            if self._tiers is not None:
                return self._tiers.copies(step, path)
            return [(step, path)]
        if self._tiers is not None:
            candidates = self._tiers.candidates()
        else:
            candidates = sorted(self._listed().items(), reverse=True)
        if not candidates and (damaged := self.damaged()):
            raise errors.DamagedCheckpointError(
                f"{self.directory} has damaged steps only:\n"
                + errors.rows(f"{step}: {why}" for step, why in damaged.items())
                + "\nrestore(step=…) tries one of them; delete(step) removes it, and"
                " without steps a run begins anew."
            )
        if not candidates:
            raise errors.CheckpointNotFoundError(
                f"{self.directory} has no steps called like {self._format.template!r}:"
                " save one first, or see that directory and step_format are right"
            )
        return candidates

    def _restore_first(
        self,
        candidates: Sequence[tuple[int, Path]],
        abstract_state: PyTree | None,
        dataset: Any,
        options: _plan.Options,
    ) -> tuple[PyTree, int]:
        """Restores the first of `candidates` that is not damaged."""
        damage: errors.DamagedCheckpointError | None = None
        left_out: list[tuple[int, Path]] = []
        for number, path in candidates:
            start, counter = time.monotonic(), _progress.Counter(f"loading {path.name}")
            one = functools.partial(
                self._restore_one,
                number,
                path,
                abstract_state,
                dataset,
                options,
                counter,
            )
            together = self._begun("restore", f"step {number}")
            try:
                stored, state = _joint.attempt(together, one)
            except errors.DamagedCheckpointError as error:
                damage = damage or error
                left_out.append((number, path))
                text = _events.first_lines(error, 1)
                self.events.emit("fell_back", number, path=path, error=text)
                _log.warning("step %d is damaged and left out: %s", number, error)
            else:
                self.lineage = stored.metadata.lineage
                self.restored_step = number
                self._own_steps.add(number)
                self._restored(number, path, counter.total, start)
                # Not before there is another to go on from.
                self._settle_marks(number, path, left_out)
                return state, number
        assert damage is not None
        raise damage

    def _restore_one(
        self,
        number: int,
        path: Path,
        abstract_state: PyTree | None,
        dataset: Any,
        options: _plan.Options,
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
            stored = _locate.read_step(path, number, options.types)
            undone = self._undone(stored.metadata, abstract_state, options)
            state = _restore.restore(stored, abstract_state, undone, counter, has_read)
            if dataset is not None:
                _restore.restore_dataset(stored, dataset)
        except OSError as error:
            if isinstance(error, errors.CheckpointError):
                raise
            raise errors.DamagedCheckpointError(
                f"{path} cannot be read: {error}; see that the disk is sound, or"
                " restore another step"
            ) from error
        return stored, state

    def _settle_marks(
        self, number: int, path: Path, left_out: Sequence[tuple[int, Path]]
    ) -> None:
        """Marks what is proved to be damaged, and unmarks what is proved to be good.

        Each is read once more for that: a disk or a network may fail for a moment.
        """
        if self.read_only or not _multihost.is_first():
            return
        try:
            if _steps.is_damaged(path) and _verify.verify(path, number).ok:
                _steps.unmark_damaged(path)
                _log.warning("step %d is good, and marked as damaged no more", number)
            for worse, there in left_out:
                if (reason := _verify.damage(there, worse)) is None:
                    _log.warning("step %d may be good: it is not marked", worse)
                    continue
                _steps.mark_damaged(there, reason)
                _log.warning(
                    "step %d is marked as damaged: it is not counted as a step any"
                    " more, and replaced when the run gets there",
                    worse,
                )
        except OSError as error:
            _log.warning("damaged steps could not be marked: %s", error)

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
        _restore.restore_dataset(_locate.read_step(self._path(number), number), dataset)

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
            last.callback(self.events.close)
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
            self.wait()
        except errors.CheckpointError as failure:
            _log.error("the save under way failed, too: %s", failure)
            error.add_note(f"The save under way failed, too: {failure}")
        for trainer in self.trainers:
            trainer.abandon(error)

    def _repr_html_(self) -> str:
        """A card for notebooks, of what is there now; no array is read."""
        return _card.of_run(self, self._path)
