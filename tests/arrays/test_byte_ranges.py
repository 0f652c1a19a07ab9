"""Arrays in a file, read as TensorStore has them."""

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt import _storage
from flaxckpt._arrays import byte_ranges as arrays_byte_ranges


def write(path, *arrays, before=b"\0" * 3):
    path.write_bytes(before + b"".join(array.tobytes() for array in arrays))
    offset, spans = len(before), []
    for array in arrays:
        spans.append(
            arrays_byte_ranges.Span(path, offset, array.shape, array.dtype.name)
        )
        offset += array.nbytes
    return spans


@pytest.mark.parametrize("part_bytes", [1, 16, 100, 2**20])
@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    data=st.data(),
)
def test_any_region_of_any_array_is_read(tmp_path_factory, shape, data, part_bytes):
    array = np.arange(np.prod(shape), dtype="int16").reshape(shape)
    bounds = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        for n in shape
    ]
    region = tuple(slice(*b) for b in bounds)
    path = tmp_path_factory.mktemp("span") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays_byte_ranges, "_PART_BYTES", part_bytes)
        store = arrays_byte_ranges.open(write(path, array), ts.Context()).result()
        np.testing.assert_array_equal(store.read().result(), array)
        np.testing.assert_array_equal(store[region].read().result(), array[region])


def test_parts_follow_one_another(tmp_path):
    whole = np.arange(24, dtype="float32").reshape(6, 4)
    spans = write(tmp_path / "file", whole[:1], whole[1:4], whole[4:])
    store = arrays_byte_ranges.open(spans, ts.Context()).result()
    np.testing.assert_array_equal(store.read().result(), whole)
    np.testing.assert_array_equal(store[3:5, 1:].read().result(), whole[3:5, 1:])


@pytest.mark.parametrize("cuts", [(24,), (1, 23), (0, 9, 9, 6), (13, 11)])
def test_the_runs_of_a_flat_array_make_one_of_any_shape(tmp_path, cuts):
    whole = np.arange(24, dtype="float32").reshape(2, 3, 4)
    content, pieces, done = b"", [], 0
    for size in cuts:
        content += b"xyz"
        pieces.append((len(content), 4 * size))
        content += whole.reshape(-1)[done : done + size].tobytes()
        done += size
    (tmp_path / "file").write_bytes(content)
    span = arrays_byte_ranges.Span(
        tmp_path / "file", 0, (2, 3, 4), "float32", tuple(pieces)
    )
    store = arrays_byte_ranges.open([span], ts.Context()).result()
    np.testing.assert_array_equal(store.read().result(), whole)
    np.testing.assert_array_equal(store[1:, 1:, 3].read().result(), whole[1:, 1:, 3])


def test_a_file_cut_short_is_an_error(tmp_path):
    path = tmp_path / "file"
    spans = write(path, np.arange(24, dtype="float32").reshape(6, 4))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"ends at byte 98"):
        arrays_byte_ranges.open(spans, ts.Context()).result().read().result()


def test_another_file_in_its_place_is_not_read(tmp_path):
    path = tmp_path / "file"
    [span] = write(path, np.arange(24, dtype="float32"))
    span = span._replace(identity=_storage.stamp(path).identity)
    store = arrays_byte_ranges.open([span], ts.Context()).result()
    np.testing.assert_array_equal(store.read().result(), np.arange(24))
    other = tmp_path / "other"
    write(other, np.ones(24, "float32"))
    other.replace(path)
    with pytest.raises(OSError, match="replaced or changed since it was opened"):
        store.read().result()
