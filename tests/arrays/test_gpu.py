"""States on a GPU: exact, unharmed by donation, and without a growing memory.

With GPU_TESTS_ON=cpu, a CPU device stands in for the GPU.
"""

import functools
import gc
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.policies import LatestN
from tests.helpers import strategies

pytestmark = pytest.mark.gpu

DTYPES = [
    *("bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32"),
    *("complex64", "float8_e4m3fn", "float8_e5m2"),
]


SNAPSHOTS = ["host", "device"]


@pytest.fixture
def gpu():
    return jax.devices(os.environ.get("GPU_TESTS_ON", "gpu"))[-1]


@pytest.fixture
def gpus():
    return jax.devices(os.environ.get("GPU_TESTS_ON", "gpu"))


def in_use(device):
    """Bytes in use on a device; of a CPU, those of all live arrays."""
    if stats := device.memory_stats():
        return stats["bytes_in_use"]
    gc.collect()
    live = [array for array in jax.live_arrays() if not array.is_deleted()]
    shards = [shard.data for array in live for shard in array.addressable_shards]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values())


def values(dtype, shape, device, seed=0):
    bits = np.random.default_rng(seed).standard_normal(shape) * 10
    with np.errstate(invalid="ignore"):
        return jax.device_put(bits.astype(jnp.dtype(dtype)), device)


def same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.devices() == wanted.devices()
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_every_dtype_round_trips_on_gpu_bit_for_bit(tmp_path, gpu, snapshot):
    state = {name: values(name, (7, 33), gpu) for name in DTYPES}
    state |= {"large": values("float32", (1024, 1024), gpu), "n": jnp.int32(3)}
    state["none"] = values("float32", (0, 3), gpu)
    state["key"] = jax.device_put(jax.random.key(5), gpu)
    state["int4"] = jax.device_put(jnp.array([-8, 7, 3], jnp.int4), gpu)
    with flaxckpt.Checkpointer(tmp_path, snapshot=snapshot) as ckpt:
        ckpt.save(1, state)
        restored = ckpt.restore(state)
    key, wanted = restored.pop("key"), state.pop("key")
    same(jax.random.key_data(key), jax.random.key_data(wanted))
    jax.tree.map(same, restored, state)


def test_state_moves_between_cpu_and_gpu(tmp_path, gpu):
    cpu = jax.devices("cpu")[0]
    for name, saved, wanted in (("to", cpu, gpu), ("back", gpu, cpu)):
        state = {"w": values("bfloat16", (512, 300), saved)}
        sharding = SingleDeviceSharding(wanted)
        abstract = {
            "w": jax.ShapeDtypeStruct((512, 300), jnp.bfloat16, sharding=sharding)
        }
        path = tmp_path / name
        flaxckpt.save(path, state)
        same(flaxckpt.load(path, abstract)["w"], jax.device_put(state["w"], wanted))


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_pinned_host_arrays_return_to_pinned_memory(tmp_path, gpu, snapshot):
    pinned = SingleDeviceSharding(gpu, memory_kind="pinned_host")
    state = {"w": jax.device_put(values("float32", (512, 300), gpu), pinned)}
    expected = np.array(state["w"])
    with flaxckpt.Checkpointer(tmp_path, snapshot=snapshot) as ckpt:
        ckpt.save(1, state)
        state["w"].delete()
        ckpt.wait()
        abstract = {"w": jax.ShapeDtypeStruct((512, 300), "float32", sharding=pinned)}
        restored = ckpt.restore(abstract)["w"]
    assert restored.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(restored, expected)


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
def test_replicas_and_shards_on_all_gpus_round_trip(
    tmp_path, gpus, snapshot, memory_kind
):
    """Replicas of at least 2 MiB are written in parts, each by a GPU."""
    mesh = jax.sharding.Mesh(np.array(gpus), "x")
    specs = {"replicated": P(), "rows": P("x"), "columns": P(None, "x")}
    state = {
        name: jax.device_put(
            values("float32", (1024, 2048), gpus[0]),
            NamedSharding(mesh, spec, memory_kind=memory_kind),
        )
        for name, spec in specs.items()
    }
    with flaxckpt.Checkpointer(tmp_path, snapshot=snapshot) as ckpt:
        ckpt.save(1, state)
        strategies.assert_same(state, ckpt.restore(state))


def test_arrays_with_other_layouts_round_trip(tmp_path, gpu):
    layout = Layout(major_to_minor=(1, 0))
    format_ = Format(layout, SingleDeviceSharding(gpu))
    state = {"w": jax.device_put(values("float32", (64, 33), gpu), format_)}
    for snapshot in SNAPSHOTS:
        with flaxckpt.Checkpointer(tmp_path / snapshot, snapshot=snapshot) as ckpt:
            ckpt.save(1, state)
            restored = ckpt.restore(state)["w"]
        np.testing.assert_array_equal(restored, np.asarray(state["w"]))


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_saves_donated_state_as_of_call(tmp_path, gpu, snapshot):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    zeros = {f"w{i}": jnp.zeros((1024, 1024)) for i in range(16)}
    state = jax.device_put(zeros, gpu)
    with flaxckpt.Checkpointer(tmp_path / "run", snapshot=snapshot) as checkpointer:
        for number in range(1, 6):
            checkpointer.save(number, state)
            for _ in range(10):
                state = step(state)
    for number in range(1, 6):
        restored = flaxckpt.load(tmp_path / "run", state, step=number)
        for array in jax.tree.leaves(restored):
            assert (np.asarray(array) == 10 * (number - 1)).all()


def test_frees_gpu_snapshot_memory_after_save(tmp_path, gpu):
    state = {f"w{i}": values("float32", (1024, 1024), gpu, seed=i) for i in range(16)}
    before = in_use(gpu)
    with flaxckpt.Checkpointer(tmp_path, snapshot="device") as ckpt:
        handle = ckpt.save(1, state)
        handle.wait()
        assert in_use(gpu) == before
        ckpt.save(2, state).cancel()
        assert in_use(gpu) == before


def fill_memory(device):
    """Returns arrays that leave next to no memory on a device."""
    stats = device.memory_stats()
    size, arrays = stats["bytes_limit"], []
    while size > 2**20:
        try:
            arrays.append(jnp.zeros(size, jnp.uint8, device=device))
            jax.block_until_ready(arrays[-1])
        except jax.errors.JaxRuntimeError:
            size //= 2
    return [array for array in arrays if not array.is_deleted()]


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [("device", "arrays are copied to the host"), ("auto", "no memory on devices")],
)
def test_saves_through_host_when_gpu_memory_is_short(
    tmp_path, gpu, caplog, snapshot, text
):
    if not gpu.memory_stats():
        pytest.skip("the device does not report its memory")
    state = {f"w{i}": values("float32", (1024, 1024), gpu) for i in range(16)}
    caplog.set_level(logging.DEBUG, "flaxckpt")
    with flaxckpt.Checkpointer(tmp_path, snapshot=snapshot) as ckpt:
        filler = fill_memory(gpu)
        ckpt.save(1, state)
        ckpt.wait()
        del filler
        strategies.assert_same(state, ckpt.restore(state))
    assert text in caplog.text


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_two_hundred_saves_leak_no_memory(tmp_path, gpu, snapshot):
    params = {f"w{i}": values("float32", (512, 1024), gpu, seed=i) for i in range(8)}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    size = sum(array.nbytes for array in jax.tree.leaves(state))
    change = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))
    memory = psutil.Process().memory_info
    keep = [LatestN(1)]
    with flaxckpt.Checkpointer(
        tmp_path / "run", keep=keep, snapshot=snapshot
    ) as checkpointer:
        for number in range(1, 201):
            state = change(state)
            checkpointer.save(number, state)
            if number == 20:
                checkpointer.wait()
                host, device = memory().rss, in_use(gpu)
        checkpointer.wait()
        assert in_use(gpu) - device < size
    assert memory().rss - host < 8 * size  # a leak would be of 180 states


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_training_on_gpu_resumes_exactly(tmp_path, gpu, snapshot):
    tx = optax.adamw(1e-2)

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": values("float32", (64, 64), gpu)}
    batch = values("float32", (32, 64), gpu, seed=1)
    state = params, tx.init(params)
    with flaxckpt.Checkpointer(tmp_path / "run", snapshot=snapshot) as checkpointer:
        for number in range(1, 4):
            state = step(state, batch)
            checkpointer.save(number, state)
    resumed = flaxckpt.load(tmp_path / "run", state, step=2)
    strategies.assert_same(step(resumed, batch), state)
