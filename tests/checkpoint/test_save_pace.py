"""A save gives way to the training until someone waits for it."""

import os
import sys
import threading

import numpy as np
import optax
import pytest

import flaxckpt
from tests.helpers import programs, seams
from tests.helpers.gates import Gate

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="threads have no priority of their own"
)


def nice():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.fixture
def gate(monkeypatch):
    """Holds up chunks until someone waits, and notes the priority of their threads."""
    gate = Gate(monkeypatch, "chunk")
    gate.found = []
    hold = seams.current("chunk_file.write")

    def note(*args):
        gate.found.append(nice())
        hold(*args)

    seams.replace(monkeypatch, "chunk_file.write", note)
    return gate


def state():
    return {f"w{i}": np.full(1000, i, np.float32) for i in range(20)}


def save_alone(directory):
    return flaxckpt.save_async(directory / "1", state())


def save_in_a_run(directory):
    return flaxckpt.Checkpointer(directory).save(1, state())


@pytest.mark.parametrize("save", [save_alone, save_in_a_run])
def test_writes_chunks_at_low_priority_until_wait(tmp_path, gate, save):
    before = nice()
    handle = gate.hold(lambda: save(tmp_path))
    assert set(gate.found) == {min(before + 10, 19)}
    assert nice() == before
    handle.wait()
    loaded = flaxckpt.load(tmp_path / "1")
    assert {name: value[0] for name, value in loaded.items()} == {
        f"w{i}": i for i in range(20)
    }


def test_save_finishes_without_wait(tmp_path):
    handle = save_alone(tmp_path)
    while not handle.done():
        threading.Event().wait(0.01)
    assert not handle.is_awaited()
    assert flaxckpt.verify(tmp_path / "1").ok


def test_blocking_save_runs_at_full_speed(tmp_path, gate):
    params = {"w": np.ones(3, np.float32)}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    with flaxckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save_params_only(1, state)
    assert set(gate.found) == {nice()}


@pytest.mark.slow
def test_no_thread_keeps_low_priority(tmp_path):
    """Threads of TensorStore would inherit it from the thread that needs them first."""
    code = f"""
import os, sys
import jax.numpy as jnp
import flaxckpt
state = {{f"w{{i}}": jnp.full(50_000, i, jnp.float32) for i in range(20)}}
for n, codec in enumerate(["none", "compact", "none"]):
    layout = flaxckpt.ArrayLayout(codec=codec)
    handle = flaxckpt.save_async({str(tmp_path)!r} + f"/{{n}}", state, layout=layout)
    while not handle.done():
        pass
    flaxckpt.load({str(tmp_path)!r} + f"/{{n}}", state, memory_map=False)
threads = map(int, os.listdir("/proc/self/task"))
found = [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
print(len(found) > 2, {{*found}} == {{os.getpriority(os.PRIO_PROCESS, 0)}})
"""
    assert programs.run("-c", code).stdout.split() == ["True", "True"]
