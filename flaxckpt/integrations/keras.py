"""A Keras 3 callback on JAX that saves during `fit` and resumes in mid-epoch."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flaxckpt import _util, errors
from flaxckpt._training.callback import CheckpointCallback
from flaxckpt._types import PyTree
from flaxckpt.datasets import SaveableIterator
from flaxckpt.integrations._keras_names import StableNames

try:
    import keras
except ImportError as error:
    raise errors.OptionError(
        f"Keras cannot be imported ({error}):\n  pip install 'flaxckpt[keras]'"
    ) from error

__all__ = ["EpochBatches", "KerasCheckpoint"]


@_util.guessed_names.explain
class KerasCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a model during `fit`, and resumes an interrupted `fit`.

    The first `fit` starts from the newest checkpoint: weights, optimizer, dropout
    seeds, running metrics, the position in the data, and the epoch, including the
    position within the epoch. `initial_epoch` need not be passed.

    ```python
    with flaxckpt.Checkpointer("run") as checkpointer:
        on_step = flaxckpt.CheckpointCallback(checkpointer, every_steps=500)
        checkpoint = KerasCheckpoint(on_step, batches, steps_per_epoch=1000)
        model.fit(checkpoint.data, epochs=10, callbacks=[checkpoint])
    ```

    A step is a batch, equal to `optimizer.iterations` unless gradients are accumulated.
    Leaf paths are Keras's names of variables. Layers, seed generators and optimizers
    without a name of their own are numbered among those of the model.

    Args:
        on_step: Decides when and where to save. Its `dataset` and `step_is` are
            ignored.
        batches: An endless iterator of `(x, y)` or `(x, y, weights)` with `get_state`
            and `set_state`: a `StepIndexed`, a grain iterator.
        steps_per_epoch: The number of batches per epoch.
        every_epochs: Also saves each time that this number of epochs has ended, with
            the metrics of the epoch and its validation. None leaves the decision to
            `on_step`.

    Attributes:
        data: The argument for `fit`; it yields the batches epoch by epoch.
        completed: The number of batches the model was trained on.

    Raises:
        OptionError: Keras runs on another backend, or a number is not positive.
        DatasetStateError: `batches` has no `get_state` and `set_state`.
    """

    def __init__(
        self,
        on_step: CheckpointCallback,
        batches: Iterator[Any],
        *,
        steps_per_epoch: int,
        every_epochs: int | None = 1,
    ) -> None:
        super().__init__()
        if keras.backend.backend() != "jax":
            raise errors.OptionError(
                f"Keras runs on {keras.backend.backend()}, not on JAX: set the"
                " environment variable KERAS_BACKEND=jax before keras is imported"
            )
        if not isinstance(on_step, CheckpointCallback):
            raise errors.OptionError(
                "wanted a CheckpointCallback, got"
                f" {_util.arguments.describe(on_step)}: write"
                " KerasCheckpoint(CheckpointCallback(Checkpointer(directory),"
                " every_steps=1000), batches, …)"
            )
        for name, value in (
            ("steps_per_epoch", steps_per_epoch),
            ("every_epochs", every_epochs),
        ):
            if value is not None and value < 1:
                raise errors.OptionError(f"{name} must be positive, got {value}")
        self.data = EpochBatches(batches, steps_per_epoch)
        self.completed = 0
        self._on_step = on_step
        self._every_epochs = every_epochs
        self._saved: int | None = None
        self._left = steps_per_epoch  # of the epoch, when it began in this process
        self._done = 0  # of the batches left
        self._metrics: PyTree = None
        self._has_begun = False
        self._quiet = contextlib.ExitStack()

    # ---- called by Keras, in this order ----------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restores the newest checkpoint at the first call."""
        steps = self.data.steps_per_epoch
        if self.params.get("steps") != steps:
            raise errors.OptionError(
                f"fit takes {self.params.get('steps')} steps per epoch, but the"
                f" callback {steps}: call fit(checkpoint.data, …) without"
                " steps_per_epoch"
            )
        # Reading the state from Keras is slow; at the end of an epoch it is passed.
        self._on_step.bind(
            state=self._state, dataset=lambda: self.data, each_step=False
        )
        if not self._has_begun:
            state, self.completed = self._restore()
            if self.completed:
                self.model.set_state_tree(state)
                self._metrics = state["metrics_variables"]
        self._has_begun = True
        self.data.claim()
        # Keras's own BackupAndRestore sets the first epoch of `fit` like this.
        self.model._initial_epoch = self.completed // steps

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Limits the epoch to its remaining batches."""
        self.model._initial_epoch = None
        wanted, done = divmod(self.completed, self.data.steps_per_epoch)
        if epoch != wanted:
            raise errors.OptionError(
                f"fit begins epoch {epoch}, but after {self.completed} steps it is"
                f" epoch {wanted}: pass initial_epoch={wanted} to fit"
            )
        self._left, self._done = self.data.steps_per_epoch - done, 0
        self.data.shorten(self._left)
        if done and self._metrics is not None:
            # Keras has reset them since the training began.
            self.model.set_state_tree({"metrics_variables": self._metrics})
        self._metrics = None

    def on_train_batch_begin(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Suppresses Keras's warning at the end of a resumed epoch."""
        if batch >= self._left:
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data")

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Saves if due, and stops the training on request."""
        # With steps_per_execution there are several batches, and fewer at the end.
        new = min(batch + 1, self._left) - self._done
        self._done += new
        self.completed += new
        self.data.trained_on(new)
        self._save(logs, force=False)
        if self._on_step.should_stop():
            self.model.stop_training = True

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Ends the suppression of warnings after the epoch's batches."""
        self._quiet.close()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Saves if due, or adds the epoch's metrics to the step just saved."""
        self._quiet.close()
        every = self._every_epochs
        if self.completed % self.data.steps_per_epoch:  # stopped before its end
            # Keras changes the weights afterwards if it averages them.
            self._save(logs, force=False, state=self._state())
        elif self._saved == self.completed:
            self._on_step.wait()
            self._on_step.checkpointer.add_metrics(self.completed, logs or {})
        else:
            is_due = every is not None and (epoch + 1) % every == 0
            self._save(logs, force=is_due, state=self._state())

    # ---- saving ----------------------------------------------------------------------

    def _save(
        self, logs: Mapping[str, Any] | None, *, force: bool, state: PyTree = None
    ) -> None:
        done = _Done(self.completed, logs, state)
        if self._on_step.on_step(done, force=force):
            self._saved = self.completed

    def _restore(self) -> tuple[PyTree, int]:
        """Returns the state to begin with, by Keras's names, and the step."""
        names = StableNames(self.model)
        try:
            state, step = self._on_step.restore_or_init(
                self._state(), dataset=self.data
            )
            return names.to_keras(state), step
        except errors.RestoreMismatchError as error:
            mismatch = error
        try:  # the names in checkpoints of earlier versions
            return self._on_step.restore_or_init(
                self.model.get_state_tree(), dataset=self.data
            )
        except errors.RestoreMismatchError:
            raise mismatch from None

    def _state(self) -> PyTree:
        """Returns the current variables by stable names, synchronised with `fit`."""
        self.model.jax_state_sync()
        tree = self.model.get_state_tree()
        return StableNames(self.model).from_keras(tree)


class _Done(NamedTuple):
    """The argument of `CheckpointCallback.on_step`, possibly without the state."""

    next_step: int
    metrics: Mapping[str, Any] | None
    state: PyTree = None


class EpochBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of an endless iterator by epoch, created by `KerasCheckpoint`.

    Keras prefetches batches. The saved position follows the last batch that the model
    was trained on.
    """

    def __init__(self, batches: Iterator[Any], steps_per_epoch: int) -> None:
        super().__init__()
        if not isinstance(batches, SaveableIterator):
            raise errors.DatasetStateError(
                f"{type(batches).__module__}.{type(batches).__qualname__} has no"
                " get_state and set_state: pass a StepIndexed or an iterator of grain"
            )
        self.steps_per_epoch = steps_per_epoch
        self._batches = batches
        self._position = batches.get_state()
        self._ahead: deque[Any] = deque()  # the position after each batch handed out
        self._left: int | None = None
        self._is_claimed = False
        self._unclaimed = 0  # handed out without the callback

    @property
    def num_batches(self) -> int:
        """The number of batches in the epoch, or in its remaining part."""
        return self.steps_per_epoch if self._left is None else self._left

    def on_epoch_begin(self) -> None:
        """Goes back to the batch after the last trained batch."""
        if self._ahead:
            self._batches.set_state(self._position)
            self._ahead.clear()

    def __getitem__(self, index: int) -> Any:
        """Returns the next batch, whatever its index."""
        self._left = None
        if not self._is_claimed:
            self._unclaimed += 1
            if self._unclaimed > 2:  # Keras builds the model with the first two
                raise errors.OptionError(
                    "these batches belong to a KerasCheckpoint: pass it to fit, too, as"
                    " in fit(checkpoint.data, callbacks=[checkpoint])"
                )
        batch = next(self._batches)
        self._ahead.append(self._batches.get_state())
        return batch

    def claim(self) -> None:
        """Marks the callback as present; it counts the trained batches."""
        self._is_claimed = True

    def shorten(self, left: int) -> None:
        """Limits the starting epoch to `left` batches."""
        self._left = left

    def trained_on(self, count: int) -> None:
        """Records training on `count` more batches."""
        for _ in range(count):
            self._position = self._ahead.popleft()

    def get_state(self) -> Any:
        """Returns the position after the last trained batch."""
        return self._position

    def set_state(self, state: Any) -> None:
        """Continues after the batch at which `get_state` returned `state`."""
        self._batches.set_state(state)
        self._position = state
        self._ahead.clear()
