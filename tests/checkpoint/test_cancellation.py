"""A save is cancelled as a whole, or not at all."""

import threading
import time

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.helpers import seams
from tests.helpers.gates import Gate

RAW = flaxckpt.ArrayLayout()
ENCODED = flaxckpt.ArrayLayout(codec="zstd")


def state(value):
    return {f"w{i}": np.full(5000, value, np.float32) for i in range(40)}


def left(directory):
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize(
    ("place", "layout"),
    [
        ("metadata", RAW),
        ("chunk", RAW),
        ("metadata", ENCODED),
        ("chunk", ENCODED),
        ("sync", RAW),
        ("sync", ENCODED),
    ],
)
def test_cancelled_save_leaves_nothing_behind(tmp_path, monkeypatch, place, layout):
    gate, path = Gate(monkeypatch, place), tmp_path / "c"
    handle = gate.hold(lambda: flaxckpt.save_async(path, state(1), layout=layout))
    assert left(tmp_path) != []
    assert handle.cancel()
    assert left(tmp_path) == []
    assert handle.done()
    assert handle.cancel(), "the same answer again"
    assert repr(handle) == f"<save of {path}: cancelled>"
    for _ in range(2):
        with pytest.raises(errors.SaveCancelledError, match="/c was cancelled"):
            handle.wait()
    flaxckpt.save(path, state(2), layout=layout)
    assert flaxckpt.load(path)["w7"][-1] == 2
    assert left(tmp_path) == ["c"]


def test_cancelled_save_writes_no_further_chunks(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, "chunk")
    handle = gate.hold(lambda: flaxckpt.save_async(tmp_path / "c", state(1)))
    assert handle.cancel()
    assert gate.calls < 40, "of 40 arrays, each with a file of metadata"


def test_cancel_has_no_effect_on_committed_save(tmp_path, monkeypatch):
    gate, path = Gate(monkeypatch, "rename"), tmp_path / "c"
    handle = gate.hold(lambda: flaxckpt.save_async(path, state(1)))
    assert not handle.cancel()
    assert handle.wait().path == str(path)
    assert not handle.cancel()
    assert flaxckpt.load(path)["w0"][0] == 1


def test_cancel_has_no_effect_on_failed_save(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    seams.replace(monkeypatch, "disk.sync_tree", fail)
    gate = Gate(monkeypatch, "sync")
    handle = gate.hold(lambda: flaxckpt.save_async(tmp_path / "c", state(1)))
    assert not handle.cancel()
    with pytest.raises(errors.SaveFailedError, match="No space left"):
        handle.wait()
    assert left(tmp_path) == []


@pytest.mark.parametrize("place", ["chunk", "sync"])
def test_cancelled_save_keeps_previous_checkpoint(tmp_path, monkeypatch, place):
    path = tmp_path / "c"
    flaxckpt.save(path, state(1))
    gate = Gate(monkeypatch, place)
    handle = gate.hold(lambda: flaxckpt.save_async(path, state(2), overwrite=True))
    assert handle.cancel()
    assert left(tmp_path) == ["c"]
    assert flaxckpt.verify(path).ok
    assert flaxckpt.load(path)["w0"][0] == 1


def test_cancels_all_items_of_step_together(tmp_path, monkeypatch):
    def save(step):
        branches = {"params": state(step), "optimizer": state(-step)}
        return ckpt.save(step, branches, json={"config": {"step": step}})

    gate = Gate(monkeypatch, "sync")
    with flaxckpt.Checkpointer(tmp_path, items=("params", "optimizer")) as ckpt:
        save(1).wait()
        assert gate.hold(lambda: save(2)).cancel()
        assert sorted(left(tmp_path)) == ["1", "events.jsonl"]
        gate.handle = None
        save(2).wait()
        assert ckpt.verify(2).ok
        assert ckpt.restore()["optimizer"]["w3"][0] == -2


@pytest.mark.parametrize("kind", ["memory", "moto"])
def test_cancels_store_save_unless_it_overwrites(store_path, monkeypatch, kind):
    path = store_path(kind) / "c"
    gate = Gate(monkeypatch, "metadata")
    assert gate.hold(lambda: flaxckpt.save_async(path, state(1))).cancel()
    assert path.keys() == []
    gate.handle = None
    flaxckpt.save(path, state(2))
    handle = gate.hold(lambda: flaxckpt.save_async(path, state(3), overwrite=True))
    assert not handle.cancel(), "the old checkpoint is gone already"
    assert flaxckpt.load(path)["w0"][0] == 3


def test_multiple_threads_can_cancel_and_wait(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, "sync")
    handle = gate.hold(lambda: flaxckpt.save_async(tmp_path / "c", state(1)))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(handle.cancel())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while not handle.is_awaited():
        time.sleep(0.001)
    with pytest.raises(errors.SaveCancelledError):
        handle.wait()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
