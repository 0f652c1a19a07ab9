"""The trainer's hook saves when told, restores exactly, and fits any loop."""

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import optax
import pytest
import strategies
from flax.training import train_state

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed


@pytest.fixture
def ckpt(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        yield checkpointer


def drive(callback, steps):
    """Calls the hook for each step, and tells at which ones it saved."""
    return [step for step in steps if callback(step, {"step": step})]


# ---- when ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps", "saved"),
    [
        ({"every_steps": 3}, range(1, 11), [3, 6, 9]),
        ({"every_steps": 3}, range(2, 20, 4), [6, 10, 14, 18]),
        ({"on_steps": (2, 7)}, range(1, 11), [2, 7]),
        ({"on_steps": (2, 7)}, range(0, 11, 4), [4, 8]),
        ({"every_steps": 4, "on_steps": (5,)}, range(1, 9), [4, 5, 8]),
        ({}, range(1, 11), []),
        ({"every_steps": 1}, [0, 1, 1, 2], [1, 2]),
        ({"every_steps": 2, "step_is": "index"}, range(6), [1, 3, 5]),
    ],
)
def test_triggers_fire_when_their_step_is_reached_or_passed(
    ckpt, options, steps, saved
):
    callback = flaxckpt.CheckpointCallback(ckpt, save_last=False, **options)
    assert drive(callback, steps) == saved
    ckpt.wait()
    offset = 1 if options.get("step_is") == "index" else 0
    assert ckpt.steps() == [step + offset for step in saved]


def test_time_triggers_count_from_the_last_save(ckpt):
    now = [100.0]
    callback = flaxckpt.CheckpointCallback(
        ckpt, every_secs=10, every_steps=7, save_last=False, clock=lambda: now[0]
    )
    saved = []
    for step in range(1, 13):
        now[0] += 4
        saved += [step] if callback(step, {"step": step}) else []
    assert saved == [3, 6, 7, 10]


def test_a_call_can_force_a_save_even_of_step_0(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=100, save_last=False)
    assert callback(0, {"step": 0}, force=True)
    assert not callback(1, {"step": 1})
    ckpt.wait()
    assert ckpt.steps() == [0]


@pytest.mark.parametrize("closing", ["checkpointer", "callback"])
def test_the_last_step_is_saved_once_when_the_run_ends(tmp_path, closing):
    ckpt = flaxckpt.Checkpointer(tmp_path)
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=4)
    drive(callback, range(1, 7))
    (ckpt if closing == "checkpointer" else callback).close()
    assert ckpt.steps() == [4, 6]
    ckpt.close()
    callback.close()
    assert ckpt.steps() == [4, 6]
    assert ckpt.restore() == {"step": 6}


def test_a_failing_loop_does_not_save_what_it_leaves_behind(tmp_path):
    def run():
        with ckpt, flaxckpt.CheckpointCallback(ckpt, every_steps=4) as callback:
            drive(callback, range(1, 7))
            raise ZeroDivisionError

    ckpt = flaxckpt.Checkpointer(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run()
    assert ckpt.steps() == [4]


def test_a_failed_save_is_told_at_the_next_call(ckpt, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device")

    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    monkeypatch.setattr(flaxckpt._save._storage, "sync_tree", fail)
    assert callback(2, {"step": 2})
    while not callback.last_save.done():
        pass
    with pytest.raises(errors.SaveFailedError, match="No space left"):
        callback(3, {"step": 3})
    monkeypatch.undo()
    assert callback(4, {"step": 4})
    ckpt.wait()
    assert ckpt.steps() == [4]


@pytest.mark.parametrize(
    "options", [{"every_steps": 0}, {"every_secs": -1}, {"step_is": "epoch"}]
)
def test_options_that_make_no_sense_are_refused(ckpt, options):
    with pytest.raises(errors.OptionError, match=next(iter(options))):
        flaxckpt.CheckpointCallback(ckpt, **options)


# ---- the loops it is called from --------------------------------------------------


def test_loops_that_pass_the_step_only_bind_the_state(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    with pytest.raises(errors.OptionError, match="bind"):
        callback(1)
    state = {"n": 0}
    callback.bind(state=lambda: state)
    for step in range(1, 5):
        state = {"n": step}
        for hook in [callback]:
            hook(step)
    ckpt.wait()
    assert ckpt.restore() == {"n": 4}


def test_it_takes_what_clu_passes_to_periodic_callbacks(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    assert callback.__name__
    assert callback(step=2, t=12.5, state={"n": 2}, learning_rate=0.1)


@flax.struct.dataclass
class Metrics(clu.metrics.Collection):
    loss: clu.metrics.Average.from_output("loss")


def test_clu_metric_collections_are_computed_when_they_are_saved(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    metrics = Metrics.single_from_model_output(loss=jnp.array([1.0, 2.0]))
    callback(2, {"n": 2}, metrics=metrics)
    ckpt.wait()
    assert ckpt.metrics(2) == {"loss": 1.5}


# ---- resuming --------------------------------------------------------------------


def create():
    return train_state.TrainState.create(
        apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.adam(1e-1)
    )


@jax.jit
def train_step(state, batch):
    grads = jax.tree.map(lambda w: jnp.sin(w) * batch, state.params)
    return state.apply_gradients(grads=grads)


def train(directory, total, stop=None):
    """The loop of the README; `stop` loses the process after that step."""
    batches = StepIndexed(lambda i: jnp.float32(i + 1))
    ckpt = flaxckpt.Checkpointer(directory)
    on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=4, dataset=batches)
    state, start = on_step.restore_or_init(create())
    for step in range(start + 1, total + 1):
        state = train_step(state, next(batches))
        on_step(step, state)
        if step == stop:
            ckpt.wait()
            return start
    ckpt.close()
    return start


def test_a_resumed_run_equals_the_run_it_would_have_been(tmp_path):
    assert train(tmp_path / "a", 20, stop=11) == 0
    assert train(tmp_path / "a", 20, stop=18) == 8
    assert train(tmp_path / "a", 20) == 16
    train(tmp_path / "b", 20)
    found = [flaxckpt.load(tmp_path / run, step=20) for run in "ab"]
    strategies.assert_same_state(*found)
    positions = [
        (tmp_path / r / "20/dataset/process_0-of-1.json").read_text() for r in "ab"
    ]
    assert positions[0] == positions[1]
    assert '"next_index": 20' in positions[0]


def written(directory):
    """When everything in a run was written, but for the journal of its events."""
    return {
        path: path.stat().st_mtime_ns
        for path in directory.rglob("*")
        if path.name != "events.jsonl"
    }


def test_resuming_a_finished_run_trains_and_saves_no_more(tmp_path):
    train(tmp_path, 8)
    before = written(tmp_path)
    assert train(tmp_path, 8) == 8
    assert written(tmp_path) == before


def test_a_fresh_run_needs_values_and_a_resumed_one_does_not(tmp_path):
    abstract = jax.eval_shape(create)
    ckpt = flaxckpt.Checkpointer(tmp_path)
    callback = flaxckpt.CheckpointCallback(ckpt)
    with pytest.raises(errors.CheckpointNotFoundError, match="initialised state"):
        callback.restore_or_init(abstract)
    state = create()
    assert callback.restore_or_init(state) == (state, 0)
    callback(3, state)
    callback.close()
    restored, step = callback.restore_or_init(abstract)
    assert step == 3
    assert jnp.array_equal(restored.params["w"], state.params["w"])


def test_metrics_may_be_added_by_the_loops_own_count(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, step_is="index")
    callback(1, {"n": 1})
    callback.add_metrics(1, {"loss": 0.5})
    assert ckpt.metrics(2) == {"loss": 0.5}
