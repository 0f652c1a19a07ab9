"""States that a restore is planned into, from checkpoints and files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import flaxckpt
from tests.helpers import command_line

STATE = {
    "a": jnp.ones((2, 3), jnp.bfloat16),
    "b": [np.float32(1), 3, 0.5, True, 1j, "text", None, {}, [], ()],
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
    "with/slash": np.zeros((), np.int8),
}


@pytest.fixture
def plan(tmp_path):
    """Plans the restore of a checkpoint into a state, by default of a file."""
    flaxckpt.save(tmp_path / "one", STATE)

    def run(target, *options, path="one", code=0):
        if not isinstance(target, str):
            (tmp_path / "wanted.json").write_text(json.dumps(target))
            target = "wanted.json"
        options = (tmp_path / path, tmp_path / target, *options)
        return command_line.read_json("plan", *options, code=code)["leaves"]

    return run


@pytest.fixture
def refuse(tmp_path):
    """Returns the error of a plan into a state of a file with a text."""
    flaxckpt.save(tmp_path / "one", STATE)
    file = tmp_path / "wanted.json"

    def run(content):
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return command_line.run("plan", tmp_path / "one", file, code=2)

    return run


def wanted(leaves):
    infos = {path: leaf["wanted"] for path, leaf in leaves.items()}
    return {path: info["type"] for path, info in infos.items() if info is not None}


def show(path):
    return command_line.read_json("show", path)


def test_checkpoint_fits_its_own_abstract_state(plan):
    leaves = plan("one")
    assert len(leaves) == 10
    for leaf in leaves.values():
        assert leaf["actions"] == ["loaded"]
        for name in ("type", "python_type", "prng_impl"):
            assert leaf["wanted"][name] == leaf["found"][name]


def save_optimizers(tmp_path):
    """Saves a state with two optimizers: Adam alone, and behind another transform."""
    params = {"w": jnp.ones(3), "layers": [jnp.ones(2), jnp.ones(1)]}
    adam = optax.adam(1e-3)
    for name, tx in (("adam", adam), ("chain", optax.chain(optax.clip(1.0), adam))):
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        flaxckpt.save(tmp_path / name / "1", state)


MOMENT = "opt_state/0/mu/layers/0"


def test_state_with_optimizer_keeps_its_classes(tmp_path, plan):
    save_optimizers(tmp_path)
    found = plan("adam", "--target-step=1", path="chain")
    assert found[MOMENT]["sources"] == ["opt_state/1/0/mu/layers/0"]
    assert all("conflict" not in leaf["actions"] for leaf in found.values())


def test_show_output_describes_same_state(tmp_path, plan):
    found = plan(show(tmp_path / "one"))
    numpy_scalar = {"b/0": "float32[]"}
    assert wanted(found) == wanted(plan("one")) | numpy_scalar


def test_show_output_keeps_optimizer_classes(tmp_path, plan):
    save_optimizers(tmp_path)
    content = show(tmp_path / "adam")
    found = plan(content, path="chain")
    assert found == plan("adam", path="chain")
    assert "matched" in found[MOMENT]["actions"]
    del content["structure"]  # as printed by flaxckpt 0.1.0
    found = plan(content, path="chain", code=1)
    assert found[MOMENT]["actions"] == ["conflict"]
    assert plan(content, path="adam").keys() == plan("adam", path="adam").keys()


@pytest.mark.parametrize(
    "structure",
    [3, None, ["dict", ["a"]], ["dict", ["a"], ["b"]], ["dict", ["a", "b"], ["a"]]],
)
def test_rejects_structure_not_matching_leaves(refuse, structure):
    content = {"format": "flaxckpt", "leaves": {"a": "int"}, "structure": structure}
    wanted = "structure is not as flaxckpt show"
    assert wanted in " ".join(refuse(content).split())
    for _ in range(200):
        content["structure"] = ["dict", ["a"], [content["structure"]]]
    assert wanted in " ".join(refuse(content).split())


def test_parses_leaf_strings_in_nested_dicts(plan):
    content = {"a": {"w": "float32[3, 4]", "n": "int"}, "b": ["int8[]", None, "str"]}
    assert wanted(plan(content, code=1)) == {
        "a/w": "float32[3, 4]",
        "a/n": "a Python int",
        "b/0": "int8[]",
        "b/2": "a str",
    }
    [key] = wanted(plan(["threefry2x32 keys [2]"], code=1)).values()
    assert key == "threefry2x32 keys [2]"


@pytest.mark.parametrize(
    "leaf",
    ["float33[2]", "float32", "float32[x]", "nonsense keys []", 3, True, "a[1][2]", ""],
)
def test_error_names_invalid_leaf(refuse, leaf):
    assert "a/w must be a string such as" in refuse({"a": {"w": leaf}})


def test_rejects_invalid_json_file(tmp_path, refuse):
    assert "is not valid JSON" in refuse("{")
    assert "too deeply" in refuse('{"a":' * 200 + "1" + "}" * 200)
    assert "nowhere.json: the path does not exist" in command_line.run(
        "plan", tmp_path / "one", tmp_path / "nowhere.json", code=2
    )
