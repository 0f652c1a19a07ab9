"""Rows of a table of leaves that differ only in numbers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt._util import folding
from flaxckpt._util.folding import LeafLine


def folded(*names):
    return [
        (row.name, row.leaves) for row in folding.fold(LeafLine(name) for name in names)
    ]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a/b"], [("a/b", 1)]),
        (["a/b", "c"], [("a/b", 1), ("c", 1)]),
        ([f"layers_{n}/w" for n in range(12)], [("layers_{0..11}/w", 12)]),
        (["l_0/w", "x", "l_1/w"], [("l_{0,1}/w", 2), ("x", 1)]),
        (["l0", "l2", "l3", "l4", "l9"], [("l{0,2..4,9}", 5)]),
        (["l08", "l09", "l10"], [("l{08..10}", 3)]),
        (["l0", "l00", "l1"], [("l{0,00,1}", 3)]),
        (
            [f"l{i}/e{k}/w" for i in range(3) for k in range(4)],
            [("l{0..2}/e{0..3}/w", 12)],
        ),
        (["l0/e0", "l0/e1", "l1/e0"], [("l0/e{0,1}", 2), ("l1/e0", 1)]),
        ([""], [("", 1)]),
    ],
)
def test_folds_names_differing_only_in_numbers(names, shown):
    assert folded(*names) == shown


def test_keeps_rows_with_different_cells_apart():
    rows = [LeafLine(f"w{n}", ("a" if n < 3 else "b",)) for n in range(5)]
    assert folding.fold(rows) == [
        LeafLine("w{0..2}", ("a",), leaves=3),
        LeafLine("w{3,4}", ("b",), leaves=2),
    ]


def test_folds_sources_only_with_numbers_of_names():
    rows = [LeafLine(f"opt/0/l_{n}/w", source=f"model.{n}.w") for n in range(3)]
    [row] = folding.fold(rows)
    assert (row.name, row.source) == ("opt/0/l_{0..2}/w", "model.{0..2}.w")
    shifted = [LeafLine(f"l_{n}/w", source=f"model.{n + 1}.w") for n in range(3)]
    assert len(folding.fold(shifted)) == 3


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), unique=True, min_size=1)
)
def test_folded_rows_stand_for_exactly_their_rows(numbers):
    rows = folding.fold(LeafLine(f"a{i}/b{k}") for i, k in numbers)
    expanded = [
        f"a{i}/b{k}"
        for row in rows
        for i, k in itertools.product(*map(_expand, row.name[1:].split("/b")))
    ]
    assert sorted(expanded) == sorted(f"a{i}/b{k}" for i, k in numbers)
    assert sum(row.leaves for row in rows) == len(numbers)


def _expand(text):
    for part in text.strip("{}").split(","):
        first, _, last = part.partition("..")
        yield from range(int(first), int(last or first) + 1)


def test_orders_numbers_in_names_sorted_as_text():
    text = ["bias", "layers_0", "layers_1", "layers_10", "layers_2", "w"]
    numbers = ["bias", "layers_0", "layers_1", "layers_2", "layers_10", "w"]
    assert folding.order_numbers(text) == numbers
    assert folding.order_numbers(["step", "params"]) == ["step", "params"]
    assert folding.order_numbers([]) == []


@given(st.lists(st.text("a01/", max_size=6), unique=True))
def test_order_numbers_keeps_all_names(names):
    assert sorted(folding.order_numbers(sorted(names))) == sorted(names)
