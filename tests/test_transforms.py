"""Leaves are renamed, cut, stacked and computed on the way, moments with them."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors, transforms
from flaxckpt.transforms import (
    _patterns,
    assign,
    cast,
    copy,
    drop,
    from_function,
    fuse,
    grow,
    keep,
    map_leaf,
    merge,
    pad,
    rename,
    split,
    stack,
    transpose,
    unstack,
)


class Layers(nn.Module):
    """Three equal layers and a head."""

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.Dense(4, name=f"layers_{i}")(x)
        return nn.Dense(2, name="head")(x)


def trained(tx=None, model=None, seed=0):
    """A state whose leaves are all different, and none of them zero."""
    model = model or Layers()
    params = model.init(jax.random.key(seed), jnp.ones((1, 4)))["params"]
    params = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(p.size + seed), p.shape), params
    )
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=tx or optax.adamw(1e-3)
    )
    for step in range(2):
        grads = jax.tree.map(lambda p, step=step: p * (step + 1), state.params)
        state = state.apply_gradients(grads=grads)
    return state


@pytest.fixture(scope="module")
def state():
    return trained()


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    flaxckpt.save(path, state)
    return path


def paths(path, *steps):
    """The leaf paths after transforms."""
    found = flaxckpt.load(path, transforms=steps)
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return [jax.tree_util.keystr(k, simple=True, separator="/") for k, _ in leaves]


def assert_equal(wanted, found):
    jax.tree.map(np.testing.assert_array_equal, wanted, found)


# ---- names ------------------------------------------------------------------------
def test_renaming_takes_the_moments_along(saved, state):
    found = flaxckpt.load(
        saved, transforms=[rename("params/head/(.*)", r"params/out/\1")]
    )
    assert_equal(state.params["head"], found["params"]["out"])
    assert_equal(state.opt_state[0].mu["head"], found["opt_state"][0]["mu"]["out"])
    assert_equal(state.opt_state[0].nu["head"], found["opt_state"][0]["nu"]["out"])
    assert "head" not in found["params"]
    assert "head" not in found["opt_state"][0]["mu"]


def test_a_renamed_model_is_restored_optimizer_and_all(saved, state):
    class Renamed(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(3):
                x = nn.Dense(4, name=f"trunk_{i}")(x)
            return nn.Dense(2, name="out")(x)

    wanted = trained(model=Renamed(), seed=5)
    renames = rename(
        {
            r"params/layers_(\d)/(.*)": r"params/trunk_\1/\2",
            "params/head/(.*)": r"params/out/\1",
        }
    )
    found = flaxckpt.load(saved, wanted, transforms=[renames])
    assert_equal(state.params["layers_1"], found.params["trunk_1"])
    assert_equal(state.opt_state[0].nu["head"], found.opt_state[0].nu["out"])
    assert int(found.opt_state[0].count) == 2
    plan = flaxckpt.plan(saved, wanted, transforms=[renames])
    assert not plan.problems
    assert plan.count("renamed") == 24
    assert plan.leaves["params/out/bias"].sources == ("params/head/bias",)


@pytest.mark.parametrize(
    "names",
    [("layers_0", "layers_1"), ("layers_0", "layers_1", "layers_2")],
    ids=["swap", "rotation"],
)
def test_names_may_change_places(saved, state, names):
    turned = [*names[1:], names[0]]
    rules = {
        f"params/{old}/(.*)": rf"params/{new}/\1"
        for old, new in zip(names, turned, strict=True)
    }
    found = flaxckpt.load(saved, state, transforms=[rename(rules)])
    for old, new in zip(names, turned, strict=True):
        assert_equal(state.params[old], found.params[new])
        assert_equal(state.opt_state[0].mu[old], found.opt_state[0].mu[new])
    back = flaxckpt.load(
        saved, state, transforms=[rename(rules), rename(rules).inverse()]
    )
    assert_equal(state, back)


def test_one_leaf_fills_two(saved, state):
    found = flaxckpt.load(
        saved,
        state,
        transforms=[
            drop("params/layers_1/.*"),
            copy("params/layers_0/(.*)", r"params/layers_1/\1"),
        ],
    )
    assert_equal(state.params["layers_0"], found.params["layers_0"])
    assert_equal(state.params["layers_0"], found.params["layers_1"])
    assert_equal(state.opt_state[0].mu["layers_0"], found.opt_state[0].mu["layers_1"])


def test_nothing_matches_and_the_nearest_are_named(saved):
    with pytest.raises(errors.OptionError, match="nearest are params/head/kernel"):
        flaxckpt.load(saved, transforms=[rename("param/head/kernel", "x")])


def test_two_leaves_of_one_name_are_refused_with_all_of_them(saved):
    with pytest.raises(errors.OptionError) as caught:
        flaxckpt.load(
            saved, transforms=[rename(r"params/layers_\d/(.*)", r"params/\1")]
        )
    assert "params/kernel: by params/layers_0/kernel, params/layers_1/k" in str(
        caught.value
    )
    assert "opt_state/0/mu/bias: by" in str(caught.value)


def test_a_leaf_where_others_have_a_container_is_refused(saved):
    with pytest.raises(errors.OptionError, match="params/head: beside params/head/b"):
        flaxckpt.load(saved, transforms=[rename("params/layers_0/bias", "params/head")])


def test_a_leaf_may_go_where_a_container_was_empty(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": {}, "b": jnp.ones(2)})
    found = flaxckpt.load(tmp_path / "c", transforms=[rename("b", "a/b")])
    np.testing.assert_array_equal(found["a"]["b"], [1, 1])


def test_a_replacement_with_a_group_too_many_is_refused(saved):
    with pytest.raises(errors.OptionError, match="does not go with the pattern"):
        flaxckpt.load(saved, transforms=[rename("params/head/(.*)", r"\2")])


def test_drop_takes_moments_along_and_keep_does_not(saved):
    left = paths(saved, drop("params/head/.*"))
    assert not [path for path in left if "head" in path]
    assert paths(saved, keep("params/head/.*")) == [
        "params/head/bias",
        "params/head/kernel",
    ]


def test_what_is_dropped_is_not_read(saved, state):
    plan = flaxckpt.plan(
        saved, state, transforms=[drop("params/layers_.*")], missing="init"
    )
    assert plan.count("init") == 18
    assert plan.bytes_to_read == 4 * (1 + 3 * (8 + 2)) + 8  # the step is an int64


# ---- assign -----------------------------------------------------------------------
def test_assignments_go_from_the_state_to_the_checkpoint(saved, state):
    rules = [
        (r"params/layers_[12]/(.*)", r"params/layers_0/\1"),
        ("params/head/.*", None),
    ]
    fresh = trained(seed=9)
    found = flaxckpt.load(saved, fresh, transforms=[assign(rules)], missing="init")
    for name in ("layers_0", "layers_1", "layers_2"):
        assert_equal(state.params["layers_0"], found.params[name])
        assert_equal(state.opt_state[0].mu["layers_0"], found.opt_state[0].mu[name])
    assert_equal(fresh.params["head"], found.params["head"])


def test_every_assignment_must_be_used_unless_it_need_not(saved, state):
    rules = [("params/tail/.*", None)]
    with pytest.raises(errors.OptionError, match=r"'params/tail/\.\*' matches no leaf"):
        flaxckpt.load(saved, state, transforms=[assign(rules)])
    found = flaxckpt.load(saved, state, transforms=[assign(rules, strict=False)])
    assert_equal(state, found)


def test_the_same_rule_twice_is_no_fault_of_the_first(saved, state):
    """T5X counts rules by their text, and fails with an empty list."""
    rules = [("params/head/.*", None)] * 2
    with pytest.raises(errors.OptionError, match="params/head"):
        flaxckpt.load(saved, state, transforms=[assign(rules)], missing="init")


def test_what_is_assigned_must_be_there(saved, state):
    rules = [("params/head/(.*)", r"params/tail/\1")]
    with pytest.raises(errors.OptionError, match="from params/tail/kernel"):
        flaxckpt.load(saved, state, transforms=[assign(rules)])


def test_assignments_need_a_state(saved):
    with pytest.raises(errors.OptionError, match="pass an abstract state"):
        flaxckpt.load(saved, transforms=[assign([("params/.*", None)])])


# ---- values -----------------------------------------------------------------------
def test_layers_are_stacked_for_a_scan_and_unstacked_again(saved, state):
    stacked = stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")
    found = flaxckpt.load(saved, transforms=[stacked])
    for tree, old in (
        (found["params"], state.params),
        (found["opt_state"][0]["nu"], state.opt_state[0].nu),
    ):
        wanted = jnp.stack([old[f"layers_{i}"]["kernel"] for i in range(3)])
        np.testing.assert_array_equal(tree["layers"]["kernel"], wanted)
    back = flaxckpt.load(saved, state, transforms=[stacked, stacked.inverse()])
    assert_equal(state, back)


def test_a_scanned_model_is_saved_layer_by_layer(tmp_path, state):
    """And restored by the inverse; the optimizer goes both ways."""
    flaxckpt.save(tmp_path / "flat", state)
    stacked = [stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2", axis=1)]
    flaxckpt.save(tmp_path / "stacked", state, transforms=stacked)
    metadata = flaxckpt.metadata(tmp_path / "stacked")
    assert metadata.leaves["params/layers/kernel"].shape == (4, 3, 4)
    assert metadata.leaves["opt_state/0/mu/layers/kernel"].role.param == "layers/kernel"
    assert metadata.transforms == (str(stacked[0]),)
    found = flaxckpt.load(
        tmp_path / "stacked", state, transforms=transforms.inverse(stacked)
    )
    assert_equal(state, found)


def test_missing_parts_and_unlike_ones_are_refused(saved):
    with pytest.raises(errors.OptionError, match="lacks its parts 0"):
        flaxckpt.load(saved, transforms=[stack(r"params/layers_([12])/(.*)", r"l/\2")])
    unlike = stack(r"params/layers_(0)/(kernel|bias)", "params/l")
    with pytest.raises(errors.OptionError, match="would both be part 0"):
        flaxckpt.load(saved, transforms=[unlike])
    with pytest.raises(errors.OptionError, match="the number of a part"):
        flaxckpt.load(saved, transforms=[stack(r"params/(.*)/kernel", "params/k")])


def test_a_fused_projection_is_split_and_fused(tmp_path):
    qkv = jax.random.normal(jax.random.key(0), (8, 24))
    params = {"attn": {"qkv": {"kernel": qkv}}, "mlp": jnp.ones((8, 8))}
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state = state.apply_gradients(grads=params)
    flaxckpt.save(tmp_path / "c", state)
    parts = [rf"\1/{name}/kernel" for name in ("query", "key", "value")]
    cut = split("(.*)/qkv/kernel", parts)
    found = flaxckpt.load(tmp_path / "c", transforms=[cut])
    np.testing.assert_array_equal(
        found["params"]["attn"]["key"]["kernel"],
        state.params["attn"]["qkv"]["kernel"][:, 8:16],
    )
    moments = found["opt_state"][1][0]["mu"]["attn"]
    np.testing.assert_array_equal(
        moments["value"]["kernel"],
        state.opt_state[1][0].mu["attn"]["qkv"]["kernel"][:, 16:],
    )
    back = flaxckpt.load(tmp_path / "c", state, transforms=[cut, cut.inverse()])
    assert_equal(state, back)


def test_parts_of_different_size_need_their_sizes(tmp_path):
    flaxckpt.save(tmp_path / "c", {"q": jnp.ones((4, 8)), "kv": jnp.zeros((4, 4))})
    with pytest.raises(errors.OptionError, match=r"pass sizes=\[8, 4\]"):
        flaxckpt.load(tmp_path / "c", transforms=[fuse(["q", "kv"], "qkv")])
    fused = fuse(["q", "kv"], "qkv", sizes=[8, 4])
    found = flaxckpt.load(tmp_path / "c", transforms=[fused])
    assert found["qkv"].shape == (4, 12)
    back = flaxckpt.load(tmp_path / "c", transforms=[fused, fused.inverse()])
    np.testing.assert_array_equal(back["q"], np.ones((4, 8)))
    np.testing.assert_array_equal(back["kv"], np.zeros((4, 4)))


def test_a_vocabulary_grows_and_shrinks(tmp_path):
    table = jax.random.normal(jax.random.key(0), (5, 3))
    state = TrainState.create(apply_fn=None, params={"e": table}, tx=optax.adam(1e-3))
    state = state.apply_gradients(grads={"e": table})
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", transforms=[grow("params/e", 0, 8)])
    np.testing.assert_array_equal(found.params["e"][:5], state.params["e"])
    np.testing.assert_allclose(
        found.params["e"][5:], np.tile(state.params["e"].mean(0), (3, 1)), rtol=1e-6
    )
    moments = found.opt_state[0].mu["e"]
    np.testing.assert_array_equal(moments[:5], state.opt_state[0].mu["e"])
    assert not moments[5:].any()
    cut = transforms.slice("params/e", (5, None))
    back = flaxckpt.load(
        tmp_path / "c", state, transforms=[grow("params/e", 0, 8), cut]
    )
    assert_equal(state, back)
    random = [grow("params/e", 0, 8, init="normal")]
    one, two = (flaxckpt.load(tmp_path / "c", transforms=random) for _ in range(2))
    assert_equal(one.params, two.params)
    assert len(np.unique(one.params["e"][5:])) == 9
    zeros = flaxckpt.load(
        tmp_path / "c", transforms=[grow("params/e", -2, 7, init="zeros")]
    )
    assert not zeros.params["e"][5:].any()
    ones = flaxckpt.load(
        tmp_path / "c", transforms=[pad("params/e", (7, None), value=1)]
    )
    assert (ones.params["e"][5:] == 1).all()
    assert not ones.opt_state[0].nu["e"][5:].any()
    for wrong in (
        grow("params/e", 0, 4),
        pad("params/e", (4, 3)),
        pad("params/e", (8,)),
        transforms.slice("params/e", (6, 3)),
    ):
        with pytest.raises(errors.OptionError, match="does not go with params/e"):
            flaxckpt.load(tmp_path / "c", transforms=[wrong])


def test_positions_are_interpolated_and_kernels_transposed(saved, state):
    resize = map_leaf(
        "params/head/kernel", lambda x: jax.image.resize(x, (6, 2), "linear")
    )
    turn = transpose("params/layers_0/kernel")
    found = flaxckpt.load(saved, transforms=[resize, turn])
    np.testing.assert_allclose(
        found.params["head"]["kernel"],
        jax.image.resize(state.params["head"]["kernel"], (6, 2), "linear"),
        rtol=1e-6,
    )
    assert found.opt_state[0].mu["head"]["kernel"].shape == (6, 2)
    np.testing.assert_array_equal(
        found.params["layers_0"]["kernel"], state.params["layers_0"]["kernel"].T
    )
    back = flaxckpt.load(saved, state, transforms=[turn, turn.inverse()])
    assert_equal(state, back)


@given(axes=st.permutations(range(3)))
def test_any_transposition_is_undone(axes):
    turn = transpose("a", axes)
    x = jnp.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(turn.inverse().fn(turn.fn(x)), x)


def test_a_map_is_undone_by_the_inverse_that_it_was_given(saved, state):
    doubled = map_leaf("params/.*", lambda x: x * 2, inverse=lambda x: x / 2)
    found = flaxckpt.load(saved, state, transforms=[doubled])
    assert_equal(jax.tree.map(lambda x: x * 2, state.params), found.params)
    assert_equal(state.opt_state, found.opt_state)  # of the same shape: left alone
    back = flaxckpt.load(saved, state, transforms=[doubled, doubled.inverse()])
    assert_equal(state, back)


def test_functions_must_be_traceable(saved):
    with pytest.raises(errors.OptionError, match=r"use jax\.numpy"):
        flaxckpt.load(saved, transforms=[map_leaf("params/.*", lambda x: np.sort(x))])
    with pytest.raises(errors.OptionError, match="must give one array"):
        flaxckpt.load(saved, transforms=[map_leaf("params/.*", lambda x: (x, x))])


def test_strings_have_no_values_to_compute_with(tmp_path):
    flaxckpt.save(tmp_path / "c", {"name": "x", "w": jnp.ones(3), "none": None})
    with pytest.raises(errors.OptionError, match="these are strings: name"):
        flaxckpt.load(tmp_path / "c", transforms=[map_leaf(".*", lambda x: x)])
    moved = rename("(.*)", r"inner/\1")
    found = flaxckpt.load(tmp_path / "c", transforms=[moved])
    assert found["inner"]["name"] == "x"
    assert found["inner"]["none"] is None


def test_casts_and_functions_combine(saved, state):
    found = flaxckpt.load(
        saved,
        transforms=[
            cast("params/head/kernel", "bfloat16"),
            map_leaf("params/head/kernel", lambda x: x + x.dtype.itemsize),
            cast("params/head/kernel", "float16"),
        ],
    )
    wanted = (state.params["head"]["kernel"].astype("bfloat16") + 2).astype("float16")
    np.testing.assert_array_equal(found.params["head"]["kernel"], wanted)


def test_what_cannot_be_computed_in_32_bits_is_computed_in_64(tmp_path):
    wide = np.array([2**40 + 1, 3, 1])
    flaxckpt.save(
        tmp_path / "c", {"w": wide, "x": np.array([1 + 1e-12]), "n": 2**50 + 1}
    )
    found = flaxckpt.load(tmp_path / "c", transforms=[map_leaf(".*", lambda x: x + 1)])
    np.testing.assert_array_equal(found["w"], wide + 1)
    np.testing.assert_array_equal(found["x"], np.array([1 + 1e-12]) + 1)
    assert found["n"] == 2**50 + 2
    assert type(found["n"]) is int
    assert found["w"].flags.writeable


def test_prng_keys_are_stacked(tmp_path):
    keys = [jax.random.key(i) for i in range(3)]
    flaxckpt.save(
        tmp_path / "c", {f"layer_{i}": {"rng": k} for i, k in enumerate(keys)}
    )
    stacked = stack(r"layer_(\d)/(.*)", r"layers/\2")
    found = flaxckpt.load(tmp_path / "c", transforms=[stacked])
    np.testing.assert_array_equal(
        jax.random.key_data(found["layers"]["rng"]),
        jax.random.key_data(jnp.stack(keys)),
    )


# ---- functions over trees ---------------------------------------------------------
def test_functions_of_t5x_style_on_save(tmp_path, state):
    def halve(tree, infos):
        assert infos["params"]["head"]["kernel"].shape == (4, 2)
        tree["params"] = jax.tree.map(lambda x: x.astype("bfloat16"), tree["params"])
        tree["note"] = "halved"
        return tree, infos

    flaxckpt.save(tmp_path / "c", state, transforms=[from_function(halve)])
    metadata = flaxckpt.metadata(tmp_path / "c")
    assert metadata.leaves["params/head/kernel"].dtype == "bfloat16"
    assert "halve" in metadata.transforms[0]
    found = flaxckpt.load(tmp_path / "c")
    assert found["note"] == "halved"
    assert_equal(state.opt_state[0].mu, found["opt_state"][0]["mu"])


def test_functions_of_t5x_style_on_restore(saved, state):
    fresh = trained(seed=3)

    def mix(checkpoint, target, *, is_resuming=False):
        assert not is_resuming
        params = checkpoint["params"]
        params["layers_0"] = params["layers_2"]
        params["layers_1"] = jax.tree.map(
            lambda a, b: a + b, params["layers_1"], target["params"]["layers_1"]
        )
        params["head"] = target["params"]["head"]
        return checkpoint

    found = flaxckpt.load(saved, fresh, transforms=[from_function(mix)])
    assert_equal(state.params["layers_2"], found.params["layers_0"])
    assert_equal(fresh.params["head"], found.params["head"])
    np.testing.assert_array_equal(
        found.params["layers_1"]["kernel"],
        state.params["layers_1"]["kernel"] + fresh.params["layers_1"]["kernel"],
    )
    plan = flaxckpt.plan(saved, fresh, transforms=[from_function(mix)])
    assert plan.leaves["params/head/kernel"].actions == ("init",)
    assert plan.leaves["params/layers_0/kernel"].sources == ("params/layers_2/kernel",)
    assert "transformed" in plan.leaves["params/layers_1/kernel"].actions


def test_a_function_reads_only_what_it_needs(saved, state):
    def pick(tree):
        return {
            "sum": tree["params"]["head"]["bias"]
            + tree["params"]["layers_0"]["bias"][:2]
        }

    wanted = {"sum": jax.ShapeDtypeStruct((2,), jnp.float32)}
    plan = flaxckpt.plan(saved, wanted, transforms=[from_function(pick)])
    assert plan.bytes_to_read == (2 + 4) * 4
    found = flaxckpt.load(saved, wanted, transforms=[from_function(pick)])
    np.testing.assert_array_equal(
        found["sum"],
        state.params["head"]["bias"] + state.params["layers_0"]["bias"][:2],
    )


def test_abstract_leaves_of_the_target_stay_missing(saved, state):
    def take(checkpoint, target, *, is_resuming=False):
        return {"params": {**checkpoint["params"], "head": target["params"]["head"]}}

    abstract = {"params": flaxckpt.abstract_state(state).params}
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(saved, abstract, transforms=[from_function(take)])
    assert [m.leaf for m in caught.value.mismatches] == [
        "params/head/bias",
        "params/head/kernel",
    ]


def test_functions_of_another_kind_are_refused(saved):
    with pytest.raises(errors.OptionError, match="from_function wants"):
        from_function(lambda: None)
    with pytest.raises(errors.OptionError, match=r"use jax\.numpy"):
        flaxckpt.load(
            saved, transforms=[from_function(lambda t: {"x": np.asarray(t["step"])})]
        )
    with pytest.raises(errors.OptionError, match="its infos"):
        flaxckpt.load(saved, transforms=[from_function(lambda state, infos: state)])


def test_any_callable_on_tables_is_a_transform(saved):
    def only_head(table):
        return {path: leaf for path, leaf in table.items() if "params/head" in path}

    assert paths(saved, only_head) == ["params/head/bias", "params/head/kernel"]
    with pytest.raises(errors.OptionError, match="only_head cannot be inverted"):
        transforms.inverse([only_head])


# ---- several sources --------------------------------------------------------------
def test_two_checkpoints_become_one(tmp_path, saved, state):
    flaxckpt.save(tmp_path / "text", {"params": {"text": jnp.arange(3.0)}})
    wanted = {"params": {"head": state.params["head"], "text": jnp.zeros(3)}}
    found = flaxckpt.load(saved, wanted, transforms=[merge(tmp_path / "text")])
    np.testing.assert_array_equal(found["params"]["text"], [0, 1, 2])
    assert_equal(state.params["head"], found["params"]["head"])


def test_leaves_of_both_are_refused_or_chosen(tmp_path, saved, state):
    other = trained(seed=4)
    flaxckpt.save(tmp_path / "other", other)
    with pytest.raises(errors.OptionError, match="26 leaves"):
        flaxckpt.load(saved, state, transforms=[merge(tmp_path / "other")])
    only = [keep("params/head/.*")]
    for which, params in (("first", state.params), ("second", other.params)):
        mixed = merge(tmp_path / "other", transforms=only, on_conflict=which)
        found = flaxckpt.load(saved, state, transforms=[mixed])
        assert_equal(params["head"], found.params["head"])
        assert_equal(state.params["layers_0"], found.params["layers_0"])


def test_leaves_of_two_checkpoints_are_computed_together(tmp_path):
    """They have equal paths, and only one of them is damaged."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        flaxckpt.save(tmp_path / name, {"w": jnp.full((40, 40), value)})
    steps = [
        rename("w", "x"),
        merge(tmp_path / "b", transforms=[rename("w", "y")]),
        from_function(lambda tree: {"mean": (tree["x"] + tree["y"]) / 2}),
    ]
    found = flaxckpt.load(tmp_path / "a", transforms=steps)
    assert (found["mean"] == 1.5).all()
    [chunk] = (tmp_path / "b" / "state" / "w").glob("c.*")
    content = bytearray(chunk.read_bytes())
    content[5] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(errors.DamagedCheckpointError, match=r"1 leaf of .*b cannot"):
        flaxckpt.load(tmp_path / "a", transforms=steps)


# ---- other optimizers, other trees ------------------------------------------------
def test_factored_moments_of_a_changed_shape_start_afresh(tmp_path, caplog):
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    state = trained(tx)
    flaxckpt.save(tmp_path / "c", state)
    wanted = trained(tx, seed=2)
    params = dict(wanted.params)
    params["head"] = {"kernel": jnp.zeros((4, 5)), "bias": jnp.zeros(5)}
    wanted = TrainState.create(apply_fn=None, params=params, tx=tx)
    grown = [grow("params/head/kernel", 1, 5), grow("params/head/bias", 0, 5)]
    with caplog.at_level(logging.WARNING):
        found = flaxckpt.load(tmp_path / "c", wanted, transforms=grown)
    assert "start afresh" in caplog.text
    np.testing.assert_array_equal(
        found.params["head"]["kernel"][:, :2], state.params["head"]["kernel"]
    )
    factored, fresh = found.opt_state[0], wanted.opt_state[0]
    assert_equal(fresh.v_col["head"], factored.v_col["head"])
    old = state.opt_state[0]
    assert_equal(old.v_row["layers_0"], factored.v_row["layers_0"])


def test_an_nnx_model_and_its_optimizer_are_renamed(tmp_path):
    def build(name, seed):
        class Net(nnx.Module):
            def __init__(self, rngs):
                setattr(self, name, nnx.Linear(3, 3, rngs=rngs))

            def __call__(self, x):
                return getattr(self, name)(x)

        model = Net(nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        grads = nnx.grad(lambda m: m(jnp.ones((2, 3))).sum())(model)
        optimizer.update(model, grads)
        return {"model": model, "optimizer": optimizer}

    old, new = build("first", 0), build("second", 1)
    flaxckpt.save(tmp_path / "c", old)
    found = flaxckpt.load(
        tmp_path / "c", new, transforms=[rename("model/first/(.*)", r"model/second/\1")]
    )
    np.testing.assert_array_equal(
        found["model"].second.kernel, old["model"].first.kernel
    )
    moments = [found, old]
    moments = [each["optimizer"].opt_state[0].mu for each in moments]
    np.testing.assert_array_equal(
        moments[0]["second"]["bias"], moments[1]["first"]["bias"]
    )


def test_two_models_of_equal_names_keep_to_their_own_optimizers(tmp_path):
    def part(seed):
        params = {"w": jax.random.normal(jax.random.key(seed), (3, 3))}
        state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        return state.apply_gradients(grads=params)

    state = {"g": part(0), "d": part(1)}
    flaxckpt.save(tmp_path / "c", state)
    moved = flaxckpt.load(
        tmp_path / "c", transforms=[rename("g/params/w", "g/params/v")]
    )
    np.testing.assert_array_equal(
        moved["g"]["opt_state"][0]["mu"]["v"], state["g"].opt_state[0].mu["w"]
    )
    np.testing.assert_array_equal(
        moved["d"]["opt_state"][0]["mu"]["w"], state["d"].opt_state[0].mu["w"]
    )


def test_moments_are_known_where_no_roles_are(tmp_path, state):
    """As in a checkpoint of Orbax."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "c", state)
    renames = rename("params/head/(.*)", r"params/out/\1")
    found = flaxckpt.load(tmp_path / "c", transforms=[renames])
    assert_equal(state.opt_state[0].mu["head"], found["opt_state"][0]["mu"]["out"])


def test_list_elements_stay_in_order(tmp_path):
    state = {"blocks": [jnp.full(2, i) for i in range(12)]}
    flaxckpt.save(tmp_path / "c", state)
    turned = rename({f"blocks/{i}": f"blocks/{11 - i}" for i in range(12)})
    found = flaxckpt.load(tmp_path / "c", transforms=[turned])
    assert [int(x[0]) for x in found["blocks"]] == list(range(11, -1, -1))


# ---- where it is computed ---------------------------------------------------------
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_computed_leaves_are_split_as_wanted(tmp_path, state, axis_type):
    mesh = jax.make_mesh(
        (2, 4),
        ("data", "model"),
        axis_types=(getattr(jax.sharding.AxisType, axis_type),) * 2,
    )
    flaxckpt.save(tmp_path / "c", state)
    stacked = stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")
    flaxckpt.save(tmp_path / "d", state, transforms=[stacked])
    sharding = jax.NamedSharding(mesh, jax.P(None, "data", "model"))
    wanted = {
        "params": {
            "layers": {
                "kernel": jax.ShapeDtypeStruct((3, 4, 4), "float32", sharding=sharding)
            }
        }
    }
    found = flaxckpt.load(tmp_path / "c", wanted, transforms=[stacked])
    kernel = found["params"]["layers"]["kernel"]
    assert kernel.sharding == sharding
    assert kernel.addressable_shards[0].data.shape == (3, 2, 1)
    np.testing.assert_array_equal(
        kernel, flaxckpt.load(tmp_path / "d")["params"]["layers"]["kernel"]
    )
    flat = jax.NamedSharding(mesh, jax.P("data", "model"))
    grown = {
        "params": {
            "head": {"kernel": jax.ShapeDtypeStruct((4, 8), "float32", sharding=flat)}
        }
    }
    found = flaxckpt.load(
        tmp_path / "c", grown, transforms=[grow("params/head/kernel", 1, 8)]
    )
    assert found["params"]["head"]["kernel"].sharding == flat
    np.testing.assert_array_equal(
        np.asarray(found["params"]["head"]["kernel"])[:, :2],
        state.params["head"]["kernel"],
    )


def test_sharded_leaves_are_computed_before_a_save(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    layers = {
        f"layer_{i}": jax.device_put(jnp.arange(16.0) + i, sharding) for i in range(2)
    }
    flaxckpt.save(tmp_path / "c", layers, transforms=[stack(r"layer_(\d)", "layers")])
    found = flaxckpt.load(tmp_path / "c")
    np.testing.assert_array_equal(found["layers"], np.stack(list(layers.values())))


@pytest.mark.parametrize("budget", [1, 100, 2**30])
def test_any_byte_budget_gives_the_same(tmp_path, state, budget):
    with flaxckpt.Checkpointer(tmp_path, max_concurrent_bytes=budget) as ckpt:
        ckpt.save(1, state)
        stacked = stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")
        found = ckpt.restore(transforms=[stacked, stacked.inverse()])
        assert_equal(state.params, found.params)


def test_a_shared_source_is_read_once(tmp_path):
    flaxckpt.save(tmp_path / "c", {"w": jnp.ones((8, 64, 64))})
    apart = [unstack("w", "w_{i}")]
    wanted = {f"w_{i}": jnp.zeros((64, 64)) for i in range(8)}
    plan = flaxckpt.plan(tmp_path / "c", wanted, transforms=apart)
    assert plan.bytes_to_read == 8 * 64 * 64 * 4
    found = flaxckpt.load(tmp_path / "c", wanted, transforms=apart)
    assert all((array == 1).all() for array in found.values())


# ---- as text, and back ------------------------------------------------------------
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["a", "b.", "_", "/", r"\d", "[", "0", "é"]), st.none()
        ),
        min_size=1,
        max_size=8,
    ),
    st.randoms(),
)
def test_plain_patterns_are_inverted(parts, random):
    """A pattern of text and groups, and a replacement with the groups shuffled."""
    import re

    pattern = "".join(r"(\w+)" if part is None else re.escape(part) for part in parts)
    groups = [str(i + 1) for i in range(parts.count(None))]
    random.shuffle(groups)
    replacement = "<" + "|".join(rf"\g<{group}>" for group in groups) + ">"
    path = "".join("xy" if part is None else part for part in parts)
    renamed = re.fullmatch(pattern, path).expand(replacement)
    inverse, back = _patterns.invert(pattern, replacement)
    assert re.fullmatch(inverse, renamed).expand(back) == path


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        ("a.b/(.*)", r"\1"),
        ("(.*)/x", "y"),
        ("(.*)/x", r"\1/\1"),
        ("((a)|b)/x", r"\1"),
        ("(a)*/x", r"\1"),
        ("[ab]/x", "y"),
        ("(?:a|b)/x", "y"),
    ],
)
def test_what_loses_something_is_not_inverted(pattern, replacement):
    with pytest.raises(errors.OptionError, match="cannot be inverted"):
        rename(pattern, replacement).inverse()
    for one_way in (cast("a", "float32"), drop("a"), keep("a"), copy("a", "b")):
        with pytest.raises(errors.OptionError, match="cannot be inverted"):
            one_way.inverse()


def test_an_ambiguous_inverse_is_noticed(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": {"b": {"c": jnp.ones(2)}}})
    swapped = rename("(.*)/(.*)", r"\2/\1")
    with pytest.raises(errors.OptionError, match="several names"):
        flaxckpt.load(tmp_path / "c", transforms=[swapped, swapped.inverse()])


def test_transforms_read_as_the_calls_that_make_them():
    for made in (
        rename("a", "b"),
        rename({"a": "b", "c": "d"}),
        drop("a"),
        keep("a/.*"),
        copy("a", "b"),
        cast("a", "float32", lossy=True),
        pad("a", (3, None), value=1.0),
        transforms.slice("a", (3,)),
        grow("a", 0, 9, init="normal", seed=3),
        transpose("a", (1, 0)),
        split("a", ["b", "c"], axis=0, sizes=[1, 2]),
        fuse(["b", "c"], "a"),
        unstack("a", "a_{i}", axis=1),
        stack(r"a_(?P<i>\d)", "a"),
        assign([("a", None)], strict=False),
    ):
        again = eval(str(made), vars(transforms).copy())
        assert str(again) == str(made)
