"""What is in the place of a file, or happens to one while it is read.

Hostile checkpoints of each format are in `hostile`, and read by test_readers.py.
"""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts

import flaxckpt
from flaxckpt import ArrayLayout, errors
from tests.helpers import old_stores, programs, slow


def to_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def test_save_does_not_wait_for_pipes_in_other_step(tmp_path):
    state = {"w": jax.numpy.arange(1024.0)}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).wait()
        for file in [*(tmp_path / "1/state/d").rglob("*")]:
            if file.is_file():
                to_pipe(file)
        ckpt.save(2, state).wait()
        np.testing.assert_array_equal(ckpt.restore(step=2)["w"], state["w"])


def test_convert_rejects_results_larger_than_free_space(tmp_path):
    from tests.hostile import orbax

    source = orbax.CASES["larger than the memory"](tmp_path)
    for name in ("a.safetensors", "a.msgpack", "a"):
        with pytest.raises(errors.SaveFailedError, match="549755813888 bytes, and"):
            flaxckpt.convert(source, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize("height", [0, 3, 16])
def test_reads_valid_databases_built_like_hostile_ones(tmp_path, height):
    from tests.hostile import ocdbt

    step = ocdbt.tower(height)(tmp_path)
    np.testing.assert_array_equal(flaxckpt.load(step)["w"], ocdbt.VALUES)


@pytest.mark.parametrize("compressed", slow.all_but([True, False], [True]))
def test_reads_database_of_many_identical_leaves(tmp_path, compressed):
    zeros = np.zeros(8, np.float32)
    state = {f"layer_{i:05}": zeros for i in range(5000)}
    codec = "compact" if compressed else "none"
    flaxckpt.save(tmp_path / "a", state, layout=ArrayLayout(codec=codec))
    (tmp_path / "a/flaxckpt.json").unlink()  # as Orbax would have written it
    (tmp_path / "a/commit_success.txt").unlink()
    found = flaxckpt.load(tmp_path / "a")
    assert found.keys() == state.keys()


@pytest.mark.parametrize("store", ["files", "ocdbt"])
@pytest.mark.parametrize("zarr_version", [2, 3])
def test_rejects_blosc_chunks_declaring_excessive_size(tmp_path, store, zarr_version):
    layout = ArrayLayout(codec="compact", zarr_version=zarr_version, chunk_bytes=2**18)
    values = np.arange(2**17, dtype=np.float32)
    flaxckpt.save(tmp_path / "plain", {"w": values})
    path = tmp_path / "a"
    flaxckpt.convert(tmp_path / "plain", path, layout=layout)
    if store == "files":
        old_stores.make_directories(path)
    for mark in ("flaxckpt.json", "commit_success.txt"):
        (path / mark).unlink()
    np.testing.assert_array_equal(flaxckpt.load(path)["w"], values)
    key = "w/1" if zarr_version == 2 else "w/c.1"
    base = {"driver": "file", "path": f"{path}/state/"}
    spec = {"driver": "ocdbt", "base": base} if store == "ocdbt" else base
    values = ts.KvStore.open(spec).result()
    content = bytearray(values.read(key).result().value)
    content[4:8] = (2**31 - 17).to_bytes(4, "little")
    values.write(key, bytes(content)).result()
    with pytest.raises(errors.DamagedCheckpointError, match="has 2147483631 bytes"):
        flaxckpt.load(path)


CHANGING = """
import os, sys, threading
import flaxckpt

path, size = sys.argv[1], 2**22
done = threading.Event()

def change():
    while not done.is_set():
        for length in (0, 4096, size // 2, size + 4096, full):
            os.truncate(file, length)

found = [os.path.join(where, n) for where, _, names in os.walk(path) for n in names]
file = max(found or [path], key=os.path.getsize)
full = os.path.getsize(file)
flaxckpt.load(path, memory_map=False)
thread = threading.Thread(target=change)
thread.start()
outcomes = set()
for _ in range(60):
    try:
        flaxckpt.load(path, memory_map=False)
        outcomes.add("loaded")
    except flaxckpt.errors.CheckpointError as error:
        outcomes.add(type(error).__name__)
done.set()
thread.join()
print(sorted(outcomes))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("files", "zstd", "compact", "database", "zstd database"),
        *("a.safetensors", "a.msgpack"),
    ],
)
def test_files_resized_during_read_do_not_crash_process(tmp_path, name):
    values = {"w": np.arange(2**20, dtype=np.float32)}
    layouts = {
        "files": ArrayLayout(),
        "zstd": ArrayLayout(codec="zstd"),
        "compact": ArrayLayout(codec="compact"),
        "database": ArrayLayout(),
        "zstd database": ArrayLayout(codec="zstd"),
    }
    path = tmp_path / name
    if name in layouts:
        values["w"] = np.random.default_rng(0).random(2**20, np.float32)
        flaxckpt.save(path, values, layout=layouts[name])
        if "database" not in name:
            old_stores.make_directories(path)
    else:
        flaxckpt.save(tmp_path / "source", values)
        flaxckpt.convert(tmp_path / "source", path)
    found = programs.run("-c", CHANGING, path).stdout
    assert found.endswith("]\n")  # any other error would have ended it
