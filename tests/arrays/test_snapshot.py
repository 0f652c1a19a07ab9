"""Snapshots in the memory of devices. CPU devices stand in for accelerators."""

import gc
import logging
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt._arrays import device_copy, to_host
from flaxckpt._checkpoint import save
from flaxckpt._checkpoint.commit import SaveOptions
from flaxckpt.configs import CheckpointConfig
from flaxckpt.policies import LatestN
from tests.helpers import seams, slow, strategies


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


class Layer(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.arange(6.0).reshape(2, 3))
        self.again = self.kernel


def arrays():
    """Arrays of all kinds that a device may have."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def on(*spec, memory_kind=None):
        return NamedSharding(mesh, P(*spec), memory_kind=memory_kind)

    values = jnp.arange(1024.0 * 768).reshape(1024, 768)
    return {
        "one": values + 1,
        "elsewhere": jax.device_put(values, jax.devices()[3]),
        "split": jax.device_put(values, on("data", "model")),
        "rows": jax.device_put(values, on("model")),
        "replicated": jax.device_put(values * 2, on()),
        "pinned": jax.device_put(
            values, SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
        ),
        "pinned everywhere": jax.device_put(values, on(memory_kind="pinned_host")),
        "int4": jnp.array([-8, 7, 3], jnp.int4),
        "fp8": jnp.array([0.5, -2.0], jnp.float8_e4m3fn),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j]),
        "key": jax.random.key(3),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 8), on("data")),
        "rbg": jax.random.key(3, impl="rbg"),
        "weak": jnp.asarray(3.0),
        "empty": jnp.zeros((0, 3)),
        "numpy": np.arange(3),
        "number": 5,
        "text": "a text",
        "none": None,
    }


def train_state():
    params = FrozenDict({"w": jnp.ones((64, 64)), "b": jnp.zeros(64)})
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


STATES = {
    "arrays": arrays,
    "tuple": lambda: Pair(jnp.ones(3), jnp.zeros((2, 2), jnp.bfloat16)),
    "train state": train_state,
    "nnx": Layer,
}


def jax_arrays(state):
    return [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]


def delete(state):
    """Deletes all jax arrays of a state, as a donation does."""
    for leaf in jax_arrays(state):
        leaf.delete()


@pytest.mark.parametrize("kind", STATES)
def test_saves_state_deleted_after_call(tmp_path, kind):
    state, expected = STATES[kind](), STATES[kind]()
    with flaxckpt.Checkpointer(tmp_path, snapshot="device") as ckpt:
        ckpt.save(1, state)
        delete(state)
        ckpt.wait()
        found = ckpt.restore(expected)
    if kind == "nnx":
        assert found.again is found.kernel
    strategies.assert_same_state(jax.tree.leaves(expected), jax.tree.leaves(found))


@pytest.mark.parametrize("saved_with", [False, True])
def test_64_bit_arrays_round_trip(tmp_path, saved_with):
    with jax.enable_x64(True):
        state = {"f": jnp.arange(3.0) + 1e-12, "i": jnp.array([2**40, -1])}
    with flaxckpt.Checkpointer(tmp_path, snapshot="device") as ckpt:
        with jax.enable_x64(saved_with):
            ckpt.save(1, state)
        with jax.enable_x64(True):
            strategies.assert_same(ckpt.restore(state), state)


def test_default_device_does_not_move_arrays(tmp_path):
    state = {"w": jnp.ones(9)}  # not committed to its device
    with flaxckpt.Checkpointer(tmp_path, snapshot="device") as ckpt:
        with jax.default_device(jax.devices()[5]):
            (array,) = snapshot_of(state)
            ckpt.save(1, state)
        assert array.shards[0].data.value.devices() == {jax.devices()[0]}
        strategies.assert_same(ckpt.restore(state), state)


@pytest.mark.parametrize(
    "transforms", [(), (flaxckpt.transforms.cast(".*", "bfloat16"),)]
)
def test_loop_can_donate_its_state(tmp_path, transforms):
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = {f"w{i}": jnp.zeros((256, 1024)) for i in range(8)}
    with flaxckpt.Checkpointer(
        tmp_path, snapshot="device", transforms=transforms
    ) as ckpt:
        for number in range(6):
            ckpt.save(number, state)
            pointers = [x.unsafe_buffer_pointer() for x in state.values()]
            state = step(state)
            if not transforms:
                # Nothing views the state, so the memory is used again.
                now = [x.unsafe_buffer_pointer() for x in state.values()]
                assert set(now) == set(pointers)
    for number in range(6):
        for array in flaxckpt.load(tmp_path, state, step=number).values():
            np.testing.assert_array_equal(array, number)


def snapshot_of(state, memory="device"):
    """Returns the snapshot of a dict of arrays."""
    options = SaveOptions()
    table, _ = save.plan_leaves(save.flatten(state, options), options)
    leaves = [(path, leaf.info.chunk_shape, leaf) for path, leaf in table.items()]
    return to_host.to_host(leaves, memory=memory)


def test_copies_use_separate_memory_on_same_devices():
    state = {
        "w": jnp.ones((512, 512)),
        "v": jax.device_put(jnp.ones(9), jax.devices()[2]),
    }
    for array in snapshot_of(state):
        (shard,) = array.shards
        original = state[array.name]
        copy = shard.data.value
        assert copy.devices() == original.devices()
        assert copy.unsafe_buffer_pointer() != original.unsafe_buffer_pointer()


@pytest.mark.parametrize("pinned", ["pinned memory", "none", "not enough"])
def test_stages_few_batches_on_host_at_a_time(monkeypatch, pinned):
    state = {f"w{i}": jnp.full((100, 100), i) for i in range(10)}
    arrays = snapshot_of(state)
    copies = [array.shards[0].data.value for array in arrays]
    if pinned == "none":
        seams.replace(monkeypatch, "to_host.pinned", lambda sharding: None)
    elif pinned == "not enough":
        refuse_device_put(monkeypatch)
    on_host = 0
    for batch in to_host.staged(arrays, max_bytes=2 * 40_000):
        assert len(batch) == 2
        on_host += 2
        for array in batch:
            np.testing.assert_array_equal(array.shards[0].data, state[array.name])
        on_devices = sum(not copy.is_deleted() for copy in copies)
        ahead = 0 if pinned == "pinned memory" else 2
        assert on_devices <= 10 - on_host + ahead
        del array
    assert on_host == 10
    assert all(copy.is_deleted() for copy in copies)


def refuse_device_put(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    monkeypatch.setattr(jax, "device_put", refuse)


def refuse_copies(monkeypatch, *, later):
    """Lets the copies within devices fail: at the call, or when they are waited for."""

    def raises(*_args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def fail_later(arrays):
        copies = [jnp.copy(array) for array in arrays]
        delete(copies)  # who waits for them gets an error
        return copies

    program = fail_later if later else raises
    seams.replace(monkeypatch, "device_copy.program", lambda device: program)


@pytest.mark.parametrize("later", [False, True])
def test_falls_back_to_host_without_device_memory(tmp_path, monkeypatch, caplog, later):
    state, expected = arrays(), arrays()
    with flaxckpt.Checkpointer(tmp_path, snapshot="device") as ckpt:
        with monkeypatch.context() as patch:
            refuse_copies(patch, later=later)
            ckpt.save(1, state)
            if not later:
                delete(state)
            ckpt.wait()
        strategies.assert_same(expected, ckpt.restore(expected))
    assert "failed, so arrays are copied to the host" in caplog.text
    assert later == (not any(x.is_deleted() for x in jax_arrays(state)))


def test_failed_copy_of_donated_array_raises_error(monkeypatch):
    state = {"w": jnp.ones((64, 64)), "v": jnp.zeros(3)}
    refuse_copies(monkeypatch, later=True)
    arrays = snapshot_of(state)
    delete(state)
    with pytest.raises(RuntimeError, match="deleted"):
        list(to_host.staged(arrays))
    to_host.release(arrays)


@pytest.mark.parametrize("fits", [True, False])
def test_auto_checks_device_memory(monkeypatch, caplog, tmp_path, fits):
    """On the CPU, which reports none, `auto` views arrays as `host` does."""
    asked = []

    def has_room(found):
        asked.extend(found)
        return fits

    seams.replace(monkeypatch, "device_copy.has_room", has_room)
    seams.replace(monkeypatch, "to_host.is_on_cpu", lambda sharding: False)
    caplog.set_level(logging.DEBUG, "flaxckpt")
    state = {"w": jnp.ones((8, 8)), "n": np.arange(3)}
    with flaxckpt.Checkpointer(tmp_path, snapshot="auto") as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        strategies.assert_same(ckpt.restore(state), state)
    assert len(asked) == 1
    assert ("no memory on devices" in caplog.text) == (not fits)


@pytest.mark.parametrize(
    ("stats", "size", "largest", "fits"),
    [
        ((), 1, 0, False),
        ((1000,), 1, 0, False),
        ((1000, 100), 850, 0, True),
        ((1000, 100), 851, 0, False),
        # A step needs more than is in use between steps.
        ((1000, 100, 800), 150, 0, True),
        ((1000, 100, 800), 151, 0, False),
        # The peak has the snapshot of the save before.
        ((1000, 100, 950), 150, 150, True),
        ((1000, 900, 950), 150, 150, False),
    ],
)
def test_counts_peak_memory_of_step(stats, size, largest, fits):
    names = ("bytes_limit", "bytes_in_use", "peak_bytes_in_use")
    told = dict(zip(names, stats, strict=False))
    assert device_copy._has_room(told, size, largest) == fits


def test_state_arrays_keep_no_values_on_host(monkeypatch):
    """As jax does for arrays that are converted to numpy, if that is a copy."""
    seams.replace(monkeypatch, "to_host.is_on_cpu", lambda sharding: False)
    seams.replace(monkeypatch, "to_host.pinned", lambda sharding: None)
    state = {"w": jax.device_put(jnp.array([-8, 7, 3], jnp.int4), jax.devices()[1])}
    for memory in ("host", "device"):
        for batch in to_host.staged(snapshot_of(state, memory)):
            host = batch[0].shards[0].data
            assert host.tolist() == [-8, 7, 3]
            shard = state["w"].addressable_shards[0].data
            assert not np.shares_memory(np.asarray(shard), host)


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


@pytest.mark.parametrize("end", ["written", "cancelled", "failed"])
def test_leaves_no_copy_after_save_ends(tmp_path, monkeypatch, end):
    state = {f"w{i}": jnp.ones((64, 64)) for i in range(4)}
    before = live_bytes()
    with flaxckpt.Checkpointer(tmp_path, snapshot="device") as ckpt:
        if end == "failed":
            shutil.rmtree(tmp_path)
            tmp_path.write_text("a file")
        handle = ckpt.save(1, state)
        if end == "cancelled":
            handle.cancel()
        raised = None
        try:
            handle.wait()
        except (errors.SaveFailedError, errors.SaveCancelledError) as error:
            raised = error
        assert (raised is None) == (end == "written")
        # The handle is still there, and so are its error and all variables.
        assert live_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("snapshot", slow.all_but(to_host.SNAPSHOTS, ["host"]))
@pytest.mark.parametrize("saves", [pytest.param(200, marks=pytest.mark.slow), 40])
def test_many_saves_leak_no_memory(tmp_path, monkeypatch, snapshot, saves):
    if snapshot == "host":  # through pinned memory, as from an accelerator
        seams.replace(monkeypatch, "to_host.is_on_cpu", lambda sharding: False)
    params = {f"w{i}": jnp.full((256, 256), i) for i in range(8)}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    size = sum(array.nbytes for array in jax.tree.leaves(state))
    change = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))
    memory = psutil.Process().memory_info
    with flaxckpt.Checkpointer(
        tmp_path / "run", keep=[LatestN(1)], snapshot=snapshot
    ) as ckpt:
        for number in range(saves):
            state = change(state)
            ckpt.save(number, state)
            if number == saves // 2:
                ckpt.wait()
                before, live = memory().rss, live_bytes()
        ckpt.wait()
        assert live_bytes() == live
    assert memory().rss - before < 8 * size  # a leak would be of 20 states or more


def test_rejects_unknown_memory(tmp_path):
    for wrong in ("gpu", None, True):
        with pytest.raises(errors.OptionError, match="'host', 'device' or 'auto'"):
            flaxckpt.Checkpointer(tmp_path, snapshot=wrong)
    with pytest.raises(errors.OptionError, match="snapshot"):
        CheckpointConfig(snapshot="gpu")
    config = CheckpointConfig.from_mapping({"snapshot": "device"})
    assert config.checkpointer(tmp_path)._options.snapshot == "device"
