"""Arrays in a file: each region is read and cast as numpy does it."""

import os

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt import _storage
from flaxckpt._arrays import read as arrays_read
from flaxckpt._arrays import read_files, read_plan
from tests.helpers import seams


def write(path, array, before=b"\0" * 3):
    path.write_bytes(before + array.tobytes())
    return read_plan.Span(path, len(before), array.shape, array.dtype.name)


def read_region(span, region, dtype=None, *, memory_map=True):
    reading = read_files.from_span(
        span, [region], dtype=dtype or span.dtype, memory_map=memory_map
    )
    read_files.run([reading])
    return reading.result()[region]


@pytest.mark.parametrize("part_bytes", [1, 16, 100, 2**20])
@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    data=st.data(),
)
def test_reads_any_region_of_any_array(tmp_path_factory, shape, data, part_bytes):
    array = np.arange(np.prod(shape), dtype="int16").reshape(shape)
    bounds = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        for n in shape
    ]
    region = tuple(slice(*b) for b in bounds)
    path = tmp_path_factory.mktemp("span") / "file"
    with pytest.MonkeyPatch.context() as patch:
        seams.replace(patch, "read_plan.part_bytes", part_bytes)
        span = write(path, array)
        store = arrays_read.open_span(span, ts.Context()).result()
        np.testing.assert_array_equal(store.read().result(), array)
        np.testing.assert_array_equal(store[region].read().result(), array[region])
        found = read_region(span, tuple(map(tuple, bounds)))
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array[region])


FLOATS = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64"]


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
def test_casting_floats_in_parts_matches_numpy(tmp_path, monkeypatch, stored, wanted):
    seams.replace(monkeypatch, "read_files.cast_at_once", 64)
    values = np.random.default_rng(0).standard_normal((7, 3, 5)) * 1000
    values[0, 0, :4] = np.nan, np.inf, -np.inf, -0.0
    with np.errstate(over="ignore", invalid="ignore"):
        array = values.astype(np.dtype(stored))
        expected = array.astype(np.dtype(wanted))
    span = write(tmp_path / "file", array)
    for region in (((0, 7), (0, 3), (0, 5)), ((2, 6), (1, 3), (4, 5))):
        found = read_region(span, region, wanted)
        cut = np.ascontiguousarray(expected[tuple(slice(*b) for b in region)])
        assert found.dtype == cut.dtype
        assert np.ascontiguousarray(found).tobytes() == cut.tobytes()


@pytest.mark.parametrize("before", [0, 64, 4096 + 64])
def test_maps_aligned_array_in_own_file(tmp_path, before):
    array = np.random.default_rng(0).standard_normal((256, 100)).astype("float32")
    span = write(tmp_path / "file", array, b"x" * before)
    region = ((0, 256), (0, 100))
    ours = span._replace(is_replaced_only=True)
    mapped = read_region(ours, region)
    assert mapped.tobytes() == array.tobytes()
    assert mapped.ctypes.data % 64 == 0
    assert read_region(ours, ((3, 9), (5, 50))).tobytes() == array[3:9, 5:50].tobytes()
    for copied, memory_map in ((span, True), (ours, False)):
        found = read_region(copied, region, memory_map=memory_map)
        assert found.tobytes() == array.tobytes()
    mapped[0, 0] = 5  # copy-on-write
    assert (tmp_path / "file").read_bytes() == b"x" * before + array.tobytes()


def test_truncated_mapped_file_raises_error(tmp_path):
    path = tmp_path / "file"
    span = write(path, np.zeros((512, 100), "float32"), b"")
    span = span._replace(is_replaced_only=True)
    os.truncate(path, 100_000)
    with pytest.raises(OSError, match="ends at byte 100000"):
        read_region(span, ((0, 512), (0, 100)))


@pytest.mark.parametrize("cuts", [(24,), (1, 23), (0, 9, 9, 6), (13, 11)])
def test_joins_scattered_runs_of_flat_array(tmp_path, cuts):
    whole = np.arange(24, dtype="float32").reshape(2, 3, 4)
    content, pieces, done = b"", [], 0
    for size in cuts:
        content += b"xyz"
        pieces.append((len(content), 4 * size))
        content += whole.reshape(-1)[done : done + size].tobytes()
        done += size
    (tmp_path / "file").write_bytes(content)
    span = read_plan.Span(tmp_path / "file", 0, (2, 3, 4), "float32", tuple(pieces))
    store = arrays_read.open_span(span, ts.Context()).result()
    np.testing.assert_array_equal(store.read().result(), whole)
    np.testing.assert_array_equal(store[1:, 1:, 3].read().result(), whole[1:, 1:, 3])


def test_truncated_file_raises_error(tmp_path):
    path = tmp_path / "file"
    span = write(path, np.arange(24, dtype="float32").reshape(6, 4))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"ends at byte 98"):
        arrays_read.open_span(span, ts.Context()).result().read().result()


def test_replaced_file_raises_error(tmp_path):
    path = tmp_path / "file"
    span = write(path, np.arange(24, dtype="float32"))
    span = span._replace(identity=_storage.stamp(path).identity)
    store = arrays_read.open_span(span, ts.Context()).result()
    np.testing.assert_array_equal(store.read().result(), np.arange(24))
    other = tmp_path / "other"
    write(other, np.ones(24, "float32"))
    other.replace(path)
    with pytest.raises(OSError, match="replaced or changed since it was opened"):
        store.read().result()
