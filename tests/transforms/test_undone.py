"""A run that saves another form than it trains gets back all it had, or is warned."""

import functools
import logging

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

import flaxckpt
from flaxckpt import errors
from flaxckpt.transforms import (
    cast,
    copy,
    drop,
    from_function,
    fuse,
    keep,
    map_leaf,
    rename,
    scale,
    slice,
    split,
    stack,
    transpose,
    unstack,
)
from tests.helpers import optax_zoo, strategies
from tests.transforms import cases

CASES = [c for c in cases.CASES.values() if c.is_undone and c.keeps_all]

SCAN = stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")


def params():
    def layer():
        return {"kernel": jnp.ones((8, 24)), "bias": jnp.ones(24)}

    return {f"layers_{i}": layer() for i in range(3)} | {
        "scanned": {"kernel": jnp.ones((3, 8, 16)), "scale": jnp.ones((3, 8))},
        "wide": {"kernel": jnp.ones((8, 24))},
        "square": {"kernel": jnp.ones((8, 8))},
        "conv": {"kernel": jnp.ones((5, 8, 16)), "bias": jnp.ones(16)},
        "cube": {"kernel": jnp.ones((8, 8, 8))},
        "a": {"kernel": jnp.ones((4, 8))},
        "b": {"kernel": jnp.ones((4, 8))},
        **{
            leaf: jnp.ones(shape)
            for case in CASES
            for leaf, shape in case.leaves.items()
        },
    }


CHANGES = [  # of leaves with factored moments, and all others
    SCAN,
    unstack(r"params/scanned/(.*)", r"params/scanned_{i}/\1"),
    split("params/wide/(.*)", [rf"params/wide_{c}/\1" for c in "qkv"], axis=-1),
    fuse([r"params/a/(.*)", r"params/b/(.*)"], r"params/ab/\1"),
    transpose("params/square/kernel"),
    transpose("params/conv/kernel", (2, 0, 1)),
    transpose("params/layers/kernel", (0, 2, 1)),
    *(case.change for case in CASES),
]


def filled(tree):
    """The tree with values of which no two leaves have the same."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        jax.random.key(i)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else (np.arange(leaf.size) + 1000 * i).astype(leaf.dtype).reshape(leaf.shape)
        for i, leaf in enumerate(leaves)
    )


def by_layer(tree):
    """Labels that differ from layer to layer."""
    return {
        name: jax.tree.map(lambda _, name=name: name == "layers_0", inner)
        for name, inner in tree.items()
    }


def of_bias(tree):
    """A mask that differs within one layer only."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: jax.tree_util.keystr(keys) != "['layers_0']['bias']", tree
    )


OPTIMIZERS = {
    name: tx for name, tx in optax_zoo.ZOO.items() if name != "masked by a tree"
} | {
    "masked by layer": optax.masked(optax.adam(1e-3), by_layer),
    "masked but for one bias": optax.masked(optax.adamw(1e-3), of_bias),
    "multi_transform by layer": optax.multi_transform(
        {"first": optax.adam(1e-3), "rest": optax.sgd(1e-3, momentum=0.9)},
        lambda tree: jax.tree.map(
            lambda is_first: "first" if is_first else "rest", by_layer(tree)
        ),
    ),
    "chain of masked": optax.chain(
        optax.clip(1.0),
        optax.masked(optax.adam(1e-3), by_layer),
        optax.masked(optax.trace(0.9), of_bias),
    ),
    "adafactor that does not factor": optax.adafactor(1e-3),
}


def paths_of(tree):
    """Returns leaf path -> leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in leaves}


def resume(directory, changes, state, blank=None, **options):
    """Returns what a run restores of its own save: leaf path -> value."""
    with flaxckpt.Checkpointer(directory, transforms=changes) as run:
        run.save(1, state)
        found = run.restore(blank or jax.eval_shape(lambda: state), **options)
    return paths_of(found)


def lost(state, found):
    """Returns the paths of leaves that came back with other values, or not at all."""
    return [
        path
        for path, leaf in paths_of(state).items()
        if path not in found or not (leaf == found[path]).all()
    ]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_loses_no_leaf_of_any_optimizer(tmp_path, caplog, name):
    own = params()
    opt_state = jax.eval_shape(OPTIMIZERS[name].init, own)
    state = filled({"params": own, "opt_state": opt_state, "step": jnp.ones(())})
    assert lost(state, resume(tmp_path, CHANGES, state)) == []
    assert "does not bring back" not in caplog.text


def test_not_restored_lists_lost_leaves(tmp_path, caplog):
    own = {"w": jnp.ones((8, 24)), "cube": jnp.ones((8, 8, 8)), "dropped": jnp.ones(3)}
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    state = filled({"params": own, "opt_state": tx.init(own)})
    changes = [
        map_leaf(
            "params/w", lambda x: x.reshape(-1), inverse=lambda x: x.reshape(8, 24)
        ),
        # The axes that are factored afterwards are others.
        transpose("params/cube", (2, 0, 1)),
        drop("params/dropped"),
    ]
    blank = jax.tree.map(jnp.zeros_like, state)
    found = lost(state, resume(tmp_path, changes, state, blank, missing="init"))
    assert f" has no inverse: {', '.join(found[:5])}, …" in caplog.text
    assert "params/dropped" in found
    assert [path for path in found if not path.endswith("dropped")] == [
        "opt_state/0/v_row/cube",
        "opt_state/0/v_row/w",
        "opt_state/0/v_col/cube",
        "opt_state/0/v_col/w",
        "opt_state/0/v/w",
    ]


# ---- Adafactor ------------------------------------------------------------------


TURNS = {
    "wide": ((8, 24), None),
    "square": ((8, 8), (-1, 0)),
    "deep": ((2, 8, 24), (1, 2, 0)),
    "deep_square": ((8, 2, 8), (2, 0, 1)),
    "not_factored": ((2, 3), None),
}


@pytest.mark.slow
def test_transposed_state_equals_training_of_transposed_model(tmp_path):
    """Adafactor's own moments of the transposed parameters are the reference."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)

    def turned(tree):
        return {name: jnp.transpose(tree[name], TURNS[name][1]) for name in tree}

    def random(seed):
        key = jax.random.key(seed)
        return {
            name: jax.random.normal(key, shape) for name, (shape, _) in TURNS.items()
        }

    def trained(turn):
        own = turn(random(0))
        opt_state = tx.init(own)
        for i in range(2):
            updates, opt_state = tx.update(turn(random(i + 1)), opt_state, own)
            own = optax.apply_updates(own, updates)
        return {"params": own, "opt_state": opt_state}

    state = jax.jit(trained, static_argnums=0)(lambda tree: tree)
    wanted = jax.jit(trained, static_argnums=0)(turned)
    flaxckpt.save(tmp_path / "c", state)
    changes = [transpose(f"params/{n}", order) for n, (_, order) in TURNS.items()]
    zeros = jax.tree.map(np.zeros_like, wanted)
    found = flaxckpt.load(tmp_path / "c", zeros, transforms=changes)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), wanted, found
    )


@pytest.mark.slow
def test_transposes_factored_moments_of_boxed_parameters(tmp_path):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.grad(lambda m: m(jnp.arange(8.0)).sum())(model)
    optimizer.update(model, grads)
    state = {"model": model, "optimizer": optimizer}
    flaxckpt.save(
        tmp_path / "c", state, transforms=[transpose(r"model/kernel", (1, 0))]
    )
    found = flaxckpt.load(tmp_path / "c", state)
    new, old = found["optimizer"].opt_state[0], optimizer.opt_state[0]
    np.testing.assert_array_equal(
        new.v_row["kernel"].get_value(), old.v_col["kernel"].get_value()
    )
    assert np.any(old.v_row["kernel"].get_value() != old.v_col["kernel"].get_value())


# ---- runs -----------------------------------------------------------------------


@flax.struct.dataclass
class State:
    """A state of a class of its own."""

    params: dict
    opt_state: tuple


def state_of(kind, tx, own):
    state = filled({"params": own, "opt_state": tx.init(own)})
    if kind == "struct":
        return State(**state)
    if kind == "FrozenDict":
        own = freeze(own)
        return freeze(filled({"params": own, "opt_state": tx.init(own)}))
    return state


@pytest.mark.parametrize("kind", ["dict", "struct", "FrozenDict"])
def test_run_with_mask_by_layer_resumes_with_all_moments(tmp_path, caplog, kind):
    state = state_of(kind, optax.masked(optax.adam(1e-3), dict_mask), params())
    with flaxckpt.Checkpointer(tmp_path, transforms=[SCAN]) as ckpt:
        ckpt.save(1, state).wait()
    zeros = jax.tree.map(np.zeros_like, state)
    with flaxckpt.Checkpointer(tmp_path, transforms=[SCAN]) as ckpt:
        found = ckpt.restore(zeros)
    jax.tree.map(np.testing.assert_array_equal, state, found)
    assert "initialized" not in caplog.text
    assert "parameters are unknown" not in caplog.text


def test_resumes_layers_in_own_container_without_warning(tmp_path, caplog):
    own = {"blocks": {str(i): {"w": {"kernel": jnp.ones((4, 4))}} for i in range(3)}}
    tx = optax.masked(optax.adam(1e-3), {"blocks": {"0": True, "1": True, "2": False}})
    state = filled({"params": own, "opt_state": tx.init(own)})
    change = stack(r"params/blocks/(\d+)/(.*)", r"params/blocks/\2")
    with flaxckpt.Checkpointer(tmp_path, transforms=[change]) as ckpt:
        ckpt.save(1, state).wait()
        found = ckpt.restore(jax.tree.map(np.zeros_like, state))
    jax.tree.map(np.testing.assert_array_equal, state, found)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def dict_mask(tree):
    """A mask by layer, of a dict of any class."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: "layers_0" not in jax.tree_util.keystr(keys), tree
    )


@pytest.mark.slow
def test_stacked_model_does_not_take_unstacked_moments(tmp_path, caplog):
    tx = optax.masked(optax.adam(1e-3), by_layer)
    state = filled({"params": params(), "opt_state": tx.init(params())})
    flaxckpt.save(tmp_path / "c", state, transforms=[SCAN])
    own = params()
    layers = [own.pop(f"layers_{i}") for i in range(3)]
    own["layers"] = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    plain = optax.masked(optax.adam(1e-3), jax.tree.map(lambda _: True, own))
    wanted = {"params": own, "opt_state": plain.init(own)}
    with caplog.at_level(logging.WARNING):
        found = flaxckpt.load(tmp_path / "c", wanted)
    assert "initialized" in caplog.text
    assert not np.any(found["opt_state"].inner_state[0].mu["layers"]["kernel"])
    np.testing.assert_array_equal(
        found["params"]["layers"]["bias"][1], state["params"]["layers_1"]["bias"]
    )


LOSSY = map_leaf(
    "params/w", lambda x: x.reshape(-1), inverse=lambda x: x.reshape(8, 24)
)


def adafactor_state():
    own = {"w": jnp.ones((8, 24)), "b": jnp.ones(24)}
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    return filled({"params": own, "opt_state": tx.init(own)})


def test_run_warns_once_about_leaves_it_would_not_restore(tmp_path, caplog):
    state = adafactor_state()
    with flaxckpt.Checkpointer(tmp_path, transforms=[LOSSY]) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).wait()
    [told] = [r.getMessage() for r in caplog.records if "resume" in r.getMessage()]
    assert told.startswith("a resume of this run does not bring back the leaves")
    assert "opt_state/0/v_row/w" in told
    assert "map_leaf('params/w')" in told


def test_preflight_warns_about_leaves_run_would_not_restore(tmp_path, caplog):
    state = adafactor_state()
    with flaxckpt.Checkpointer(tmp_path, transforms=[LOSSY]) as ckpt:
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=5, check_step=False)
        on_step(1, state)
        assert "a resume of this run does not bring back" in caplog.text
        caplog.clear()
        on_step(5, state)
        assert "a resume" not in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        map_leaf("params/w", lambda x: x * 2),
        from_function(
            lambda tree: {
                **tree,
                "params": {**tree["params"], "w": tree["params"]["w"] + 1},
            }
        ),
        from_function(
            lambda tree: {
                **tree,
                "params": {"w": tree["params"]["v"], "v": tree["params"]["w"]},
            }
        ),
    ],
    ids=["map_leaf", "computed", "exchanged"],
)
def test_rejects_restoring_values_without_inverse(tmp_path, caplog, change):
    own = {"w": jnp.arange(4.0), "v": jnp.ones(4)}
    state = {"params": own, "opt_state": optax.sgd(1e-2, momentum=0.9).init(own)}
    with flaxckpt.Checkpointer(tmp_path, transforms=[change]) as ckpt:
        ckpt.save(1, state).wait()
        assert "a resume of this run does not bring back" in caplog.text
        for wanted in (state, {"params": own}):
            with pytest.raises(errors.OptionError, match="cannot be undone") as caught:
                ckpt.restore(wanted)
            assert "params/w" in str(caught.value)
            assert "inverse=" in str(caught.value)
        as_saved = ckpt.restore()
        halved = map_leaf("params/w", lambda x: x / 2)
        if "map_leaf" in str(change):
            found = ckpt.restore(state, transforms=[halved])
            np.testing.assert_array_equal(found["params"]["w"], own["w"])
            np.testing.assert_array_equal(as_saved["params"]["w"], own["w"] * 2)


@pytest.mark.parametrize(
    "change", [copy("params/w", "shadow/w"), slice("params/v", (4,))]
)
def test_value_preserving_transforms_need_no_inverse(tmp_path, caplog, change):
    own = {"w": jnp.arange(4.0), "v": jnp.ones(4)}
    with flaxckpt.Checkpointer(tmp_path, transforms=[change]) as ckpt:
        ckpt.save(1, {"params": own}).wait()
        found = ckpt.restore({"params": own})
    np.testing.assert_array_equal(found["params"]["w"], own["w"])
    assert not caplog.records


def without_w(tree):
    return {**tree, "params": {"v": tree["params"]["v"]}}


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (drop("params/w"), ["params/w", "opt_state/0/trace/w"]),
        (keep("params/.*"), ["opt_state/0/trace/v", "opt_state/0/trace/w"]),
        (slice("params/w", (2,)), ["params/w", "opt_state/0/trace/w"]),
        (from_function(without_w), ["params/w"]),
        (lambda table: {"params/w": table["params/w"]}, ["params/v"]),
    ],
    ids=["drop", "keep", "slice", "from_function", "function"],
)
def test_run_names_leaves_removed_by_its_transforms(tmp_path, caplog, change, lost):
    own = {"w": jnp.arange(4.0), "v": jnp.ones(4)}
    state = {"params": own, "opt_state": optax.sgd(1e-2, momentum=0.9).init(own)}
    with flaxckpt.Checkpointer(tmp_path, transforms=[change]) as ckpt:
        ckpt.save(1, state).wait()
        [told] = [r.getMessage() for r in caplog.records]
        assert "a resume of this run does not bring back" in told
        assert all(path in told for path in lost)
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1)
        if all("opt_state" in path for path in lost):
            caplog.clear()
            on_step.restore_or_init(state)
            assert "but initialized" in caplog.text
            return
        with pytest.raises(errors.RestoreMismatchError) as refused:
            on_step.restore_or_init(state)
        [name] = flaxckpt.metadata(tmp_path / "1").transforms
        assert f"The run saves with {name}, which may remove" in str(refused.value)
        assert 'missing="init"' in str(refused.value)
        found = ckpt.restore(state, missing="init", transforms=[drop("params/.*")])
        np.testing.assert_array_equal(found["params"]["w"], own["w"])


def test_run_with_copied_leaves_resumes_without_copies(tmp_path):
    state = {"params": {"w": jnp.arange(4.0), "v": jnp.ones(2)}}
    shadow = copy({"params/w": "shadow/w", "params/(v)": r"twin/\1"})
    with flaxckpt.Checkpointer(tmp_path, transforms=[shadow]) as ckpt:
        ckpt.save(1, state).wait()
        on_step = flaxckpt.CheckpointCallback(ckpt, every_steps=1)
        found, step = on_step.restore_or_init(state)
        assert jax.tree.structure(found) == jax.tree.structure(state)
        ckpt.save(step + 1, found).wait()


# ---- optimizers with several leaves for each parameter ------------------------------


def sm3_state(kernel):
    """A trained state of SM3, whose accumulators of a square kernel all differ."""
    tx = optax.sm3(1e-2)
    grads = {"dense": {"kernel": kernel, "bias": jnp.arange(4.0)}}
    state = tx.init(jax.tree.map(jnp.zeros_like, grads))
    _, state = tx.update(grads, state)
    return {"params": grads, "opt_state": state}


@pytest.mark.parametrize("freezes", [False, True])
def test_sm3_accumulators_follow_transposition(tmp_path, freezes):
    kernel = jnp.arange(16.0).reshape(4, 4) ** 2
    saved, wanted = sm3_state(kernel), sm3_state(kernel.T)
    if freezes:
        saved["params"], wanted["params"] = (
            freeze(s["params"]) for s in (saved, wanted)
        )
    flaxckpt.save(tmp_path / "c", saved)
    abstract = jax.eval_shape(lambda: wanted)
    found = flaxckpt.load(
        tmp_path / "c", abstract, transforms=[transpose("params/dense/kernel")]
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    before, after = (s["opt_state"][0].mu["dense"]["kernel"] for s in (saved, found))
    assert not np.array_equal(before[0], after[0])


def test_sm3_accumulators_follow_renamed_parameter(tmp_path):
    saved = sm3_state(jnp.arange(16.0).reshape(4, 4))
    flaxckpt.save(tmp_path / "c", saved)
    wanted = jax.tree.map(jnp.zeros_like, saved)
    renamed = {"params": {"new": wanted["params"]["dense"]}}
    renamed["opt_state"] = optax.sm3(1e-2).init(renamed["params"])
    found = flaxckpt.load(
        tmp_path / "c",
        renamed,
        transforms=[rename("params/dense/(.*)", r"params/new/\1")],
    )
    for field in ("mu", "nu"):
        jax.tree.map(
            np.testing.assert_array_equal,
            getattr(found["opt_state"][0], field)["new"],
            getattr(saved["opt_state"][0], field)["dense"],
        )


@pytest.mark.parametrize("others", [[], [scale("w", 4.0)]], ids=["none", "others"])
@pytest.mark.parametrize(
    "change",
    [
        scale("w", 2.0),
        transpose("w"),
        map_leaf("w", lambda x: x + 1, inverse=lambda x: x - 1),
        from_function(lambda tree: {**tree, "w": tree["w"] * 2}),
    ],
    ids=str,
)
def test_warns_of_values_that_transforms_of_the_save_have_changed(
    tmp_path, caplog, change, others
):
    state = {"w": jnp.arange(9.0).reshape(3, 3)}
    with flaxckpt.Checkpointer(tmp_path, transforms=[change]) as run:
        run.save(1, state)
    run = flaxckpt.Checkpointer(tmp_path, transforms=others)
    caplog.clear()
    found = run.restore(state)
    assert not jnp.array_equal(found["w"], state["w"])
    [told] = caplog.messages
    assert f"was saved with {flaxckpt.metadata(tmp_path).transforms[0]}" in told
    assert "transforms=[...]" in told

    caplog.clear()
    flaxckpt.CheckpointCallback(run, on_preemption=False).restore_or_init(state)
    assert [told] == caplog.messages


@pytest.mark.parametrize(
    "options",
    [{"own": [scale("w", 2.0)]}, {"transforms": [scale("w", 0.5)]}],
    ids=["own", "undone by the caller"],
)
def test_does_not_warn_of_transforms_that_are_undone(tmp_path, caplog, options):
    with flaxckpt.Checkpointer(tmp_path, transforms=[scale("w", 2.0)]) as run:
        run.save(1, {"w": jnp.ones(3)})
    own = options.pop("own", [])
    run = flaxckpt.Checkpointer(tmp_path, transforms=own)
    caplog.clear()
    assert run.restore({"w": jnp.ones(3)}, **options)["w"][0] == 1
    assert not caplog.messages


def test_does_not_warn_of_transforms_that_only_select_and_cast(tmp_path, caplog):
    changes = [drop("b"), cast("w", "bfloat16")]
    with flaxckpt.Checkpointer(tmp_path, transforms=changes) as run:
        run.save(1, {"w": jnp.ones(3), "b": jnp.ones(3)})
    caplog.clear()
    flaxckpt.Checkpointer(tmp_path).restore({"w": jnp.ones(3)})
    assert not caplog.messages


def times(factor):
    def fn(x):
        return x * factor

    return fn


def renamed(name):
    def fn(x):
        return x * 2

    fn.__qualname__ = name
    return fn


FACTOR = 2.0
ALIKE = {
    "lambdas": lambda: (lambda x: x * 2, lambda x: x * 4),
    "lambdas without source": lambda: (eval("lambda x: x * 2"), eval("lambda x: x*4")),
    "closures": lambda: (times(2), times(4)),
    "arrays": lambda: (times(np.full(4, 2.0)), times(np.full(4, 4.0))),
    "defaults": lambda: [lambda x, factor=factor: x * factor for factor in (2, 4)],
    "partial": lambda: [functools.partial(jnp.multiply, factor) for factor in (2, 4)],
    "nested": lambda: [
        functools.partial(lambda fn, x: fn(x), times(factor)) for factor in (2, 4)
    ],
}


def doubling(fn):
    return map_leaf("w", fn, inverse=lambda x: x / 2)


@pytest.mark.parametrize("name", ALIKE)
def test_run_does_not_undo_the_transform_of_another_function(tmp_path, caplog, name):
    state = {"w": jnp.arange(4.0)}
    (one, other), (again, _) = ALIKE[name](), ALIKE[name]()
    with flaxckpt.Checkpointer(tmp_path, transforms=[doubling(one)]) as ckpt:
        ckpt.save(1, state)
    for fn, expected in ((again, state["w"]), (other, state["w"] * 2)):
        caplog.clear()
        run = flaxckpt.Checkpointer(tmp_path, transforms=[doubling(fn)], read_only=True)
        np.testing.assert_array_equal(run.restore(state)["w"], expected)
        assert ("which this Checkpointer does not have" in caplog.text) == (fn is other)


def test_description_shows_the_source_of_a_lambda_and_what_it_uses():
    offset = 3
    shown = str(
        map_leaf("w", lambda x: x * FACTOR
                 + offset)
    )  # fmt: skip
    assert shown.endswith(
        "<lambda>: lambda x: x * FACTOR + offset, FACTOR=2.0, offset=3"
    )
    assert str(from_function(without_w)) == "from_function(without_w)"
    assert len(str(map_leaf("w", times(tuple(range(1000)))))) < 300


def test_run_undoes_what_was_recorded_without_the_values_of_a_function(tmp_path):
    state = {"w": jnp.arange(4.0)}
    named = times(2).__qualname__  # all that flaxckpt 0.1.0 recorded
    with flaxckpt.Checkpointer(tmp_path, transforms=[doubling(renamed(named))]) as ckpt:
        ckpt.save(1, state)
    run = flaxckpt.Checkpointer(tmp_path, transforms=[doubling(times(2))])
    strategies.assert_same(state, run.restore(state))
