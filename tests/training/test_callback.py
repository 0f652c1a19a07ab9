"""The trainer's hook saves when told, restores exactly, and fits any loop."""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import signal
import sys
import threading
import weakref
from typing import Any, NamedTuple

import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from tests.helpers import programs, run_files, seams, strategies


@pytest.fixture
def ckpt(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        yield checkpointer


def drive(callback, steps):
    """Calls the hook for each step, and tells at which ones it saved."""
    return [step for step in steps if callback(step, {"n": step})]


def skipped(callback):
    """The steps that were due but not saved, each with the reason."""
    events = run_files.read_events(callback.checkpointer.directory)
    return {e.step: e.details["reason"] for e in events if e.kind == "skipped"}


def test_rejects_path_instead_of_checkpointer(tmp_path):
    for path in (str(tmp_path), tmp_path):
        with pytest.raises(errors.OptionError, match=r"write .*\(Checkpointer\('/"):
            flaxckpt.CheckpointCallback(path, every_steps=3)


def test_repr_of_run_and_save_names_path_and_state(tmp_path, ckpt):
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
def test_triggers_fire_at_or_after_their_step(ckpt, options, steps, saved):
    callback = flaxckpt.CheckpointCallback(ckpt, save_last=False, **options)
    assert drive(callback, steps) == saved
    ckpt.wait()
    offset = 1 if options.get("step_is") == "index" else 0
    assert ckpt.steps() == [step + offset for step in saved]


def test_saves_triggered_only_by_time_are_temporary(ckpt):
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


def test_skips_second_save_of_step_with_reason(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, save_last=False)
    assert callback(3, {"n": 3}, force=True)
    assert not callback(3, {"n": 3}, force=True)
    ckpt.wait()
    assert skipped(callback) == {3: "this run has already saved or restored it"}


def test_unrestored_run_does_not_mix_with_earlier_run(ckpt):
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        drive(callback, range(1, 9))
    again = flaxckpt.Checkpointer(ckpt.directory)
    with pytest.raises(errors.CheckpointExistsError, match="restore_or_init"):
        flaxckpt.CheckpointCallback(again, every_steps=100)(1, {"n": 1})
    # Whoever has loaded the newest step in another way may go on from there.
    goes_on = flaxckpt.CheckpointCallback(again, every_steps=2, save_last=False)
    assert drive(goes_on, range(9, 13)) == [10, 12]
    again.wait()


def test_resumed_run_replaces_damaged_step(ckpt, caplog):
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


def test_rejects_counting_from_beginning_after_restore(ckpt):
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        drive(callback, range(1, 9))
    again = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
    state, _ = again.restore_or_init({"n": 0})
    with pytest.raises(errors.OptionError, match="restored step 8"):
        again(1, state)
    again.close()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "dict", "struct", "nnx without a counter"])
def test_first_call_rejects_loop_from_0_without_counter(tmp_path, kind, resumed):
    ckpt = flaxckpt.Checkpointer(tmp_path)
    template, _, _ = TRAINERS[kind]()
    if resumed:
        ckpt.save(5, template).wait()
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=100)
    state, start = callback.restore_or_init(template)
    if kind in ("numpy", "dict"):
        for name in state:
            state[name] = state[name] + 1
    elif kind == "struct":
        state = jax.tree.map(lambda leaf: leaf + 1, state)
    else:
        state(jnp.ones((2, 3)))
    with pytest.raises(errors.OptionError, match=r"step_is='index'.*start \+ 1"):
        callback(start, state)
    callback.give_way()
    index = flaxckpt.CheckpointCallback(ckpt, every_steps=100, step_is="index")
    state, start = index.restore_or_init(template)
    assert not index(start, state)
    index.give_way()


@pytest.mark.parametrize("kind", ["numpy", "struct", "nnx without a counter"])
def test_loop_may_report_restored_step_before_training(ckpt, kind):
    state, _, _ = TRAINERS[kind]()
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=100, save_last=False)
    state, start = callback.restore_or_init(state)
    assert not callback(start, state)
    assert not callback(start + 1, state)
    callback.close()


def sharded(state):
    mesh = jax.make_mesh((1,), ("a",))
    everywhere = jax.sharding.PartitionSpec()
    return jax.device_put(state, jax.sharding.NamedSharding(mesh, everywhere))


MOVES = {
    "sharded": sharded,
    "jitted": jax.jit(lambda state: jax.tree.map(jnp.copy, state)),
    "copied": copy.deepcopy,
    "fetched": jax.device_get,
    "replicated": flax.jax_utils.replicate,
    "in other containers": lambda state: list(map(jnp.copy, jax.tree.leaves(state))),
    "in part": lambda state: jnp.copy(jax.tree.leaves(state)[0]),
    "in lower precision": lambda state: jax.tree.map(jnp.bfloat16, state),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kind", ["dict", "numpy", "NamedTuple", "FrozenDict"])
def test_loop_may_move_state_before_training(ckpt, kind, move):
    state, _, _ = TRAINERS[kind]()
    with flaxckpt.CheckpointCallback(ckpt, every_steps=4) as callback:
        state, start = callback.restore_or_init(state)
        state = MOVES[move](state)
        assert start == 0
        for step in range(start, 6):
            callback(step, state)
            state = jax.tree.map(lambda leaf: leaf + 1, state)
    assert ckpt.steps() == [4, 5]


@pytest.mark.parametrize("move", ["sharded", "jitted", "fetched"])
def test_detects_training_of_moved_state(ckpt, move, monkeypatch):
    seams.replace(
        monkeypatch, "kept_state.compared_bytes", 1000
    )  # of the large ones, a part
    large = {f"w{i}": jnp.full(100, float(i)) for i in range(10)}
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=4)
    state, start = callback.restore_or_init(large | {"n": jnp.ones(3)})
    state = MOVES[move](jax.tree.map(lambda leaf: leaf * 2, state))
    with pytest.raises(errors.OptionError, match="step_is='index'"):
        callback(start, state)
    callback.give_way()


def test_saves_first_state_after_move(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, save_last=False)
    state, start = callback.restore_or_init({"w": jnp.ones(3), "x": float("nan")})
    moved = jax.device_put(state, jax.devices()[0])
    moved["w"] = moved["w"] + 0
    assert callback(start, moved, force=True)
    callback.close()


def test_nan_values_do_not_count_as_changed(ckpt):
    state = {"x": float("nan"), "n": np.float32("nan"), "w": np.full(2, np.nan)}
    callback = flaxckpt.CheckpointCallback(ckpt, save_last=False)
    assert not callback(callback.restore_or_init(state)[1], copy.deepcopy(state))
    callback.close()


@pytest.mark.parametrize("step_is", ["completed", "index"])
def test_restore_warns_about_differently_numbered_steps(tmp_path, caplog, step_is):
    ckpt = flaxckpt.Checkpointer(tmp_path)
    ckpt.save(6, create().replace(step=7)).wait()
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=100, step_is=step_is)
    state, start = callback.restore_or_init(create())
    assert start == 6
    assert "step 6" in caplog.text
    assert "state.step is 7" in caplog.text
    first = start if step_is == "index" else start + 1
    with pytest.raises(errors.OptionError, match=r"int\(state\.step\)") as raised:
        callback(first, state.replace(step=8))
    assert f"pass step_is={step_is!r}" not in str(raised.value)
    callback.give_way()


def prefetched(iterator, depth):
    """Like flax.jax_utils.prefetch_to_device: takes some before it gives one."""
    ahead = collections.deque(itertools.islice(iterator, depth))
    while ahead:
        yield ahead.popleft()
        ahead.extend(itertools.islice(iterator, 1))


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("depth", [0, 2])
def test_warns_about_batches_consumed_ahead_of_loop(
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


def test_does_not_mix_with_steps_after_restored_one(ckpt):
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        drive(callback, range(1, 9))
    back = flaxckpt.Checkpointer(ckpt.directory)
    back.restore(step=4)
    callback = flaxckpt.CheckpointCallback(back, every_steps=2, save_last=False)
    with pytest.raises(errors.CheckpointExistsError, match="continues from step 4"):
        callback(5, {"n": 5})
    back.delete(6)
    back.delete(8)
    assert drive(callback, range(5, 9)) == [6, 8]
    callback.close()


def test_error_of_repeated_loop_advises_to_restore_first(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    callback.restore_or_init({"n": 0})
    drive(callback, range(1, 9))
    with pytest.raises(errors.OptionError, match=r"saved step 8: .* restore_or_init"):
        callback(1, {"n": 1})
    state, start = callback.restore_or_init({"n": 0})
    assert (state, start) == ({"n": 8}, 8)
    assert drive(callback, range(9, 11)) == [10]
    callback.close()


def test_restore_or_init_waits_for_running_save(ckpt, monkeypatch):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    callback(1, {"n": 1})
    real, going_on = seams.current("disk.sync_tree"), threading.Event()
    seams.replace(
        monkeypatch, "disk.sync_tree", lambda path: going_on.wait() and real(path)
    )
    callback(2, {"n": 2})
    threading.Timer(0.3, going_on.set).start()
    assert flaxckpt.CheckpointCallback(ckpt).restore_or_init({"n": 0}) == ({"n": 2}, 2)


def test_superseded_callback_saves_nothing_more(ckpt):
    first = flaxckpt.CheckpointCallback(ckpt, every_steps=5)
    first.restore_or_init({"n": 0})
    drive(first, range(1, 13))
    second = flaxckpt.CheckpointCallback(ckpt, every_steps=5)
    assert second.restore_or_init({"n": 0}) == ({"n": 10}, 10)
    drive(second, range(11, 18))
    ckpt.close()
    assert ckpt.steps() == [5, 10, 15, 17]


def test_two_callbacks_save_step_only_once(ckpt):
    often = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
    seldom = flaxckpt.CheckpointCallback(ckpt, every_steps=3)
    saved = [(often(s, {"n": s}), seldom(s, {"n": s})) for s in range(1, 8)]
    assert saved[5] == (True, False)
    ckpt.save(8, {"n": 8})
    assert not often(8, {"n": 8})
    ckpt.close()
    assert ckpt.steps() == [2, 3, 4, 6, 7, 8]


def test_failed_save_does_not_count_as_saved(ckpt, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    callback = flaxckpt.CheckpointCallback(ckpt)
    callback(1, {"n": 1})
    with monkeypatch.context() as patch:
        seams.replace(patch, "disk.sync_tree", fail)
        callback(5, {"n": 5}, force=True)
        with pytest.raises(errors.SaveFailedError):
            callback.wait()
    assert callback(5, {"n": 5}, force=True)
    callback.close()
    assert ckpt.steps() == [5]


def test_saves_restored_dataset(ckpt, caplog):
    batches = StepIndexed(lambda i: i)
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        callback.restore_or_init({"n": 0}, dataset=batches)
        next(batches)
        callback(1, {"n": 1})
    assert ckpt.has_dataset(1)
    without = flaxckpt.CheckpointCallback(ckpt)
    without.restore_or_init({"n": 0})
    assert "the data start from the beginning" in caplog.text
    without.close()


class Counting:
    """Batches whose state only they can copy."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return self.next

    def get_state(self):
        return {"next_index": self.next}

    def set_state(self, state):
        self.next = state["next_index"]


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_warns_about_batches_of_unreported_step(ckpt, caplog, steps):
    batches = Counting()
    with flaxckpt.CheckpointCallback(ckpt, every_steps=3, dataset=batches) as callback:
        callback.restore_or_init({"n": 0})
        for step in range(1, 10):
            next(batches)
            if step > steps:
                break
            callback(step, {"n": step})
    assert "1 more batches" in caplog.text


def test_saves_step_indexed_position_of_last_report(ckpt, caplog):
    batches = StepIndexed(lambda i: i)
    with flaxckpt.CheckpointCallback(ckpt, every_steps=3, dataset=batches) as callback:
        callback.restore_or_init({"n": 0})
        for _, step in zip(batches, range(1, 8), strict=False):
            callback(step, {"n": step})
    assert not caplog.records
    assert next(batches) == 8
    ckpt.restore({"n": 0}, dataset=batches)
    assert next(batches) == 7


@pytest.mark.parametrize("closing", ["checkpointer", "callback"])
def test_failing_block_restores_handler_and_skips_last_save(tmp_path, closing):
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
    assert skipped(callback) == {6: "the with block raised ZeroDivisionError"}


def test_exit_without_error_saves_last_step(tmp_path, caplog):
    def steps_of(name, leave):
        with flaxckpt.Checkpointer(tmp_path / name) as ckpt:
            drive(flaxckpt.CheckpointCallback(ckpt, every_steps=4), range(1, 7))
            yield
            leave()

    def saved(name):
        return flaxckpt.Checkpointer(tmp_path / name, read_only=True).steps()

    steps = steps_of("closed", sys.exit)
    next(steps)
    steps.close()  # as a loop over it that breaks
    with pytest.raises(SystemExit):
        list(steps_of("left", sys.exit))
    assert saved("closed") == saved("left") == [4, 6]
    assert "not saved" not in caplog.text
    with pytest.raises(SystemExit):
        list(steps_of("failed", lambda: sys.exit("the loss is infinite")))
    assert saved("failed") == [4]
    assert "the last step, 6, is not saved: the with block raised" in caplog.text


def test_checkpointer_forgets_closed_callback(ckpt):
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


@pytest.mark.slow
def test_unclosed_program_reports_unsaved_step_at_exit(tmp_path):
    code = """
import flaxckpt, sys
on_step = flaxckpt.CheckpointCallback(flaxckpt.Checkpointer(sys.argv[1]), every_steps=2)
for step in (1, 2, 3):
    on_step(step, {"n": step})
"""
    assert "without saving step 3" in programs.run("-c", code, tmp_path).stderr
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
def test_first_call_raises_errors_of_first_save(ckpt, state, metrics, told):
    step = 0 if "step" in state else 1
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=1000, save_last=False)
    with pytest.raises(errors.OptionError, match=told):
        callback(step, state, metrics=metrics)
    callback.give_way()


@pytest.mark.parametrize("step", [1.5, "3", None, True, -1, np.int64(-1), 10**18])
def test_rejects_steps_other_than_whole_numbers(ckpt, step):
    with pytest.raises(errors.OptionError, match=r"whole number|steps, 0 or more"):
        flaxckpt.CheckpointCallback(ckpt)(step, {"n": 1})


def test_read_only_checkpointer_cannot_train(ckpt):
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
def test_rejects_step_different_from_step_of_state(ckpt, state):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    assert callback(2, state(2))
    assert not callback(3, state(2)), "nothing is saved, so nothing is looked at"
    with pytest.raises(errors.OptionError, match="step_is='index'"):
        callback(4, state(5))
    with pytest.raises(errors.OptionError, match=r"for step 6, but .* is 3"):
        callback(6, state(3))
    ckpt.wait()
    assert ckpt.steps() == [2]
    other = flaxckpt.CheckpointCallback(
        ckpt, every_steps=2, save_last=False, check_step=False
    )
    ckpt.restore(step=2)
    assert other(4, state(5))


def test_one_of_several_counters_must_agree(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    generator, critic = create().replace(step=2), create().replace(step=10)
    assert callback(10, {"generator": generator, "critic": critic})
    with pytest.raises(errors.OptionError):
        callback(20, (generator, critic))


@pytest.mark.parametrize("step", [True, 0.5, jnp.ones(3), "third", len])
def test_ignores_values_other_than_counters(ckpt, step):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=7, preflight=False)
    with contextlib.suppress(errors.UnsupportedLeafError):
        assert callback(7, {"step": step})
    with pytest.raises(errors.OptionError, match=r"state\['step'\] is 3"):
        callback(14, {"step": 3})


def test_call_can_force_save_of_step_0(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=100, save_last=False)
    assert callback(0, {"step": 0}, force=True)
    assert not callback(1, {"step": 1})
    ckpt.wait()
    assert ckpt.steps() == [0]


@pytest.mark.parametrize("closing", ["checkpointer", "callback"])
def test_close_saves_last_step_once(tmp_path, closing):
    ckpt = flaxckpt.Checkpointer(tmp_path)
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=4)
    drive(callback, range(1, 7))
    (ckpt if closing == "checkpointer" else callback).close()
    assert ckpt.steps() == [4, 6]
    ckpt.close()
    callback.close()
    assert ckpt.steps() == [4, 6]
    assert ckpt.restore() == {"n": 6}


def test_next_call_raises_error_of_failed_save(ckpt, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device")

    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    seams.replace(monkeypatch, "disk.sync_tree", fail)
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
def test_rejects_invalid_options(ckpt, options):
    with pytest.raises(errors.OptionError, match=next(iter(options))):
        flaxckpt.CheckpointCallback(ckpt, **options)


# ---- the loops it is called from --------------------------------------------------


def test_loop_passing_only_step_must_bind_state(ckpt):
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


def test_requests_counting_bound_state_only_when_saving(ckpt):
    asked = []
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=4, preflight=False)
    callback.bind(state=lambda: asked.append(step) or create().replace(step=step))
    for step in range(1, 11):
        callback(step)
    assert set(asked) == {1, 4, 8}, "and once for the counter of the first"
    callback.close()
    assert set(asked) == {1, 4, 8, 10}
    assert ckpt.restore().step == 10


@pytest.mark.parametrize("each_step", [True, False])
def test_requests_other_bound_state_at_each_step_unless_disabled(
    ckpt, each_step, caplog
):
    asked = []
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=4, preflight=False)
    callback.bind(state=lambda: asked.append(step) or {"n": step}, each_step=each_step)
    for step in range(1, 11):
        callback(step)
    assert set(asked) == (set(range(1, 11)) if each_step else {1, 4, 8})
    callback.close()
    assert ckpt.steps() == ([4, 8, 10] if each_step else [4, 8])
    assert ("step 10" in caplog.text or "10, is not saved" in caplog.text) != each_step


def test_accepts_number_as_state_if_none_is_bound(ckpt):
    with flaxckpt.CheckpointCallback(ckpt) as callback:
        callback(1, jnp.float32(12.5))
    assert ckpt.restore() == 12.5


@pytest.mark.parametrize("step_is", ["completed", "index"])
def test_skip_reason_names_later_step_of_bound_state(ckpt, step_is):
    state = create()
    with flaxckpt.CheckpointCallback(ckpt, step_is=step_is) as callback:
        callback.bind(state=lambda: state)
        for step in range(1, 4):
            state = state.replace(step=step)
            callback(step - (step_is == "index"))
        state = state.replace(step=4)
    assert ckpt.steps() == []
    reason = skipped(callback)[3]
    assert "state.step is 4 now" in reason
    assert "step_is" not in reason


def test_bind_rejects_non_callable_state(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt)
    with pytest.raises(errors.OptionError, match="state=lambda: state"):
        callback.bind(state={"n": 1})


def test_skips_donated_last_step_with_reason(ckpt, caplog):
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


# ---- the end saves the step that was reported last --------------------------------


class Mean(NamedTuple):
    w: Any
    n: Any


@flax.struct.dataclass
class Pair:
    w: Any
    n: Any


class Net(nnx.Module):
    """Parameters, statistics and random keys, which are changed in place."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.table = jnp.arange(3.0)  # an array that is no variable

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)) + self.table)


@nnx.jit
def train_net(net, optimizer, x):
    grads = nnx.grad(lambda net: jnp.sum(net(x) ** 2))(net)
    optimizer.update(net, grads)


def net_trainer(*, has_optimizer):
    net = Net()
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    state = (net, optimizer) if has_optimizer else net

    def train():
        train_net(net, optimizer, jnp.ones((2, 3)))
        return state

    def look():
        net(jnp.ones((2, 3)))  # changes statistics and keys, and no step counter

    return state, train, look


def immutable_trainer(kind):
    now = [kind(w=jnp.zeros(64), n=jnp.int32(0))]

    def train():
        now[0] = jax.tree.map(lambda leaf: leaf + 1, now[0])
        return now[0]

    return now[0], train, train


def in_place_trainer(make):
    """A dictionary of which either the entries or the arrays are changed."""
    state = {"w": make(8), "n": make(1)}

    def train():
        if isinstance(state["w"], np.ndarray):
            state["w"] += 1
            state["n"] += 1
        else:
            state["w"] = state["w"] + 1
            state["n"] = state["n"] + 1
        return state

    return state, train, train


TRAINERS = {
    "nnx": lambda: net_trainer(has_optimizer=True),
    "nnx without a counter": lambda: net_trainer(has_optimizer=False),
    "numpy": lambda: in_place_trainer(np.zeros),
    "dict": lambda: in_place_trainer(jnp.zeros),
    "NamedTuple": lambda: immutable_trainer(Mean),
    "struct": lambda: immutable_trainer(Pair),
    "FrozenDict": lambda: immutable_trainer(lambda **kw: flax.core.freeze(kw)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("then", ["ends", "looks", "trains", "trains twice"])
@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("name", TRAINERS)
def test_close_saves_values_of_last_report(ckpt, name, is_bound, then):
    state, train, look = TRAINERS[name]()
    with flaxckpt.CheckpointCallback(ckpt, every_steps=100) as callback:
        if is_bound:
            callback.bind(state=lambda: state)
        for step in range(1, 4):
            state = train()
            callback(step) if is_bound else callback(step, state)
        wanted = copied(state)
        # What a loop does before it breaks, and does not report.
        if then == "looks":
            look()
        for _ in range({"trains": 1, "trains twice": 2}.get(then, 0)):
            state = train()
        now = copied(state)
    assert ckpt.steps() == [3]
    assert_equal(copied(state), now)
    assert_equal(copied(ckpt.restore(state)), wanted)


def copied(state):
    """The leaves by their paths, as numpy arrays of their own."""
    return {
        path: np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    differing = [
        path for path in wanted if not np.array_equal(found[path], wanted[path])
    ]
    assert not differing


@pytest.mark.parametrize("kind", [dict, Pair, Mean, flax.core.FrozenDict])
def test_close_saves_large_numpy_arrays_unless_changed(ckpt, kind):
    def state():
        fields = {"w": large, "n": jnp.float32(step)}
        return kind(fields) if kind is flax.core.FrozenDict else kind(**fields)

    large = np.zeros((1000, 1000))
    for step, is_bound, then in [
        (1, False, "ends"),
        (2, True, "ends"),
        (3, False, "replaced"),
        (4, True, "replaced"),
        (5, False, "changed"),
        (6, True, "changed"),
    ]:
        with flaxckpt.CheckpointCallback(ckpt, every_steps=100) as callback:
            if is_bound:
                callback.bind(state=state)
            large[step] = step
            callback(step) if is_bound else callback(step, state())
            wanted = copied(state())
            if then == "replaced":
                large = large + 1
            if then == "changed":
                large += 1
        if then != "changed":
            assert_equal(copied(ckpt.restore(state(), step=step)), wanted)
    assert ckpt.steps() == [1, 2, 3, 4]
    reasons = skipped(callback)
    assert all("changed in place" in reasons[step] for step in (5, 6))


def test_keeps_small_numpy_arrays_beside_large_ones(ckpt):
    state = {"w": np.zeros(10**6), "n": np.zeros(1)}
    with flaxckpt.CheckpointCallback(ckpt) as callback:
        callback(1, state)
        state["n"] += 1
    assert ckpt.steps() == [1]
    assert ckpt.restore()["n"] == 0


def test_first_call_warns_about_huge_numpy_arrays(ckpt, caplog, monkeypatch):
    seams.replace(monkeypatch, "kept_state.summed_bytes", 2**22)
    state = {"w": np.zeros(10**6)}
    with flaxckpt.CheckpointCallback(ckpt, every_steps=2) as callback:
        callback(1, state)
        assert "force=True" in caplog.text
        callback(2, state)
        state["w"] += 1
        callback(3, state)
        state["w"] += 1
    assert ckpt.steps() == [2]
    assert "numpy arrays" in skipped(callback)[3]


def test_keeps_read_only_numpy_arrays_of_any_size(ckpt):
    weights = np.arange(10**6)
    weights.flags.writeable = False
    with flaxckpt.CheckpointCallback(ckpt, every_steps=100) as callback:
        callback(1, {"w": weights, "v": np.asarray(jnp.ones(10**6))})
    assert ckpt.steps() == [1]


def test_skips_model_with_replaced_variables_with_reason(ckpt):
    state, train, _ = net_trainer(has_optimizer=False)
    with flaxckpt.CheckpointCallback(ckpt) as callback:
        callback(1, train())
        state.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    assert ckpt.steps() == []
    assert "NNX objects were replaced" in skipped(callback)[1]


class Changing(nnx.Module):
    """A model that gets other variables while it is trained."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros(2))
        self.parts = nnx.List([nnx.Param(jnp.zeros(1))])
        self.table = jnp.zeros(1)

    def train(self, step, change):
        if change == "each step":
            self.calls = nnx.Variable(jnp.array(step))
        if step == 2 and change == "once":
            self.calls = nnx.Variable(jnp.array(step))
        if step == 2 and change == "list":
            self.parts.append(nnx.Param(jnp.ones(1)))
        if step == 2 and change == "array":
            self.other = jnp.ones(1)
        self.w[...] = self.w[...] + 1
        self.table = self.table + 1


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("change", ["never", "once", "each step", "list", "array"])
def test_saves_model_with_variables_replaced_before_report(ckpt, change, is_bound):
    model = Changing()
    with flaxckpt.CheckpointCallback(ckpt, every_steps=100) as callback:
        model, _ = callback.restore_or_init(model)
        if is_bound:
            callback.bind(state=lambda: (model, {"n": jnp.ones(1)}))
        for step in range(1, 6):
            model.train(step, change)
            callback(step) if is_bound else callback(step, (model, {"n": jnp.ones(1)}))
        wanted = copied((model, {"n": jnp.ones(1)}))
        model.w[...] = model.w[...] + 1
    assert ckpt.steps() == [5]
    assert_equal(copied(ckpt.restore((model, {"n": jnp.ones(1)}))), wanted)


def test_close_saves_metrics_of_last_report(ckpt):
    metrics = {"loss": 0.5}
    mean = nnx.MultiMetric(loss=nnx.metrics.Average())
    mean.update(values=jnp.float32(1.0))
    for step, given in ((1, metrics), (2, mean)):
        with flaxckpt.CheckpointCallback(ckpt) as callback:
            callback(step, {"n": step}, metrics=given)
            metrics["loss"] = 9.9
            mean.update(values=jnp.float32(9.0))
    assert ckpt.metrics(1) == {"loss": 0.5}
    assert ckpt.metrics(2) == {"loss": 5.0}  # and not that of 1, 9 and 9


BOUND = {
    "put together": lambda now: {"w": now["w"] + 0},
    "tuple": lambda now: (now["w"], {"n": now["w"] + 1}),
    "NamedTuple": lambda now: Mean(now["w"], 1),
    "nnx.state": lambda now: nnx.state(now["model"]),
    "nnx": lambda now: (now["model"], {"n": 1}),
    "TrainState": lambda now: create().replace(step=now["step"]),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("then", ["ends", "trains"])
@pytest.mark.parametrize("passes_state", [False, True])
@pytest.mark.parametrize("kind", BOUND)
def test_close_saves_bound_metrics_of_last_report(ckpt, kind, passes_state, then):
    now = {"model": nnx.Linear(1, 1, rngs=nnx.Rngs(0))}
    make = functools.partial(BOUND[kind], now)
    metrics = {}
    with flaxckpt.CheckpointCallback(ckpt, every_steps=4, preflight=False) as callback:
        if not passes_state:
            callback.bind(state=make)
        callback.bind(metrics=lambda: metrics)
        for step in range(1, 7):
            now |= {"w": jnp.full(3, step), "step": step}
            metrics = {"loss": jnp.float32(1 / step)}
            callback(step, make()) if passes_state else callback(step)
        if then == "trains":
            metrics["loss"] = jnp.float32(9.9)
            metrics = {"loss": jnp.float32(8.8)}
    assert ckpt.steps() == [4, 6]
    assert ckpt.metrics(6) == {"loss": pytest.approx(1 / 6)}
    assert ckpt.best_step("loss", "min") == 6


@pytest.mark.parametrize("each_step", [True, False])
def test_requests_bound_metrics_at_each_step_unless_disabled(ckpt, each_step):
    metrics, asked = {"loss": 0.5}, []
    with flaxckpt.CheckpointCallback(ckpt, preflight=False) as callback:
        callback.bind(
            metrics=lambda: asked.append(step) or metrics, each_step=each_step
        )
        for step in (1, 2):
            asked.clear()
            callback(step, {"n": step})
        assert asked == [2] * each_step
        metrics["loss"] = 9.9
    assert ckpt.metrics(2) == ({"loss": 0.5} if each_step else {})


def test_saves_slow_bound_metrics_only_if_nothing_followed(ckpt, caplog):
    state, metrics = create().replace(step=1), {"loss": 0.5}
    for step in (1, 2):
        with flaxckpt.CheckpointCallback(ckpt, check_step=step == 1) as callback:
            callback.bind(metrics=lambda: metrics, each_step=False)
            if step == 1:
                callback.bind(state=lambda: state, each_step=False)
            callback(step) if step == 1 else callback(step, {"n": 1})
    assert ckpt.metrics(1) == {"loss": 0.5}
    assert ckpt.metrics(2) == {}
    assert "without its metrics" in caplog.text


def test_holding_state_copies_no_jax_array(ckpt):
    state = {"w": jnp.ones(10**6), "n": 1}
    with flaxckpt.CheckpointCallback(ckpt, every_steps=9, preflight=False) as callback:
        callback.bind(state=lambda: state)
        before = len(jax.live_arrays())
        assert not callback(1)
        assert len(jax.live_arrays()) == before


# ---- what else loops pass ---------------------------------------------------------


def test_bind_accepts_dataset_and_metrics(ckpt):
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


def test_on_step_accepts_object_describing_step(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=3, save_last=False)
    for step in range(5):
        callback.on_step(Info(step, {"n": step}, loss=step / 4))
    callback.on_step(Info(5, {"n": 5}, loss=0.0), force=True)
    ckpt.wait()
    assert ckpt.steps() == [3, 6]
    assert ckpt.metrics(3) == {"loss": 0.5}


def test_callback_accepts_arguments_of_clu_periodic_callbacks(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    assert callback.__name__
    assert callback(step=2, t=12.5, state={"n": 2}, learning_rate=0.1)


@pytest.mark.parametrize(
    "t", [12.5, 3, np.float64(12.5), np.array(12.5), jnp.float32(12.5), jnp.int32(3)]
)
def test_does_not_take_time_argument_of_clu_as_state(ckpt, t):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, save_last=False)
    if not isinstance(t, np.ndarray | jax.Array):  # else it may be a state
        with pytest.raises(errors.OptionError, match=r"bind\(state=lambda: state\)"):
            callback(1, t)
    callback.bind(state=lambda: {"n": 2})
    assert callback(2, t)
    assert not callback(3, t=t)
    ckpt.wait()
    assert ckpt.restore() == {"n": 2}


def test_rejects_unknown_arguments(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt)
    for wrong, right in (
        ({"metric": {"loss": 0.5}}, "metrics="),
        ({"metric": {"loss": 0.5}, "t": 1.5}, "metrics="),
        ({"forced": True}, "force="),
        ({"data": [1]}, "dataset="),
        ({"learning_rate": 0.1}, "takes no learning_rate="),
    ):
        with pytest.raises(errors.OptionError, match=right):
            callback(1, {"n": 1}, **wrong)
    assert not ckpt.steps()


@flax.struct.dataclass
class Metrics(clu.metrics.Collection):
    loss: clu.metrics.Average.from_output("loss")


def test_computes_clu_metric_collections_when_saving(ckpt):
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


def test_resumed_run_equals_uninterrupted_run(tmp_path):
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


def test_resuming_finished_run_trains_and_saves_no_more(tmp_path):
    train(tmp_path, 8)
    before = written(tmp_path)
    assert train(tmp_path, 8) == 8
    assert written(tmp_path) == before


def test_only_fresh_run_needs_concrete_state(tmp_path):
    abstract = jax.eval_shape(create)
    ckpt = flaxckpt.Checkpointer(tmp_path)
    callback = flaxckpt.CheckpointCallback(ckpt)
    with pytest.raises(errors.CheckpointNotFoundError, match="initialized state"):
        callback.restore_or_init(abstract)
    state = create()
    assert callback.restore_or_init(state) == (state, 0)
    callback(3, state.replace(step=3))
    callback.close()
    restored, step = callback.restore_or_init(abstract)
    callback.close()
    assert step == 3
    assert jnp.array_equal(restored.params["w"], state.params["w"])


def test_add_metrics_uses_step_count_of_loop(ckpt):
    callback = flaxckpt.CheckpointCallback(ckpt, every_steps=2, step_is="index")
    callback(1, {"n": 1})
    callback.add_metrics(1, {"loss": 0.5})
    assert ckpt.metrics(2) == {"loss": 0.5}


def test_close_keeps_order_of_dicts(tmp_path):
    state = {"sum": jnp.float32(1), "a": {"z": jnp.zeros(2), "b": jnp.ones(2)}}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        flaxckpt.CheckpointCallback(ckpt, every_steps=10)(1, state)
    found = flaxckpt.load(tmp_path)
    assert list(found) == ["sum", "a"]
    assert list(found["a"]) == ["z", "b"]
