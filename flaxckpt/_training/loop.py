"""What a callback does in a training loop: saves when it is time, and at the end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from flaxckpt import _run, _state, _util, datasets, errors
from flaxckpt._checkpoint.handle import SaveHandle
from flaxckpt._run.checkpointer import Checkpointer, session_of
from flaxckpt._training import held
from flaxckpt._training import preflight as training_preflight
from flaxckpt._training import start as training_start
from flaxckpt._training.completed_step import Completed
from flaxckpt._training.preemption import Stopping
from flaxckpt._training.signals import Grace, Notice
from flaxckpt._training.triggers import Due, Triggers
from flaxckpt._types import PyTree

_log = logging.getLogger(__name__)


class Hook:
    """Saves steps of one loop; its checkpointer tells it of the end, as a `Trainer`.

    Args:
        checkpointer: Where to save.
        triggers: When.
        stopping: What may tell the program to stop.
        grace: How much time is left then.
        temporary: Whether saves that only the time called for are.
        save_last: Whether the last step is saved at the end.
        offset: How many steps more are completed than the loop says.
        check_step: Whether the state's own number of steps is compared.
        preflight: Whether the first call tries out a save; `warn` only tells.
        sinks: Who is told of events from the beginning to the end.
        dataset: The iterator that is saved along with the state.

    Attributes:
        last_save: The last save of its own.
        getters: Name -> function that gives what a loop does not pass.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        triggers: Triggers,
        stopping: Stopping,
        grace: Grace,
        *,
        temporary: bool,
        save_last: bool,
        offset: int,
        check_step: bool,
        preflight: Literal["warn"] | bool,
        sinks: Sequence[Any],
        dataset: Any,
    ) -> None:
        self.last_save: SaveHandle | None = None
        self.getters: dict[str, Callable[[], Any]] = {"dataset": lambda: dataset}
        self._asks: bool | None = None  # for the bound state, at each report
        self._asks_metrics = True
        self._checkpointer = checkpointer
        self._session = session_of(checkpointer)
        self._triggers = triggers
        self._stopping = stopping
        self._grace = grace
        self._temporary = temporary
        self._save_last = save_last
        self._offset = offset
        self._check_step = check_step
        self._preflight = preflight
        self._sinks = _run.events.sinks.listed(sinks)
        self._subscribed: list[Any] = []
        self._seen = 0
        self._began_at: int | None = None
        self._last: Completed | None = None
        self._restored: tuple[int, held.Trace] | None = None
        self._consumption = _state.step_counter.Consumption()
        for sink in self._sinks:
            _run.events.sinks.check(sink)

    # ---- in the loop --------------------------------------------------------------

    def after(self, completed: int, given: Mapping[str, Any], *, force: bool) -> bool:
        """Saves a completed step if it is time; says whether it did.

        Args:
            completed: How many steps are completed.
            given: `state`, `metrics` and `dataset`, each None if it was not passed.
            force: Save, whatever the triggers say.

        Raises:
            CheckpointError: This save cannot begin, or the one before it failed.
            SystemExit, KeyboardInterrupt: The program was told to stop.
        """
        self._checkpointer.events.deliver(completed - self._offset)
        seen = Completed(completed, given, self.getters)
        self._hold(seen)
        if self._last is None or completed < self._last.step:
            self._check_beginning(seen, is_forced=force)
        time_is_up, notice = self._stopping.agreed(self._triggers)
        due = self._triggers.due(completed, self._seen, time_is_up=time_is_up)
        if force:
            due = Due("forced")
        self._seen, self._last = completed, seen
        if notice is not None and not self._stopping.is_heeded:
            return self._stop(seen, notice)
        self._checkpointer.raise_if_failed()
        if due is None:
            return False
        return self._save(seen, temporary=due.temporary and self._temporary)

    def bind(
        self, getters: Mapping[str, Callable[[], Any]], *, each_step: bool
    ) -> None:
        """See `CheckpointCallback.bind`."""
        self.getters |= getters
        self._asks = None if each_step else False
        self._asks_metrics = each_step

    def _hold(self, seen: Completed) -> None:
        """Keeps the parts of a step that the end of the loop may save."""
        if not self._save_last:
            return
        seen.hold(
            self._last,
            ask=self._asks is not False,
            ask_metrics=self._asks_metrics,
        )
        if self._asks is None and seen.is_bound:
            self._asks = not (self._check_step and seen.says_itself())
            if not self._asks:
                seen.let_state_go()

    def _check_beginning(self, seen: Completed, *, is_forced: bool) -> None:
        """What would fail at the first save, or do harm there, fails at the first call.

        Raises:
            CheckpointExistsError: The directory has steps of another run.
            OptionError: The steps are counted from the beginning again.
            CheckpointError: As for `save`.
        """
        self.start()
        ckpt = self._checkpointer
        self._session.check_writable("save")
        self._seen = training_start.check(
            ckpt, seen.step, self._began_at, again=self._last is not None
        )
        _run.metrics.as_metrics(seen.metrics())
        state, dataset = seen.get("state"), seen.get("dataset")
        if self._check_step:
            _state.step_counter.check(state, seen.step, offset=self._offset)
            if not is_forced:  # else it may be meant, after the state was moved
                self._check_counted(state, seen.step)
        if seen.fault:
            _log.warning(
                "the last step will not be saved at the end unless it is due: the state"
                " has %s. Pass force=True with the last step",
                seen.fault,
            )
        if self._preflight:
            found = training_preflight.check(
                ckpt, state, dataset, only_warn=self._preflight == "warn"
            )
            if found is not None and self._grace.save_secs is None:
                self._grace.save_secs = found.total_secs
        if self._consumption.wants:
            self._consumption.note(seen.step, datasets.position(dataset))

    def _check_counted(self, state: PyTree, step: int) -> None:
        """Raises OptionError if the restored step is reported again with another state.

        States that count their steps are compared by that.

        Raises:
            OptionError: The loop counts from 0.
        """
        restored, self._restored = self._restored, None
        if restored is None or restored[0] != step or _state.step_counter.found(state):
            return
        if restored[1].has_changed(state):
            raise errors.OptionError(
                f"the run began with {step} completed steps, and the first step of the"
                f" loop is called {step}, too, though the state has changed: each"
                " restart would repeat a step. If the loop counts from 0, pass"
                f" step_is='index'; else let it run over range({step + 1}, total + 1),"
                " that is from start + 1. If no step was trained yet, pass"
                " check_step=False"
            )

    def start(self) -> None:
        """From here on, the program's end is ours to arrange."""
        self._session.attach(self)
        subscribe = self._checkpointer.events.subscribe
        self._subscribed += [sink for sink in self._sinks if subscribe(sink)]
        _begun.add(self)
        self._stopping.begin()

    def _save(self, seen: Completed, *, temporary: bool = False) -> bool:
        step = seen.step
        if self._session.saves.has_saved(step):
            self._skip(step, "this run has saved or restored it already")
            return False
        state, dataset = seen.get("state"), seen.get("dataset")
        if self._check_step:
            _state.step_counter.check(state, step, offset=self._offset)
        if self._consumption.wants:
            self._consumption.note(step, datasets.position(dataset))
        self._note_duration()
        self.last_save = self._checkpointer.save(
            step,
            state,
            metrics=seen.metrics(),
            dataset=dataset,
            on_exists=self._on_exists,
            temporary=temporary,
        )
        self._triggers.restart_clock()
        return True

    @property
    def _on_exists(self) -> Literal["error", "overwrite"]:
        # What `restore_or_init` went back behind is damaged.
        return "error" if self._began_at is None else "overwrite"

    def _skip(self, step: int, reason: str) -> None:
        self._checkpointer.events.emit("skipped", step, reason=reason)

    def _note_duration(self) -> None:
        """Remembers how long the last save took, for when there is little time."""
        if self.last_save is not None and self.last_save.done():
            with contextlib.suppress(errors.CheckpointError):  # that was told already
                self._grace.save_secs = self.last_save.wait().total_secs

    # ---- being told to stop -------------------------------------------------------

    def _stop(self, seen: Completed, notice: Notice) -> bool:
        """Saves as much as there is time for, waits for it, and leaves.

        Raises:
            SystemExit, KeyboardInterrupt: When all that could be saved is durable.
        """
        self._stopping.is_heeded = True
        try:
            self._checkpointer.wait()
        except errors.CheckpointError as error:
            _log.error("a save has failed, and another is tried: %s", error)
        what, has_saved = self._save_in_time(seen, notice)
        self._checkpointer.wait()
        self._tell_of_stop(seen.step, notice, what)
        if self._stopping.leaves:
            self._last = None
            self._end()
            self._stopping.leave(notice)
        return has_saved

    def _save_in_time(self, seen: Completed, notice: Notice) -> tuple[str, bool]:
        """Begins the save that there is time for; says which."""
        if self._session.saves.has_saved(seen.step):
            return "was saved already", False
        self._note_duration()
        # By the first process's clock: all of them save the same.
        if not _util.processes.gather_flags([self._grace.is_enough(notice)])[0][0]:
            path = self._checkpointer.save_params_only(seen.step, seen.get("state"))
            if path is not None:
                return f"is saved without its optimizer, as {path}", False
        try:
            return "is saved", self._save(seen)
        except errors.OptionError as error:
            # A wrong step or metric must not cost what there is no more time to mend.
            _log.error("saved all the same, without metrics: %s", error)
            self.last_save = self._checkpointer.save(
                seen.step,
                seen.get("state"),
                dataset=seen.get("dataset"),
                on_exists=self._on_exists,
            )
            return "is saved", True

    def _tell_of_stop(self, step: int, notice: Notice, what: str) -> None:
        at, events = step - self._offset, self._checkpointer.events
        self._stopping.tell(events, step, notice, what, at=at)

    # ---- beginning and ending -----------------------------------------------------

    def restore_or_init(
        self, state: PyTree, dataset: Any, **source: Any
    ) -> tuple[PyTree, int]:
        """See `CheckpointCallback.restore_or_init`."""
        _state.flax_state.check_state(state)
        if isinstance(state, str | os.PathLike):
            raise errors.OptionError(
                f"wanted a state to begin with, got {state!r:.80}: a checkpoint to"
                " begin from is passed as source="
            )
        self.start()
        for trainer in self._session.trainers:
            if trainer is not self:
                trainer.give_way()
        if dataset is not None:
            self.getters["dataset"] = lambda: dataset
        dataset = self.getters["dataset"]()
        restored, step = training_start.restore_or_init(
            self._checkpointer, state, dataset=dataset, **source
        )
        self._consumption.begin(step, datasets.position(dataset))
        self._began_at = self._checkpointer.restored_step
        self._seen, self._last = step, None
        if self._check_step:
            self._note_restored(restored, step)
        self._triggers.restart_clock()
        return restored, step

    def _note_restored(self, state: PyTree, step: int) -> None:
        """Remembers the first state of the loop, and compares its step counter."""
        with contextlib.suppress(TypeError, ValueError):  # a save will say more of it
            self._restored = step, held.Trace(state)
        if self._began_at is not None and (
            counters := _state.step_counter.mismatch(state, step)
        ):
            _log.warning(
                "step %d of %s is restored, and %s: its steps were numbered otherwise,"
                " such as from 0. Begin the loop where the state says, or pass"
                " check_step=False if it counts something else",
                step,
                self._checkpointer.directory,
                counters,
            )

    def before_close(self) -> None:
        """What the checkpointer calls first when it is closed: saves the last step."""
        last, self._last = self._to_be_saved(), None
        if last is None:
            return
        if self._session.saves.has_saved(last.step):
            if self._temporary:
                self._checkpointer.wait()
                self._checkpointer.make_permanent(last.step)
            return
        reason = last.why_gone(check_step=self._check_step, offset=self._offset)
        if reason:
            _log.warning("the last step, %d, is not saved: %s", last.step, reason)
            self._skip(last.step, reason)
            return
        position = datasets.position(last.get("dataset"))
        self._consumption.check_end(last.step, position)
        with last.as_reported():
            self._save(last)

    def _to_be_saved(self) -> Completed | None:
        """The last step, if it is to be saved at the end."""
        last = self._last
        is_due = self._save_last and last is not None and last.step > 0
        return last if is_due else None

    def after_close(self) -> None:
        """What the checkpointer calls when all is durable: signals are put back."""
        stopping, notice = self._stopping, self._stopping.notice
        self._end()
        if notice is not None and not stopping.is_heeded and stopping.leaves:
            stopping.is_heeded = True
            self._tell_of_stop(self._seen, notice, "is the last of the run")
            stopping.leave(notice)

    def abandon(self, error: BaseException) -> None:
        """What the checkpointer calls when its block ends by an error."""
        if self._last is not None and not self._session.saves.has_saved(
            self._last.step
        ):
            self._skip(self._last.step, f"the block ended by {type(error).__name__}")
        self.give_way()

    def give_way(self) -> None:
        """Saves nothing more of what was seen: another callback goes on, or nobody."""
        self._last = None
        self._end()

    def _end(self) -> None:
        self._stopping.end()
        self._session.detach(self)
        while self._subscribed:
            self._checkpointer.events.unsubscribe(self._subscribed.pop())
        _begun.discard(self)

    def tell_if_lost(self) -> None:
        """Says at the program's end that the last step is not saved."""
        last = self._to_be_saved()
        if last is not None and not self._session.saves.has_saved(last.step):
            _log.warning(
                "the program ends, and step %d is not saved: close the Checkpointer or"
                " the CheckpointCallback, best by a with block",
                last.step,
            )


_begun: weakref.WeakSet[Hook] = weakref.WeakSet()
"""Those that have begun and were not closed."""


@atexit.register
def _tell_of_lost_steps() -> None:
    for hook in list(_begun):
        hook.tell_if_lost()
