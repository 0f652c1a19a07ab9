"""CLU: a hook that saves, metric collections, and metric writers without TensorFlow."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from types import ModuleType
from typing import Any

import jax
from clu import metrics as clu_metrics
from clu import values

from flaxckpt import errors
from flaxckpt._training.callback import CheckpointCallback
from flaxckpt._types import PyTree

__all__ = ["PeriodicCheckpoint", "import_metric_writers", "scalars"]


class PeriodicCheckpoint:
    """Saves a training loop, called as CLU's periodic actions are.

    The metrics of a checkpoint are those of all batches since the save before it.
    Retention policies such as `BestN` can therefore rank steps by training metrics.

    ```python
    on_step = CheckpointCallback(checkpointer, every_steps=1000, dataset=batches)
    checkpoint = PeriodicCheckpoint(on_step)
    state, start = on_step.restore_or_init(state)
    for step in range(start + 1, total + 1):
        state, batch_metrics = train_step(state, next(batches))
        checkpoint(step, state=state, batch_metrics=batch_metrics)
    ```

    Args:
        on_step: Decides when to save, and saves.
    """

    def __init__(self, on_step: CheckpointCallback) -> None:
        if not isinstance(on_step, CheckpointCallback):
            raise errors.OptionError(
                f"PeriodicCheckpoint needs a CheckpointCallback, got {on_step!r:.80}:"
                " write PeriodicCheckpoint(CheckpointCallback(checkpointer, …))"
            )
        self.on_step = on_step
        self._merged: clu_metrics.Collection | None = None

    def __call__(
        self,
        step: int,
        t: float | None = None,
        *,
        state: PyTree | None = None,
        batch_metrics: clu_metrics.Collection | None = None,
        metrics: Any = None,
        **others: Any,
    ) -> bool:
        """Saves the step if it is due.

        Args:
            step: The step, as `CheckpointCallback` counts it.
            t: The time that CLU passes to its hooks; ignored.
            state: The state to save; by default, the state given to `on_step.bind`.
            batch_metrics: Metrics of this step alone. They are merged with those of the
                steps before, and computed at the save.
            metrics: Metrics to save as they are: numbers by name, or a collection that
                the loop has merged itself.
            **others: Further arguments of `CheckpointCallback`. With `t`, unknown
                arguments are ignored, as CLU passes all arguments to all hooks.

        Returns:
            True if the step was saved.

        Raises:
            OptionError: Both `batch_metrics` and `metrics` were passed, or metrics
                cannot be merged or computed.
            CheckpointError: This save cannot begin, or the save before it failed.
        """
        if batch_metrics is not None:
            if metrics is not None:
                raise errors.OptionError(
                    "pass either batch_metrics, which are merged between saves, or"
                    " metrics, which are saved as they are"
                )
            self._merged = merged = _merge(self._merged, batch_metrics)
            metrics = _ScalarsOnly(merged)
        elif isinstance(metrics, clu_metrics.Collection):
            metrics = _ScalarsOnly(metrics)
        if t is not None:
            others["t"] = t
        is_saved = self.on_step(step, state, metrics=metrics, **others)
        if is_saved:
            self._merged = None
        return is_saved


def scalars(metrics: clu_metrics.Collection) -> dict[str, Any]:
    """Computes a metric collection.

    Args:
        metrics: The collection, merged over all batches.

    Returns:
        Name -> value of all scalar metrics; images, texts, histograms and other types
        of `clu.values` are left out.

    Raises:
        OptionError: The collection is still replicated over devices.
    """
    try:
        computed = metrics.compute_values()
    except ValueError as error:
        raise errors.OptionError(f"metrics cannot be computed: {error}") from error
    return {
        name: value.value
        for name, value in computed.items()
        if isinstance(value, values.Scalar)
    }


def import_metric_writers() -> ModuleType:
    """Imports `clu.metric_writers`, without TensorFlow if it is not installed.

    CLU imports TensorFlow for its `SummaryWriter` as soon as any writer is imported.
    Where that fails, this function puts a class into the place of `SummaryWriter` that
    raises an `OptionError` when it is made. All other writers are CLU's own, and
    `clu.periodic_actions` can be imported afterwards.

    Returns:
        The module `clu.metric_writers`.
    """
    try:
        return importlib.import_module("clu.metric_writers")
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "tensorboard"):
            raise
    name = "clu.metric_writers.summary_writer"
    sys.modules[name] = replacement = ModuleType(name)
    vars(replacement)["SummaryWriter"] = _NoSummaryWriter
    return importlib.import_module("clu.metric_writers")


class _NoSummaryWriter:
    """Replaces CLU's `SummaryWriter` where TensorFlow is not installed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise errors.OptionError(
            "CLU's SummaryWriter needs TensorFlow and TensorBoard: install them, or"
            " write metrics to the log with"
            " metric_writers.create_default_writer(just_logging=True)"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _ScalarsOnly:
    """A collection of which only the scalars are saved."""

    collection: clu_metrics.Collection

    def compute(self) -> dict[str, Any]:
        return scalars(self.collection)


def _merge(
    before: clu_metrics.Collection | None, update: clu_metrics.Collection
) -> clu_metrics.Collection:
    """Returns the metrics of all batches so far, if of one class of collections."""
    if not isinstance(update, clu_metrics.Collection):
        raise errors.OptionError(
            f"batch_metrics must be a clu.metrics.Collection, got {update!r:.80}: pass"
            " numbers by name as metrics"
        )
    if before is None:
        return update
    if type(before) is not type(update):
        raise errors.OptionError(
            f"batch_metrics of {type(update).__qualname__} cannot be merged with those"
            f" of {type(before).__qualname__}: pass one class from every step"
        )
    return before.merge(update)
