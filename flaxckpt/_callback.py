"""A trainer's hook: when to save, where to begin, and how to end."""

from __future__ import annotations

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
    _multihost,
    _preflight,
    _resume,
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

    def is_gone(self) -> bool:
        """Whether the state was given to a later step, which nobody told of."""
        leaves = jax.tree.leaves(self._given["state"])
        return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


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
        self._saved: int | None = None
        self._last: _Seen | None = None
        self._is_checked = False
        self._has_stopped = False
        self._consumption = _counters.Consumption()
        for sink in sinks:
            checkpointer.events.subscribe(sink)
        checkpointer.before_close(self._finish)
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

        Each is a function without arguments, called when a save may need it.
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

        Args:
            step: The step that was just completed (or its index, see `step_is`).
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
        return self._after(int(step) + self._offset, state, metrics, dataset, force)

    def on_step(self, info: Any, force: bool = False) -> bool:
        """Like a call, for loops that describe a step by an object.

        Args:
            info: Has `state`, and either `next_step` (completed steps) or `step` (the
                index of the step just done); perhaps `loss`, `metrics`, too.
            force: Save, whatever the triggers say.
        """
        completed = getattr(info, "next_step", None)
        completed = int(info.step) + 1 if completed is None else int(completed)
        metrics = getattr(info, "metrics", None)
        loss = getattr(info, "loss", None)
        if metrics is None and loss is not None:
            metrics = {"loss": loss}
        return self._after(completed, info.state, metrics, None, force)

    def should_stop(self) -> bool:
        """Whether the program was told to stop, by a signal.

        For what takes long between two calls, such as an evaluation: end it, and call
        with the step at hand. Where several processes train, all of them call this at
        the same places.
        """
        if self._watch is None:
            return False
        told = self._watch.notice is not None
        return any(row[0] for row in _multihost.gather_flags([told]))

    def _after(
        self, completed: int, state: PyTree, metrics: Any, dataset: Any, force: bool
    ) -> bool:
        self.checkpointer.events.deliver(completed)
        self.checkpointer.raise_if_failed()
        given = {"state": state, "metrics": metrics, "dataset": dataset}
        seen = _Seen(completed, given, self._getters)
        if not self._is_checked:
            self._check_beginning(seen)
        time_is_up, notice = self._agreed(completed)
        due = self._triggers.due(completed, self._seen, time_is_up=time_is_up)
        if force:
            due = Due("forced")
        self._seen = completed
        self._last = seen
        if notice is not None and not self._has_stopped:
            return self._stop(seen, notice)
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
        self._start_watching()
        ckpt = self.checkpointer
        begun = _beginning.check(ckpt, seen.step)
        if begun is not None:
            self._seen = max(self._seen, begun)
            self._saved = begun if self._saved is None else self._saved
        if self._preflight and not ckpt.read_only:
            _preflight.check(
                ckpt,
                seen.get("state"),
                seen.get("dataset"),
                only_warn=self._preflight == "warn",
            )
        if self._consumption.wants:
            self._consumption.note(seen.step, datasets.position(seen.get("dataset")))
        self._is_checked = True

    def _start_watching(self) -> None:
        if self._watch is not None:
            self._watch.begin()

    def _agreed(self, completed: int) -> tuple[bool, Notice | None]:
        """Whether the time is up, and what tells to stop, the same on all processes.

        The first process's clock counts, and everybody's signals.
        """
        notice = None if self._watch is None else self._watch.poll(completed)
        if self._watch is None and not self._triggers.has_clock:
            return False, None
        mine = [self._triggers.time_is_up(), notice is not None]
        rows = _multihost.gather_flags(mine)
        if notice is None and any(row[1] for row in rows):
            notice = Notice("a signal to another process", self._clock())
        return rows[0][0], notice

    # ---- saving -------------------------------------------------------------------

    def _save(self, seen: _Seen, *, temporary: bool = False) -> bool:
        completed = seen.step
        if completed == self._saved:
            reason = "it was saved or restored by this run already"
            self.checkpointer.events.emit("skipped", completed, reason=reason)
            return False
        state = seen.get("state")
        if self._check_step:
            _counters.check(state, completed)
        if self._consumption.wants:
            self._consumption.note(completed, datasets.position(seen.get("dataset")))
        self._note_duration()
        restored = self.checkpointer.restored_step
        self.last_save = self.checkpointer.save(
            completed,
            state,
            metrics=_values(seen.get("metrics")),
            dataset=seen.get("dataset"),
            # Beyond the step that was restored are only those because of which that
            # one was: they are damaged, or were not wanted.
            on_exists="error" if restored is None else "overwrite",
            temporary=temporary,
        )
        self._saved = completed
        self._triggers.restart_clock()
        return True

    def _note_duration(self) -> None:
        """Remembers how long the last save took, for when there is little time."""
        if self.last_save is not None and self.last_save.done():
            with contextlib.suppress(errors.CheckpointError):  # that was told already
                self._grace.save_secs = self.last_save.wait().total_secs

    def _finish(self) -> None:
        """Before the checkpointer closes: the last step, and the signals put back."""
        last, self._last = self._last, None
        try:
            done = (0, self._saved)
            if not self._save_last or last is None or last.step in done:
                return
            if last.is_gone():
                reason = "its arrays were donated to a step that was not reported"
                _log.warning("the last step, %d, is not saved: %s", last.step, reason)
                self.checkpointer.events.emit("skipped", last.step, reason=reason)
                return
            self._save(last)
        finally:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.end()

    # ---- being told to stop -------------------------------------------------------

    def _stop(self, seen: _Seen, notice: Notice) -> bool:
        """Saves as much as there is time for, waits for it, and leaves.

        Raises:
            SystemExit, KeyboardInterrupt: When all that could be saved is durable.
        """
        self._has_stopped = True
        self.checkpointer.wait()
        self._note_duration()
        saved = True
        if seen.step == self._saved:
            what = "was saved already"
        elif self._grace.is_enough(notice):
            self._save(seen)
            self.checkpointer.wait()
            what = "is saved"
        else:
            path = self.checkpointer.save_params_only(seen.step, seen.get("state"))
            what = f"is saved without its optimizer, as {path}"
            saved = False
        _log.warning(
            "%s: step %d %s; the program %s",
            notice.name,
            seen.step,
            what,
            "goes on" if self._exit_code is None else "leaves",
        )
        self.checkpointer.events.emit(
            "preempted", seen.step, reason=notice.name, saved=what
        )
        self.checkpointer.events.deliver(seen.step)
        if self._exit_code is None:
            return saved
        self._last = None
        self._stop_watching()
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
        self._start_watching()
        dataset = self._getters["dataset"]() if dataset is None else dataset
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
        self._saved = self.checkpointer.restored_step
        self._seen = step
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
        dataset = self._getters["dataset"]() if dataset is None else dataset
        _resume.check(self.checkpointer, state, step_fn, dataset=dataset, fresh=fresh)

    def wait(self) -> None:
        """Waits for the save under way."""
        self.checkpointer.wait()

    def close(self) -> None:
        """Saves the last step, if asked to, and waits for it."""
        self._finish()
        self.checkpointer.wait()
        self.checkpointer.events.deliver()

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
        self._last = None
        self._stop_watching()


def _values(metrics: Any) -> Mapping[str, Any] | None:
    """Metrics as numbers by name; clu's collections are computed now."""
    compute = getattr(metrics, "compute", None)
    values: Mapping[str, Any] | None = compute() if compute else metrics
    return values
