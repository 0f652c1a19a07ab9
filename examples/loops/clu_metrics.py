"""A loop of CLU: metric collections, metric writers and periodic actions.

    python -m examples.loops.clu_metrics

The metrics of a checkpoint cover all batches since the previous checkpoint. The
checkpoint with the lowest loss is kept in addition to the newest. The log shows
the metrics, the progress of the training and the duration of each save. TensorFlow is
not needed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from absl import logging
from clu import metrics as clu_metrics

import flaxckpt
from examples.loops import toy
from flaxckpt.integrations.clu import PeriodicCheckpoint, import_metric_writers, scalars
from flaxckpt.policies import BestN, LatestN

metric_writers = import_metric_writers()
# After the line above, this import succeeds without TensorFlow.
periodic_actions = importlib.import_module("clu.periodic_actions")

Metrics = clu_metrics.Collection.create(
    loss=clu_metrics.Average.from_output("loss"),
    last_loss=clu_metrics.LastValue.from_output("loss"),
)


def train(directory: Path, lose_after: int | None) -> Any:
    """Trains to the end, from the newest checkpoint if there is one.

    Returns:
        The final state, and its saved metrics.
    """
    batches = toy.batches()
    writer = metric_writers.create_default_writer(just_logging=True)
    keep = [LatestN(1), BestN(1, "loss", mode="min")]
    with (
        metric_writers.ensure_flushes(writer),
        flaxckpt.Checkpointer(directory, keep=keep, sinks=[writer]) as checkpointer,
        flaxckpt.CheckpointCallback(
            checkpointer, every_steps=4, dataset=batches
        ) as on_step,
    ):
        state, start = on_step.restore_or_init(toy.create())
        checkpoint = PeriodicCheckpoint(on_step)
        progress = periodic_actions.ReportProgress(
            num_train_steps=toy.TOTAL, writer=writer, every_steps=5
        )
        for step in range(start + 1, toy.TOTAL + 1):
            state, outputs = toy.train_step(state, next(batches))
            metrics = Metrics.single_from_model_output(**outputs)
            checkpoint(step, state=state, batch_metrics=metrics)
            progress(step)
            if step % 5 == 0:
                writer.write_scalars(step, scalars(metrics))
            toy.lose_if(step == lose_after)
    return state, checkpointer.metrics(toy.TOTAL)


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    toy.compare(train)
