"""Values are sent and read in parts, several at a time, and only once."""

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from tests.helpers import faulty_store as faulty
from tests.helpers import seams, slow, strategies

PLACES = ("memory", "moto", "seaweed")
DATABASE = flaxckpt.ArrayLayout(chunk_bytes=2**14)
PART = 1000


@pytest.fixture
def small_parts(monkeypatch):
    """Values are read in parts of `PART` bytes, and databases sent in small parts."""
    seams.replace(monkeypatch, "bucket.part_bytes", PART)
    seams.replace(monkeypatch, "write_database.file_bytes", 2**15)


def arrays(count=6):
    rng = np.random.default_rng(0)
    return {
        f"w{i}": rng.standard_normal((64, 64 + i), np.float32) for i in range(count)
    }


def views_of(*sizes):
    memory = [np.zeros(size, np.uint8) for size in sizes]
    return memory, [array.data for array in memory]


# ---- reading ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow.all_but(PLACES, ["memory", "moto"]))
@pytest.mark.parametrize("sizes", [(5000,), (1, 0, 2499, 2500), (3000, 2000)])
def test_read_into_puts_parts_in_place(store_path, small_parts, kind, sizes):
    file = store_path(kind) / "value"
    content = np.random.default_rng(1).bytes(5000)
    file.write_bytes(content)
    memory, views = views_of(*sizes)
    read_into = seams.current("store.read_into")
    read_into(file, views, offset=0, file_size=5000)
    assert b"".join(array.tobytes() for array in memory) == content
    memory, views = views_of(2100)
    read_into(file, views, offset=300, file_size=5000)
    assert memory[0].tobytes() == content[300:2400]


@pytest.mark.parametrize("kind", ["memory", "moto"])
@pytest.mark.parametrize("size", [0, 1, PART, 4999, 5001, 9000])
def test_rejects_value_of_unexpected_size(store_path, small_parts, kind, size):
    file = store_path(kind) / "value"
    file.write_bytes(bytes(size))
    memory, views = views_of(5000)
    with pytest.raises(ValueError, match=f"has {size} bytes instead of 5000"):
        seams.current("store.read_into")(file, views, offset=0, file_size=5000)
    del memory


@pytest.mark.parametrize("size", [10, 5000])
def test_missing_value_raises_file_not_found(store_path, small_parts, size):
    _, views = views_of(size)
    file = store_path("memory") / "value"
    with pytest.raises(FileNotFoundError, match="no such object"):
        seams.current("store.read_into")(file, views, offset=0, file_size=size)


def test_rejects_value_replaced_during_read(store_path, small_parts, monkeypatch):
    file = store_path("memory") / "value"
    file.write_bytes(bytes(5000))
    seams.replace(monkeypatch, "bucket.parts_at_a_time", 1)
    real = seams.current("bucket.read")

    def read(self, key, *, start=None, **options):
        if start == 3 * PART:
            file.write_bytes(b"\1" * 5000)
        return real(self, key, start=start, **options)

    seams.replace(monkeypatch, "bucket.read", read)
    _, views = views_of(5000)
    with pytest.raises(errors.StoreError, match="replaced during the read"):
        seams.current("store.read_into")(file, views, offset=0, file_size=5000)


# ---- databases --------------------------------------------------------------------


@pytest.mark.parametrize("kind", slow.all_but(PLACES, ["memory", "moto"]))
def test_sends_database_in_parts_and_reads_it_whole(store_path, small_parts, kind):
    path, state = store_path(kind), arrays()
    flaxckpt.save(path, state, layout=DATABASE)
    values = [key for key in path.keys() if key.startswith("state/d/0")]  # noqa: SIM118
    assert len(values) > 2
    strategies.assert_same(state, flaxckpt.load(path))
    assert flaxckpt.verify(path).ok
    flaxckpt.save(path, state, layout=DATABASE, overwrite=True)
    assert flaxckpt.verify(path).ok


def test_save_does_not_read_sent_parts_back(small_parts):
    path = faulty.new_path("sent-once")
    read = []
    with faulty.faulty(path) as kv:
        real = kv.read
        kv.read = lambda key, **options: (read.append(key), real(key, **options))[1]
        flaxckpt.save(path, arrays(), layout=DATABASE)
    assert not [key for key in read if "/d/" in key or "ocdbt" in key]
    assert flaxckpt.verify(path).ok


@pytest.mark.slow
def test_failed_part_fails_save_and_leaves_nothing(small_parts):
    path, state = faulty.new_path("part-refused"), arrays()
    sent = []

    def fail(key, value, if_equal):
        if "/d/0" in key and value is not None:
            sent.append(key)
            if len(sent) == 3:
                raise ValueError("PERMISSION_DENIED: no more parts")
        return real(key, value, if_equal)

    with faulty.faulty(path) as kv:
        real, kv._write = kv._write, fail
        with pytest.raises(errors.SaveFailedError, match="no more parts"):
            flaxckpt.save(path, state, layout=DATABASE)
    assert len(sent) >= 3
    assert [key for key in path.keys() if not key.endswith("writing")] == []  # noqa: SIM118
    flaxckpt.Checkpointer(path.parent).close()
    flaxckpt.save(path, state, layout=DATABASE)
    strategies.assert_same(state, flaxckpt.load(path))


@pytest.mark.parametrize("rate", [20, 60])
def test_retries_parts_after_temporary_failures(small_parts, rate):
    path, state = faulty.new_path(f"parts-repeated-{rate}", retries=40), arrays()
    with faulty.faulty(path, seed=rate, rate=rate) as kv:
        flaxckpt.save(path, state, layout=DATABASE)
    assert kv.faults
    strategies.assert_same(state, flaxckpt.load(path))
    assert flaxckpt.verify(path).ok


# ---- what is remembered -----------------------------------------------------------
