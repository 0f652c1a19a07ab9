"""Optax transforms whose states must be saved, sharded and matched.

Run as a program (`python -m tests.helpers.optax_zoo`), it prints
`docs/optimizer-specs.md`.
"""

import collections

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from optax import contrib

import flaxckpt
from flaxckpt import partition

PARAMS = {
    "embed": jnp.ones((16, 8)),
    "layer": {"kernel": jnp.ones((8, 24)), "bias": jnp.ones(24)},
    "square": jnp.ones((8, 8)),
    "conv": jnp.ones((3, 8, 16)),
    "scale": jnp.ones(()),
}


def is_matrix(params):
    """Returns a mask of the parameters."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def labels(params):
    """Returns labels of the parameters for `multi_transform`."""
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "rest", params)


ZOO = {
    "sgd": optax.sgd(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3),
    "nadam": optax.nadam(1e-3),
    "adamax": optax.adamax(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "adabelief": optax.adabelief(1e-3),
    "adagrad": optax.adagrad(1e-3),
    "adadelta": optax.adadelta(1e-3),
    "adan": optax.adan(1e-3),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(1e-3),
    "rmsprop": optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "radam": optax.radam(1e-3),
    "yogi": optax.yogi(1e-3),
    "novograd": optax.novograd(1e-3),
    "sm3": optax.sm3(1e-3),
    "rprop": optax.rprop(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "adafactor with momentum": optax.adafactor(
        1e-3, min_dim_size_to_factor=4, momentum=0.9
    ),
    "lbfgs": optax.lbfgs(memory_size=3),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "clip, adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "schedule": optax.adamw(optax.linear_schedule(1e-3, 0, 100)),
    "named_chain": optax.named_chain(
        ("clip", optax.clip(1.0)), ("adam", optax.scale_by_adam())
    ),
    "masked by a tree": optax.masked(optax.adam(1e-3), is_matrix(PARAMS)),
    "masked by a function": optax.masked(optax.adam(1e-3), is_matrix),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(1e-3), "rest": optax.sgd(1e-2, momentum=0.9)}, labels
    ),
    "freeze": optax.multi_transform(
        {"matrix": optax.set_to_zero(), "rest": optax.adam(1e-3)}, labels
    ),
    "MultiSteps": optax.MultiSteps(
        optax.adam(1e-3), every_k_schedule=4
    ).gradient_transformation(),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "ema": optax.chain(optax.adam(1e-3), optax.ema(0.99)),
    "add_noise": optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(1e-2)),
    "lookahead": optax.lookahead(optax.sgd(1e-2, momentum=0.9), 5, 0.5),
    "muon": contrib.muon(1e-3),
    "schedule_free": contrib.schedule_free_adamw(1e-3),
    "prodigy": contrib.prodigy(),
    "dadapt": contrib.dadapt_adamw(),
    "dog": contrib.dog(),
    "sam": contrib.sam(optax.sgd(1e-2), optax.sgd(1e-2)),
    "reduce_on_plateau": optax.chain(
        optax.adam(1e-3), contrib.reduce_on_plateau(patience=3)
    ),
    "nested": optax.MultiSteps(
        optax.chain(
            optax.clip(1.0),
            optax.inject_hyperparams(
                optax.adafactor, static_args=("min_dim_size_to_factor",)
            )(learning_rate=1e-3, min_dim_size_to_factor=4),
        ),
        every_k_schedule=2,
    ).gradient_transformation(),
}


def params_for(name):
    """Returns parameters in the form that a transform needs."""
    if name == "lookahead":
        return optax.LookaheadParams.init_synced(PARAMS)
    if name == "muon":
        return {k: v for k, v in PARAMS.items() if k != "scale"}
    return PARAMS


SPECS = {
    "embed": P("data", "model"),
    "layer/kernel": P(None, "model"),
    "layer/bias": P("model"),
    "square": P("data", "model"),
    "conv": P(None, "data", "model"),
    "scale": P(),
}
MESH = AbstractMesh((2, 4), ("data", "model"))

HEADER = f"""# How the spec of each optimizer leaf is found

`abstract_state` shards optimizer leaves like their parameters; see
[sharding](sharding.md#the-optimizer). This page lists the rule that finds each spec, by
transform, with optax {optax.__version__}. You need this page only if the warning about
replicated leaves names a leaf of your optimizer.

The parameters come from `tests/helpers/optax_zoo.py`: matrices (one of them square), a
3-D kernel, a bias and a scalar, all except the scalar sharded over a mesh of 2 by 4
devices. The numbers count the optimizer leaves whose spec was found by each rule:

* **types**: JAX propagated the parameters' shardings through the transform's `init`.
* **suffix**: the leaf path ends in the path of a parameter, and the shape shows which
  axes the leaf retains.
* **small**: the leaf is too small to shard.
* **replicated**: no rule applies, and a warning says so.

| transform | types | suffix | small | replicated |
|---|---|---|---|---|
"""


def create(name):
    """Creates a TrainState with the optimizer `name`."""
    return train_state.TrainState.create(
        apply_fn=None, params=params_for(name), tx=ZOO[name]
    )


def derive(state, specs, mesh):
    """Returns the spec of each optimizer leaf with its rule: leaf path -> both.

    Args:
        state: Abstract or not, with an optimizer at `opt_state`.
        specs: The end of a parameter's path -> its spec; others are replicated.
        mesh: The mesh of the specs.
    """
    leaves = jax.tree.leaves(
        flaxckpt.parameter_infos(state),
        is_leaf=lambda leaf: isinstance(leaf, flaxckpt.LeafInfo),
    )
    infos = {leaf.path: leaf for leaf in leaves if leaf.dtype}
    optimizer = {path for path in infos if path.startswith("opt_state/")}
    found = {
        path: next((s for p, s in specs.items() if path.endswith(f"/{p}")), P())
        for path in infos.keys() - optimizer
    }
    return partition.derive(state, infos, optimizer, found, mesh)


def rules_found(name):
    """Counts the leaves of a transform's state by the rule that found their spec."""
    derived = derive(jax.eval_shape(lambda: create(name)), SPECS, MESH)
    return collections.Counter(found.rule for found in derived.values())


def table():
    """Returns the document."""
    rows = []
    for name in ZOO:
        found = rules_found(name)
        columns = ("types", "suffix", "small", "replicated")
        cells = [str(found[rule] or "") for rule in columns]
        rows.append(f"| {name} | {' | '.join(cells)} |".replace("  ", " "))
    return HEADER + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201
