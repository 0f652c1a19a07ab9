"""A trainer's hook: when to save, and where to begin."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import jax

from flaxckpt import errors
from flaxckpt._checkpointer import Checkpointer
from flaxckpt._save import SaveHandle
from flaxckpt._types import PathLike, PyTree
from flaxckpt.transforms import Transform

_log = logging.getLogger(__name__)


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

    Args:
        checkpointer: Where to save.
        every_steps: Saves whenever a multiple of this is reached or passed.
        every_secs: Saves when so much time has gone by since the last save.
        on_steps: Saves when one of these steps is reached or passed.
        save_last: Whether closing saves the last step, if it is not saved yet.
        dataset: The iterator that is saved and restored along with the state.
        step_is: Whether the loop counts `completed` steps or passes the `index` of
            the step just done, which is one less. Checkpoints count completed steps.
        clock: Seconds, for `every_secs`.
    """

    __name__ = "checkpoint"  # clu's PeriodicCallback asks its function for a name

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        every_steps: int | None = None,
        every_secs: float | None = None,
        on_steps: Collection[int] = (),
        save_last: bool = True,
        dataset: Any = None,
        step_is: Literal["completed", "index"] = "completed",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("every_steps", every_steps), ("every_secs", every_secs)):
            if value is not None and value <= 0:
                raise errors.OptionError(f"{name} must be positive, got {value}")
        if step_is not in ("completed", "index"):
            raise errors.OptionError(
                f"step_is must be 'completed' or 'index', got {step_is!r}"
            )
        self.checkpointer = checkpointer
        self.last_save: SaveHandle | None = None
        self._every_steps = every_steps
        self._every_secs = every_secs
        self._on_steps = frozenset(on_steps)
        self._dataset = dataset
        self._offset = 1 if step_is == "index" else 0
        self._clock = clock
        self._get_state: Callable[[], PyTree] | None = None
        self._seen = 0
        self._saved: int | None = None
        self._saved_at = clock()
        self._last: tuple[PyTree, Any, Any] | None = None
        if save_last:
            checkpointer.before_close(self._save_last)

    def bind(self, *, state: Callable[[], PyTree]) -> None:
        """Tells where to get the state, for loops that call `h(step)` only."""
        self._get_state = state

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
        """
        if state is None:
            if self._get_state is None:
                raise errors.OptionError(
                    "there is no state to save: call on_step(step, state), or tell"
                    " where it is with on_step.bind(state=lambda: state)"
                )
            state = self._get_state()
        self.checkpointer.raise_if_failed()
        completed = int(step) + self._offset
        dataset = self._dataset if dataset is None else dataset
        due = force or self._is_due(completed)
        self._seen = completed
        self._last = (state, metrics, dataset)
        if not due or completed == self._saved:
            return False
        return self._save(completed, state, metrics, dataset)

    def _is_due(self, completed: int) -> bool:
        if completed <= 0:
            return False
        n = self._every_steps
        # Loops may skip steps, so a multiple counts when it is passed, too.
        if n is not None and completed // n > self._seen // n:
            return True
        if any(self._seen < step <= completed for step in self._on_steps):
            return True
        return (
            self._every_secs is not None
            and self._clock() - self._saved_at >= self._every_secs
        )

    def _save(self, completed: int, state: PyTree, metrics: Any, dataset: Any) -> bool:
        compute = getattr(metrics, "compute", None)
        values: Mapping[str, Any] | None = compute() if compute else metrics
        self.last_save = self.checkpointer.save(
            completed, state, metrics=values, dataset=dataset, on_exists="skip"
        )
        self._saved = completed
        self._saved_at = self._clock()
        if not self.last_save.done():
            return True
        return self.last_save.wait().skipped is None

    def _save_last(self) -> None:
        if self._last is not None and self._seen not in (0, self._saved):
            state, metrics, dataset = self._last
            self._save(self._seen, state, metrics, dataset)
        self._last = None

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
        dataset = self._dataset if dataset is None else dataset
        if self.checkpointer.latest_step() is None and source is not None:
            loaded, step = self.checkpointer.load_source(
                source,
                state,
                step=source_step,
                transforms=source_transforms,
                missing=missing,
                unused=unused,
                optimizer=optimizer,
            )
            self._begin_at(step)
            return loaded, step
        if self.checkpointer.latest_step() is None:
            self.checkpointer.check_other_names()
            abstract = [
                leaf
                for leaf in jax.tree.leaves(state)
                if isinstance(leaf, jax.ShapeDtypeStruct)
            ]
            if abstract:
                raise errors.CheckpointNotFoundError(
                    f"{self.checkpointer.directory} has no checkpoint to restore, and"
                    f" {len(abstract)} leaves of the state have no values to begin"
                    " with: pass an initialised state"
                )
            _log.info("no checkpoint in %s: starting anew", self.checkpointer.directory)
            return state, 0
        restored, step = self.checkpointer.restore_latest(state, dataset=dataset)
        self._begin_at(step)
        self._saved = step
        return restored, step

    def _begin_at(self, step: int) -> None:
        self._seen = step
        self._saved_at = self._clock()

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to a committed step, as of an evaluation after its save."""
        self.checkpointer.add_metrics(int(step) + self._offset, metrics)

    def wait(self) -> None:
        """Waits for the save under way."""
        self.checkpointer.wait()

    def close(self) -> None:
        """Saves the last step, if asked to, and waits for it."""
        self._save_last()
        self.checkpointer.wait()

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
        self._last = None
