"""Arrays in a file: each region is read and cast as numpy does it."""

import os
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  makes numpy know the names
import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import numpy as safetensors

import flaxckpt
from flaxckpt import errors
from tests.helpers import seams

AXES = ("x", "y", "z")


def write(path, array):
    safetensors.save_file({"before": np.zeros(3, np.int8), "w": array}, path)
    return path


def load(path, dtype=None, spec=None, **options):
    """Loads the array, as a numpy array or split over the devices."""
    stored = flaxckpt.metadata(path).leaves["w"]
    dtype = np.dtype(dtype or stored.dtype)
    wanted = np.zeros(stored.shape, dtype)
    if spec is not None:
        sharding = NamedSharding(jax.make_mesh((2, 2, 2), AXES), spec)
        wanted = jax.ShapeDtypeStruct(stored.shape, dtype, sharding=sharding)
    return flaxckpt.load(path, {"w": wanted}, unused="ignore", **options)["w"]


specs = st.sampled_from([P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), P("z", "y")])


@pytest.mark.parametrize("part_bytes", [1, 16, 100, 2**20])
@settings(max_examples=20)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple), spec=specs, data=st.data()
)
def test_reads_any_region_of_any_array(tmp_path_factory, shape, spec, data, part_bytes):
    array = np.arange(np.prod(shape), dtype="int16").reshape(shape)
    bounds = [data.draw(st.tuples(st.integers(0, n), st.integers(0, n))) for n in shape]
    region = tuple(slice(*sorted(b)) for b in bounds)
    with pytest.MonkeyPatch.context() as patch:
        seams.replace(patch, "read_plan.part_bytes", part_bytes)
        path = write(tmp_path_factory.mktemp("file") / "m.safetensors", array)
        leaf = flaxckpt.open_leaf(path, "w")
        np.testing.assert_array_equal(leaf.read().result(), array)
        np.testing.assert_array_equal(leaf[region].read().result(), array[region])
        found = load(path)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        if len(shape) > 1:
            whole = np.tile(array, (4, 4) + (1,) * (len(shape) - 2))
            split = load(write(path, whole), spec=spec)
            np.testing.assert_array_equal(split, whole)


FLOATS = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64"]


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
def test_casting_floats_in_parts_matches_numpy(tmp_path, monkeypatch, stored, wanted):
    seams.replace(monkeypatch, "read_files.cast_at_once", 64)
    values = np.random.default_rng(0).standard_normal((8, 4, 5)) * 1000
    values[0, 0, :4] = np.nan, np.inf, -np.inf, -0.0
    with np.errstate(over="ignore", invalid="ignore"):
        array = values.astype(np.dtype(stored))
        expected = array.astype(np.dtype(wanted))
    path = write(tmp_path / "m.safetensors", array)
    for spec in (None, P("x", "y")) if wanted != "float64" else (None,):
        found = load(path, wanted, spec)
        assert found.dtype == expected.dtype
        assert np.asarray(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("before", [0, 8, 520])
def test_maps_array_in_own_file(tmp_path, before):
    array = np.random.default_rng(0).standard_normal((256, 100)).astype("float32")
    flaxckpt.save(tmp_path / "c", {"a": np.zeros(before), "w": array})
    path, maps = tmp_path / "m.safetensors", Path("/proc/self/maps")
    flaxckpt.convert(tmp_path / "c", path, format="safetensors")
    content = path.read_bytes()
    assert load(path, memory_map=False).tobytes() == array.tobytes()
    assert str(path) not in maps.read_text()
    mapped = load(path)
    assert str(path) in maps.read_text()
    assert mapped.tobytes() == array.tobytes()
    assert mapped.ctypes.data % 64 == 0
    mapped[0, 0] = 5  # copy-on-write
    assert path.read_bytes() == content
    assert np.asarray(load(path, spec=P("x", "y"))).tobytes() == array.tobytes()


def test_file_truncated_before_it_is_mapped_raises_error(tmp_path, monkeypatch):
    path, real = tmp_path / "m.safetensors", seams.current("arrays.begin_read")
    flaxckpt.save(tmp_path / "c", {"w": np.zeros((512, 100), "float32")})
    flaxckpt.convert(tmp_path / "c", path, format="safetensors")

    def begin(*args, **options):
        os.truncate(path, 100_000)
        return real(*args, **options)

    seams.replace(monkeypatch, "arrays.begin_read", begin)
    with pytest.raises(errors.CheckpointError, match="while it was read"):
        load(path)


@pytest.mark.parametrize("chunk_bytes", [4, 28, 52, 92])
def test_joins_scattered_runs_of_flat_array(tmp_path, monkeypatch, chunk_bytes):
    """Flax writes large arrays in chunks."""
    array = np.arange(24, dtype="float32").reshape(2, 3, 4)
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", chunk_bytes)
    path = tmp_path / "m.msgpack"
    path.write_bytes(serialization.to_bytes({"w": array}))
    leaf = flaxckpt.open_leaf(path, "w")
    np.testing.assert_array_equal(leaf.read().result(), array)
    np.testing.assert_array_equal(leaf[1:, 1:, 3].read().result(), array[1:, 1:, 3])
    np.testing.assert_array_equal(load(path), array)


@pytest.mark.parametrize("end", [-1, 500])
def test_truncated_file_raises_error(tmp_path, end):
    path = write(tmp_path / "m.safetensors", np.zeros((512, 100), "float32"))
    leaf = flaxckpt.open_leaf(path, "w")
    os.truncate(path, end % path.stat().st_size)
    with pytest.raises(OSError, match=r"ends at byte|changed since"):
        leaf.read().result()


def test_replaced_file_raises_error(tmp_path):
    path = write(tmp_path / "m.safetensors", np.arange(24, dtype="float32"))
    leaf = flaxckpt.open_leaf(path, "w")
    np.testing.assert_array_equal(leaf.read().result(), np.arange(24))
    write(tmp_path / "other", np.ones(24, "float32")).replace(path)
    with pytest.raises(OSError, match="replaced or changed since it was opened"):
        leaf.read().result()
