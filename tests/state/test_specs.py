"""Partition specs are kept as tuples, and are those of jax when asked for."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors
from tests.helpers import old_stores

PARTS = [[], ["data"], [None, "model"], [["data", "model"], None], [["data"]], [[]]]


def save_with_spec(path, parts):
    """Saves a checkpoint whose manifest has `parts` as the spec of the leaf `w`."""
    flaxckpt.save(path, {"w": jnp.ones((4, 4))})
    manifest = json.loads((path / "flaxckpt.json").read_bytes())
    manifest["leaves"][0]["spec"] = parts
    old_stores.rewrite_manifest(path, manifest)


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_reads_partition_spec_from_file(tmp_path, parts):
    save_with_spec(tmp_path / "c", parts)
    info = flaxckpt.metadata(tmp_path / "c").leaves["w"]
    spec = PartitionSpec(
        *(tuple(part) if isinstance(part, list) else part for part in parts)
    )
    assert info.mesh_axes == tuple(spec)
    assert info.spec == spec


@pytest.mark.parametrize("part", [{"a": 1}, [["a"]], [{"a": 1}]], ids=str)
def test_rejects_invalid_spec_parts(tmp_path, part):
    save_with_spec(tmp_path / "c", [part])
    with pytest.raises(errors.DamagedCheckpointError, match="part of a partition spec"):
        flaxckpt.metadata(tmp_path / "c")


def test_metadata_returns_spec_of_each_leaf(tmp_path):
    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"))
    specs = {
        "two": PartitionSpec(("data", "model"), None),
        "one": PartitionSpec(("data",)),
        "none": PartitionSpec(),
    }
    state = {
        name: jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    flaxckpt.save(tmp_path / "c", {**state, "alone": jnp.ones(2)})
    found = flaxckpt.metadata(tmp_path / "c").leaves
    assert {name: found[name].spec for name in specs} == specs
    assert found["alone"].spec is None
