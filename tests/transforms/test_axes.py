"""Reshaped, permuted and transposed leaves, and the moments that follow them."""

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors, transforms
from flaxckpt.transforms import fuse, permute, remap, reshape, split, transpose
from tests.transforms.states import round_trip, state_of, table_of, transformed

SPLIT_HEADS = "(h d) e -> e h d"


def test_plan_knows_new_shape_before_reading(tmp_path):
    flaxckpt.save(tmp_path / "c", {"q": jnp.ones((6, 4))})
    wanted = {"q": jax.ShapeDtypeStruct((4, 3, 2), jnp.float32)}
    change = reshape("q", SPLIT_HEADS, h=3)
    plan = flaxckpt.plan(tmp_path / "c", wanted, transforms=[change])
    assert not plan.problems
    assert plan.leaves["q"].actions == ("loaded", "transformed")
    with pytest.raises(errors.OptionError, match=r"q, float32\[6, 4\].*chunks of 4"):
        flaxckpt.plan(
            tmp_path / "c", wanted, transforms=[reshape("q", SPLIT_HEADS, h=4)]
        )


def test_error_of_inverse_names_missing_sizes():
    joined = reshape("a", "h d e -> (h d) e")
    with pytest.raises(errors.OptionError, match=r"\(h d\).*pass h= or d="):
        transforms.inverse([joined])
    joined = reshape("a", "h d e -> (h d) e", d=2)
    [split_again] = transforms.inverse([joined])
    assert str(split_again) == "reshape('a', '(h d) e -> h d e', d=2)"
    with pytest.raises(errors.OptionError, match="from_shape="):
        transforms.inverse([reshape("a", (2, -1))])


def test_rejects_wrong_axis_size():
    with pytest.raises(errors.OptionError, match="3 != 2"):
        transformed(
            [reshape("a", "h d -> (h d)", h=2)], {"a": np.ones((3, 4), np.float32)}
        )


@pytest.mark.parametrize(
    ("form", "sizes", "shape", "wanted"),
    [
        (SPLIT_HEADS, {"h": 2}, (0, 3), (3, 2, 0)),
        (" -> 1", {}, (), (1,)),
        ("->", {}, (), ()),
        ("a 1 ... -> ... (a)", {}, (2, 1, 3, 4), (3, 4, 2)),
        ("(a b c) -> c (a b)", {"a": 2, "b": 3}, (12,), (2, 6)),
    ],
)
def test_reshapes_empty_and_unit_axes(form, sizes, shape, wanted):
    change = reshape("a", form, **sizes)
    state = {"a": np.arange(np.prod(shape), dtype=np.float32).reshape(shape)}
    assert transformed([change], state)["a"].shape == wanted
    assert round_trip([change], state)["a"].tolist() == state["a"].tolist()


def test_reshapes_prng_keys():
    keys = jax.random.split(jax.random.key(0), 6)
    found = transformed([reshape("k", "(a b) -> b a", a=2)], {"k": keys})["k"]
    wanted = jax.random.key_data(keys).reshape(2, 3, -1).swapaxes(0, 1)
    np.testing.assert_array_equal(wanted, jax.random.key_data(found))


FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=4)


def test_factored_moments_follow_pure_transpositions():
    state = state_of("dict", {"w": jnp.ones((8, 24))}, FACTORED)
    turned = transformed([reshape("params/w", "a b -> b a")], state)
    [row] = [v for p, v in table_of(state).items() if "v_row" in p]
    [col] = [v for p, v in turned.items() if "v_col" in p]
    assert row.shape == (8,)
    assert {v.shape for p, v in turned.items() if "v_row" in p} == {(8,)}
    assert col.shape == (24,)
    joined = transformed([reshape("params/w", "a b -> (a b)")], state)
    assert not [p for p in joined if "v_row" in p or "v_col" in p]


@pytest.mark.parametrize(
    "change",
    [
        reshape("params/w", SPLIT_HEADS, h=2),
        remap([("params/w", "params/w", SPLIT_HEADS)], h=2),
        transpose("params/w"),
        permute("params/w", [3, 2, 1, 0]),
    ],
)
def test_norms_follow_any_rearrangement(change):
    state = state_of("dict", {"w": jnp.ones((4, 6))}, optax.novograd(1e-3))
    norm = "opt_state/0/nu/w"
    assert transformed([change], state)[norm] == table_of(state)[norm] != 0


def test_permutation_and_form_split_rope_halves_equally():
    state = state_of("dict", {"q": jnp.ones((8, 3))}, optax.adam(1e-3))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    by_order = transformed([permute("params/q", order)], state)
    by_form = transformed([reshape("params/q", "(d two) e -> (two d) e", two=2)], state)
    for path, value in by_order.items():
        np.testing.assert_array_equal(value, by_form[path], err_msg=path)


@st.composite
def forms(draw):
    """Returns a form, the sizes of all its axes, and the shape of an array."""
    sizes = draw(
        st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 4), max_size=5)
    )
    names = list(sizes)

    def side():
        order = draw(st.permutations(names))
        axes = []
        while order:
            count = draw(st.integers(1, len(order)))
            axes.append(order[:count])
            order = order[count:]
        for _ in range(draw(st.integers(0, 2))):
            axes.insert(draw(st.integers(0, len(axes))), [])
        return axes

    def text(axes):
        return " ".join(
            draw(st.sampled_from(["1", "()"]))
            if not names
            else names[0]
            if len(names) == 1
            else f"({' '.join(names)})"
            for names in axes
        )

    old, new = side(), side()
    shape = [int(np.prod([sizes[n] for n in names])) for names in old]
    return f"{text(old)} -> {text(new)}", sizes, shape


@pytest.mark.slow
@given(case=forms())
def test_any_form_matches_einops_and_is_undone(case):
    form, sizes, shape = case
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    change = reshape("a", form, **sizes)
    found = transformed([change], {"a": value})["a"]
    np.testing.assert_array_equal(einops.rearrange(value, form, **sizes), found)
    back = round_trip([change], {"a": value})["a"]
    np.testing.assert_array_equal(value, back)
    assert str(change.inverse().inverse()) == str(change)


# ---- grouped queries ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dict", "FrozenDict", "nnx"])
def test_splits_grouped_queries_into_unequal_parts(kind):
    """4 heads of queries share 2 heads of keys and values, of 3 entries each."""
    state = state_of(kind, {"qkv": jnp.ones((24, 5))}, optax.adamw(1e-3))
    parts = [rf"params/{name}" for name in "qkv"]
    changes = [
        split("params/qkv", parts, axis=0, sizes=[12, 6, 6]),
        reshape("params/q", SPLIT_HEADS, h=4),
        reshape("params/(k|v)", SPLIT_HEADS, h=2),
    ]
    before, after = table_of(state), transformed(changes, state)
    for whole, value in before.items():
        if not whole.endswith("qkv") and "qkv/" not in whole:
            continue
        for name, start, heads in (("q", 0, 4), ("k", 12, 2), ("v", 18, 2)):
            part = value[start : start + heads * 3]
            wanted = einops.rearrange(part, SPLIT_HEADS, h=heads)
            np.testing.assert_array_equal(wanted, after[whole.replace("qkv", name)])
    back = round_trip(changes, state)
    for path, value in before.items():
        np.testing.assert_array_equal(value, back[path], err_msg=path)


def test_splits_parts_along_axis_of_form():
    """Each group has its queries, its key and its value side by side."""
    state = state_of("dict", {"qkv": jnp.ones((2 * 4 * 3, 5))}, optax.adamw(1e-3))
    parts = [rf"params/{name}" for name in "qkv"]
    changes = [
        reshape("params/qkv", "(g n d) e -> g n d e", g=2, n=4),
        split("params/qkv", parts, axis=1, sizes=[2, 1, 1]),
        reshape("params/q", "g n d e -> e (g n) d", g=2, n=2),
    ]
    found = transformed(changes, state)
    whole = table_of(state)["params/qkv"].reshape(2, 4, 3, 5)
    wanted = einops.rearrange(whole[:, :2], "g n d e -> e (g n) d")
    np.testing.assert_array_equal(wanted, found["params/q"])
    assert found["opt_state/0/mu/v"].shape == (2, 1, 3, 5)
    back = round_trip(changes, state)
    for path, value in table_of(state).items():
        np.testing.assert_array_equal(value, back[path], err_msg=path)
    fused = fuse([r"params/q", r"params/k"], "params/qk", axis=0, sizes=[4, 2])
    with pytest.raises(errors.OptionError, match="sizes"):
        transformed([*changes, fused], state)


def test_error_of_split_names_each_leaf_and_moment_once(tmp_path):
    params = {"qkv": {"kernel": jnp.ones((4, 7)), "bias": jnp.ones(7)}}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    flaxckpt.save(tmp_path / "c", state)
    heads = "params", "opt_state/0/mu", "opt_state/0/nu"
    for pattern, named in (("(params)", heads[:1]), ("(.*)", heads)):
        parts = [rf"\1/{part}/\2" for part in "qkv"]
        change = split(rf"{pattern}/qkv/(\w+)", parts)
        with pytest.raises(errors.OptionError) as caught:
            flaxckpt.load(tmp_path / "c", transforms=[change])
        head, *rows = str(caught.value).splitlines()
        assert head.endswith(f"{2 * len(named)} leaves:")
        assert sorted(row.split(",")[0].strip() for row in rows) == sorted(
            f"{path}/qkv/{leaf}" for path in named for leaf in ("bias", "kernel")
        )
