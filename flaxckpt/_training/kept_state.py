"""Keeps the values of a reported state while training continues.

Only small numpy arrays are copied: a jax array never changes, and checksums detect
changes of larger numpy arrays.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import crc32c
import jax
import jax.numpy as jnp
import numpy as np

from flaxckpt import _state
from flaxckpt._training import object_graph
from flaxckpt._types import PyTree

_COPIED_BYTES = 4 * 2**20
"""Limit on the total bytes of writable numpy arrays to copy, the smallest first."""

_SUMMED_BYTES = 256 * 2**20
"""Limit on the bytes of further arrays, whose checksums each report computes."""

_IMMUTABLE: set[type] = {type(None), bool, int, float, complex, str, bytes}
"""Types of immutable leaves; types of jax arrays are added at their first use."""


class KeptState:
    """The leaves of a state at the report; `fault` says why they cannot be kept.

    Variables of the same objects that the step `before` has kept are reused.
    """

    def __init__(self, state: PyTree, before: KeptState | None = None) -> None:
        self.fault = ""
        self.state = state
        self._graph: object_graph.ObjectGraph | None = None
        self._values: list[Any] = []
        self._values_tree: Any = None
        self._fingerprints: list[tuple[np.ndarray, Any]] = []
        try:
            self._leaves, self._tree = _flatten(state, before)
        except (TypeError, ValueError) as error:  # the save reports the details
            self.fault = f"cannot be flattened by jax ({error})"
            return
        objects: list[Any] = []
        if not _IMMUTABLE.issuperset(map(type, self._leaves)):
            objects = [
                leaf for leaf in self._leaves if _state.nnx_objects.is_object(leaf)
            ]
        if objects:
            graph = None if before is None else before._graph
            if (
                graph is None
                or not graph.is_of(objects)
                or not graph.has_same_contents()
            ):
                graph = object_graph.ObjectGraph(objects)
            self._graph = graph
            self._values, self._values_tree = jax.tree.flatten(graph.values())
        try:
            _take_leaves(self._leaves)
            _take_leaves(self._values)
        except _state.leaf_types.LeafTypeError as error:
            self.fault = f"has {error}"
            return
        self._copy_numpy()

    def _copy_numpy(self) -> None:
        """Copies small writable numpy arrays; computes checksums of large arrays."""
        places = [
            (leaves, i)
            for leaves in (self._leaves, self._values)
            if not _IMMUTABLE.issuperset(map(type, leaves))
            for i, leaf in enumerate(leaves)
            if type(leaf) not in _IMMUTABLE and _may_change(leaf)
        ]
        copied, large = 0, []
        for leaves, i in sorted(places, key=lambda place: place[0][place[1]].nbytes):
            copied += leaves[i].nbytes
            if copied <= _COPIED_BYTES:
                leaves[i] = leaves[i].copy()
            else:
                large.append(leaves[i])
        size = sum(array.nbytes for array in large)
        if size > _SUMMED_BYTES:
            self.fault = (
                f"has {len(large)} numpy arrays of {size / 1e6:.1f} MB, which may be"
                " changed in place after the step is reported"
            )
            return
        self._fingerprints = [(array, _fingerprint(array)) for array in large]

    def _changed_numpy(self) -> int:
        """Returns the number of changed large numpy arrays."""
        return sum(
            _fingerprint(array) != before for array, before in self._fingerprints
        )

    def why_gone(self) -> str:
        """Returns the reason why the reported state is lost, or an empty string."""
        if self.fault:
            return f"it {self.fault}"
        leaves = (*self._leaves, *self._values)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            return "its arrays were donated to a step that was not reported"
        if self._graph is not None and not self._graph.is_current():
            return "the variables of its NNX objects were replaced since"
        if changed := self._changed_numpy():
            return (
                f"{changed} of its large numpy arrays were changed in place after it"
                " was reported; pass force=True with the last step"
            )
        return ""

    @property
    def has_objects(self) -> bool:
        """True for a state with NNX objects, which change in place."""
        return self._graph is not None

    def matches(self, state: PyTree) -> bool:
        if self.fault:
            return False
        now = KeptState(state, self)
        return (
            not now.fault
            and _are_equal(now._tree, self._tree)
            and _are_equal(now._values_tree, self._values_tree)
            and (self._graph is None or self._graph.is_current())
            and not self._changed_numpy()
            and _are_same(now._leaves, self._leaves)
            and _are_same(now._values, self._values)
        )

    @contextlib.contextmanager
    def reported_state(self) -> Iterator[PyTree]:
        """Yields the reported state; NNX objects have the reported values meanwhile."""
        if self.matches(self.state):
            yield self.state  # unflattened dictionaries would have sorted keys
            return
        state = self._tree.unflatten(self._leaves)
        if self._graph is None:
            yield state
            return
        now = self._graph.values()
        self._graph.set_values(self._values_tree.unflatten(self._values))
        try:
            yield state
        finally:
            self._graph.set_values(now)


def _take_leaves(leaves: list[Any]) -> None:
    """Replaces leaves of registered classes, which may change in place, by copies."""
    if _IMMUTABLE.issuperset(map(type, leaves)):
        return
    for i, leaf in enumerate(leaves):
        if taken := _state.leaf_types.take(leaf):
            parts = _state.flax_state.flatten_plain(taken.parts)
            copies = {
                path: part.value.copy() if _may_change(part.value) else part.value
                for path, part in parts.leaves.items()
            }
            leaves[i] = _state.leaf_types.LeafParts(
                taken.leaf_type, _state.tree.unflatten(parts.structure, copies)
            )


def _flatten(state: PyTree, before: KeptState | None) -> tuple[list[Any], Any]:
    """Returns leaves and tree of a state; faster for the same tree as before."""
    if before is not None and before._graph is None and not before.fault:
        leaves, tree = jax.tree.flatten(state)
        if _are_equal(tree, before._tree):
            return leaves, tree
    return _state.nnx_objects.flatten_around(state)


class Trace:
    """Detects changes of a state without keeping the state in memory.

    An array that is moved or copied is not a change: values of numpy arrays and of the
    smallest jax arrays are compared.
    """

    def __init__(self, state: PyTree) -> None:
        leaves = _all_leaves(state)
        self._arrays = [weakref.ref(x) for x in leaves if isinstance(x, jax.Array)]
        self._plain = [
            None if _has_own_test(leaf) else _fingerprint(leaf) for leaf in leaves
        ]
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        compared = _choose_arrays(arrays)
        self._contents = {_fingerprint_values(array) for array in compared}
        # Compare all arrays of a kind or none: a new array may replace any of them.
        chosen = {id(array) for array in compared}
        self._kinds = {_kind(array) for array in compared} - {
            _kind(array) for array in arrays if id(array) not in chosen
        }

    def has_changed(self, state: PyTree) -> bool:
        """Returns True if `state` certainly differs from the first state."""
        leaves = _all_leaves(state)
        first = {id(array) for ref in self._arrays if (array := ref()) is not None}
        others = [x for x in leaves if _is_array(x) and id(x) not in first]
        compared = [x for x in others if _kind(x) in self._kinds and _is_readable(x)]
        if any(_fingerprint_values(array) not in self._contents for array in compared):
            return True
        if len(leaves) != len(self._plain):  # a part of the state, or other containers
            return False
        return any(
            before is not None
            and not _has_own_test(leaf)
            and _fingerprint(leaf) != before
            for leaf, before in zip(leaves, self._plain, strict=True)
        )


_COMPARED_BYTES = 64 * 2**20
_COMPARED_ARRAYS = 1000


def _choose_arrays(arrays: Iterable[Any]) -> list[Any]:
    """Returns the arrays to compare by checksum: reading all would take too long."""
    chosen: list[Any] = [
        x for x in arrays if isinstance(x, np.ndarray) and not x.dtype.hasobject
    ]
    readable = [x for x in arrays if isinstance(x, jax.Array) and _is_readable(x)]
    size = 0
    for i, array in enumerate(sorted(readable, key=lambda x: x.nbytes)):
        size += array.nbytes
        if i > 0 and (size > _COMPARED_BYTES or i >= _COMPARED_ARRAYS):
            break
        chosen.append(array)
    return chosen


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _has_own_test(leaf: Any) -> bool:
    """Returns True for arrays, and for leaves whose fingerprint may differ if equal."""
    return _is_array(leaf) or _state.leaf_types.is_leaf(leaf)


def _is_readable(array: Any) -> bool:
    """Returns True if this process can read the values of an array."""
    if not isinstance(array, jax.Array):
        return not array.dtype.hasobject
    if array.is_deleted() or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return False
    is_here = bool(array.sharding.addressable_devices)
    return array.is_fully_addressable or (array.is_fully_replicated and is_here)


def _kind(array: Any) -> tuple[Any, tuple[int, ...]]:
    return array.dtype, array.shape


def _fingerprint_values(array: Any) -> Any:
    return _fingerprint(np.asarray(array))


def is_replaced_whole(state: PyTree) -> bool:
    """Returns True for an immutable state with a step counter, as a `TrainState`."""
    parameters = getattr(type(state), "__dataclass_params__", None)
    is_frozen = parameters is not None and parameters.frozen
    return (is_frozen or hasattr(type(state), "_fields")) and hasattr(state, "step")


def _all_leaves(state: PyTree) -> list[Any]:
    leaves, _ = _state.nnx_objects.flatten_around(state)
    objects = [leaf for leaf in leaves if _state.nnx_objects.is_object(leaf)]
    plain = [leaf for leaf in leaves if not _state.nnx_objects.is_object(leaf)]
    if not objects:
        return plain
    return plain + jax.tree.leaves(object_graph.ObjectGraph(objects).values())


def _fingerprint(leaf: Any) -> Any:
    """Returns a fingerprint of a leaf; a change of the leaf changes the fingerprint."""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        content = np.ascontiguousarray(leaf).view(np.uint8).data if leaf.size else b""
        return leaf.dtype, leaf.shape, crc32c.crc32c(content)
    return type(leaf), leaf if isinstance(leaf, str | bytes) else repr(leaf)


def _may_change(leaf: Any) -> bool:
    """Returns True for a writable numpy array; records types of immutable arrays."""
    if isinstance(leaf, np.ndarray):
        return _is_writable(leaf)
    if isinstance(leaf, jax.Array | np.generic):
        _IMMUTABLE.add(type(leaf))
    return False


def _is_writable(array: np.ndarray) -> bool:
    """Returns True if an array, or the memory below the view, can be written to."""
    memory: Any = array
    while isinstance(memory, np.ndarray):
        if memory.flags.writeable:
            return True
        memory = memory.base
    return False


def _are_equal(tree: Any, other: Any) -> bool:
    """Returns True for equal trees; False if jax cannot compare the trees."""
    try:
        return bool(tree == other)
    except Exception:
        return False


def _are_same(leaves: list[Any], others: list[Any]) -> bool:
    return len(leaves) == len(others) and all(map(_is_same, leaves, others))


def _is_same(leaf: Any, other: Any) -> bool:
    if leaf is other:
        return True
    if isinstance(leaf, jax.Array) or isinstance(other, jax.Array):
        return False
    if _state.leaf_types.is_leaf(leaf):
        return False  # its fingerprint would not show all values
    return bool(_fingerprint(leaf) == _fingerprint(other))
