"""Evaluation of computed leaves, before a save and during a restore."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from flaxckpt import _state, _util, errors
from flaxckpt._arrays import lazy, to_device
from flaxckpt._arrays import read as arrays_read
from flaxckpt._arrays.read_plan import ReadJob
from flaxckpt._state.leaf import Leaf, LeafInfo, LeafTable, StoredLeaf
from flaxckpt._types import LeafPath
from flaxckpt._zarr.metadata import Array

_AT_ONCE = 256 * 2**20
"""Bytes computed at a time, beside their sources in memory."""


# ---- before a save ---------------------------------------------------------------


@to_device.any_values()
def evaluate_state(table: LeafTable) -> LeafTable:
    """Evaluates the computed leaves, without jit: every save makes new functions."""
    for leaf in table.values():
        _check_no_stored(leaf)
    differences: list[_Difference] = []
    with _state.meshes.use(None):
        new = {
            path: leaf if leaf.fn is None else _evaluate(leaf, differences)
            for path, leaf in table.items()
        }
    _check_equal(differences)
    return new


_Difference: TypeAlias = tuple[lazy.Equality, Any]
"""A condition of a computed leaf, and the number of elements that differ."""


def _check_equal(differences: Iterable[_Difference]) -> None:
    """Raises one error for all leaves that differ from the leaf they are tied to."""
    error = lazy.unequal((equality, int(count)) for equality, count in differences)
    if error is not None:
        raise error


def _check_no_stored(leaf: Leaf) -> None:
    if leaf.stored:
        raise errors.OptionError(
            f"{leaf.info.path} would be read from {leaf.stored[0].root}, but a save has"
            " only the state: load the other checkpoint first, or use convert"
        )


def _evaluate(leaf: Leaf, differences: list[_Difference]) -> Leaf:
    """Returns a computed leaf with its value; adds to `differences`."""
    info = leaf.info
    is_wide = lazy.has_wide_fn(leaf)
    with lazy.x64(is_wide):
        args = _on_common_devices(
            [_as_array(s, is_wide, info.path) for s in leaf.sources]
        )
        value: Any = lazy.value_fn(leaf)(*args)
        differences += [(e, e.count_differing(*args)) for e in lazy.equalities(leaf)]
    if info.python_type != "jax.Array":
        value = np.asarray(value)
        if info.kind == "scalar":
            value = value[()] if info.python_type == "numpy.generic" else value.item()
    described = _state.describe.describe(
        info.path, _state.tree.TreeLeaf(info.keys, value, False)
    )
    assert isinstance(described, LeafInfo), described
    return Leaf(dataclasses.replace(described, role=info.role), (value,))


def _as_array(value: Any, is_wide: bool, path: LeafPath) -> jax.Array:
    if isinstance(value, jax.Array):
        sharding = _with_automatic_axes(value.sharding)
        same = sharding is value.sharding or sharding is None
        return value if same else jax.device_put(value, sharding)
    _check_width(np.asarray(value), is_wide, path)
    return jnp.asarray(value)


def _check_width(array: Array, is_wide: bool, path: LeafPath) -> None:
    """Raises an error for a number of more than 32 bits without jax's 64-bit mode."""
    if is_wide or array.dtype.name not in ("int64", "uint64") or not array.size:
        return
    if int(array.max()) >= 2**31 or int(array.min()) < -(2**31):
        raise errors.OptionError(
            f"{path} is computed from the number {array.max()}, which needs 64 bits:"
            " pass it as a numpy array, or set jax_enable_x64"
        )


def _on_common_devices(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns arrays on common devices, moving others through the host."""
    committed = {frozenset(x.sharding.device_set) for x in arrays if x.committed}
    if len(committed) <= 1:
        return arrays
    return [
        x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else jnp.asarray(np.asarray(x))
        for x in arrays
    ]


# ---- during a read --------------------------------------------------


@to_device.any_values()
def read(
    leaves: Sequence[Leaf], options: arrays_read.ReadOptions
) -> dict[LeafPath, Any]:
    """Reads the sources of leaves, each once, and computes the leaves.

    Raises DamagedCheckpointError for values that are missing or damaged, and
    OptionError for tied leaves of different values.
    """
    values: dict[LeafPath, Any] = {}
    differences: list[_Difference] = []
    # The leaves have their own meshes, with automatic axes for the computation.
    with _state.meshes.use(None):
        for batch in _batches(leaves, min(options.max_concurrent_bytes, _AT_ONCE)):
            values |= _read_batch(batch, options, differences)
            # jax releases memory of others only at a garbage collection.
            gc.collect(0)
    _check_equal(differences)
    return values


def _batches(leaves: Sequence[Leaf], max_bytes: int) -> Iterator[list[Leaf]]:
    sized = ((group, _bytes_of(group)) for group in _groups(leaves))
    for groups in _util.memory.batches(sized, max_bytes):
        yield [leaf for group in groups for leaf in group]


def _bytes_of(group: Sequence[Leaf]) -> int:
    """Returns the bytes of leaves and of their sources."""
    infos = [leaf.info for leaf in group]
    infos += {id(s): s.info for leaf in group for s in leaf.stored}.values()
    return sum(info.stored_bytes for info in infos)


def _groups(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Yields groups of leaves connected by common sources."""
    parent = list(range(len(leaves)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    owner: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        for source in leaf.sources:
            parent[root(i)] = root(owner.setdefault(id(source), i))
    groups: dict[int, list[Leaf]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(root(i), []).append(leaf)
    yield from groups.values()


def _read_batch(
    leaves: Sequence[Leaf],
    options: arrays_read.ReadOptions,
    differences: list[_Difference],
) -> dict[LeafPath, Any]:
    """Reads and computes leaves, with a single computation per set of devices."""
    alike: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        sharding = leaf.info.sharding
        devices = None if sharding is None else frozenset(sharding.device_set)
        alike.setdefault((devices, lazy.has_wide_fn(leaf)), []).append(leaf)
    values: dict[LeafPath, Any] = {}
    for group in alike.values():
        values |= _read_and_compute(group, options, differences)
    return values


def _read_and_compute(
    leaves: Sequence[Leaf],
    options: arrays_read.ReadOptions,
    differences: list[_Difference],
) -> dict[LeafPath, Any]:
    is_wide = lazy.has_wide_fn(leaves[0])
    users = {id(s): (s, leaf) for leaf in reversed(leaves) for s in leaf.sources}
    jobs: dict[int, ReadJob] = {}
    held: dict[int, Any] = {}
    names: set[str] = set()
    for key, (source, user) in users.items():
        if isinstance(source, StoredLeaf):
            name = source.info.path
            if name in names:  # also in another checkpoint
                name = f"{name} of {source.root}"
            names.add(name)
            wanted = _request_source(source, user.info, name)
            jobs[key] = ReadJob(source, wanted)
        else:
            held[key] = _on_device(source, user.info)
    stored = arrays_read.read(tuple(jobs.values()), options)
    arrays = held | {key: stored[job.wanted.path] for key, job in jobs.items()}
    for key, array in arrays.items():
        if isinstance(array, np.ndarray):
            _check_width(array, is_wide, users[key][1].info.path)
    order = {key: i for i, key in enumerate(arrays)}

    conditions = [
        (leaf, equality) for leaf in leaves for equality in lazy.equalities(leaf)
    ]

    def make(args: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        def call(fn: lazy.Fn, leaf: Leaf) -> jax.Array:
            return fn(*(args[order[id(source)]] for source in leaf.sources))

        counts = [call(equality.count_differing, leaf) for leaf, equality in conditions]
        return [call(lazy.value_fn(leaf), leaf) for leaf in leaves], counts

    shardings = [_with_automatic_axes(leaf.info.sharding) for leaf in leaves]
    split: dict[str, Any] = {}
    if any(shardings):
        split["out_shardings"] = shardings, [None] * len(conditions)
    with lazy.x64(is_wide):
        results, counts = jax.jit(make, **split)(list(arrays.values()))
        # Otherwise the next sources are read with these still in memory.
        jax.block_until_ready(results)
    differences += zip([equality for _, equality in conditions], counts, strict=True)
    for value, leaf in zip(results, leaves, strict=True):
        assert value.shape == leaf.info.shape, (leaf.info.path, value.shape)
    return {
        leaf.info.path: to_device.place(value, leaf.info)
        for leaf, value in zip(leaves, results, strict=True)
    }


def _on_device(value: Any, user: LeafInfo) -> Any:
    if not isinstance(value, jax.Array) or not value.committed:
        return value
    devices = None if user.sharding is None else user.sharding.device_set
    if devices != value.sharding.device_set and not jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return np.asarray(value)
    sharding = _with_automatic_axes(value.sharding)
    return value if sharding is value.sharding else jax.device_put(value, sharding)


def _request_source(source: StoredLeaf, user: LeafInfo, name: str) -> LeafInfo:
    """Returns the info to read a source of `user`, sharded alike if possible."""
    info = source.info
    sharding = None
    python_type = _state.dtypes.array_type(info.dtype)
    if python_type == "jax.Array":
        sharding = _similar_sharding(user.sharding, user.shape, info.shape)
    return dataclasses.replace(
        info,
        path=name,
        kind="prng_key" if info.kind == "prng_key" else "array",
        python_type=python_type,
        sharding=sharding,
        weak_type=False,
    )


def _similar_sharding(
    sharding: Sharding | None, shape: tuple[int, ...], other: tuple[int, ...]
) -> Sharding | None:
    """Returns a sharding for another shape, split along the axes of equal size."""
    sharding = _with_automatic_axes(sharding)
    if not isinstance(sharding, NamedSharding) or shape == other:
        return sharding
    parts = list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
    if len(shape) != len(other):
        parts, shape = [None] * len(other), other
    # Otherwise any axis divisible by all devices: no device holds all values.
    if not any(a == b and part for part, a, b in zip(parts, shape, other, strict=True)):
        count = math.prod(sharding.mesh.shape.values())
        axis = next((i for i, n in enumerate(other) if n and n % count == 0), None)
        if axis is not None:
            whole = PartitionSpec(*[None] * axis, tuple(sharding.mesh.axis_names))
            kind = sharding.memory_kind
            return NamedSharding(sharding.mesh, whole, memory_kind=kind)
    spec = PartitionSpec(
        *(
            part if a == b else None
            for part, a, b in zip(parts, shape, other, strict=True)
        )
    )
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _with_automatic_axes(sharding: Sharding | None) -> Sharding | None:
    """Returns the sharding with automatic instead of explicit mesh axes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
        return sharding
    plain = Mesh(
        mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim
    )
    return NamedSharding(plain, sharding.spec, memory_kind=sharding.memory_kind)
