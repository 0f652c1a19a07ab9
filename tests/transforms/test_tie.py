"""Leaves that are shared in one model, and two in another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import permute, rename, reshape, tie, transpose, untie
from tests.helpers import seams
from tests.transforms.states import state_of, table_of, transformed

PARAMS = {"embed": jnp.ones((6, 4)), "norm": jnp.ones(4)}
UNTIE = untie("params/embed", "params/head")


def untied(difference, dtype="float32"):
    """A state with two pairs of leaves; the first differs in `difference` elements."""
    values = jnp.arange(24).reshape(6, 4).astype(dtype)
    other = values.reshape(-1).at[:difference].add(1).reshape(6, 4)
    return {
        "a": {"embed": values, "head": other},
        "b": {"embed": values, "head": values + 0},
        "rest": jnp.ones(2),
    }


TIE = tie(r"(\w)/head", r"\1/embed")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64"])
def test_ties_equal_leaves_and_rejects_unequal_ones(tmp_path, dtype):
    with jax.enable_x64(dtype == "float64"):
        flaxckpt.save(tmp_path / "equal", untied(0, dtype))
        flaxckpt.save(tmp_path / "unequal", untied(3, dtype))
        found = flaxckpt.load(tmp_path / "equal", transforms=[TIE])
        wanted = "a/embed and a/head differ in 3 of 24 elements"
        with pytest.raises(errors.OptionError, match=wanted) as caught:
            flaxckpt.load(tmp_path / "unequal", transforms=[TIE])
        plan = flaxckpt.plan(tmp_path / "unequal", found, transforms=[TIE])
    assert sorted(found["a"]) == sorted(found["b"]) == ["embed"]
    assert found["a"]["embed"].dtype == dtype
    np.testing.assert_array_equal(untied(0)["a"]["embed"], found["a"]["embed"])
    assert "b/head" not in str(caught.value)
    assert "untied" in str(caught.value)
    assert plan.leaves["a/embed"].sources == ("a/embed", "a/head")


def test_save_and_convert_reject_unequal_leaves(tmp_path):
    with pytest.raises(errors.OptionError, match="a/head differ in 2 of 24"):
        flaxckpt.save(tmp_path / "c", untied(2), transforms=[TIE])
    assert not (tmp_path / "c").exists()
    flaxckpt.save(tmp_path / "unequal", untied(2))
    with pytest.raises(errors.OptionError, match="a/head differ in 2 of 24"):
        flaxckpt.convert(tmp_path / "unequal", tmp_path / "d", transforms=[TIE])
    assert not (tmp_path / "d").exists()
    flaxckpt.save(tmp_path / "equal", untied(0))
    flaxckpt.convert(tmp_path / "equal", tmp_path / "e", transforms=[TIE])
    assert sorted(flaxckpt.load(tmp_path / "e")["b"]) == ["embed"]


@pytest.mark.parametrize(
    "changes",
    [
        [TIE, transpose(".*/embed")],
        [transpose("./(embed|head)"), TIE],
        [TIE, reshape(".*/embed", "a b -> (a b)"), rename("a/embed", "shared")],
    ],
)
def test_compares_leaves_despite_other_transforms(tmp_path, changes):
    flaxckpt.save(tmp_path / "c", untied(1))
    with pytest.raises(errors.OptionError, match="in 1 of 24 elements"):
        flaxckpt.load(tmp_path / "c", transforms=changes)


def test_rejects_leaves_made_unequal_by_transform(tmp_path):
    flaxckpt.save(tmp_path / "c", untied(0))
    moved = permute("a/head", [1, 0, 2, 3, 4, 5])
    with pytest.raises(errors.OptionError, match="in 8 of 24 elements"):
        flaxckpt.load(tmp_path / "c", transforms=[moved, TIE])


def test_ties_several_leaves_to_one(tmp_path):
    flaxckpt.save(tmp_path / "c", untied(0))
    change = tie("a/head|b/embed|b/head", "a/embed")
    found = flaxckpt.load(tmp_path / "c", transforms=[change])
    assert sorted(found) == ["a", "rest"]
    chain = [tie("b/head", "b/embed"), tie("b/embed", "a/embed")]
    assert sorted(flaxckpt.load(tmp_path / "c", transforms=chain)) == ["a", "rest"]


def test_nan_equals_nan(tmp_path):
    state = {"a": jnp.array([jnp.nan, 1.0]), "b": jnp.array([jnp.nan, 1.0])}
    flaxckpt.save(tmp_path / "c", state)
    assert list(flaxckpt.load(tmp_path / "c", transforms=[tie("b", "a")])) == ["a"]
    state["b"] = jnp.array([1.0, jnp.nan])
    flaxckpt.save(tmp_path / "d", state)
    with pytest.raises(errors.OptionError, match="2 of 2 elements"):
        flaxckpt.load(tmp_path / "d", transforms=[tie("b", "a")])


def test_rejects_invalid_ties_before_reading(tmp_path, monkeypatch):
    state = {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(2), "d": jnp.ones(2)}
    flaxckpt.save(tmp_path / "c", state)
    seams.replace(monkeypatch, "arrays.read", None)
    for change, why in (
        (tie("b", "a"), r"b is float32\[3\], but a is float32\[2\]"),
        (tie("c", "none"), "c is tied to none, which does not exist"),
        (tie("c", "c"), "c is tied to itself"),
        (tie("c|d", "d"), "d is tied to itself"),
        (tie("(c)|(d)", r"d"), "is tied to d, which is tied itself"),
    ):
        with pytest.raises(errors.OptionError, match=why):
            flaxckpt.load(tmp_path / "c", transforms=[change])


def test_keeps_moments_of_kept_leaf():
    params = {"embed": jnp.ones((6, 4)), "head": jnp.ones((6, 4))}
    state = state_of("dict", params, optax.adamw(1e-3))
    state["params"]["head"] = state["params"]["embed"] + 0
    before = table_of(state)
    after = transformed([tie("params/head", "params/embed")], state)
    assert before.keys() - after.keys() == {p for p in before if p.endswith("head")}
    for path, value in after.items():
        np.testing.assert_array_equal(before[path], value, err_msg=path)


def test_compares_sharded_leaves(tmp_path):
    flaxckpt.save(tmp_path / "c", untied(0))
    flaxckpt.save(tmp_path / "d", untied(5))
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    leaf = jax.ShapeDtypeStruct((6, 4), jnp.float32, sharding=sharding)
    wanted = {
        "a": {"embed": leaf},
        "b": {"embed": leaf},
        "rest": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    found = flaxckpt.load(tmp_path / "c", wanted, transforms=[TIE])
    assert found["a"]["embed"].sharding == sharding
    with pytest.raises(errors.OptionError, match="5 of 24"):
        flaxckpt.load(tmp_path / "d", wanted, transforms=[TIE])
