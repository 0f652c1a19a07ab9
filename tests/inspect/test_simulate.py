"""A save by many processes, planned without them."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors

PROCESSES = 1024


def transformer(layers, width, mesh):
    """A state as of AdamW, split over `fsdp` and `model`, the same on all `data`."""

    def leaf(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    params = {
        f"layer_{i}": {
            "attention": leaf((width, 3 * width), "fsdp", "model"),
            "out": leaf((width, width), "model", "fsdp"),
            "up": leaf((width, 4 * width), "fsdp", "model"),
            "down": leaf((4 * width, width), "model", "fsdp"),
            "scale_1": leaf((width,)),
            "scale_2": leaf((width,)),
            "bias": leaf((4 * width,), "model"),
        }
        for i in range(layers)
    }
    return {"params": params, "opt_state": {"mu": params, "nu": params}}


def large_mesh():
    return AbstractMesh((PROCESSES // 8, 8, 4), ("data", "fsdp", "model"))


@pytest.fixture(scope="module")
def terabyte():
    """100,000 leaves and 1 TB, of 1,024 processes with 4 devices each."""
    state = transformer(4762, 1216, large_mesh())
    return flaxckpt.simulate(state, processes=PROCESSES)


@pytest.mark.slow
def test_divides_terabyte_in_100_000_leaves_equally(terabyte):
    assert terabyte.leaves > 100_000
    assert terabyte.total_bytes > 10**12
    assert len(terabyte.written_bytes) == PROCESSES
    assert terabyte.balance <= 1.1


@pytest.mark.slow
def test_metadata_grows_with_leaves_not_processes(terabyte):
    few = AbstractMesh((1, 8, 4), ("data", "fsdp", "model"))
    small = flaxckpt.simulate(transformer(4762, 1216, few), processes=8)
    assert small.metadata_bytes == pytest.approx(terabyte.metadata_bytes, rel=0.01)
    assert terabyte.metadata_bytes < 1000 * terabyte.leaves


def test_divides_few_large_leaves_equally():
    """The largest models have some hundreds of leaves."""
    found = flaxckpt.simulate(transformer(20, 16384, large_mesh()), processes=PROCESSES)
    assert found.balance <= 1.1


def test_divides_few_small_leaves_by_shards():
    mesh = AbstractMesh((8, 4), ("data", "model"))
    split = NamedSharding(mesh, P("model"))
    leaf = jax.ShapeDtypeStruct((256, 256), "float32", sharding=split)
    found = flaxckpt.simulate({"a": leaf, "b": leaf}, processes=8)
    assert found.balance == 1
    assert "are not divided" not in str(found)


def test_report_explains_uneven_split_of_small_leaves():
    mesh = AbstractMesh((8, 4), ("data", "model"))
    whole = NamedSharding(mesh, P())
    leaf = jax.ShapeDtypeStruct((256, 256), "float32", sharding=whole)
    found = flaxckpt.simulate({"a": leaf, "b": leaf}, processes=8)
    assert found.balance == 4
    assert "(4.000 x)\n" + 22 * " " + "shards under 1 MiB" in str(found)


@pytest.mark.slow
def test_each_process_reads_only_share_of_its_devices(terabyte):
    # A process has all of `model`, of one place on `fsdp`, which has 8.
    share = max(terabyte.read_bytes) / terabyte.total_bytes
    assert 1 / 8 <= share <= 1.01 / 8


def test_simulation_counts_written_bytes_and_files():
    mesh = AbstractMesh((4, 2), ("data", "model"))
    split = NamedSharding(mesh, P("data", "model"))
    same = NamedSharding(mesh, P())
    state = {
        "split": jax.ShapeDtypeStruct((64, 64), "float32", sharding=split),
        "same": jax.ShapeDtypeStruct((64,), "float32", sharding=same),
        "step": 3,
    }
    found = flaxckpt.simulate(state, processes=4)
    assert found.total_bytes == 64 * 64 * 4 + 64 * 4 + 8
    assert found.read_bytes == (64 * 64 + 64 * 4 + 8,) * 4
    assert sum(found.written_files) == 4 + 2 + 6
    assert "written by a process" in str(found)


@pytest.mark.slow
def test_slowest_process_determines_the_time(terabyte):
    slow = flaxckpt.simulate(
        transformer(2, 1024, large_mesh()),
        processes=PROCESSES,
        write_bytes_per_sec=1e3,
        message_secs=0,
    )
    assert slow.save_secs == pytest.approx(max(slow.written_bytes) / 1e3, rel=1.5)
    assert terabyte.save_secs > max(terabyte.written_bytes) / 1e9


@pytest.mark.parametrize(
    ("make", "processes", "message"),
    [
        (lambda: AbstractMesh((4,), ("x",)), 3, "4 devices .* 3 processes"),
        (lambda: AbstractMesh((4,), ("x",)), 0, "4 devices .* 0 processes"),
        (lambda: Mesh(np.array(jax.devices()[:4]), ("x",)), 2, "AbstractMesh"),
    ],
)
def test_simulate_rejects_impossible_process_counts_and_real_meshes(
    make, processes, message
):
    sharding = NamedSharding(make(), P("x"))
    state = {"a": jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)}
    with pytest.raises(errors.OptionError, match=message):
        flaxckpt.simulate(state, processes=processes)


def test_simulate_rejects_states_without_shardings():
    with pytest.raises(errors.OptionError, match="0 meshes"):
        flaxckpt.simulate({"a": np.ones(3)}, processes=1)
