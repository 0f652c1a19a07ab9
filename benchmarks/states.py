"""The states to save: first abstract, then filled with values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import SingleDeviceSharding

PyTree: TypeAlias = Any


def train_state(*, quick: bool = False) -> TrainState:
    """GPT-2 small with AdamW: 446 leaves, 1.49 GB of float32; abstract."""
    params = _gpt2(layers=2, width=32, vocabulary=200, context=16) if quick else _gpt2()
    return _with_adamw(params)


def _gpt2(
    layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024
) -> PyTree:
    norm = {"scale": _float(width), "bias": _float(width)}
    block = {
        "ln_1": norm,
        "attn": {"c_attn": _dense(width, 3 * width), "c_proj": _dense(width, width)},
        "ln_2": norm,
        "mlp": {"c_fc": _dense(width, 4 * width), "c_proj": _dense(4 * width, width)},
    }
    return {
        "wte": {"embedding": _float(vocabulary, width)},
        "wpe": {"embedding": _float(context, width)},
        **{f"h_{i}": block for i in range(layers)},
        "ln_f": norm,
    }


def perceptron(*, layers: int, width: int) -> TrainState:
    """Dense layers of equal width with AdamW; abstract."""
    return _with_adamw({f"layer_{i}": _dense(width, width) for i in range(layers)})


def tiny_leaves(count: int) -> PyTree:
    """Nested dicts of `count` arrays of 8 float32; abstract."""
    names = [divmod(i, 100) for i in range(count)]
    state: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for block, leaf in names:
        state.setdefault(f"block_{block}", {})[f"leaf_{leaf}"] = _float(8)
    return state


def mixed(*, quick: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Arrays of 64 MiB, of 16 to 26 MiB and of 8 KiB, 200 MB together; abstract."""
    if quick:
        return {"embedding": _float(16, 64), "bias": _float(16)}
    kernels = {f"kernel_{i}": _float(2048, 2048 + 256 * i) for i in range(6)}
    biases = {f"bias_{i}": _float(2048) for i in range(40)}
    return {"embedding": _float(2**14, 2**10), **kernels, **biases}


def lora(*, quick: bool = False) -> PyTree:
    """A frozen base, 99 % of the bytes, and adapters to it; abstract."""
    layers, width = (4, 200) if quick else (24, 2000)
    rank = width // 200  # two factors of width x rank: 1 % of width x width
    base = {f"layer_{i}": {"kernel": _float(width, width)} for i in range(layers)}
    adapters = {
        f"layer_{i}": {"a": _float(width, rank), "b": _float(rank, width)}
        for i in range(layers)
    }
    return {"base": base, "adapters": adapters}


def _dense(inputs: int, outputs: int) -> Mapping[str, jax.ShapeDtypeStruct]:
    return {"kernel": _float(inputs, outputs), "bias": _float(outputs)}


def _float(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _with_adamw(params: PyTree) -> TrainState:
    tx = optax.adamw(1e-3)
    state = jax.eval_shape(
        lambda p: TrainState.create(apply_fn=None, params=p, tx=tx), params
    )
    counted: TrainState = state.replace(step=jax.ShapeDtypeStruct((), jnp.int32))
    return counted


def on(device: jax.Device, abstract_state: PyTree) -> PyTree:
    """Returns `abstract_state` with every leaf placed on `device`."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_state,
    )


def fill(abstract_state: PyTree, *, seed: int = 0) -> PyTree:
    """Returns values that compress like the values of a trained model.

    Weights and first moments are normally distributed, second moments are squares of
    normally distributed values, and counters are 1000.
    """
    rng = np.random.default_rng(seed)

    def values(path: Any, leaf: jax.ShapeDtypeStruct) -> PyTree:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.device_put(np.full(leaf.shape, 1000, leaf.dtype), leaf.sharding)
        array = rng.standard_normal(leaf.shape, np.float32)
        array *= 0.02
        if ".nu" in jax.tree_util.keystr(path):
            array *= array
        return jax.device_put(array, leaf.sharding)

    state = jax.tree_util.tree_map_with_path(values, abstract_state)
    return jax.block_until_ready(state)


def copy(state: PyTree) -> PyTree:
    """Returns the same values in new arrays, as after a training step."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def use(state: PyTree) -> None:
    """Computes with every leaf and waits, which touches all memory."""
    jax.block_until_ready([_sum(leaf) for leaf in jax.tree.leaves(state)])


_sum = jax.jit(jnp.sum)


def nbytes(abstract_state: PyTree) -> int:
    """Returns the size of all leaves."""
    leaves = jax.tree.leaves(abstract_state)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def check_equal(restored: PyTree, saved: PyTree) -> None:
    """Compares two states bit for bit.

    Raises:
        ValueError: They differ: a contender with wrong results is not measured.
    """
    structures: list[Any] = [jax.tree.structure(s) for s in (restored, saved)]
    if structures[0] != structures[1]:
        raise ValueError(f"restored {structures[0]}, saved {structures[1]}")
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    for (path, one), other in zip(leaves, jax.tree.leaves(saved), strict=True):
        if not isinstance(one, jax.Array):
            raise ValueError(
                f"{jax.tree_util.keystr(path)} came back as a {type(one).__name__}"
            )
        if one.dtype != other.dtype or not np.array_equal(_bits(one), _bits(other)):
            raise ValueError(f"{jax.tree_util.keystr(path)} differs after a restore")


def _bits(array: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(array).view(f"u{array.dtype.itemsize}")
