"""Columns of tables fit a terminal, and none of their text is lost."""

from hypothesis import given
from hypothesis import strategies as st

from flaxckpt._util import columns

words = st.text("ab/", min_size=0, max_size=30)
cells = st.lists(words, max_size=3).map(" ".join)


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1)
    ),
    st.integers(1, 120),
    st.data(),
)
def test_columns_fit_their_text_if_space_permits(rows, width, data):
    numbers = range(len(rows[0]))
    whole = data.draw(st.sets(st.sampled_from(numbers)))
    longest = [max(len(row[n]) for row in rows) for n in numbers]
    widths = columns.fit_widths(rows, width, whole)
    assert all(given <= most for given, most in zip(widths, longest, strict=True))
    assert all(widths[n] == longest[n] for n in whole)
    if sum(longest) <= width:
        assert widths == longest
    least = columns.fit_widths(rows, 0, whole)
    assert sum(widths) <= max(width, sum(least))


def test_keeps_dtypes_whole_before_long_paths():
    rows = [["a/long/path/of/a/leaf", "float32[16, 64] here"]]
    assert columns.fit_widths(rows, 30) == [15, 15]
    assert columns.fit_widths(rows, 38) == [21, 17]


def test_breaks_words_only_after_slashes_and_underscores():
    name = "transformer_encoder_layer_{0..2}/self_attention"
    rows = [[name, "a configuration"]]
    widths = columns.fit_widths(rows, 0)
    assert widths == [12, len("configuration")]
    assert columns.break_paths(name, 26).split("\n") == [
        "transformer_encoder_layer_",
        "{0..2}/self_attention",
    ]
    assert columns.break_paths(f"  {name}", 14).split("\n") == [
        "  transformer_",
        "  encoder_",
        "  layer_",
        "  {0..2}/self_",
        "  attention",
    ]


@given(words, st.integers(1, 40))
def test_breaks_paths_only_after_slashes(path, width):
    lines = columns.break_paths(path, width).split("\n")
    assert "".join(lines) == path
    assert all(line.endswith("/") for line in lines[:-1])
    for line in lines:
        assert len(line) <= width or "/" not in line[:-1]
