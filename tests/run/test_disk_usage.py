"""How large a checkpoint is, in memory and on the disk."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt._run import disk_usage as run_disk_usage
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._state.tree import Key


def info(path, count):
    return LeafInfo(path, (), "array", "jax.Array", (count,), "float32")


names = st.sampled_from("abc")
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(paths, st.integers(0, 5), max_size=12))
def test_subtree_is_sum_of_its_leaves(counts):
    # No leaf can be a container, too.
    counts = {p: n for p, n in counts.items() if not _has_inner(p, counts)}
    trees = run_disk_usage.subtrees({path: info(path, n) for path, n in counts.items()})
    for tree in trees:
        inner = [n for p, n in counts.items() if _is_in(p, tree.path)]
        assert (tree.leaves, tree.bytes) == (len(inner), 4 * sum(inner))
        assert tree.depth == (tree.path.count("/") + 1 if tree.path else 0)
    found = [tree.path for tree in trees]
    assert len(found) == len(set(found))
    assert set(counts) == {tree.path for tree in trees if tree.info is not None}
    for path in found[1:]:
        assert found.index(path.rpartition("/")[0]) < found.index(path)


def _has_inner(path, others):
    return any(other.startswith(f"{path}/") for other in others)


def _is_in(path, container):
    return not container or path == container or path.startswith(f"{container}/")


def test_lists_requested_subtree_alone():
    leaves = {path: info(path, 1) for path in ("a/b/c", "a/b/d", "a/e")}
    found = run_disk_usage.subtrees(leaves, below="a/b")
    assert [(tree.path, tree.depth) for tree in found] == [
        ("a/b", 2),
        ("a/b/c", 3),
        ("a/b/d", 3),
    ]
    assert run_disk_usage.subtrees(leaves, below="b") == []


def test_single_leaf_state_is_one_row():
    [tree] = run_disk_usage.subtrees({"": info("", 3)})
    assert (tree.path, tree.leaves, tree.bytes) == ("", 1, 12)


@pytest.mark.parametrize(
    ("paths", "rows"),
    [
        (("", "b/"), [(1, "''", "", 1), (1, "b", "b", 1), (2, "''", "b/", 1)]),
        (
            ("/a", "b//c"),
            [
                (1, "''", "", 1),
                (2, "a", "/a", 1),
                (1, "b", "b", 1),
                (2, "''", "b/", 1),
                (3, "c", "b//c", 1),
            ],
        ),
    ],
    ids=["leaves", "containers"],
)
def test_empty_key_counts_as_key(paths, rows):
    keys = (Key("", "key"),)
    leaves = {path: dataclasses.replace(info(path, 1), keys=keys) for path in paths}
    trees = run_disk_usage.subtrees(leaves)
    found = [(tree.depth, tree.name, tree.path, tree.leaves) for tree in trees]
    assert found == [(0, "(all)", "", 2), *rows]


def test_shown_depth_fits_row_limit():
    leaves = {f"a/{i}/{j}": info("", 1) for i in range(10) for j in range(10)}
    trees = run_disk_usage.subtrees(leaves)
    assert len(run_disk_usage.shown(trees, depth=None, rows=200)) == 112
    assert len(run_disk_usage.shown(trees, depth=None, rows=50)) == 12
    assert len(run_disk_usage.shown(trees, depth=1, rows=50)) == 2
    assert len(run_disk_usage.shown(trees, depth=9, rows=50)) == 112
    # Two rows of a hundred would say next to nothing.
    wide = run_disk_usage.subtrees({f"a/{i}": info("", 1) for i in range(500)})
    assert len(run_disk_usage.shown(wide, depth=None, rows=100)) == 100


def test_counts_files_once_and_follows_no_links(tmp_path):
    (tmp_path / "one" / "inner").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "inner" / "a").write_bytes(b"12345")
    (tmp_path / "one" / "b").hardlink_to(tmp_path / "one" / "inner" / "a")
    (tmp_path / "two" / "c").hardlink_to(tmp_path / "one" / "b")
    (tmp_path / "two" / "d").write_bytes(b"123")
    (tmp_path / "two" / "e").symlink_to(tmp_path / "one")
    counted = set()
    assert run_disk_usage.on_disk(tmp_path / "one", counted) == (5, 5)
    assert run_disk_usage.on_disk(tmp_path / "two", counted) == (8, 3)
    assert run_disk_usage.on_disk(tmp_path / "two" / "d", set()) == (3, 3)
    assert run_disk_usage.on_disk(tmp_path / "gone", counted) == (0, 0)
