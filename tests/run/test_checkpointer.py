"""A directory of steps: what is listed is complete, what is kept is as told."""

import errno
import functools
import gc
import json
import logging
import math
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import flaxckpt
from flaxckpt import errors
from flaxckpt.policies import BestN, EveryNSteps, LatestN
from tests.helpers import chunks, run_files, seams, slow, store_servers, strategies
from tests.helpers.files import flip_bit
from tests.helpers.gates import Gate
from tests.helpers.interruptions import end_threads


@pytest.fixture(params=slow.all_but(store_servers.KINDS, ["file", "memory"]))
def run_dir(request, store_path):
    """All that follows holds for directories and for stores."""
    return store_path(request.param)


def state(step):
    return {"w": jnp.full((4, 4), float(step)), "step": step}


def damage(path):
    chunks.flip(path / "state", "w/c.0.0", 3)


# ---- saving and finding -----------------------------------------------------------


def test_saves_lists_and_restores_steps(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        assert ckpt.steps() == []
        assert ckpt.latest_step() is None
        for step in (0, 10, 9):
            ckpt.save(step, state(step))
        ckpt.wait()
        assert ckpt.steps() == [0, 9, 10]
        assert ckpt.latest_step() == 10
        strategies.assert_same(state(10), ckpt.restore())
        strategies.assert_same(state(0), ckpt.restore(state(5), step=0))


def test_sole_step_0_is_latest(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(0, state(0)).wait()
        assert ckpt.latest_step() == 0
        strategies.assert_same(state(0), ckpt.restore())


def test_rejects_steps_inside_checkpoint(run_dir):
    flaxckpt.save(run_dir / "one", state(1))
    with flaxckpt.Checkpointer(run_dir / "one") as ckpt:
        with pytest.raises(errors.OptionError, match="choose another directory"):
            ckpt.save(1, state(2))
        assert ckpt.steps() == []
    strategies.assert_same(state(1), flaxckpt.load(run_dir / "one"))
    assert flaxckpt.verify(run_dir / "one").ok


def test_handle_returns_the_result_of_the_save(run_dir):
    with flaxckpt.Checkpointer(run_dir, keep=[LatestN(1)]) as ckpt:
        ckpt.save(1, state(1))
        handle = ckpt.save(2, state(2))
        result = handle.wait()
    assert handle.done()
    assert (result.step, result.path) == (2, str(run_dir / "2"))
    files = [p for p in (run_dir / "2").rglob("*") if p.is_file()]
    assert result.bytes_written == sum(p.stat().st_size for p in files)
    assert 0 < result.blocked_secs <= result.total_secs
    assert result.deleted_steps == (1,)
    assert result.skipped is None


@pytest.mark.parametrize("template", ["{step}", "step_{step}", "{step:08d}"])
def test_step_format_names_and_finds_steps(run_dir, template):
    with flaxckpt.Checkpointer(run_dir, step_format=template) as ckpt:
        ckpt.save(7, state(7))
    assert (run_dir / template.format(step=7)).is_dir()
    again = flaxckpt.Checkpointer(run_dir, step_format=template)
    assert again.steps() == [7]
    strategies.assert_same(state(7), again.restore())
    strategies.assert_same(state(7), flaxckpt.load(run_dir))
    other = "{step:03d}" if template == "{step}" else "{step}"
    strange = flaxckpt.Checkpointer(run_dir, step_format=other)
    assert strange.steps() == []
    with pytest.raises(errors.CheckpointNotFoundError, match="step_format"):
        strange.restore()


LISTS = {
    "steps": lambda ckpt: ckpt.steps(),
    "latest_step": lambda ckpt: ckpt.latest_step(),
    "best_step": lambda ckpt: ckpt.best_step("loss", "min"),
    "new_steps": lambda ckpt: list(ckpt.new_steps(timeout_secs=0)),
}


@pytest.mark.parametrize("template", ["step_{step}", "{step:04d}", "{step}_ckpt"])
@pytest.mark.parametrize("name", LISTS)
def test_checkpoints_with_other_names_are_not_left_out_in_silence(
    run_dir, template, name, caplog
):
    with flaxckpt.Checkpointer(run_dir, step_format=template) as before:
        for step in (1, 2):
            before.save(step, state(step), metrics={"accuracy": step})
    for is_begun in (False, True):
        ckpt = flaxckpt.Checkpointer(run_dir)
        if is_begun:
            ckpt.save(1, state(1)).wait()
        caplog.clear()
        for _ in range(2):
            LISTS[name](ckpt)
        [told] = [r.message for r in caplog.records if "other names" in r.message]
        assert template.format(step=2) in told
        assert (template.format(step=1) in told) != is_begun
        assert (f"step_format={template!r}" in told) != ("ckpt" in template)
        caplog.clear()
        with pytest.raises(errors.CheckpointNotFoundError, match="with other names"):
            ckpt.restore(step=2)
        if is_begun:
            strategies.assert_same(state(1), ckpt.restore())
        else:
            with pytest.raises(errors.CheckpointNotFoundError, match="no steps, but"):
                ckpt.restore()
        ckpt.close()
    LISTS[name](before)  # the newest is its own
    assert "other names" not in caplog.text


@pytest.mark.parametrize("name", ["latest_step", "restore"])
def test_links_named_like_steps_are_not_left_out_in_silence(tmp_path, name, caplog):
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
    (tmp_path / "run" / "2").rename(tmp_path / "moved")
    (tmp_path / "run" / "2").symlink_to(tmp_path / "moved")
    told = "the symbolic link 2, which is no step: move"
    getattr(flaxckpt.Checkpointer(tmp_path / "run"), name)()
    assert told in caplog.text
    caplog.clear()
    strategies.assert_same(state(1), flaxckpt.load(tmp_path / "run"))
    assert "2 is a symbolic link, which is no step of a run: pass its" in caplog.text
    with pytest.raises(errors.CheckpointNotFoundError, match="2 is a symbolic link"):
        flaxckpt.load(tmp_path / "run", step=2)
    with pytest.raises(errors.CheckpointNotFoundError, match=told):
        flaxckpt.Checkpointer(tmp_path / "run").restore(step=2)


def test_on_exists_keeps_skips_or_replaces_step(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(3, state(3)).wait()
        with pytest.raises(
            errors.CheckpointExistsError, match="'skip' to keep"
        ) as info:
            ckpt.save(3, state(4))
        assert isinstance(info.value, FileExistsError)
        skipped = ckpt.save(3, state(4), on_exists="skip").wait()
        assert skipped.skipped == "step 3 exists"
        strategies.assert_same(state(3), ckpt.restore())
        ckpt.save(3, state(4), metrics={"loss": 1}, on_exists="overwrite").wait()
        strategies.assert_same(state(4), ckpt.restore())
        assert ckpt.metrics(3) == {"loss": 1.0}
        with pytest.raises(errors.OptionError, match="on_exists"):
            ckpt.save(3, state(4), on_exists="maybe")


def test_overwrite_replaces_step_like_save(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(3, state(3), overwrite=False)
        ckpt.save(3, state(4), overwrite=True)
        ckpt.save(3, state(5), overwrite=True, on_exists="overwrite")
        ckpt.save(3, state(6), overwrite=False, on_exists="skip")
        ckpt.wait()
        strategies.assert_same(state(5), ckpt.restore())
        with pytest.raises(errors.CheckpointExistsError):
            ckpt.save(3, state(4), overwrite=False)
        for on_exists, overwrite in (
            ("error", True),
            ("skip", True),
            ("overwrite", False),
        ):
            with pytest.raises(errors.OptionError, match="contradict"):
                ckpt.save(3, state(4), on_exists=on_exists, overwrite=overwrite)
        with pytest.raises(errors.OptionError, match="overwrite must be True or False"):
            ckpt.save(3, state(4), overwrite="yes")


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_rejects_invalid_step(run_dir, step):
    with flaxckpt.Checkpointer(run_dir) as ckpt, pytest.raises(errors.OptionError):
        ckpt.save(step, state(1))


def test_accepts_numpy_and_jax_integers_as_steps(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(np.int64(3), state(3))
        ckpt.save(jnp.int32(4), state(4))
    assert ckpt.steps() == [3, 4]


def test_keeps_metadata_per_step_and_run(run_dir):
    with flaxckpt.Checkpointer(run_dir, metadata={"model": "small"}) as ckpt:
        ckpt.save(1, state(1), metadata={"note": "first"})
        ckpt.wait()
        assert ckpt.metadata(1).custom == {"note": "first"}
    again = flaxckpt.Checkpointer(run_dir)
    assert again.run_metadata == {"model": "small"}
    assert again.steps() == [1]
    assert flaxckpt.Checkpointer(run_dir / "other").run_metadata == {}


def test_run_in_a_checkpoint_writes_nothing_into_it(run_dir):
    """A step with other files in it would never be deleted or replaced."""
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(1, state(1))
    step = run_dir / "1"
    files = sorted(step.rglob("*"))
    inner = flaxckpt.Checkpointer(step)
    on_step = flaxckpt.CheckpointCallback(inner, on_preemption=False)
    for act in (
        lambda: inner.save(2, state(2)),
        lambda: inner.save_params_only(2, {"opt_state": jnp.ones(2), "w": jnp.ones(2)}),
        lambda: flaxckpt.Checkpointer(step, metadata={"model": "small"}),
        lambda: on_step(2, state(2)),
    ):
        with pytest.raises(errors.OptionError, match="is itself a checkpoint"):
            act()
    assert sorted(step.rglob("*")) == files


def test_reader_neither_writes_nor_deletes(run_dir):
    with flaxckpt.Checkpointer(run_dir / "run") as ckpt:
        ckpt.save(1, state(1))
    reader = flaxckpt.Checkpointer(run_dir / "run", read_only=True, keep=[LatestN(1)])
    for act in (
        lambda: reader.save(2, state(2)),
        lambda: reader.delete(1),
        lambda: reader.pin(1),
        lambda: reader.unpin(1),
        reader.prune,
        lambda: reader.add_metrics(1, {"loss": 1}),
        lambda: flaxckpt.Checkpointer(run_dir / "run", read_only=True, metadata={}),
    ):
        with pytest.raises(errors.ReadOnlyError, match="read_only=True; open"):
            act()
    assert reader.prune(dry_run=True) == ()
    strategies.assert_same(state(1), reader.restore())
    missing = flaxckpt.Checkpointer(run_dir / "missing", read_only=True)
    assert missing.steps() == []
    assert not (run_dir / "missing").exists()


def test_reload_sees_changes_of_other_writers(run_dir):
    writer = flaxckpt.Checkpointer(run_dir)
    reader = flaxckpt.Checkpointer(run_dir, read_only=True)
    writer.save(1, state(1), metrics={"loss": 1.0}).wait()
    assert reader.steps() == [1]
    assert reader.metrics(1) == {"loss": 1.0}
    writer.add_metrics(1, {"loss": 0.5, "accuracy": 0.9})
    reader.reload()
    assert reader.metrics(1) == {"loss": 0.5, "accuracy": 0.9}
    writer.close()


def test_new_steps_yields_each_once_until_timeout(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(1, state(1)).wait()
        seen = []
        for step in ckpt.new_steps(timeout_secs=0.3, poll_secs=0.01):
            seen.append(step)
            if step < 4:
                ckpt.save(step + 1, state(step + 1)).wait()
    assert seen == [1, 2, 3, 4]


def test_logs_one_line_per_save_and_delete(run_dir, caplog):
    caplog.set_level(logging.INFO, logger="flaxckpt")
    with flaxckpt.Checkpointer(run_dir, keep=[LatestN(1)]) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    words = [record.getMessage().split()[0] for record in caplog.records]
    assert words == ["saved", "deleted", "saved"]


# ---- failing saves ---------------------------------------------------------------


@pytest.fixture
def broken_disk(monkeypatch):
    def fail(*args):
        raise OSError(5, "Input/output error")

    seams.replace(monkeypatch, "disk.sync_tree", fail)
    seams.replace(monkeypatch, "commit_marker.commit", fail)  # in object stores
    return monkeypatch


@pytest.mark.parametrize("call", ["wait", "close", "save", "restore", "exit"])
def test_next_call_raises_error_of_failed_save(run_dir, broken_disk, call):
    ckpt = flaxckpt.Checkpointer(run_dir)
    ckpt.save(1, state(1))
    act = {
        "wait": ckpt.wait,
        "close": ckpt.close,
        "save": lambda: ckpt.save(2, state(2)),
        "restore": ckpt.restore,
        "exit": lambda: ckpt.__exit__(None, None, None),
    }[call]
    with pytest.raises(errors.SaveFailedError, match="Input/output error"):
        act()
    broken_disk.undo()
    ckpt.close()  # told once is enough
    assert ckpt.steps() == []
    ckpt.save(1, state(1)).wait()
    assert ckpt.steps() == [1]


def test_error_raised_by_handle_is_not_raised_again(run_dir, broken_disk):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        handle = ckpt.save(1, state(1))
        with pytest.raises(errors.SaveFailedError):
            handle.wait()


def test_failed_save_does_not_hide_error_in_block(run_dir, broken_disk):
    ckpt = flaxckpt.Checkpointer(run_dir)

    def run():
        with ckpt:
            ckpt.save(1, state(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as info:
        run()
    assert "The save in progress also failed" in info.value.__notes__[0]


def test_saves_from_several_threads_run_in_turn(run_dir, monkeypatch):
    real, running, most = seams.current("save.write_snapshot"), [], []

    def execute(snapshot, previous):
        running.append(snapshot)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(snapshot)
        return real(snapshot, previous)

    seams.replace(monkeypatch, "save.write_snapshot", execute)
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        threads = [
            threading.Thread(target=ckpt.save, args=(step, state(step)))
            for step in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ckpt.steps() == list(range(6))
    assert max(most) == 1


def test_interrupted_wait_can_be_repeated(run_dir, monkeypatch):
    release = threading.Event()
    real = seams.current("save.write_snapshot")

    def held_up(snapshot, previous):
        release.wait()
        return real(snapshot, previous)

    seams.replace(monkeypatch, "save.write_snapshot", held_up)
    ckpt = flaxckpt.Checkpointer(run_dir)
    handle = ckpt.save(1, state(1))

    def interrupt(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(handle._ended, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ckpt.wait()
    release.set()
    assert ckpt.wait().step == 1


@pytest.mark.parametrize("wait", [lambda h: h.wait(), lambda h: h.wait(9), "cancel"])
def test_save_fails_if_thread_has_no_memory(run_dir, monkeypatch, wait):
    end_threads(monkeypatch)
    ckpt = flaxckpt.Checkpointer(run_dir)
    handle = ckpt.save(1, state(1))
    if wait == "cancel":
        assert not handle.cancel()
        wait = type(handle).wait
    with pytest.raises(errors.SaveFailedError, match="free memory, and save again"):
        wait(handle)
    assert handle.done()
    assert ckpt.steps() == []


def test_save_fails_if_thread_beside_it_has_no_memory(run_dir, monkeypatch):
    """The descriptions of arrays are written on a thread of their own."""
    ckpt = flaxckpt.Checkpointer(run_dir)
    with monkeypatch.context() as patch:
        end_threads(patch, "flaxckpt")
        handle = ckpt.save(1, state(1))
        with pytest.raises(errors.SaveFailedError, match="memory"):
            handle.wait()
    assert ckpt.steps() == []
    ckpt.save(1, state(1)).wait()
    strategies.assert_same(state(1), ckpt.restore())


def test_load_fails_if_thread_has_no_memory(run_dir, monkeypatch):
    flaxckpt.save(run_dir / "x", state(1))
    end_threads(monkeypatch)
    handle = flaxckpt.load_async(run_dir / "x")
    with pytest.raises(errors.OutOfMemoryError, match="free memory, and load again"):
        handle.wait()


def test_cancelled_save_makes_no_step_and_run_continues(run_dir, monkeypatch):
    gate, seen = Gate(monkeypatch, "metadata"), []
    with flaxckpt.Checkpointer(run_dir, keep=[LatestN(1)], sinks=[seen.append]) as ckpt:
        ckpt.save(1, state(1)).wait()
        handle = gate.hold(lambda: ckpt.save(2, state(2)))
        assert handle.cancel()
        assert ckpt.steps() == [1], "no policy has decided"
        assert ckpt.wait() is None
        ckpt.raise_if_failed()
        gate.handle = None
        ckpt.save(2, state(3)).wait()
        assert ckpt.steps() == [2]
        handle = gate.hold(lambda: ckpt.save(3, state(3)))
        assert handle.cancel()
        gate.handle = None
        ckpt.save(4, state(4))  # without a wait between them
    assert ckpt.steps() == [4]
    ends = [(e.step, e.kind) for e in seen if e.kind not in ("started", "snapshot")]
    assert ends == [
        (1, "committed"),
        (2, "cancelled"),
        (2, "committed"),
        (1, "deleted"),
        (3, "cancelled"),
        (4, "committed"),
        (2, "deleted"),
    ]
    assert ckpt.restore(step=4)["w"].min() == 4


def test_saves_cancelled_last_step_at_end(run_dir, monkeypatch):
    gate = Gate(monkeypatch, "metadata")
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=2, preflight=False)
        on_step(1, state(1))
        on_step(2, state(2), force=True)
        ckpt.wait()
        gate.hold(lambda: begin_by(on_step, 4, ckpt)).cancel()
        gate.handle = None
        assert ckpt.steps() == [2]
    assert ckpt.steps() == [2, 4]


def begin_by(on_step, step, ckpt):
    on_step(step, state(step))
    return ckpt._saves._handle


def test_undeletable_step_does_not_fail_save(run_dir, monkeypatch, caplog):
    def fail(*given, **options):
        raise OSError(16, "Device or resource busy")

    with flaxckpt.Checkpointer(run_dir, keep=[LatestN(1)]) as ckpt:
        ckpt.save(1, state(1)).wait()
        seams.replace(monkeypatch, "delete.delete", fail)
        assert ckpt.save(2, state(2)).wait().deleted_steps == ()
    assert "step 1 could not be deleted" in caplog.text
    assert ckpt.steps() == [1, 2]


def test_rejects_file_as_run_directory(run_dir):
    (run_dir / "file").touch()
    for path in (run_dir / "file", run_dir / "file" / "run"):
        with pytest.raises(errors.SaveFailedError, match="cannot make"):
            flaxckpt.Checkpointer(path)
    with pytest.raises(errors.SaveFailedError, match="could not be saved"):
        flaxckpt.save(run_dir / "file" / "c", state(1))


def test_wait_times_out(run_dir, monkeypatch):
    real, may_end = seams.current("save.write_snapshot"), threading.Event()

    def slow(snapshot):
        assert may_end.wait(60)
        return real(snapshot)

    seams.replace(monkeypatch, "save.write_snapshot", slow)
    handle = flaxckpt.save_async(run_dir / "c", state(1))
    with pytest.raises(errors.CheckpointTimeoutError) as info:
        handle.wait(timeout_secs=0.01)
    assert isinstance(info.value, TimeoutError)
    assert not handle.done()
    may_end.set()
    assert handle.wait().bytes_written > 0


def test_removes_leftover_of_crash(run_dir):
    leftover = run_dir / "5.orbax-checkpoint-tmp-writing-0123abcd"
    of_orbax = run_dir / "5.orbax-checkpoint-tmp"
    for path in (leftover, of_orbax):
        (path / "state").mkdir(parents=True)
        (path / "state" / "junk").touch()
    assert flaxckpt.Checkpointer(run_dir, read_only=True).steps() == []
    assert leftover.exists()
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        assert not leftover.exists()
        assert ckpt.steps() == []
        ckpt.save(5, state(5)).wait()
        assert of_orbax.exists(), "it may be written by another program"
        assert not (run_dir / "5/state/junk").exists()
        strategies.assert_same(state(5), ckpt.restore())


# ---- what is passed in the wrong place -------------------------------------------


def test_error_names_class_of_state_passed_as_step(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        with pytest.raises(
            errors.OptionError, match=r"got a dict: write save\(1, state\)$"
        ):
            ckpt.save(state(1), 1)
        with pytest.raises(errors.OptionError, match=r"got 'one'$"):
            ckpt.save("one", state(1))


def test_restore_or_init_rejects_a_path_as_state(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        callback = flaxckpt.CheckpointCallback(ckpt)
        with pytest.raises(errors.OptionError, match="as source="):
            callback.restore_or_init("pretrained")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [(1, "wanted a state .* got 1: .*step="), ("1", "a path is the first argument")],
)
def test_restore_and_load_reject_a_step_or_path_as_state(run_dir, wrong, told):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(1, state(1)).wait()
        for restore in (ckpt.restore, lambda wrong: flaxckpt.load(run_dir, wrong)):
            with pytest.raises(errors.OptionError, match=told):
                restore(wrong)
        ckpt.save(2, 5).wait()  # a state that is one number
        assert ckpt.restore(0) == 5


def create(step=0):
    return state(step)


@pytest.mark.parametrize(
    "function",
    [create, functools.partial(create, 1), jax.jit(create), dict, len, linen.Dense(3)],
    ids=["function", "partial", "jit", "class", "builtin", "module"],
)
def test_rejects_functions_as_states(run_dir, function):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        callback = flaxckpt.CheckpointCallback(ckpt)
        for call in (
            callback.restore_or_init,
            lambda function: ckpt.save(1, function),
            lambda function: callback(1, function),
            lambda function: flaxckpt.save(run_dir / "x", function),
        ):
            with pytest.raises(errors.OptionError, match="wanted a state, got the"):
                call(function)
        callback.give_way()
        ckpt.save(1, state(1)).wait()
        with pytest.raises(errors.OptionError, match="wanted a state, got the"):
            ckpt.restore(function)
        with pytest.raises(errors.OptionError, match="wanted a state, got the"):
            flaxckpt.plan(run_dir, function)


def test_writer_keeps_no_locks_of_written_paths(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        for step in range(5):
            ckpt.save(step, state(step))
    del ckpt
    steps = {f"{run_dir / str(step)}" for step in range(5)}

    def find_kept():
        gc.collect()
        paths = [each for each in gc.get_objects() if type(each) is type(run_dir)]
        return steps & {*map(str, paths)}

    end = time.monotonic() + 20
    while find_kept() and time.monotonic() < end:
        time.sleep(0.1)  # the thread of the last save ends after the save
    assert not find_kept()


# ---- falling back ----------------------------------------------------------------


def test_skips_damaged_newest_step_with_warning(run_dir, caplog):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
        ckpt.wait()
        damage(run_dir / "3")
        (run_dir / "2/state/_METADATA").unlink()
        with pytest.raises(errors.DamagedCheckpointError, match="w: "):
            ckpt.restore(step=3)
        with pytest.raises(errors.DamagedCheckpointError, match="w: "):
            ckpt.restore(fallback=False)
        strategies.assert_same(state(1), ckpt.restore())
        assert "step 3 is left out" in caplog.text
        assert "step 2 is left out" in caplog.text
        last = caplog.records[-1].getMessage()
        assert "restored step 1 of" in last
        assert "the newer steps 3, 2, damaged: 2 steps of training lost" in last
        assert ckpt.steps() == [1]
        assert list(ckpt.damaged()) == [2, 3]


def test_each_restart_reports_previously_marked_step(run_dir, caplog):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).wait()
        damage(run_dir / "3")
        ckpt.restore()
        last = caplog.records[-1].getMessage()
        assert "restored step 1 of" not in last
        assert "restored step 2 of" in last, "the log ends by what was restored"
    for _ in range(2):
        caplog.clear()
        seen = []
        with flaxckpt.Checkpointer(run_dir, sinks=[seen.append]) as ckpt:
            callback = flaxckpt.CheckpointCallback(ckpt, on_preemption=False)
            assert callback.restore_or_init(state(0))[1] == 2
            with pytest.raises(errors.DamagedCheckpointError, match="3: w: ") as raised:
                ckpt.restore(fallback=False)
            callback.give_way()
        assert "fallback=True restores step 2" in str(raised.value)
        told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert "step 3 is left out, because it is marked as damaged" in told[0]
        assert "restored step 2 of" in told[-1]
        assert "the newer step 3, damaged: 1 step of training lost" in told[-1]
        assert [(e.kind, e.step) for e in seen] == [("fell_back", 3), ("restored", 2)]
    caplog.clear()
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        strategies.assert_same(state(2), ckpt.restore(step=2))
        ckpt.save(3, state(3)).wait()
        strategies.assert_same(state(3), ckpt.restore(fallback=False))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_mismatch_is_not_treated_as_damage(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
        with pytest.raises(errors.RestoreMismatchError):
            ckpt.restore({"w": jnp.ones(7)})


def test_error_names_newest_step_if_all_are_damaged(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).wait()
            damage(run_dir / str(step))
        with pytest.raises(errors.DamagedCheckpointError, match=str(run_dir / "2")):
            ckpt.restore()


def test_verify_marks_damage_so_good_step_is_kept(run_dir):
    keep = [LatestN(1), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        for step, loss in ((1, 0.2), (2, 0.1), (3, 0.3), (4, 0.4)):
            ckpt.save(step, state(step), metrics={"loss": loss}).wait()
    damage(run_dir / "2")
    reader = flaxckpt.Checkpointer(run_dir, read_only=True)
    assert not reader.verify(2).ok
    assert reader.steps() == [1, 2, 3, 4]
    with flaxckpt.Checkpointer(run_dir, keep=keep) as ckpt:
        assert not ckpt.verify(2).ok
        assert not ckpt.verify(2).ok
        assert ckpt.steps() == [1, 3, 4]
        assert ckpt.best_step("loss", "min") == 1
        assert ckpt.prune() == (3,)
        assert ckpt.steps() == [1, 4]
        damage(run_dir / "2")  # as it was
        assert ckpt.verify(2).ok
        assert ckpt.steps() == [1, 2, 4]
    kinds = [e.kind for e in run_files.read_events(run_dir) if e.step == 2]
    assert kinds[-2:] == ["found_damaged", "found_good"]
    assert kinds.count("found_damaged") == 1


def test_verify_does_not_mark_temporarily_unreadable_step(run_dir, monkeypatch):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(1, state(1), metrics={"loss": 1}).wait()
        (run_dir / "1/metrics/metrics").write_text("{")
        chunk = run_dir / "1/state/d/0.small.0"
        seam = "disk.stream" if run_dir.is_absolute() else "store.stream"
        real = seams.current(seam)

        def stream(file, within, size, /):
            if file == chunk:
                raise PermissionError(errno.EACCES, "no permission", str(file))
            return real(file, within, size)

        seams.replace(monkeypatch, seam, stream)
        report = ckpt.verify(1)
        assert report.problems
        assert report.unread
        assert not ckpt.damaged()


@pytest.mark.parametrize("part", ["metrics/metrics", "state/_METADATA"])
def test_verify_marks_only_unrestorable_steps(run_dir, part):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(1, state(1), metrics={"loss": 1}).wait()
        ckpt.save(2, state(2), metrics={"loss": 1}).wait()
        (run_dir / "2" / part).unlink()
        assert not ckpt.verify(2).ok
        is_marked = 2 in ckpt.damaged()
        ckpt.restore()
        assert (2 in ckpt.damaged()) == is_marked == (part == "state/_METADATA")


# ---- keeping ---------------------------------------------------------------------


def run(run_dir, losses, **kwargs):
    """Saves one step per loss, reopening each time, as restarts would."""
    for step, loss in enumerate(losses):
        with flaxckpt.Checkpointer(run_dir, **kwargs) as ckpt:
            metrics = {} if loss is None else {"loss": loss}
            ckpt.save(step, state(step), metrics=metrics)
    return ckpt


def test_keeps_newest_beside_best_across_restarts(run_dir, caplog):
    ckpt = run(run_dir, [0.1, 0.5, 0.7, 0.9], keep=[BestN(1, "loss", "min")])
    assert ckpt.steps() == [0, 3]
    assert ckpt.best_step("loss", "min") == 0
    assert ckpt.best_step("loss", "max") == 3
    assert ckpt.best_step("accuracy", "max") is None
    assert "no step of" in caplog.text
    assert "the steps have loss" in caplog.text


def test_nan_and_missing_metrics_are_never_best(run_dir):
    losses = [0.9, math.nan, 0.7, 0.1, math.nan, None, 0.5]
    keep = [BestN(1, "loss", "min")]
    ckpt = run(run_dir, losses, keep=keep)
    assert ckpt.steps() == [3, 6]
    assert ckpt.best_step("loss", "min") == 3


def test_policies_add_up_and_explain_themselves(run_dir):
    keep = [LatestN(2), BestN(1, "loss", "min"), EveryNSteps(4)]
    ckpt = run(run_dir, [9, 8, 0, 7, 6, 5, 4, 3], keep=keep)
    assert ckpt.explain() == {
        0: ["EveryNSteps(4)"],
        2: ["BestN(1, 'loss', 'min')"],
        4: ["EveryNSteps(4)"],
        6: ["LatestN(2)"],
        7: ["newest", "LatestN(2)"],
    }


def test_pinned_steps_stay_until_unpinned(run_dir):
    with flaxckpt.Checkpointer(run_dir, keep=[LatestN(1)]) as ckpt:
        ckpt.save(1, state(1)).wait()
        ckpt.pin(1)
        ckpt.save(2, state(2)).wait()
        assert ckpt.explain() == {1: ["pinned"], 2: ["newest", "LatestN(1)"]}
        ckpt.unpin(1)
        assert ckpt.prune(dry_run=True) == (1,)
        assert ckpt.steps() == [1, 2]
        assert ckpt.prune() == (1,)
        assert ckpt.steps() == [2]


def test_policies_ignore_directories_named_like_steps(run_dir):
    (run_dir / "2024").mkdir()
    (run_dir / "2024" / "notes.txt").touch()
    with flaxckpt.Checkpointer(run_dir, keep=[LatestN(1)]) as ckpt:
        for step in (1, 2, 3000):
            ckpt.save(step, state(step)).wait()
        assert ckpt.explain() == {3000: ["newest", "LatestN(1)"]}
        assert (run_dir / "2024" / "notes.txt").exists()


def test_damaged_metrics_do_not_block_state(run_dir, caplog):
    with flaxckpt.Checkpointer(run_dir, keep=[BestN(1, "loss", "min")]) as ckpt:
        ckpt.save(1, state(1), metrics={"loss": 1}).wait()
        (run_dir / "1/metrics/metrics").write_text("{")
        ckpt.reload()
        strategies.assert_same(state(1), ckpt.restore())
        ckpt.save(2, state(2), metrics={"loss": 2}).wait()
        assert ckpt.steps() == [1, 2], "it may be the best"
    assert "cannot be read" in caplog.text


def test_delete_removes_step_and_rejects_missing_one(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        ckpt.save(1, state(1)).wait()
        ckpt.delete(1)
        assert [path.name for path in run_dir.iterdir()] == ["events.jsonl"]
        with pytest.raises(errors.CheckpointNotFoundError, match="has no step 1"):
            ckpt.delete(1)


def test_metrics_are_numbers_and_may_be_nested(run_dir):
    with flaxckpt.Checkpointer(run_dir) as ckpt:
        metrics = {"eval": {"loss": jnp.float32(0.5)}, "n": np.int64(3)}
        ckpt.save(1, state(1), metrics=metrics).wait()
        assert ckpt.metrics(1) == {"eval/loss": 0.5, "n": 3.0}
        assert json.loads((run_dir / "1/metrics/metrics").read_text()) == {
            "eval/loss": 0.5,
            "n": 3.0,
        }
        with pytest.raises(errors.OptionError, match="'bad' must be a single number"):
            ckpt.save(2, state(2), metrics={"bad": np.ones(3)})
        for metrics in ({"a/b": 1, "a": {"b": 2}}, {"a": {"b/c": 1, "b": {"c": 2}}}):
            with pytest.raises(errors.OptionError, match="two metrics are named"):
                ckpt.save(2, state(2), metrics=metrics)


def test_rejects_non_positive_budget(run_dir):
    with pytest.raises(errors.OptionError, match="max_concurrent_bytes"):
        flaxckpt.Checkpointer(run_dir, max_concurrent_bytes=0)


def test_lack_of_memory_is_not_treated_as_damage(tmp_path, monkeypatch, caplog):
    state = {"w": np.arange(2.0**20), "b": np.ones(3)}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {**state, "b": state["b"] * step})
    real = np.empty

    def empty(shape, *args, **options):
        if np.prod(shape) >= 2**20:
            raise MemoryError
        return real(shape, *args, **options)

    with flaxckpt.Checkpointer(tmp_path) as ckpt, monkeypatch.context() as patch:
        patch.setattr(np, "empty", empty)
        with pytest.raises(errors.OutOfMemoryError, match="2 is not damaged") as raised:
            ckpt.restore(state, memory_map=False)
        assert isinstance(raised.value, MemoryError)
        assert "left out" not in caplog.text
        flip_bit(tmp_path / "2" / "state" / "_METADATA", 0)
        with pytest.raises(errors.DamagedCheckpointError, match="_METADATA"):
            ckpt.restore(state, step=2, memory_map=False)
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1, 2]
        assert ckpt.restore(state)["b"][0] == 2


# ---- a save in progress -----------------------------------------------------------

ASKED = {
    "steps": lambda ckpt: ckpt.steps() == [1],
    "latest_step": lambda ckpt: ckpt.latest_step() == 1,
    "best_step": lambda ckpt: ckpt.best_step("loss", "min") == 1,
    "metrics": lambda ckpt: ckpt.metrics(1) == {"loss": 0.5},
    "metadata": lambda ckpt: ckpt.metadata(1).step == 1,
    "has_dataset": lambda ckpt: not ckpt.has_dataset(1),
    "damaged": lambda ckpt: ckpt.damaged() == {} and ckpt.steps() == [1],
    "explain": lambda ckpt: ckpt.explain().keys() == {1},
    "new_steps": lambda ckpt: list(ckpt.new_steps(timeout_secs=0)) == [1],
    "pin": lambda ckpt: ckpt.pin(1) or "pinned" in ckpt.explain()[1],
    "unpin": lambda ckpt: ckpt.unpin(1) is None,
    "make_permanent": lambda ckpt: ckpt.make_permanent(1) is None,
    "prune": lambda ckpt: ckpt.prune(dry_run=True) == () and ckpt.steps() == [1],
    "add_metrics": lambda ckpt: ckpt.add_metrics(1, {"eval": 1}) is None,
    "delete": lambda ckpt: ckpt.delete(1) or ckpt.steps() == [],
    "verify": lambda ckpt: ckpt.verify(1).ok,
    "restore": lambda ckpt: ckpt.restore(step=1)["step"] == 1,
}


@pytest.mark.parametrize("name", ASKED)
def test_step_queries_wait_for_save(tmp_path, monkeypatch, name):
    with flaxckpt.Checkpointer(tmp_path / "run") as ckpt:
        gate = Gate(monkeypatch, "rename")
        gate.hold(lambda: ckpt.save(1, state(1), metrics={"loss": 0.5}))
        assert ASKED[name](ckpt)


def test_step_queries_keep_error_for_later_calls(tmp_path, monkeypatch):
    ckpt = flaxckpt.Checkpointer(tmp_path / "run")

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")

    seams.replace(monkeypatch, "commit.write_files", fail)
    ckpt.save(1, state(1))
    assert ckpt.steps() == []
    assert ckpt.latest_step() is None
    with pytest.raises(errors.SaveFailedError, match="no space"):
        ckpt.pin(1)


@pytest.mark.parametrize("staging", [None, "fast"])
def test_policy_querying_steps_does_not_deadlock(tmp_path, staging):
    asked = []

    class Curious:
        def preserved(self, checkpoints):
            asked.append((ckpt.latest_step(), ckpt.steps()))
            ckpt.wait()
            return {checkpoint.step for checkpoint in checkpoints}

    options = {} if staging is None else {"staging": tmp_path / staging}
    ckpt = flaxckpt.Checkpointer(tmp_path / "run", keep=[Curious()], **options)
    with ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
    assert asked
    assert ckpt.steps() == [1, 2, 3]


def test_sink_querying_steps_gets_answer(tmp_path):
    seen = []
    with flaxckpt.Checkpointer(
        tmp_path / "run", sinks=[lambda event: seen.append(ckpt.latest_step())]
    ) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    assert seen[-1] == 2


@pytest.mark.parametrize("is_new", [True, False])
def test_save_after_an_older_step_warns_that_a_resume_continues_the_newest(
    run_dir, caplog, is_new
):
    ckpt = flaxckpt.Checkpointer(run_dir, keep=[LatestN(2)])
    for step in (10, 20, 30):
        ckpt.save(step, state(step)).wait()
    if is_new:
        ckpt.close()
        ckpt = flaxckpt.Checkpointer(run_dir, keep=[LatestN(2)])
    with ckpt:
        ckpt.restore(state(0), step=20)
        for step in (25, 26):
            ckpt.save(step, state(step)).wait()
        [told] = [record.getMessage() for record in caplog.records]
        assert "step 25 of" in told
        assert "continues the newest, step 30: delete the steps after 20" in told
        ckpt.delete(30)
        caplog.clear()
        ckpt.restore(state(0), step=26)
        ckpt.save(40, state(40)).wait()
        ckpt.save(35, state(35)).wait()  # both are of this training
    assert not caplog.records


@pytest.mark.parametrize("then", ["renamed", "removed", "replaced"])
def test_save_warns_that_the_steps_before_it_are_gone(tmp_path, caplog, then):
    run = tmp_path / "run"
    with flaxckpt.Checkpointer(run) as ckpt:
        ckpt.save(1, state(1)).wait()
        run.rename(tmp_path / "elsewhere")
        if then == "removed":
            shutil.rmtree(tmp_path / "elsewhere")
        if then == "replaced":
            run.mkdir()
        for step in (2, 3):
            ckpt.save(step, state(step)).wait()
        told = [r.getMessage() for r in caplog.records if "is gone" in r.message]
    assert len(told) == 1
    assert f"step 1 of this run is gone from {run}" in told[0]
    assert "was the directory renamed, moved or removed?" in told[0]


def test_save_does_not_miss_steps_that_were_deleted_or_are_damaged(run_dir, caplog):
    with flaxckpt.Checkpointer(run_dir, keep=[LatestN(1)]) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step), temporary=True).wait()
        ckpt.delete(2)
        ckpt.save(3, state(3)).wait()
        with flaxckpt.Checkpointer(run_dir) as other:
            other.delete(3)
        ckpt.save(4, state(4)).wait()
        damage(run_dir / "4")
        ckpt.verify(4)
        ckpt.save(5, state(5)).wait()
        ckpt.restore(step=5)
        ckpt.save(6, state(6)).wait()
    assert "is gone" not in caplog.text
