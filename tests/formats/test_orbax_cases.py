"""Checkpoints of Orbax that lack files: Orbax and flaxckpt read the same ones."""

import tarfile

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import flaxckpt
from flaxckpt import errors
from tests import GOLDEN
from tests.golden import make_orbax_cases as cases

ocp = pytest.importorskip("orbax.checkpoint")

from orbax.checkpoint import v1  # noqa: E402

# Orbax warns whenever an array is read without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

[ARCHIVE] = GOLDEN.glob("compatibility-*.tar.xz")
STATE = cases.state()

MORE = {"v1-items/no-step-metadata": "the tree is whole, and handlers are not needed"}
"""Cases that only flaxckpt reads, and the reason."""

ONLY_INTO_A_TARGET = {
    f"{kind}/{name}": "Orbax 0 takes the structure from the target; flaxckpt restores"
    " only leaves that the checkpoint describes"
    for kind in ("v0-flat", "v0-items")
    for name in ("no-tree-metadata", "no-metadata")
}
"""Cases that only Orbax's older interface reads, and the reason."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("cases")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root


def abstract_state():
    sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), STATE
    )


def read_by_orbax(path):
    """Returns the states that Orbax loads, with and without a target."""
    states = []
    for target in ((), (abstract_state(),)):
        try:
            states.append(v1.load(path, *target))
        except Exception:  # one of many classes
            continue
    return states


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for left, right in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def test_lists_all_orbax_cases():
    assert len(cases.NAMES) == len(set(cases.NAMES)) == 44
    assert (set(MORE) | set(ONLY_INTO_A_TARGET)) <= set(cases.NAMES)


@pytest.mark.parametrize("name", cases.NAMES)
def test_flaxckpt_reads_a_case_like_orbax(root, name):
    path = root / name
    states = read_by_orbax(path)
    if not states and name not in MORE:
        for args in ((), (abstract_state(),)):
            with pytest.raises(errors.DamagedCheckpointError) as info:
                flaxckpt.load(path, *args)
            assert len(str(info.value).splitlines()) < 15
        assert not flaxckpt.verify(path).ok
        return
    assert bool(states) is (name not in MORE)
    for found in (*states, flaxckpt.load(path), flaxckpt.load(path, abstract_state())):
        assert_same(found, STATE)
    assert flaxckpt.verify(path).ok
    metadata = flaxckpt.metadata(path)
    has_fields = "no-step-metadata" not in name and "no-custom" not in name
    assert metadata.custom == (cases.CUSTOM if has_fields else {})
    assert metadata.json == ({} if "flat" in name else {"metadata": cases.CONFIG})


@pytest.mark.parametrize("name", ["v0-items/whole", "v1-items/whole"])
def test_orbax_reads_the_same_json(root, name):
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, checkpointable_name="metadata")
    context = v1.Context()
    context.checkpointables.registry = registry
    with context:
        found = v1.load_checkpointables(root / name)
    assert found["metadata"] == flaxckpt.metadata(root / name).json["metadata"]


@pytest.mark.parametrize("name", ONLY_INTO_A_TARGET)
def test_older_interface_reads_undescribed_items_into_a_target(root, name):
    item = root / name if "flat" in name else root / name / "state"
    found = ocp.PyTreeCheckpointer().restore(item, item=abstract_state())
    assert_same(found, STATE)
