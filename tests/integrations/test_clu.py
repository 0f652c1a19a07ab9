"""Training loops of CLU; its modules are the installed ones, without TensorFlow."""

import functools
import importlib
import logging
import sys
from pathlib import Path

import clu.data
import clu.metrics
import clu.values
import flax
import jax
import jax.numpy as jnp
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.integrations.clu import PeriodicCheckpoint, import_metric_writers, scalars
from flaxckpt.policies import BestN


@flax.struct.dataclass
class Metrics(clu.metrics.Collection):
    loss: clu.metrics.Average.from_output("loss")


@flax.struct.dataclass
class Picture(clu.metrics.LastValue):
    def compute_value(self):
        return clu.values.Image(jnp.zeros((1, 2, 2, 3)))


@flax.struct.dataclass
class WithPicture(clu.metrics.Collection):
    loss: clu.metrics.Average.from_output("loss")
    picture: Picture.from_output("loss")


def losses(*values, cls=Metrics):
    return cls.single_from_model_output(loss=jnp.array(values))


@pytest.fixture
def ckpt(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        yield ckpt


@pytest.fixture
def writers(monkeypatch):
    """`clu.metric_writers` as a machine without TensorFlow has it."""
    forget_writers()
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    yield import_metric_writers()
    forget_writers()


def forget_writers():
    for name in list(sys.modules):
        if name.startswith(("clu.metric_writers", "clu.periodic_actions")):
            del sys.modules[name]


# ---- the hook --------------------------------------------------------------------


def test_saves_metrics_of_all_batches_since_last_save(ckpt):
    checkpoint = PeriodicCheckpoint(flaxckpt.CheckpointCallback(ckpt, every_steps=2))
    saved = [
        checkpoint(step, 0.5, state={"n": step}, batch_metrics=losses(*values))
        for step, values in enumerate([[1.0], [4.0, 4.0], [5.0], [7.0]], start=1)
    ]
    ckpt.wait()
    assert saved == [False, True, False, True]
    assert [ckpt.metrics(step) for step in ckpt.steps()] == [{"loss": 3}, {"loss": 6}]


def test_end_of_loop_saves_metrics_since_last_save(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
        checkpoint = PeriodicCheckpoint(on_step)
        for step in range(1, 6):
            checkpoint(step, state={"n": step}, batch_metrics=losses(step))
    assert ckpt.metrics(5) == {"loss": 5}
    assert ckpt.metrics(4) == {"loss": 3.5}


def test_keeps_best_steps_by_computed_metrics(tmp_path):
    keep = [BestN(1, "loss", mode="min")]
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1)
        checkpoint = PeriodicCheckpoint(on_step)
        for step, loss in enumerate([3.0, 1.0, 2.0], start=1):
            checkpoint(step, state={"n": step}, batch_metrics=losses(loss))
            ckpt.wait()
        assert ckpt.best_step("loss", mode="min") == 2
    assert 1 not in ckpt.steps()
    assert 2 in ckpt.steps()


def test_saves_metrics_of_loop_unchanged(ckpt):
    checkpoint = PeriodicCheckpoint(flaxckpt.CheckpointCallback(ckpt, every_steps=1))
    merged = losses(1.0).merge(losses(2.0))
    checkpoint(1, state={"n": 1}, metrics=merged)
    checkpoint(2, state={"n": 2}, metrics={"accuracy": 0.5})
    checkpoint(3, state={"n": 3}, metrics=losses(2.0, cls=WithPicture))
    ckpt.wait()
    assert [ckpt.metrics(step) for step in (1, 2, 3)] == [
        {"loss": 1.5},
        {"accuracy": 0.5},
        {"loss": 2},
    ]


def test_periodic_checkpoint_works_in_a_list_of_hooks(ckpt):
    on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
    state = {"n": 0}
    on_step.bind(state=lambda: state, metrics=lambda: {"loss": state["n"] / 2})
    for step in range(1, 5):
        state = {"n": step}
        for hook in [PeriodicCheckpoint(on_step)]:
            hook(step, 1.5)
    ckpt.wait()
    assert ckpt.steps() == [2, 4]
    assert ckpt.metrics(4) == {"loss": 2}
    assert ckpt.restore(step=4) == {"n": 4}


def test_clu_periodic_callback_decides_when_to_save(ckpt, writers):
    actions = importlib.import_module("clu.periodic_actions")
    checkpoint = PeriodicCheckpoint(flaxckpt.CheckpointCallback(ckpt))
    hook = actions.PeriodicCallback(
        every_steps=2, callback_fn=functools.partial(checkpoint, force=True)
    )
    for step in range(1, 5):
        hook(step, state={"n": step}, metrics=losses(step), learning_rate=0.1)
    ckpt.wait()
    assert ckpt.steps() == [2, 4]
    assert ckpt.metrics(4) == {"loss": 4}
    assert hook.get_last_callback_result()


def test_rejects_invalid_arguments(ckpt):
    with pytest.raises(errors.OptionError, match=r"PeriodicCheckpoint\(Checkp"):
        PeriodicCheckpoint(ckpt)
    checkpoint = PeriodicCheckpoint(flaxckpt.CheckpointCallback(ckpt, every_steps=9))
    call = functools.partial(checkpoint, 1, state={"n": 1})
    with pytest.raises(errors.OptionError, match="either batch_metrics"):
        call(batch_metrics=losses(1.0), metrics={"loss": 1.0})
    with pytest.raises(errors.OptionError, match=r"clu.metrics.Collection, got \{'lo"):
        call(batch_metrics={"loss": 1.0})
    with pytest.raises(errors.OptionError, match=r"did you mean metrics="):
        call(metric=losses(1.0))
    call(batch_metrics=losses(1.0))
    with pytest.raises(errors.OptionError, match="WithPicture cannot be merged"):
        call(batch_metrics=losses(1.0, cls=WithPicture))


def test_rejects_replicated_metrics(ckpt):
    checkpoint = PeriodicCheckpoint(flaxckpt.CheckpointCallback(ckpt, every_steps=1))
    replicated = jax.tree.map(lambda x: jnp.stack([x, x]), losses(1.0))
    with pytest.raises(errors.OptionError, match=r"computed: .*unreplicate"):
        checkpoint(1, state={"n": 1}, batch_metrics=replicated)
    assert ckpt.steps() == []


def test_scalars_omit_non_numeric_values():
    assert scalars(losses(1.0, 2.0, cls=WithPicture)) == {"loss": 1.5}


# ---- dataset iterators -----------------------------------------------------------


class Counter(clu.data.DatasetIterator):
    """A dataset iterator that needs no TensorFlow."""

    def __init__(self):
        self.n = 0

    def __next__(self):
        self.n += 1
        return {"n": jnp.float32(self.n)}

    def reset(self):
        self.n = 0

    @property
    def element_spec(self):
        return {"n": clu.data.ArraySpec(dtype="float32", shape=())}

    def save(self, filename):
        Path(f"{filename}.txt").write_text(str(self.n))

    def restore(self, filename):
        self.n = int(Path(f"{filename}.txt").read_text())


def train(directory, total):
    """Returns the sum of all batches so far, and the first step of this start."""
    batches = clu.data.PeekableDatasetIterator(Counter())
    with flaxckpt.Checkpointer(directory) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=3, dataset=batches)
        checkpoint = PeriodicCheckpoint(on_step)
        state, start = on_step.restore_or_init({"sum": jnp.float32(0)})
        for step in range(start + 1, total + 1):
            assert batches.peek()["n"] == step
            state = {"sum": state["sum"] + next(batches)["n"]}
            checkpoint(step, state=state, batch_metrics=losses(state["sum"]))
    return float(state["sum"]), start


def test_resumes_dataset_iterator(tmp_path):
    assert train(tmp_path, 5) == (15, 0)
    assert train(tmp_path, 8) == (36, 5)


def test_rejects_dataset_iterator_without_saved_state(ckpt):
    class Stateless(Counter):
        save = clu.data.DatasetIterator.save

    with pytest.raises(errors.DatasetStateError, match=r"Stateless.*methods save"):
        ckpt.save(1, {"n": 1}, dataset=Stateless())
    assert ckpt.steps() == []


# ---- metric writers --------------------------------------------------------------


def test_imports_writers_without_tensorflow(writers):
    assert import_metric_writers() is writers
    assert sys.modules["clu.metric_writers"] is writers
    importlib.import_module("clu.periodic_actions")
    writer = writers.create_default_writer(just_logging=True)
    writer.write_scalars(1, {"loss": 0.5})
    writer.close()
    with pytest.raises(errors.OptionError, match="just_logging=True"):
        writers.create_default_writer("logs")


def test_reports_other_missing_modules(monkeypatch, writers):
    forget_writers()
    monkeypatch.setitem(sys.modules, "wrapt", None)
    with pytest.raises(ModuleNotFoundError, match="wrapt"):
        import_metric_writers()


@pytest.mark.parametrize("kind", ["logging", "async", "multi", "async multi"])
def test_writer_receives_event_numbers(tmp_path, caplog, writers, kind):
    log = writers.LoggingWriter()
    writer = {
        "logging": log,
        "async": writers.AsyncWriter(log),
        "multi": writers.MultiWriter([log]),
        "async multi": writers.AsyncMultiWriter([log]),
    }[kind]
    with (
        caplog.at_level(logging.INFO, logger="absl"),
        writers.ensure_flushes(writer),
        flaxckpt.Checkpointer(tmp_path, sinks=[writer]) as ckpt,
    ):
        ckpt.save(7, {"n": 1}, metrics=scalars(losses(2.0)))
    assert "[7] checkpoint/blocked_secs=" in caplog.text
    assert "checkpoint/bytes=" in caplog.text
    writer.close()


def test_failing_writer_does_not_affect_checkpoints(tmp_path, caplog, writers):
    class Broken(writers.LoggingWriter):
        def write_scalars(self, step, scalars):
            raise OSError("no space left")

    writer = writers.AsyncWriter(Broken())
    with flaxckpt.Checkpointer(tmp_path, sinks=[writer]) as ckpt:
        ckpt.save(1, {"n": 1}).wait()
        ckpt.save(2, {"n": 2}).wait()
    assert ckpt.steps() == [1, 2]
    assert "no space left" in caplog.text
