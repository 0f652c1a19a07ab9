"""Rows of a plan that differ only in numbers are one row."""

import itertools
import re

import numpy as np
import pytest
from flax import serialization, traverse_util
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt.transforms import rename
from tests.helpers import command_line

ROW = re.compile(r"^(\S+) +(?:(\d+) +)?(?:missing|conflict|renamed) +(.*)$", re.M)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A checkpoint with none of the leaves that a test wants."""
    file = tmp_path_factory.mktemp("folding") / "c.msgpack"
    file.write_bytes(serialization.to_bytes({"other": np.zeros(9)}))
    return file


def state_of(sizes):
    """Returns arrays of these sizes at their paths."""
    arrays = {path: np.zeros(size) for path, size in sizes.items()}
    return traverse_util.unflatten_dict(arrays, sep="/")


def plan(path, sizes, **options):
    """Returns the rows of a plan: the name, the number of leaves, and the rest."""
    text = str(flaxckpt.plan(path, state_of(sizes), **options))
    return [(name, int(count or 1), rest) for name, count, rest in ROW.findall(text)]


def folded(path, *names):
    return [row[:2] for row in plan(path, dict.fromkeys(names, 1))]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a/b"], [("a/b", 1)]),
        (["a/b", "c"], [("a/b", 1), ("c", 1)]),
        ([f"layers_{n}/w" for n in range(12)], [("layers_{0..11}/w", 12)]),
        (["l_0/w", "l_0x", "l_1/w"], [("l_{0,1}/w", 2), ("l_0x", 1)]),
        (["l0", "l2", "l3", "l4", "l9"], [("l{0,2..4,9}", 5)]),
        (["l08", "l09", "l10"], [("l{08..10}", 3)]),
        (["l0", "l00", "l1"], [("l{0,00,1}", 3)]),
        (
            [f"l{i}/e{k}/w" for i in range(3) for k in range(4)],
            [("l{0..2}/e{0..3}/w", 12)],
        ),
        (["l0/e0", "l0/e1", "l1/e0"], [("l0/e{0,1}", 2), ("l1/e0", 1)]),
    ],
)
def test_folds_names_differing_only_in_numbers(empty, names, shown):
    assert folded(empty, *names) == shown


def test_keeps_rows_with_different_cells_apart(empty):
    rows = plan(empty, {f"w{n}": 1 if n < 3 else 2 for n in range(5)})
    assert [(name, count, rest.split()[0]) for name, count, rest in rows] == [
        ("w{0..2}", 3, "float64[1]"),
        ("w{3,4}", 2, "float64[2]"),
    ]


@pytest.mark.parametrize(
    ("first", "rows"),
    [
        (0, [("opt/0/l_{0..2}/w", 3, "from model/{0..2}/w")]),
        (1, [(f"opt/0/l_{n}/w", 1, f"from model/{n + 1}/w") for n in range(3)]),
    ],
)
def test_folds_sources_only_with_numbers_of_names(tmp_path, first, rows):
    stored = {f"model/{n + first}/w": 1 for n in range(3)}
    (tmp_path / "c.msgpack").write_bytes(serialization.to_bytes(state_of(stored)))
    wanted = {f"opt/0/l_{n}/w": 1 for n in range(3)}
    names = {f"model/{n + first}/w": f"opt/0/l_{n}/w" for n in range(3)}
    found = plan(tmp_path / "c.msgpack", wanted, transforms=[rename(names)])
    sources = [(name, n, re.split(" {2,}", rest)[1]) for name, n, rest in found]
    assert sources == rows


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), unique=True, min_size=1)
)
def test_folded_rows_stand_for_exactly_their_rows(empty, numbers):
    rows = folded(empty, *(f"a{i}/b{k}" for i, k in numbers))
    expanded = [
        f"a{i}/b{k}"
        for name, _ in rows
        for i, k in itertools.product(*map(_expand, name[1:].split("/b")))
    ]
    assert sorted(expanded) == sorted(f"a{i}/b{k}" for i, k in numbers)
    assert sum(count for _, count in rows) == len(numbers)


def _expand(text):
    for part in text.strip("{}").split(","):
        first, _, last = part.partition("..")
        yield from range(int(first), int(last or first) + 1)


def test_orders_numbers_in_names_sorted_as_text(tmp_path):
    names = ["bias", "layers_0", "layers_1", "layers_2", "layers_10", "w"]
    file = tmp_path / "c.msgpack"
    file.write_bytes(serialization.to_bytes(state_of(dict.fromkeys(names, 1))))
    trees = command_line.read_json("du", file)["subtrees"]
    assert [tree["path"] for tree in trees[1:]] == names
