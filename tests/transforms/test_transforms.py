"""Leaves are renamed, cut, stacked and computed on the way, moments with them."""

import ast
import contextlib
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st

import flaxckpt
from flaxckpt import errors, transforms
from flaxckpt.transforms import (
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
    rename,
    split,
    stack,
    transpose,
    unstack,
)
from tests.helpers import strategies
from tests.helpers.files import flip_bit
from tests.helpers.optimizer_states import save_with
from tests.transforms.states import round_trip, table_of, transformed


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
def test_rename_moves_moments_along(saved, state):
    found = flaxckpt.load(
        saved, transforms=[rename("params/head/(.*)", r"params/out/\1")]
    )
    assert isinstance(found, TrainState)  # what has the same keys is of the same class
    assert isinstance(found.opt_state[0], optax.ScaleByAdamState)
    assert isinstance(found.opt_state[1], optax.EmptyState)
    assert_equal(state.params["head"], found.params["out"])
    assert_equal(state.opt_state[0].mu["head"], found.opt_state[0].mu["out"])
    assert_equal(state.opt_state[0].nu["head"], found.opt_state[0].nu["out"])
    assert "head" not in found.params
    assert "head" not in found.opt_state[0].mu


def test_restores_renamed_model_with_optimizer(saved, state):
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
def test_rename_swaps_and_rotates_names(saved, state, names):
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


def test_error_of_unmatched_pattern_names_nearest_leaves(saved):
    with pytest.raises(errors.OptionError, match="nearest are params/head/kernel"):
        flaxckpt.load(saved, transforms=[rename("param/head/kernel", "x")])


def test_rejects_colliding_names_and_lists_leaves(saved):
    with pytest.raises(errors.OptionError) as caught:
        flaxckpt.load(
            saved, transforms=[rename(r"params/layers_\d/(.*)", r"params/\1")]
        )
    assert "params/kernel: by params/layers_0/kernel, params/layers_1/k" in str(
        caught.value
    )
    assert "opt_state/0/mu/bias: by" in str(caught.value)


def test_rejects_leaf_in_place_of_container(saved):
    with pytest.raises(errors.OptionError, match="params/head: contains params/head/b"):
        flaxckpt.load(saved, transforms=[rename("params/layers_0/bias", "params/head")])


def test_accepts_leaf_inside_empty_container(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": {}, "b": jnp.ones(2)})
    found = flaxckpt.load(tmp_path / "c", transforms=[rename("b", "a/b")])
    np.testing.assert_array_equal(found["a"]["b"], [1, 1])


def test_drop_includes_moments_and_keep_does_not(saved):
    left = paths(saved, drop("params/head/.*"))
    assert not [path for path in left if "head" in path]
    assert paths(saved, keep("params/head/.*")) == [
        "params/head/bias",
        "params/head/kernel",
    ]


def test_does_not_read_dropped_leaves(saved, state):
    plan = flaxckpt.plan(
        saved, state, transforms=[drop("params/layers_.*")], missing="init"
    )
    assert plan.count("init") == 18
    assert plan.bytes_to_read == 4 * (1 + 3 * (8 + 2)) + 8  # the step is an int64


# ---- assign -----------------------------------------------------------------------
def test_assign_maps_state_leaves_to_checkpoint_leaves(saved, state):
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


def test_strict_assign_rejects_unused_rules(saved, state):
    rules = [("params/tail/.*", None)]
    with pytest.raises(errors.OptionError, match=r"'params/tail/\.\*' matches no leaf"):
        flaxckpt.load(saved, state, transforms=[assign(rules)])
    found = flaxckpt.load(saved, state, transforms=[assign(rules, strict=False)])
    assert_equal(state, found)


def test_error_names_duplicate_assign_rule(saved, state):
    """T5X counts rules by their text, and fails with an empty list."""
    rules = [("params/head/.*", None)] * 2
    with pytest.raises(errors.OptionError, match="params/head"):
        flaxckpt.load(saved, state, transforms=[assign(rules)], missing="init")


def test_assign_rejects_missing_source_leaves(saved, state):
    rules = [("params/head/(.*)", r"params/tail/\1")]
    with pytest.raises(errors.OptionError, match="from params/tail/kernel"):
        flaxckpt.load(saved, state, transforms=[assign(rules)])


def test_assign_needs_state(saved):
    with pytest.raises(errors.OptionError, match="pass an abstract state"):
        flaxckpt.load(saved, transforms=[assign([("params/.*", None)])])


# ---- values -----------------------------------------------------------------------
def test_saves_layers_stacked_and_restores_them_by_inverse(tmp_path, state):
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


def test_rejects_stacking_leaf_of_only_some_layers(tmp_path):
    def layer(*names):
        return {name: jnp.ones(2) for name in names}

    # Two stacks of different depth are none of each other's business.
    state = {
        "encoder": {f"layers_{i}": layer("w") for i in range(3)},
        "decoder": {f"layers_{i}": layer("w") for i in range(2)},
    }
    flaxckpt.save(tmp_path / "two", state)
    both = stack(r"(\w+)/layers_(?P<i>\d+)/(.*)", r"\1/layers/\3")
    found = flaxckpt.load(tmp_path / "two", transforms=[both])
    assert found["encoder"]["layers"]["w"].shape == (3, 2)
    assert found["decoder"]["layers"]["w"].shape == (2, 2)
    for odd, lacking in (("layers_0", "1, 2"), ("layers_2", "0, 1")):
        state["encoder"][odd] = layer("w", "relative_bias")
        flaxckpt.save(tmp_path / odd, state)
        with pytest.raises(errors.OptionError) as caught:
            flaxckpt.load(tmp_path / odd, transforms=[both])
        assert f" {lacking}; found " in str(caught.value)
        assert "Choose a pattern that excludes" in str(caught.value)
        only_w = stack(r"(\w+)/layers_(?P<i>\d+)/(w)", r"\1/layers/\3")
        found = flaxckpt.load(tmp_path / odd, transforms=[only_w])
        assert found["encoder"][odd]["relative_bias"].shape == (2,)
        state["encoder"][odd] = layer("w")


@pytest.mark.parametrize("written_by", ["flaxckpt", "orbax"])
def test_accepts_parameter_named_value(tmp_path, written_by):
    params = {"a": {"value": jnp.arange(3.0), "key": jnp.ones(3)}}
    tx = optax.adam(1e-3)
    _, moments = tx.update(params, tx.init(params))
    state = {"params": params, "opt_state": moments}
    save_with(written_by, tmp_path / "c", state)
    found = flaxckpt.load(
        tmp_path / "c", transforms=[rename(r"params/a/(.*)", r"params/b/\1")]
    )
    mu = jax.tree_util.tree_leaves_with_path(found["opt_state"])
    there = [jax.tree_util.keystr(k, simple=True, separator="/") for k, _ in mu]
    assert sum(path.endswith("b/value") for path in there) == 2
    assert not any("a/value" in path for path in there)
    chained = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    wanted = {"params": params, "opt_state": chained.init(params)}
    found = flaxckpt.load(tmp_path / "c", wanted)
    assert_equal(moments[0].mu, found["opt_state"][1][0].mu)


@pytest.mark.slow
def test_grow_and_slice_resize_vocabulary(tmp_path):
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


def test_error_tells_how_to_give_map_leaf_inverse(saved):
    plain = map_leaf("params/head/bias", lambda x: x + 1)
    with pytest.raises(errors.OptionError, match=r"map_leaf\(.*, inverse=\.\.\.\)"):
        transforms.inverse([plain])
    with pytest.raises(errors.OptionError, match="it loses information"):
        transforms.inverse([grow("params/head/bias", 0, 5)])


def test_rejects_computing_on_strings(tmp_path):
    flaxckpt.save(tmp_path / "c", {"name": "x", "w": jnp.ones(3), "none": None})
    with pytest.raises(errors.OptionError, match="these leaves are strings: name"):
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


def test_computes_wide_values_in_64_bits(tmp_path):
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


def test_stacks_prng_keys(tmp_path):
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
def test_applies_t5x_style_functions_on_save(tmp_path, state):
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
    assert_equal(state.opt_state[0].mu, found["opt_state"][0].mu)


def test_applies_t5x_style_functions_on_restore(saved, state):
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


def test_from_function_reads_only_needed_leaves(saved, state):
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


def test_abstract_target_leaves_stay_missing(saved, state):
    def take(checkpoint, target, *, is_resuming=False):
        return {"params": {**checkpoint["params"], "head": target["params"]["head"]}}

    abstract = {"params": flaxckpt.abstract_state(state).params}
    with pytest.raises(errors.RestoreMismatchError) as caught:
        flaxckpt.load(saved, abstract, transforms=[from_function(take)])
    assert [m.leaf for m in caught.value.mismatches] == [
        "params/head/bias",
        "params/head/kernel",
    ]


def test_from_function_rejects_unsuitable_functions(saved):
    with pytest.raises(errors.OptionError, match="from_function needs"):
        from_function(lambda: None)
    with pytest.raises(errors.OptionError, match=r"use jax\.numpy"):
        flaxckpt.load(
            saved, transforms=[from_function(lambda t: {"x": np.asarray(t["step"])})]
        )
    with pytest.raises(errors.OptionError, match="its infos"):
        flaxckpt.load(saved, transforms=[from_function(lambda state, infos: state)])


def test_accepts_any_callable_on_tables(saved):
    def only_head(table):
        return {path: leaf for path, leaf in table.items() if "params/head" in path}

    assert paths(saved, only_head) == ["params/head/bias", "params/head/kernel"]
    with pytest.raises(errors.OptionError, match="only_head cannot be inverted"):
        transforms.inverse([only_head])


# ---- several sources --------------------------------------------------------------
def test_merges_two_checkpoints(tmp_path, saved, state):
    flaxckpt.save(tmp_path / "text", {"params": {"text": jnp.arange(3.0)}})
    wanted = {"params": {"head": state.params["head"], "text": jnp.zeros(3)}}
    found = flaxckpt.load(saved, wanted, transforms=[merge(tmp_path / "text")])
    np.testing.assert_array_equal(found["params"]["text"], [0, 1, 2])
    assert_equal(state.params["head"], found["params"]["head"])


def test_merge_rejects_or_resolves_conflicts(tmp_path, saved, state):
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


def test_computes_with_leaves_of_two_checkpoints(tmp_path):
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
    flip_bit(tmp_path / "b/state/d/0.small.0", 5)
    with pytest.raises(errors.DamagedCheckpointError, match=r"1 leaf of .*b cannot"):
        flaxckpt.load(tmp_path / "a", transforms=steps)


# ---- other optimizers, other trees ------------------------------------------------
@pytest.mark.slow
def test_reinitializes_factored_moments_of_changed_shape(tmp_path, caplog):
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
    assert "initialized" in caplog.text
    np.testing.assert_array_equal(
        found.params["head"]["kernel"][:, :2], state.params["head"]["kernel"]
    )
    factored, fresh = found.opt_state[0], wanted.opt_state[0]
    assert_equal(fresh.v_col["head"], factored.v_col["head"])
    old = state.opt_state[0]
    assert_equal(old.v_row["layers_0"], factored.v_row["layers_0"])


def test_renames_nnx_model_and_its_optimizer(tmp_path):
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


def test_models_with_equal_names_keep_their_own_optimizers(tmp_path):
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
        moved["g"].opt_state[0].mu["v"], state["g"].opt_state[0].mu["w"]
    )
    np.testing.assert_array_equal(
        moved["d"].opt_state[0].mu["w"], state["d"].opt_state[0].mu["w"]
    )


def test_recognizes_moments_without_roles(tmp_path, state):
    """As in a checkpoint of Orbax."""
    save_with("orbax", tmp_path / "c", state)
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
def test_computed_leaves_get_requested_sharding(tmp_path, state, axis_type):
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
        kernel, flaxckpt.load(tmp_path / "d").params["layers"]["kernel"]
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


def test_save_transforms_sharded_leaves(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    layers = {
        f"layer_{i}": jax.device_put(jnp.arange(16.0) + i, sharding) for i in range(2)
    }
    flaxckpt.save(tmp_path / "c", layers, transforms=[stack(r"layer_(\d)", "layers")])
    found = flaxckpt.load(tmp_path / "c")
    np.testing.assert_array_equal(found["layers"], np.stack(list(layers.values())))


@pytest.mark.parametrize("budget", [1, 100, 2**30])
def test_any_byte_budget_gives_same_result(tmp_path, state, budget):
    with flaxckpt.Checkpointer(tmp_path, max_concurrent_bytes=budget) as ckpt:
        ckpt.save(1, state)
        stacked = stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")
        found = ckpt.restore(transforms=[stacked, stacked.inverse()])
        assert_equal(state.params, found.params)


def test_reads_shared_source_once(tmp_path):
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
def test_inverts_plain_patterns(parts, random):
    """A pattern of text and groups, and a replacement with the groups shuffled."""
    import re

    pattern = "".join(r"(\w+)" if part is None else re.escape(part) for part in parts)
    groups = [str(i + 1) for i in range(parts.count(None))]
    random.shuffle(groups)
    replacement = "<" + "|".join(rf"\g<{group}>" for group in groups) + ">"
    path = "".join("xy" if part is None else part for part in parts)
    renamed = re.fullmatch(pattern, path).expand(replacement)
    [undo] = transforms.inverse([rename(pattern, replacement)])
    inverse, back = ast.literal_eval(str(undo).removeprefix("rename"))
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
def test_lossy_transforms_cannot_be_inverted(pattern, replacement):
    with pytest.raises(errors.OptionError, match="cannot be inverted"):
        rename(pattern, replacement).inverse()
    for one_way in (cast("a", "float32"), drop("a"), keep("a"), copy("a", "b")):
        with pytest.raises(errors.OptionError, match="cannot be inverted"):
            one_way.inverse()


def test_rejects_ambiguous_inverse(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": {"b": {"c": jnp.ones(2)}}})
    swapped = rename("(.*)/(.*)", r"\2/\1")
    with pytest.raises(
        errors.OptionError, match=r"cannot be inverted: .* would become"
    ):
        flaxckpt.load(tmp_path / "c", transforms=[swapped, swapped.inverse()])


# ---- whose moments ------------------------------------------------------------------


class WithEma(TrainState):
    """Keeps a second copy of the parameters, of the same names."""

    ema_params: dict


SWAP = rename({"params/a/(.*)": r"params/b/\1", "params/b/(.*)": r"params/a/\1"})


def two_layers(seed=0, cls=TrainState, tx=None, **more):
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        name: {"kernel": jax.random.normal(key, (4, 4))}
        for name, key in zip("ab", keys, strict=True)
    }
    more = dict.fromkeys(more, params)
    state = cls.create(apply_fn=None, params=params, tx=tx or optax.adam(1e-3), **more)
    for _ in range(2):
        state = state.apply_gradients(grads=params)
    return state


def assert_swapped(old, new, field="mu"):
    """The moments `mu` of a and b have changed places, as the parameters have."""
    np.testing.assert_array_equal(old["a"]["kernel"], new["b"]["kernel"])
    np.testing.assert_array_equal(old["b"]["kernel"], new["a"]["kernel"])


def test_moments_follow_params_rather_than_their_copy(tmp_path):
    state = two_layers(cls=WithEma, ema_params=True)
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", state, transforms=[SWAP])
    assert_swapped(state.params, found.params)
    assert_swapped(state.opt_state[0].mu, found.opt_state[0].mu)
    assert_equal(state.ema_params, found.ema_params)
    averaged = [assign([("ema_params/(.*)", r"params/\1")])]
    copied = flaxckpt.load(tmp_path / "c", state, transforms=averaged, unused="error")
    assert_equal(state.params, copied.ema_params)
    assert_equal(state.opt_state, copied.opt_state)
    both = rename({r"(\w*)params/a/(.*)": r"\1params/c/\2"})
    found = flaxckpt.load(tmp_path / "c", transforms=[both])
    assert "c" in found["opt_state"][0].nu  # whose class is not known without types=


def test_rejects_renaming_with_ambiguous_moments(tmp_path):
    def net(seed):
        return nnx.Linear(3, 3, rngs=nnx.Rngs(seed))

    model, ema = net(0), net(1)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    state = {"g": model, "g_ema": ema, "optimizer": optimizer}
    flaxckpt.save(tmp_path / "c", state)
    with pytest.raises(errors.OptionError) as caught:
        flaxckpt.load(tmp_path / "c", transforms=[rename("g/kernel", "g/weight")])
    assert "optimizer/opt_state/0/mu/kernel: g/kernel or g_ema/kernel" in str(
        caught.value
    )
    for rules in ({"g/(.*)": r"g_ema/\1"}, {"g_ema/(.*)": r"g/\1"}):
        found = flaxckpt.load(tmp_path / "c", state, transforms=[assign(rules)])
        assert_equal(*(nnx.state(s["optimizer"]) for s in (state, found)))
        assert_equal(nnx.state(found["g"]), nnx.state(found["g_ema"]))
    both = rename({r"(g|g_ema)/kernel": r"\1/weight"})
    found = flaxckpt.load(tmp_path / "c", transforms=[both])
    assert set(found["optimizer"]["opt_state"][0].mu) == {"bias", "weight"}


@pytest.mark.parametrize("written_by", ["flaxckpt", "orbax"])
@pytest.mark.parametrize("shape", ["parts", "deep", "dicts", "optimizer"])
def test_moments_follow_parameters_in_any_state_layout(tmp_path, shape, written_by):
    base, other = two_layers(0), two_layers(1)
    mu = lambda tree: tree.opt_state[0].mu  # noqa: E731
    if shape == "parts":
        state = {
            "params": {"gen": base.params, "disc": other.params},
            "opt_state": {"gen": base.opt_state, "disc": other.opt_state},
        }
        before, root = "params/gen/", ("params", "gen")
        mu = lambda tree: tree["opt_state"]["gen"][0].mu  # noqa: E731
    elif shape == "deep":
        state = {"nets": {"gen": base.params}, "opt_state": base.opt_state}
        before, root = "nets/gen/", ("nets", "gen")
        mu = lambda tree: tree["opt_state"][0].mu  # noqa: E731
    elif shape == "dicts":
        state = serialization.to_state_dict(base)
        before, root = "params/", ("params",)
        mu = lambda tree: tree["opt_state"]["0"]["mu"]  # noqa: E731
    else:
        state = {"params": base.params, "optimizer": base.opt_state}
        before, root = "params/", ("params",)
        mu = lambda tree: tree["optimizer"][0].mu  # noqa: E731
    save_with(written_by, tmp_path / "c", state)
    swap = rename(
        {f"{before}a/(.*)": rf"{before}b/\1", f"{before}b/(.*)": rf"{before}a/\1"}
    )
    found = flaxckpt.load(tmp_path / "c", state, transforms=[swap])
    params = [state, found]
    for name in root:
        params = [tree[name] for tree in params]
    assert_swapped(*params)
    assert_swapped(mu(state), mu(found))


def test_warns_about_indistinguishable_moments(tmp_path, caplog):
    params = {"a": {"kernel": jnp.ones((2, 2))}}
    state = {
        "actor": params,
        "critic": params,
        "opt_state": optax.adam(1e-3).init((params, params)),
    }
    flaxckpt.save(tmp_path / "c", state)
    flaxckpt.load(tmp_path / "c", transforms=[rename("actor/a/(.*)", r"actor/b/\1")])
    assert "because the parameters are unknown" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        rename({r"(.*)/a/(.*)": r"\1/b/\2", r"(.*)/b/(.*)": r"\1/a/\2"}),
        assign([("params/a/(.*)", r"params/b/\1"), ("params/b/(.*)", r"params/a/\1")]),
        from_function(
            lambda tree: {
                **tree,
                "params": {"a": tree["params"]["b"], "b": tree["params"]["a"]},
                "opt_state": {
                    **tree["opt_state"],
                    "0": {
                        **tree["opt_state"]["0"],
                        **{
                            field: {
                                "a": tree["opt_state"]["0"][field]["b"],
                                "b": tree["opt_state"]["0"][field]["a"],
                            }
                            for field in ("mu", "nu")
                        },
                    },
                },
            }
        ),
    ],
    ids=["all", "assign", "function"],
)
def test_does_not_move_explicitly_moved_moments_again(tmp_path, change):
    state = two_layers()
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", state, transforms=[change])
    assert_swapped(state.params, found.params)
    assert_swapped(state.opt_state[0].mu, found.opt_state[0].mu)
    if "assign" in str(change):
        return  # which is for restores
    flaxckpt.save(tmp_path / "d", state, transforms=[change])
    again = flaxckpt.load(tmp_path / "d", state)
    assert_swapped(state.opt_state[0].nu, again.opt_state[0].nu)


def test_loads_state_moved_into_container(tmp_path):
    state = two_layers()
    flaxckpt.save(tmp_path / "c", state, transforms=[rename("(.*)", r"train/\1")])
    found = flaxckpt.load(tmp_path / "c", {"train": state})
    assert_equal(state.opt_state[0].mu, found["train"].opt_state[0].mu)


def test_assign_finds_moments_in_another_chain(tmp_path):
    state = two_layers()
    flaxckpt.save(tmp_path / "c", state)
    chained = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    wanted = two_layers(seed=1, tx=chained)
    rules = [("params/a/(.*)", r"params/b/\1"), ("params/b/(.*)", r"params/a/\1")]
    found = flaxckpt.load(tmp_path / "c", wanted, transforms=[assign(rules)])
    assert_swapped(state.params, found.params)
    assert_swapped(state.opt_state[0].mu, found.opt_state[1][0].mu)
    fresh = [assign([("params/a/.*", None)])]
    found = flaxckpt.load(tmp_path / "c", wanted, transforms=fresh, missing="init")
    assert_equal(wanted.params["a"], found.params["a"])
    assert not found.opt_state[1][0].mu["a"]["kernel"].any()
    assert_equal(state.opt_state[0].mu["b"], found.opt_state[1][0].mu["b"])


def test_grow_fills_directly_matched_moments_with_zeros(tmp_path):
    state = two_layers()
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", transforms=[grow(".*/kernel", 0, 6)])
    assert not found.opt_state[0].nu["a"]["kernel"][4:].any()
    assert found.params["a"]["kernel"][4:].any()


def test_copies_of_parameters_change_like_parameters(tmp_path):
    tx = optax.contrib.schedule_free_adamw(1e-3)
    state = two_layers(tx=tx)
    flaxckpt.save(tmp_path / "c", state)
    change = [map_leaf("params/.*", lambda x: x * 0)]
    found = flaxckpt.load(tmp_path / "c", state, transforms=change)
    assert not found.opt_state.z["a"]["kernel"].any()


def test_adafactor_placeholders_do_not_prevent_stack_or_grow(tmp_path):
    def check_placeholders(state):
        rows, columns = state.opt_state[0].v_row, state.opt_state[0].v_col
        assert [x.tolist() for x in jax.tree.leaves((rows, columns))] == [[0], [0]]

    tx = optax.adafactor(1e-2)
    layers = {f"layers_{i}": {"b": jnp.full((1,), float(i))} for i in range(2)}
    state = TrainState.create(apply_fn=None, params=layers, tx=tx)
    used = jax.tree.map(lambda x: x + 1, state.opt_state)
    flaxckpt.save(tmp_path / "c", state.replace(opt_state=used))
    scanned = {"layers": {"b": jnp.zeros((2, 1))}}
    wanted = TrainState.create(apply_fn=None, params=scanned, tx=tx)
    found = flaxckpt.load(
        tmp_path / "c",
        wanted,
        transforms=[stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")],
    )
    np.testing.assert_array_equal(found.params["layers"]["b"], [[0.0], [1.0]])
    check_placeholders(found)
    wide = TrainState.create(apply_fn=None, params={"b": jnp.zeros(5)}, tx=tx)
    steps = [
        keep("params/layers_1/.*|opt_state/.*"),
        rename("params/layers_1/b", "params/b"),
        grow("params/b", 0, 5),
    ]
    found = flaxckpt.load(tmp_path / "c", wide, transforms=steps, missing="init")
    np.testing.assert_array_equal(found.params["b"], np.ones(5))
    check_placeholders(found)


def test_does_not_mistake_parameter_for_field_of_same_name(tmp_path):
    params = {"count": jnp.ones(2), "w": jnp.ones(3)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    save_with("orbax", tmp_path / "c", state)
    renamed = rename("params/count", "params/n")
    found = flaxckpt.load(tmp_path / "c", transforms=[renamed])
    assert set(found["opt_state"][0]) == {"count", "mu", "nu"}
    assert set(found["opt_state"][0]["mu"]) == {"n", "w"}


def test_drop_spares_empty_container_with_similar_path(tmp_path):
    state = {"numpy": [jnp.ones(2)], "train": two_layers()}
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c", transforms=[drop("numpy/0")])
    assert isinstance(found["train"].opt_state[1], optax.EmptyState)


MASK = {"qkv": {"kernel": False, "bias": True}, "out": {"kernel": False}}
PARTS = [rf"params/{part}/\1" for part in "qkv"]


@pytest.mark.parametrize(
    "steps",
    [
        [split("params/qkv/(.*)", PARTS)],
        [
            split("params/qkv/(.*)", PARTS),
            rename("params/(.)/(.*)", r"params/new_\1/\2"),
        ],
        [rename("params/out/(.*)", r"params/head/\1")],
        [rename("opt_state/(.*)", r"optimizer/\1")],
        [copy("opt_state/(.*)", r"before/\1")],
    ],
)
def test_empty_container_keeps_its_class_where_it_goes(tmp_path, steps):
    params = {
        "qkv": {"kernel": jnp.arange(24.0).reshape(2, 12), "bias": jnp.ones(12)},
        "out": {"kernel": jnp.ones((4, 2))},
    }
    tx = optax.masked(optax.adam(1e-3), MASK)
    state = {"params": params, "opt_state": tx.init(params)}
    flaxckpt.save(tmp_path / "plain", state)
    flaxckpt.save(tmp_path / "changed", state, transforms=steps)
    strategies.assert_same(
        flaxckpt.load(tmp_path / "plain", transforms=steps),
        flaxckpt.load(tmp_path / "changed"),
    )


# ---- what a transform may and may not do --------------------------------------------


def test_traces_function_anew_for_each_load(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": jnp.arange(8.0)})
    size = 4

    def cut(x):
        return x[:size]

    for size in (4, 6):
        found = flaxckpt.load(tmp_path / "c", transforms=[map_leaf("a", cut)])
        assert found["a"].shape == (size,)


def test_numbers_do_not_widen_arrays(tmp_path):
    state = {"step": 3, "w": jnp.ones(3), "x": np.ones(2)}

    def add(tree):
        return {**tree, "new": jnp.zeros(3), "w": tree["w"] * np.float64(0.5)}

    flaxckpt.save(
        tmp_path / "c",
        {k: state[k] for k in ("step", "w")},
        transforms=[from_function(add)],
    )
    leaves = flaxckpt.metadata(tmp_path / "c").leaves
    assert leaves["new"].dtype == leaves["w"].dtype == "float32"
    assert flaxckpt.load(tmp_path / "c")["step"] == 3


def test_result_does_not_depend_on_other_computed_leaves(tmp_path):
    state = {"w": jnp.ones(3), "x": np.ones(3)}
    flaxckpt.save(tmp_path / "c", state)

    def noisy(x):
        return x + jax.random.normal(jax.random.key(0), x.shape)

    alone = flaxckpt.load(tmp_path / "c", transforms=[map_leaf("w", noisy)])
    both = flaxckpt.load(tmp_path / "c", transforms=[map_leaf("w|x", noisy)])
    np.testing.assert_array_equal(alone["w"], both["w"])
    assert both["x"].dtype == np.float64


def test_rejects_number_needing_64_bits_without_x64(tmp_path):
    add = from_function(lambda tree: {"n": tree["n"] + 1})
    with pytest.raises(errors.OptionError, match="needs 64 bits"):
        flaxckpt.save(tmp_path / "c", {"n": 2**40}, transforms=[add])
    flaxckpt.save(tmp_path / "d", {"n": 2**40})
    with pytest.raises(errors.OptionError, match="needs 64 bits"):
        flaxckpt.load(tmp_path / "d", transforms=[add])


def test_rejects_invalid_new_paths(tmp_path):
    state = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)}
    for path in ("acc@50%", "", "x//y", "/x"):
        with pytest.raises(errors.OptionError, match="1 new name cannot be"):
            flaxckpt.save(tmp_path / "c", state, transforms=[rename("a", path)])
    with pytest.raises(errors.OptionError, match=r"2 new names.*\n.*'50%'\n.*'x//'"):
        flaxckpt.save(
            tmp_path / "c", state, transforms=[rename({"a": "50%", "b": "x//"})]
        )
    odd = {"lin/~/w": jnp.ones(2), "50%": jnp.zeros(1)}
    flaxckpt.save(tmp_path / "d", odd, transforms=[from_function(lambda tree: tree)])
    assert_equal(odd, flaxckpt.load(tmp_path / "d"))


def test_grow_gives_each_leaf_different_random_rows(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": jnp.eye(3), "b": jnp.eye(3)})
    random = [grow("a|b", 0, 5, init="normal")]
    found = flaxckpt.load(tmp_path / "c", transforms=random)
    assert (found["a"][3:] != found["b"][3:]).all()


def test_merge_accepts_transforms_on_wanted_state(tmp_path):
    flaxckpt.save(tmp_path / "a", {"x": jnp.ones(2)})
    flaxckpt.save(tmp_path / "b", {"y": jnp.zeros(2)})
    inner = [assign([("z", "y")])]
    found = flaxckpt.load(
        tmp_path / "a",
        {"x": jnp.ones(2), "z": jnp.ones(2)},
        transforms=[merge(tmp_path / "b", transforms=inner)],
    )
    assert not found["z"].any()
    merged = [merge(tmp_path / "b"), map_leaf("y", lambda y: y + 1)]
    for some in (merged, merged[:1]):
        with pytest.raises(errors.OptionError, match="a save has only the state"):
            flaxckpt.save(tmp_path / "c", {"x": jnp.ones(2)}, transforms=some)


def test_keeps_weak_types(tmp_path):
    flaxckpt.save(tmp_path / "c", {"a": jnp.asarray(2.0)})
    assert jnp.asarray(2.0).weak_type
    doubled = [map_leaf("a", lambda x: x * 2)]
    found = flaxckpt.load(tmp_path / "c", {"a": jnp.asarray(0.0)}, transforms=doubled)
    assert found["a"].weak_type
    assert float(found["a"]) == 4


def test_compiles_functions_once_for_all_saves(tmp_path):
    count = 0

    def slow(x):
        nonlocal count
        count += 1
        return jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros_like(x[0]), x)[0]

    state = {f"w_{i}": jnp.ones((3, 2)) for i in range(4)}
    with flaxckpt.Checkpointer(tmp_path, transforms=[map_leaf(".*", slow)]) as ckpt:
        for step in range(5):
            ckpt.save(step, state).wait()
    assert count <= 2  # to know the shape, and to compile


@pytest.mark.slow
def test_save_slices_leaves_on_mesh_with_explicit_axes(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    array = jnp.arange(32.0).reshape(16, 2)
    state = {"w": jax.device_put(array, jax.NamedSharding(mesh, jax.P("x")))}
    steps = [grow("w", 0, 20), transforms.slice("w", (18, 1)), unstack("w", "w_{i}")]
    flaxckpt.save(tmp_path / "c", state, transforms=steps)
    found = flaxckpt.load(tmp_path / "c")
    assert len(found) == 18
    np.testing.assert_array_equal(found["w_3"], array[3, :1])


def test_save_stacks_layers_on_different_devices(tmp_path):
    devices = jax.devices()[:2]
    state = {f"l_{i}": jax.device_put(jnp.full(2, i), d) for i, d in enumerate(devices)}
    flaxckpt.save(tmp_path / "c", state, transforms=[stack(r"l_(\d)", "l")])
    np.testing.assert_array_equal(flaxckpt.load(tmp_path / "c")["l"], [[0, 0], [1, 1]])


def test_resumes_run_in_its_own_form_from_transformed_steps(tmp_path):
    state = trained()
    changes = [
        stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2"),
        cast("params/.*", "bfloat16"),
    ]
    for start in (0, 1):
        with flaxckpt.Checkpointer(tmp_path, transforms=changes) as ckpt:
            on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1, check_step=False)
            found, completed = on_step.restore_or_init(state)
            assert completed == start
            on_step(completed + 1, found)
    half = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), state.params)
    assert_equal(half, found.params)
    assert_equal(state.opt_state[0].mu, found.opt_state[0].mu)


# ---- any of them, one after another -------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "l_0", "l_1", "l_2", "x"])
TREES = st.dictionaries(
    NAMES, st.dictionaries(NAMES, st.integers(1, 4), min_size=1), min_size=1
)
CHANGES = st.lists(
    st.sampled_from(
        [
            rename(r"(\w+)/a", r"\1/y"),
            rename({"a/(.*)": r"b/\1", "b/(.*)": r"a/\1"}),
            rename("(.*)/(b|c)", r"\2/\1"),
            stack(r"l_(\d)/(.*)", r"l/\2"),
            stack(r"(\w+)/l_(?P<i>\d)", r"\1/l", axis=-1),
            split("(.*)/x", [r"\1/x1", r"\1/x2"], sizes=[1, 1]),
            fuse([r"(.*)/a", r"(.*)/b"], r"\1/ab", sizes=[2, 2]),
            transpose("x/.*"),
        ]
    ),
    max_size=4,
)


@given(tree=TREES, changes=CHANGES)
def test_inverse_undoes_applied_transforms(tree, changes):
    """On tables alone: whatever can be applied at all. Or the inverse is refused."""
    state = {
        outer: {
            inner: np.full((2, n), len(outer) + i, "float32")
            for i, (inner, n) in enumerate(leaves.items())
        }
        for outer, leaves in tree.items()
    }
    applied = []
    for change in changes:
        with contextlib.suppress(errors.OptionError):
            transformed([*applied, change], state)
            applied.append(change)
    try:
        found = round_trip(applied, state)
    except errors.OptionError:
        return  # it was not silent
    before = table_of(state)
    if found.keys() != before.keys():
        return  # an inverse also takes what was under the new name before
    for path, value in before.items():
        np.testing.assert_array_equal(value, found[path], err_msg=path)
