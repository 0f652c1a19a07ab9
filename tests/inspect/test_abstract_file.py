"""States that a restore is planned into, from checkpoints and files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt import errors
from flaxckpt._inspect import abstract_file as inspect_abstract_file
from flaxckpt.cli import _output, app

STATE = {
    "a": jnp.ones((2, 3), jnp.bfloat16),
    "b": [np.float32(1), 3, 0.5, True, 1j, "text", None, {}, [], ()],
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
    "with/slash": np.zeros((), np.int8),
}


def file_of(tmp_path, content):
    file = tmp_path / "wanted.json"
    file.write_text(json.dumps(content))
    return file


def test_checkpoint_fits_its_own_abstract_state(tmp_path):
    flaxckpt.save(tmp_path / "one", STATE)
    found = inspect_abstract_file.read_target(tmp_path / "one")
    assert jax.tree.structure(found.state) == jax.tree.structure(STATE)
    assert not found.has_roles
    assert not flaxckpt.plan(tmp_path / "one", found.state).problems
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(found.state))


def test_state_with_optimizer_keeps_its_classes(tmp_path):
    params = {"w": jnp.ones(3)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    flaxckpt.save(tmp_path / "run" / "1", state)
    found = inspect_abstract_file.read_target(tmp_path / "run", step=1)
    assert found.has_roles
    assert isinstance(found.state.opt_state[0], optax.ScaleByAdamState)
    other = state.replace(opt_state=optax.sgd(1.0).init(params))
    flaxckpt.save(tmp_path / "other", other)
    assert flaxckpt.plan(tmp_path / "other", found.state).problems


def test_show_output_describes_same_state(tmp_path):
    flaxckpt.save(tmp_path / "one", STATE)
    shown = flaxckpt.metadata(tmp_path / "one")
    file = tmp_path / "shown.json"
    content = {
        "format": "flaxckpt",
        "leaves": {path: _output.leaf(leaf) for path, leaf in shown.leaves.items()},
    }
    file.write_text(json.dumps(content))
    found = flaxckpt.plan(
        tmp_path / "one", inspect_abstract_file.read_target(file).state
    )
    assert not found.problems
    filled = {p for p, leaf in shown.leaves.items() if leaf.kind != "empty"}
    assert found.leaves.keys() == filled


def shown(path):
    printed = CliRunner().invoke(app, ["show", str(path), "--json"])
    return json.loads(printed.stdout)


def test_show_output_keeps_optimizer_classes(tmp_path):
    params = {"w": jnp.ones(3), "layers": [jnp.ones(2), jnp.ones(1)]}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    flaxckpt.save(tmp_path / "one", state)
    content = shown(tmp_path / "one")
    found = inspect_abstract_file.read_target(file_of(tmp_path, content))
    assert found.has_roles
    wanted = inspect_abstract_file.read_target(tmp_path / "one").state
    assert jax.tree.structure(found.state) == jax.tree.structure(wanted)
    assert isinstance(found.state.opt_state[0], optax.ScaleByAdamState)
    del content["structure"]  # as printed by flaxckpt 0.1.0
    old = inspect_abstract_file.read_target(file_of(tmp_path, content))
    assert not old.has_roles
    assert old.state["params"]["layers"].keys() == {"0", "1"}


@pytest.mark.parametrize(
    "structure",
    [3, None, ["dict", ["a"]], ["dict", ["a"], ["b"]], ["dict", ["a", "b"], ["a"]]],
)
def test_rejects_structure_not_matching_leaves(tmp_path, structure):
    content = {"format": "flaxckpt", "leaves": {"a": "int"}, "structure": structure}
    with pytest.raises(errors.OptionError, match="structure is not as flaxckpt show"):
        inspect_abstract_file.read_target(file_of(tmp_path, content))
    for _ in range(200):
        content["structure"] = ["dict", ["a"], [content["structure"]]]
    with pytest.raises(errors.OptionError, match="structure is not as"):
        inspect_abstract_file.read_target(file_of(tmp_path, content))


def test_parses_leaf_strings_in_nested_dicts(tmp_path):
    wanted = {"a": {"w": "float32[3, 4]", "n": "int"}, "b": ["int8[]", None, "str"]}
    state = inspect_abstract_file.read_target(file_of(tmp_path, wanted)).state
    assert state == {
        "a": {"w": jax.ShapeDtypeStruct((3, 4), jnp.float32), "n": 0},
        "b": [jax.ShapeDtypeStruct((), jnp.int8), None, ""],
    }
    [key] = inspect_abstract_file.read_target(
        file_of(tmp_path, ["threefry2x32 keys [2]"])
    ).state
    assert (key.shape, key.dtype) == ((2,), jax.random.key(0).dtype)


@pytest.mark.parametrize(
    "leaf",
    ["float33[2]", "float32", "float32[x]", "nonsense keys []", 3, True, "a[1][2]", ""],
)
def test_error_names_invalid_leaf(tmp_path, leaf):
    with pytest.raises(errors.OptionError, match=r"a/w must be a string such as"):
        inspect_abstract_file.read_target(file_of(tmp_path, {"a": {"w": leaf}}))


def test_rejects_invalid_json_file(tmp_path):
    file = tmp_path / "wanted.json"
    file.write_text("{")
    with pytest.raises(errors.OptionError, match="is not valid JSON"):
        inspect_abstract_file.read_target(file)
    file.write_text('{"a":' * 200 + "1" + "}" * 200)
    with pytest.raises(errors.OptionError, match="too deeply"):
        inspect_abstract_file.read_target(file)
    with pytest.raises(errors.CheckpointNotFoundError):
        inspect_abstract_file.read_target(tmp_path / "nowhere.json")
