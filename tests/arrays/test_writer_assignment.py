"""Who writes what: every part once, and every process equally much."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from flaxckpt._arrays import to_host as arrays_to_host
from flaxckpt._zarr import writer_assignment as zarr_writer_assignment

MIB = 2**20
AXES = ("a", "b", "c")


@st.composite
def meshes(draw):
    """Sizes of the axes of a mesh, and in how many processes its devices are."""
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3)))
    count = math.prod(sizes)
    processes = draw(st.sampled_from([n for n in range(1, 9) if count % n == 0]))
    return AbstractMesh(sizes, AXES), processes


specs = st.permutations(AXES).flatmap(
    lambda axes: st.sampled_from(
        [P(), P(None, axes[0]), P(axes[0], axes[1]), P((axes[0], axes[1])), P(axes[2])]
    )
)


@st.composite
def tasks(draw, mesh):
    sharding = NamedSharding(mesh, draw(specs))
    [shards] = {
        np.unique(
            zarr_writer_assignment.placement_in_order(1)(sharding, ()), axis=0
        ).shape[1]
    }
    replicas = mesh.size // shards
    parts = draw(st.sampled_from([n for n in range(1, 65) if replicas % n == 0]))
    return zarr_writer_assignment.Task(
        sharding, (), parts, draw(st.integers(0, 4 * MIB))
    )


@given(meshes(), st.data())
def test_every_part_of_each_shard_has_one_writer(drawn, data):
    mesh, processes = drawn
    given_tasks = data.draw(st.lists(tasks(mesh), max_size=6))
    place = zarr_writer_assignment.placement_in_order(processes)
    places, loads = zarr_writer_assignment.assign(given_tasks, processes, place)
    expected = np.zeros(processes, np.int64)
    for task, chosen in zip(given_tasks, places, strict=True):
        holders = place(task.sharding, ())
        replicas, shards = holders.shape
        assert replicas * shards == mesh.size
        writers = zarr_writer_assignment.Writers(replicas, task.parts, chosen, shards)
        for shard in range(shards):
            parts = {
                r: part
                for r in range(replicas)
                if (part := writers.part(r, shard)) is not None
            }
            assert sorted(parts.values()) == list(range(task.parts))
            for replica in parts:
                expected[holders[replica, shard]] += task.part_bytes
    assert loads == expected.tolist()


@given(meshes(), st.integers(1, 40))
def test_divides_replicated_equal_arrays_evenly(drawn, count):
    mesh, processes = drawn
    task = zarr_writer_assignment.Task(NamedSharding(mesh, P()), (), 1, MIB)
    _, loads = zarr_writer_assignment.assign(
        [task] * count, processes, zarr_writer_assignment.placement_in_order(processes)
    )
    assert max(loads) - min(loads) <= MIB


def test_assigns_largest_arrays_first_to_least_loaded():
    mesh = AbstractMesh((2, 2), ("data", "model"))
    everywhere = NamedSharding(mesh, P())
    sizes = [size * MIB for size in (1, 2, 3, 10, 4)]
    one = [zarr_writer_assignment.Task(everywhere, (), 1, size) for size in sizes]
    places, loads = zarr_writer_assignment.assign(
        one, 2, zarr_writer_assignment.placement_in_order(2)
    )
    assert loads == [10 * MIB, 10 * MIB]
    assert [places[i] for i in (3, 4, 2, 1, 0)] == [0, 2, 2, 2, 2]


def test_divides_shards_of_array_among_processes():
    mesh = AbstractMesh((8, 4), ("data", "model"))
    split = zarr_writer_assignment.Task(NamedSharding(mesh, P("model")), (), 1, MIB)
    for count, most in ((1, MIB), (2, MIB), (3, 2 * MIB), (8, 4 * MIB)):
        _, loads = zarr_writer_assignment.assign(
            [split] * count, 8, zarr_writer_assignment.placement_in_order(8)
        )
        assert (sum(loads), max(loads)) == (count * 4 * MIB, most)


def test_distributes_tiny_arrays_among_processes():
    """Whoever has a little less to write than the others does not make all files."""
    mesh = AbstractMesh((8,), ("data",))
    whole = NamedSharding(mesh, P())
    large = [zarr_writer_assignment.Task(whole, (), 1, MIB)] * 7
    large.append(zarr_writer_assignment.Task(whole, (), 1, MIB - 4096))
    tiny = [zarr_writer_assignment.Task(whole, (), 1, 4)] * 800
    places, _ = zarr_writer_assignment.assign(
        [*large, *tiny], 8, zarr_writer_assignment.placement_in_order(8)
    )
    files = np.bincount(places[8:], minlength=8)
    assert 95 <= files.min() <= files.max() <= 105


def spread(spec):
    """An array on eight devices in odd order, and the holders of its parts."""
    devices = np.array(jax.devices()[:8])[[3, 1, 0, 2, 7, 5, 6, 4]]
    mesh = Mesh(devices.reshape(2, 2, 2), ("x", "y", "z"))
    sharding = NamedSharding(mesh, spec)
    array = jax.device_put(np.zeros((8, 8)), sharding)
    ids = np.array([device.id for device in devices]).reshape(2, 2, 2)
    return array, zarr_writer_assignment.placement_on_mesh(sharding, ids)


@pytest.mark.parametrize(
    "spec",
    [P("x"), P(None, "x"), P("y", "x"), P(("y", "x")), P(("z", "x"), "y"), P("x", "z")],
)
def test_numbers_shards_alike_on_devices_and_in_plans(spec):
    array, holders = spread(spec)
    grid = [8 // size for size in array.sharding.shard_shape((8, 8))]
    for shard in array.addressable_shards:
        number = arrays_to_host._number(shard, (8, 8), grid)
        assert holders[shard.replica_id, number] == shard.device.id


def test_first_process_writes_leaves_without_sharding():
    tasks = [
        zarr_writer_assignment.Task(None, (3,), 1, 7),
        zarr_writer_assignment.Task(None, (), 1, 5),
    ]
    assert zarr_writer_assignment.assign(tasks, 3) == ([0, 0], [12, 0, 0])


@pytest.mark.parametrize(
    "spec", [P(), P("x"), P("y"), P(None, "x"), P("y", "x"), P(("y", "x")), P("z", "y")]
)
def test_numbers_replicas_as_jax_does(spec):
    array, holders = spread(spec)
    found = {}
    for shard in array.addressable_shards:
        found.setdefault(str(shard.index), {})[shard.replica_id] = shard.device.id
    columns = {tuple(by[r] for r in range(len(by))) for by in found.values()}
    assert {tuple(column) for column in holders.T.tolist()} == columns


def test_places_single_device_array_on_its_device():
    sharding = SingleDeviceSharding(jax.devices()[3])
    assert zarr_writer_assignment.placement(sharding, (8, 8)).tolist() == [[0]]
