"""Raw arrays: what we write, TensorStore reads, and the other way round."""

import dataclasses
import errno
import gc
import json
import os
import platform
import re
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors
from tests import ROOT
from tests.arrays.test_read_parts import is_mapped
from tests.helpers import chunks, dtypes, old_stores, programs, seams, strategies
from tests.helpers.files import flip_bit

DTYPES = dtypes.STORED_AS_IS.split()

ALIGNMENT = 64
"""The bytes that memory is aligned to which jax uses without a copy."""


def array_of(dtype, shape, seed=0):
    """Random bits, but for booleans, which have only two values."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    bits = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8)
    return bits.view(kind).reshape(shape)


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def save(path, state, chunk_bytes, *, is_old=False):
    layout = flaxckpt.ArrayLayout(chunk_bytes=chunk_bytes)
    flaxckpt.save(path, state, layout=layout)
    if is_old:
        old_stores.make_directories(path)


def opened(root, name, **options):
    """Opens an array of an item by TensorStore."""
    store = {"driver": "file", "path": f"{root}/"}
    if (root / "manifest.ocdbt").exists():
        store = {"driver": "ocdbt", "base": store}
    store = {**store, "path": f"{store.get('path', '')}{name}/"}
    return ts.open({"driver": "zarr3", "kvstore": store, **options}).result()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_old", [False, True])
def test_tensorstore_reads_our_arrays(tmp_path, dtype, is_old):
    shapes = {"w": (5, 3), "scalar": (), "none": (0, 3)}
    state = {name: array_of(dtype, shape) for name, shape in shapes.items()}
    size = 2 * 3 * np.dtype(dtype).itemsize
    save(tmp_path / "c", state, size, is_old=is_old)
    for name, array in state.items():
        store = opened(tmp_path / "c/state", name)
        assert store.dtype.name == dtype
        assert store.shape == array.shape
        assert bits(store.read().result()) == bits(array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_equal_tensorstore_files(tmp_path, dtype):
    """Byte by byte, padding of the last chunk included; and metadata alike."""
    array = array_of(dtype, (41, 3))
    size = 20 * 3 * np.dtype(dtype).itemsize
    save(tmp_path / "c", {"w": array}, size, is_old=True)
    ours = tmp_path / "c/state/w"
    metadata = json.loads((ours / "zarr.json").read_text())
    theirs = opened(tmp_path, "theirs", metadata=metadata, create=True)
    theirs.write(array).result()
    written = sorted((tmp_path / "theirs").rglob("c*"))
    assert 1 < len(written) < 41  # a prime number of rows
    for file in written:
        assert (ours / file.name).read_bytes() == file.read_bytes()
    specs = [
        store.spec().to_json()["metadata"]
        for store in (opened(tmp_path / "c/state", "w"), theirs)
    ]
    assert specs[0] == specs[1]


def test_memory_budget_covers_casts_and_copied_pieces(tmp_path, monkeypatch):
    """Rows are written where they are; columns and casts need memory of their own."""
    held = []
    real = seams.current("threads.hold_budget")

    def hold(self, size):
        held.append(size)
        return real(self, size)

    seams.replace(monkeypatch, "threads.hold_budget", hold)
    state = {"w": array_of("float32", (4096, 256))}  # 4 MiB
    rows = {"layout": flaxckpt.ArrayLayout(chunk_bytes=2**20)}
    columns = {"layout": flaxckpt.ArrayLayout(shard_axes=(0, 1))}
    narrow = {"transforms": [flaxckpt.transforms.cast("w", "float16", lossy=True)]}
    for name, options, sizes in (
        ("rows", rows, [0]),
        ("columns", columns, [2**22]),
        ("narrow", narrow, [2**21]),
    ):
        held.clear()
        flaxckpt.save(tmp_path / name, state, **options)
        assert held == sizes, name


# ---- what a user sees ------------------------------------------------------------


def big_state(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "w": jax.random.normal(keys[0], (512, 1024)),
        "b": jax.random.normal(keys[1], (64, 1024), jnp.bfloat16),
        "small": jax.random.normal(keys[2], (4,)),
    }


@pytest.fixture
def saved(tmp_path):
    layout = flaxckpt.ArrayLayout(chunk_bytes=2**20)
    flaxckpt.save(tmp_path / "c", big_state(), layout=layout)
    return tmp_path / "c"


def test_memory_map_returns_mapped_arrays(saved):
    found = flaxckpt.load(saved, memory_map=True)
    assert is_mapped(found["w"], saved)  # of two chunks
    assert not is_mapped(found["b"], saved)  # small arrays are read together
    strategies.assert_same(found, big_state())
    found = flaxckpt.load(saved, memory_map=False)
    assert not is_mapped(found["w"], saved)
    strategies.assert_same(found, big_state())


def test_auto_maps_local_files_only(saved, monkeypatch):
    is_local = seams.current("filesystem.is_local")(saved)
    assert is_mapped(flaxckpt.load(saved)["w"], saved) == is_local
    seams.replace(monkeypatch, "filesystem.kind", lambda path: "nfs4")
    assert not is_mapped(flaxckpt.load(saved)["w"], saved)
    assert is_mapped(flaxckpt.load(saved, memory_map=True)["w"], saved)


def test_maps_keep_no_file_open_and_end_with_their_arrays(saved):
    def is_open():
        files = Path("/proc/self/fd").iterdir()
        return any(str(saved) in os.path.realpath(file) for file in files)

    def is_in_memory():
        return str(saved) in Path("/proc/self/maps").read_text()

    found = flaxckpt.load(saved, memory_map=True)
    part = found["w"][10:20]
    assert is_in_memory()
    assert not is_open()
    del found, part
    gc.collect()
    assert not is_in_memory()


CUT_SHORT = """
import os, sys
import flaxckpt, pytest
from tests.helpers import seams

def verify_mapped(block, *args):
    os.truncate(block.path, 2**16)
    real(block, *args)

real = seams.current("chunk_file.verify_mapped")
seams.replace(pytest.MonkeyPatch(), "chunk_file.verify_mapped", verify_mapped)
try:
    flaxckpt.load(sys.argv[1], memory_map=True)
except flaxckpt.errors.DamagedCheckpointError as error:
    print(error)
"""


def test_unreadable_map_raises_error_instead_of_signal(saved):
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if sys.platform != "linux" or release < (5, 14):
        pytest.skip("only Linux, from 5.14 on, says what cannot be read of a map")
    assert "cannot be read" in programs.run("-c", CUT_SHORT, saved, cwd=ROOT).stdout


def test_mapped_arrays_can_be_donated_and_trained_on(saved):
    """The files stay as they are, and the values are right."""
    files = {p: p.read_bytes() for p in saved.rglob("*") if p.is_file()}
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)
    state = flaxckpt.load(saved, memory_map=True)
    for _ in range(3):
        state = step(state)
    strategies.assert_same(state, jax.tree.map(lambda x: x * 8, big_state()))
    assert files == {p: p.read_bytes() for p in files}
    strategies.assert_same(flaxckpt.load(saved), big_state())


def test_memory_of_read_arrays_is_aligned_for_jax(tmp_path):
    state = {f"{size}": np.ones(size, np.uint8) for size in range(2**20 + 1, 2**20 + 9)}
    flaxckpt.save(tmp_path / "c", state)
    for array in flaxckpt.load(tmp_path / "c", state, memory_map=False).values():
        assert array.ctypes.data % ALIGNMENT == 0


def test_mapped_numpy_leaves_are_writable(saved):
    before = np.asarray(big_state()["w"])
    found = flaxckpt.load(saved, {"w": before}, memory_map=True)
    found["w"][:] = 0
    strategies.assert_same(flaxckpt.load(saved, {"w": before}), {"w": before})


def test_mapped_step_can_be_deleted_or_replaced(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, big_state(1)).wait()
        ckpt.save(2, big_state(2)).wait()
        first = ckpt.restore(step=1, memory_map=True)
        second = ckpt.restore(step=2, memory_map=True)
        ckpt.delete(1)
        ckpt.save(2, big_state(3), on_exists="overwrite").wait()
        strategies.assert_same(first, big_state(1))
        strategies.assert_same(second, big_state(2))
        strategies.assert_same(ckpt.restore(), big_state(3))


def test_memory_mapped_state_can_overwrite_its_own_files(tmp_path):
    """Over its own files, too: a save never writes into a file that is there."""
    flaxckpt.save(tmp_path / "c", big_state())
    found = flaxckpt.load(tmp_path / "c", memory_map=True)
    flaxckpt.save(tmp_path / "c", found, overwrite=True)
    strategies.assert_same(found, big_state())
    strategies.assert_same(flaxckpt.load(tmp_path / "c"), big_state())


@pytest.mark.parametrize("memory_map", [True, False])
def test_reads_shards_from_maps_or_files(saved, memory_map):
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    for spec in (("data",), (None, "model"), ("model", "data"), ()):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        wanted = {
            "w": jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=sharding)
        }
        found = flaxckpt.load(saved, wanted, memory_map=memory_map)
        assert found["w"].sharding == sharding
        np.testing.assert_array_equal(found["w"], big_state()["w"])


@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize(
    ("ocdbt", "key"),
    [
        *((True, "w/c.0.0"), (True, "w/c.1.0")),
        *((False, "w/c.0.0"), (False, "w/c.1.0"), (False, "w/zarr.json")),
    ],
)
def test_detects_damage_unless_verify_is_off(saved, memory_map, key, ocdbt):
    if ocdbt:
        chunks.flip(saved / "state", key)
    else:
        old_stores.make_directories(saved)
        flip_bit(saved / "state" / key)
    with pytest.raises(errors.DamagedCheckpointError, match="w: "):
        flaxckpt.load(saved, memory_map=memory_map)
    found = flaxckpt.load(saved, memory_map=memory_map, verify=False)
    strategies.assert_same({"b": found["b"]}, {"b": big_state()["b"]})


def test_rejects_invalid_memory_map_option(saved):
    with pytest.raises(errors.OptionError, match="memory_map must be one of"):
        flaxckpt.load(saved, memory_map="yes")


# ---- frozen leaves ---------------------------------------------------------------


def new_bytes(path):
    return sum(
        f.stat().st_size
        for f in path.rglob("*")
        if f.is_file() and f.stat().st_nlink == 1
    )


def lora(frozen, n):
    return {"base": frozen, "lora": jnp.full((16,), n), "step": n}


@pytest.mark.parametrize("codec", ["none", "compact"])
@pytest.mark.parametrize("how", ["same arrays", "equal arrays", "after a restart"])
def test_stores_frozen_leaves_once(tmp_path, codec, how):
    layout = flaxckpt.ArrayLayout(codec=codec, chunk_bytes=2**20)
    frozen = big_state()
    ckpt = flaxckpt.Checkpointer(tmp_path, layout=layout)
    first = ckpt.save(1, lora(frozen, 1)).wait()
    if how == "after a restart":
        ckpt.close()
        ckpt = flaxckpt.Checkpointer(tmp_path, layout=layout)
        frozen = ckpt.restore()["base"]
    elif how == "equal arrays":
        frozen = big_state()
    second = ckpt.save(2, lora(frozen, 2)).wait()
    # All arrays of less than 1 MiB are written again.
    assert second.bytes_written < 0.1 * first.bytes_written
    assert new_bytes(tmp_path / "2") == second.bytes_written
    ckpt.delete(1)
    strategies.assert_same(ckpt.restore(step=2)["base"], big_state())
    ckpt.close()


def shared_with_numpy(values):
    """A numpy array, and a jax array that has the same memory."""
    memory = np.zeros(values.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    owner = memory[start : start + values.nbytes].view(values.dtype)
    owner = owner.reshape(values.shape)
    owner[...] = values
    array = jax.device_put(owner)
    assert array.unsafe_buffer_pointer() == owner.ctypes.data
    return owner, array


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("checksum", [True, False])
def test_does_not_link_arrays_changed_in_place(tmp_path, codec, checksum):
    """jax arrays that share memory with numpy are the same objects, but not equal."""
    layout = flaxckpt.ArrayLayout(codec=codec, checksum=checksum, chunk_bytes=2**16)
    before = np.arange(2**18, dtype=np.float32)
    owner, array = shared_with_numpy(before)
    state = {"x": array, "y": jnp.arange(2**18)}
    with flaxckpt.Checkpointer(tmp_path, layout=layout) as ckpt:
        ckpt.save(1, state).wait()
        owner[5] = -1
        ckpt.save(2, state).wait()
        owner[2**15] = -2
        ckpt.save(3, state).wait()
        third = ckpt.restore(step=3)["x"]
        np.testing.assert_array_equal(third, owner)
        owner[2**15] = before[2**15]
        np.testing.assert_array_equal(ckpt.restore(step=2)["x"], owner)
        np.testing.assert_array_equal(ckpt.restore(step=1)["x"], before)
    for step in (1, 2, 3):
        assert flaxckpt.verify(tmp_path / str(step)).ok
    unchanged = Path("state/d/0.0/y")  # is still linked
    assert (tmp_path / "3" / unchanged).samefile(tmp_path / "1" / unchanged)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_reads_steps_with_linked_leaves(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        frozen = big_state()
        for step in (1, 2, 3):
            ckpt.save(step, lora(frozen, step)).wait()
        ckpt.delete(1)
    with ocp.PyTreeCheckpointer() as reader:
        for step in (2, 3):
            found = reader.restore(tmp_path / str(step) / "state")
            strategies.assert_same(
                jax.tree.map(np.asarray, found["base"]),
                jax.tree.map(np.asarray, frozen),
            )
            assert found["step"] == step


def test_writes_changed_leaf(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        state = big_state()
        ckpt.save(1, state).wait()
        state = state | {"w": state["w"].at[511, 1023].add(1)}
        ckpt.save(2, state).wait()
        strategies.assert_same(ckpt.restore(), state)
        narrow = flaxckpt.transforms.cast("w", "bfloat16")
    with flaxckpt.Checkpointer(tmp_path, transforms=[narrow]) as ckpt:
        ckpt.save(3, state).wait()
        assert ckpt.restore()["w"].dtype == jnp.bfloat16


def test_does_not_link_to_damaged_step(tmp_path):
    """Arrays that are equal, but not the same, are compared with the files."""
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, big_state()).wait()
        file = tmp_path / "1/state/d/0.0/w"
        flip_bit(file, 1000)
        ckpt.save(2, big_state()).wait()
        strategies.assert_same(ckpt.restore(step=2, fallback=False), big_state())


@pytest.mark.parametrize("kind", ["whole", "short", "mode", "missing", "link", "fifo"])
def test_links_only_complete_regular_files_of_equal_mode(tmp_path, kind):
    with flaxckpt.Checkpointer(tmp_path, permissions=0o750) as ckpt:
        ckpt.save(1, big_state()).wait()
        old, new = (tmp_path / step / "state/d/0.0/w" for step in "12")
        content = old.read_bytes()
        if kind in ("short", "missing", "link", "fifo"):
            old.unlink()
        if kind == "short":
            old.write_bytes(content[:-4])
            old.chmod(0o640)
        elif kind == "mode":
            old.chmod(0o600)
        elif kind == "link":
            (tmp_path / "other").write_bytes(content)
            old.symlink_to(tmp_path / "other")
        elif kind == "fifo":
            os.mkfifo(old, 0o640)
        ckpt.save(2, big_state()).wait()
        assert not new.is_symlink()
        assert new.stat().st_nlink == (2 if kind == "whole" else 1)
        assert new.read_bytes() == content
        strategies.assert_same(ckpt.restore(step=2, fallback=False), big_state())


def test_does_not_link_to_step_replaced_by_another_writer(tmp_path):
    """The same array was saved there, but it is not there any more."""
    state, other = big_state(1), big_state(2)
    ours = flaxckpt.Checkpointer(tmp_path)
    ours.save(1, state).wait()
    with flaxckpt.Checkpointer(tmp_path) as theirs:
        theirs.save(1, other, on_exists="overwrite")
    ours.save(2, state).wait()
    strategies.assert_same(ours.restore(step=2), state)
    strategies.assert_same(ours.restore(step=1), other)
    ours.close()


def test_replacing_linked_step_fails_save(tmp_path, monkeypatch):
    state = big_state(1)
    ours = flaxckpt.Checkpointer(tmp_path)
    ours.save(1, state).wait()
    real, replaced = seams.current("chunks_to_write.has_same_source"), []

    def has_same_source(*args):
        found = real(*args)
        if not replaced:
            replaced.append(True)
            with flaxckpt.Checkpointer(tmp_path) as theirs:
                # In a thread of a save, `close` does not wait for saves.
                theirs.save(1, big_state(2), on_exists="overwrite").wait()
        return found

    seams.replace(monkeypatch, "chunks_to_write.has_same_source", has_same_source)
    with pytest.raises(errors.SaveFailedError, match="was replaced during the save"):
        ours.save(2, state).wait()
    assert ours.steps() == [1]
    ours.close()


@pytest.mark.parametrize("how", ["EPERM", "ENOTSUP", "EMLINK", "EXDEV", "call", None])
def test_copies_files_without_hard_link_support(tmp_path, monkeypatch, how):
    def refuse(*_args, **_kwargs):
        if how == "call":
            raise NotImplementedError("follow_symlinks unavailable on this platform")
        raise OSError(getattr(errno, how), "refused")

    if how is None:  # Python for Android
        monkeypatch.delattr(os, "link")
    else:
        monkeypatch.setattr(os, "link", refuse)
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        state = big_state()
        for step in (1, 2):
            ckpt.save(step, state).wait()
        strategies.assert_same(ckpt.restore(), state)
        assert new_bytes(tmp_path / "1") == new_bytes(tmp_path / "2") > 2**20


def test_background_saves_stay_consistent_during_training(tmp_path):
    """Saves in the background while the caller trains on and deletes old steps."""
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = {"w": jnp.zeros((256, 1024)), "n": jnp.zeros((), jnp.int32)}
    keep = [flaxckpt.policies.LatestN(2)]
    with flaxckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for n in range(12):
            ckpt.save(n, state)
            state = step(state)
        ckpt.wait()
        for n in ckpt.steps():
            found = ckpt.restore(step=n)
            assert found["n"] == n
            np.testing.assert_array_equal(found["w"], np.full((256, 1024), n))
    assert threading.active_count() < 50


# ---- accelerators ----------------------------------------------------------------


@pytest.mark.parametrize("pinned", ["pinned memory", "none", "not enough"])
def test_saves_accelerator_values_as_of_call(tmp_path, monkeypatch, pinned):
    """The CPU's devices have the same kinds of memory, so they can stand in for one."""
    seams.replace(monkeypatch, "to_host.is_on_cpu", lambda sharding: False)
    if pinned == "none":
        seams.replace(monkeypatch, "to_host.pinned", lambda sharding: None)
    elif pinned == "not enough":

        def refuse(*_args, **_kwargs):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        monkeypatch.setattr(jax, "device_put", refuse)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    split = NamedSharding(mesh, PartitionSpec("data"))
    state = {
        "split": jax.jit(lambda: jnp.arange(1024.0 * 512), out_shardings=split)(),
        "copied": jax.jit(
            lambda: jnp.ones((512, 1024)),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )(),
        "one": jnp.full((3,), 2, jnp.bfloat16),
        "none": jnp.zeros((0, 2)),
        "key": jax.random.key(3),
        "host": np.arange(5),
    }
    expected = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x),
        state,
    )
    handle = flaxckpt.save_async(tmp_path / "c", state)
    for name in ("split", "copied", "one"):
        state[name].delete()  # as a donation would
    handle.wait()
    monkeypatch.undo()
    found = flaxckpt.load(tmp_path / "c", expected)
    strategies.assert_same(found, expected)


def test_casts_float8_leaves_by_value(tmp_path):
    state = {"w": np.array([0.5, 1, 3, 2]).astype(jnp.float8_e4m3)}
    flaxckpt.save(tmp_path / "c", state)
    cast = flaxckpt.transforms.cast("w", "uint8", lossy=True)
    found = flaxckpt.load(tmp_path / "c", transforms=[cast])
    np.testing.assert_array_equal(found["w"], [0, 1, 3, 2])


def test_writes_same_array_again_under_another_dtype(tmp_path):
    """Both are bytes on disk, but not the same ones."""
    array = jnp.array([0.0, 1.0, 3.0, 2.0])
    for step, dtype in enumerate(("float8_e4m3", "uint4")):
        cast = flaxckpt.transforms.cast("w", dtype, lossy=True)
        if step == 0:
            ckpt = flaxckpt.Checkpointer(tmp_path)
        saves = ckpt._saves
        saves._options = dataclasses.replace(saves._options, transforms=(cast,))
        ckpt.save(step, {"w": array}).wait()
    np.testing.assert_array_equal(ckpt.restore()["w"].astype(int), [0, 1, 3, 2])
    ckpt.close()


def test_saves_in_calling_thread_without_threads(tmp_path, monkeypatch):
    seams.refuse_threads(monkeypatch)
    handle = flaxckpt.save_async(tmp_path / "c", big_state())
    assert handle.done()
    handle.wait()
    strategies.assert_same(flaxckpt.load(tmp_path / "c"), big_state())
