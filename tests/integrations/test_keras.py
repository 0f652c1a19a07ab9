"""A `fit` that was lost in mid-epoch and begun again ends as one that never was."""

import contextlib
import os
import signal

import jax
import numpy as np
import pytest

os.environ["KERAS_BACKEND"] = "jax"
pytest.importorskip("keras", reason="needs keras")

import grain
import keras

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from flaxckpt.integrations.keras import KerasCheckpoint
from tests.helpers import chunks, programs, slow

STEPS = 6
EPOCHS = 3


class LostError(Exception):
    """Stands for whatever stops a process."""


class LoseAfter(keras.callbacks.Callback):
    """Loses the process after so many batches."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise LostError


def make_batch(i):
    random = np.random.default_rng(i)
    x = random.normal(size=(4, 5)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True) ** 2


def step_indexed():
    return StepIndexed(make_batch)


def in_order():
    return iter(grain.MapDataset.range(1000).map(make_batch))


def make_model(distribution=None, **options):
    """The same model, by the same names, as in a new process."""
    keras.utils.clear_session()
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,), name="input"),
            keras.layers.Dense(8, "relu", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, name="dropout"),
            keras.layers.Dense(1, name="out"),
        ],
        name="model",
    )
    options = {"optimizer": keras.optimizers.Adam(1e-2, name="adam"), **options}
    model.compile(loss="mse", metrics=["mae"], **options)
    return model


def fit(directory, batches, *, lose_after=None, every_steps=None, **options):
    """Trains to the end of the last epoch.

    Returns:
        The model, and what Keras says of each epoch.
    """
    fit_options = {"epochs": EPOCHS, "verbose": 0}
    for name in ("epochs", "initial_epoch", "validation_data", "steps_per_epoch"):
        if name in options:
            fit_options[name] = options.pop(name)
    every_epochs = options.pop("every_epochs", 1)
    model = make_model(**options)
    with flaxckpt.Checkpointer(directory) as checkpointer:
        on_step = flaxckpt.CheckpointCallback(checkpointer, every_steps=every_steps)
        checkpoint = KerasCheckpoint(
            on_step, batches, steps_per_epoch=STEPS, every_epochs=every_epochs
        )
        callbacks = [checkpoint] + ([LoseAfter(lose_after)] if lose_after else [])
        history = model.fit(checkpoint.data, callbacks=callbacks, **fit_options)
    return model, dict(zip(history.epoch, rows(history.history), strict=True))


def rows(history):
    """What Keras says of each epoch, the first one first."""
    values = zip(*history.values(), strict=True)
    return [dict(zip(history, row, strict=True)) for row in values]


def bits(model):
    leaves = jax.tree_util.tree_leaves_with_path(model.get_state_tree())
    return {
        jax.tree_util.keystr(path): (leaf.dtype, leaf.shape, np.asarray(leaf).tobytes())
        for path, leaf in leaves
    }


def unnamed_model():
    """A model whose names Keras chooses, by counters of the process."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(8, name="block_7"),
            keras.layers.Dropout(0.1),
            keras.layers.Reshape((4, 2)),
            keras.layers.Bidirectional(keras.layers.LSTM(2)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    metric = keras.metrics.MeanSquaredError()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    model.compile(optimizer, loss="mse", metrics=[metric])
    return model


def fit_unnamed(directory, epochs, lose_after=None):
    model = unnamed_model()
    with flaxckpt.Checkpointer(directory) as run:
        on_step = flaxckpt.CheckpointCallback(run, every_steps=4)
        checkpoint = KerasCheckpoint(on_step, step_indexed(), steps_per_epoch=STEPS)
        losing = [LoseAfter(lose_after)] if lose_after else []
        model.fit(
            checkpoint.data, epochs=epochs, verbose=0, callbacks=[checkpoint, *losing]
        )
    return model


def test_model_built_twice_in_process_resumes(tmp_path):
    keras.utils.clear_session()
    with pytest.raises(LostError):
        fit_unnamed(tmp_path / "lost", 2, lose_after=9)
    resumed = fit_unnamed(tmp_path / "lost", 2)
    straight = fit_unnamed(tmp_path / "straight", 2)
    leaves = list(flaxckpt.metadata(tmp_path / "lost").leaves)
    assert leaves == list(flaxckpt.metadata(tmp_path / "straight").leaves)
    generators = [path.split("/")[1] for path in leaves if "seed_generator" in path]
    assert generators == ["seed_generator", *(f"seed_generator_{n}" for n in (1, 2, 3))]
    assert any("/block_7/" in path for path in leaves)
    for one, other in zip(resumed.variables, straight.variables, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.slow
def test_restores_checkpoints_with_keras_names(tmp_path):
    keras.utils.clear_session()
    unnamed_model()  # so the names are not those of a new process
    model = unnamed_model()
    model.fit(PlainData(), epochs=1, verbose=0)
    model.jax_state_sync()
    state = model.get_state_tree()
    assert "sequential_1" in state["trainable_variables"]
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(STEPS, state, dataset=step_indexed())
        on_step = flaxckpt.CheckpointCallback(run, every_steps=100)
        checkpoint = KerasCheckpoint(on_step, step_indexed(), steps_per_epoch=STEPS)
        model.fit(checkpoint.data, epochs=2, verbose=0, callbacks=[checkpoint])
    assert checkpoint.completed == 2 * STEPS
    assert flaxckpt.metadata(tmp_path / "run").step == 2 * STEPS


class PlainData(keras.utils.PyDataset):
    """All batches, by their number."""

    num_batches = STEPS
    first = 0

    def begin(self, epoch, logs=None):
        self.first = epoch * STEPS

    def __getitem__(self, index):
        return make_batch(self.first + index)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """How a fit ends that nothing interrupts, and that has no callback at all."""
    model = make_model()
    data = PlainData()
    history = model.fit(
        data,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=data.begin)],
    )
    return bits(model), dict(enumerate(rows(history.history)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "lose_after", "every_steps"),
    slow.all_but(
        [(step_indexed, 8, 4), (step_indexed, 13, 6), (in_order, 17, 5)],
        [(step_indexed, 13, 6)],
    ),
)
def test_interrupted_fit_matches_uninterrupted_fit(
    tmp_path, straight, batches, lose_after, every_steps
):
    with pytest.raises(LostError):
        fit(tmp_path, batches(), lose_after=lose_after, every_steps=every_steps)
    steps = flaxckpt.Checkpointer(tmp_path).steps()
    assert steps[-1] >= lose_after - every_steps
    model, history = fit(tmp_path, batches(), every_steps=every_steps)
    assert bits(model) == straight[0]
    assert history == {
        epoch: logs
        for epoch, logs in straight[1].items()
        if epoch >= max(steps) // STEPS
    }


@pytest.mark.slow
@pytest.mark.parametrize(("together", "calls"), [(2, 5), (4, 3)])
def test_resumes_with_several_batches_per_call(tmp_path, straight, together, calls):
    options = {"steps_per_execution": together, "every_steps": 1}
    with pytest.raises(LostError):
        fit(tmp_path, step_indexed(), lose_after=calls, **options)
    assert flaxckpt.Checkpointer(tmp_path).latest_step() == 10
    model, _ = fit(tmp_path, step_indexed(), **options)
    assert bits(model) == straight[0]


@pytest.mark.slow
def test_does_not_lose_prefetched_batches(tmp_path, straight, monkeypatch):
    # So keras does what it does for an accelerator: it takes one batch ahead.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    taken = []
    batches = StepIndexed(lambda i: taken.append(i) or make_batch(i))
    with pytest.raises(LostError):
        fit(tmp_path, batches, lose_after=8, every_steps=8)
    assert taken[-1] == 8
    model, _ = fit(tmp_path, step_indexed(), every_steps=4)
    assert bits(model) == straight[0]


@pytest.mark.slow
def test_saves_last_step_before_averages_replace_weights(tmp_path):
    def optimizer():
        return keras.optimizers.Adam(1e-2, use_ema=True, name="adam")

    whole, _ = fit(tmp_path / "whole", step_indexed(), optimizer=optimizer())
    options = {"every_epochs": None}
    parts = tmp_path / "parts"
    fit(parts, step_indexed(), epochs=2, optimizer=optimizer(), **options)
    assert flaxckpt.Checkpointer(parts).steps() == [2 * STEPS]
    model, _ = fit(parts, step_indexed(), optimizer=optimizer(), **options)
    assert bits(model) == bits(whole)


class Signal(keras.callbacks.Callback):
    """Sends this process a signal after so many batches."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [75, None])
def test_signal_ends_training_at_current_step(tmp_path, straight, exit_code):
    model = make_model()
    leaves = pytest.raises(SystemExit) if exit_code else contextlib.nullcontext()
    with leaves, flaxckpt.Checkpointer(tmp_path) as checkpointer:
        on_step = flaxckpt.CheckpointCallback(checkpointer, exit_code=exit_code)
        checkpoint = KerasCheckpoint(on_step, step_indexed(), steps_per_epoch=STEPS)
        callbacks = [checkpoint, Signal(9)]
        model.fit(checkpoint.data, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    assert checkpointer.steps() == [6, 9]
    model, _ = fit(tmp_path, step_indexed())
    assert bits(model) == straight[0]


@pytest.mark.slow
def test_restores_sharding_of_distributed_weights(tmp_path):
    devices = keras.distribution.list_devices("cpu")
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["model/hidden/kernel"] = (None, "model")
    options = {
        "every_steps": 4,
        "distribution": keras.distribution.ModelParallel(
            layout_map=layouts, batch_dim_name="batch"
        ),
    }
    whole, _ = fit(tmp_path / "whole", step_indexed(), **options)
    with pytest.raises(LostError):
        fit(tmp_path / "lost", step_indexed(), lose_after=9, **options)
    model, _ = fit(tmp_path / "lost", step_indexed(), **options)
    assert bits(model) == bits(whole)
    kernels = [found.get_layer("hidden").kernel.value for found in (model, whole)]
    assert kernels[0].sharding == kernels[1].sharding
    assert not kernels[0].sharding.is_fully_replicated


@pytest.mark.slow
def test_error_names_unknown_layer(tmp_path):
    fit(tmp_path, step_indexed(), epochs=1)
    keras.utils.clear_session()
    other = keras.Sequential(
        [keras.Input((5,), name="input"), keras.layers.Dense(1, name="last")],
        name="model",
    )
    other.compile(loss="mse", optimizer="adam")
    on_step = flaxckpt.CheckpointCallback(flaxckpt.Checkpointer(tmp_path))
    checkpoint = KerasCheckpoint(on_step, step_indexed(), steps_per_epoch=STEPS)
    with pytest.raises(errors.RestoreMismatchError, match="model/last/kernel"):
        other.fit(checkpoint.data, callbacks=[checkpoint], verbose=0)


@pytest.mark.slow
def test_state_includes_accumulated_gradients(tmp_path):
    def optimizer():
        return keras.optimizers.SGD(1e-2, gradient_accumulation_steps=4, name="sgd")

    whole, _ = fit(tmp_path / "whole", step_indexed(), optimizer=optimizer())
    lost = tmp_path / "lost"
    with pytest.raises(LostError):
        fit(lost, step_indexed(), lose_after=9, every_steps=3, optimizer=optimizer())
    model, _ = fit(lost, step_indexed(), every_steps=3, optimizer=optimizer())
    assert bits(model) == bits(whole)


@pytest.mark.slow
def test_finished_run_trains_only_when_extended(tmp_path, straight):
    fit(tmp_path, step_indexed(), epochs=2)
    model, history = fit(tmp_path, step_indexed(), epochs=2)
    assert history == {}
    assert model.optimizer.iterations == 2 * STEPS
    model, history = fit(tmp_path, step_indexed(), epochs=EPOCHS)
    assert [*history] == [2]
    assert bits(model) == straight[0]


@pytest.mark.slow
def test_second_fit_continues_after_first(tmp_path, straight):
    model = make_model()
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        checkpoint = KerasCheckpoint(
            flaxckpt.CheckpointCallback(checkpointer),
            step_indexed(),
            steps_per_epoch=STEPS,
            every_epochs=None,
        )
        options = {"callbacks": [checkpoint], "verbose": 0}
        with pytest.raises(LostError):
            model.fit(
                checkpoint.data,
                epochs=1,
                callbacks=[checkpoint, LoseAfter(4)],
                verbose=0,
            )
        model.fit(checkpoint.data, epochs=2, **options)
        model.fit(checkpoint.data, epochs=EPOCHS, **options)
        assert checkpoint.completed == STEPS * EPOCHS
    assert bits(model) == straight[0]
    assert checkpointer.steps() == [STEPS * EPOCHS]


@pytest.mark.slow
def test_damaged_newest_step_resumes_epoch_of_previous_step(tmp_path, straight):
    with pytest.raises(LostError):
        fit(tmp_path, step_indexed(), lose_after=STEPS + 2, every_steps=STEPS - 1)
    assert flaxckpt.Checkpointer(tmp_path).steps() == [5, 6]
    item = tmp_path / "6/state"
    chunk = "trainable_variables.model.out.kernel/c.0.0"
    _, _, size = chunks.place(item, chunk)
    chunks.put(item, chunk, bytes(size))
    model, history = fit(tmp_path, step_indexed())
    assert [*history] == [0, 1, 2]
    assert bits(model) == straight[0]


@pytest.mark.slow
def test_saves_metrics_of_epoch_and_validation(tmp_path):
    validation = make_batch(1000)
    _, history = fit(
        tmp_path, step_indexed(), validation_data=validation, every_steps=STEPS
    )
    checkpointer = flaxckpt.Checkpointer(tmp_path)
    assert checkpointer.steps() == [6, 12, 18]
    assert {*checkpointer.metrics(6)} == {"loss", "mae", "val_loss", "val_mae"}
    assert [checkpointer.metrics(step) for step in (6, 12, 18)] == [*history.values()]


@pytest.mark.slow
def test_saves_epochs_at_requested_interval(tmp_path):
    fit(tmp_path, step_indexed(), epochs=4, every_epochs=3)
    assert flaxckpt.Checkpointer(tmp_path).steps() == [18, 24]


def test_step_number_is_optimizer_iteration(tmp_path):
    with pytest.raises(LostError):
        fit(tmp_path, step_indexed(), lose_after=8, every_steps=4)
    saved = flaxckpt.load(tmp_path, step=8)
    assert saved["optimizer_variables"]["adam"]["iteration"] == 8
    assert saved["non_trainable_variables"]["seed_generator"][
        "seed_generator_state"
    ].any()
    position = (tmp_path / "8/dataset/process_0-of-1.json").read_text()
    assert '"next_index": 8' in position


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_epoch": 5}, "5 steps per epoch"),
        ({"initial_epoch": 1}, "pass initial_epoch=0"),
    ],
)
def test_rejects_conflicting_epoch_options(tmp_path, options, message):
    with pytest.raises(errors.OptionError, match=message):
        fit(tmp_path, step_indexed(), **options)


@pytest.mark.slow
def test_rejects_batches_without_callback(tmp_path):
    on_step = flaxckpt.CheckpointCallback(flaxckpt.Checkpointer(tmp_path))
    checkpoint = KerasCheckpoint(on_step, step_indexed(), steps_per_epoch=STEPS)
    with pytest.raises(errors.OptionError, match="pass it to fit, too"):
        make_model().fit(checkpoint.data, verbose=0)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"steps_per_epoch": 0}, errors.OptionError, "steps_per_epoch"),
        ({"every_epochs": 0}, errors.OptionError, "every_epochs"),
        ({"batches": iter([])}, errors.DatasetStateError, "get_state"),
    ],
)
def test_rejects_invalid_options(tmp_path, options, kind, message):
    on_step = flaxckpt.CheckpointCallback(flaxckpt.Checkpointer(tmp_path))
    options = {"batches": step_indexed(), "steps_per_epoch": STEPS, **options}
    with pytest.raises(kind, match=message):
        KerasCheckpoint(on_step, **options)


@pytest.mark.slow
def test_rejects_other_backends():
    code = (
        "from flaxckpt.integrations.keras import KerasCheckpoint\n"
        "KerasCheckpoint(None, iter([]), steps_per_epoch=1)"
    )
    error = error_of(code, KERAS_BACKEND="numpy")
    assert "OptionError: Keras runs on numpy" in error


@pytest.mark.slow
def test_error_without_keras_names_the_extra_to_install():
    code = "import sys; sys.modules['keras'] = None; import flaxckpt.integrations.keras"
    assert "pip install 'flaxckpt[keras]'" in error_of(code)


def error_of(code, **environment):
    return programs.run("-c", code, code=None, **environment).stderr
