"""Compressed arrays are given to TensorStore in parts of whole rows of chunks."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import ArrayLayout
from tests.helpers import seams


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    seams.replace(monkeypatch, "encode.encoded_part", 256)
    seams.replace(monkeypatch, "encode.encoded_at_once", 1024)


def check(directory, state, layout):
    flaxckpt.save(directory, state, layout=layout)
    found = flaxckpt.load(directory, state)
    for wanted, leaf in zip(
        jax.tree.leaves(state), jax.tree.leaves(found), strict=True
    ):
        assert leaf.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))
    assert flaxckpt.verify(directory).ok


@pytest.mark.parametrize("codec", ["compact", "zstd"])
@pytest.mark.parametrize("chunk_bytes", [40, 256, 10_000])
def test_multipart_arrays_round_trip(tmp_path, codec, chunk_bytes):
    rng = np.random.default_rng(0)
    state = {
        "rows": rng.normal(size=(37, 11)).astype("float32"),
        "column": rng.integers(0, 99, size=(301, 1)),
        "wide": rng.normal(size=(3, 500)).astype("float16"),
        "deep": rng.normal(size=(13, 4, 5)).astype("float32"),
        "line": np.arange(1000, dtype="int16"),
        "bool": rng.normal(size=(40, 20)) > 0,
        "scalar": np.float32(3),
        "empty": np.ones((0, 900), "float32"),
    }
    layout = ArrayLayout(codec=codec, chunk_bytes=chunk_bytes)
    check(tmp_path / "checkpoint", state, layout)


def test_multipart_shards_round_trip(tmp_path):
    devices = np.array(jax.devices()).reshape(-1, 1)
    sharding = NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec("x", "y"))
    rows = 5 * len(devices)
    array = np.arange(rows * 60, dtype="float32").reshape(rows, 60)
    state = {"w": jax.device_put(array, sharding), "b": jax.numpy.arange(900)}
    layout = ArrayLayout(codec="compact", chunk_bytes=500)
    check(tmp_path / "checkpoint", state, layout)
