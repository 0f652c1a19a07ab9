"""Ordinary changes of one optimizer keep its moments, wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import flaxckpt
from tests.helpers import slow
from tests.helpers.optimizer_states import save_with

PARAMS = {"w": jnp.ones((2, 3)), "inner": {"w": jnp.ones(4), "b": jnp.ones(3)}}

# ---- changes ----------------------------------------------------------------------


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def others(params):
    return jax.tree.map(lambda p: p.ndim <= 1, params)


def everything(params):
    return jax.tree.map(lambda p: True, params)


chain = optax.chain
schedule = optax.linear_schedule(1e-3, 0.0, 10)
adam, adamw, sgd = optax.adam(1e-3), optax.adamw(1e-3), optax.sgd(1e-2)
momentum = optax.sgd(1e-2, momentum=0.9)
clip, norm = optax.clip(1.0), optax.clip_by_global_norm(1.0)
decayed = optax.masked(optax.add_decayed_weights(1e-2), matrices)
groups = (optax.masked(adam, matrices), optax.masked(momentum, others))
labelled = optax.multi_transform(
    {"all": adam}, lambda params: jax.tree.map(lambda _: "all", params)
)
scale_by_adam, trace, scale = optax.scale_by_adam(), optax.trace(0.9), optax.scale(-1.0)

BOTH_WAYS = {
    "weight decay": (adam, adamw),
    "clip": (adam, chain(norm, adam)),
    "clip and average": (adam, chain(norm, adamw, optax.ema(0.9))),
    "schedule": (adam, optax.adam(schedule)),
    "hyperparameters": (adam, optax.inject_hyperparams(optax.adam)(1e-3)),
    "mask of all": (adam, optax.masked(adam, everything)),
    "labels": (adam, labelled),
    "steps": (adam, optax.MultiSteps(adam, 2).gradient_transformation()),
    "finite": (adam, optax.apply_if_finite(adam, 3)),
    "chain of clips": (adamw, chain(chain(norm, optax.zero_nans()), adamw)),
    "stateless chain": (adamw, chain(chain(norm, clip), adamw)),
    "noise": (adam, chain(chain(clip, optax.add_noise(0.1, 0.5, 1)), adam)),
    "average": (chain(adamw, optax.ema(0.9)), chain(norm, adamw, optax.ema(0.9))),
    "two moments": (
        chain(scale_by_adam, trace, scale),
        chain(norm, scale_by_adam, trace, scale),
    ),
    "nested": (chain(chain(norm, scale_by_adam), chain(trace, scale)), adam),
    "second optimizer": (adam, chain(adam, momentum)),
    "first optimizer": (sgd, chain(adam, sgd)),
    "order": (chain(adam, trace), chain(trace, adam)),
    "masked decay": (chain(adam, decayed), chain(norm, adam, decayed)),
    "groups": (chain(*groups), chain(norm, *groups)),
    "decay in a chain": (
        chain(adamw, chain(optax.add_decayed_weights(1e-3), scale)),
        chain(norm, adamw),
    ),
    "schedule in a chain": (
        chain(chain(scale_by_adam), chain(optax.scale_by_schedule(schedule))),
        optax.adamw(schedule),
    ),
}
CHANGES = BOTH_WAYS | {f"{n}, undone": (b, a) for n, (a, b) in BOTH_WAYS.items()}

# ---- layouts ----------------------------------------------------------------------


def in_train_state(tx):
    return TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


class Model(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.w = nnx.Param(jnp.ones((3, 2)))


def in_nnx(tx):
    model = Model()
    return {"model": model, "opt": nnx.Optimizer(model, tx, wrt=nnx.Param)}


LAYOUTS = {
    "train state": in_train_state,
    "opt_state": lambda tx: {"params": PARAMS, "opt_state": tx.init(PARAMS)},
    "opt": lambda tx: {"params": PARAMS, "opt": tx.init(PARAMS)},
    "pair": lambda tx: (PARAMS, tx.init(PARAMS)),
    "model": lambda tx: {"model": PARAMS, "optimizer": tx.init(PARAMS)},
    "average": lambda tx: (PARAMS, PARAMS, tx.init(PARAMS)),
    "named average": lambda tx: {
        "weights": PARAMS,
        "ema": {"weights": PARAMS},
        "opt_state": tx.init(PARAMS),
    },
    "two networks": lambda tx: {
        "g": PARAMS,
        "d": PARAMS,
        "g_opt": tx.init(PARAMS),
        "d_opt": sgd.init(PARAMS),
    },
    "statistics": lambda tx: {
        "params": PARAMS,
        "batch_stats": {"inner": {"mean": jnp.ones(3)}},
        "opt_state": tx.init(PARAMS),
    },
    "nnx": in_nnx,
}

STATES = {
    "ScaleByAdamState": ("mu", "nu"),
    "TraceState": ("trace",),
    "EmaState": ("ema",),
}


def filled(state):
    """The state with random values, another for each leaf."""
    random = np.random.default_rng(1)

    def fill(leaf):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return leaf
        return jnp.asarray(random.random(leaf.shape), leaf.dtype)

    return jax.tree.map(fill, state)


def moments(state):
    """The moments in a state, by the class of the transform's state and the field."""
    if isinstance(state, dict) and isinstance(state.get("opt"), nnx.Optimizer):
        state = state["opt"].opt_state

    def is_state(node):
        return type(node).__name__ in STATES

    return {
        (type(node).__name__, field, jax.tree_util.keystr(path)): np.asarray(leaf)
        for node in jax.tree.leaves(state, is_leaf=is_state)
        if is_state(node)
        for field in STATES[type(node).__name__]
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(node, field))
    }


def fill_layout(layout, tx):
    state = LAYOUTS[layout](tx)
    if layout == "nnx":
        nnx.update(state["opt"], filled(nnx.state(state["opt"])))
        return state
    return filled(state)


def check(path, layout, change, writer="flaxckpt"):
    old, new = CHANGES[change]
    saved = fill_layout(layout, old)
    save_with(writer, path, saved)
    found = flaxckpt.load(path, LAYOUTS[layout](new), unused="ignore")
    before, after = moments(saved), moments(found)
    kept = before.keys() & after.keys()
    assert kept or not before or not after
    for key in kept:
        np.testing.assert_array_equal(after[key], before[key], str(key))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", slow.all_but(LAYOUTS, ["train state"]))
@pytest.mark.parametrize("change", CHANGES)
def test_optimizer_change_keeps_moments(tmp_path, change, layout):
    check(tmp_path / "c", layout, change)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", ["train state", "opt", "average"])
@pytest.mark.parametrize("change", ["groups", "stateless chain", "nested", "schedule"])
def test_optimizer_change_keeps_orbax_moments(tmp_path, change, layout):
    check(tmp_path / "c", layout, change, "orbax")


SWAP = (chain(adam, momentum), chain(momentum, adam))
DOUBTFUL = {"average", "two networks"}
"""Layouts in which a tuple of optimizers may be of two equal networks."""


@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - DOUBTFUL))
def test_treats_optimizers_of_one_network_as_chain(tmp_path, layout):
    """Two of them in a tuple have moments of the same parameters."""
    saved = fill_layout(layout, SWAP[0])
    flaxckpt.save(tmp_path / "c", saved)
    found = flaxckpt.load(tmp_path / "c", LAYOUTS[layout](SWAP[1]))
    before, after = moments(saved), moments(found)
    assert before.keys() == after.keys()
    for key, leaf in before.items():
        np.testing.assert_array_equal(after[key], leaf, str(key))


@pytest.mark.parametrize("layout", sorted(DOUBTFUL))
def test_rejects_optimizers_of_possibly_two_networks(tmp_path, layout):
    flaxckpt.save(tmp_path / "c", fill_layout(layout, SWAP[0]))
    with pytest.raises(flaxckpt.errors.RestoreMismatchError, match="several"):
        flaxckpt.load(tmp_path / "c", LAYOUTS[layout](SWAP[1]))
