"""What several devices want is read in parts, and comes back whole."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt._arrays import read as arrays_read
from flaxckpt._arrays import read_once as arrays_read_once
from flaxckpt._arrays import read_plan
from flaxckpt._formats import locate
from flaxckpt._state import flax_state as state_flax_state
from flaxckpt._state import leaf as state_leaf

SPECS = [P(), P("x"), P("y"), P(None, "x"), P("y", "x"), P(("x", "y")), P("z", "y")]
READ_ALONE = arrays_read.ReadOptions(False, True, 2**30)


def mesh(**options):
    return jax.make_mesh((2, 2, 2), ("x", "y", "z"), **options)


def job_for(path, wanted):
    [leaf] = locate.read_stored(path, None).table.values()
    [info] = state_flax_state.flatten({"a": wanted}).table.values()
    return read_plan.ReadJob(leaf.source, info.info)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", SPECS)
def test_gathers_parts_into_whole_array(spec, kind, tmp_path):
    value = np.arange(2 * 2**20, dtype=np.float32).reshape(1024, 2048)
    flaxckpt.save(tmp_path / "a", {"a": value})
    sharding = NamedSharding(mesh(axis_types=(kind,) * 3), spec)
    job = job_for(
        tmp_path / "a",
        jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding),
    )
    [part] = arrays_read_once.divide([job])
    split = arrays_read_once.divided_sharding(job.wanted)
    assert part.wanted.sharding == split
    shard = math.prod(split.shard_shape(value.shape)) if split else value.size
    assert split is None or shard == value.size // 8

    found = arrays_read_once.gather(arrays_read.read([part], READ_ALONE), [job])["a"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, value)


def info(shape, spec, dtype="float32", **options):
    array = jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh(), spec), **options
    )
    [leaf] = state_flax_state.flatten({"a": array}).table.values()
    return leaf.info


def test_does_not_divide_small_arrays():
    assert arrays_read_once.divided_sharding(info((512, 512), P())) is None
    assert arrays_read_once.divided_sharding(info((2**21,), P())) is not None


def test_divides_among_as_many_devices_as_axis_allows():
    """1,026 rows are for 2 devices, and not for 8."""
    assert arrays_read_once.divided_sharding(info((2 * 513, 4097), P())).spec == P(
        "x", None
    )
    assert arrays_read_once.divided_sharding(info((4 * 513, 4097), P())).spec == P(
        ("x", "y"), None
    )
    assert arrays_read_once.divided_sharding(info((513, 8194), P())).spec == P(
        None, "x"
    )
    assert arrays_read_once.divided_sharding(info((513, 4097), P())) is None


def test_divides_split_arrays_over_remaining_axes():
    assert arrays_read_once.divided_sharding(info((4096, 1024), P("x"))).spec == P(
        ("x", "y", "z"), None
    )
    assert (
        arrays_read_once.divided_sharding(info((4096, 1024), P(("x", "y", "z"))))
        is None
    )


@pytest.mark.parametrize(
    "wanted",
    [
        jnp.ones((2048, 2048)),
        np.ones((2048, 2048), np.float32),
        jax.ShapeDtypeStruct((2048, 2048), "float32"),
        3.0,
    ],
)
def test_does_not_divide_arrays_wanted_by_one_device(wanted):
    [leaf] = state_flax_state.flatten({"a": wanted}).table.values()
    assert arrays_read_once.divided_sharding(leaf.info) is None


def test_does_not_divide_keys():
    keys = jax.device_put(
        jax.random.split(jax.random.key(0), 2**18), NamedSharding(mesh(), P())
    )
    [leaf] = state_flax_state.flatten({"a": keys}).table.values()
    assert isinstance(leaf.info, state_leaf.LeafInfo)
    assert arrays_read_once.divided_sharding(leaf.info) is None
