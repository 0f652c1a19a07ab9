"""A plan names the transforms that made each leaf, so that a missing one shows."""

import json

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from flax import nnx
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import errors
from flaxckpt.cli import app
from flaxckpt.transforms import cast, copy, drop, map_leaf, rename, stack, transpose

LAYERS = {f"h{i}": {"w": np.full((4, 4), i, np.float32)} for i in range(3)}
STACKED = {"layers": {"kernel": np.zeros((3, 4, 4), np.float32)}}


def as_train_state(params):
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def as_frozen_dict(params):
    return {"params": flax.core.freeze(params)}


def as_nnx_state(params):
    variables = jax.tree.map(lambda value: nnx.Param(jnp.asarray(value)), params)
    return {"params": nnx.State(variables)}


def chains(plan):
    """Returns leaf path -> the transforms, of leaves with any."""
    return {
        path: " > ".join(leaf.transforms)
        for path, leaf in plan.leaves.items()
        if leaf.transforms
    }


@pytest.mark.parametrize("kind", [as_train_state, as_frozen_dict, as_nnx_state])
def test_moments_share_ordered_chains_of_their_parameters(kind, tmp_path):
    flaxckpt.save(tmp_path / "c", kind(LAYERS))
    names = rename(r"params/(h\d+)/w", r"params/\1/kernel")
    turned = transpose(r"params/h\d+/kernel", axes=(1, 0))
    joined = stack(r"params/h(\d+)/(.*)", r"params/layers/\2")
    changes = [names, turned, joined]
    plan = flaxckpt.plan(tmp_path / "c", kind(STACKED), transforms=changes)
    found = chains(plan)
    assert found["params/layers/kernel"] == "rename > transpose > stack"
    moments = [path for path in plan.leaves if "/mu/" in path or "/nu/" in path]
    assert len(moments) == (2 if kind is as_train_state else 0)
    assert set(found) == {"params/layers/kernel", *moments}
    assert set(found.values()) == {"rename > transpose > stack"}


def test_plan_reveals_forgotten_transpose(tmp_path):
    flaxckpt.save(tmp_path / "c", {"params": LAYERS})
    changes = [
        transpose(r"params/h[12]/w", axes=(1, 0)),  # h0 is forgotten
        stack(r"params/h(\d+)/w", "params/layers/kernel"),
    ]
    plan = flaxckpt.plan(tmp_path / "c", {"params": STACKED}, transforms=changes)
    [leaf] = plan.leaves.values()
    assert leaf.transforms == ("(none | transpose)", "stack")
    header, row = str(plan).splitlines()[1:]
    assert header.split()[-1] == "transforms"
    assert row.endswith("  (none | transpose) > stack")
    assert "'(none | transpose)', 'stack'" in repr(plan)


def test_unrestorable_leaves_have_chains(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": np.zeros((2, 3)), "b": np.zeros(3)})
    changes = [rename("(.*)", r"params/\1")]
    wanted = {"params": {"a": np.zeros((3, 2))}}
    plan = flaxckpt.plan(tmp_path / "c", wanted, transforms=changes)
    assert plan.leaves["params/a"].actions == ("conflict",)
    assert plan.leaves["params/b"].actions == ("dropped",)
    assert set(chains(plan).values()) == {"rename"}
    with pytest.raises(errors.RestoreMismatchError, match=r"\[2, 3\] after rename\n"):
        flaxckpt.load(tmp_path / "c", wanted, transforms=changes)


def test_chain_names_only_transforms_changing_leaf(tmp_path):
    def double(table):
        return map_leaf("x", lambda value: 2 * value)(table)

    tree = {"x": np.ones(2, np.float32), "count": np.int32(3), "old": np.ones(2)}
    flaxckpt.save(tmp_path / "c", tree)
    changes = [drop("old"), cast(".*", "bfloat16"), copy("x", "y"), double]
    wanted = {"x": jnp.ones(2, "bfloat16"), "y": jnp.ones(2), "count": np.int32(0)}
    plan = flaxckpt.plan(tmp_path / "c", wanted, transforms=changes)
    assert chains(plan) == {"x": "cast > double", "y": "cast > copy"}


def test_json_contains_chains_only_with_transforms(tmp_path):
    tree = {"x": np.ones(2, np.float32)}
    flaxckpt.save(tmp_path / "c", tree)
    flaxckpt.save(tmp_path / "d", {"y": np.ones(2, np.float32)})
    for target, changes, wanted in (
        ("c", [], []),
        ("d", ["--rename", "x=y"], ["rename"]),
    ):
        command = ["plan", str(tmp_path / "c"), str(tmp_path / target), *changes]
        [leaf] = json.loads(run(*command, "--json"))["leaves"].values()
        assert leaf["transforms"] == wanted
        assert ("transforms" in run(*command)) == bool(changes)


def run(*command):
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout
