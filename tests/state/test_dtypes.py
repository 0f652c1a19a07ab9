"""Every element type has one name, one stored form, and known casts."""

import ml_dtypes
import numpy as np
import pytest

from flaxckpt import errors
from flaxckpt._state import dtypes as state_dtypes
from flaxckpt._state import numpy_dtypes as state_numpy_dtypes

ALL = sorted(state_dtypes._STORED_AS_IS | state_dtypes.STORED_AS_BYTES)


@pytest.mark.parametrize("name", ALL)
def test_stored_form_keeps_every_bit(name):
    dtype = state_numpy_dtypes.to_numpy(name)
    assert state_numpy_dtypes.name(dtype) == name
    array = np.array([0, 1, 1, 0], dtype)
    stored = state_numpy_dtypes.to_stored(array)
    assert stored.dtype.name == state_dtypes.stored_name(name)
    back = state_numpy_dtypes.from_stored(stored, name)
    assert back.dtype == dtype
    assert back.tobytes() == array.tobytes()


def test_swaps_bytes_of_foreign_order():
    array = np.array([1, 2, 3], ">i4")
    stored = state_numpy_dtypes.to_stored(array)
    assert stored.dtype.isnative
    np.testing.assert_array_equal(stored, array)


@pytest.mark.parametrize("name", ["object", "S4", "datetime64", "float128", "nonsense"])
def test_rejects_other_types(name):
    with pytest.raises(errors.OptionError, match=name):
        state_numpy_dtypes.to_numpy(name)
    assert state_dtypes.stored_name(name) is None


@pytest.mark.parametrize(
    ("found", "wanted", "allowed"),
    [
        ("float32", "bfloat16", True),
        ("bfloat16", "float32", True),
        ("float8_e4m3fn", "float64", True),
        ("int32", "int32", True),
        ("int32", "int64", True),
        ("int64", "int32", False),
        ("uint8", "int16", False),
        ("int32", "float32", False),
        ("float32", "int32", False),
        ("bool", "int8", False),
        ("complex64", "complex128", True),
        ("complex128", "complex64", False),
        ("float32", "complex64", False),
    ],
)
def test_casts_only_floats_freely(found, wanted, allowed):
    assert state_dtypes.restores_as(found, wanted) == allowed


INTEGERS = [name for name in ALL if "int" in name]


@pytest.mark.parametrize("wanted", INTEGERS)
@pytest.mark.parametrize("found", INTEGERS)
def test_integers_grow_within_their_kind(found, wanted):
    """Also those that share a byte in numpy: the range of one holds the other's."""
    low, high = state_dtypes.bounds(found)
    wanted_low, wanted_high = state_dtypes.bounds(wanted)
    is_kind = found.startswith("u") == wanted.startswith("u")
    fits = wanted_low <= low and high <= wanted_high
    assert state_dtypes.restores_as(found, wanted) == (is_kind and fits)
    if is_kind and fits:
        values = np.array([low, high], state_numpy_dtypes.to_numpy(found))
        cast = state_numpy_dtypes.convert(values, wanted)
        assert cast.dtype == state_numpy_dtypes.to_numpy(wanted)
        assert [int(value) for value in cast] == [low, high]


@pytest.mark.parametrize("name", INTEGERS)
def test_bounds_match_type(name):
    low, high = state_dtypes.bounds(name)
    info = ml_dtypes.iinfo(state_numpy_dtypes.to_numpy(name))
    assert (low, high) == (info.min, info.max)


@pytest.mark.parametrize("name", ALL)
def test_sizes_match_numpy(name):
    assert state_dtypes.check(name) == name
    itemsize = state_numpy_dtypes.to_numpy(name).itemsize
    assert state_dtypes.item_size(name) == itemsize
    stored = state_numpy_dtypes.to_numpy(state_dtypes.stored_name(name))
    assert state_dtypes.item_bits(name) == 8 * stored.itemsize


@pytest.mark.parametrize("kind", "biufc")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_zarr_2_names_match_numpy(kind, size):
    try:
        name = np.dtype(f"<{kind}{size}").name
    except TypeError:
        name = None
    ours = state_dtypes.of_zarr_2(f"<{kind}{size}")
    if name in ALL:
        assert ours == name
    else:
        with pytest.raises(errors.OptionError):
            state_dtypes.check(ours)


@pytest.mark.parametrize(
    "value", [True, 3, -(2**63), 2.5, 2j], ids=lambda value: type(value).__name__
)
def test_python_numbers_have_numpy_types(value):
    assert state_dtypes.PYTHON_NUMBERS[type(value)] == np.asarray(value).dtype.name
