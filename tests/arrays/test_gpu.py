"""States on a GPU: exact, unharmed by donation, and without a growing memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from jax.sharding import SingleDeviceSharding

import flaxckpt
from flaxckpt.policies import LatestN
from tests.helpers import strategies

pytestmark = pytest.mark.gpu

DTYPES = [
    *("bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32"),
    *("complex64", "float8_e4m3fn", "float8_e5m2"),
]


@pytest.fixture
def gpu():
    return jax.devices("gpu")[0]


def values(dtype, shape, device, seed=0):
    bits = np.random.default_rng(seed).standard_normal(shape) * 10
    with np.errstate(invalid="ignore"):
        return jax.device_put(bits.astype(jnp.dtype(dtype)), device)


def same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.devices() == wanted.devices()
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("store", ["files", "ocdbt"])
def test_every_type_comes_back_to_the_gpu_bit_for_bit(tmp_path, gpu, store):
    state = {name: values(name, (7, 33), gpu) for name in DTYPES}
    state |= {"large": values("float32", (1024, 1024), gpu), "n": jnp.int32(3)}
    state["none"] = values("float32", (0, 3), gpu)
    state["key"] = jax.device_put(jax.random.key(5), gpu)
    layout = flaxckpt.ArrayLayout(store=store)
    flaxckpt.save(tmp_path / "state", state, layout=layout)
    restored = flaxckpt.load(tmp_path / "state", state)
    key, wanted = restored.pop("key"), state.pop("key")
    same(jax.random.key_data(key), jax.random.key_data(wanted))
    jax.tree.map(same, restored, state)


def test_a_state_moves_between_cpu_and_gpu(tmp_path, gpu):
    cpu = jax.devices("cpu")[0]
    for saved, wanted in ((cpu, gpu), (gpu, cpu)):
        state = {"w": values("bfloat16", (512, 300), saved)}
        sharding = SingleDeviceSharding(wanted)
        abstract = {
            "w": jax.ShapeDtypeStruct((512, 300), jnp.bfloat16, sharding=sharding)
        }
        path = tmp_path / saved.platform
        flaxckpt.save(path, state)
        same(flaxckpt.load(path, abstract)["w"], jax.device_put(state["w"], wanted))


def test_arrays_in_pinned_host_memory_come_back_there(tmp_path, gpu):
    pinned = SingleDeviceSharding(gpu, memory_kind="pinned_host")
    state = {"w": jax.device_put(values("float32", (512, 300), gpu), pinned)}
    flaxckpt.save(tmp_path / "state", state)
    restored = flaxckpt.load(tmp_path / "state", state)["w"]
    assert restored.sharding.memory_kind == "pinned_host"
    same(restored, state["w"])


def test_a_donated_state_is_saved_as_it_was_at_the_call(tmp_path, gpu):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    zeros = {f"w{i}": jnp.zeros((1024, 1024)) for i in range(16)}
    state = jax.device_put(zeros, gpu)
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for number in range(1, 6):
            checkpointer.save(number, state)
            for _ in range(10):
                state = step(state)
    for number in range(1, 6):
        restored = flaxckpt.load(tmp_path / "run", state, step=number)
        for array in jax.tree.leaves(restored):
            assert (np.asarray(array) == 10 * (number - 1)).all()


def test_two_hundred_saves_leave_no_memory_behind(tmp_path, gpu):
    params = {f"w{i}": values("float32", (512, 1024), gpu, seed=i) for i in range(8)}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    size = sum(array.nbytes for array in jax.tree.leaves(state))
    change = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))
    memory = psutil.Process().memory_info
    keep = [LatestN(1)]
    with flaxckpt.Checkpointer(tmp_path / "run", keep=keep) as checkpointer:
        for number in range(1, 201):
            state = change(state)
            checkpointer.save(number, state)
            if number == 20:
                checkpointer.wait()
                host, device = memory().rss, gpu.memory_stats()["bytes_in_use"]
    assert memory().rss - host < size
    assert gpu.memory_stats()["bytes_in_use"] - device < size


def test_a_training_on_the_gpu_resumes_exactly(tmp_path, gpu):
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
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for number in range(1, 4):
            state = step(state, batch)
            checkpointer.save(number, state)
    resumed = flaxckpt.load(tmp_path / "run", state, step=2)
    strategies.assert_same(step(resumed, batch), state)
