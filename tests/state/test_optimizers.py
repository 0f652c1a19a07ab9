"""Every optax state comes back in its own classes, split as its parameters are."""

import logging

import flax.serialization
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from flax.training import train_state
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from tests import ROOT
from tests.helpers import optax_zoo, optimizer_states, strategies
from tests.helpers.optax_zoo import MESH, PARAMS, ZOO, create, labels
from tests.helpers.optimizer_states import save_with

SPECS = [
    ("params/embed", P("data", "model")),
    ("params/layer/kernel", P(None, "model")),
    ("params/layer/bias", P("model")),
    ("params/square", P("data", "model")),
    ("params/conv", P(None, "data", "model")),
    # lookahead keeps its fast and slow weights in the parameters
    ("params/(fast|slow)/(embed|square)", P("data", "model")),
    ("params/.*", P()),
]


def filled(state):
    """The state with other values in every leaf of its optimizer."""

    def fill(path, leaf):
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(
            leaf.dtype, jnp.number
        ):
            return leaf
        seed = abs(hash(jax.tree_util.keystr(path))) % 1000
        return (
            (jnp.arange(leaf.size) % 7 + seed % 5)
            .reshape(leaf.shape)
            .astype(leaf.dtype)
        )

    return state.replace(
        opt_state=jax.tree_util.tree_map_with_path(fill, state.opt_state)
    )


def test_zoo_has_enough_optimizers():
    assert len(ZOO) >= 30


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ZOO)
def test_load_without_template_restores_classes(tmp_path, name):
    state = filled(create(name))
    flaxckpt.save(tmp_path / "c", state)
    found = flaxckpt.load(tmp_path / "c")
    assert type(found) is train_state.TrainState
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(state.opt_state)
    assert jax.tree.structure(found.params) == jax.tree.structure(state.params)
    strategies.assert_same_state(state.opt_state, found.opt_state)
    strategies.assert_same_state(state.params, found.params)


@pytest.mark.parametrize("name", ZOO)
def test_derived_specs_are_valid_and_match_parameters(name):
    rules = [
        (pattern, spec)
        for pattern, spec in SPECS
        if (name == "lookahead") == ("fast" in pattern) or pattern == "params/.*"
    ]
    abstract = flaxckpt.abstract_state(
        lambda: create(name), mesh=MESH, leaf_rules=rules
    )
    by_shape = {
        p.shape: p.sharding.spec
        for p in jax.tree.leaves(abstract.params)
        if len(p.shape) > 1
    }
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.opt_state):
        where = jax.tree_util.keystr(path)
        assert leaf.sharding.mesh == MESH, where
        assert len(leaf.sharding.spec) <= len(leaf.shape), where
        leaf.sharding.shard_shape(leaf.shape)  # raises if it does not divide
        if name != "lookahead" and leaf.shape in by_shape and "U" not in where:
            assert ways(leaf.sharding.spec) == ways(by_shape[leaf.shape]), where


def ways(spec):
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return parts


def spec_of(abstract, *path):
    leaf = abstract.opt_state
    for key in path:
        leaf = (
            getattr(leaf, key)
            if isinstance(key, str) and hasattr(leaf, key)
            else leaf[key]
        )
    return ways(leaf.sharding.spec)


def abstract(tx):
    def make():
        return train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

    rules = [(p, s) for p, s in SPECS if "fast" not in p]
    return flaxckpt.abstract_state(make, mesh=MESH, leaf_rules=rules)


def test_docs_table_is_up_to_date():
    document = ROOT / "docs/optimizer-specs.md"
    written = document.read_text()
    if f"optax {optax.__version__}." not in written:
        pytest.skip("the table is of another version of optax")
    assert written == optax_zoo.table()


def test_shards_factored_moments_along_kept_axes():
    found = abstract(ZOO["adafactor"])
    assert spec_of(found, 0, "v_row", "embed") == ["model"]
    assert spec_of(found, 0, "v_col", "embed") == ["data"]
    assert spec_of(found, 0, "v", "embed") == []
    assert spec_of(found, 0, "v", "layer", "bias") == ["model"]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="before 0.10 jax does not say how factored moments are split",
)
def test_jax_decides_sharding_of_square_factored_moments():
    found = abstract(ZOO["adafactor"])
    rows_and_columns = [spec_of(found, 0, f, "square") for f in ("v_row", "v_col")]
    assert sorted(rows_and_columns) == [["data"], ["model"]]


def test_does_not_shard_moment_history_along_time():
    found = abstract(ZOO["lbfgs"])
    leaf = found.opt_state[0].diff_params_memory["embed"]
    assert leaf.shape == (3, 16, 8)
    assert ways(leaf.sharding.spec) == [None, "data", "model"]


def test_leaf_rule_overrides_derived_sharding():
    def make():
        return train_state.TrainState.create(
            apply_fn=None, params=PARAMS, tx=optax.adam(1e-3)
        )

    rules = [("opt_state/.*/nu/embed", P("model")), *SPECS]
    rules = [(p, s) for p, s in rules if "fast" not in p]
    found = flaxckpt.abstract_state(make, mesh=MESH, leaf_rules=rules)
    assert ways(found.opt_state[0].nu["embed"].sharding.spec) == ["model"]
    assert ways(found.opt_state[0].mu["embed"].sharding.spec) == ["data", "model"]


def test_replicates_leaves_without_derived_sharding_with_warning(caplog):
    def init(params):
        return optax.TraceState(trace=jnp.zeros((5, 7, 9)))

    tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    found = abstract(tx)
    assert ways(found.opt_state.trace.sharding.spec) == []
    [record] = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "opt_state/trace" in record.getMessage()


# ---- finding leaves again ---------------------------------------------------------


def state_of(tx, params=PARAMS, seed=None):
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    return state if seed is None else filled(state)


def moments(state, owner=optax.ScaleByAdamState):
    """All Adam states in a state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, owner))
    return [node for node in nodes if isinstance(node, owner)]


ADAM = optax.adam(1e-3)
CHANGES = {
    "clip added": (ADAM, optax.chain(optax.clip(1.0), ADAM)),
    "clip removed": (optax.chain(optax.clip(1.0), ADAM), ADAM),
    "weight decay": (ADAM, optax.adamw(1e-3)),
    "schedule": (ADAM, optax.adam(optax.linear_schedule(1e-3, 0, 10))),
    "order": (
        optax.chain(optax.scale_by_adam(), optax.trace(0.9)),
        optax.chain(optax.trace(0.9), optax.scale_by_adam()),
    ),
    "MultiSteps": (ADAM, ZOO["MultiSteps"]),
    "inject_hyperparams": (ADAM, optax.inject_hyperparams(optax.adam)(1e-3)),
    "apply_if_finite": (ADAM, ZOO["apply_if_finite"]),
    "named": (ADAM, optax.named_chain(("adam", optax.scale_by_adam()))),
    "all at once": (
        optax.chain(optax.clip(1.0), ADAM),
        optax.MultiSteps(
            optax.chain(optax.inject_hyperparams(optax.adamw)(1e-3), optax.ema(0.9)),
            every_k_schedule=2,
        ).gradient_transformation(),
    ),
}


@pytest.mark.parametrize("concrete", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_optimizer_change_keeps_moments(tmp_path, change, concrete):
    old, new = CHANGES[change]
    saved = state_of(old, seed=1)
    flaxckpt.save(tmp_path / "c", saved)
    wanted = state_of(new)
    if not concrete:
        wanted = jax.eval_shape(lambda: state_of(new))
    found = flaxckpt.load(tmp_path / "c", wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    [before], [after] = moments(saved.opt_state), moments(found.opt_state)
    strategies.assert_same_state(before, after)
    # What is new is as a fresh optimizer has it.
    fresh = state_of(new)
    plan = flaxckpt.plan(tmp_path / "c", wanted)
    anew = {path for path, leaf in plan.leaves.items() if "init" in leaf.actions}
    ours = flaxckpt.parameter_infos(fresh)
    for info, one, other in zip(
        jax.tree.leaves(ours, is_leaf=lambda x: isinstance(x, flaxckpt.LeafInfo)),
        jax.tree.leaves(fresh),
        jax.tree.leaves(found),
        strict=True,
    ):
        if info.path in anew:
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), info.path)


def test_masks_and_groups_keep_moments_of_each_parameter(tmp_path):
    saved = state_of(ADAM, seed=1)
    flaxckpt.save(tmp_path / "c", saved)
    for tx in (ZOO["masked by a function"], ZOO["multi_transform"], ZOO["freeze"]):
        found = flaxckpt.load(tmp_path / "c", state_of(tx))
        [before], [after] = moments(saved.opt_state), moments(found.opt_state)
        kept = jax.tree_util.tree_leaves_with_path(after)
        old = dict(jax.tree_util.tree_leaves_with_path(before))
        assert len(kept) < len(old)
        for path, leaf in kept:
            np.testing.assert_array_equal(leaf, old[path])


def test_new_parameters_get_fresh_moments(tmp_path):
    saved = state_of(ADAM, seed=1)
    flaxckpt.save(tmp_path / "c", saved)
    params = {**PARAMS, "head": jnp.full((8, 4), 2.0)}
    wanted = state_of(ADAM, params)
    found = flaxckpt.load(tmp_path / "c", wanted, missing="init")
    assert (found.params["head"] == 2).all()
    assert not found.opt_state[0].mu["head"].any()
    strategies.assert_same_state(
        saved.opt_state[0].mu["embed"], found.opt_state[0].mu["embed"]
    )
    with pytest.raises(flaxckpt.errors.RestoreMismatchError, match="params/head"):
        flaxckpt.load(tmp_path / "c", wanted)


def test_ambiguous_role_error_lists_candidates(tmp_path):
    tx = optax.multi_transform(
        {"matrix": optax.adam(1e-3), "rest": optax.adam(1e-2)}, labels
    )
    flaxckpt.save(tmp_path / "c", state_of(tx, seed=1))
    with pytest.raises(flaxckpt.errors.RestoreMismatchError) as info:
        flaxckpt.load(tmp_path / "c", state_of(ADAM))
    [problem] = info.value.mismatches
    assert problem.leaf == "opt_state/0/count"
    assert "inner_states/matrix" in problem.found
    assert "inner_states/rest" in problem.found
    assert 'optimizer="reinit"' in str(info.value)


def test_exact_matches_by_path_only(tmp_path):
    flaxckpt.save(tmp_path / "c", state_of(ADAM, seed=1))
    wanted = state_of(optax.chain(optax.clip(1.0), ADAM))
    with pytest.raises(flaxckpt.errors.RestoreMismatchError) as caught:
        flaxckpt.load(tmp_path / "c", wanted, optimizer="exact")
    assert any(m.leaf.startswith("opt_state/1/0/mu") for m in caught.value.mismatches)


@pytest.mark.parametrize("concrete", [True, False])
def test_reinit_initializes_optimizer_from_restored_parameters(tmp_path, concrete):
    params = jax.tree.map(lambda p: p * 3, PARAMS)
    flaxckpt.save(tmp_path / "c", state_of(ADAM, params, seed=1))
    tx = ZOO["schedule_free"]
    wanted = state_of(tx) if concrete else jax.eval_shape(lambda: state_of(tx))
    found = flaxckpt.load(tmp_path / "c", wanted, optimizer="reinit")
    strategies.assert_same_state(params, found.params)
    # schedule_free keeps a copy of the parameters, which must be the restored ones
    strategies.assert_same_state(tx.init(params), found.opt_state)


def test_matches_orbax_checkpoints_by_field_and_parameter(tmp_path):
    saved = state_of(ADAM, seed=1)
    save_with("orbax", tmp_path / "c", saved)
    found = flaxckpt.load(tmp_path / "c", state_of(optax.chain(optax.clip(1.0), ADAM)))
    [before], [after] = moments(saved.opt_state), moments(found.opt_state)
    strategies.assert_same_state(before, after)


def test_new_moments_get_requested_shardings(tmp_path):
    flaxckpt.save(tmp_path / "c", state_of(optax.sgd(1e-2)))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = [(p, s) for p, s in SPECS if "fast" not in p]
    wanted = flaxckpt.abstract_state(
        lambda: state_of(ADAM), mesh=mesh, leaf_rules=rules
    )
    found = flaxckpt.load(tmp_path / "c", wanted)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert isinstance(other.sharding, NamedSharding)
        assert other.sharding.is_equivalent_to(one.sharding, other.ndim)


# ---- the rules by themselves --------------------------------------------------------


def derive(params, specs, init):
    """Returns the spec of each optimizer leaf, and the rule that found it."""
    tx = optax.GradientTransformation(init, lambda *args: args)

    def make():
        tree = traverse_util.unflatten_dict(params, sep="/")
        return train_state.TrainState.create(apply_fn=None, params=tree, tx=tx)

    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
    return optax_zoo.derive(jax.eval_shape(make), specs, mesh)


@pytest.mark.parametrize(
    ("path", "shape", "spec", "rule"),
    [
        ("0/mu/a/w", (8, 16), ("x", "y"), "suffix"),
        ("0/mu/b/a/w", (8, 16), ("y", None), "suffix"),  # the longest path wins
        ("0/v_row/a/w", (8,), ("x",), "suffix"),
        ("0/v_col/a/w", (16,), ("y",), "suffix"),
        ("0/v/a/w", (1,), (), "small"),
        ("0/history/a/w", (5, 8, 16), (None, "x", "y"), "suffix"),
        ("0/mu/square", (8,), (), "small"),  # which axis is gone?
        ("0/mu/same", (8,), (), "suffix"),  # either would be the same
        ("0/projected/a/w", (30, 16), (), "replicated"),
        ("0/count", (), (), "small"),
        ("0/mu/w", (8, 16), (), "replicated"),
        ("0/mu/list/0", (4,), ("y",), "suffix"),
        ("0/mu/unknown", (40, 4), (), "replicated"),
    ],
)
def test_suffixes_decide_only_unambiguous_specs(path, shape, spec, rule):
    shapes = {
        "b/a/w": (8, 16),
        "a/w": (8, 16),
        "square": (8, 8),
        "same": (8, 8),
        "list/0": (4,),
    }
    specs = (P("y", None), P("x", "y"), P("x", "y"), P(None, None), P("y"))
    params = {name: jnp.zeros(each) for name, each in shapes.items()}
    moment = {path: jnp.zeros(shape)}
    found = derive(
        params,
        dict(zip(shapes, specs, strict=True)),
        lambda params: traverse_util.unflatten_dict(moment, sep="/"),
    )[f"opt_state/{path}"]
    assert found.rule == rule
    assert ways(found.spec) == ways(spec)


def test_specs_by_types_win_unless_jax_lost_sharding():
    found = derive(
        {"w": jnp.zeros((8, 8))},
        {"w": P("x", "y")},
        lambda params: {"mu": {"w": params["w"].T}, "nu": {"w": jnp.zeros((8, 8))}},
    )
    assert found["opt_state/mu/w"] == (P("y", "x"), "types")
    assert found["opt_state/nu/w"] == (P("x", "y"), "suffix")


# ---- whatever stands around it -----------------------------------------------------


def wrappers():
    """Transforms that wrap an optimizer or stand beside it, each at most once."""
    return st.lists(
        st.sampled_from(
            ["clip", "decay", "multi_steps", "finite", "inject", "ema", "mask", "label"]
        ),
        unique=True,
        max_size=4,
    )


def wrapped(names):
    tx = optax.scale_by_adam()
    for name in names:
        tx = {
            "clip": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
            "decay": lambda tx: optax.chain(tx, optax.add_decayed_weights(1e-2)),
            "multi_steps": lambda tx: optax.MultiSteps(tx, 3).gradient_transformation(),
            "finite": lambda tx: optax.apply_if_finite(tx, 2),
            "inject": lambda tx: optax.chain(
                optax.inject_hyperparams(optax.scale)(1e-3), tx
            ),
            "ema": lambda tx: optax.chain(tx, optax.ema(0.9)),
            "mask": lambda tx: optax.masked(
                tx, lambda p: jax.tree.map(lambda _: True, p)
            ),
            "label": lambda tx: optax.multi_transform(
                {"all": tx}, lambda p: jax.tree.map(lambda _: "all", p)
            ),
        }[name](tx)
    return tx


@pytest.mark.slow
@hypothesis.settings(max_examples=25)
@hypothesis.given(wrappers(), wrappers())
def test_finds_adam_moments_in_any_wrappers(tmp_path_factory, before, after):
    params = {"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(2)}
    saved = state_of(wrapped(before), params, seed=1)
    path = tmp_path_factory.mktemp("match") / "c"
    flaxckpt.save(path, saved)
    found = flaxckpt.load(path, state_of(wrapped(after), params), unused="ignore")
    [old], [new] = moments(saved.opt_state), moments(found.opt_state)
    strategies.assert_same_state(old, new)


# ---- NNX ---------------------------------------------------------------------------


def nnx_model(tx):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def test_nnx_optimizer_change_keeps_moments(tmp_path):
    saved = nnx_model(ADAM)
    for leaf in jax.tree.leaves(
        saved[1].opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        leaf[...] = leaf[...] + 3
    flaxckpt.save(tmp_path / "c", saved)
    found = flaxckpt.load(tmp_path / "c", nnx_model(CHANGES["clip added"][1]))
    strategies.assert_same_state(saved[1].opt_state[0], found[1].opt_state[1][0])
    plan = flaxckpt.plan(tmp_path / "c", nnx_model(CHANGES["MultiSteps"][1]))
    assert plan.problems == ()
    assert "matched" in plan.leaves["1/opt_state/inner_opt_state/0/mu/kernel"].actions
    assert plan.leaves["1/opt_state/acc_grads/kernel"].actions == ("init",)
    found = flaxckpt.load(
        tmp_path / "c", nnx.eval_shape(lambda: nnx_model(CHANGES["MultiSteps"][1]))
    )
    assert not found[1].opt_state.acc_grads["kernel"][...].any()


# ---- never another's moments --------------------------------------------------------


def pair_of_networks(tx, **params):
    """Two networks with the same names, as of a GAN."""
    params = params or {"w": jnp.ones((3, 2))}
    return {
        name: train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
        for name in ("generator", "critic")
    }


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
def test_keeps_two_optimizers_in_one_state_apart(tmp_path, writer):
    saved = pair_of_networks(ADAM)
    for i, name in enumerate(saved):
        saved[name] = saved[name].replace(
            opt_state=jax.tree.map(lambda x, i=i: x + 1 + i, saved[name].opt_state)
        )
    save_with(writer, tmp_path / "c", saved)
    changed = pair_of_networks(optax.chain(optax.clip(1.0), ADAM))
    found = flaxckpt.load(tmp_path / "c", changed)
    for name in saved:
        [before], [after] = (
            moments(saved[name].opt_state),
            moments(found[name].opt_state),
        )
        strategies.assert_same_state(before, after)


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
def test_new_parameter_does_not_take_moments_of_namesake(tmp_path, writer):
    params = {"w": jnp.ones((3, 2)), "head": jnp.ones(2)}
    saved = pair_of_networks(ADAM, **params)
    saved["generator"] = state_of(ADAM, {"w": params["w"]})
    saved["critic"] = filled(saved["critic"])
    save_with(writer, tmp_path / "c", saved)
    wanted = pair_of_networks(ADAM, **params)
    found = flaxckpt.load(tmp_path / "c", wanted, missing="init")
    assert not found["generator"].opt_state[0].mu["head"].any()
    assert found["critic"].opt_state[0].mu["head"].any()


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
def test_does_not_take_counter_from_another_transform(tmp_path, writer):
    saved = state_of(ADAM).replace(step=7)
    saved = saved.replace(opt_state=jax.tree.map(lambda x: x + 7, saved.opt_state))
    save_with(writer, tmp_path / "c", saved)
    schedule = optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 10))
    for tx in (optax.chain(schedule, optax.scale_by_adam()), schedule):
        found = flaxckpt.load(tmp_path / "c", state_of(tx), unused="ignore")
        [counter] = moments(found.opt_state, optax.ScaleByScheduleState)
        assert int(counter.count) == 0


def test_does_not_take_moments_of_another_kind(tmp_path, caplog):
    flaxckpt.save(tmp_path / "c", state_of(ADAM, seed=1))
    found = flaxckpt.load(tmp_path / "c", state_of(optax.adabelief(1e-3)))
    fresh = state_of(optax.adabelief(1e-3))
    strategies.assert_same_state(fresh.opt_state, found.opt_state)
    assert "initialized" in caplog.text


def test_recognizes_renamed_optax_class(tmp_path):
    saved = state_of(ADAM, seed=1)
    flaxckpt.save(tmp_path / "c", saved)
    manifest = tmp_path / "c/flaxckpt.json"
    manifest.write_text(manifest.read_text().replace("ScaleByAdamState", "AdamStateV0"))
    (tmp_path / "c/commit_success.txt").unlink()
    found = flaxckpt.load(tmp_path / "c", state_of(ADAM))
    strategies.assert_same_state(saved.opt_state, found.opt_state)


def test_optimizer_without_moments_takes_none_from_another_network(tmp_path):
    params = {"w": jnp.ones((3, 2))}
    adam, sgd = state_of(ADAM, params, seed=1), state_of(optax.sgd(1e-2), params)
    flaxckpt.save(tmp_path / "c", {"g": adam, "d": sgd})
    changed = state_of(CHANGES["clip added"][1], params)
    found = flaxckpt.load(tmp_path / "c", {"d": changed})
    assert not found["d"].opt_state[1][0].mu["w"].any()
    optimizers = [adam.opt_state, sgd.opt_state]
    flaxckpt.save(tmp_path / "l", {"params": params, "opt": optimizers})
    wanted = {"params": params, "opt": [changed.opt_state, ADAM.init(params)]}
    found = flaxckpt.load(tmp_path / "l", wanted)
    strategies.assert_same_state(adam.opt_state[0], found["opt"][0][1][0])
    assert not found["opt"][1][0].mu["w"].any()


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
def test_rejects_adding_or_removing_equal_transforms(tmp_path, writer):
    one = optax.chain(optax.trace(0.9))
    two = optax.chain(optax.trace(0.5), optax.trace(0.9))
    for old, new in ((one, two), (two, one)):
        path = tmp_path / str(new is one)
        save_with(writer, path, state_of(old, seed=1))
        with pytest.raises(flaxckpt.errors.RestoreMismatchError, match="several"):
            flaxckpt.load(path, state_of(new))


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
def test_same_number_of_equal_transforms_keeps_order(tmp_path, writer):
    saved = state_of(optax.chain(optax.trace(0.5), optax.trace(0.9)), seed=1)
    save_with(writer, tmp_path / "c", saved)
    clipped = optax.chain(optax.clip(1.0), optax.trace(0.5), optax.trace(0.9))
    found = flaxckpt.load(tmp_path / "c", state_of(clipped))
    strategies.assert_same_state(saved.opt_state, found.opt_state[1:])


def test_bare_optimizer_state_starts_with_its_own_values(tmp_path):
    params = {"w": jnp.ones((3, 2))}
    state = {"s": state_of(ADAM, params, seed=1), "p": params}
    flaxckpt.save(tmp_path / "c", {**state, "opt": optax.sgd(1e-2).init(params)})
    found = flaxckpt.load(tmp_path / "c", {**state, "opt": ADAM.init(params)})
    strategies.assert_same_state(ADAM.init(params), found["opt"])


def test_initializes_moments_on_mesh_with_explicit_axes(tmp_path):
    params = {"w": jnp.ones((8, 2))}
    flaxckpt.save(tmp_path / "c", state_of(ADAM, params, seed=1))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    wanted = flaxckpt.abstract_state(
        lambda: state_of(ZOO["MultiSteps"], params),
        mesh=mesh,
        leaf_rules=[("params/w", P("x")), (".*", P())],
    )
    found = flaxckpt.load(tmp_path / "c", wanted)
    assert ways(found.opt_state.acc_grads["w"].sharding.spec) == ["x"]


def test_each_nnx_optimizer_starts_from_its_own_network(tmp_path):
    def networks(tx):
        models = [nnx.Linear(4, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
        return models, [nnx.Optimizer(model, tx, wrt=nnx.Param) for model in models]

    flaxckpt.save(tmp_path / "c", networks(optax.sgd(1e-2)))
    models, optimizers = flaxckpt.load(tmp_path / "c", networks(ZOO["schedule_free"]))
    for model, optimizer in zip(models, optimizers, strict=True):
        found = jax.tree.leaves(optimizer.opt_state.z)
        wanted = jax.tree.leaves(nnx.state(model, nnx.Param))
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(one, other)


# ---- parameters in classes of their own ---------------------------------------------


def nested_params(kind):
    make = optimizer_states.MAKERS[kind]
    # TrainState takes no dataclass itself.
    outer = dict if kind == "dataclass" else make
    return outer(mu=make(mu=jnp.ones((2, 3)), b=jnp.ones(3)), b={"w": jnp.ones(4)})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
@pytest.mark.parametrize("kind", sorted(optimizer_states.MAKERS))
def test_does_not_mistake_parameter_classes_for_optimizer_states(
    tmp_path, kind, writer
):
    params = nested_params(kind)
    saved = state_of(ADAM, params, seed=1)
    save_with(writer, tmp_path / "adam", saved)
    changed = state_of(CHANGES["clip added"][1], params)
    found = flaxckpt.load(tmp_path / "adam", changed)
    strategies.assert_same_state(saved.opt_state, found.opt_state[1])
    for name, old in (("lion", optax.lion(1e-3)), ("trace", optax.trace(0.9))):
        save_with(writer, tmp_path / name, state_of(old, params, seed=1))
        for new in (ADAM, optax.adabelief(1e-3)):
            fresh = state_of(new, params)
            found = flaxckpt.load(tmp_path / name, fresh)
            strategies.assert_same_state(fresh.opt_state, found.opt_state)
    if writer == "flaxckpt":  # Orbax does not say whose moments these are
        fresh = state_of(optax.adabelief(1e-3), params)
        found = flaxckpt.load(tmp_path / "adam", fresh)
        strategies.assert_same_state(fresh.opt_state, found.opt_state)


@pytest.mark.parametrize("kind", sorted(optimizer_states.MAKERS))
def test_roles_name_transform_for_all_kinds_of_parameters(tmp_path, kind):
    flaxckpt.save(tmp_path / "c", state_of(ZOO["MultiSteps"], nested_params(kind)))
    leaves = flaxckpt.metadata(tmp_path / "c").leaves
    found = {path: leaf.role[:3] for path, leaf in leaves.items() if leaf.role}
    inner = "opt_state/inner_opt_state/0"
    assert found[f"{inner}/nu/mu/b"] == ("ScaleByAdamState", "nu", "mu/b")
    assert found[f"{inner}/count"] == ("ScaleByAdamState", "count", "")
    assert found["opt_state/acc_grads/b/w"] == ("MultiStepsState", "acc_grads", "b/w")


def test_custom_state_does_not_match_optax_state_with_same_fields(tmp_path):
    mine = optimizer_states.mine()
    saved = state_of(mine, seed=1)
    flaxckpt.save(tmp_path / "c", saved)
    clipped = state_of(optax.chain(optax.clip(1.0), mine))
    found = flaxckpt.load(tmp_path / "c", clipped)
    strategies.assert_same_state(saved.opt_state, found.opt_state[1])
    fresh = state_of(ADAM)
    found = flaxckpt.load(tmp_path / "c", fresh)
    strategies.assert_same_state(fresh.opt_state, found.opt_state)


# ---- several optimizers in one container --------------------------------------------


SEVERAL = {
    "a dict": lambda params, g, d: {"params": params, "opt_state": {"g": g, "d": d}},
    "a tuple": lambda params, g, d: {"params": params, "opt_state": (g, d)},
    "a list": lambda params, g, d: {"params": params, "opt_state": [g, d]},
    "a tuple elsewhere": lambda params, g, d: (params["g"], params["d"], (g, d)),
    "a user's class": lambda params, g, d: {
        "params": params,
        "opt_state": optimizer_states.Pair(g, d),
    },
}


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
@pytest.mark.parametrize("name", SEVERAL)
def test_keeps_optimizers_in_one_container_apart(tmp_path, name, writer):
    params = {key: {"w": jnp.ones((3, 2))} for key in ("g", "d")}
    sgd = optax.sgd(1e-2).init(params["g"])
    adam = ADAM.init(params["g"])
    g, d = (state_of(ADAM, params["g"], seed=1).opt_state for _ in range(2))
    d = jax.tree.map(lambda leaf: leaf + 9, d)
    state = SEVERAL[name]
    save_with(writer, tmp_path / "one", state(params, g, sgd))
    fresh = state(params, sgd, adam)
    if name == "a tuple elsewhere":
        # It may be a chain whose transforms have changed places.
        with pytest.raises(flaxckpt.errors.RestoreMismatchError, match="several"):
            flaxckpt.load(tmp_path / "one", fresh)
    else:
        found = flaxckpt.load(tmp_path / "one", fresh, unused="ignore")
        strategies.assert_same_state(fresh, found)
    save_with(writer, tmp_path / "two", state(params, g, d))
    clipped = CHANGES["clip added"][1].init(params["d"])
    found = flaxckpt.load(tmp_path / "two", state(params, adam, clipped))
    wanted = state(params, g, (optax.EmptyState(), d))
    strategies.assert_same_state(wanted, found)


def test_treats_transforms_of_one_chain_as_one_optimizer(tmp_path):
    """Even if there is an average of the parameters, of which they may be."""

    def state(tx, seed=None):
        one = state_of(tx, seed=seed)
        return {"params": PARAMS, "ema": PARAMS, "opt_state": one.opt_state}

    old = optax.chain(optax.scale_by_adam(), optax.ema(0.9))
    saved = state(old, seed=1)
    flaxckpt.save(tmp_path / "c", saved)
    new = optax.chain(optax.clip(1.0), optax.ema(0.9), optax.scale_by_adam())
    found = flaxckpt.load(tmp_path / "c", state(new))
    strategies.assert_same_state(saved["opt_state"], found["opt_state"][:0:-1])


# ---- several optimizers in one tuple ------------------------------------------------


def of_branches(g, d, *, is_twin=False):
    """Optimizers of two branches of one tree of parameters."""
    params = {"g": {"w": jnp.ones(2)}, "d": {"w" if is_twin else "z": jnp.ones(2)}}
    return {"params": params, "opt_state": (g.init(params["g"]), d.init(params["d"]))}


def of_subtrees(enc, dec):
    """Optimizers of two parts of one tree, whose paths begin in the whole tree."""
    params = {"enc": {"w": jnp.ones(2)}, "dec": {"w": jnp.ones(2)}}
    states = (enc.init({"enc": params["enc"]}), dec.init({"dec": params["dec"]}))
    return {"params": params, "opt_state": states}


def raised(state):
    """The state with 3 added to each number of its optimizers."""

    def add(leaf):
        return leaf if leaf.dtype == bool else leaf + 3

    return {**state, "opt_state": jax.tree.map(add, state["opt_state"])}


def steps_of(tx):
    return optax.MultiSteps(tx, 2).gradient_transformation()


SGD, INJECT = optax.sgd(1e-2), optax.inject_hyperparams
PAIRS = {
    "transforms": (optax.scale_by_adam(), optax.trace(0.9)),
    "optimizers": (ADAM, SGD),
    "hyperparameters": (INJECT(optax.adam)(0.1), INJECT(optax.sgd)(0.1)),
    "steps": (steps_of(ADAM), steps_of(SGD)),
    "finite": (optax.apply_if_finite(ADAM, 2), optax.apply_if_finite(SGD, 2)),
}


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
@pytest.mark.parametrize("name", PAIRS)
def test_never_moves_counter_to_moments_of_other_parameters(tmp_path, name, writer):
    adam, other = PAIRS[name]
    saved = raised(of_subtrees(adam, other))
    save_with(writer, tmp_path / "c", saved)
    fresh = of_subtrees(other, adam)
    found = flaxckpt.load(tmp_path / "c", fresh, unused="ignore")
    [before], [after] = moments(fresh), moments(found)
    strategies.assert_same_state(before, after)


@pytest.mark.parametrize("is_twin", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_change_of_one_optimizer_in_tuple_keeps_other_one(tmp_path, name, is_twin):
    adam, other = PAIRS[name]
    saved = raised(of_branches(adam, other, is_twin=is_twin))
    flaxckpt.save(tmp_path / "c", saved)
    fresh = of_branches(adam, adam, is_twin=is_twin)
    found = flaxckpt.load(tmp_path / "c", fresh, unused="ignore")
    strategies.assert_same_state(saved["opt_state"][0], found["opt_state"][0])
    [before], [after] = moments(fresh["opt_state"][1]), moments(found["opt_state"][1])
    strategies.assert_same_state(before, after)


# ---- states that have lost their classes --------------------------------------------


def without_classes(state):
    return flax.serialization.to_state_dict(state)


def as_state(pair):
    return [nnx.state(each) for each in pair]


def as_pure_dict(pair):
    return [nnx.to_pure_dict(nnx.state(each)) for each in pair]


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
@pytest.mark.parametrize("new", [ADAM, CHANGES["clip added"][1]])
def test_state_without_classes_keeps_moments(tmp_path, new, writer):
    saved = state_of(ADAM, seed=1)
    for name, written in (
        ("whole", without_classes(saved)),
        ("optimizer", saved.replace(opt_state=without_classes(saved.opt_state))),
    ):
        save_with(writer, tmp_path / name, written)
        found = flaxckpt.load(tmp_path / name, state_of(new))
        [before], [after] = moments(saved), moments(found)
        strategies.assert_same_state(before, after)


@pytest.mark.parametrize("plain", [as_state, as_pure_dict])
def test_nnx_optimizer_without_classes_keeps_moments(tmp_path, plain):
    saved = nnx_model(ADAM)
    nnx.update(saved[1], jax.tree.map(lambda leaf: leaf + 3, nnx.state(saved[1])))
    flaxckpt.save(tmp_path / "c", plain(saved))
    found = flaxckpt.load(tmp_path / "c", list(nnx_model(ADAM)))
    strategies.assert_same_state(nnx.state(saved[1]), nnx.state(found[1]))
    with flaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, plain(saved))
        checkpointer.wait()
        found = checkpointer.restore(list(nnx_model(ADAM)))
    strategies.assert_same_state(nnx.state(saved[1]), nnx.state(found[1]))
    flaxckpt.save(tmp_path / "objects", list(saved))
    found = flaxckpt.load(tmp_path / "objects", plain(nnx_model(ADAM)))
    strategies.assert_same_state(plain(saved), found)


@pytest.mark.parametrize("writer", ["flaxckpt", "orbax"])
def test_identifies_transforms_without_classes_by_fields(tmp_path, writer):
    lion, clipped = optax.lion(1e-3), optax.chain(optax.clip(1.0), optax.lion(1e-3))
    saved = state_of(lion, seed=1)
    save_with(writer, tmp_path / "lion", without_classes(saved))
    found = flaxckpt.load(tmp_path / "lion", without_classes(state_of(clipped)))
    before = without_classes(saved.opt_state)["0"]
    strategies.assert_same_state(before, found["opt_state"]["1"]["0"])
    fresh = without_classes(state_of(ADAM))
    found = flaxckpt.load(tmp_path / "lion", fresh, unused="ignore")
    strategies.assert_same_state(fresh["opt_state"], found["opt_state"])
    two = optax.chain(optax.trace(0.5), optax.trace(0.9))
    save_with(writer, tmp_path / "two", without_classes(state_of(two, seed=1)))
    wanted = without_classes(state_of(optax.chain(optax.trace(0.9))))
    with pytest.raises(flaxckpt.errors.RestoreMismatchError, match="several"):
        flaxckpt.load(tmp_path / "two", wanted)
