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
    # `split` has a file for each shard, `same` and `step` one at their writers.
    assert sum(found.written_files) == 4 + 2 + 2 + 6
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


# ---- local disks and peers -----------------------------------------------------------


def simulate_tier(copies, processes=PROCESSES, **rates):
    """The local tier of a large model, as AdamW trains it."""
    state = transformer(20, 16384, large_mesh())
    return flaxckpt.simulate(state, processes=processes, staging_copies=copies, **rates)


def test_a_local_tier_of_1024_processes():
    found = simulate_tier(1, storage_bytes_per_sec=2e11, message_secs=0)
    tier, part = found.tier, max(found.written_bytes)
    assert tier.sent_bytes == found.written_bytes
    # Each process keeps the part of one other.
    kept = np.array(tier.disk_bytes) - found.written_bytes - found.metadata_bytes
    assert sorted(kept) == sorted(found.written_bytes)
    assert part / 2e9 < tier.save_secs < found.save_secs
    assert tier.copy_secs == pytest.approx(part / 1e9)
    assert tier.upload_secs == pytest.approx(found.total_bytes / 2e11, rel=0.01)
    assert max(tier.lost_directory_bytes) == 0
    assert tier.lost_pulled_bytes[tier.lost] >= max(found.read_bytes)
    assert np.all(np.array(tier.lost_pulled_bytes) >= tier.pulled_bytes)
    assert tier.lost_restore_secs >= tier.restore_secs
    assert "local restore" in str(found)
    assert simulate_tier(None).tier is None


def test_more_copies_need_more_disk_and_time():
    one, two = simulate_tier(1).tier, simulate_tier(2).tier
    assert np.all(np.array(two.disk_bytes) > one.disk_bytes)
    assert two.copy_secs > one.copy_secs
    # Their metadata have other times, and so another size when compressed.
    assert two.save_secs == pytest.approx(one.save_secs, rel=1e-3)


def test_without_copies_a_lost_part_comes_from_the_run_directory():
    found = simulate_tier(0)
    tier = found.tier
    assert (tier.copy_secs, max(tier.sent_bytes)) == (0, 0)
    far = tier.lost_directory_bytes
    assert far[tier.lost] >= found.written_bytes[tier.lost]
    slow = simulate_tier(0, read_bytes_per_sec=1e6).tier
    assert slow.lost_restore_secs > tier.lost_restore_secs
    assert slow.restore_secs == tier.restore_secs


@pytest.mark.parametrize("rate", ["disk_bytes_per_sec", "peer_bytes_per_sec"])
def test_slower_disks_and_networks_take_longer(rate):
    fast, slow = simulate_tier(1).tier, simulate_tier(1, **{rate: 1e7}).tier
    for name in ("save_secs", "copy_secs", "restore_secs", "lost_restore_secs"):
        assert getattr(slow, name) > getattr(fast, name)
    assert slow.upload_secs == fast.upload_secs


def test_a_process_that_needs_its_own_part_copies_nothing():
    mesh = AbstractMesh((8,), ("x",))
    leaf = jax.ShapeDtypeStruct(
        (1024, 2048), "float32", sharding=NamedSharding(mesh, P("x"))
    )
    found = flaxckpt.simulate({"a": leaf}, processes=8, staging_copies=1)
    assert found.tier.pulled_bytes == (0,) * 8
    lost = [0] * 8
    lost[found.tier.lost] = 2**20
    assert found.tier.lost_pulled_bytes == tuple(lost)


def test_a_process_copies_from_peers_only_what_its_devices_need():
    """It copies whole files, of values that the same processes hold."""
    mesh = AbstractMesh((4, 2), ("x", "y"))

    def leaf(*spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct((1024, 64), "float32", sharding=sharding)

    state = {"split": leaf("x"), "halves": leaf("y"), "a": leaf(), "b": leaf()}
    found = flaxckpt.simulate(state, processes=8, staging_copies=0)
    sizes = zip(found.read_bytes, found.written_bytes, strict=True)
    assert found.tier.pulled_bytes == tuple(need - own for need, own in sizes)


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (-1, "whole number of at least 0"),
        (1.5, "whole number"),
        (PROCESSES, "staging_copies=1024, .* of 1024 there are 1023"),
    ],
)
def test_impossible_numbers_of_copies_are_refused(copies, message):
    with pytest.raises(errors.OptionError, match=message):
        simulate_tier(copies)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB")),
        *((1_490_000_000, "1.49 GB"), (2_500_000_000_000, "2.5 TB")),
    ],
)
def test_printed_sizes_have_three_digits(count, text):
    whole = NamedSharding(AbstractMesh((1,), ("x",)), P())
    state = {"w": jax.ShapeDtypeStruct((count,), "uint8", sharding=whole)}
    lines = str(flaxckpt.simulate(state, processes=1)).splitlines()
    assert lines[2].split(maxsplit=1) == ["arrays", text]
