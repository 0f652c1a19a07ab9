"""States with the same bits under every version of jax, and their comparison.

Imported by both sides: by the environment of an old Orbax, and by flaxckpt's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

PyTree: TypeAlias = Any

DEVICES: Final = 2
STEP: Final = 5
METRICS: Final = {"loss": 0.5}
CONFIG: Final = {"name": "tiny", "layers": [1, 2]}


def values(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Returns the numbers from -8 up, cyclic, so that none is zero by accident."""
    size = int(np.prod(shape))
    return (np.arange(size) % 16 - 8).astype(dtype).reshape(shape)


def bits(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Returns values of all bit patterns: NaNs and subnormals, too."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    return raw.view(dtype).reshape(shape)


def arrays() -> PyTree:
    return {
        "layer": {
            "kernel": place(values((8, 4)), "x"),
            "bias": place(values((4,))),
            "scale": jnp.float32(-0.5),
        },
        "blocks": [place(values((4, 4, 2)), "x"), place(values((6,), np.int32), "x")],
        "mask": jnp.asarray(values((3, 3)) > 0),
        "zeros": place(np.zeros((8, 8), np.float32), "x"),
        "nan": jnp.asarray(bits((16,), np.float32)),
        "host": np.arange(5) - 2**40,
    }


def train_state() -> PyTree:
    params = {"dense": {"kernel": values((8, 4)), "bias": values((4,))}}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state = state.replace(step=jnp.asarray(state.step))
    leaves, treedef = jax.tree_util.tree_flatten(state)
    filled = [
        place(values(np.shape(leaf), np.asarray(leaf).dtype) + n)
        for n, leaf in enumerate(leaves)
    ]
    return jax.tree_util.tree_unflatten(treedef, filled)


def small_types() -> PyTree:
    state = {
        name: place(bits((8, 4), getattr(ml_dtypes, name)), "x")
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    }
    state["float16"] = place(bits((8, 4), np.float16), "x")
    state["int4"] = place(values((8, 4), ml_dtypes.int4), "x")
    return state


def empty_containers() -> PyTree:
    return {"w": place(values((4,))), "n": None, "d": {}, "l": []}


def prng_keys() -> PyTree:
    data = np.arange(8, dtype=np.uint32).reshape(4, 2)
    return {
        "key": jax.random.wrap_key_data(jnp.asarray(data[0])),
        "keys": jax.random.wrap_key_data(jnp.asarray(data[1:])),
    }


def items_state() -> PyTree:
    """A state whose branches are items of their own."""
    state = train_state()
    return {"model_params": state.params, "optimizer_state": state.opt_state}


STATES: Final[dict[str, Callable[[], PyTree]]] = {
    "arrays": arrays,
    "TrainState": train_state,
    "bfloat16, float8, int4": small_types,
    "empty containers, None": empty_containers,
    "empty tuples": lambda: {"w": place(values((4,))), "t": ()},
    "Python numbers": lambda: {"w": place(values((4,))), "i": -(2**40), "f": 0.1},
    "bool": lambda: {"w": place(values((4,))), "b": True},
    "strings": lambda: {"w": place(values((4,))), "s": "a/b ü"},
    "typed PRNG keys": prng_keys,
    "empty arrays": lambda: {"w": place(values((4,))), "e": jnp.zeros((0, 3))},
}


def place(array: np.ndarray[Any, Any], *spec: str) -> jax.Array:
    """Returns `array` on the devices, sharded like `spec`."""
    devices = jax.devices()
    assert len(devices) == DEVICES
    if not spec:
        return jax.device_put(array, SingleDeviceSharding(devices[0]))
    mesh = Mesh(np.array(devices), ("x",))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def abstract(tree: PyTree) -> PyTree:
    """Returns `tree` with shapes, dtypes and shardings in place of jax arrays."""

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree_util.tree_map(describe, tree)


# ---- the comparison --------------------------------------------------------------

EQUAL: Final = "equal"


def compare(read: PyTree, saved: PyTree, *, has_target: bool = False) -> str:
    """Returns `equal`, `values: …` (another type of leaf), or `wrong: …`."""
    found, wanted = named(read), named(saved)
    if found.keys() != wanted.keys():
        return f"wrong: the leaves {sorted(found.keys() ^ wanted.keys())}"
    if has_target and not same_structure(read, saved):
        return "wrong: the containers"
    results = [
        f"{path}, {result}"
        for path, leaf in wanted.items()
        if (result := compare_leaf(found[path], leaf, has_target=has_target))
    ]
    if not results:
        return EQUAL
    is_wrong = any(", wrong" in result for result in results)
    return ("wrong: " if is_wrong else "values: ") + "; ".join(results)[:200]


def compare_leaf(found: Any, saved: Any, *, has_target: bool) -> str | None:
    """Returns None if both are equal, else the difference."""
    if found is None and is_empty(saved):
        return None if saved in (None, ()) or not has_target else "wrong: None"
    if is_empty(saved) or is_empty(found):
        return None if type(found) is type(saved) else f"wrong: {found!r}"[:80]
    if isinstance(saved, str):
        return None if found == saved else f"wrong: {found!r}"[:80]
    if is_key(saved):
        if not is_key(found):
            data = np.asarray(jax.random.key_data(saved))
            same = same_bits(np.asarray(found), data)
            return "key data" if same else f"wrong: {found!r}"[:80]
        if str(jax.random.key_impl(found)) != str(jax.random.key_impl(saved)):
            return "wrong: another key"
        found, saved = jax.random.key_data(found), jax.random.key_data(saved)
    if isinstance(saved, bool | int | float):
        if type(found) is type(saved) and found == saved:
            return None
        kind = type(found).__name__
        return kind if np.asarray(found) == saved else f"wrong: {found!r}"[:80]
    if not isinstance(found, jax.Array | np.ndarray):
        kind = type(found).__name__
        return kind if np.array_equal(found, saved) else f"wrong: {found!r}"[:80]
    if not same_bits(np.asarray(found), np.asarray(saved)):
        return f"wrong: {found!r}"[:80]
    if has_target and isinstance(saved, jax.Array) and found.sharding != saved.sharding:
        return f"wrong: {found.sharding}"[:80]
    return None


def same_structure(read: PyTree, saved: PyTree) -> bool:
    tree_structure = jax.tree_util.tree_structure
    read = jax.tree_util.tree_map(lambda _: 0, read)
    saved = jax.tree_util.tree_map(lambda _: 0, saved)
    return tree_structure(read) == tree_structure(saved)


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def named(tree: PyTree) -> dict[str, Any]:
    """Returns leaf path -> leaf or empty container, alike for all classes of nodes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)
    return {"/".join(map(name_of, path)): leaf for path, leaf in leaves}


def name_of(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"no name of {key!r}")
