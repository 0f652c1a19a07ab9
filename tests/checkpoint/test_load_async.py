"""A load on another thread returns what `load` returns, or raises its errors."""

import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors, transforms
from tests.helpers import seams, strategies
from tests.helpers.files import flip_bit


def train_state(value, tx=None):
    params = {"dense": {"kernel": jnp.full((8, 4), value), "bias": jnp.zeros(4)}}
    tx = tx or optax.adamw(1e-3)
    return TrainState.create(apply_fn=None, params=params, tx=tx)


@pytest.fixture
def gate(monkeypatch):
    """Reading waits until this event is set."""
    opened, read = threading.Event(), seams.current("arrays.read")

    def hold(*args):
        assert opened.wait(60)
        return read(*args)

    seams.replace(monkeypatch, "arrays.read", hold)
    return opened


def test_returns_same_state_as_load(tmp_path, gate):
    flaxckpt.save(tmp_path / "c", train_state(1.5))
    abstract = jax.eval_shape(lambda: train_state(0.0))
    handle = flaxckpt.load_async(tmp_path / "c", abstract)
    assert not handle.done()
    assert repr(handle) == "<loading c: in progress>"
    with pytest.raises(errors.CheckpointTimeoutError, match="wait"):
        handle.wait(timeout_secs=0.01)
    gate.set()
    state = handle.wait()
    assert handle.done()
    assert repr(handle) == "<loading c: read>"
    assert handle.wait() is state
    strategies.assert_same(flaxckpt.load(tmp_path / "c", abstract).params, state.params)
    assert isinstance(state, TrainState)


def test_takes_same_arguments_as_load():
    found, wanted = map(inspect.signature, (flaxckpt.load_async, flaxckpt.load))
    assert found.parameters == wanted.parameters


def test_program_computes_during_load(tmp_path, gate):
    flaxckpt.save(tmp_path / "c", train_state(1.5))
    abstract = train_state(0.0)
    handle = flaxckpt.load_async(tmp_path / "c", abstract)
    step = jax.jit(lambda state: state.replace(step=state.step + 1))
    compiled = step.lower(abstract).compile()
    gate.set()
    assert compiled(handle.wait()).step == 1


def test_loads_without_template_and_by_step(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": np.full(3, step), "n": (step, None)})
    loaded = [flaxckpt.load_async(tmp_path, step=n).wait() for n in (1, None)]
    assert [state["n"] for state in loaded] == [(1, None), (2, None)]
    assert [state["w"].tolist() for state in loaded] == [[1] * 3, [2] * 3]


def test_places_leaves_on_their_shardings(tmp_path):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    flaxckpt.save(tmp_path / "c", {"w": values})
    sharding = NamedSharding(mesh, P("a", "b"))
    abstract = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
    state = flaxckpt.load_async(tmp_path / "c", abstract).wait()
    assert state["w"].sharding == sharding
    np.testing.assert_array_equal(state["w"], values)


def test_transforms_moments_and_initializes_new_leaves(tmp_path):
    flaxckpt.save(tmp_path / "c", train_state(1.5))
    tx = optax.chain(optax.adamw(1e-3), optax.trace(0.9))
    options = {"transforms": [transforms.map_leaf("params/.*", lambda x: 2 * x)]}
    state = flaxckpt.load_async(tmp_path / "c", train_state(0.0, tx), **options).wait()
    again = flaxckpt.load(tmp_path / "c", train_state(0.0, tx), **options)
    assert state.params["dense"]["kernel"][0, 0] == 3
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(again.opt_state)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, again.opt_state)


def test_loaded_modules_are_trainable(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-1), wrt=nnx.Param)
    flaxckpt.save(tmp_path / "c", (model, optimizer))
    loaded, optimizer = flaxckpt.load_async(tmp_path / "c", (model, optimizer)).wait()

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: m(jnp.ones((1, 4))).sum())(model)
        optimizer.update(model, grads)

    step(loaded, optimizer)
    loaded.bias[...] = loaded.bias[...] + 1
    assert not np.array_equal(loaded.kernel[...], model.kernel[...])


def test_keeps_jax_settings_of_with_block(tmp_path):
    """jax has them for the thread of the block only."""
    values = np.array([1 + 2.0**-40])
    flaxckpt.save(tmp_path / "c", {"w": values})
    device = jax.devices()[3]
    with jax.enable_x64(True), jax.default_device(device):
        abstract = {"w": jax.ShapeDtypeStruct((1,), jnp.float64)}
        handle = flaxckpt.load_async(tmp_path / "c", abstract)
    state = handle.wait()
    assert state["w"].devices() == {device}
    assert np.asarray(state["w"]).tobytes() == values.tobytes()


# ---- what goes wrong ---------------------------------------------------------------


def test_raises_mismatches_immediately(tmp_path, gate):
    flaxckpt.save(tmp_path / "c", train_state(1.5))
    with pytest.raises(errors.RestoreMismatchError, match="nothing"):
        flaxckpt.load_async(tmp_path / "c", {"params": {"w": jnp.ones(2)}})
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.load_async(tmp_path / "d")


def test_wait_raises_damage_error(tmp_path):
    flaxckpt.save(tmp_path / "c", {"w": np.arange(100.0)})
    flip_bit(tmp_path / "c/state/d/0.small.0")
    handle = flaxckpt.load_async(tmp_path / "c")
    for _ in range(2):
        with pytest.raises(errors.DamagedCheckpointError, match="w: "):
            handle.wait()
    assert repr(handle) == "<loading c: failed>"


def test_wait_reports_replaced_checkpoint(tmp_path, gate):
    flaxckpt.save(tmp_path / "c", {"w": np.ones(100)})
    handle = flaxckpt.load_async(tmp_path / "c")
    flaxckpt.save(tmp_path / "c", {"w": np.zeros(100)}, overwrite=True)
    gate.set()
    with pytest.raises(errors.DamagedCheckpointError, match="was replaced or deleted"):
        handle.wait()


def test_loads_synchronously_without_threads(tmp_path, monkeypatch):
    flaxckpt.save(tmp_path / "c", {"w": np.ones(100)})
    seams.refuse_threads(monkeypatch)
    handle = flaxckpt.load_async(tmp_path / "c")
    assert handle.done()
    assert handle.wait()["w"].sum() == 100
