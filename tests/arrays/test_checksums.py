"""Parts of chunks: read and verified without the rest of the chunk."""

import base64
import json
import math
from typing import NamedTuple

import crc32c
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from tests.helpers import old_stores, orbax_readers, seams
from tests.helpers.files import flip_bit
from tests.helpers.strategies import assert_same

MIB = 2**20
SEGMENT = 2**16


class Moments(NamedTuple):
    mu: jax.Array
    nu: jax.Array


class Model(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(ramp(1024, 1024, seed=3))


def ramp(*shape, seed=0, dtype=jnp.float32):
    size = math.prod(shape)
    return (jnp.arange(size, dtype=jnp.float32) + seed).reshape(shape).astype(dtype)


def states():
    return {
        "dict": {"w": ramp(1024, 1024), "b": ramp(7)},
        "named": Moments(ramp(1024, 1024, seed=1), ramp(2048, 1024, dtype="bfloat16")),
        "nnx": nnx.state(Model()),
    }


def mesh(*sizes, names=("x", "y")):
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names[: len(sizes)])


def placed(state, sharding):
    """The abstract state, with the leaves of two axes on `sharding`."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding if x.ndim == 2 else None
        ),
        state,
    )


@pytest.mark.parametrize("kind", ["dict", "named", "nnx"])
@pytest.mark.parametrize("memory_map", [True, False])
def test_restores_on_any_mesh_and_names_damaged_leaf(tmp_path, kind, memory_map):
    state = states()[kind]
    flaxckpt.save(tmp_path / "c", state)
    for spec in (P("x"), P(None, "x"), P("y", "x")):
        wanted = placed(state, NamedSharding(mesh(2, 4), spec))
        found = flaxckpt.load(tmp_path / "c", wanted, memory_map=memory_map)
        jax.tree.map(np.testing.assert_array_equal, state, found)
    leaf = {"dict": "w", "named": "mu", "nnx": "kernel"}[kind]
    [file] = (tmp_path / "c/state/d/0.0").glob(f"{leaf}*")
    flip_bit(file, 3 * MIB + 17)
    with pytest.raises(errors.DamagedCheckpointError, match="changed since") as caught:
        flaxckpt.load(tmp_path / "c", wanted, memory_map=memory_map)
    assert f"{leaf}: c.0.0 has changed" in str(caught.value)


def manifest(path):
    return json.loads((path / "flaxckpt.json").read_text())


def test_manifest_contains_checksums_of_large_chunks(tmp_path):
    state = {"w": ramp(1024, 1024), "b": ramp(7), "n": 3}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):  # the second links the first's chunks
            ckpt.save(step, state).wait()
    files = [tmp_path / str(step) / "state/d/0.0/w" for step in (1, 2)]
    assert files[0].samefile(files[1])
    content = np.asarray(state["w"]).tobytes()
    wanted = [crc32c.crc32c(content[: n * SEGMENT]) for n in range(1, 64)]
    for step in (1, 2):
        found = manifest(tmp_path / str(step))["segments"]
        assert found["bytes"] == SEGMENT
        assert list(found["crc32c"]) == ["w"]
        recorded = base64.b64decode(found["crc32c"]["w"])
        assert np.frombuffer(recorded, "<u4").tolist() == wanted
    assert "segments" not in manifest(saved(tmp_path / "small", {"b": ramp(7)}))
    for name, layout in (
        ("zstd", flaxckpt.ArrayLayout(codec="zstd")),
        ("plain", flaxckpt.ArrayLayout(checksum=False)),
        ("zarr2", flaxckpt.ArrayLayout(zarr_version=2)),
    ):
        path = tmp_path / name
        flaxckpt.save(path, state, layout=layout)
        assert "segments" not in manifest(path)
        assert_same(state, flaxckpt.load(path))


def saved(path, state):
    flaxckpt.save(path, state)
    return path


def test_reads_whole_chunks_without_segment_checksums(tmp_path, monkeypatch):
    path = saved(tmp_path / "c", {"w": ramp(1024, 1024)})
    without = {name: row for name, row in manifest(path).items() if name != "segments"}
    old_stores.rewrite_manifest(path, without)
    wanted = placed({"w": ramp(1024, 1024)}, NamedSharding(mesh(8), P("x")))
    real, sizes = seams.current("disk.read_into"), []

    def read_into(file, views, /, **options):
        sizes.extend(view.nbytes for view in views)
        real(file, views, **options)

    seams.replace(monkeypatch, "disk.read_into", read_into)
    found = flaxckpt.load(path, wanted, memory_map=False)
    assert_same(np.asarray(found["w"]), np.asarray(ramp(1024, 1024)))
    assert sum(sizes) == 4 * MIB + 4  # once, although eight need a part


@pytest.mark.parametrize(
    "segments",
    [
        7,
        {"bytes": 3 * MIB, "crc32c": {}},
        {"bytes": 1, "crc32c": {}},
        {"bytes": True, "crc32c": {}},
        {"bytes": MIB, "crc32c": []},
        {"bytes": MIB, "crc32c": {"w": "AAAA"}},
        {"bytes": MIB, "crc32c": {"w": "*"}},
        {"bytes": MIB, "crc32c": {"w": 7}},
        {"bytes": MIB},
    ],
)
def test_malformed_checksums_count_as_damage(tmp_path, segments):
    path = saved(tmp_path / "c", {"w": ramp(1024, 1024)})
    old_stores.rewrite_manifest(path, manifest(path) | {"segments": segments})
    with pytest.raises(errors.DamagedCheckpointError, match="is not a manifest"):
        flaxckpt.load(path)


def test_stock_orbax_reads_chunks_with_segments(tmp_path):
    state = {"w": ramp(1024, 1024), "b": ramp(7)}
    with flaxckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).wait()
    assert "segments" in manifest(tmp_path / "1")
    found = orbax_readers.READERS["v0_standard"](tmp_path, 1, None)
    np.testing.assert_array_equal(found["w"], state["w"])
    assert flaxckpt.verify(tmp_path / "1").ok
