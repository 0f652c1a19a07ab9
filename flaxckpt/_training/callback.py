"""A trainer's hook: when to save, where to begin, and how to end."""

from __future__ import annotations

import contextlib
import difflib
import logging
import numbers
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from flaxckpt import _state, errors
from flaxckpt._checkpoint.handle import SaveHandle
from flaxckpt._run.checkpointer import Checkpointer, session_of
from flaxckpt._training import completed_step, resume_check
from flaxckpt._training.loop import Hook
from flaxckpt._training.preemption import Stopping
from flaxckpt._training.signals import Grace
from flaxckpt._training.triggers import Triggers
from flaxckpt._types import PathLike, PyTree
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a failure that goes away if it is tried again."""


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
        if isinstance(checkpointer, str | os.PathLike):
            raise errors.OptionError(
                f"wanted a Checkpointer, got the path {str(checkpointer)!r}: write"
                f" CheckpointCallback(Checkpointer({str(checkpointer)!r}), …)"
            )
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
        self._offset = 1 if step_is == "index" else 0
        self._stopping = Stopping(
            watches=on_preemption, exit_code=exit_code, clock=clock
        )
        triggers = Triggers(
            every_steps=every_steps,
            every_secs=every_secs,
            on_steps=on_steps,
            save_first=save_first,
            clock=clock,
        )
        self._hook = Hook(
            checkpointer,
            triggers,
            self._stopping,
            Grace(grace_secs, clock),
            temporary=temporary,
            save_last=save_last,
            offset=self._offset,
            check_step=check_step,
            preflight=preflight,
            sinks=sinks,
            dataset=dataset,
        )

    @property
    def last_save(self) -> SaveHandle | None:
        """The last save of its own; None if there was none."""
        return self._hook.last_save

    # ---- in the loop --------------------------------------------------------------

    def bind(
        self,
        *,
        state: Callable[[], PyTree] | None = None,
        dataset: Callable[[], Any] | None = None,
        metrics: Callable[[], Any] | None = None,
        each_step: bool = True,
    ) -> None:
        """Tells where to get what to save, for loops that call `h(step)` only.

        Args:
            state: A function without arguments, such as `lambda: state`. It is called
                when a save needs it, and, with `save_last`, at each step: so the end
                saves the last step that was reported, whatever came after it. A
                `TrainState`, or another frozen dataclass or named tuple with its own
                `step`, is only asked for at the end, and saved if its `step` agrees.
            dataset: The same of the iterator.
            metrics: The same of the metrics; with `save_last`, called each step, too.
                Their values are computed only when a save needs them.
            each_step: Whether `state` and `metrics` may be called at each step. False
                if that takes long: then the end saves only a state whose own step
                counter agrees, and its metrics if nothing came after.
        """
        given = {"state": state, "dataset": dataset, "metrics": metrics}
        for name, get in given.items():
            if get is not None and not callable(get):
                raise errors.OptionError(
                    f"bind wants functions, got a {type(get).__name__} for {name}:"
                    f" write bind({name}=lambda: {name})"
                )
        known = {name: get for name, get in given.items() if get is not None}
        self._hook.bind(known, each_step=each_step)

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
        """Saves if it is time.

        Call it after every step, so that the last one can be saved at the end.

        Args:
            step: The step that was just completed (or its index, see `step_is`). A
                Python number: one on a device is waited for.
            state: What to save; taken from `bind` if it is not given. A number in its
                place is the time, which clu passes to its hooks: `hook(step, t)`. Where
                a state is bound, so is an array of one number without axes.
            metrics: Numbers by name, or a clu metric collection. Looked at only when
                a save happens.
            dataset: Instead of the iterator given at the beginning.
            force: Save, whatever the triggers say.
            **others: With `t`, the time, as clu's `PeriodicCallback` passes it: what
                else the loop passes to its hooks, which is ignored. Without, there are
                none.

        Returns:
            Whether it saved.

        Raises:
            OptionError: There is no such argument.
            CheckpointError: This save cannot begin, or the one before it failed.
            SystemExit, KeyboardInterrupt: A signal has told the program to stop, and
                the step is saved.
        """
        if others:
            _check_others(others)
        completed = _state.step_counter.whole(step) + self._offset
        is_flag, is_bound = isinstance(state, bool), "state" in self._hook.getters
        if isinstance(state, numbers.Real) or (is_bound and _is_number(state)):
            if is_flag or not is_bound:
                raise errors.OptionError(
                    f"wanted a state at step {step}, got {state!r:.80}: pass it as"
                    " on_step(step, state), or, to loops that call hook(step, t), tell"
                    " where it is by on_step.bind(state=lambda: state)"
                )
            state = None
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
            completed = _state.step_counter.whole(info.step) + 1
        metrics = getattr(info, "metrics", None)
        loss = getattr(info, "loss", None)
        if metrics is None and loss is not None:
            metrics = {"loss": loss}
        return self._after(
            _state.step_counter.whole(completed), info.state, metrics, None, force
        )

    def should_stop(self) -> bool:
        """Whether the program was told to stop, by a signal.

        For what takes long between two calls, such as an evaluation: end it, and call
        with the step at hand. Where several processes train, all of them call this at
        the same places.
        """
        return self._stopping.is_told()

    def _after(
        self, completed: int, state: PyTree, metrics: Any, dataset: Any, force: bool
    ) -> bool:
        given = {"state": state, "metrics": metrics, "dataset": dataset}
        return self._hook.after(completed, given, force=force)

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
        return self._hook.restore_or_init(
            state,
            dataset,
            source=source,
            source_step=source_step,
            missing=missing,
            unused=unused,
            optimizer=optimizer,
            transforms=source_transforms,
        )

    def add_metrics(self, step: int, metrics: Any) -> None:
        """Adds metrics to a committed step, as of an evaluation after its save.

        Args:
            step: As the loop counts; see `step_is`.
            metrics: Numbers by name, or a clu metric collection.
        """
        named = completed_step.values(metrics) or {}
        self.checkpointer.add_metrics(
            _state.step_counter.whole(step) + self._offset, named
        )

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
        session_of(self.checkpointer).check_writable("try out a resume")
        dataset = self._hook.getters["dataset"]() if dataset is None else dataset
        resume_check.check(
            self.checkpointer, state, step_fn, dataset=dataset, fresh=fresh
        )

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
            last.callback(session_of(self.checkpointer).settle)
            last.callback(self.after_close)
            last.callback(self.checkpointer.wait)
            last.callback(self.before_close)

    def before_close(self) -> None:
        """What comes first when the checkpointer is closed: saves the last step."""
        self._hook.before_close()

    def after_close(self) -> None:
        """What comes when all is durable: signals are put back."""
        self._hook.after_close()

    def abandon(self, error: BaseException) -> None:
        """What comes when the checkpointer's block ends by an error."""
        self._hook.abandon(error)

    def give_way(self) -> None:
        """Saves nothing more of what was seen: another callback goes on, or nobody."""
        self._hook.give_way()

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


def _is_number(state: Any) -> bool:
    """Whether a state is an array of one number, without axes."""
    is_array = isinstance(state, jax.Array | np.ndarray) and state.ndim == 0
    return is_array and (
        jnp.issubdtype(state.dtype, np.floating)
        or jnp.issubdtype(state.dtype, np.integer)
    )


_ARGUMENTS = ("step", "state", "metrics", "dataset", "force")
_CLEARLY_ALIKE = 0.85
"""How alike a name must be to one of ours to be taken for a slip."""


def _check_others(others: Mapping[str, Any]) -> None:
    """Refuses arguments that there are not, unless a loop of clu's passes them.

    Raises:
        OptionError: There are some.
    """
    alike = _CLEARLY_ALIKE if "t" in others else 0.5
    wrong = {
        name: difflib.get_close_matches(name, _ARGUMENTS, 1, alike) for name in others
    }
    if "t" in others:
        wrong = {name: close for name, close in wrong.items() if close}
    if wrong:
        listed = " and ".join(
            f"{name}=" + (f" (did you mean {close[0]}=?)" if close else "")
            for name, close in wrong.items()
        )
        raise errors.OptionError(
            f"a CheckpointCallback takes no {listed}: it takes state=, metrics=,"
            " dataset= and force="
        )
