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
COMPOSITE: Final = "CheckpointManager, Composite"
"""Name of the writer that also saves metrics."""

TWO_ITEMS: Final = "two items"
ITEMS: Final = {
    "item state": "state",
    "item default": "default",
    "item pytree": "pytree",
    TWO_ITEMS: ("model_params", "optimizer_state"),
}
"""Name of a step -> its items with arrays."""


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


ARRAYS: Final = ("arrays", "TrainState", "bfloat16, float8, int4")
"""States that are written in all layouts."""


def place(array: np.ndarray[Any, Any], *spec: str) -> jax.Array:
    """Returns `array` on the devices, sharded like `spec`."""
    devices = jax.devices()[:DEVICES]
    assert len(devices) == DEVICES
    if not spec:
        return jax.device_put(array, SingleDeviceSharding(devices[0]))
    mesh = Mesh(np.array(devices), ("x",))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def abstract(tree: PyTree) -> PyTree:
    """Returns `tree` with shapes, dtypes and shardings in place of jax arrays.

    Typed PRNG keys stay: Orbax before 0.12 refuses abstract ones.
    """

    def describe(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not is_key(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree_util.tree_map(describe, tree)


# ---- the comparison --------------------------------------------------------------

EQUAL: Final = "equal"
KEY_DATA: Final = "key data"
WRONG: Final = "wrong"


def compare(read: PyTree, saved: PyTree, *, has_target: bool = False) -> str:
    """Returns `equal`, `key data`, or `wrong: ` and the differences.

    Args:
        read: The tree as a reader returns it; jax and numpy arrays are alike.
        saved: The tree that was saved.
        has_target: Whether the reader had an abstract state, so that containers and
            shardings must be equal, too.
    """
    found, wanted = named(read), named(saved)
    if found.keys() != wanted.keys():
        return f"{WRONG}: the leaves {sorted(found.keys() ^ wanted.keys())}"
    if has_target and not same_structure(read, saved):
        return f"{WRONG}: the containers"
    outcomes = {
        path: compare_leaf(found[path], leaf, has_target=has_target)
        for path, leaf in wanted.items()
    }
    wrong = [path for path, outcome in outcomes.items() if outcome == WRONG]
    if wrong:
        shown = "; ".join(f"{path} is {found[path]!r}"[:80] for path in wrong[:3])
        return f"{WRONG}: {shown}"
    return KEY_DATA if KEY_DATA in outcomes.values() else EQUAL


def compare_leaf(found: Any, saved: Any, *, has_target: bool) -> str:
    """Returns `equal`, `key data` (the data of a typed key) or `wrong`."""
    if is_key(saved):
        data = jax.random.key_data(saved)
        if not is_key(found):
            return KEY_DATA if same_bits(found, data) else WRONG
        if str(jax.random.key_impl(found)) != str(jax.random.key_impl(saved)):
            return WRONG
        return EQUAL if same_bits(jax.random.key_data(found), data) else WRONG
    if found is None and isinstance(saved, tuple) and not has_target:
        return EQUAL  # as Orbax records empty named tuples, and until 0.6 all others
    if not isinstance(saved, jax.Array | np.ndarray):
        return EQUAL if type(found) is type(saved) and found == saved else WRONG
    if not isinstance(found, jax.Array | np.ndarray) or not same_bits(found, saved):
        return WRONG
    if has_target and isinstance(saved, jax.Array) and found.sharding != saved.sharding:
        return WRONG
    return EQUAL


def same_structure(read: PyTree, saved: PyTree) -> bool:
    tree_structure = jax.tree_util.tree_structure
    read = jax.tree_util.tree_map(lambda _: 0, read)
    saved = jax.tree_util.tree_map(lambda _: 0, saved)
    return tree_structure(read) == tree_structure(saved)


def same_bits(found: Any, saved: Any) -> bool:
    a, b = np.asarray(found), np.asarray(saved)
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
