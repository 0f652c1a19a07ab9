"""Runs in stores: begun, cut off, gone on with, and converted."""

import multiprocessing
import os
import signal
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import BestN, LatestN
from tests.helpers import run_files, seams, slow, strategies

STORES = ("memory", "moto", "seaweed")
REAL = ("moto", "seaweed")


def train(path, last):
    """Trains to a step, from where it stood."""
    batches = StepIndexed(lambda i: jnp.float32(i))
    keep = [LatestN(2), BestN(1, "loss", "min")]
    with flaxckpt.Checkpointer(path, keep=keep) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=2, dataset=batches)
        state, start = on_step.restore_or_init({"sum": jnp.float32(0), "step": 0})
        for step in range(start + 1, last + 1):
            state = {"sum": state["sum"] + next(batches), "step": step}
            on_step(step, state, metrics={"loss": 1 / step})
    return state, start, ckpt


@pytest.mark.parametrize("kind", STORES)
def test_resumed_run_matches_uninterrupted_run(store_path, kind):
    path = store_path(kind)
    whole, _, _ = train(path / "whole", 9)
    train(path / "parts", 5)
    parts, start, ckpt = train(path / "parts", 9)
    assert start == 5
    strategies.assert_same(whole, parts)
    assert ckpt.steps() == [8, 9]
    kinds = [event.kind for event in run_files.read_events(path / "parts")]
    assert kinds.count("restored") == 1
    assert kinds.count("committed") >= 5


@pytest.mark.parametrize("kind", STORES)
def test_deletes_temporary_steps_and_dataset_states_separately(store_path, kind):
    path = store_path(kind)
    with flaxckpt.Checkpointer(
        path, keep=[LatestN(3)], keep_dataset=[LatestN(1)]
    ) as ckpt:
        for step in (1, 2):
            data = StepIndexed(lambda i: i)
            next(data)
            ckpt.save(step, {"w": jnp.ones(3)}, dataset=data).wait()
        assert [ckpt.metadata(step).has_dataset for step in (1, 2)] == [False, True]
        ckpt.save(3, {"w": jnp.ones(3)}, temporary=True).wait()
        ckpt.save(4, {"w": jnp.ones(3)}).wait()
        assert ckpt.steps() == [1, 2, 4]


def save_until_killed(url, at, is_there):
    """Saves step 1, and then is killed while it writes step 2."""
    ckpt = flaxckpt.Checkpointer(url)
    ckpt.save(1, {"n": np.arange(5)}).wait()
    real = seams.current("commit_marker.write_new")

    def write_new(path, content):
        if path.name == at:
            is_there.set()
            threading.Event().wait()
        real(path, content)

    seams.replace(pytest.MonkeyPatch(), "commit_marker.write_new", write_new)
    ckpt.save(2, {"n": np.arange(6)}).wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "at",
    slow.all_but(["0.small.0", "flaxckpt.json", run_files.COMMITTED], ["0.small.0"]),
)
@pytest.mark.parametrize("kind", REAL)
def test_sweeps_and_repeats_killed_save(store_path, kind, at):
    url = str(store_path(kind))
    context = multiprocessing.get_context("spawn")
    is_there = context.Event()
    writer = context.Process(target=save_until_killed, args=(url, at, is_there))
    writer.start()
    assert is_there.wait(60)
    with pytest.raises(errors.CheckpointExistsError, match="is being written by"):
        flaxckpt.Checkpointer(url).save(2, {"n": np.arange(7)}).wait()
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    lock = f"2{run_files.LOCK}"  # stays until no request of the writer can arrive
    with flaxckpt.Checkpointer(url) as ckpt:
        assert sorted(p.name for p in ckpt.directory.iterdir()) == [
            "1",
            lock,
            "events.jsonl",
        ]
        assert ckpt.steps() == [1]
        ckpt.save(2, {"n": np.arange(7)}).wait()
        strategies.assert_same({"n": np.arange(7)}, ckpt.restore())
        strategies.assert_same({"n": np.arange(5)}, ckpt.restore(step=1))


@pytest.mark.parametrize("kind", STORES)
def test_converts_to_stores_and_back(store_path, tmp_path, kind):
    path = store_path(kind)
    state = {"w": np.arange(5000, dtype=np.float32), "n": 3}
    flaxckpt.save(tmp_path / "local", state)
    there = flaxckpt.convert(tmp_path / "local", path / "c")
    assert there.path == str(path / "c")
    assert flaxckpt.verify(path / "c").ok
    zstd = flaxckpt.ArrayLayout(codec="zstd")
    flaxckpt.convert(path / "c", path / "d", layout=zstd)
    flaxckpt.convert(path / "d", tmp_path / "back.safetensors")
    for found in (path / "c", path / "d", tmp_path / "back.safetensors"):
        strategies.assert_same(state, flaxckpt.load(found))
    with pytest.raises(errors.CheckpointExistsError):
        flaxckpt.convert(tmp_path / "local", path / "c")
    flaxckpt.convert(tmp_path / "local", path / "c", overwrite=True)
    with pytest.raises(errors.OptionError, match="format='orbax'"):
        flaxckpt.convert(path / "c", path / "model.safetensors")
    assert flaxckpt.open_leaf(path / "d", "w")[7].read().result() == 7
    plan = flaxckpt.plan(path / "c", {"w": np.zeros(5000, np.float32)})
    assert not plan.problems


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}])
def test_orbax_checkpoint_in_store_needs_its_marker(
    store_path, tmp_path, kind, options
):
    import orbax.checkpoint as ocp

    path, state = store_path(kind) / "orbax", {"a": np.arange(100.0), "b": {"c": 2}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as writer:
        writer.save(tmp_path / "orbax", state)
    for file in sorted((tmp_path / "orbax").rglob("*")):
        if file.is_file():
            name = file.relative_to(tmp_path / "orbax").as_posix()
            (path / name).write_bytes(file.read_bytes())
    (path / run_files.COMMITTED).unlink(missing_ok=True)
    with pytest.raises(errors.CheckpointError, match=run_files.COMMITTED):
        flaxckpt.load(path)
    (path / run_files.COMMITTED).write_text("committed")
    np.testing.assert_array_equal(flaxckpt.load(path)["a"], state["a"])
