"""How large a checkpoint is, in memory and on the disk."""

import numpy as np
import pytest
from flax import serialization, traverse_util
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from tests.helpers import command_line


def state_of(counts):
    """Returns arrays of so many float32 values at their paths."""
    arrays = {path: np.zeros(count, np.float32) for path, count in counts.items()}
    return traverse_util.unflatten_dict(arrays, sep="/")


def write(file, counts):
    """Writes such arrays to a file; returns it."""
    file.write_bytes(serialization.to_bytes(state_of(counts)))
    return file


def subtrees(path):
    return command_line.read_json("du", path, "--depth=9")["subtrees"]


def show(*arguments):
    """Returns the rows of the table of leaves."""
    _, _, table = command_line.run("show", *arguments).partition("\nleaf ")
    return [row for row in table.splitlines()[1:] if not row.startswith("…")]


names = st.sampled_from(["a", "b", "a0", "a1", "a01", "a10"])
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(paths, st.integers(0, 5), min_size=1, max_size=12))
def test_subtree_is_sum_of_its_leaves(tmp_path_factory, counts):
    # No leaf can be a container, too.
    counts = {p: n for p, n in counts.items() if not _has_inner(p, counts)}
    trees = subtrees(write(tmp_path_factory.mktemp("du") / "c.msgpack", counts))
    for tree in trees:
        path = tree["path"]
        inner = [n for p, n in counts.items() if _is_in(p, path)]
        assert (tree["leaves"], tree["bytes"]) == (len(inner), 4 * sum(inner))
        assert tree["depth"] == (path.count("/") + 1 if path else 0)
    found = [tree["path"] for tree in trees]
    assert len(found) == len(set(found))
    assert set(counts) == {tree["path"] for tree in trees if tree["info"] is not None}
    for path in found[1:]:
        assert found.index(path.rpartition("/")[0]) < found.index(path)


def _has_inner(path, others):
    return any(other.startswith(f"{path}/") for other in others)


def _is_in(path, container):
    return not container or path == container or path.startswith(f"{container}/")


def test_lists_requested_subtree_alone(tmp_path):
    file = write(tmp_path / "c.msgpack", {"a/b/c": 1, "a/b/d": 1, "a/e": 1})
    found = command_line.read_json("show", file, "a/b")
    assert [(tree["path"], tree["depth"]) for tree in found] == [
        ("a/b", 2),
        ("a/b/c", 3),
        ("a/b/d", 3),
    ]
    assert "neither a leaf nor a container b" in command_line.run(
        "show", file, "b", code=2
    )


def test_single_leaf_state_is_one_row(tmp_path):
    flaxckpt.save(tmp_path / "c", np.zeros(3, np.float32))
    [tree] = subtrees(tmp_path / "c")
    assert (tree["path"], tree["leaves"], tree["bytes"]) == ("", 1, 12)


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
def test_empty_key_counts_as_key(tmp_path, paths, rows):
    file = tmp_path / "c"
    flaxckpt.save(file, state_of(dict.fromkeys(paths, 1)))
    rows = [(0, "(all)", "", 2), *rows]
    found = [(tree["depth"], tree["path"], tree["leaves"]) for tree in subtrees(file)]
    assert found == [(depth, path, leaves) for depth, _, path, leaves in rows]
    assert [row.split()[0] for row in show(file)] == [name for _, name, _, _ in rows]


def test_shown_depth_fits_row_limit(tmp_path):
    """A table shows about a hundred rows unless it is asked for a depth."""

    def count(outer, inner, *options):
        counts = {f"a/{i}/{j}": 1 for i in range(outer) for j in range(inner)}
        return len(show(write(tmp_path / "c.msgpack", counts), *options))

    assert count(9, 9) == 2 + 9 + 81
    assert count(25, 5) == 2 + 25
    assert count(25, 5, "--depth=1") == 2
    assert count(25, 5, "--depth=9") == 2 + 25 + 125
    # Two rows of a hundred would say next to nothing.
    assert count(100, 1) == 100


def test_counts_files_once_and_follows_no_links(tmp_path):
    def du():
        found = command_line.read_json("du", tmp_path)["steps"]
        return [(step["bytes"], step["own"]) for step in found]

    with flaxckpt.Checkpointer(tmp_path) as run:
        for step in (1, 2):
            run.save(step, {"w": np.full(9, step)})
    [(one, own_one), (two, own_two)] = du()
    first, second = tmp_path / "1", tmp_path / "2"
    (first / "inner").mkdir()
    (first / "inner" / "a").write_bytes(b"12345")
    (first / "b").hardlink_to(first / "inner" / "a")
    (second / "c").hardlink_to(first / "b")
    (second / "d").write_bytes(b"123")
    (second / "e").symlink_to(first)
    assert du() == [(one + 5, own_one + 5), (two + 8, own_two + 3)]
