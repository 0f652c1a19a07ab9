"""What the values of a leaf are like, compared with numpy."""

import types

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flaxckpt
from tests.helpers import command_line, seams

finite = st.floats(-1e6, 1e6, width=32)
odd = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0])


def of(directory, value):
    """Returns what `flaxckpt show` says of a leaf."""
    path = f"{directory}/one"
    flaxckpt.save(path, {"w": value}, overwrite=True)
    return types.SimpleNamespace(**command_line.read_json("show", path, "w"))


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(np.float32, st.integers(1, 200), elements=finite | odd),
    st.integers(1, 40),
)
def test_piecewise_statistics_match_whole(values, cut):
    with pytest.MonkeyPatch.context() as patch:
        seams.replace(patch, "leaf_statistics.piece_bytes", 4 * cut)
        seams.replace(patch, "leaf_statistics.at_once", 12 * cut)
        sums = of("memory://statistics", values)
    kept = values[np.isfinite(values)].astype(np.float64)
    assert sums.zeros == np.count_nonzero(values == 0)
    assert sums.nans == np.count_nonzero(np.isnan(values))
    assert sums.infs == np.count_nonzero(np.isinf(values))
    assert sums.count == values.size
    if kept.size:
        assert (sums.min, sums.max) == (kept.min(), kept.max())
        np.testing.assert_allclose(sums.mean, kept.mean(), rtol=1e-9, atol=1e-6)
        np.testing.assert_allclose(sums.std, kept.std(), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "int64", "uint8", "bool", ml_dtypes.bfloat16, "complex64"],
)
def test_every_dtype_has_statistics(tmp_path, dtype):
    values = np.arange(100).reshape(4, 25).astype(dtype)
    found = of(tmp_path, values)
    numbers = np.abs(values.astype(np.complex128))
    assert (found.count, found.zeros) == (100, np.count_nonzero(values == 0))
    assert (found.min, found.max) == (numbers.min(), numbers.max())
    np.testing.assert_allclose(found.mean, numbers.mean())
    np.testing.assert_allclose(found.std, numbers.std())
    np.testing.assert_allclose(found.norm, np.linalg.norm(numbers))
    assert sum(found.histogram) == 100
    assert found.values is None


def test_histogram_matches_numpy(tmp_path):
    values = np.random.default_rng(0).normal(size=10_000)
    found = of(tmp_path, values)
    counts, edges = np.histogram(values, len(found.histogram))
    assert len(counts) > 1
    assert found.histogram == counts.tolist()
    np.testing.assert_allclose(found.edges, edges)


def test_reads_leaf_of_several_pieces_in_parts(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "leaf_statistics.piece_bytes", 1000)
    seams.replace(monkeypatch, "leaf_statistics.at_once", 3000)
    values = np.random.default_rng(0).normal(size=(30, 50))
    found = of(tmp_path, values)
    assert found.count == 1500
    np.testing.assert_allclose(found.mean, values.mean())
    np.testing.assert_allclose(found.std, values.std())
    assert sum(found.histogram) == 1500


@pytest.mark.parametrize(
    "value",
    [np.full(20, np.nan), np.zeros((0, 3)), np.full(20, 7.0), np.array([-3e38, 3e38])],
)
def test_unusual_arrays_have_statistics(tmp_path, value):
    found = of(tmp_path, value)
    finite = value[np.isfinite(value)]
    assert found.count == value.size
    assert found.min == (finite.min() if finite.size else None)
    assert sum(found.histogram) == finite.size
    assert len(found.edges) == (len(found.histogram) + 1 if finite.size else 0)


def test_large_integers_keep_all_digits(tmp_path):
    found = of(tmp_path, np.array([2**62 + 1, 2**62 + 3] * 20))
    assert (found.min, found.max) == (2**62 + 1, 2**62 + 3)
    assert sum(found.histogram) == 40


def test_statistics_of_non_arrays_hold_their_values(tmp_path):
    assert of(tmp_path, "text").values == "text"
    assert of(tmp_path / "2", 7).values == [7]
    assert of(tmp_path / "3", None).count == 0
    keys = of(tmp_path / "4", jax.random.key(3))
    assert (keys.info["kind"], keys.values) == ("prng_key", [0, 3])


def test_show_rejects_missing_leaf(tmp_path):
    flaxckpt.save(tmp_path / "one", {"w": np.ones(2)})
    told = command_line.run("show", tmp_path / "one", "v", code=2)
    assert "has neither a leaf nor a container v" in told
