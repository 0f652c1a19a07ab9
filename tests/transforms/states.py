"""States for tests of transforms, and their leaves after transforms."""

import jax
import numpy as np
from flax import nnx
from flax.core import freeze

from flaxckpt import transforms
from flaxckpt._arrays import evaluate
from flaxckpt._state import flax_state
from flaxckpt._transforms import base


def filled(tree):
    """Returns the tree with small whole numbers, different in all leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        jax.numpy.asarray(
            (np.arange(leaf.size) + 37 * i).reshape(leaf.shape), leaf.dtype
        )
        for i, leaf in enumerate(leaves)
    )


def state_of(kind, params, tx):
    """Returns a filled state with the parameters at `params/…`.

    Args:
        kind: "dict", "FrozenDict" or "nnx".
        params: A dict of arrays.
        tx: The optimizer.
    """
    if kind == "nnx":
        model = nnx.Dict({k: nnx.Param(v) for k, v in params.items()})
        state = {"params": model, "opt_state": nnx.Optimizer(model, tx, wrt=nnx.Param)}
        graph, values = nnx.split(state)
        return nnx.merge(graph, filled(values))
    params = freeze(params) if kind == "FrozenDict" else params
    state = {"params": params, "opt_state": tx.init(params)}
    return filled(freeze(state) if kind == "FrozenDict" else state)


def leaf_table(state):
    """Returns the leaf table of a state, with roles and boxes."""
    return flax_state.flatten(state).table_to_transform()


def apply(changes, table, wanted=None):
    """Returns a leaf table after transforms, on restore such as to fill `wanted`."""
    return base.apply(changes, table, wanted)


def _values(table):
    return {
        path: leaf.source
        for path, leaf in table.items()
        if leaf.info.kind not in ("empty", "string")
    }


def table_of(state):
    """Returns leaf path -> value."""
    return _values(leaf_table(state))


def transformed(changes, state):
    """Returns leaf path -> value after transforms."""
    return _values(evaluate.evaluate_state(base.apply(changes, leaf_table(state))))


def round_trip(changes, state):
    """Returns leaf path -> value after transforms and their inverses."""
    table = evaluate.evaluate_state(base.apply(changes, leaf_table(state)))
    undone = base.apply(transforms.inverse(changes), table)
    return _values(evaluate.evaluate_state(undone))
