"""Pytrees become named leaves and come back as they were."""

import collections
import json

import hypothesis
import jax
import pytest
from hypothesis import strategies as st

from flaxckpt import errors
from flaxckpt._state import classes as state_classes
from flaxckpt._state import flatten as state_flatten
from flaxckpt._state import tree as state_tree
from flaxckpt._state import treedef as state_treedef
from tests.helpers import strategies

Point = collections.namedtuple("Point", "x y")


def values(flat):
    return {path: entry.value for path, entry in flat.leaves.items()}


@hypothesis.given(strategies.trees)
def test_unflatten_rebuilds_tree_from_leaves(tree):
    hypothesis.assume(is_nameable(tree))
    flat = state_flatten.flatten(tree)
    strategies.assert_same(tree, state_tree.unflatten(flat.structure, values(flat)))


@hypothesis.given(strategies.trees)
def test_tree_description_round_trips_through_json(tree):
    hypothesis.assume(is_nameable(tree))
    flat = state_flatten.flatten(tree)
    written = json.loads(json.dumps(state_treedef.to_json(flat.structure)))
    unknown = set()
    structure = state_treedef.from_json(written, state_classes.resolve, unknown)
    assert not unknown
    strategies.assert_same(tree, state_tree.unflatten(structure, values(flat)))
    assert [path for path, _ in state_tree.key_paths(structure)] == list(flat.leaves)


def is_nameable(tree):
    try:
        state_flatten.flatten(tree)
    except errors.LeafNameError:
        return False
    return True


@hypothesis.given(st.lists(st.text(), min_size=1), st.lists(st.text(), min_size=1))
def test_different_keys_have_different_leaf_paths(one, other):
    path, other_path = (
        state_tree.join([state_tree.Key(name, "key") for name in names])
        for names in (one, other)
    )
    assert (path == other_path) == (one == other)


def test_leaf_paths_name_keys_fields_and_indices():
    tree = {"a": [Point(1, {"b/c": 2, "50%": 3})], 7: None, "empty": {}}
    flat = state_flatten.flatten(tree)
    assert list(flat.leaves) == ["a/0/x", "a/0/y/b%2Fc", "a/0/y/50%25", "7", "empty"]
    assert [path for path, e in flat.leaves.items() if e.is_empty] == ["7", "empty"]


def test_bare_leaf_has_empty_path():
    flat = state_flatten.flatten(3)
    assert list(flat.leaves) == [""]
    assert state_tree.unflatten(flat.structure, {"": 4}) == 4


def test_unflatten_keeps_dict_order():
    tree = {"b": 1, "a": {"z": 2, "y": 3}}
    flat = state_flatten.flatten(tree)
    rebuilt = state_tree.unflatten(flat.structure, values(flat))
    assert list(rebuilt) == ["b", "a"]
    assert list(rebuilt["a"]) == ["z", "y"]


@pytest.mark.parametrize(
    "tree", [{1: 0, "1": 0}, {(1, 2): 0}, {True: 0}, {"a": {1.5: 0}}]
)
def test_flatten_rejects_keys_indistinguishable_on_disk(tree):
    with pytest.raises(errors.LeafNameError):
        state_flatten.flatten(tree)


def test_flatten_rejects_trees_nested_too_deep():
    tree = 1
    for _ in range(state_tree.MAX_DEPTH):
        tree = {"a": tree}
    with pytest.raises(errors.LeafNameError, match="deep"):
        state_flatten.flatten(tree)


def test_reports_unknown_class_and_replaces_it_by_dict():
    flat = state_flatten.flatten({"p": Point(1, 2), "q": jax.tree_util.Partial(sum, 3)})
    unknown = set()
    structure = state_treedef.from_json(
        state_treedef.to_json(flat.structure), lambda name: None, unknown
    )
    rebuilt = state_tree.unflatten(structure, values(flat))
    assert rebuilt == {"p": {"x": 1, "y": 2}, "q": [[3], {}]} or rebuilt == {
        "p": {"x": 1, "y": 2},
        "q": [(3,), {}],
    }
    assert unknown == {f"{__name__}:Point", "jax.tree_util:Partial"}


@pytest.mark.parametrize(
    "description",
    [
        3,
        None,
        [],
        ["dict"],
        ["dict", ["a"], []],
        ["dict", "ab", ["a", "b"]],
        ["dict", [1.5], ["a"]],
        ["dict", ["a"], ["a"], []],
        ["dict", ["a"], ["a"], {}, {}],
        [3, ["a"], ["a"]],
    ],
)
def test_from_json_rejects_malformed_descriptions(description):
    with pytest.raises(ValueError, match=r"."):
        state_treedef.from_json(description, state_classes.resolve, set())


def test_from_json_rejects_descriptions_nested_too_deep():
    description = "leaf"
    for _ in range(state_tree.MAX_DEPTH + 2):
        description = ["list", [0], [description]]
    with pytest.raises(ValueError, match="nested"):
        state_treedef.from_json(description, state_classes.resolve, set())
