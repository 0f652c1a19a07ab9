"""Keras 3 on JAX: `fit` resumes in the middle of an epoch.

python -m examples.loops.keras_fit
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import flaxckpt
from examples.loops import toy
from flaxckpt.datasets import StepIndexed

os.environ["KERAS_BACKEND"] = "jax"
try:
    import keras

    from flaxckpt.integrations.keras import KerasCheckpoint
except (ImportError, flaxckpt.errors.OptionError) as error:
    print(f"skipped: {error}")
    sys.exit()

STEPS_PER_EPOCH = 5


def make_batch(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs `[8, 4]` and targets `[8, 1]`."""
    x = np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def create() -> keras.Model:
    """Creates a model with named layers: default names would differ the second time."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((4,), name="input"),
        keras.layers.Dense(16, "relu", name="hidden"),
        keras.layers.Dropout(0.3, name="dropout"),
        keras.layers.Dense(1, name="out"),
    ]
    model = keras.Sequential(layers, name="model")
    model.compile(optimizer=keras.optimizers.AdamW(1e-2, name="adamw"), loss="mse")
    return model


def train(directory: Path, lose_after: int | None) -> Any:
    """Trains to the end, from the newest checkpoint if there is one."""
    model = create()
    with flaxckpt.Checkpointer(directory) as checkpointer:
        on_step = flaxckpt.CheckpointCallback(checkpointer, every_steps=4)
        checkpoint = KerasCheckpoint(
            on_step, StepIndexed(make_batch), steps_per_epoch=STEPS_PER_EPOCH
        )
        lose = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: toy.lose_if(
                checkpoint.completed == lose_after
            )
        )
        model.fit(
            checkpoint.data,
            epochs=toy.TOTAL // STEPS_PER_EPOCH,
            callbacks=[checkpoint, lose],
            verbose=2,
        )
    return model.get_state_tree()


if __name__ == "__main__":
    toy.compare(train)
