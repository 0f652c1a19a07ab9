"""Statistics of samples: exact for small arrays, honest for large ones."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt._arrays import leaf_sample, sample
from flaxckpt._arrays.to_host import HostArray, HostShard


def host(name, *parts, dtype=None):
    """An array of one axis, in parts."""
    size = sum(part.size for part in parts)
    shards, start = [], 0
    for part in parts:
        shards.append(HostShard(((start, start + part.size),), part))
        start += part.size
    dtype = dtype or parts[0].dtype.name
    return HostArray(name, (size,), dtype, (size,), tuple(shards))


def sampled(*arrays, **options):
    sampler = sample.Sampler(**options)
    sampler.choose(arrays)
    sampler.add(arrays)
    return sampler.result({array.name: array.name for array in arrays})


numbers = st.floats(width=32) | st.sampled_from([float("nan"), float("inf")])


@given(st.lists(st.lists(numbers, min_size=1, max_size=40), min_size=1, max_size=5))
def test_samples_small_arrays_completely(lists):
    arrays = [np.array(values, np.float32) for values in lists]
    found = sampled(*[host(str(i), array) for i, array in enumerate(arrays)])
    for i, array in enumerate(arrays):
        got = found[str(i)]
        assert (got.size, got.sampled) == (array.size, array.size)
        finite = array[np.isfinite(array)].astype(np.float64)
        assert got.nonfinite == array.size - finite.size
        assert sum(got.histogram) == finite.size
        if not finite.size:
            assert (got.norm, got.mean, got.min, got.max) == (0, 0, 0, 0)
            continue
        assert (got.min, got.max) == (finite.min(), finite.max())
        scale = np.sqrt(np.mean(finite**2) * array.size)
        assert got.norm == pytest.approx(scale)
        assert got.mean == pytest.approx(finite.mean(), abs=1e-9 * np.abs(finite).max())


def test_histogram_matches_numpy():
    values = np.random.default_rng(0).normal(size=60)
    got = sampled(host("w", values))["w"]
    assert list(got.histogram) == np.histogram(values, leaf_sample.BINS)[0].tolist()
    same = sampled(host("w", np.full(8, 3.0)))["w"]
    assert same.histogram[0] == 8
    assert (same.min, same.max) == (3, 3)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float8_e4m3fn", "int4", "int8", "bool", "complex64", "uint32"],
)
def test_all_dtypes_have_statistics(dtype):
    values = np.array([0, 1, 2, 3]).astype(getattr(ml_dtypes, dtype, None) or dtype)
    got = sampled(host("w", values, dtype=dtype))["w"]
    high = 1 if dtype == "bool" else 3
    assert (got.min, got.max) == (0, high)


def test_samples_all_parts_of_large_arrays():
    parts = [np.full(300_000, value, np.float32) for value in (1, 2, 4)]
    got = sampled(host("w", *parts), host("v", *parts[:1]))["w"]
    assert got.size == 900_000
    assert got.sampled < 1000
    assert (got.min, got.max) == (1, 4)
    exact = np.sqrt(sum(float((part**2).sum()) for part in parts))
    assert got.norm == pytest.approx(exact, rel=0.05)


def test_sample_size_grows_with_save_duration():
    values = np.arange(10_000_000, dtype=np.float32)
    sizes = []
    for secs in (0.01, 1, 1000):
        now = iter([0.0, 0.0, secs, secs + 0.001])
        found = sampled(host("w", values), clock=lambda now=now: next(now))
        sizes.append(found["w"].sampled)
    assert sizes[0] < sizes[1] < sizes[2] <= 2**18


def test_similar_save_durations_sample_same_values():
    values = np.random.default_rng(0).normal(size=10_000_000).astype(np.float32)
    norms = set()
    for secs in (0.9, 1.0, 1.1):
        now = iter([0.0, 0.0, secs, secs + 0.001])
        found = sampled(host("w", values), clock=lambda now=now: next(now))
        norms.add(found["w"].norm)
    assert len(norms) == 1


def test_samples_only_largest_arrays():
    arrays = [host(str(n), np.ones(n, np.float32)) for n in range(1, 601)]
    empty = host("empty", np.ones(0, np.float32))
    key = host("key", np.ones(4, np.uint32), dtype="key<fry>")
    short = sampled(*arrays, empty, key)
    assert short.keys() == {str(n) for n in range(537, 601)}
    now = iter([0.0, 0.0, 100.0, 100.1])
    long = sampled(*arrays, empty, key, clock=lambda: next(now))
    assert long.keys() == {str(n) for n in range(89, 601)}


def transformer(blocks, parts):
    """Yields the arrays of a state; the norms of a block are small, as usual."""
    sizes = {"embed.table": 50_000, "norm.scale": 8, "head.kernel": 40_000}
    for block in range(blocks):
        for part in parts:
            small = "norm" in part
            sizes[f"block_{block}.{part}.kernel"] = 8 if small else 9_000 + block
            sizes[f"block_{block}.{part}.bias"] = 4 if small else 300
    for top in ("params", "opt_state.0.mu", "opt_state.0.nu"):
        for name, size in sizes.items():
            yield host(f"state/{top}.{name}", np.ones(size, np.float32))
    yield host("state/step", np.ones(1, np.int32))


@pytest.mark.parametrize(
    ("blocks", "parts", "depth"),
    [(50, ["attn", "mlp", "norm_1", "norm_2"], 1), (20, ["a", "b", "norm"], 2)],
)
def test_short_save_samples_every_layer(blocks, parts, depth):
    arrays = [*transformer(blocks, parts)]

    def layers(names):
        keys = [name.split(".")[1 : 1 + depth] for name in names if "params" in name]
        return {tuple(each) for each in keys}

    names = sampled(*arrays).keys()
    assert len(names) == 64
    assert not any("opt_state" in name for name in names)
    assert layers(names) == layers([array.name for array in arrays])
    assert {f"state/params.{top}" for top in ("embed.table", "head.kernel")} <= names
    now = iter([0.0, 0.0, 100.0, 100.1])
    assert len(sampled(*arrays, clock=lambda: next(now))) == min(len(arrays), 512)


def test_samples_cover_all_columns():
    values = np.zeros((4096, 512), np.float32)
    values[:, 256:] = 100
    for order in ("C", "F"):
        array = np.asarray(values, order=order)
        shard = HostShard(((0, 4096), (0, 512)), array)
        host = HostArray("w", (4096, 512), "float32", (4096, 512), (shard,))
        for secs in (0.01, 1, 100):
            now = iter([0.0, 0.0, secs, secs + 0.001])
            got = sampled(host, clock=lambda now=now: next(now))["w"]
            assert (got.min, got.max) == (0, 100)
            assert 20 < got.mean < 80


def test_magnitudes_of_large_complex_numbers_are_finite():
    values = np.full(4, 3e38 + 3e38j, np.complex64)
    got = sampled(host("w", values))["w"]
    assert got.nonfinite == 0
    assert got.max == pytest.approx(4.24e38, rel=0.01)
