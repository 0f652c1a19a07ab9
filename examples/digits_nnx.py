"""Classifies handwritten digits with a small convolutional network (Flax NNX).

Needs no download: scikit-learn ships the 1797 images of 8x8 pixels.

    python -m examples.digits_nnx --config=configs/digits_nnx.py --workdir=runs/digits

The pair `(model, optimizer)` is saved directly: the parameters, the running statistics
of BatchNorm, the counters of the dropout keys and the moments of Adam. The dataset is a
function of the batch number, so its state is one integer.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from clu import metrics as clu_metrics
from flax import nnx
from ml_collections import ConfigDict, config_flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from flaxckpt.configs import CheckpointConfig
from flaxckpt.datasets import StepIndexed

Array = jax.Array | np.ndarray
Batch = tuple[Array, Array]
"""Images `[batch, 8, 8, 1]` from 0 to 1, and their labels `[batch]`."""

Metrics = clu_metrics.Collection.create(
    accuracy=clu_metrics.Accuracy, loss=clu_metrics.Average.from_output("loss")
)


def main(config: ConfigDict) -> tuple[tuple[CNN, nnx.Optimizer[CNN]], dict[str, float]]:
    """Trains to `config.total_steps`, from the newest checkpoint if there is one.

    Returns:
        Model and optimizer, and the metrics of the final model on the test split.
    """
    data = load_data(config.seed)
    train_iter = StepIndexed(lambda i: data.train_batch(i, config))
    model = CNN(config.features, config.dropout_rate, rngs=nnx.Rngs(config.seed))
    optimizer = nnx.Optimizer(model, optax.adam(config.learning_rate), wrt=nnx.Param)
    checkpointing = CheckpointConfig.from_mapping(config.checkpoint)

    with (
        checkpointing.checkpointer(config.workdir) as ckpt,
        checkpointing.callback(ckpt, dataset=train_iter) as on_step,
    ):
        (model, optimizer), start = on_step.restore_or_init((model, optimizer))
        if start:
            print(f"found step {start} in {config.workdir}: continuing from there")
        for step in range(start + 1, config.total_steps + 1):
            loss = train_step(model, optimizer, next(train_iter))

            # Evaluate before the save, so that the checkpoint has the metrics.
            metrics = None
            is_last = step == config.total_steps
            if is_last or step % config.checkpoint.every_steps == 0:
                metrics = evaluate(model, data.test)
                accuracy = metrics.compute()["accuracy"]
                print(
                    f"step {step:4d}   train loss {loss:.3f}"
                    f"   test accuracy {accuracy:.1%}"
                )
            on_step(step, (model, optimizer), metrics=metrics)
    computed = evaluate(model, data.test).compute()
    return (model, optimizer), {name: float(value) for name, value in computed.items()}


# --- Data -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Data:
    """The digits, in two splits."""

    train: Batch
    test: Batch

    def train_batch(self, i: int, config: ConfigDict) -> Batch:
        """Returns the `i`-th training batch, counted over all epochs.

        Each epoch has its own order of the images, which depends only on the seed and
        the number of the epoch.
        """
        images, labels = self.train
        epoch, place = divmod(i, len(labels) // config.batch_size)
        order = np.random.default_rng((config.seed, epoch)).permutation(len(labels))
        rows = order[place * config.batch_size :][: config.batch_size]
        return images[rows], labels[rows]


def load_data(seed: int) -> Data:
    """Loads the digits; one image in five is for testing."""
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=seed, stratify=labels
    )
    return Data((train_images, train_labels), (test_images, test_labels))


# --- Model ----------------------------------------------------------------------


class CNN(nnx.Module):
    """Two convolutions, each with BatchNorm, then dropout and a linear layer."""

    def __init__(self, features: int, dropout_rate: float, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, features, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(features, rngs=rngs)
        self.conv2 = nnx.Conv(features, 2 * features, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * features, rngs=rngs)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.linear = nnx.Linear(4 * 4 * 2 * features, 10, rngs=rngs)

    def __call__(self, images: Array) -> jax.Array:
        """Maps images `[batch, 8, 8, 1]` to logits `[batch, 10]`."""
        x = nnx.relu(self.norm1(self.conv1(jnp.asarray(images))))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = self.dropout(x.reshape(len(x), -1))
        return self.linear(x)


# --- Steps ----------------------------------------------------------------------


@nnx.jit
def train_step(model: CNN, optimizer: nnx.Optimizer[CNN], batch: Batch) -> jax.Array:
    """Updates `model` and `optimizer`, and returns the loss."""
    images, labels = batch

    def loss_fn(model: CNN) -> jax.Array:
        return jnp.mean(cross_entropy(model(images), labels))

    loss: jax.Array
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def evaluate(model: CNN, batch: Batch) -> clu_metrics.Collection:
    """Computes metrics without dropout and with the running statistics."""
    return eval_step(
        nnx.view(model, deterministic=True, use_running_average=True), batch
    )


@nnx.jit
def eval_step(model: CNN, batch: Batch) -> clu_metrics.Collection:
    """Computes the metrics of a model in evaluation mode."""
    images, labels = batch
    logits = model(images)
    return Metrics.single_from_model_output(
        logits=logits, labels=labels, loss=cross_entropy(logits, labels)
    )


def cross_entropy(logits: jax.Array, labels: Array) -> jax.Array:
    """Returns the loss of every example, `[batch]`."""
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses


if __name__ == "__main__":
    _CONFIG = config_flags.DEFINE_config_file("config", "configs/digits_nnx.py")
    _WORKDIR = flags.DEFINE_string("workdir", None, "Replaces config.workdir.")

    def _run(argv: list[str]) -> None:
        del argv
        config = _CONFIG.value
        config.workdir = _WORKDIR.value or config.workdir
        main(config)

    app.run(_run)
