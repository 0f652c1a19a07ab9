"""The trainer's hook saves when told, restores exactly, and fits any loop."""

import collections
import dataclasses
import functools
import itertools
import signal
import subprocess
import sys
import threading
import weakref

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import strategies
from flax import nnx
from flax.training import train_state

import flaxckpt
from flaxckpt import _counters, _event_journal, _storage, errors
from flaxckpt.datasets import StepIndexed


@pytest.fixture
def ckpt(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        yield checkpointer


def drive(callback, steps):
    """Calls the hook for each step, and tells at which ones it saved."""
    return [step for step in steps if callback(step, {"n": step})]


def skipped(callback):
    """The steps that were due but not saved, each with the reason."""
    journal = callback.checkpointer.directory / "events.jsonl"
    events = _event_journal.read(journal)
    return {e.step: e.details["reason"] for e in events if e.kind == "skipped"}


def test_a_path_is_no_checkpointer(tmp_path):
    for path in (str(tmp_path), tmp_path):
        with pytest.raises(errors.OptionError, match=r"write .*\(Checkpointer\('/"):
            flaxckpt.CheckpointCallback(path, every_steps=3)


def test_a_run_and_a_save_say_what_they_are_at_a_prompt(tmp_path, ckpt):
    assert repr(ckpt) == f"Checkpointer('{tmp_path / 'run'}')"
    save = ckpt.save(1, {"n": 1})
    save.wait()
    assert repr(save) == f"<save of {tmp_path / 'run' / '1'}: durable>"


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
        ({"save_first": True}, range(3, 6), [3]),
        ({"save_first": True, "every_steps": 4}, range(1, 6), [1, 4]),
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
        saved += [step] if callback(step, {"n": step}) else []
    assert saved == [3, 6, 7, 10]


def test_saves_that_only_the_time_called_for_are_temporary(ckpt):
    now = [0.0]
    callback = flaxckpt.CheckpointCallback(
        ckpt,
        every_secs=10,
        temporary=True,
        every_steps=7,
        save_last=False,
        clock=lambda: now[0],
    )
    there = []
    for step in range(1, 12):
        now[0] += 4
        if callback(step, {"n": step}):
            ckpt.wait()
            there.append(ckpt.steps())
    assert there == [[3], [3, 6], [7], [7, 10]]


def test_one_step_is_never_saved_twice_and_the_skip_has_a_reason(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, save_last=False)
    assert callback(3, {"n": 3}, force=True)
    assert not callback(3, {"n": 3}, force=True)
    ckpt.wait()
    assert skipped(callback) == {3: "this run has saved or restored it already"}


def test_a_run_that_restored_nothing_does_not_mix_with_an_earlier_one(ckpt):
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        drive(callback, range(1, 9))
    again = flaxckpt.Checkpointer(ckpt.directory)
    with pytest.raises(errors.CheckpointExistsError, match="restore_or_init"):
        flaxckpt.CheckpointCallback(again, every_steps=100)(1, {"n": 1})
    # Whoever has loaded the newest step in another way may go on from there.
    goes_on = flaxckpt.CheckpointCallback(again, every_steps=2, save_last=False)
    assert drive(goes_on, range(9, 13)) == [10, 12]
    again.wait()


def test_a_damaged_step_is_replaced_when_the_run_gets_there_again(ckpt, caplog):
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        drive(callback, range(1, 5))
    chunk = max(
        (ckpt.directory / "4/state").rglob("*"),
        key=lambda path: path.stat().st_size if path.is_file() else 0,
    )
    chunk.write_bytes(bytes(chunk.stat().st_size))
    again = flaxckpt.Checkpointer(ckpt.directory)
    with flaxckpt.CheckpointCallback(again, every_steps=2) as callback:
        _, start = callback.restore_or_init({"n": 0})
        assert start == 2
        drive(callback, range(3, 5))
    assert again.restore(step=4) == {"n": 4}


def test_a_run_that_counts_from_the_beginning_again_is_stopped(ckpt):
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        drive(callback, range(1, 9))
    again = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
    state, _ = again.restore_or_init({"n": 0})
    with pytest.raises(errors.OptionError, match="restored step 8"):
        again(1, state)
    again.close()


def prefetched(iterator, depth):
    """Like flax.jax_utils.prefetch_to_device: takes some before it gives one."""
    ahead = collections.deque(itertools.islice(iterator, depth))
    while ahead:
        yield ahead.popleft()
        ahead.extend(itertools.islice(iterator, 1))


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("depth", [0, 2])
def test_batches_that_are_gone_before_the_loop_uses_them_are_warned_of(
    ckpt, caplog, per_step, start, depth
):
    inner = StepIndexed(lambda i: i)
    if start:
        for _ in range(start * per_step):
            next(inner)
        ckpt.save(start, {"n": start}, dataset=inner).wait()
        inner = StepIndexed(lambda i: i)
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, dataset=inner)
    callback.restore_or_init({"n": 0})
    batches = prefetched(inner, depth) if depth else inner
    with callback:
        for step in range(start + 1, start + 8):
            for _ in range(per_step):
                next(batches)
            callback(step, {"n": step})
    assert caplog.text.count("ahead of the loop") == (depth == 2)


def test_steps_beyond_the_one_that_was_restored_are_not_mixed_with(ckpt):
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        drive(callback, range(1, 9))
    back = flaxckpt.Checkpointer(ckpt.directory)
    back.restore(step=4)
    callback = flaxckpt.CheckpointCallback(back, every_steps=2, save_last=False)
    with pytest.raises(errors.CheckpointExistsError, match="beyond step 4"):
        callback(5, {"n": 5})
    back.delete(6)
    back.delete(8)
    assert drive(callback, range(5, 9)) == [6, 8]
    callback.close()


def test_a_loop_that_is_run_again_is_told_to_restore_first(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    callback.restore_or_init({"n": 0})
    drive(callback, range(1, 9))
    with pytest.raises(errors.CheckpointExistsError, match="restore_or_init"):
        callback(1, {"n": 1})
    state, start = callback.restore_or_init({"n": 0})
    assert (state, start) == ({"n": 8}, 8)
    assert drive(callback, range(9, 11)) == [10]
    callback.close()


def test_a_save_under_way_is_waited_for_before_beginning(ckpt, monkeypatch):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    callback(1, {"n": 1})
    real, going_on = _storage.sync_tree, threading.Event()
    monkeypatch.setattr(
        _storage,
        "sync_tree",
        lambda path: going_on.wait() and real(path),
    )
    callback(2, {"n": 2})
    threading.Timer(0.3, going_on.set).start()
    assert flaxckpt.CheckpointCallback(ckpt).restore_or_init({"n": 0}) == ({"n": 2}, 2)


def test_a_callback_whose_run_another_goes_on_with_saves_nothing_more(ckpt):
    first = flaxckpt.CheckpointCallback(ckpt, every_steps=5)
    first.restore_or_init({"n": 0})
    drive(first, range(1, 13))
    second = flaxckpt.CheckpointCallback(ckpt, every_steps=5)
    assert second.restore_or_init({"n": 0}) == ({"n": 10}, 10)
    drive(second, range(11, 18))
    ckpt.close()
    assert ckpt.steps() == [5, 10, 15, 17]


def test_two_callbacks_save_a_step_once(ckpt):
    often = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
    seldom = flaxckpt.CheckpointCallback(ckpt, every_steps=3)
    saved = [(often(s, {"n": s}), seldom(s, {"n": s})) for s in range(1, 8)]
    assert saved[5] == (True, False)
    ckpt.save(8, {"n": 8})
    assert not often(8, {"n": 8})
    ckpt.close()
    assert ckpt.steps() == [2, 3, 4, 6, 7, 8]


def test_a_save_that_failed_is_not_taken_for_one(ckpt, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    callback = flaxckpt.CheckpointCallback(ckpt)
    callback(1, {"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(_storage, "sync_tree", fail)
        callback(5, {"n": 5}, force=True)
        with pytest.raises(errors.SaveFailedError):
            callback.wait()
    assert callback(5, {"n": 5}, force=True)
    callback.close()
    assert ckpt.steps() == [5]


def test_the_dataset_that_was_restored_is_the_one_that_is_saved(ckpt, caplog):
    batches = StepIndexed(lambda i: i)
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        callback.restore_or_init({"n": 0}, dataset=batches)
        next(batches)
        callback(1, {"n": 1})
    assert ckpt.has_dataset(1)
    without = flaxckpt.CheckpointCallback(ckpt)
    without.restore_or_init({"n": 0})
    assert "the data begin anew" in caplog.text
    without.close()


def test_batches_that_are_taken_in_the_head_of_the_loop_are_warned_of(ckpt, caplog):
    batches = StepIndexed(lambda i: i)
    with flaxckpt.CheckpointCallback(ckpt, every_steps=3, dataset=batches) as callback:
        callback.restore_or_init({"n": 0})
        for _, step in zip(batches, range(1, 8), strict=False):
            callback(step, {"n": step})
    assert "1 more batches" in caplog.text


@pytest.mark.parametrize("closing", ["checkpointer", "callback"])
def test_a_block_that_ends_by_an_error_leaves_nothing_behind(tmp_path, closing):
    ckpt = flaxckpt.Checkpointer(tmp_path)
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=4)
    before = signal.getsignal(signal.SIGTERM)

    def run():
        with ckpt if closing == "checkpointer" else callback:
            drive(callback, range(1, 7))
            assert signal.getsignal(signal.SIGTERM) is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert signal.getsignal(signal.SIGTERM) is before
    ckpt.close()
    assert ckpt.steps() == [4]
    assert skipped(callback) == {6: "the block ended by ZeroDivisionError"}


def test_a_closed_callback_is_forgotten(ckpt):
    told = []
    state = {"n": np.ones(3)}
    callback = flaxckpt.CheckpointCallback(ckpt, sinks=[told.append])
    callback(1, state)
    callback.close()
    assert [event.kind for event in told][-1] == "committed"
    gone = weakref.ref(callback)
    del callback
    assert gone() is None
    told.clear()
    ckpt.save(2, state).wait()
    assert told == []


def test_a_program_that_ends_without_closing_is_told_what_is_lost(tmp_path):
    code = """
import flaxckpt, sys
on_step = flaxckpt.CheckpointCallback(flaxckpt.Checkpointer(sys.argv[1]), every_steps=2)
for step in (1, 2, 3):
    on_step(step, {"n": step})
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert ended.returncode == 0
    assert "step 3 is not saved" in ended.stderr
    assert flaxckpt.load(tmp_path) == {"n": 2}


# ---- what the first call finds -----------------------------------------------------


@pytest.mark.parametrize(
    ("state", "metrics", "told"),
    [
        ({"step": 1}, None, "step_is='index'"),
        ({"n": 1}, {"loss": np.ones(3)}, "loss"),
        ({"n": 1}, {"loss": "low"}, "loss"),
        ({"n": 1}, [0.5], "metrics"),
    ],
)
def test_the_first_call_finds_what_the_first_save_would(ckpt, state, metrics, told):
    step = 0 if "step" in state else 1
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=1000, save_last=False)
    with pytest.raises(errors.OptionError, match=told):
        callback(step, state, metrics=metrics)
    callback.give_way()


@pytest.mark.parametrize("step", [1.5, "3", None, True])
def test_a_step_is_a_whole_number(ckpt, step):
    with pytest.raises(errors.OptionError, match="whole number"):
        flaxckpt.CheckpointCallback(ckpt)(step, {"n": 1})


def test_a_reader_cannot_train(ckpt):
    ckpt.save(1, {"n": 1}).wait()
    reader = flaxckpt.Checkpointer(ckpt.directory, read_only=True)
    callback = flaxckpt.CheckpointCallback(reader)
    state, start = callback.restore_or_init({"n": 0})
    with pytest.raises(errors.ReadOnlyError):
        callback(start + 1, state)
    callback.give_way()


# ---- what the state counts --------------------------------------------------------


def nnx_pair(step):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    optimizer.step.set_value(jnp.asarray(step, jnp.uint32))
    return model, optimizer


@pytest.mark.parametrize(
    "state",
    [
        lambda step: create().replace(step=step),
        lambda step: create().replace(step=jnp.asarray(step)),
        lambda step: {"params": {}, "step": jnp.asarray(step)},
        lambda step: {"train": create().replace(step=step), "ema": {}},
        nnx_pair,
    ],
)
def test_a_save_under_another_step_than_the_states_own_is_refused(ckpt, state):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    assert callback(2, state(2))
    assert not callback(3, state(2)), "nothing is saved, so nothing is looked at"
    with pytest.raises(errors.OptionError, match="step_is='index'"):
        callback(4, state(5))
    with pytest.raises(errors.OptionError, match=r"called step 6, but .* is 3"):
        callback(6, state(3))
    ckpt.wait()
    assert ckpt.steps() == [2]
    other = flaxckpt.CheckpointCallback(
        ckpt, every_steps=2, save_last=False, check_step=False
    )
    ckpt.restore(step=2)
    assert other(4, state(5))


def test_of_several_counters_one_has_to_agree(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    generator, critic = create().replace(step=2), create().replace(step=10)
    assert callback(10, {"generator": generator, "critic": critic})
    with pytest.raises(errors.OptionError):
        callback(20, (generator, critic))


@pytest.mark.parametrize("step", [True, 0.5, jnp.ones(3), "third", len])
def test_what_is_no_counter_does_not_count(ckpt, step):
    assert not list(_counters._found({"step": step}))


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
    assert ckpt.restore() == {"n": 6}


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
    monkeypatch.setattr(_storage, "sync_tree", fail)
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
    "options",
    [
        {"every_steps": 0},
        {"every_steps": 1.5},
        {"every_secs": -1},
        {"step_is": "epoch"},
        {"grace_secs": 0},
        {"preflight": "maybe"},
        {"temporary": True},
    ],
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


def test_what_is_bound_is_asked_for_only_when_it_is_saved(ckpt):
    asked = []
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=4, preflight=False)
    callback.bind(state=lambda: asked.append(step) or {"n": step})
    for step in range(1, 11):
        callback(step)
    assert asked == [1, 4, 8], "and once for the counter of the first"
    callback.close()
    assert set(asked) == {1, 4, 8, 10}


def test_a_last_step_that_was_donated_further_is_not_saved_and_that_is_said(
    ckpt, caplog
):
    @functools.partial(jax.jit, donate_argnums=0)
    def add(state):
        return {"n": state["n"] + 1}

    state = {"n": jnp.zeros(64)}
    with flaxckpt.CheckpointCallback(ckpt) as callback:
        state = add(state)
        callback(1, state)
        state = add(state)
    assert ckpt.steps() == []
    assert "donated" in caplog.text
    assert "donated" in skipped(callback)[1]


def test_data_and_metrics_can_be_bound_too(ckpt):
    batches, loss = StepIndexed(lambda i: i), 0.0
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    callback.bind(state=lambda: {"n": 1}, dataset=lambda: batches)
    callback.bind(metrics=lambda: {"loss": loss})
    for step in range(1, 4):
        next(batches)
        loss = 1.0 / step
        callback(step)
    ckpt.wait()
    assert ckpt.metrics(2) == {"loss": 0.5}
    again = StepIndexed(lambda i: i)
    ckpt.restore({"n": 0}, dataset=again)
    assert next(again) == 2


@dataclasses.dataclass
class Info:
    """What a loop knows of a step, as some pass it to their hooks."""

    step: int
    state: object
    loss: float

    @property
    def next_step(self):
        return self.step + 1


def test_loops_may_describe_a_step_by_an_object(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=3, save_last=False)
    for step in range(5):
        callback.on_step(Info(step, {"n": step}, loss=step / 4))
    callback.on_step(Info(5, {"n": 5}, loss=0.0), force=True)
    ckpt.wait()
    assert ckpt.steps() == [3, 6]
    assert ckpt.metrics(3) == {"loss": 0.5}


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
    callback(3, state.replace(step=3))
    callback.close()
    restored, step = callback.restore_or_init(abstract)
    callback.close()
    assert step == 3
    assert jnp.array_equal(restored.params["w"], state.params["w"])


def test_metrics_may_be_added_by_the_loops_own_count(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, step_is="index")
    callback(1, {"n": 1})
    callback.add_metrics(1, {"loss": 0.5})
    assert ckpt.metrics(2) == {"loss": 0.5}
