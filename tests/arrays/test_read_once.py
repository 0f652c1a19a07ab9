"""What several devices want is read in parts, and comes back whole."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from tests.helpers import seams

SPECS = [P(), P("x"), P("y"), P(None, "x"), P("y", "x"), P(("x", "y")), P("z", "y")]


def wanted(shape, spec, **options):
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), **options)
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Returns the function that loads an array, and the sharding that it is read by.

    The process takes itself for one of two.
    """
    seams.replace(monkeypatch, "processes.process_count", lambda: 2)
    real, read = seams.current("arrays.begin_read"), []

    def begin(job, *args):
        read.append(job.wanted.sharding)
        return real(job, *args)

    seams.replace(monkeypatch, "arrays.begin_read", begin)

    def call(template, value=None):
        value = np.zeros(template.shape, template.dtype) if value is None else value
        with monkeypatch.context() as patch:
            seams.replace(patch, "processes.process_count", lambda: 1)
            flaxckpt.save(tmp_path / "c", {"a": value}, overwrite=True)
        read.clear()
        found = flaxckpt.load(tmp_path / "c", {"a": template}, read_once=True)["a"]
        [sharding] = read
        return found, sharding

    return call


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", SPECS)
def test_gathers_parts_into_whole_array(load, spec, kind):
    value = np.arange(2 * 2**20, dtype=np.float32).reshape(1024, 2048)
    template = wanted(value.shape, spec, axis_types=(kind,) * 3)
    found, split = load(template, value)
    assert math.prod(split.shard_shape(value.shape)) == value.size // 8
    assert found.sharding == template.sharding
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    ("shape", "spec", "split"),
    [
        # parts of a megabyte at least
        ((512, 512), P(), P()),
        ((2**21,), P(), P(("x", "y", "z"))),
        # as many devices as an axis allows: 1,026 rows are for 2, and not for 8
        ((2 * 513, 4097), P(), P("x", None)),
        ((4 * 513, 4097), P(), P(("x", "y"), None)),
        ((513, 8194), P(), P(None, "x")),
        ((513, 4097), P(), P()),
        # over the axes of the mesh that are left
        ((4096, 1024), P("x"), P(("x", "y", "z"), None)),
        ((1024, 1024), P("x"), P(("x", "y"), None)),
        ((4096, 1024), P(("x", "y", "z")), P(("x", "y", "z"))),
    ],
)
def test_divides_large_arrays_among_devices(load, shape, spec, split):
    assert load(wanted(shape, spec))[1].spec == split


@pytest.mark.parametrize(
    "template",
    [
        jnp.ones((2048, 2048)),
        np.ones((2048, 2048), np.float32),
        jax.ShapeDtypeStruct((2048, 2048), "float32"),
    ],
)
def test_does_not_divide_arrays_wanted_by_one_device(load, template):
    _, sharding = load(template)
    assert not isinstance(sharding, NamedSharding)


def test_does_not_divide_keys(load):
    everywhere = wanted((), P()).sharding
    keys = jax.device_put(jax.random.split(jax.random.key(0), 2**18), everywhere)
    found, sharding = load(keys, keys)
    assert sharding.is_fully_replicated
    assert found.sharding.is_fully_replicated
