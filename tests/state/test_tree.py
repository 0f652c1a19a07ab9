"""Pytrees become named leaves and come back as they were."""

import collections
import functools
import json

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors
from tests.helpers import old_stores

Point = collections.namedtuple("Point", "x y")


def leaf_paths(tree):
    infos = jax.tree.leaves(
        flaxckpt.parameter_infos(tree),
        is_leaf=lambda leaf: isinstance(leaf, flaxckpt.LeafInfo),
    )
    return [info.path for info in infos]


def nested(names):
    return functools.reduce(lambda tree, name: {name: tree}, reversed(names), 1)


NAMES = st.lists(st.text(max_size=9), min_size=1, max_size=9)


@hypothesis.given(NAMES, NAMES)
def test_different_keys_have_different_leaf_paths(one, other):
    [path], [other_path] = leaf_paths(nested(one)), leaf_paths(nested(other))
    assert (path == other_path) == (one == other)


def test_leaf_paths_name_keys_fields_and_indices(tmp_path):
    tree = {"a": [Point(1, {"b/c": 2, "50%": 3})], "b": {7: None}, "empty": {}}
    paths = {"a/0/x", "a/0/y/b%2Fc", "a/0/y/50%25"}
    assert {*leaf_paths(tree)} == paths
    flaxckpt.save(tmp_path / "c", tree)
    leaves = flaxckpt.metadata(tmp_path / "c").leaves
    assert leaves.keys() - paths == {"b/7", "empty"}
    assert leaves["b/7"].kind == leaves["empty"].kind == "empty"


def test_bare_leaf_has_empty_path(tmp_path):
    flaxckpt.save(tmp_path / "c", 3)
    assert [*flaxckpt.metadata(tmp_path / "c").leaves] == [""]
    assert flaxckpt.load(tmp_path / "c") == flaxckpt.load(tmp_path / "c", 4) == 3


def test_load_keeps_dict_order(tmp_path):
    flaxckpt.save(tmp_path / "c", {"b": 1, "a": {"z": 2, "y": 3}})
    found = flaxckpt.load(tmp_path / "c")
    assert list(found) == ["b", "a"]
    assert list(found["a"]) == ["z", "y"]


@pytest.mark.parametrize(
    "tree",
    [
        {1: 0, "1": 0},
        {("a", 1): 0, "('a', 1)": 0},
        {(1, True): 0},
        {(1, (2, 3)): 0},
        {(1, 2**63): 0},
        {True: 0},
        {"a": {1.5: 0}},
    ],
)
def test_rejects_keys_indistinguishable_on_disk(tree):
    with pytest.raises(errors.LeafNameError):
        flaxckpt.parameter_infos(tree)


def test_reports_unknown_class_and_replaces_it_by_dict(tmp_path, caplog):
    state = {"p": Point(1, 2), "q": jax.tree_util.Partial(sum, 3)}
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c")
    assert found["p"] == {"x": 1, "y": 2}
    assert found["q"] in ([[3], {}], [(3,), {}])
    assert f"jax.tree_util:Partial, {__name__}:Point" in caplog.text


@pytest.mark.parametrize(
    "structure",
    [
        3,
        None,
        [],
        ["dict"],
        ["dict", ["a"], []],
        ["dict", "ab", ["a", "b"]],
        ["dict", [1.5], ["a"]],
        ["dict", [["a", 1.5]], ["a"]],
        ["dict", [[["a"]]], ["a"]],
        ["dict", ["a"], ["a"], []],
        ["dict", ["a"], ["a"], {}, {}],
        [3, ["a"], ["a"]],
        functools.reduce(lambda inner, _: ["list", [0], [inner]], range(66), "a"),
    ],
)
def test_load_rejects_malformed_structures(tmp_path, structure):
    flaxckpt.save(tmp_path / "c", {"a": 1})
    manifest = json.loads((tmp_path / "c/flaxckpt.json").read_text())
    manifest["structure"] = structure
    old_stores.rewrite_manifest(tmp_path / "c", manifest)
    with pytest.raises(errors.DamagedCheckpointError, match=r"flaxckpt\.json"):
        flaxckpt.load(tmp_path / "c")
