"""A program that is told to stop saves, leaves, and tells that it wants to go on."""

import os
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import flaxckpt
from flaxckpt import errors
from tests.helpers import programs, seams


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@pytest.fixture
def ckpt(tmp_path):
    return flaxckpt.Checkpointer(tmp_path / "run")


@pytest.fixture(autouse=True)
def _signals_as_before():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


def train(ckpt, *happens, **options):
    """Calls the hook after each step of `happens`, and sends each signal of it."""
    with ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, **options)
        for each in happens:
            if isinstance(each, signal.Signals):
                send(each)
            else:
                on_step(each, {"n": each})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_call_after_signal_saves_and_exits(ckpt, number):
    def train():
        with ckpt:
            on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=100)
            for step in range(1, 10):
                assert not on_step.should_stop()
                if step == 3:
                    send(number)
                    assert on_step.should_stop()
                assert not on_step(step, {"n": step})

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 75
    assert ckpt.steps() == [3]
    assert ckpt.restore() == {"n": 3}


def test_call_after_ctrl_c_saves_and_raises_keyboard_interrupt(ckpt, capfd):
    with pytest.raises(KeyboardInterrupt):
        train(ckpt, 1, signal.SIGINT, 2)
    assert ckpt.steps() == [2]
    assert "Ctrl-C again stops at once" in capfd.readouterr().err


def test_second_ctrl_c_interrupts_at_once(ckpt):
    with pytest.raises(KeyboardInterrupt):
        train(ckpt, 1, signal.SIGINT, signal.SIGINT, 2)
    assert ckpt.steps() == []


def test_loop_may_exit_by_itself(ckpt):
    with ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, exit_code=None)
        step = 0
        while not on_step.should_stop():
            step += 1
            if step == 4:
                send()
            assert on_step(step, {"n": step}) == (step == 4)
    assert ckpt.steps() == [4]


def test_does_not_save_saved_step_again(ckpt):
    with pytest.raises(SystemExit):
        train(ckpt, 2, signal.SIGTERM, 2, every_steps=2)
    assert ckpt.steps() == [2]


def test_close_heeds_signal_after_last_call(ckpt):
    with pytest.raises(SystemExit) as left:
        train(ckpt, 1, signal.SIGTERM)
    assert left.value.code == 75, "it may have been told to stop in the middle"
    assert ckpt.steps() == [1]


def test_calls_and_restores_previous_handler(ckpt):
    seen = []

    def own(number, frame):
        seen.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(SystemExit):
            train(ckpt, 1, signal.SIGTERM, 2)
        assert signal.getsignal(signal.SIGTERM) is own
        send()
        assert seen == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ignored_signals_stay_ignored(ckpt):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ckpt:
            on_step = flaxckpt.CheckpointCallback(ckpt)
            on_step(1, {"n": 1})
            send(signal.SIGINT)
            assert not on_step.should_stop()
            on_step(2, {"n": 2})
    finally:
        signal.signal(signal.SIGINT, before)


def test_later_handler_stays_and_may_call_ours(ckpt):
    def later(number, frame):
        ours(number, frame)

    on_step = flaxckpt.CheckpointCallback(ckpt)
    on_step(1, {"n": 1})
    ours = signal.signal(signal.SIGTERM, later)
    send()
    with pytest.raises(SystemExit):
        on_step(2, {"n": 2})
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is later


def test_first_of_two_runs_may_end_first(tmp_path):
    first, second = (flaxckpt.Checkpointer(tmp_path / name) for name in "ab")

    def train_both():
        with second:
            with first:
                flaxckpt.CheckpointCallback(first)(1, {"n": 1})
                on_step = flaxckpt.CheckpointCallback(second)
                on_step(1, {"n": 1})
            send()
            on_step(2, {"n": 2})

    with pytest.raises(SystemExit):
        train_both()
    assert second.steps() == [2]


def test_callback_without_preemption_leaves_signals_alone(ckpt):
    with ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False)
        on_step(1, {"n": 1})
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert not on_step.should_stop()


def test_warns_about_missing_watch_outside_main_thread(ckpt, caplog):
    thread = threading.Thread(target=train, args=(ckpt, 1))
    thread.start()
    thread.join()
    assert ckpt.steps() == [1]
    assert "main thread" in caplog.text


def test_preempted_program_ends_with_error_of_last_save(ckpt, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device")

    on_step = flaxckpt.CheckpointCallback(ckpt)
    on_step(1, {"n": 1})
    seams.replace(monkeypatch, "disk.sync_tree", fail)
    send()
    with pytest.raises(errors.SaveFailedError, match="No space left"):
        on_step(2, {"n": 2})
    monkeypatch.undo()
    on_step.close()
    assert ckpt.steps() == [2], "who lives on saves it in the end"


def test_earlier_failed_save_does_not_prevent_last_save(ckpt, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device")

    on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
    on_step(1, {"n": 1})
    with monkeypatch.context() as patch:
        seams.replace(patch, "disk.sync_tree", fail)
        on_step(2, {"n": 2})
        while not on_step.last_save.done():
            pass
    send()
    with pytest.raises(SystemExit):
        on_step(3, {"n": 3})
    assert ckpt.steps() == [3]


def test_invalid_metrics_do_not_prevent_last_save(ckpt, caplog):
    on_step = flaxckpt.CheckpointCallback(ckpt)
    on_step(1, {"n": 1}, metrics={"loss": 1.0})
    send()
    with pytest.raises(SystemExit):
        on_step(2, {"n": 2}, metrics={"loss": "low"})
    assert ckpt.steps() == [2]
    assert "without metrics" in caplog.text


def test_signal_during_last_save_waits_for_it(ckpt, monkeypatch):
    real = seams.current("disk.sync_tree")

    def sync(path):
        send()
        return real(path)

    def train():
        with ckpt, flaxckpt.CheckpointCallback(ckpt) as on_step:
            on_step(1, {"n": 1})
            seams.replace(monkeypatch, "disk.sync_tree", sync)

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 75
    assert ckpt.steps() == [1]


def test_callback_can_train_again_after_ctrl_c(ckpt):
    on_step = flaxckpt.CheckpointCallback(ckpt)
    for number, error in (
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, SystemExit),
    ):
        _, start = on_step.restore_or_init({"n": 0})
        assert not on_step.should_stop()
        on_step(start + 1, {"n": start + 1})
        send(number)
        with pytest.raises(error):
            on_step(start + 2, {"n": start + 2})
    assert ckpt.steps() == [2, 4]


def test_watches_may_begin_and_end_in_any_order(tmp_path):
    ckpts = [flaxckpt.Checkpointer(tmp_path / name) for name in "ab"]
    a, b = (flaxckpt.CheckpointCallback(ckpt) for ckpt in ckpts)
    a.restore_or_init({"n": 0})
    b.restore_or_init({"n": 0})
    a.close()
    a.restore_or_init({"n": 0})
    send()
    assert a.should_stop()
    assert b.should_stop()
    a.give_way()
    b.give_way()


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_forked_child_keeps_default_signal_handling(ckpt):
    on_step = flaxckpt.CheckpointCallback(ckpt)
    on_step(1, {"n": 1})
    begun, tell = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.write(tell, b".")
        signal.pause()
        os._exit(0)
    os.read(begun, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert not on_step.should_stop()
    on_step.close()


# A notebook runs each cell as a program of its own, in one module.
NOTEBOOK = """
import os, signal, sys, types
module = types.ModuleType("__main__")
sys.modules["__main__"] = module


def run(cell):
    try:
        exec(compile(cell, "<cell>", "exec"), vars(module))
    except BaseException as error:
        print(type(error).__name__, flush=True)
    else:
        print("went on", flush=True)


SETUP, LOOP, FUNCTION, STOP = sys.argv[2:]
run(SETUP)
run(LOOP)
run(STOP)
run("on_step(4, {'n': 4})")
run(FUNCTION)
run(STOP)
module.stop = 8
run(LOOP)
run(STOP.replace("SIGINT", "SIGTERM"))
"""

SETUP = """
import flaxckpt, os, signal, sys
ckpt = flaxckpt.Checkpointer(sys.argv[1])
on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=2)
stop = None
"""

LOOP = """
state, start = on_step.restore_or_init({"n": 0})
for step in range(start + 1, start + 4):
    if step == stop:
        os.kill(os.getpid(), signal.SIGINT)
    on_step(step, {"n": step})
"""

FUNCTION = "def train():" + LOOP.replace("\n", "\n    ") + "\ntrain()"

STOP = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.slow
def test_ctrl_c_interrupts_later_notebook_cell(ckpt):
    cells = (SETUP, LOOP, FUNCTION, STOP)
    ended = programs.run("-c", NOTEBOOK, ckpt.directory, *cells, code=None)
    assert ended.stdout.splitlines() == [
        "went on",
        "went on",
        "KeyboardInterrupt",  # the loop is over, and was not closed
        "went on",  # and goes on in another cell
        "went on",
        "KeyboardInterrupt",
        "KeyboardInterrupt",  # by the loop, after it has saved
    ], ended.stderr
    assert ended.returncode == -signal.SIGTERM
    assert ckpt.steps() == [2, 4, 6, 8]


# ---- little time ------------------------------------------------------------------


def train_state_at(step):
    params = {"w": jnp.full((4, 4), float(step))}
    state = train_state.TrainState.create(
        apply_fn=None, params=params, tx=optax.adam(1e-1)
    )
    return state.replace(step=step)


def stop_with(ckpt, *, grace_secs):
    """Trains two steps of which one is saved, and is told to stop."""
    on_step = flaxckpt.CheckpointCallback(
        ckpt, every_steps=2, grace_secs=grace_secs, preflight=False, clock=Clock()
    )
    _, start = on_step.restore_or_init(train_state_at(0))
    on_step(start + 2, train_state_at(start + 2))
    ckpt.wait()
    send()
    with pytest.raises(SystemExit) as left:
        on_step(start + 3, train_state_at(start + 3))
    assert left.value.code == 75


def test_saves_whole_state_if_time_permits(ckpt):
    stop_with(ckpt, grace_secs=1e9)
    assert ckpt.steps() == [2, 3]
    assert ckpt._session.saves.params_only.latest() is None


@pytest.mark.parametrize("fails", [False, True])
def test_waits_for_upload_while_time_permits(tmp_path, monkeypatch, caplog, fails):
    """A local disk may not outlive the machine; several processes upload together."""
    upload = seams.current("upload_copies.make")

    def upload_late(*args, **options):
        time.sleep(0.5)
        if fails:
            raise OSError("no route to the store")
        return upload(*args, **options)

    seams.replace(monkeypatch, "upload_copies.make", upload_late)
    ckpt = flaxckpt.Checkpointer(tmp_path / "run", staging=tmp_path / "ssd")
    stop_with(ckpt, grace_secs=1e9)
    outcome = "step 3 is saved, but not uploaded" if fails else "step 3 is saved"
    assert f"SIGTERM: {outcome}; the program exits" in caplog.text
    reader = flaxckpt.Checkpointer(tmp_path / "run", read_only=True)
    assert reader.steps() == ([] if fails else [2, 3])


def test_short_grace_saves_only_parameters_and_warns(ckpt, caplog):
    stop_with(ckpt, grace_secs=1e-9)
    assert ckpt.steps() == [2]
    step, path = ckpt._session.saves.params_only.latest()
    assert step == 3
    assert "0.0 s are left, but a save takes" in caplog.text
    found = flaxckpt.load(path, {"params": train_state_at(0).params})
    assert np.array_equal(found["params"]["w"], np.full((4, 4), 3.0))
    assert not any("opt_state" in leaf for leaf in flaxckpt.metadata(path).leaves)

    caplog.clear()
    again = flaxckpt.CheckpointCallback(flaxckpt.Checkpointer(ckpt.directory))
    state, start = again.restore_or_init(train_state_at(0))
    assert (start, int(state.step)) == (2, 2)
    assert "no time to save all of step 3" in caplog.text
    again.close()

    stop_with(flaxckpt.Checkpointer(ckpt.directory), grace_secs=1e-9)
    assert ckpt._session.saves.params_only.latest()[0] == 5
    assert not path.exists()


def test_uses_preflight_estimate_before_first_save(ckpt):
    clock = Clock()
    on_step = flaxckpt.CheckpointCallback(ckpt, grace_secs=1e-9, clock=clock)
    on_step(1, train_state_at(1))
    send()
    with pytest.raises(SystemExit):
        on_step(2, train_state_at(2))
    assert ckpt.steps() == []
    assert ckpt._session.saves.params_only.latest()[0] == 2


def test_saves_state_without_optimizer_whole(ckpt):
    on_step = flaxckpt.CheckpointCallback(ckpt, grace_secs=1e-9, clock=Clock())
    on_step(1, {"n": 1})
    send()
    with pytest.raises(SystemExit):
        on_step(2, {"n": 2})
    assert ckpt.steps() == [2]
    assert ckpt._session.saves.params_only.latest() is None


def test_params_only_save_is_source_for_another_run(ckpt, tmp_path):
    stop_with(ckpt, grace_secs=1e-9)
    _, path = ckpt._session.saves.params_only.latest()
    with flaxckpt.Checkpointer(tmp_path / "other") as other:
        on_step = flaxckpt.CheckpointCallback(other)
        state, start = on_step.restore_or_init(train_state_at(0), source=path)
        assert start == 0
        assert np.array_equal(state.params["w"], np.full((4, 4), 3.0))


@pytest.mark.parametrize("former", ["step_{step}", "checkpoint-{step:06d}"])
def test_resume_names_params_only_save_with_former_step_format(
    tmp_path, caplog, former
):
    with flaxckpt.Checkpointer(tmp_path, step_format=former) as ckpt:
        path = ckpt.save_params_only(3, train_state_at(3))
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, on_preemption=False)
        assert on_step.restore_or_init(train_state_at(0))[1] == 0
    assert "no time to save all of step 3: its parameters, without the" in caplog.text
    assert f"are in {path}. The run continues" in caplog.text
