"""safetensors files, single and sharded, ours and others'; and hostile ones."""

import contextlib
import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import numpy as safetensors

import flaxckpt
import tests
from flaxckpt import errors
from tests.golden import make_safetensors
from tests.helpers import slow, strategies
from tests.hostile import safetensors as hostile

GOLDEN = tests.GOLDEN / "safetensors"
SILERO = GOLDEN / "silero_vad_16k.safetensors"
SHARDED = GOLDEN / "sharded"


def assert_is(tree, wanted):
    """Compares a nested dict with name -> array, names joined by dots."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {".".join(key.key for key in path): array for path, array in flat}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        strategies.assert_same_bits(array, np.asarray(found[name]), name)


def test_loads_real_model_like_safetensors_library():
    found = flaxckpt.load(SILERO)
    assert_is(found, safetensors.load_file(SILERO))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    metadata = flaxckpt.metadata(SILERO)
    assert metadata.format == "safetensors"
    assert metadata.total_bytes == SILERO.stat().st_size - 8 - header_size(SILERO)
    assert metadata.leaves["stft_conv/weight"].shape == (258, 1, 256)


def header_size(path):
    return int.from_bytes(path.read_bytes()[:8], "little")


def bytes_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_opening_one_leaf_of_real_model_reads_little():
    wanted = safetensors.load_file(SILERO)["conv1.bias"]
    flaxckpt.open_leaf(SHARDED, "empty").read().result()  # all is imported
    before = bytes_read()
    found = flaxckpt.open_leaf(SILERO, "conv1/bias").read().result()
    read = bytes_read() - before
    np.testing.assert_array_equal(found, wanted)
    assert read < SILERO.stat().st_size * 0.05


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_loads_shards_like_safetensors_library(name):
    path = SHARDED / name if name else SHARDED
    found = flaxckpt.load(path)
    assert_is(found, make_safetensors.tensors())
    assert found["embed"]["weight"].dtype == jnp.bfloat16
    assert flaxckpt.metadata(path).custom["total_size"] > 0


def test_directory_with_one_file_loads_as_that_file(tmp_path):
    shutil.copy(SILERO, tmp_path / "whatever.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert_is(flaxckpt.load(tmp_path), safetensors.load_file(SILERO))


def test_file_beside_steps_does_not_hide_them(tmp_path):
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, {"w": jnp.ones(2)})
    flaxckpt.convert(tmp_path, tmp_path / "m.safetensors", format="safetensors")
    assert flaxckpt.metadata(tmp_path).step == 3
    assert flaxckpt.load(tmp_path / "m.safetensors")["w"].shape == (2,)


def test_recognizes_safetensors_directories_as_steps(tmp_path):
    for step in (10, 20):
        target = tmp_path / f"checkpoint-{step}"
        flaxckpt.convert(SILERO, target, format="safetensors")
    assert flaxckpt.metadata(tmp_path).step == 20
    assert flaxckpt.metadata(tmp_path, step=10).path.endswith("checkpoint-10")


def test_recognizes_file_without_suffix_by_header(tmp_path):
    shutil.copy(SILERO, tmp_path / "model")
    assert_is(flaxckpt.load(tmp_path / "model"), safetensors.load_file(SILERO))


def test_custom_metadata_holds_text_of_writer(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.save_file({"a": np.zeros(2)}, path, metadata={"format": "pt", "x": "y"})
    assert flaxckpt.metadata(path).custom == {"format": "pt", "x": "y"}


def test_does_not_split_conflicting_names(tmp_path, caplog):
    path = tmp_path / "m.safetensors"
    arrays = {name: np.arange(2.0) for name in ("a", "a.b", "c.d", "e/f")}
    safetensors.save_file(arrays, path)
    with caplog.at_level(logging.WARNING):
        found = flaxckpt.load(path)
    assert "are not split" in caplog.text
    assert found.keys() == arrays.keys()


def test_names_keep_slashes_and_percent_signs(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.save_file({"a/b.c%": np.arange(2), "..": np.arange(3)}, path)
    found = flaxckpt.load(path)
    assert found["a/b"]["c%"].shape == (2,)
    assert found[""][""][""].shape == (3,)
    assert "a%2Fb/c%25" in flaxckpt.metadata(path).leaves


def test_64_bit_values_stay_64_bit(tmp_path):
    path = tmp_path / "m.safetensors"
    arrays = {"i": np.array([2**60]), "f": np.array([0.1]), "u": np.array(2**64 - 1)}
    safetensors.save_file(arrays, path)
    assert_is(flaxckpt.load(path), arrays)


NUMPY_TYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64"),
]


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text("ab./é\n", min_size=1, max_size=5),
        st.tuples(
            st.sampled_from(NUMPY_TYPES), st.lists(st.integers(0, 3), max_size=3)
        ),
        max_size=5,
    )
)
def test_reads_any_file_of_safetensors_library(tmp_path_factory, forms):
    arrays = {
        name: np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
        for name, (dtype, shape) in forms.items()
    }
    path = tmp_path_factory.mktemp("any") / "m.safetensors"
    safetensors.save_file(arrays, path)
    stored = flaxckpt.metadata(path).leaves.values()
    assert sum(info.kind != "empty" for info in stored) == len(arrays)
    found = jax.tree.leaves(flaxckpt.load(path))
    assert sorted(a.tobytes() for a in map(np.asarray, found)) == sorted(
        a.tobytes() for a in arrays.values()
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("BF16", "bfloat16"), ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")],
)
def test_reads_types_missing_in_numpy(tmp_path, name, dtype):
    array = np.array([0.5, -2, 1]).astype(dtype)
    row = {"dtype": name, "shape": [3], "data_offsets": [0, array.nbytes]}
    path = hostile.file(tmp_path / "m.safetensors", {"a": row}, array.tobytes())
    strategies.assert_same_bits(jnp.asarray(array), flaxckpt.load(path)["a"])


def test_loads_rows_sharded_across_devices(tmp_path):
    path = tmp_path / "m.safetensors"
    array = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    safetensors.save_file({"a": array}, path)
    mesh = jax.make_mesh((8,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    wanted = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=sharding)
    found = flaxckpt.load(path, {"a": wanted})["a"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, array.astype(jnp.bfloat16))


LONG = (
    "600,000 tensors",
    "600,000 tensors, escaped",
    "index of 600,000 tensors",
    "an index of eight million keys",
)


@pytest.mark.parametrize(
    "case", slow.all_but(hostile.CASES, hostile.CASES.keys() - LONG)
)
def test_rejects_hostile_file(case, tmp_path):
    path = hostile.CASES[case](tmp_path)
    with pytest.raises(errors.CheckpointError) as caught:
        flaxckpt.load(path)
    message = str(caught.value)
    assert len(message) < 1500
    assert message.count("\n") < 15


def test_loads_valid_file_built_like_hostile_one(tmp_path):
    """So it is what the cases change that is refused."""
    for write in (hostile.tensor(), hostile.lie(), hostile.nested(3)):
        flaxckpt.load(write(tmp_path))
    flaxckpt.load(hostile.index({"a": "model-1.safetensors"})(tmp_path))


def test_omits_tensors_missing_from_index(tmp_path, caplog):
    (tmp_path / "new").mkdir()
    path = hostile.index({"a": "model-1.safetensors"})(tmp_path / "new")
    rows = {"a": hostile.ZEROS, "b": hostile.ZEROS | {"data_offsets": [8, 16]}}
    hostile.file(path / "model-1.safetensors", rows, b"\0" * 16)
    with caplog.at_level(logging.WARNING):
        assert flaxckpt.load(path).keys() == {"a"}
    assert "1 leaves" in caplog.text


def test_rejects_directory_with_lone_shard(tmp_path, caplog):
    name = "model-00002-of-00002.safetensors"
    shutil.copy(SHARDED / name, tmp_path)
    missing = r"(?s)1 of 2 shards.*missing:\s+model-00001-of-00002\.safetensors"
    with pytest.raises(errors.DamagedCheckpointError, match=missing):
        flaxckpt.load(tmp_path)
    assert not caplog.records
    assert flaxckpt.load(tmp_path / name)
    assert "one of several shards" in caplog.text
    shutil.copy(SHARDED / name.replace("00002-of", "00001-of"), tmp_path)
    without = r"2 shards and no index: get model\.safetensors\.index\.json"
    with pytest.raises(errors.DamagedCheckpointError, match=without):
        flaxckpt.load(tmp_path)


def test_error_for_several_files_or_indices_asks_for_one(tmp_path):
    for name in ("one.safetensors", "two.safetensors"):
        shutil.copy(SILERO, tmp_path / name)
    says = r"several safetensors files \(one\.safetensors, two\.s.*pass the path of one"
    with pytest.raises(errors.CheckpointFormatError, match=says):
        flaxckpt.load(tmp_path)
    for name in ("a.safetensors.index.json", "b.safetensors.index.json"):
        shutil.copy(SHARDED / "model.safetensors.index.json", tmp_path / name)
    with pytest.raises(errors.CheckpointFormatError, match="several safetensors ind"):
        flaxckpt.load(tmp_path)


def test_file_beside_old_steps_does_not_hide_them(tmp_path):
    for step in (3, 4):
        content = serialization.to_bytes({"step": step})
        (tmp_path / f"checkpoint_{step}").write_bytes(content)
    shutil.copy(SILERO, tmp_path / "model.safetensors")
    (tmp_path / "vocab_32000").write_bytes(content)
    assert flaxckpt.load(tmp_path) == {"step": 4}
    for step in (3, 4):
        (tmp_path / f"checkpoint_{step}").unlink()
    assert flaxckpt.metadata(tmp_path).format == "safetensors"


def test_detects_format_by_content_not_suffix(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(serialization.to_bytes({"step": 3}))
    assert flaxckpt.load(path) == {"step": 3}
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(errors.CheckpointFormatError, match="is a zip archive"):
        flaxckpt.load(path)
    path.write_bytes(b"")
    with pytest.raises(errors.DamagedCheckpointError, match="header"):
        flaxckpt.load(path)


LFS = "version https://git-lfs.github.com/spec/v1\noid ab\n"
PAGE = "\n<!DOCTYPE html>\n<html><title>Log in</title></html>" + 500 * " "


@pytest.mark.parametrize("is_directory", [True, False])
@pytest.mark.parametrize(
    ("text", "advice"), [(LFS, "run git lfs pull"), (PAGE, "is a web page, not the fi")]
)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "checkpoint_3", "model.safetensors.index.json"]
)
def test_error_for_what_stands_in_for_a_file_says_what_to_do(
    tmp_path, name, text, advice, is_directory
):
    (tmp_path / name).write_text(text)
    path = tmp_path if is_directory and name != "checkpoint_3" else tmp_path / name
    with pytest.raises(errors.CheckpointFormatError, match=advice):
        flaxckpt.load(path)


def test_error_for_an_answer_in_place_of_a_file_shows_it(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("Entry not found\n")
    with pytest.raises(errors.DamagedCheckpointError, match="'Entry not found'; get"):
        flaxckpt.load(path)


def test_accepts_unusual_headers_like_the_library(tmp_path):
    rows = {"__metadata__": None, "a": hostile.ZEROS}
    text = b" \r\n\t" + json.dumps(rows).encode() + b" "
    path = hostile.file(tmp_path / "model", text)
    assert safetensors.load(path.read_bytes()).keys() == {"a"}
    assert flaxckpt.load(path).keys() == {"a"}
    (tmp_path / "new").mkdir()
    weight_map = {"a": "model-1.safetensors"}
    root = hostile.index(weight_map, metadata=None)(tmp_path / "new")
    assert flaxckpt.load(root).keys() == {"a"}


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_error_names_unsupported_sub_byte_types(tmp_path, dtype):
    size = {"F4": 4}.get(dtype, 6)
    rows = {"w": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}
    path = hostile.file(tmp_path / "m.safetensors", rows, bytes(size))
    with pytest.raises(
        errors.CheckpointFormatError,
        match=rf"(?s)unsupported element types.*'w': {dtype}",
    ):
        flaxckpt.load(path)


@given(st.binary(max_size=200), st.integers(0, 300), st.data())
def test_changed_bytes_are_rejected_or_harmless(tmp_path_factory, junk, at, data):
    content = bytearray((SHARDED / "model-00001-of-00002.safetensors").read_bytes())
    at = min(at, len(content))
    content[at : at + data.draw(st.integers(0, 20))] = junk
    path = tmp_path_factory.mktemp("junk") / "m.safetensors"
    path.write_bytes(content)
    try:
        flaxckpt.load(path)
    except errors.CheckpointError:
        return
    json.loads(content[8 : 8 + header_size(path)])


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["a", "path", "dtype", "b"]), inner, max_size=3
        ),
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.sampled_from([*hostile.OURS, *hostile.LEAF, "role", "spec", "shard"])
    | st.sampled_from(["prng_impl", "weak_type", "lineage", "transforms"]),
    json_values,
)
def test_load_handles_arbitrary_own_metadata(tmp_path_factory, key, value):
    in_leaf = key in (*hostile.LEAF, "role", "spec", "shard", "prng_impl", "weak_type")
    write = hostile.leaf(**{key: value}) if in_leaf else hostile.lie(**{key: value})
    path = write(tmp_path_factory.mktemp("lie"))
    with contextlib.suppress(errors.CheckpointError):
        flaxckpt.load(path)
        flaxckpt.convert(path, path.with_name("c"))


@settings(max_examples=200)
@given(st.sampled_from([*hostile.ZEROS, "__metadata__", "weight_map"]), json_values)
def test_load_handles_arbitrary_headers_and_indices(tmp_path_factory, key, value):
    root = tmp_path_factory.mktemp("header")
    if key == "__metadata__":
        path = hostile.one({key: value, "a": hostile.ZEROS})(root)
    elif key == "weight_map":
        path = hostile.index(value)(root)
    else:
        path = hostile.tensor(**{key: value})(root)
    with contextlib.suppress(errors.CheckpointError):
        flaxckpt.load(path)
