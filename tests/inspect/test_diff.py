"""What differs between two checkpoints, in any formats."""

import math
import pickle
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flaxckpt
from flaxckpt import errors, transforms
from tests.helpers import chunks, seams


def saved(path, state, **options):
    flaxckpt.save(path, state, **options)
    return path


def train_state(value=1.0):
    params = {"dense": {"kernel": jnp.full((4, 3), value), "bias": jnp.zeros(3)}}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def test_equal_checkpoints_have_no_differences(tmp_path):
    a = saved(tmp_path / "a", train_state())
    b = saved(tmp_path / "b", train_state())
    found = flaxckpt.diff(a, b)
    assert found.is_empty
    leaves = flaxckpt.metadata(a).leaves
    assert set(found.same) == {p for p, leaf in leaves.items() if leaf.kind != "empty"}
    assert found.bytes_compared == 8 + 4 + 3 * (12 + 3) * 4
    assert "are equal" in str(found)


def test_diff_describes_each_differing_leaf(tmp_path):
    first = {"w": np.array([1.0, 2.0, -4.0]), "n": 3, "name": "a", "gone": np.ones(2)}
    second = {"w": np.array([1.0, 2.5, -4.0]), "n": 4, "name": "b", "new": np.ones(2)}
    found = flaxckpt.diff(saved(tmp_path / "a", first), saved(tmp_path / "b", second))
    assert found.only_in_a == ("gone",)
    assert found.only_in_b == ("new",)
    assert set(found.changed) == {"w", "n", "name"}
    w = found.changed["w"]
    assert (w.kind, w.different, w.max_abs, w.max_rel) == ("values", 1, 0.5, 0.2)
    assert w.rel_norm == pytest.approx(0.5 / math.sqrt(21))
    assert found.changed["n"].max_abs == 1
    assert found.changed["name"].kind == "values"
    assert "w: 1 of 3 elements, by 0.5 at most; norm 0.109" in str(found)


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (np.ones(3), np.ones(4), "shape"),
        (np.ones(3), np.ones((3, 1)), "shape"),
        (np.ones(3), np.ones(3, np.float32), "dtype"),
        (np.ones(3), "text", "kind"),
        ({}, [], "kind"),
        ({}, np.ones(3), "kind"),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), "shape"),
        (jax.random.key(0), jax.random.key(1), "values"),
        (np.ones(()), 1.0, None),
        (3, 3.0, "dtype"),
        (np.ones(0), np.ones(0), None),
        (None, None, None),
    ],
)
def test_diff_reports_first_mismatch_as_kind(a, b, kind, tmp_path):
    found = flaxckpt.diff(
        saved(tmp_path / "a", {"x": a, "y": 1}), saved(tmp_path / "b", {"x": b, "y": 1})
    )
    assert [leaf.kind for leaf in found.changed.values()] == ([kind] if kind else [])
    str(found)


def test_diff_compares_values_of_different_dtypes(tmp_path):
    a = saved(tmp_path / "a", {"x": np.array([1.0, 2.0, 1 / 3])})
    b = saved(tmp_path / "b", {"x": np.array([1.0, 2.0, 1 / 3], np.float32)})
    found = flaxckpt.diff(a, b).changed["x"]
    assert (found.kind, found.different) == ("dtype", 1)
    assert 0 < found.max_abs < 1e-7


def nan(bits):
    return np.array([bits], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros(3), np.array([0.0, -0.0, 0.0])),
        (jnp.zeros(3), jnp.array([0.0, -0.0, 0.0])),
        (jnp.zeros(3, jnp.bfloat16), jnp.array([0.0, -0.0, 0.0], jnp.bfloat16)),
        (np.zeros(2, complex), np.array([0, complex(0, -0.0)])),
        (nan(0x7FC00000), nan(0x7FC00001)),
        (nan(0x7FC00000), nan(0xFFC00000)),
        (0.0, -0.0),
    ],
)
def test_diff_reports_bit_changes_of_equal_numbers(a, b, tmp_path):
    paths = [saved(tmp_path / name, {"x": x}) for name, x in (("a", a), ("b", b))]
    found = flaxckpt.diff(*paths)
    assert not found.is_empty
    x = found.changed["x"]
    assert (x.different, x.bits_only, x.max_abs, x.max_rel) == (1, 1, 0, 0)
    assert "only bits differ (sign of 0 or NaN)" in str(found)
    assert flaxckpt.diff(paths[0], paths[0]).is_empty


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (np.int64(2**62), np.int64(2**62 + 1), 1),
        (2**62, 2**62 + 1, 1),
        (np.array([-(2**63)]), np.array([2**63 - 1]), 2**64 - 1),
        (np.uint64(2**64 - 1), np.uint64(0), 2**64 - 1),
        (np.uint64(2**64 - 1), np.int64(-(2**63)), 2**64 - 1 + 2**63),
        (np.uint32(2**32 - 1), np.int8(-1), 2**32),
        (np.array([True, False]), np.array([True, True]), 1),
        (jnp.array([-8, 7], jnp.int4), jnp.array([7, 7], jnp.int4), 15),
        (jnp.array([0, 3], jnp.uint4), jnp.array([15, 3], jnp.uint4), 15),
    ],
)
def test_integer_distances_are_exact(a, b, distance, tmp_path):
    paths = [saved(tmp_path / name, {"x": x}) for name, x in (("a", a), ("b", b))]
    for pair in (paths, paths[::-1]):
        x = flaxckpt.diff(*pair).changed["x"]
        assert x.max_abs == distance
        assert type(x.max_abs) is int
        assert (x.different, x.bits_only) == (1, 0)
        assert x.rel_norm > 0


def test_diff_counts_elements_differing_in_bits_only(tmp_path):
    a = saved(tmp_path / "a", {"x": np.array([0.0, 1.0, np.nan])})
    b = saved(tmp_path / "b", {"x": np.array([-0.0, 3.0, np.nan])})
    x = flaxckpt.diff(a, b).changed["x"]
    assert (x.different, x.bits_only, x.max_abs) == (2, 1, 2)
    assert "by 2 at most" in str(x)
    assert "1 in bits only" in str(x)


def test_diff_compares_two_steps_of_run(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, train_state(float(step)))
    found = flaxckpt.diff(tmp_path / "run", tmp_path / "run", step_a=1)
    assert set(found.changed) == {"params/dense/kernel"}
    assert found.changed["params/dense/kernel"].max_abs == 2
    assert found.changed["params/dense/kernel"].rel_norm == pytest.approx(2)


def test_diff_without_values_compares_names_and_types(tmp_path):
    a = saved(tmp_path / "a", {"x": np.ones(3), "y": np.ones(3)})
    b = saved(tmp_path / "b", {"x": np.zeros(3), "y": np.ones(3, np.float32)})
    found = flaxckpt.diff(a, b, values=False)
    assert list(found.changed) == ["y"]
    assert found.bytes_compared == 0


def test_diff_compares_two_formats(tmp_path):
    params = train_state().params
    a = saved(tmp_path / "a", {"params": params})
    file = tmp_path / "b.msgpack"
    file.write_bytes(serialization.to_bytes({"params": params}))
    assert flaxckpt.diff(a, file).is_empty


def test_diff_matches_renamed_leaves_by_transforms(tmp_path):
    a = saved(tmp_path / "a", {"encoder": {"w": np.ones(3)}})
    b = saved(tmp_path / "b", {"backbone": {"w": np.ones(3)}})
    assert not flaxckpt.diff(a, b).is_empty
    rename = transforms.rename("encoder/(.*)", r"backbone/\1")
    assert flaxckpt.diff(a, b, transforms=[rename]).is_empty


def test_diff_compares_large_leaves_in_pieces(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "diff.piece_bytes", 1000)
    seams.replace(monkeypatch, "diff.at_once", 3000)
    values = np.arange(5000, dtype=np.float32).reshape(50, 100)
    other = values.copy()
    other[::7, 3] += 1
    layout = flaxckpt.ArrayLayout(chunk_bytes=4096, codec="zstd")
    found = flaxckpt.diff(
        saved(tmp_path / "a", {"x": values}),
        saved(tmp_path / "b", {"x": other}, layout=layout),
    )
    assert found.changed["x"].different == 8
    assert found.changed["x"].max_abs == 1


def test_diff_lists_largest_changes_first(tmp_path):
    a = saved(tmp_path / "a", {n: np.ones(2) for n in "wxyz"})
    b = saved(
        tmp_path / "b",
        {"w": np.ones(2), "x": np.full(2, 1.1), "y": np.full(2, 3.0), "z": np.ones(3)},
    )
    assert list(flaxckpt.diff(a, b).changed) == ["z", "y", "x"]


def test_diff_ranks_new_nans_first(tmp_path):
    a = saved(tmp_path / "a", {"x": np.ones(3), "y": np.ones(3)})
    b = saved(tmp_path / "b", {"x": np.array([1, np.nan, 1]), "y": np.full(3, 9.0)})
    found = flaxckpt.diff(a, b)
    assert list(found.changed) == ["x", "y"]
    assert found.changed["x"].max_abs == found.changed["x"].rel_norm == math.inf


def damage(path, leaf):
    root = path / "state"
    chunks.flip(root, chunks.names(root, leaf)[0])


def test_damaged_leaf_does_not_block_comparing_others(tmp_path):
    a = {"w": np.ones(3), "x": np.ones(3), "y": np.ones(3), "z": np.ones(3)}
    first = saved(tmp_path / "a", a)
    second = saved(tmp_path / "b", {**a, "z": np.zeros(3)})
    damage(first, "x")
    damage(second, "y")
    found = flaxckpt.diff(first, second)
    assert found.same == ("w",)
    assert set(found.changed) == {"z"}
    assert set(found.unreadable) == {"x", "y"}
    assert re.fullmatch("in a: .*CRC-32C.*", found.unreadable["x"])
    assert re.fullmatch("in b: .*CRC-32C.*", found.unreadable["y"])
    assert "cannot be read: 2\n  x: in a: " in str(found)


def test_checkpoints_with_damaged_leaf_are_not_equal(tmp_path):
    a = saved(tmp_path / "a", {"x": np.ones(3), "y": np.ones(3)})
    b = saved(tmp_path / "b", {"x": np.ones(3), "y": np.ones(3)})
    damage(b, "x")
    found = flaxckpt.diff(a, b)
    assert not found.is_empty
    assert (found.changed, found.same) == ({}, ("y",))
    assert "equal" not in str(found).replace("1 is equal", "")
    assert flaxckpt.diff(a, b, only="y").is_empty
    assert flaxckpt.diff(a, b, values=False).unreadable == {}


def test_damaged_pieces_make_large_leaf_unreadable(tmp_path, monkeypatch):
    seams.replace(monkeypatch, "diff.piece_bytes", 1000)
    seams.replace(monkeypatch, "diff.at_once", 3000)
    values = np.arange(5000, dtype=np.float32).reshape(50, 100)
    a = saved(tmp_path / "a", {"x": values, "y": np.ones(3)})
    b = saved(tmp_path / "b", {"x": values + 1, "y": np.ones(3)})
    damage(b, "x")
    found = flaxckpt.diff(a, b)
    assert (set(found.unreadable), found.changed, found.same) == ({"x"}, {}, ("y",))


def test_transformed_leaf_is_unreadable_if_source_is_damaged(tmp_path):
    kernels = {f"layer_{n}": {"w": np.full((2, 2), n)} for n in range(2)}
    stacked = {"layers": {"w": np.stack([np.full((2, 2), n) for n in range(2)])}}
    a = saved(tmp_path / "a", {**kernels, "z": np.ones(3)})
    b = saved(tmp_path / "b", {**stacked, "z": np.ones(3)})
    stack = transforms.stack(r"layer_(\d+)/(.*)", r"layers/\2")
    assert flaxckpt.diff(a, b, transforms=[stack]).is_empty
    damage(a, "layer_1.w")
    found = flaxckpt.diff(a, b, transforms=[stack])
    assert found.same == ("z",)
    [(path, why)] = found.unreadable.items()
    assert path == "layers/w"
    assert re.match("in a: layer_1/w: .*CRC-32C", why)


def test_load_error_names_damaged_leaves(tmp_path):
    path = saved(tmp_path / "a", {"x": np.ones(3), "y": np.ones(3)})
    damage(path, "x")
    with pytest.raises(errors.DamagedCheckpointError) as raised:
        flaxckpt.load(path)
    assert set(raised.value.leaves) == {"x"}
    assert pickle.loads(pickle.dumps(raised.value)).leaves == raised.value.leaves
    assert errors.DamagedCheckpointError("gone").leaves == {}


def test_diff_shows_metrics_without_affecting_equality(tmp_path):
    with flaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"x": np.ones(3)}, metrics={"loss": 0.5, "early": 1.0})
        run.save(2, {"x": np.ones(3)}, metrics={"loss": 0.25, "late": math.nan})
    found = flaxckpt.diff(tmp_path / "run", tmp_path / "run", step_a=1, step_b=2)
    assert found.is_empty
    assert found.metrics["loss"] == (0.5, 0.25)
    assert found.metrics["early"] == (1.0, None)
    assert found.metrics["late"][0] is None
    assert math.isnan(found.metrics["late"][1])


floats = hnp.arrays(
    np.float32, hnp.array_shapes(max_dims=2), elements={"allow_nan": True}
)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_differences_agree_with_numpy(data):
    a = data.draw(floats)
    elements = st.sampled_from([*a.flat, np.float32("nan")]) | st.floats(width=32)
    b = data.draw(hnp.arrays(np.float32, a.shape, elements=elements))
    for name, values in (("a", a), ("same", a.copy()), ("b", b)):
        flaxckpt.save(f"memory://differences/{name}", {"w": values}, overwrite=True)
    assert flaxckpt.diff("memory://differences/a", "memory://differences/same").is_empty
    changed = flaxckpt.diff("memory://differences/a", "memory://differences/b").changed
    different = np.count_nonzero(a.view("u4") != b.view("u4"))
    assert changed.keys() == ({"w"} if different else set())
    for found in changed.values():
        assert found.different == different
        assert 0 <= found.max_rel <= 2
        assert not math.isnan(found.max_abs)
        if np.isfinite(a).all() and np.isfinite(b).all():
            wide = np.abs(a.astype(np.float64) - b)
            assert found.max_abs == wide.max()


@pytest.mark.parametrize(
    "dtype", ["int4", "bfloat16", "float8_e4m3fn", "bool", "uint2"]
)
def test_diff_compares_machine_learning_types(dtype, tmp_path):
    a = saved(tmp_path / "a", {"x": jnp.array([0, 1, 1], dtype)})
    b = saved(tmp_path / "b", {"x": jnp.array([0, 1, 0], dtype)})
    assert flaxckpt.diff(a, b).changed["x"].different == 1
    assert flaxckpt.diff(a, a).is_empty


def test_reasons_name_step_or_run(tmp_path):
    for name in ("x", "y"):
        with flaxckpt.Checkpointer(tmp_path / name) as run:
            for step in (1, 2):
                run.save(step, {"w": np.full(9, step)})
    damage(tmp_path / "x" / "2", "w")
    run = tmp_path / "x"
    found = flaxckpt.diff(run, run, step_a=1, step_b=2)
    assert found.unreadable["w"].startswith("in step 2: c")
    found = flaxckpt.diff(run, tmp_path / "y")
    assert found.unreadable["w"].startswith("in step 2 of x: c")
    saved(tmp_path / "one", {"w": np.ones(9)})
    found = flaxckpt.diff(tmp_path / "one", run)
    assert found.unreadable["w"].startswith("in step 2 of x: c")
    damage(tmp_path / "one", "w")
    found = flaxckpt.diff(tmp_path / "one", tmp_path / "y")
    assert found.unreadable["w"].startswith("in one: c")


def test_counts_leaves_of_other_shape_or_dtype_separately(tmp_path):
    same = {"n": np.ones(2), "s": "text"}
    a = saved(
        tmp_path / "a", {**same, "w": np.ones(3), "x": np.ones(3), "y": np.ones(3)}
    )
    other = {"w": np.zeros(3), "x": np.ones(4), "y": np.ones(3, np.int32)}
    b = saved(tmp_path / "b", {**same, **other})
    found = flaxckpt.diff(a, b)
    assert set(found.retyped) == {"x", "y"}
    assert set(found.changed) == {"w", "x", "y"}
    counts = "1 leaf differs, 2 leaves have another shape or dtype, 2 are equal"
    assert counts in str(found)
    assert "of another shape or dtype: 2\n  x: " in str(found)
    assert flaxckpt.diff(a, a).retyped == ()


def save_items(root, step, value):
    """Saves a state whose branches are items of their own, as trainers of Orbax do."""
    state = {
        "params": {"w": np.full(3, value), "v": np.ones(2)},
        "opt": {"m": np.ones(2)},
    }
    with flaxckpt.Checkpointer(root, items=("params", "opt")) as run:
        run.save(step, state)
    return root / str(step)


def test_damaged_item_does_not_block_comparing_others(tmp_path):
    for step in (1, 2):
        save_items(tmp_path, step, step)
    shutil.rmtree(tmp_path / "2" / "params")
    found = flaxckpt.diff(tmp_path, tmp_path, step_a=1, step_b=2)
    assert found.same == ("opt/m",)
    assert (found.changed, found.only_in_a, found.unreadable) == ({}, (), {})
    assert not found.is_empty
    [(item, why)] = found.damaged_items.items()
    assert item == "params"
    assert re.fullmatch("in step 2: it .*; 2 leaves not compared", why)
    assert ", 1 item not compared" in str(found)
    only = {"step_a": 1, "step_b": 2, "only": "opt/.*"}
    assert flaxckpt.diff(tmp_path, tmp_path, **only).is_empty
    only["only"] = "params/w"
    [why] = flaxckpt.diff(tmp_path, tmp_path, **only).damaged_items.values()
    assert why.endswith("; 1 leaf not compared")
    shutil.rmtree(tmp_path / "1" / "params")
    [why] = flaxckpt.diff(tmp_path, tmp_path, step_a=1, step_b=2).damaged_items.values()
    assert re.fullmatch("in step 1: it .*; in step 2: it .*", why)
