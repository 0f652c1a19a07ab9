"""What a run in a store costs: memory."""

import subprocess
import sys

import pytest

_MEASURED = """
import sys, threading, time
import jax, numpy as np
import flaxckpt

url, what = sys.argv[1:]
shape = (64, 2**20)  # 256 MiB, in chunks of 64
state = {"w": jax.block_until_ready(jax.random.normal(jax.random.key(0), shape))}
layout = flaxckpt.ArrayLayout(store="files", chunk_bytes=2**26)
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
def test_neither_a_save_nor_a_check_nor_a_restore_has_all_of_it_twice(store_path):
    url = str(store_path("moto"))
    beyond = {}
    for what in ("save", "verify", "restore"):
        command = [sys.executable, "-c", _MEASURED, url, what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        beyond[what] = int(done.stdout) / 2**20
    # What libraries take is there, too: it does not grow with the state.
    assert beyond["save"] < 448, beyond
    assert beyond["verify"] < 320, beyond
    assert beyond["restore"] < 256 + 256, beyond
