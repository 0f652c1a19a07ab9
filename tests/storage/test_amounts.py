"""What a run in a store costs: requests, and memory."""

import sys

import numpy as np
import pytest

import flaxckpt
from flaxckpt.policies import LatestN
from tests.helpers import faulty_store as faulty
from tests.helpers import programs


def test_every_operation_makes_few_requests():
    path = faulty.new_path("counted")
    arrays = {"v": np.ones(3), "w": np.arange(16.0)}  # of one object together

    def count(act):
        with faulty.faulty(path) as kv:
            act()
            return kv.requests

    assert count(lambda: flaxckpt.Checkpointer(path)) <= 2
    with flaxckpt.Checkpointer(path) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, arrays).wait()
        assert count(lambda: ckpt.save(5, arrays).wait()) <= 9 + 10
        assert count(ckpt.restore) <= 4 + 8
        assert count(ckpt.steps) == 1
        assert count(lambda: ckpt.verify(5)) <= 9 + 8
    assert count(lambda: flaxckpt.load(path)) <= 4 + 6
    with flaxckpt.Checkpointer(path, keep=[LatestN(4)]) as ckpt:
        ckpt.save(6, arrays).wait()
        assert ckpt.steps() == [3, 4, 5, 6]
        assert count(lambda: ckpt.save(7, arrays).wait()) <= 9 + 47
        assert ckpt.steps() == [4, 5, 6, 7]


def test_listing_cache_sees_own_changes():
    path = faulty.new_path("looked-at")
    (path / "a/1").write_bytes(b"x")
    with path.store.listing_cache(path.prefix):
        assert [path.is_dir(), (path / "a/1").is_file()] == [True, True]
        (path / "a/2").write_bytes(b"x")
        assert (path / "a").keys() == ["1", "2"]
        (path / "a/1").unlink()
        assert (path / "a").keys() == ["2"]
        path.store.delete_under(path.prefix)
        assert not path.exists()


_MEASURED = """
import sys, threading, time
import jax, numpy as np
import flaxckpt

url, what = sys.argv[1:]
shape = (128, 2**20)  # 512 MiB, in chunks of 64
state = {"w": jax.block_until_ready(jax.random.normal(jax.random.key(0), shape))}
layout = flaxckpt.ArrayLayout(chunk_bytes=2**26)
ckpt = flaxckpt.Checkpointer(url, layout=layout, max_concurrent_bytes=2**26)
act = {
    "save": lambda: ckpt.save(1, state).wait(),
    "verify": lambda: ckpt.verify(1).ok or sys.exit("damaged"),
    "restore": lambda: ckpt.restore(state, step=1),
}[what]
if what == "save":
    ckpt.save(0, {"n": np.ones(3)}).wait()


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


peaks, is_over = [resident()], threading.Event()


def watch():
    while not is_over.wait(0.002):
        peaks.append(resident())


watching = threading.Thread(target=watch)
watching.start()
act()
is_over.set()
watching.join()
print(max(peaks) - peaks[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/statm")
@pytest.mark.slow
def test_save_verify_and_restore_hold_state_only_once(store_path):
    url = str(store_path("moto"))
    beyond = {}
    for what in ("save", "verify", "restore"):
        beyond[what] = int(programs.run("-c", _MEASURED, url, what).stdout) / 2**20
    # Requests in flight, and freed memory that the allocator keeps, take about 256 MiB
    # of a restore: they do not grow with the state.
    assert beyond["save"] < 704, beyond
    assert beyond["verify"] < 448, beyond
    assert beyond["restore"] < 512 + 384, beyond
