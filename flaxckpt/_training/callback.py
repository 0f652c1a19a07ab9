"""`CheckpointCallback`: saves in a training loop, resumes, and stops on signals."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from flaxckpt import _run, _state, _util, datasets, errors
from flaxckpt._checkpoint.planner import RestoreOptions
from flaxckpt._checkpoint.save_handle import SaveHandle
from flaxckpt._run.checkpointer import Checkpointer, session_of
from flaxckpt._training import arguments, completed_step, resume_check, step_counter
from flaxckpt._training import preflight as training_preflight
from flaxckpt._training import start as training_start
from flaxckpt._training.completed_step import CompletedStep
from flaxckpt._training.preemption import Preemption
from flaxckpt._training.save_interval import SaveInterval
from flaxckpt._training.triggers import Due, Triggers
from flaxckpt._types import JSON, Closing, PathLike, PyTree
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a temporary failure; the program may be started again."""


@_util.guessed_names.explain
class CheckpointCallback(Closing):
    """Saves at chosen steps of a training loop, and restores at the beginning.

    The loop calls the callback after every step, as with CLU's periodic actions. A step
    is saved if any trigger fires. Leaving the `with` block of the checkpointer, or of
    the callback, also saves the last step.

    ```python
    on_step = CheckpointCallback(checkpointer, every_steps=1000, dataset=batches)
    state, start = on_step.restore_or_init(state)
    for step in range(start + 1, total + 1):
        state, metrics = train_step(state, next(batches))
        on_step(step, state, metrics=metrics)
    ```

    From `restore_or_init` or the first call until `close`, SIGTERM, SIGUSR1 and Ctrl-C
    do not end the program at once: the next call saves, waits until the checkpoint is
    durable, and then raises `SystemExit(exit_code)`, or `KeyboardInterrupt` after
    Ctrl-C. When the program is started again, the run continues from this step.

    Args:
        checkpointer: Checkpointer of the run.
        every_steps: Saves when the loop reaches or passes a multiple of this number.
        every_secs: Saves when this time has passed since the last save.
        overhead: Saves as often as possible at a cost of this fraction of the training
            time, by the measured cost of saves; instead of `every_secs`.
        mtbf_secs: With `overhead`, the mean time between failures of the job: limits
            saves to the rate at which they cost less than the work that failures lose.
        temporary: Whether to delete saves that only the time asked for as soon as there
            is a newer permanent save.
        on_steps: Saves when the loop reaches or passes any of these steps.
        on_preemption: Whether to watch for signals, and for jax's preemption service if
            enabled.
        grace_secs: Seconds between a signal and the end of the process. If they do not
            suffice for the whole state, the optimizer is not saved: see `params_only`.
        exit_code: Exit code after a signal, which tells the launcher to start the
            program again. None to continue running: the loop must then call
            `should_stop()`.
        save_first: Whether to save the first step of a new run.
        save_last: Whether closing saves the last step, if not yet saved.
        dataset: The iterator to save and restore with the state.
        json: Item -> JSON to save as items of every step; or a function that returns
            the items for a number of completed steps.
        step_is: `completed` if the loop passes the number of completed steps; `index`
            if it passes the index of the last step, smaller by 1. Checkpoints count
            completed steps.
        check_step: Whether to refuse a save if the state has its own step counter, as
            in a `TrainState`, with another value.
        preflight: Whether the first call rehearses a save without arrays and tests
            the directory and its free space; `warn` only logs problems.
        sinks: Receivers of events, in addition to the checkpointer's.
        statistics: Whether each save records norms, extrema and histograms of the
            leaves, from samples, in 2 % of its time.
        clock: Returns seconds, for `every_secs` and `grace_secs`.

    Attributes:
        checkpointer: Checkpointer of the run.
        last_save: The last save of this callback, or None.
    """

    __name__ = "checkpoint"  # clu's PeriodicCallback reads the name of its function

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        every_steps: int | None = None,
        every_secs: float | None = None,
        overhead: float | None = None,
        mtbf_secs: float | None = None,
        temporary: bool = False,
        on_steps: Collection[int] = (),
        on_preemption: bool = True,
        grace_secs: float | None = None,
        exit_code: int | None = REQUEUE_EXIT_CODE,
        save_first: bool = False,
        save_last: bool = True,
        dataset: Any = None,
        json: Mapping[str, JSON] | Callable[[int], Mapping[str, JSON]] | None = None,
        step_is: Literal["completed", "index"] = "completed",
        check_step: bool = True,
        preflight: Literal["warn"] | bool = True,
        sinks: Sequence[Any] = (),
        statistics: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        arguments.check_checkpointer(checkpointer)
        _util.arguments.check_choice("step_is", step_is, ("completed", "index"))
        if preflight not in (True, False, "warn"):
            raise errors.OptionError(
                f"preflight must be True, False or 'warn', got {preflight!r}"
            )
        _util.arguments.check_function("clock", clock, "that returns seconds")
        if temporary and every_secs is None and overhead is None:
            raise errors.OptionError(
                "temporary=True applies only to saves by time: pass every_secs"
            )
        if mtbf_secs is not None and overhead is None:
            raise errors.OptionError("mtbf_secs needs overhead: pass overhead=0.01")
        self.checkpointer = checkpointer
        self.last_save: SaveHandle | None = None
        self._session = session_of(checkpointer)
        self._session.saves.has_statistics |= statistics
        self._interval = (
            None if overhead is None else SaveInterval(overhead, mtbf_secs, clock)
        )
        self._clock = clock
        self._triggers = Triggers(
            every_steps=every_steps,
            every_secs=every_secs,
            interval=self._interval,
            on_steps=on_steps,
            save_first=save_first,
            clock=clock,
        )
        self._temporary = temporary
        self._save_last = save_last
        self._offset = 1 if step_is == "index" else 0
        self._preemption = Preemption(
            checkpointer,
            watches=on_preemption,
            grace_secs=grace_secs,
            exit_code=exit_code,
            offset=self._offset,
            clock=clock,
        )
        self._check_step = check_step
        self._json = arguments.json_getter(json)
        self._preflight = preflight
        self._sinks = _run.events.list_sinks(sinks)
        self._subscribed: list[Any] = []
        # Name -> function that returns a value not passed by the loop.
        self._getters: dict[str, Callable[[], Any]] = {"dataset": lambda: dataset}
        # Whether each report calls the bound function for the state; None until known.
        self._gets_state: bool | None = None
        self._gets_metrics = True
        self._previous = 0
        self._began_at: int | None = None
        self._last: CompletedStep | None = None
        self._first_state: training_start.FirstState | None = None
        self._begin_types: training_start.BeginTypes | None = None
        self._consumption = step_counter.Consumption()

    # ---- in the loop -----------------------------------------------------------------

    def bind(
        self,
        *,
        state: Callable[[], PyTree] | None = None,
        dataset: Callable[[], Any] | None = None,
        metrics: Callable[[], Any] | None = None,
        each_step: bool = True,
    ) -> None:
        """Sets functions that return the values to save.

        For loops that pass only the step, as `hook(step)`.

        Args:
            state: A function without arguments that returns the state, such as
                `lambda: state`. Each save calls it and, with `save_last`, each step, so
                that the end saves the last reported step in spite of later changes. A
                `TrainState`, or another frozen dataclass or named tuple with its own
                `step`, is read only at the end, and saved if its `step` agrees.
            dataset: A function that returns the iterator.
            metrics: A function that returns the metrics; with `save_last`, also called
                each step. A metric collection is computed only for a save.
            each_step: Whether `state` and `metrics` may be called at each step. Pass
                False for slow functions: the end then saves only a state whose own step
                counter agrees, and its metrics if no later step was reported.
        """
        self._getters |= arguments.list_getters(
            state=state, dataset=dataset, metrics=metrics
        )
        self._gets_state = None if each_step else False
        self._gets_metrics = each_step

    def __call__(
        self,
        step: int,
        state: PyTree | float | None = None,
        *,
        metrics: Any = None,
        dataset: Any = None,
        force: bool = False,
        **others: Any,
    ) -> bool:
        """Saves the step if a trigger fires.

        Call this after every step, so that the end can save the last step.

        Args:
            step: The step just completed (or its index, see `step_is`), as a Python
                number: a number on a device would block until computed.
            state: The state to save; by default from `bind`. A number is taken for the
                time in clu's call `hook(step, t)` and ignored; if a state is bound, so
                is an array of a single number without axes.
            metrics: Numbers by name, or a clu metric collection. Read only for a save.
            dataset: Replaces the iterator passed to the constructor.
            force: Whether to save without a trigger.
            **others: Other keywords, accepted and ignored only together with the time
                `t`, as passed by clu's `PeriodicCallback`.

        Returns:
            True if this call has saved.

        Raises:
            OptionError: An argument is unknown.
            CheckpointError: This save cannot begin, or the previous save failed.
            SystemExit, KeyboardInterrupt: A signal has asked the program to stop, and
                the step is saved.
        """
        if others:
            arguments.check_extra(others)
        completed = step_counter.to_completed(step, self._offset)
        if arguments.is_time(step, state, is_bound="state" in self._getters):
            state = None
        return self._after(completed, state, metrics, dataset, force)

    def on_step(self, info: Any, force: bool = False) -> bool:
        """Saves the step if a trigger fires, for loops that pass an object per step.

        Args:
            info: Object with the attributes `state`, and `next_step` (completed steps)
                or `step` (index of the last step); optional: `metrics` or `loss`.
            force: Whether to save without a trigger.
        """
        has_step = hasattr(info, "next_step") or hasattr(info, "step")
        if not has_step or not hasattr(info, "state"):
            raise errors.OptionError(
                "the method on_step takes an object with the attributes next_step and"
                f" state, got {_util.arguments.describe(info)}: with a step and a"
                " state, call the callback itself, on_step(step, state)"
            )
        step, offset = getattr(info, "next_step", None), 0
        if step is None:
            step, offset = info.step, 1
        metrics = getattr(info, "metrics", None)
        loss = getattr(info, "loss", None)
        if metrics is None and loss is not None:
            metrics = {"loss": loss}
        completed = step_counter.to_completed(step, offset)
        return self._after(completed, info.state, metrics, None, force)

    def should_stop(self) -> bool:
        """Returns True if a signal has asked the program to stop.

        For long work between two steps: end the work, and call the callback with the
        present step. All processes must call this at the same places.
        """
        return self._preemption.is_requested()

    def _after(
        self, step: int, state: PyTree, metrics: Any, dataset: Any, force: bool
    ) -> bool:
        """Saves the completed step if due; returns True after a save."""
        interval = self._interval
        if interval is None:
            return self._save_if_due(step, state, metrics, dataset, force)
        if (choice := interval.end_step()) is not None:
            self.checkpointer.events.emit("scheduled", step, **choice._asdict())
            _log.info("%s", choice.reason)
        try:
            return self._save_if_due(step, state, metrics, dataset, force)
        finally:
            interval.begin_step()

    def _save_if_due(
        self, step: int, state: PyTree, metrics: Any, dataset: Any, force: bool
    ) -> bool:
        self.checkpointer.events.deliver(step - self._offset)
        values = {"state": state, "metrics": metrics, "dataset": dataset}
        completed = CompletedStep(step, values, self._getters)
        if self._save_last:
            self._keep_values(completed)
        if self._last is None or step < self._last.step:
            self._check_beginning(completed, is_forced=force)
        time_is_up, notice = self._preemption.agree(self._triggers)
        due = self._triggers.due(step, self._previous, time_is_up=time_is_up)
        if force:
            due = Due("forced")
        self._previous, self._last = step, completed
        if notice is not None and not self._preemption.is_handled:
            has_saved = self._preemption.save(completed, notice, self._save)
            if self._preemption.exits:
                self._last = None
                self._end()
                self._preemption.exit_program(notice)
            return has_saved
        self.checkpointer.raise_if_failed()
        if due is None:
            return False
        return self._save(completed, temporary=due.temporary and self._temporary)

    def _keep_values(self, completed: CompletedStep) -> None:
        """Keeps the values of a step for a save at the end of the loop."""
        completed.keep_values(
            self._last,
            get_state=self._gets_state is not False,
            get_metrics=self._gets_metrics,
        )
        if self._gets_state is None and completed.is_bound:
            has_counter = self._check_step and completed.has_own_counter()
            self._gets_state = not has_counter
            if has_counter:
                completed.release_state()

    def _check_beginning(self, completed: CompletedStep, *, is_forced: bool) -> None:
        """Checks at the first call that saves will succeed and do no harm."""
        self._start()
        ckpt = self.checkpointer
        self._session.check_writable("save")
        self._previous = training_start.check(
            ckpt, completed.step, self._began_at, again=self._last is not None
        )
        _run.metrics.as_metrics(completed.metrics())
        state, dataset = completed.get("state"), completed.get("dataset")
        if self._check_step:
            step_counter.check(state, completed.step, offset=self._offset)
            # A forced save of a converted state is intended.
            if self._first_state is not None and not is_forced:
                first, self._first_state = self._first_state, None
                first.check_counted(state, completed.step)
        if self._begin_types is not None:
            self._begin_types.check(ckpt, state)
        if completed.fault:
            _log.warning(
                "the last step will not be saved at the end unless it is due: the state"
                " %s. Pass force=True with the last step",
                completed.fault,
            )
        if self._preflight:
            json, only_warn = self._json(completed.step), self._preflight == "warn"
            preflight = training_preflight.check(
                ckpt, state, dataset, json, only_warn=only_warn
            )
            if preflight is not None:
                self._preemption.expect(preflight.total_secs)
        if self._consumption.wants:
            self._consumption.note(completed.step, datasets.position(dataset))

    def _start(self) -> None:
        """Starts watching for signals and for the end of the checkpointer."""
        self._session.attach(self)
        self._session.saves.settings.callback = self._triggers.settings()
        subscribe = self.checkpointer.events.subscribe
        self._subscribed += [sink for sink in self._sinks if subscribe(sink)]
        _begun.add(self)
        self._preemption.begin()

    def _save(
        self,
        completed: CompletedStep,
        *,
        temporary: bool = False,
        is_bare: bool = False,
    ) -> bool:
        """Saves a step; `is_bare`, without metrics and JSON, and their checks."""
        step = completed.step
        if self._session.saves.has_saved(step):
            self._skip(step, "this run has already saved or restored it")
            return False
        state, dataset = completed.get("state"), completed.get("dataset")
        if not is_bare:
            if self._check_step:
                step_counter.check(state, step, offset=self._offset)
            if self._begin_types is not None:
                self._begin_types.check(self.checkpointer, state)
            if self._consumption.wants:
                self._consumption.note(step, datasets.position(dataset))
        began = self._clock()
        self.last_save = self.checkpointer.save(
            step,
            state,
            metrics=None if is_bare else completed.metrics(),
            dataset=dataset,
            json=None if is_bare else self._json(step),
            # Steps newer than the step restored by `restore_or_init` are damaged.
            on_exists="error" if self._began_at is None else "overwrite",
            temporary=temporary,
        )
        self._preemption.note_save(self.last_save)
        if self._interval is not None:
            self._interval.note_save(self.last_save, self._clock() - began)
        self._triggers.restart_clock()
        return True

    def _skip(self, step: int, reason: str) -> None:
        self.checkpointer.events.emit("skipped", step, reason=reason)

    # ---- beginning and ending --------------------------------------------------------

    def restore_or_init(
        self,
        state: PyTree,
        *,
        source: PathLike | None = None,
        source_step: int | None = None,
        source_map: str | Sequence[Transform] = (),
        source_transforms: Sequence[Transform] = (),
        dataset: Any = None,
        missing: Literal["error", "init"] = "error",
        unused: Literal["warn", "error", "ignore"] | None = None,
        optimizer: Literal["match", "exact", "reinit"] = "reinit",
    ) -> tuple[PyTree, int]:
        """Returns the newest checkpoint; else `source`, transformed; else `state`.

        A restarted run continues from its own newest checkpoint without transforms, so
        `source_map` and `source_transforms` apply only once. Every leaf of the run's
        own checkpoint comes back, also where the state has None, an empty container or
        no such key of a mapping, or an error names the leaves that have no place.

        ```python
        state, start = on_step.restore_or_init(
            state, source="Llama-3.2-1B", source_map="auto"
        )
        ```

        Args:
            state: Initial state of the training. Abstract leaves suffice if there is a
                checkpoint.
            source: Starting point of a new run: a checkpoint in any format, or a run
                directory. It must exist if this run has no checkpoint yet.
            source_step: Step of a run directory; by default the newest.
            source_map: The map from a published model to the state: `"auto"` finds it
                by the model's `config.json` and the leaves of the state, the name of a
                family such as `"llama"` also asserts the family, and a list of
                transforms is a map of your own; see `flaxckpt.maps`.
            source_transforms: Changes to apply to the source, after the map; see
                `flaxckpt.transforms`.
            dataset: Replaces the iterator passed to the constructor. It is moved to the
                saved position; wrap it in prefetchers only after this call. A source's
                dataset is not restored.
            missing: Treatment of leaves that the source lacks; see `load`.
            unused: Treatment of leaves that only the checkpoint has: `warn` and
                `ignore` leave them out, and `error` raises an error. By default, a
                source's are left out with a warning, and the run's own come back;
                leaves of a transform that the optimizer no longer has are left out with
                a warning.
            optimizer: How to find optimizer leaves in the source; see `load`. By
                default, the optimizer and the step counter are initialized anew;
                `match` continues the optimizer of the source, and its steps.

        Returns:
            The state, and the number of completed steps: 0 for `state`, and for a
            source with a new optimizer. A run that continues the optimizer of a source
            begins at the value of the step counter; without a counter, at the source's
            step, or, of a source without a step number, at the count of its optimizer.
            The counter is `step` beside the optimizer, else at the top of the state.

        Raises:
            CheckpointError: There are checkpoints, but none fits.
        """
        _state.flax_state.check_state(state)
        if isinstance(state, str | os.PathLike):
            raise errors.OptionError(
                f"wanted an initial state, got {state!r:.80}: pass a checkpoint to"
                " begin from as source="
            )
        self._start()
        for trainer in self._session.trainers:
            if trainer is not self:
                trainer.give_way()
        if dataset is not None:
            self._getters["dataset"] = lambda: dataset
        dataset = self._getters["dataset"]()
        restored, step = training_start.restore_or_init(
            self.checkpointer,
            state,
            dataset=dataset,
            source=source,
            source_step=source_step,
            source_map=source_map,
            options=RestoreOptions(
                missing=missing,
                unused=unused,
                optimizer=optimizer,
                transforms=source_transforms,
            ),
        )
        with contextlib.suppress(Exception):  # a save reports the error
            self._begin_types = training_start.BeginTypes(state, unused)
        self._consumption.begin(step, datasets.position(dataset))
        self._began_at = self.checkpointer.restored_step
        self._previous, self._last = step, None
        if self._check_step:
            with contextlib.suppress(TypeError, ValueError):  # a save reports the error
                self._first_state = training_start.FirstState(restored, step)
            if self._began_at is not None:
                training_start.warn_of_other_numbers(self.checkpointer, restored, step)
        self._triggers.restart_clock()
        return restored, step

    def add_metrics(self, step: int, metrics: Any) -> None:
        """Adds metrics to a committed step, such as from an evaluation after the save.

        Args:
            step: The step in the count of the loop; see `step_is`.
            metrics: Numbers by name, or a clu metric collection.
        """
        self.checkpointer.add_metrics(
            step_counter.to_completed(step, self._offset),
            completed_step.metric_values(metrics) or {},
        )

    def check_resume(
        self,
        state: PyTree,
        step_fn: Callable[..., Any],
        *,
        dataset: Any = None,
        fresh: PyTree | None = None,
    ) -> None:
        """Checks that a restored run takes the same step as this run, bit for bit.

        Takes a step, saves the new state beside the steps, restores it into `fresh` as
        a restart does, takes a step from both, and compares all leaves: parameters,
        optimizer, random keys, and the batch. `state` is not changed, and the dataset
        returns to its position. Call this once before a long run; it takes the time of
        two saves and the memory of three states.

        Args:
            state: A state of the training.
            step_fn: `step_fn(state, batch)` returns the new state, alone or beside
                other values to compare, or changes the state in place and returns None.
                Without a dataset, it is called without a batch.
            dataset: Replaces the iterator passed to the constructor.
            fresh: Abstract or initialized state to restore into, as made by a new
                process; by default `state`.

        Raises:
            ResumeMismatchError: Some leaves differ; all are named.
            RestoreMismatchError: `fresh` has other types than the state after a step,
                so a restart would fail.
        """
        self._session.check_writable("check a resume")
        dataset = self._getters["dataset"]() if dataset is None else dataset
        resume_check.check(
            self.checkpointer, state, step_fn, dataset=dataset, fresh=fresh
        )

    def wait(self) -> None:
        """Waits for the save in progress."""
        self.checkpointer.wait()

    def close(self) -> None:
        """Saves the last step if `save_last` is set, and waits for all saves.

        Raises:
            CheckpointError: A save has failed.
            SystemExit, KeyboardInterrupt: A signal arrived after the last call.
        """
        with contextlib.ExitStack() as last:  # runs all, even if some raise errors
            last.callback(self._session.settle)
            last.callback(self.after_close)
            last.callback(self.checkpointer.wait)
            last.callback(self.before_close)

    def before_close(self) -> None:
        """Saves the last step; called first when the checkpointer closes."""
        last, self._last = self.step_to_save(), None
        if last is None:
            return
        if self._session.saves.has_saved(last.step):
            if self._temporary:
                self.checkpointer.wait()
                self.checkpointer.make_permanent(last.step)
            return
        reason = last.why_gone(check_step=self._check_step, offset=self._offset)
        if reason:
            _log.warning("the last step, %d, is not saved: %s", last.step, reason)
            self._skip(last.step, reason)
            return
        position = datasets.position(last.get("dataset"))
        self._consumption.check_end(last.step, position)
        with last.reported_values():
            self._save(last)

    def step_to_save(self) -> CompletedStep | None:
        """Returns the last step, if the end of the loop saves it."""
        last = self._last
        is_due = self._save_last and last is not None and last.step > 0
        return last if is_due else None

    def after_close(self) -> None:
        """Restores signal handlers; called by the checkpointer after all saves."""
        preemption, notice = self._preemption, self._preemption.notice
        self._end()
        if notice is not None and not preemption.is_handled and preemption.exits:
            preemption.is_handled = True
            preemption.report(self._previous, notice, "is the last of the run")
            preemption.exit_program(notice)

    def abandon(self, error: BaseException) -> None:
        """Stops saving; called by the checkpointer after an error in a `with` block."""
        last, saves = self._last, self._session.saves
        if last is not None and not saves.has_saved(last.step):
            reason = f"the with block raised {type(error).__name__}"
            self._skip(last.step, reason)
            if isinstance(error, SystemExit):  # ends the program without a word
                _log.warning("the last step, %d, is not saved: %s", last.step, reason)
        self.give_way()

    _close_after = abandon

    def give_way(self) -> None:
        """Stops saving without a last save, such as for a callback that takes over."""
        self._last = None
        self._end()

    def _end(self) -> None:
        self._preemption.end()
        self._session.detach(self)
        while self._subscribed:
            self.checkpointer.events.unsubscribe(self._subscribed.pop())
        _begun.discard(self)


_begun: weakref.WeakSet[CheckpointCallback] = weakref.WeakSet()
"""Callbacks that have started and are not closed."""


@atexit.register
def _warn_of_lost_steps() -> None:
    for callback in list(_begun):
        last = callback.step_to_save()
        saves = session_of(callback.checkpointer).saves
        if last is not None and not saves.has_saved(last.step):
            _log.warning(
                "the program ends without saving step %d: close the Checkpointer or the"
                " CheckpointCallback, preferably with a with block",
                last.step,
            )
