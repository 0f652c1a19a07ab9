"""Computed floats are rounded once, to the type of the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxckpt
from flaxckpt.transforms import (
    cast,
    grow,
    map_leaf,
    offset,
    permute,
    remap,
    rename,
    reshape,
    scale,
    split,
    stack,
    tie,
    transpose,
)
from tests.transforms.cases import CASES
from tests.transforms.states import state_of, table_of

RANDOM = np.random.default_rng(0)
SMALL = (RANDOM.standard_normal((4, 6)) / 8).astype("bfloat16")
SINGLE = SMALL.astype(np.float32)
THIRD = np.float32(1 / 3)


def restored(tmp_path, state, changes, dtype, names=("a",)):
    """Saves a state, and restores leaves of other types through `changes`."""
    path = tmp_path / "c"
    if not path.exists():
        flaxckpt.save(path, state)
    loaded = flaxckpt.load(path, transforms=changes)
    shapes = {path: value.shape for path, value in table_of(loaded).items()}
    if dtype is None:
        return [np.asarray(table_of(loaded)[name]) for name in names]
    wanted = {name: jax.ShapeDtypeStruct(shapes[name], dtype) for name in names}
    found = flaxckpt.load(path, wanted, transforms=changes)
    return [np.asarray(found[name]) for name in names]


CHAINS = {
    "scale": ([scale("a", 1 / 3)], SINGLE * THIRD),
    "then transpose": ([offset("a", 1.0), transpose("a")], (SINGLE + 1).T),
    "then permute": (
        [offset("a", 1.0), permute("a", [3, 1, 0, 2])],
        (SINGLE + 1)[[3, 1, 0, 2]],
    ),
    "then reshape": ([scale("a", 1 / 3), reshape("a", (-1,))], SINGLE.ravel() * THIRD),
    "then remap": (
        [scale("a", 1 / 3), remap([("a", "a", "x (y z) -> y z x")], y=2)],
        (SINGLE * THIRD).reshape(4, 2, 3).transpose(1, 2, 0),
    ),
    "remap first": (
        [remap([("a", "a", "x y -> y x")]), offset("a", 1.0)],
        SINGLE.T + 1,
    ),
    "a cast between": (
        [offset("a", 1.0), cast("a", "bfloat16"), scale("a", 0.5)],
        (SINGLE + 1) * np.float32(0.5),
    ),
    "twice": ([scale("a", 1 / 3), scale("a", 4)], SINGLE * THIRD * 4),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHAINS)
def test_transforms_compute_in_wider_dtype_of_state(tmp_path, name):
    changes, wanted = CHAINS[name]
    [found] = restored(tmp_path, {"a": SMALL}, changes, "float32")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(wanted, found)
    assert np.any(wanted != wanted.astype("bfloat16").astype("f4"))  # else no proof


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_rounds_narrow_results_once(tmp_path, name, dtype):
    changes, wanted = CHAINS[name]
    [found] = restored(tmp_path, {"a": SMALL}, changes, dtype)
    assert found.dtype == (dtype or "bfloat16")
    np.testing.assert_array_equal(wanted.astype(found.dtype), found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_all_transforms_round_once(tmp_path, name, dtype):
    case = CASES[name]
    small = {
        leaf: (RANDOM.standard_normal(shape) / 8).astype("bfloat16")
        for leaf, shape in case.leaves.items()
    }
    flaxckpt.save(tmp_path / "c", {"params": small, "step": 3})
    wanted = case.effect(*(value.astype(np.float32) for value in small.values()))
    state = None
    if dtype is not None:
        abstract = {k: jax.ShapeDtypeStruct(v.shape, dtype) for k, v in wanted.items()}
        state = {"params": abstract}
    found = flaxckpt.load(tmp_path / "c", state, transforms=[case.change])
    assert wanted.keys() == found.get("params", {}).keys()
    for key, value in wanted.items():
        array = np.asarray(found["params"][key])
        assert array.dtype == (dtype or "bfloat16")
        np.testing.assert_array_equal(value.astype(array.dtype), array)


@pytest.mark.parametrize("dtype", ["float32", "float16", None])
def test_rounds_float32_once_for_narrower_or_equal_dtype(tmp_path, dtype):
    values = RANDOM.standard_normal((4, 6)).astype(np.float32)
    [found] = restored(tmp_path, {"a": values}, [scale("a", 1 / 3)], dtype)
    wanted = (values * THIRD).astype(dtype or "float32")
    np.testing.assert_array_equal(wanted, found)


def test_computes_float64_in_float64(tmp_path):
    values = RANDOM.standard_normal(9)
    [found] = restored(tmp_path, {"a": values}, [scale("a", 1 / 3)], None)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(values * (1 / 3), found)
    single = {"a": values.astype(np.float32)}
    changes = [cast("a", "float64"), scale("a", 1 / 3)]
    [found] = restored(tmp_path / "single", single, changes, None)
    np.testing.assert_array_equal(single["a"] * np.float64(1 / 3), found)


@pytest.mark.parametrize("small", ["bfloat16", "float8_e4m3fn", "float16"])
def test_stack_keeps_precision_of_changed_and_unchanged_leaves(tmp_path, small):
    a, b = SMALL.astype(small), (SMALL + 1).astype(small)
    changes = [scale("l_0", 1 / 3), stack(r"l_(\d)", "l")]
    [found] = restored(tmp_path, {"l_0": a, "l_1": b}, changes, "float32", ["l"])
    wanted = np.stack([a.astype("f4") * THIRD, b.astype("f4")])
    np.testing.assert_array_equal(wanted, found)


def test_split_and_tied_leaves_keep_computed_precision(tmp_path):
    changes = [offset("a|b", 1.0), tie("b", "a"), split("a", ["x", "y"], axis=0)]
    state = {"a": SMALL, "b": SMALL}
    found = restored(tmp_path, state, changes, "float32", ["x", "y"])
    np.testing.assert_array_equal(SINGLE + 1, np.concatenate(found))


def test_grow_computes_mean_rows_in_dtype_of_state(tmp_path):
    [found] = restored(tmp_path, {"a": SMALL}, [grow("a", 0, 5)], "float32")
    np.testing.assert_array_equal(SINGLE, found[:4])
    np.testing.assert_allclose(SINGLE.mean(0), found[4], rtol=1e-6)
    np.testing.assert_array_equal(
        restored(tmp_path, {"a": SMALL}, [grow("a", 0, 5)], None)[0],
        found.astype("bfloat16"),
    )


def test_user_functions_receive_dtype_of_leaf(tmp_path):
    types = []

    def halve(x):
        types.append(x.dtype)
        return x / 2

    changes = [offset("a", 1.0), map_leaf("a", halve)]
    [found] = restored(tmp_path, {"a": SMALL}, changes, "float32")
    assert set(types) == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(
        (SINGLE + 1).astype("bfloat16").astype("f4") / 2, found
    )


def test_does_not_skip_casts_to_integers(tmp_path):
    values = np.array([0.4, 1.6, 2.7], np.float32)
    changes = [scale("a", 1.0), cast("a", "int32", lossy=True), scale("a", 2)]
    [found] = restored(tmp_path, {"a": values}, changes, None)
    assert found.tolist() == [0, 2, 4]


@pytest.mark.parametrize("kind", ["dict", "FrozenDict", "nnx"])
def test_all_kinds_of_states_get_their_dtype(tmp_path, kind):
    """As a published model in bfloat16 fills a training state in float32."""
    flaxckpt.save(tmp_path / "c", {"w": SMALL})
    state = state_of(kind, {"w": jnp.zeros((4, 6))}, optax.adamw(1e-3))
    changes = [rename("w", "params/w"), offset("params/w", 1.0)]
    found = flaxckpt.load(tmp_path / "c", state, transforms=changes, missing="init")
    found = table_of(found)["params/w"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(SINGLE + 1, found)


ZEROS = np.array([[0.0, 0.0, 2**-16, 1e30]], "bfloat16")


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ([offset("w", 1.0)], np.append(SMALL, ZEROS[:, :3])),
        ([scale("w", 48**0.5)], np.append(SMALL, [ZEROS, -ZEROS])),
        ([scale("w", 1 / 3), reshape("w", (4, 8), from_shape=(32,))], None),
    ],
)
def test_round_trip_through_wider_state_keeps_bits(tmp_path, changes, values):
    values = np.append(SMALL, [ZEROS, -ZEROS]) if values is None else values
    flaxckpt.save(tmp_path / "c", {"w": values})
    shape = flaxckpt.load(tmp_path / "c", transforms=changes)["w"].shape
    wanted = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = flaxckpt.load(tmp_path / "c", wanted, transforms=changes)
    flaxckpt.save(tmp_path / "run", state)
    back = [change.inverse() for change in reversed(changes)]
    flaxckpt.convert(
        tmp_path / "run", tmp_path / "out", transforms=[*back, cast("w", "bfloat16")]
    )
    found = np.asarray(flaxckpt.load(tmp_path / "out")["w"])
    assert found.tobytes() == values.tobytes()
