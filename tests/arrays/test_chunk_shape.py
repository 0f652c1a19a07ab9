"""Chunk shapes: pinned examples, and what holds for all shapes."""

import math

import jax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt

MIB = 2**20
PRIME = 16_777_259  # the first above 2**24
PAGE = 16_384

dims = st.one_of(
    st.integers(0, 64),
    st.integers(0, 20_000),
    st.sampled_from([2**14, 10_007, 50_257, 250_112, PRIME]),
)
shapes = st.lists(dims, max_size=4).map(tuple)
shapes = shapes.filter(lambda shape: math.prod(shape) < 2**48)  # sizes are floats, too
full_shapes = shapes.map(lambda shape: tuple(size or 1 for size in shape))
itemsizes = st.sampled_from([1, 2, 4, 8, 16])
byte_counts = st.one_of(st.integers(1, 5_000), st.sampled_from([MIB, 64 * MIB]))

DTYPES = {1: "int8", 2: "bfloat16", 4: "float32", 8: "complex64", 16: "complex128"}


def choose(shape, *, itemsize, max_bytes, ragged=False, cuts=None):
    """Returns the chunk shape of a part that a writer has.

    Args:
        ragged: True for a whole array. Otherwise the part is a half of one, if it has
            an axis.
        cuts: Axis that will be cut -> number of parts along it.
    """
    writers = dict(cuts or {})
    if not ragged and not cuts and shape:
        writers = {0: 2}
    sizes = tuple(writers.get(axis, 1) for axis in range(len(shape)))
    names = [f"axis_{axis}" for axis in range(len(shape))]
    mesh = AbstractMesh(sizes or (1,), tuple(names) or ("axis",))
    leaf = jax.ShapeDtypeStruct(
        tuple(size * count for size, count in zip(shape, sizes, strict=True)),
        DTYPES[itemsize],
        sharding=NamedSharding(mesh, P(*names)),
    )
    layout = flaxckpt.ArrayLayout(chunk_bytes=max_bytes, shard_axes=tuple(cuts or ()))
    return flaxckpt.parameter_infos(leaf, layout=layout).chunk_shape


def chunk_count(shape, chunk):
    return math.prod(-(-dim // part) for dim, part in zip(shape, chunk, strict=True))


@pytest.mark.parametrize(
    ("write_shape", "itemsize", "max_bytes", "expected"),
    [
        # T5X's own tests; it cuts the second and third along both axes
        ((4096, 4096), 1, 4096 * 4096, (4096, 4096)),
        ((8192, 8192), 1, 4096 * 4096, (2048, 8192)),
        ((8192, 8193), 1, 4096 * 4096, (1024, 8193)),
        ((8192,), 1, 4096, (4096,)),
        ((8193,), 1, 4096, (2731,)),
        # well-known weights
        ((50257, 768), 4, 64 * MIB, (1733, 768)),
        ((32128, 512), 4, 64 * MIB, (32128, 512)),
        ((32128, 4096), 4, 64 * MIB, (4016, 4096)),
        ((32128, 4096), 2, 64 * MIB, (8032, 4096)),
        ((250112, 4096), 4, 64 * MIB, (3908, 4096)),
        ((4096, 16384), 4, 64 * MIB, (1024, 16384)),
        ((24, 1024, 64, 16), 4, 64 * MIB, (12, 1024, 64, 16)),
        ((8192, 3, 8192), 4, 64 * MIB, (512, 3, 8192)),
        ((48, 8192, 8192), 2, 64 * MIB, (1, 4096, 8192)),
        # 42 rows divide and fit, but 40 are whole pages
        ((840, 1024), 1, 42 * 1024, (40, 1024)),
        ((), 4, 64 * MIB, ()),
        ((1,), 4, 64 * MIB, (1,)),
        # smaller than one element
        ((6,), 8, 1, (1,)),
    ],
)
def test_chooses_expected_chunks_for_shards(write_shape, itemsize, max_bytes, expected):
    found = choose(write_shape, itemsize=itemsize, max_bytes=max_bytes)
    assert found == expected


@pytest.mark.parametrize(
    ("write_shape", "max_bytes", "ragged", "expected"),
    [
        pytest.param((50257, 768), 64 * MIB, True, (16_768, 768), id="vocabulary"),
        pytest.param((4096, 4096), 48 * MIB, True, (2048, 4096), id="divides as well"),
        pytest.param((768, 50257), 64 * MIB, True, (256, 50257), id="no whole pages"),
        pytest.param((13, 2**21), 64 * MIB, True, (7, 2**21), id="few long rows"),
        pytest.param((7, 3_000_000), 64 * MIB, True, (1, 3_000_000), id="no 2 * 4 = 8"),
        pytest.param((50257, 5, 67), 64 * MIB, True, (25_600, 5, 67), id="small pages"),
        pytest.param((PRIME,), 64 * MIB, True, (8_392_704,), id="prime: equal parts"),
        pytest.param((PRIME,), 64 * MIB, False, (PRIME,), id="prime shard: too large"),
        pytest.param((PRIME, 4), 65 * MIB, True, (4_195_328, 4), id="first axis"),
        pytest.param(
            (PRIME, 4), 65 * MIB, False, (PRIME, 1), id="another axis divides"
        ),
        pytest.param(
            (PRIME, 2, 2), 129 * MIB, False, (PRIME, 1, 2), id="trailing axes whole"
        ),
        pytest.param((2, PRIME), 64 * MIB, True, (1, 8_388_630), id="leading axes"),
        pytest.param((0,), 64 * MIB, True, (1,), id="empty"),
        pytest.param((0, 7), 64 * MIB, False, (1, 7), id="empty beside a full axis"),
    ],
)
def test_large_primes_and_empty_axes_get_few_chunks(
    write_shape, max_bytes, ragged, expected
):
    found = choose(write_shape, itemsize=4, max_bytes=max_bytes, ragged=ragged)
    assert found == expected


@given(shapes, itemsizes, byte_counts)
@example((50_257, 768), 4, 64 * MIB)
@example((PRIME, 2), 4, 64 * MIB)
def test_shard_chunks_divide_evenly_and_stay_few(shape, itemsize, max_bytes):
    chunk = choose(shape, itemsize=itemsize, max_bytes=max_bytes)
    full = full_shape(shape)
    assert all(s % c == 0 for s, c in zip(full, chunk, strict=True))
    assert chunk_count(full, chunk) <= few(full, itemsize, max_bytes)


@given(full_shapes, itemsizes, byte_counts)
@example((PRIME, 2), 4, 64 * MIB)
@example((2, PRIME), 4, 64 * MIB)
@example((100, 7, 3_000_000), 4, 64 * MIB)
def test_array_chunks_fit_limit_and_stay_few(shape, itemsize, max_bytes):
    chunk = choose(shape, itemsize=itemsize, max_bytes=max_bytes, ragged=True)
    assert all(1 <= c <= s for s, c in zip(shape, chunk, strict=True))
    assert math.prod(chunk) * itemsize <= max(max_bytes, itemsize)
    assert chunk_count(shape, chunk) <= few(shape, itemsize, max_bytes)


@given(full_shapes, itemsizes, byte_counts)
@example((4096, 16_384), 4, 64 * MIB)
@example((2, PRIME), 4, 64 * MIB)
@example((101, 1000, 1000), 4, 64 * MIB)
@example((100, 7, 3_000_000), 4, 64 * MIB)
def test_array_chunks_are_contiguous_with_little_padding(shape, itemsize, max_bytes):
    chunk = choose(shape, itemsize=itemsize, max_bytes=max_bytes, ragged=True)
    assert is_run(shape, chunk)
    runs = math.prod(shape[: cut_axis(shape, chunk)])
    padding = math.prod(chunk) * chunk_count(shape, chunk) - math.prod(shape)
    if runs > 1:
        assert padding <= math.prod(shape) / 7
        return
    assert padding <= math.prod(shape) / 10
    row = math.prod(chunk) // max(chunk[cut_axis(shape, chunk)], 1) if shape else 1
    group = math.lcm(row, int(PAGE // itemsize))
    assert padding <= math.prod(shape) / 20 + group


@given(full_shapes, st.sampled_from([1, 2, 4, 8, 16]), byte_counts)
@example((50_257, 768), 4, 64 * MIB)
@example((PRIME, 4), 4, 64 * MIB)
def test_array_chunks_align_to_pages_where_rows_allow(shape, itemsize, max_bytes):
    chunk = choose(shape, itemsize=itemsize, max_bytes=max_bytes, ragged=True)
    chunk_bytes = math.prod(chunk) * itemsize
    if not shape or chunk == shape or (len(shape) > 1 and chunk[0] == 1):
        return
    for page in (PAGE, 4096):
        group_bytes = math.lcm(math.prod(shape[1:]), int(page // itemsize)) * itemsize
        if group_bytes * 20 <= max_bytes:
            assert chunk_bytes % page == 0


@given(full_shapes, itemsizes, byte_counts)
@example((4096, 4096), 4, 48 * MIB)
def test_prefers_even_chunks_over_ragged_ones(shape, itemsize, max_bytes):
    sizes = {"itemsize": itemsize, "max_bytes": max_bytes}
    even = choose(shape, **sizes)
    either = choose(shape, **sizes, ragged=True)
    if (
        is_run(shape, even)
        and math.prod(even) * itemsize % PAGE == 0
        and chunk_count(shape, even) <= 2 * ideal(shape, itemsize, max_bytes)
    ):
        assert either == even


@given(shapes, itemsizes, byte_counts)
@example((4096, 16_384), 4, 64 * MIB)
def test_splits_shards_along_leading_axes_when_chunks_stay_few(
    shape, itemsize, max_bytes
):
    full = full_shape(shape)
    chunk = choose(shape, itemsize=itemsize, max_bytes=max_bytes)
    limit = max(1, int(max_bytes // itemsize))
    runs = [
        (*(1,) * axis, rows, *full[axis + 1 :])
        for axis, dim in enumerate(full)
        for rows in range(1, min(dim, limit) + 1)
        if dim <= 1000 and dim % rows == 0
    ]
    fitting = [
        run
        for run in runs
        if math.prod(run) <= limit
        and chunk_count(full, run) <= few(shape, itemsize, max_bytes)
    ]
    assert is_run(full, chunk) or not fitting


@given(full_shapes, st.sampled_from([1, 2, 4, 8]))
@example((1, 50_257, 50_257, 16_777_259), 1)
def test_fitting_array_is_one_chunk(shape, itemsize):
    chunk = choose(shape, itemsize=itemsize, max_bytes=math.prod(shape) * itemsize)
    assert chunk == shape


@pytest.mark.parametrize(
    ("shape", "replicas", "expected"),
    [
        ((8, MIB), 4, (2, MIB)),
        ((3, 4 * MIB), 2, (3, 2 * MIB)),
        ((3, 4, MIB), 2, (3, 2, MIB)),
        ((8, MIB), 1, (8, MIB)),
        ((3, 5 * MIB + 1), 2, (3, 5 * MIB + 1)),
        ((0, 4), 2, (1, 4)),
        # a part of 1 MiB for each, or of 16 MiB for groups of replicas
        ((8, MIB // 2), 4, (2, MIB // 2)),
        ((8, MIB // 2 - 1), 4, (8, MIB // 2 - 1)),
        ((2, 16 * MIB + 1), 8, (1, 16 * MIB + 1)),
        ((2, 16 * MIB - 1), 8, (2, 16 * MIB - 1)),
    ],
)
def test_replicas_split_first_divisible_axis(shape, replicas, expected):
    sharding = NamedSharding(AbstractMesh((replicas,), ("data",)), P())
    leaf = jax.ShapeDtypeStruct(shape, "int8", sharding=sharding)
    assert flaxckpt.parameter_infos(leaf).chunk_shape == expected


def full_shape(shape):
    return tuple(max(1, dim) for dim in shape)


def few(shape, itemsize, max_bytes):
    """The promised bound on the number of chunks."""
    return max(32, 4 * ideal(shape, itemsize, max_bytes))


def ideal(shape, itemsize, max_bytes):
    """The least number of chunks that `max_bytes` allows."""
    limit = max(1, int(max_bytes // itemsize))
    return -(-math.prod(shape) // limit)


def cut_axis(shape, chunk):
    """The last axis that is not whole in a chunk, or the first."""
    cut = [i for i, (s, c) in enumerate(zip(shape, chunk, strict=True)) if s != c]
    return max(cut, default=0)


def is_run(shape, chunk):
    """Whether a chunk is one run of bytes of an array in C order."""
    return all(size == 1 for size in chunk[: cut_axis(shape, chunk)])


# ---- axes that are cut later ---------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "cuts", "expected"),
    [
        ((8192, 8192), {}, (8192, 8192)),
        # rows of a chunk are one run: nothing to do
        ((8192, 8192), {0: 1}, (8192, 8192)),
        # strips of columns, whose rows are one run
        ((8192, 8192), {1: 1}, (8192, 256)),
        ((8192, 8192), {0: 1, 1: 1}, (8192, 256)),
        ((8192, 8200), {1: 1}, (8192, 1025)),
        ((8192, 1000), {0: 1, 1: 1}, (8192, 125)),
        # a part of a writer, of whom there are 8 along the second axis
        ((8192, 1024), {0: 1, 1: 8}, (8192, 256)),
        ((8192, 1024), {0: 1, 1: 32}, (8192, 1024)),
        # one layer after the other, each cut along its first axis
        ((32, 1024, 4096), {1: 1}, (1, 1024, 4096)),
        ((32, 1024, 4096), {1: 1, 2: 1}, (1, 1024, 512)),
        ((32, 1024, 4096), {0: 1, 2: 1}, (32, 1024, 128)),
        # small layers stay together
        ((32, 128, 128), {1: 1}, (32, 128, 128)),
        ((128, 128, 128), {1: 1}, (128, 32, 128)),
        ((4, 128, 8192), {1: 8, 2: 1}, (4, 128, 1024)),
        ((512, 256), {0: 1, 1: 1}, (512, 256)),
        ((50257,), {0: 1}, (50257,)),
        ((1, 8192, 8192), {0: 1, 2: 1}, (1, 8192, 256)),
        ((0, 8192), {0: 1, 1: 1}, (1, 8192)),
        ((), {}, ()),
    ],
)
def test_chunks_align_with_mesh_cuts(shape, cuts, expected):
    found = choose(shape, itemsize=2, max_bytes=128 * MIB, cuts=cuts)
    assert found == expected


@given(full_shapes, itemsizes, st.dictionaries(st.integers(0, 3), st.integers(1, 40)))
def test_tiles_divide_array_and_bound_size_and_count(shape, itemsize, cuts):
    cuts = {axis: parts for axis, parts in cuts.items() if axis < len(shape)}
    max_bytes = math.prod(shape) * itemsize  # any tile is a chunk
    tile = choose(shape, itemsize=itemsize, max_bytes=max_bytes, cuts=cuts)
    assert all(size % part == 0 for size, part in zip(shape, tile, strict=True))
    assert math.prod(tile) * itemsize >= MIB or tile == shape
    first = min((axis for axis in cuts if shape[axis] > 1), default=0)
    for axis, (dim, part) in enumerate(zip(shape, tile, strict=True)):
        if axis in cuts:
            assert dim == part or cuts[axis] * (dim // part) <= 32
        else:
            assert part == dim or (axis < first and part == 1)
