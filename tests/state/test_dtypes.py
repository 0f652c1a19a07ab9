"""Every element type has one name, one stored form, and known casts."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors, transforms
from tests.helpers import command_line, old_stores, strategies
from tests.helpers.dtypes import ALL


def test_sizes_and_names_match_numpy(tmp_path):
    arrays = {name: np.zeros((4, 3), np.dtype(name)) for name in ALL}
    flaxckpt.save(tmp_path / "c", arrays)
    found = command_line.read_json("show", tmp_path / "c")["leaves"]
    assert {path: leaf["dtype"] for path, leaf in found.items()} == {n: n for n in ALL}
    sizes = {name: array.nbytes for name, array in arrays.items()}
    assert {path: leaf["bytes"] for path, leaf in found.items()} == sizes


def test_swaps_bytes_of_foreign_order(tmp_path):
    flaxckpt.save(tmp_path / "c", np.array([1, 2, 3], ">i4"))
    found = flaxckpt.load(tmp_path / "c")
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, [1, 2, 3])


@pytest.mark.parametrize("name", ["object", "S4", "datetime64", "float128", "nonsense"])
def test_rejects_other_types(tmp_path, name):
    with pytest.raises(errors.OptionError, match=name):
        transforms.cast("w", name)
    if name != "nonsense":
        with pytest.raises(errors.UnsupportedLeafError):
            flaxckpt.save(tmp_path / "c", np.zeros(3, name))


@pytest.fixture
def restores(tmp_path):
    """Loads values of a type as another type; returns None if that is refused."""

    def load(values, found, wanted):
        path = tmp_path / found
        if not path.exists():
            flaxckpt.save(path, np.array(values, np.dtype(found)))
        try:
            return flaxckpt.load(path, np.zeros(len(values), np.dtype(wanted)))
        except errors.RestoreMismatchError:
            return None

    return load


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
def test_casts_only_floats_freely(restores, found, wanted, allowed):
    assert (restores([0, 1], found, wanted) is not None) == allowed


def _is_in_jax(name):
    try:
        jax.device_put(np.ones((), name))
    except (TypeError, jax.errors.JaxRuntimeError):
        return False
    return True


NOT_IN_JAX = [name for name in ALL if not _is_in_jax(name)]
"""Depends on the version of jax: some have no int1."""


@pytest.mark.parametrize("shape", [(), (3,), (0,)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_each_type_is_restored_by_jax_or_refused(tmp_path, name, shape):
    """Nothing is saved that is not restored, and each error says what to do."""
    values = np.ones(shape, np.dtype(name))
    wide = values.dtype.itemsize > 4 and name != "complex64"
    with jax.enable_x64(wide):
        flaxckpt.save(tmp_path / "numpy", {"x": values})
        strategies.assert_same({"x": values}, flaxckpt.load(tmp_path / "numpy"))
        abstract = {"x": jax.ShapeDtypeStruct(shape, values.dtype)}
        if name in NOT_IN_JAX:
            with pytest.raises(errors.UnsupportedLeafError, match="use a numpy array"):
                flaxckpt.load(tmp_path / "numpy", abstract)
            if "float" not in name:
                return
            cast = transforms.cast("x", name)
            floats = {"x": jnp.ones(shape)}
            flaxckpt.save(tmp_path / "cast", floats, transforms=[cast])
            found = flaxckpt.load(tmp_path / "cast")["x"]
            assert (found.dtype, found.tobytes()) == (values.dtype, values.tobytes())
            strategies.assert_same(floats, flaxckpt.load(tmp_path / "cast", floats))
            return
        for device in (None, jax.devices()[1]):
            array = {"x": jax.device_put(values, device)}
            path = tmp_path / f"{device}"
            flaxckpt.save(path, array)
            for target in (None, array, abstract):
                found = flaxckpt.load(path, target)["x"]
                assert isinstance(found, jax.Array)
                assert found.dtype == values.dtype
                assert np.asarray(found).tobytes() == values.tobytes()


@pytest.mark.parametrize("name", sorted({"int1", "uint1", *NOT_IN_JAX}))
def test_computations_with_types_that_jax_lacks_are_refused(tmp_path, name):
    state = {"x": np.ones(3, np.dtype(name))}
    change = [transforms.map_leaf("x", lambda x: x.reshape(1, 3))]
    flaxckpt.save(tmp_path / "c", state)
    told = f"jax does not compute with {name}: restore it without"
    with pytest.raises(errors.OptionError, match=told):
        flaxckpt.load(tmp_path / "c", transforms=change)
    with pytest.raises(errors.OptionError, match=told):
        flaxckpt.save(tmp_path / "d", state, transforms=change)
    widened = [transforms.cast("x", "float32", lossy=True), *change]
    with pytest.raises(errors.OptionError, match=told):
        flaxckpt.load(tmp_path / "c", transforms=widened)


INTEGERS = [name for name in ALL if "int" in name]


@pytest.mark.parametrize("found", INTEGERS)
def test_integers_grow_within_their_kind(restores, found):
    """Also those that share a byte in numpy: the range of one holds the other's."""
    info = ml_dtypes.iinfo(np.dtype(found))
    bounds = [int(info.min), int(info.max)]
    for wanted in INTEGERS:
        of_wanted = ml_dtypes.iinfo(np.dtype(wanted))
        is_kind = found.startswith("u") == wanted.startswith("u")
        fits = of_wanted.min <= info.min and info.max <= of_wanted.max
        cast = restores(bounds, found, wanted)
        assert (cast is not None) == (is_kind and fits), wanted
        if cast is not None:
            assert cast.dtype == np.dtype(wanted)
            assert [int(value) for value in cast] == bounds


@pytest.fixture(scope="module")
def zarr_2(tmp_path_factory):
    """An array of zarr 2 that an Orbax reader reads."""
    path = tmp_path_factory.mktemp("zarr") / "c"
    layout = flaxckpt.ArrayLayout(zarr_version=2)
    flaxckpt.save(path, {"w": np.zeros(3, np.int32)}, layout=layout)
    old_stores.make_directories(path)
    for name in ("flaxckpt.json", "commit_success.txt"):
        (path / name).unlink()
    return path


@pytest.mark.parametrize("kind", "biufc")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_zarr_2_names_match_numpy(zarr_2, kind, size):
    try:
        name = np.dtype(f"<{kind}{size}").name
    except (TypeError, jax.errors.JaxRuntimeError):
        name = None
    file = zarr_2 / "state/w/.zarray"
    row = json.loads(file.read_text())
    file.write_text(json.dumps(row | {"dtype": f"<{kind}{size}"}))
    if name in ALL:
        assert flaxckpt.metadata(zarr_2).leaves["w"].dtype == name
    else:
        with pytest.raises(errors.CheckpointError):
            flaxckpt.metadata(zarr_2)


@pytest.mark.parametrize(
    "value", [True, 3, -(2**63), 2.5, 2j], ids=lambda value: type(value).__name__
)
def test_python_numbers_have_numpy_types(tmp_path, value):
    flaxckpt.save(tmp_path / "c", value)
    [leaf] = flaxckpt.metadata(tmp_path / "c").leaves.values()
    assert leaf.dtype == np.asarray(value).dtype.name
