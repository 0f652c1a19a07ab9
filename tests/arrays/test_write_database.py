"""Databases that we write: the files, their names, and what TensorStore reads."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

import flaxckpt
from tests.arrays.test_read_raw import opened
from tests.helpers import chunks, seams, strategies

MIB = 2**20
DATABASE = flaxckpt.ArrayLayout()


def places(root):
    """The places of all chunks: file -> (offset, size), in order."""
    found = {}
    for value in chunks.read_tree(root).values():
        if not isinstance(value, bytes):
            found.setdefault(value.file, []).append((value.offset, value.size))
    return {file: sorted(parts) for file, parts in found.items()}


def names(root):
    return {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}


@st.composite
def states(draw):
    """Arrays by name, and the largest size of a chunk."""
    state = {}
    name = st.text(st.sampled_from("aAb.ü /%é-"), min_size=1, max_size=4)
    name |= st.sampled_from([".", "..", "a.__lock", "__lock", "tree", "0.small.0"])
    for key in draw(st.lists(name.filter(lambda name: name[-1] != "/"), max_size=5)):
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int8", "int4"]))
        shape = draw(st.lists(st.integers(0, 70), min_size=1, max_size=2))
        values = np.arange(math.prod(shape)) % 7
        state[key] = values.astype(jnp.dtype(dtype)).reshape(shape)
    return state, draw(st.integers(1, 5000))


@settings(max_examples=60)
@given(
    drawn=states(),
    codec=st.sampled_from(["none", "zstd"]),
    file_bytes=st.integers(1, 5000),
    own_bytes=st.integers(1, 5000),
)
def test_tensorstore_reads_any_arrays(
    tmp_path_factory, drawn, codec, file_bytes, own_bytes
):
    state, chunk_bytes = drawn
    path = tmp_path_factory.mktemp("database") / "c"
    layout = flaxckpt.ArrayLayout(codec=codec, chunk_bytes=chunk_bytes)
    with pytest.MonkeyPatch.context() as patch:
        seams.replace(patch, "write_database.file_bytes", file_bytes)
        seams.replace(patch, "write_database.own_file_bytes", own_bytes)
        flaxckpt.save(path, state, layout=layout)
    strategies.assert_same(flaxckpt.load(path), state)
    root = path / "state"
    if not state:
        return
    keys = [key for key in chunks.read_tree(root) if "/c" in key]
    for name in {key.rpartition("/")[0] for key in keys}:
        found = opened(root, name).read().result()
        assert any(
            found.shape == values.shape
            and found.astype(np.float32).tolist() == values.astype(float).tolist()
            for values in state.values()
        )
    found = places(root)
    assert {f"d/{name}" for name in names(root / "d")} == {"d/tree", *found}
    for file, parts in found.items():
        content = (root / file).read_bytes()
        for (start, size), (follows, _) in itertools.pairwise([*parts, (None, None)]):
            end = start + size
            assert end <= (follows if follows is not None else len(content))
            assert not any(content[end : follows if follows is not None else end])
        assert sum(parts[-1]) == len(content)
    assert sum(map(len, found.values())) == len(keys)


def test_names_files_after_large_arrays(tmp_path):
    large, small = np.ones((2 * MIB // 4,), np.float32), np.ones(3)
    state = {
        "params": {"kernel": large, "Kernel": large, "bias": small},
        "a/b": large,
        "long": {"x" * 240: large},
        "count": 3,
    }
    flaxckpt.save(tmp_path / "c", state, layout=DATABASE)
    found = names(tmp_path / "c/state/d")
    shared = {f"0.small.{n}" for n in range(len(found) - 2)}
    # Also Kernel, which some file systems do not tell from kernel.
    assert found == {"tree", "0.0/params.kernel", *shared}
    strategies.assert_same(flaxckpt.load(tmp_path / "c"), state)
    assert flaxckpt.verify(tmp_path / "c").ok


def test_splits_large_array_into_64_mib_files(tmp_path):
    state = {"w": np.arange(40 * MIB, dtype=np.float32)}
    layout = flaxckpt.ArrayLayout(chunk_bytes=24 * MIB)
    flaxckpt.save(tmp_path / "c", state, layout=layout)
    parts = places(tmp_path / "c/state")
    assert len(parts) > 1
    assert set(parts) == {f"d/0.{n}/w" for n in range(len(parts))}
    sizes = sorted(sum(file[-1]) for file in parts.values())
    assert all(64 * MIB <= size < 88 * MIB for size in sizes[1:])
    assert all(start % 4096 == 0 for file in parts for start, _ in parts[file])
    strategies.assert_same(flaxckpt.load(tmp_path / "c"), state)


@pytest.mark.parametrize("codec", ["none", "compact"])
def test_step_with_mostly_frozen_leaves_is_small(tmp_path, codec):
    keys = jax.random.split(jax.random.key(0), 4)
    frozen = {f"w{n}": jax.random.normal(key, (768, 768)) for n, key in enumerate(keys)}
    layout = flaxckpt.ArrayLayout(codec=codec)
    with flaxckpt.Checkpointer(tmp_path, layout=layout) as ckpt:
        sizes = [
            ckpt.save(step, {**frozen, "lora": jnp.full((8, 768), step)}).wait()
            for step in (1, 2)
        ]
    assert sizes[1].bytes_written < 0.02 * sizes[0].bytes_written
    strategies.assert_same(flaxckpt.load(tmp_path, step=2)["w1"], frozen["w1"])


@pytest.mark.parametrize("codec", ["none", "compact"])
def test_step_with_small_leaves_in_shared_files_is_small(tmp_path, codec):
    values = np.random.default_rng(0).standard_normal((450, 60_000), np.float32)
    state = {f"w{n:03}": values[n] for n in range(450)}
    layout = flaxckpt.ArrayLayout(codec=codec)
    with flaxckpt.Checkpointer(tmp_path, layout=layout) as ckpt:
        sizes = [
            ckpt.save(step, {**state, "w123": values[123] + step}).wait()
            for step in (1, 2)
        ]
    assert sizes[1].bytes_written < 0.02 * sizes[0].bytes_written
    assert len(places(tmp_path / "2/state")) < 100
    strategies.assert_same(flaxckpt.load(tmp_path)["w124"], values[124])


@pytest.mark.parametrize("store", ["auto", "files", "ocdbt"])
def test_store_option_warns_and_has_no_effect(tmp_path, caplog, store):
    layout = flaxckpt.ArrayLayout(store=store, chunk_bytes=7)
    assert f"store='{store}') has no effect any more" in caplog.text
    assert layout == flaxckpt.ArrayLayout(chunk_bytes=7)
    caplog.clear()
    flaxckpt.save(tmp_path / "c", {"w": jnp.ones(9)}, layout=layout)
    assert not caplog.records
    assert (tmp_path / "c/state/manifest.ocdbt").is_file()


def test_rejects_unknown_store():
    with pytest.raises(flaxckpt.errors.OptionError, match="store must be one of"):
        flaxckpt.ArrayLayout(store="zip")


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("size", [0, 3, 2**19])
def test_one_array_can_fill_several_leaves(tmp_path, codec, size):
    saved = {"a": jnp.arange(size, dtype=jnp.float32), "n": 7}
    layout = flaxckpt.ArrayLayout(codec=codec)
    flaxckpt.save(tmp_path / "c", saved, layout=layout)
    copies = [
        flaxckpt.transforms.copy("a", "b"),
        flaxckpt.transforms.copy("n", "m"),
        flaxckpt.transforms.copy("a", "c"),
    ]
    found = flaxckpt.load(tmp_path / "c", transforms=copies)
    wanted = saved | {"m": 7, "b": saved["a"], "c": saved["a"]}
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        strategies.assert_same(found[name], leaf)


def test_replaces_step_while_its_leaf_is_open(tmp_path):
    layout = flaxckpt.ArrayLayout(codec="compact")
    numbers = np.random.default_rng(0)
    for n in range(3):
        state = {"w": numbers.integers(0, 2**32, (6, 1024), np.uint32)}
        flaxckpt.save(tmp_path / "c", state, layout=layout, overwrite=True)
        strategies.assert_same(flaxckpt.load(tmp_path / "c"), state)
        if n == 0:
            leaf = flaxckpt.open_leaf(tmp_path / "c", "w")
            leaf.read().result()


def test_tensorstore_lists_keys_of_each_item(tmp_path):
    state = {"a": {"w": np.ones(3)}, "b": {"w": np.ones((2, 2)), "n": 1}}
    flaxckpt.save(tmp_path / "c", state, items=("a", "b"), layout=DATABASE)
    for item, keys in (("a", {"w"}), ("b", {"w", "n"})):
        base = {"driver": "file", "path": f"{tmp_path}/c/{item}/"}
        store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        listed = {key.decode().split("/")[0] for key in store.list().result()}
        assert listed == keys
