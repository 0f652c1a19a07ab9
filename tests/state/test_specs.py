"""Partition specs are kept as tuples, and are those of jax when asked for."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt._formats import orbax_files

PARTS = [
    [],
    ["data"],
    [None, "model"],
    [["data", "model"], None],
    [["data"]],
    [[]],
]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_parts_of_files_are_those_of_a_spec(parts):
    found = tuple(map(orbax_files.parse_mesh_axes, parts))
    spec = PartitionSpec(
        *(tuple(part) if isinstance(part, list) else part for part in parts)
    )
    assert found == tuple(spec)
    assert PartitionSpec(*found) == spec


@pytest.mark.parametrize("part", [{"a": 1}, [["a"]], [{"a": 1}]], ids=str)
def test_other_parts_are_refused(part):
    with pytest.raises(ValueError, match="part of a partition spec"):
        orbax_files.parse_mesh_axes(part)


def test_the_spec_of_a_leaf_comes_back(tmp_path):
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
