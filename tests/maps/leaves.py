"""The leaves of a tree by their paths."""

import jax
import numpy as np
from flax import traverse_util


def flatten(tree):
    """Returns leaf path -> numpy array."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def nest(leaves):
    """Returns a tree of dicts."""
    return traverse_util.unflatten_dict(leaves, sep="/")
