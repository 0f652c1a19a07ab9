"""Weakly typed arrays come back weakly typed: of any size, of any type, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import flaxckpt
from flaxckpt.transforms import map_leaf
from tests.helpers import strategies

SHAPES = [(), (0,), (3,), (4096,), (4097,), (3, 0), (100, 100)]
DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint32", "complex64"]


def weakly(array):
    """The same array, weakly typed, as the primitive of jax's casts makes it."""
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.convert_element_type(x, "float16"))
    [cast] = jaxpr(np.float32(0)).eqns
    params = {**cast.params, "new_dtype": array.dtype, "weak_type": True}
    made = jax.jit(lambda x: cast.primitive.bind(x, **params))(array)
    assert made.weak_type
    return made


def weak(shape, dtype):
    values = np.arange(int(np.prod(shape))).reshape(shape) % 100
    return weakly(jnp.asarray(values, dtype))


def states(value):
    yield {"x": value}
    yield FrozenDict(x=[value])
    yield nnx.Dict(x=nnx.Param(value))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_keeps_weak_arrays_of_any_shape_and_dtype(tmp_path, shape, dtype):
    state = {"x": weak(shape, dtype)}
    flaxckpt.save(tmp_path / "c", state)
    strategies.assert_same(state, flaxckpt.load(tmp_path / "c"))
    found = flaxckpt.load(tmp_path / "c", state)
    strategies.assert_same(state, found)
    assert not found["x"].committed


def test_keeps_every_bit_of_nans(tmp_path):
    bits = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000], np.uint32)
    state = {"x": weakly(jnp.asarray(bits.view(np.float32)))}
    flaxckpt.save(tmp_path / "c", state)
    strategies.assert_same(state, flaxckpt.load(tmp_path / "c"))


def test_keeps_weak_64_bit_values(tmp_path):
    with jax.enable_x64(True):
        state = {"x": weak((5000,), "float64"), "n": jnp.asarray(2**40)}
        assert state["n"].weak_type
        flaxckpt.save(tmp_path / "c", state)
        strategies.assert_same(state, flaxckpt.load(tmp_path / "c", state))


@pytest.mark.parametrize("shape", [(), (5000,)])
def test_keeps_weak_leaves_in_every_kind_of_state(tmp_path, shape):
    for n, state in enumerate(states(weak(shape, "float32"))):
        flaxckpt.save(tmp_path / str(n), state)
        found = flaxckpt.load(tmp_path / str(n), state)
        strategies.assert_same_state(state, found)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((), PartitionSpec()),
        ((8000,), PartitionSpec()),
        ((8,), PartitionSpec("x")),
        ((8000,), PartitionSpec("x")),
    ],
)
def test_keeps_weak_type_of_sharded_arrays(tmp_path, kind, shape, spec):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    sharding = NamedSharding(mesh, spec)
    state = {"x": weak(shape, "float32")}
    flaxckpt.save(tmp_path / "c", state)
    wanted = {
        "x": jax.ShapeDtypeStruct(shape, "float32", sharding=sharding, weak_type=True)
    }
    found = flaxckpt.load(tmp_path / "c", wanted)
    strategies.assert_same(state, found)
    assert found["x"].sharding == sharding
    flaxckpt.save(tmp_path / "sharded", found)
    strategies.assert_same(state, flaxckpt.load(tmp_path / "sharded"))
    # What is computed for it is weak, too.
    same = [map_leaf("x", lambda x: x + 0)]
    found = flaxckpt.load(tmp_path / "c", wanted, transforms=same)
    strategies.assert_same(state, found)
    assert found["x"].sharding == sharding


def test_keeps_weak_array_on_another_device(tmp_path):
    sharding = SingleDeviceSharding(jax.devices()[3])
    state = {"x": jax.device_put(weak((5000,), "bfloat16"), sharding)}
    assert state["x"].weak_type
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", state)
    strategies.assert_same(state, found)
    assert found["x"].sharding == sharding


def test_target_state_decides_weak_type(tmp_path):
    flaxckpt.save(tmp_path / "c", {"x": jnp.ones(5000), "y": weak((5000,), "float32")})
    wanted = {"x": weak((5000,), "float32"), "y": jnp.ones(5000)}
    found = flaxckpt.load(tmp_path / "c", wanted)
    assert found["x"].weak_type
    assert not found["y"].weak_type
