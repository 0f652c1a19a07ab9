"""A trainer's hook: when to save, where to begin, and how to end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import jax

from flaxckpt import (
    _beginning,
    _counters,
    _measured,
    _multihost,
    _preflight,
    _resume,
    _sinks,
    datasets,
    errors,
)
from flaxckpt._checkpointer import Checkpointer
from flaxckpt._handle import SaveHandle
from flaxckpt._preemption import Grace, Notice, Watch
from flaxckpt._triggers import Due, Triggers
from flaxckpt._types import PathLike, PyTree
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a failure that goes away if it is tried again."""


class _Seen:
    """A step that is completed, and where to get what it has to save."""

    def __init__(
        self, step: int, given: Mapping[str, Any], getters: Mapping[str, Any]
    ) -> None:
        self.step = step
        self._given = given
        self._getters = getters
        if given["state"] is None and "state" not in getters:
            raise errors.OptionError(
                "there is no state to save: call on_step(step, state), or tell"
                " where it is with on_step.bind(state=lambda: state)"
            )

    def get(self, name: str) -> Any:
        """What was passed, or else what was bound gives now."""
        value = self._given[name]
        getter = self._getters.get(name)
        return getter() if value is None and getter is not None else value

    def is_gone(self, *, check_step: bool) -> str:
        """Why the state is not that of the step any more; empty if it still is."""
        leaves = jax.tree.leaves(self._given["state"])
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            return "its arrays were donated to a step that was not reported"
        try:
            if check_step:
                _counters.check(self.get("state"), self.step)
        except errors.OptionError as error:
            return f"steps have followed that were not reported: {error}"
        return ""


class CheckpointCallback:
    """Saves at the right steps of a training loop, and restores at its beginning.

    It is called after every step, as CLU's periodic actions are. Triggers combine by
    "or". Leaving the `with` block of the checkpointer, or of the callback, saves the
    last step too.

    ```python
    on_step = CheckpointCallback(checkpointer, every_steps=1000, dataset=batches)
    state, start = on_step.restore_or_init(state)
    for step in range(start + 1, total + 1):
        state, metrics = train_step(state, next(batches))
        on_step(step, state, metrics=metrics)
    ```

    From `restore_or_init`, or else the first call, until it is closed, SIGTERM, SIGUSR1
    and Ctrl-C do not end the program at once: the next call saves, waits until the
    checkpoint is durable, and then leaves by `SystemExit(exit_code)`, or by
    `KeyboardInterrupt` after Ctrl-C. Started again, the run goes on from there.

    Args:
        checkpointer: Where to save.
        every_steps: Saves whenever a multiple of this is reached or passed.
        every_secs: Saves when so much time has gone by since the last save.
        temporary: Whether saves that only the time called for are deleted as soon as
            there is a newer permanent one.
        on_steps: Saves when one of these steps is reached or passed.
        on_preemption: Whether signals, and jax's preemption service where it is
            enabled, are watched for.
        grace_secs: How long the process lives after a signal. If the whole state will
            not be saved by then, the optimizer is left out: see `params_only`.
        exit_code: What the program leaves with when it was told to stop, so that the
            one who started it can tell that it wants to go on. None: it does not
            leave, and the loop asks `should_stop()`.
        save_first: Whether the first step of a new run is saved.
        save_last: Whether closing saves the last step, if it is not saved yet.
        dataset: The iterator that is saved and restored along with the state.
        step_is: Whether the loop counts `completed` steps or passes the `index` of
            the step just done, which is one less. Checkpoints count completed steps.
        check_step: Whether a save is refused if the state counts its steps, as a
            `TrainState` does, and has another number of them.
        preflight: Whether the first call tries a save without arrays and tests
            the directory and its free space; `warn` only tells what it finds.
        sinks: Who is told of saves, beside those of the checkpointer.
        clock: Seconds, for `every_secs` and `grace_secs`.
    """

    __name__ = "checkpoint"  # clu's PeriodicCallback asks its function for a name

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        every_steps: int | None = None,
        every_secs: float | None = None,
        temporary: bool = False,
        on_steps: Collection[int] = (),
        on_preemption: bool = True,
        grace_secs: float | None = None,
        exit_code: int | None = REQUEUE_EXIT_CODE,
        save_first: bool = False,
        save_last: bool = True,
        dataset: Any = None,
        step_is: Literal["completed", "index"] = "completed",
        check_step: bool = True,
        preflight: Literal["warn"] | bool = True,
        sinks: Sequence[Any] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if step_is not in ("completed", "index"):
            raise errors.OptionError(
                f"step_is must be 'completed' or 'index', got {step_is!r}"
            )
        if preflight not in (True, False, "warn"):
            raise errors.OptionError(
                f"preflight must be True, False or 'warn', got {preflight!r}"
            )
        if temporary and every_secs is None:
            raise errors.OptionError(
                "temporary=True is for the saves that every_secs calls for: pass it too"
            )
        self.checkpointer = checkpointer
        self.last_save: SaveHandle | None = None
        self._triggers = Triggers(
            every_steps=every_steps,
            every_secs=every_secs,
            on_steps=on_steps,
            save_first=save_first,
            clock=clock,
        )
        self._temporary = temporary
        self._watch = Watch(clock) if on_preemption else None
        self._grace = Grace(grace_secs, clock)
        self._exit_code = exit_code
        self._save_last = save_last
        self._offset = 1 if step_is == "index" else 0
        self._check_step = check_step
        self._preflight = preflight
        self._clock = clock
        self._getters: dict[str, Callable[[], Any]] = {"dataset": lambda: dataset}
        self._seen = 0
        self._began_at: int | None = None
        self._sinks = tuple(sinks)
        self._subscribed: list[Any] = []
        self._last: _Seen | None = None
        self._has_stopped = False
        self._consumption = _counters.Consumption()
        for sink in self._sinks:
            _sinks.check(sink)
        if self._watch is not None:
            weakref.finalize(self, self._watch.end)

    # ---- in the loop --------------------------------------------------------------

    def bind(
        self,
        *,
        state: Callable[[], PyTree] | None = None,
        dataset: Callable[[], Any] | None = None,
        metrics: Callable[[], Any] | None = None,
    ) -> None:
        """Tells where to get what to save, for loops that call `h(step)` only.

        Each is a function without arguments, called when a save needs it.
        """
        given = {"state": state, "dataset": dataset, "metrics": metrics}
        self._getters |= {name: get for name, get in given.items() if get is not None}

    def __call__(
        self,
        step: int,
        state: PyTree | None = None,
        *,
        metrics: Any = None,
        dataset: Any = None,
        force: bool = False,
        **ignored: Any,
    ) -> bool:
        """Saves if it is time.

        Call it after every step, so that the last one can be saved at the end.

        Args:
            step: The step that was just completed (or its index, see `step_is`). A
                Python number: one on a device is waited for.
            state: What to save; taken from `bind` if it is not given.
            metrics: Numbers by name, or a clu metric collection. Looked at only when
                a save happens.
            dataset: Instead of the iterator given at the beginning.
            force: Save, whatever the triggers say.
            **ignored: Whatever else a loop passes to its hooks, such as `t`.

        Returns:
            Whether it saved.

        Raises:
            CheckpointError: This save cannot begin, or the one before it failed.
            SystemExit, KeyboardInterrupt: A signal has told the program to stop, and
                the step is saved.
        """
        completed = _counters.whole(step) + self._offset
        return self._after(completed, state, metrics, dataset, force)

    def on_step(self, info: Any, force: bool = False) -> bool:
        """Like a call, for loops that describe a step by an object.

        Args:
            info: Has `state`, and either `next_step` (completed steps) or `step` (the
                index of the step just done); perhaps `loss`, `metrics`, too.
            force: Save, whatever the triggers say.
        """
        completed = getattr(info, "next_step", None)
        if completed is None:
            completed = _counters.whole(info.step) + 1
        metrics = getattr(info, "metrics", None)
        loss = getattr(info, "loss", None)
        if metrics is None and loss is not None:
            metrics = {"loss": loss}
        return self._after(_counters.whole(completed), info.state, metrics, None, force)

    def should_stop(self) -> bool:
        """Whether the program was told to stop, by a signal.

        For what takes long between two calls, such as an evaluation: end it, and call
        with the step at hand. Where several processes train, all of them call this at
        the same places.
        """
        if self._watch is None:
            return False
        told = self._watch.poll() is not None
        return any(row[0] for row in _multihost.gather_flags([told]))

    def _after(
        self, completed: int, state: PyTree, metrics: Any, dataset: Any, force: bool
    ) -> bool:
        self.checkpointer.events.deliver(completed - self._offset)
        given = {"state": state, "metrics": metrics, "dataset": dataset}
        seen = _Seen(completed, given, self._getters)
        if self._last is None or completed < self._last.step:
            self._check_beginning(seen)
        time_is_up, notice = self._agreed()
        due = self._triggers.due(completed, self._seen, time_is_up=time_is_up)
        if force:
            due = Due("forced")
        self._seen, self._last = completed, seen
        if notice is not None and not self._has_stopped:
            return self._stop(seen, notice)
        self.checkpointer.raise_if_failed()
        if due is None:
            return False
        return self._save(seen, temporary=due.temporary and self._temporary)

    def _check_beginning(self, seen: _Seen) -> None:
        """What would fail at the first save, or do harm there, fails at the first call.

        Raises:
            CheckpointExistsError: The directory has steps of another run.
            OptionError: The steps are counted from the beginning again.
            CheckpointError: As for `save`.
        """
        self._start()
        ckpt = self.checkpointer
        ckpt.check_writable("save")
        self._seen = _beginning.check(
            ckpt, seen.step, self._began_at, again=self._last is not None
        )
        _measured.as_metrics(_values(seen.get("metrics")))
        state, dataset = seen.get("state"), seen.get("dataset")
        if self._check_step:
            _counters.check(state, seen.step)
        if self._preflight:
            found = _preflight.check(
                ckpt, state, dataset, only_warn=self._preflight == "warn"
            )
            if found is not None and self._grace.save_secs is None:
                self._grace.save_secs = found.total_secs
        if self._consumption.wants:
            self._consumption.note(seen.step, datasets.position(dataset))

    def _start(self) -> None:
        """From here on, the program's end is ours to arrange."""
        self.checkpointer.attach(self)
        subscribe = self.checkpointer.events.subscribe
        self._subscribed += [sink for sink in self._sinks if subscribe(sink)]
        _begun.add(self)
        if self._watch is not None and self._watch.begin():
            self._has_stopped = False

    def _agreed(self) -> tuple[bool, Notice | None]:
        """Whether the time is up, and what tells to stop, the same on all processes.

        The first process's clock counts, and everybody's signals.
        """
        notice = None if self._watch is None else self._watch.poll()
        if self._watch is None and not self._triggers.has_clock:
            return False, None
        mine = [self._triggers.time_is_up(), notice is not None]
        rows = _multihost.gather_flags(mine)
        if notice is None and any(row[1] for row in rows):
            notice = Notice("a signal to another process", self._clock())
        return rows[0][0], notice

    # ---- saving -------------------------------------------------------------------

    def _save(self, seen: _Seen, *, temporary: bool = False) -> bool:
        step = seen.step
        if self.checkpointer.has_saved(step):
            self._skip(step, "this run has saved or restored it already")
            return False
        state, dataset = seen.get("state"), seen.get("dataset")
        if self._check_step:
            _counters.check(state, step)
        if self._consumption.wants:
            self._consumption.note(step, datasets.position(dataset))
        self._note_duration()
        self.last_save = self.checkpointer.save(
            step,
            state,
            metrics=_values(seen.get("metrics")),
            dataset=dataset,
            # What `restore_or_init` went back behind is damaged.
            on_exists="error" if self._began_at is None else "overwrite",
            temporary=temporary,
        )
        self._triggers.restart_clock()
        return True

    def _skip(self, step: int, reason: str) -> None:
        self.checkpointer.events.emit("skipped", step, reason=reason)

    def _note_duration(self) -> None:
        """Remembers how long the last save took, for when there is little time."""
        if self.last_save is not None and self.last_save.done():
            with contextlib.suppress(errors.CheckpointError):  # that was told already
                self._grace.save_secs = self.last_save.wait().total_secs

    # ---- being told to stop -------------------------------------------------------

    def _stop(self, seen: _Seen, notice: Notice) -> bool:
        """Saves as much as there is time for, waits for it, and leaves.

        Raises:
            SystemExit, KeyboardInterrupt: When all that could be saved is durable.
        """
        self._has_stopped = True
        try:
            self.checkpointer.wait()
        except errors.CheckpointError as error:
            _log.error("a save has failed, and another is tried: %s", error)
        what, has_saved = self._save_in_time(seen, notice)
        self.checkpointer.wait()
        self._tell_of_stop(seen.step, notice, what)
        if self._exit_code is not None:
            self._last = None
            self._end()
            self._leave(notice)
        return has_saved

    def _save_in_time(self, seen: _Seen, notice: Notice) -> tuple[str, bool]:
        """Begins the save that there is time for; says which."""
        if self.checkpointer.has_saved(seen.step):
            return "was saved already", False
        self._note_duration()
        # By the first process's clock: all of them save the same.
        if not _multihost.gather_flags([self._grace.is_enough(notice)])[0][0]:
            path = self.checkpointer.save_params_only(seen.step, seen.get("state"))
            if path is not None:
                return f"is saved without its optimizer, as {path}", False
        try:
            return "is saved", self._save(seen)
        except errors.OptionError as error:
            # A wrong step or metric must not cost what there is no more time to mend.
            _log.error("saved all the same, without metrics: %s", error)
            self.last_save = self.checkpointer.save(
                seen.step,
                seen.get("state"),
                dataset=seen.get("dataset"),
                on_exists="error" if self._began_at is None else "overwrite",
            )
            return "is saved", True

    def _tell_of_stop(self, step: int, notice: Notice, what: str) -> None:
        goes = "goes on" if self._exit_code is None else "leaves"
        _log.warning("%s: step %d %s; the program %s", notice.name, step, what, goes)
        events = self.checkpointer.events
        events.emit("preempted", step, reason=notice.name, saved=what)
        events.deliver(step - self._offset)

    def _leave(self, notice: Notice) -> None:
        if notice.is_interrupt:
            raise KeyboardInterrupt
        raise SystemExit(self._exit_code)

    # ---- beginning and ending -----------------------------------------------------

    def restore_or_init(
        self,
        state: PyTree,
        *,
        source: PathLike | None = None,
        source_step: int | None = None,
        source_transforms: Sequence[Transform] = (),
        dataset: Any = None,
        missing: Literal["error", "init"] = "error",
        unused: Literal["warn", "error", "ignore"] = "warn",
        optimizer: Literal["match", "exact", "reinit"] = "reinit",
    ) -> tuple[PyTree, int]:
        """The run's newest checkpoint; else `source`, transformed; else `state`.

        A run that is started again goes on from its own newest checkpoint, which is
        never transformed: what `source_transforms` change is changed once.

        Args:
            state: The state that training would begin with. Abstract leaves will do
                if there is a checkpoint.
            source: What a new run begins from: a checkpoint in any format, or a run
                directory. It must be there if this run has no checkpoint yet.
            source_step: Which step of a run directory; by default the newest.
            source_transforms: What to change in it first; see `flaxckpt.transforms`.
            dataset: Instead of the iterator given at the beginning. It is put where
                the saved one stood; do so before anything prefetches from it. That of
                a source is not taken.
            missing: What to do about leaves that the source lacks; see `load`.
            unused: What to do about leaves of the source that are not asked for.
            optimizer: How those of the optimizer are found in the source. By default it
                starts afresh with the new parameters, and so does the step counter
                beside it; `match` goes on where the source stood.

        Returns:
            The state, and how many steps it has completed: 0 for a fresh one, and for
            one from a source, unless its step counter was taken from there.

        Raises:
            CheckpointError: There are checkpoints, but none that fits.
        """
        self._start()
        for trainer in self.checkpointer.trainers:
            if isinstance(trainer, CheckpointCallback) and trainer is not self:
                trainer.give_way()
        if dataset is not None:
            self._getters["dataset"] = lambda: dataset
        dataset = self._getters["dataset"]()
        restored, step = _beginning.restore_or_init(
            self.checkpointer,
            state,
            _beginning.Source(
                source,
                source_step,
                source_transforms,
                missing,
                unused,
                optimizer,
            ),
            dataset=dataset,
        )
        self._consumption.begin(step, datasets.position(dataset))
        self._began_at = self.checkpointer.restored_step
        self._seen, self._last = step, None
        self._triggers.restart_clock()
        return restored, step

    def add_metrics(self, step: int, metrics: Any) -> None:
        """Adds metrics to a committed step, as of an evaluation after its save.

        Args:
            step: As the loop counts; see `step_is`.
            metrics: Numbers by name, or a clu metric collection.
        """
        self.checkpointer.add_metrics(int(step) + self._offset, _values(metrics) or {})

    def check_resume(
        self,
        state: PyTree,
        step_fn: Callable[..., Any],
        *,
        dataset: Any = None,
        fresh: PyTree | None = None,
    ) -> None:
        """Tries out whether a restored run would go on as this one does, bit for bit.

        Saves `state` beside the steps, restores it into `fresh`, takes one step from
        both, and compares all leaves: parameters, optimizer, random keys, and the
        batch. The state given is not touched, and the dataset ends where it stood. For
        once before a long run; it takes two saves' time and three states' memory.

        Args:
            state: As training has it.
            step_fn: `step_fn(state, batch)` returns the new state (with anything else
                that shall be compared), or changes the state in place and returns None.
                Without a dataset it is called without a batch.
            dataset: Instead of the iterator given at the beginning.
            fresh: What to restore into, as a new process would make it; by default
                `state` as a template.

        Raises:
            ResumeMismatchError: Something differs; all leaves that do are named.
        """
        self.checkpointer.check_writable("try out a resume")
        dataset = self._getters["dataset"]() if dataset is None else dataset
        _resume.check(self.checkpointer, state, step_fn, dataset=dataset, fresh=fresh)

    def wait(self) -> None:
        """Waits for the save under way."""
        self.checkpointer.wait()

    def close(self) -> None:
        """Saves the last step, if asked to, and waits for it.

        Raises:
            CheckpointError: A save has failed.
            SystemExit, KeyboardInterrupt: A signal came that no call has heeded.
        """
        with contextlib.ExitStack() as last:  # each is done, whatever the others raise
            last.callback(self.checkpointer.events.deliver)
            last.callback(self.after_close)
            last.callback(self.checkpointer.wait)
            last.callback(self.before_close)

    def before_close(self) -> None:
        """What the checkpointer calls first when it is closed: saves the last step."""
        last, self._last = self._last, None
        if not self._save_last or last is None or last.step == 0:
            return
        if self.checkpointer.has_saved(last.step):
            if self._temporary:
                self.checkpointer.wait()
                self.checkpointer.make_permanent(last.step)
            return
        if reason := last.is_gone(check_step=self._check_step):
            _log.warning("the last step, %d, is not saved: %s", last.step, reason)
            self._skip(last.step, reason)
            return
        self._consumption.check_end(last.step, datasets.position(last.get("dataset")))
        self._save(last)

    def after_close(self) -> None:
        """What the checkpointer calls when all is durable: signals are put back."""
        notice = None if self._watch is None else self._watch.notice
        self._end()
        if notice is not None and not self._has_stopped and self._exit_code is not None:
            self._has_stopped = True
            step = self._seen
            self._tell_of_stop(step, notice, "is the last of the run")
            self._leave(notice)

    def abandon(self, error: BaseException) -> None:
        """What the checkpointer calls when its block ends by an error."""
        if self._last is not None and not self.checkpointer.has_saved(self._last.step):
            self._skip(self._last.step, f"the block ended by {type(error).__name__}")
        self.give_way()

    def give_way(self) -> None:
        """Saves nothing more of what was seen: another callback goes on, or nobody."""
        self._last = None
        self._end()

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.end()
        self.checkpointer.detach(self)
        while self._subscribed:
            self.checkpointer.events.unsubscribe(self._subscribed.pop())
        _begun.discard(self)

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
        else:
            self.abandon(error)

    def _tell_if_lost(self) -> None:
        last = self._last
        if not self._save_last or last is None or last.step == 0:
            return
        if not self.checkpointer.has_saved(last.step):
            _log.warning(
                "the program ends, and step %d is not saved: close the Checkpointer or"
                " the CheckpointCallback, best by a with block",
                last.step,
            )


_begun: weakref.WeakSet[CheckpointCallback] = weakref.WeakSet()
"""Those that have begun and were not closed."""


@atexit.register
def _tell_of_lost_steps() -> None:
    for callback in list(_begun):
        callback._tell_if_lost()


def _values(metrics: Any) -> Mapping[str, Any] | None:
    """Metrics as numbers by name; clu's collections are computed now."""
    compute = getattr(metrics, "compute", None)
    values = compute() if compute else metrics
    if values is None or isinstance(values, Mapping):
        return values
    raise errors.OptionError(
        f"metrics must be numbers by name, such as {{'loss': 0.5}}, got {values!r:.80}"
    )
