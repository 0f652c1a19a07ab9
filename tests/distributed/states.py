"""A state with leaves of every kind on the devices of several processes.

What each leaf must be is known everywhere, so that every process can compare what it
has of it, bit for bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

TEXT = "two words"


@functools.cache
def values(seed):
    chance = np.random.default_rng(seed)
    return {
        "rows": chance.normal(size=(16, 24)).astype(np.float32),
        "columns": chance.normal(size=(6, 16)).astype(jnp.bfloat16),
        "blocks": chance.integers(-9, 9, size=(8, 4, 8), dtype=np.int16),
        "large": chance.normal(size=(1024, 2048)).astype(np.float32),
        "replicated": chance.normal(size=(5, 3)).astype(np.float16),
        "flag": np.array(seed % 2 == 0),
        "packed": chance.integers(-8, 7, size=(16, 2)).astype(jnp.int4),
        "nothing": np.zeros((0, 3), np.float32),
        "edge": chance.normal(size=(3,)).astype(np.float32),
    }


SPECS = {
    "rows": {
        "rows": P("x"),
        "columns": P(None, "x"),
        "blocks": P("x"),
        "packed": P("x"),
    },
    "columns": {"rows": P(None, "x"), "blocks": P(None, None, "x"), "large": P("x")},
    "mixed": {
        "rows": P("a", "b"),
        "columns": P(None, ("b", "a")),
        "blocks": P("b", None, "a"),
        "large": P("b"),
        "packed": P("b"),
    },
    "replicated": {},
}


def mesh(name):
    devices = np.array(jax.devices())
    if name == "mixed":
        return Mesh(devices.reshape(2, -1), ("a", "b"))
    return Mesh(devices[::-1] if name == "columns" else devices, ("x",))


def shardings(name):
    on = mesh(name)
    return {leaf: NamedSharding(on, SPECS[name].get(leaf, P())) for leaf in values(0)}


def array(value, sharding):
    return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])


def edge_device():
    """A device that one process has alone, and not the first one."""
    return jax.devices()[-1]


def on_edge(value):
    sharding = SingleDeviceSharding(edge_device())
    is_here = edge_device() in jax.local_devices()
    parts = [jax.device_put(value, edge_device())] if is_here else []
    return jax.make_array_from_single_device_arrays(
        value.shape, sharding, parts, dtype=value.dtype
    )


def keys(seed, sharding):
    return jax.jit(
        lambda: jax.random.split(jax.random.key(seed), 8), out_shardings=sharding
    )()


def everything(seed, name):
    """A state on the mesh `name`; what is each process's own is the first one's."""
    plain, where = dict(values(seed)), shardings(name)
    edge = plain.pop("edge")
    replicated = NamedSharding(mesh(name), P())
    mine = jax.process_index()
    return {
        "arrays": {leaf: array(v, where[leaf]) for leaf, v in plain.items()},
        "edge": on_edge(edge),
        "keys": keys(seed, NamedSharding(mesh(name), P())),
        "step": jax.jit(lambda: seed, out_shardings=replicated)(),
        "local": jnp.arange(4.0) + seed + 100 * mine,
        "numpy": np.arange(6).reshape(2, 3) + seed + 100 * mine,
        "numbers": (seed + 100 * mine, 0.5, True, None),
        "text": TEXT if mine == 0 else "another",
    }


@functools.cache
def abstract(name):
    """What to restore, on the mesh `name`."""
    return jax.tree.map(_abstract, everything(0, name))


def _abstract(leaf):
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = (
        None if isinstance(leaf.sharding, SingleDeviceSharding) else leaf.sharding
    )
    if leaf.sharding.device_set == {edge_device()}:
        sharding = leaf.sharding
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=sharding,
        weak_type=getattr(leaf, "weak_type", False),
    )


def check(found, seed, name):
    """Compares all that this process has of a restored state."""
    plain, where = dict(values(seed)), shardings(name)
    check_array(found["edge"], plain.pop("edge"))
    for leaf, value in plain.items():
        check_array(found["arrays"][leaf], value)
        assert found["arrays"][leaf].sharding.is_equivalent_to(
            where[leaf], value.ndim
        ), leaf
    keys_wanted = jax.random.key_data(jax.random.split(jax.random.key(seed), 8))
    check_array(jax.random.key_data(found["keys"]), np.asarray(keys_wanted))
    assert found["keys"].dtype == jax.random.key(0).dtype
    check_array(found["step"], np.array(seed, np.int32))
    assert found["step"].weak_type
    np.testing.assert_array_equal(found["local"], np.arange(4.0) + seed)
    assert type(found["numpy"]) is np.ndarray
    np.testing.assert_array_equal(found["numpy"], np.arange(6).reshape(2, 3) + seed)
    assert found["numbers"] == (seed, 0.5, True, None)
    assert found["text"] == TEXT


def check_array(found, value):
    assert (found.shape, found.dtype) == (value.shape, value.dtype)
    for shard in found.addressable_shards:
        wanted = np.ascontiguousarray(value[shard.index])
        assert np.asarray(shard.data).tobytes() == wanted.tobytes()
