"""Leaves that are computed, of those of a checkpoint or of a state.

What is computed is said by a function that jax traces: its result's shape is known
before anything is read, and it runs where the result shall be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from flaxckpt import _dtypes, _info, _layout, _memory, _place, _read, _tree, errors
from flaxckpt._info import Leaf, LeafInfo, LeafTable, StoredLeaf
from flaxckpt._types import LeafPath
from flaxckpt._zarr import Array

Fn: TypeAlias = Callable[..., jax.Array]

_WIDE = frozenset(("int64", "uint64", "float64", "complex128"))
"""Types that jax makes narrower, unless it is told otherwise."""

_AT_ONCE = 256 * 2**20
"""Bytes that are computed at one time; what they are made of is in memory as well."""

# ---- saying what is computed --------------------------------------------------------


class Deriver:
    """Makes leaves of leaves for one transform.

    Layers are alike, and tracing takes long: what a function makes of which shapes is
    remembered, for as long as the transform is applied.

    Args:
        what: The transform, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._shapes: dict[Any, Any] = {}
        self._fns: list[Fn] = []  # kept, so that their ids stay theirs

    def __call__(
        self,
        leaves: Sequence[Leaf],
        fn: Fn,
        *,
        base: LeafInfo | None = None,
        is_wide: bool | None = None,
    ) -> Leaf:
        """The leaf that `fn` makes of the values of `leaves`.

        Args:
            leaves: Arrays, numbers or PRNG keys.
            fn: From their values to the new one; traced.
            base: What lends the new leaf its path, its kind of value and its role; by
                default the first of `leaves`.
            is_wide: Whether jax may compute in 64 bits; by default if any of `leaves`
                has them.

        Raises:
            OptionError: `fn` cannot be traced, or makes what cannot be stored.
        """
        base = base or leaves[0].info
        infos = [leaf.info for leaf in leaves]
        if is_wide is None:
            is_wide = any(map(needs_64_bits, infos)) or any(
                _has_wide_fn(leaf) for leaf in leaves
            )
        try:
            made = self._shape(fn, infos, is_wide)
        except jax.errors.JAXTypeError as error:
            raise errors.OptionError(
                f"{self._what} cannot be traced for {base.path}: use jax.numpy, which"
                f" works on arrays before they are read ({_first_line(error)})"
            ) from None
        except errors.CheckpointError:
            raise
        except Exception as error:
            found = ", ".join(str(info) for info in infos[:3])
            raise errors.OptionError(
                f"{self._what} does not go with {base.path}, {found}:"
                f" {_first_line(error)}"
            ) from None
        info = _derived_info(base, made, self._what)
        sources = tuple(source for leaf in leaves for source in leaf.sources)
        return Leaf(info, sources, _Computation(tuple(leaves), fn, is_wide))

    def _shape(self, fn: Fn, infos: Sequence[LeafInfo], is_wide: bool) -> Any:
        form = tuple((info.shape, info.dtype, info.prng_impl) for info in infos)
        if (id(fn), form, is_wide) not in self._shapes:
            self._fns.append(fn)
            with wide(is_wide):
                made = jax.eval_shape(fn, *map(abstract, infos))
            self._shapes[id(fn), form, is_wide] = made
        return self._shapes[id(fn), form, is_wide]


class _Computation:
    """What makes a leaf of the sources of several.

    Attributes:
        is_wide: Whether jax may compute in 64 bits.
    """

    def __init__(self, leaves: Sequence[Leaf], fn: Fn, is_wide: bool) -> None:
        self.is_wide = is_wide
        self._parts = [(_value_fn(leaf), len(leaf.sources)) for leaf in leaves]
        self._fn = fn

    def __call__(self, *args: jax.Array) -> jax.Array:
        values, start = [], 0
        for part, count in self._parts:
            values.append(part(*args[start : start + count]))
            start += count
        return self._fn(*values)


def _has_wide_fn(leaf: Leaf) -> bool:
    return isinstance(leaf.fn, _Computation) and leaf.fn.is_wide


def needs_64_bits(info: LeafInfo) -> bool:
    """Whether jax would cut a leaf's values if it is not told otherwise."""
    return info.dtype in _WIDE


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0][:200]


def _value_fn(leaf: Leaf) -> Fn:
    """From the sources of a leaf to its value, in the type that it says."""
    fn, info = leaf.fn, leaf.info

    def value(*args: jax.Array) -> jax.Array:
        array = args[0] if fn is None else fn(*args)
        if info.kind == "prng_key":
            return array
        dtype = jax.dtypes.canonicalize_dtype(_dtypes.to_numpy(info.dtype or ""))
        return jnp.asarray(array, dtype)

    return value


def abstract(info: LeafInfo) -> jax.ShapeDtypeStruct:
    """A leaf's value, as jax traces it as it is configured now."""
    if info.kind == "prng_key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=info.prng_impl))
        return jax.ShapeDtypeStruct(info.shape, key.dtype)
    dtype = jax.dtypes.canonicalize_dtype(_dtypes.to_numpy(info.dtype or ""))
    return jax.ShapeDtypeStruct(info.shape, dtype)


def _derived_info(base: LeafInfo, made: Any, what: str) -> LeafInfo:
    found = made
    if isinstance(made, jax.ShapeDtypeStruct):
        found = _info.describe(base.path, _tree.Entry(base.keys, made, False))
    if not isinstance(found, LeafInfo):
        raise errors.OptionError(
            f"{what} must give one array for {base.path}, got {str(found)[:80]}"
        )
    is_number = base.kind == "scalar" and not found.shape
    if found.kind == "array" and (is_number or base.python_type == "numpy.ndarray"):
        found = dataclasses.replace(found, kind=base.kind, python_type=base.python_type)
    is_cut = found.dtype in _WIDE and found.python_type == "jax.Array"
    if is_cut and base.kind == "scalar":  # an array of Python numbers
        found = dataclasses.replace(found, python_type="numpy.ndarray")
    return dataclasses.replace(found, weak_type=False, role=base.role)


def wide(is_wide: bool) -> AbstractContextManager[Any]:
    """Lets jax compute in 64 bits."""
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


# ---- before a save ------------------------------------------------------------------


def computed(table: LeafTable) -> LeafTable:
    """The table of a state with all that has to be computed for it, computed.

    Not under jit: a training loop saves again and again, and every table brings new
    functions, while jax has the operations in them compiled already.
    """
    for leaf in table.values():
        _check_given(leaf)
    return {
        path: leaf if leaf.fn is None else _computed(leaf)
        for path, leaf in table.items()
    }


def _check_given(leaf: Leaf) -> None:
    stored = [s for s in leaf.sources if isinstance(s, StoredLeaf)]
    if stored:
        raise errors.OptionError(
            f"{leaf.info.path} is to come from {stored[0].root}: a save has only the"
            " state; load the other checkpoint first, or convert"
        )


def _computed(leaf: Leaf) -> Leaf:
    info = leaf.info
    is_wide = _has_wide_fn(leaf)
    with wide(is_wide):
        args = _together([_as_array(s, is_wide, info.path) for s in leaf.sources])
        value: Any = _value_fn(leaf)(*args)
    if info.python_type != "jax.Array":
        value = np.asarray(value)
        if info.kind == "scalar":
            value = value[()] if info.python_type == "numpy.generic" else value.item()
    described = _info.describe(info.path, _tree.Entry(info.keys, value, False))
    assert isinstance(described, LeafInfo), described
    return Leaf(dataclasses.replace(described, role=info.role), (value,))


def _as_array(value: Any, is_wide: bool, path: LeafPath) -> jax.Array:
    if isinstance(value, jax.Array):
        sharding = _automatic(value.sharding)
        same = sharding is value.sharding or sharding is None
        return value if same else jax.device_put(value, sharding)
    _check_width(np.asarray(value), is_wide, path)
    return jnp.asarray(value)


def _check_width(array: Array, is_wide: bool, path: LeafPath) -> None:
    """Refuses a number that 32 bits do not hold, where jax has no more."""
    if is_wide or array.dtype.name not in ("int64", "uint64") or not array.size:
        return
    if int(array.max()) >= 2**31 or int(array.min()) < -(2**31):
        raise errors.OptionError(
            f"{path} is computed of the number {array.max()}, which needs 64 bits: pass"
            " it as a numpy array, or set jax_enable_x64"
        )


def _together(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Arrays on the same devices; those that are not come by way of the host."""
    committed = {frozenset(x.sharding.device_set) for x in arrays if x.committed}
    if len(committed) <= 1:
        return arrays
    return [
        x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else jnp.asarray(np.asarray(x))
        for x in arrays
    ]


# ---- while a checkpoint is read -----------------------------------------------------


def read(leaves: Sequence[Leaf], options: _read.Options) -> dict[LeafPath, Any]:
    """Reads what leaves are made of, and makes them.

    Each source is read once, and leaves that share some are made together; others, as
    many as the byte budget allows.

    Args:
        leaves: Leaves with the infos that the caller wants.
        options: How to read.

    Returns:
        Leaf path -> value.

    Raises:
        DamagedCheckpointError: Values are missing or fail their checksum.
    """
    values: dict[LeafPath, Any] = {}
    for batch in _batches(leaves, min(options.max_concurrent_bytes, _AT_ONCE)):
        values |= _read_batch(batch, options)
        # jax lets go of memory that is not its own only when garbage is collected.
        gc.collect(0)
    return values


def _batches(leaves: Sequence[Leaf], max_bytes: int) -> Iterator[list[Leaf]]:
    sized = ((group, _bytes_of(group)) for group in _groups(leaves))
    for groups in _memory.batches(sized, max_bytes):
        yield [leaf for group in groups for leaf in group]


def _bytes_of(group: Sequence[Leaf]) -> int:
    """Bytes of leaves and of what they are made of."""
    infos = [leaf.info for leaf in group]
    sources = {id(s): s for leaf in group for s in leaf.sources}.values()
    infos += [s.info for s in sources if isinstance(s, StoredLeaf)]
    return sum(map(_layout.stored_bytes, infos))


def _groups(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Leaves that have a source in common, directly or through others."""
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


def _read_batch(leaves: Sequence[Leaf], options: _read.Options) -> dict[LeafPath, Any]:
    """Reads and makes leaves; those for the same devices in one computation."""
    alike: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        sharding = leaf.info.sharding
        devices = None if sharding is None else frozenset(sharding.device_set)
        alike.setdefault((devices, _has_wide_fn(leaf)), []).append(leaf)
    values: dict[LeafPath, Any] = {}
    for some in alike.values():
        values |= _make(some, options)
    return values


def _make(leaves: Sequence[Leaf], options: _read.Options) -> dict[LeafPath, Any]:
    is_wide = _has_wide_fn(leaves[0])
    users = {id(s): (s, leaf) for leaf in reversed(leaves) for s in leaf.sources}
    jobs: dict[int, _read.ReadJob] = {}
    given: dict[int, Any] = {}
    names: set[str] = set()
    for key, (source, user) in users.items():
        if isinstance(source, StoredLeaf):
            name = source.info.path
            if name in names:  # in another of several checkpoints
                name = f"{name} of {source.root}"
            names.add(name)
            wanted = _wanted_of_source(source, user.info, name)
            jobs[key] = _read.ReadJob(source, wanted)
        else:
            given[key] = _given(source, user.info)
    found = _read.read(tuple(jobs.values()), options)
    arrays = given | {key: found[job.wanted.path] for key, job in jobs.items()}
    for key, array in arrays.items():
        if isinstance(array, np.ndarray):
            _check_width(array, is_wide, users[key][1].info.path)
    order = {key: i for i, key in enumerate(arrays)}

    def make(args: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            _value_fn(leaf)(*(args[order[id(source)]] for source in leaf.sources))
            for leaf in leaves
        ]

    shardings = [_automatic(leaf.info.sharding) for leaf in leaves]
    split: dict[str, Any] = {"out_shardings": shardings} if any(shardings) else {}
    with wide(is_wide):
        made = jax.jit(make, **split)(list(arrays.values()))
        # Else the next sources are read while these are still in memory.
        jax.block_until_ready(made)
    for value, leaf in zip(made, leaves, strict=True):
        assert value.shape == leaf.info.shape, (leaf.info.path, value.shape)
    return {
        leaf.info.path: _place.place(value, leaf.info)
        for leaf, value in zip(leaves, made, strict=True)
    }


def _given(value: Any, user: LeafInfo) -> Any:
    """A source that is a value already, where it can be computed with."""
    if not isinstance(value, jax.Array) or not value.committed:
        return value
    devices = None if user.sharding is None else user.sharding.device_set
    if devices != value.sharding.device_set and not jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return np.asarray(value)
    sharding = _automatic(value.sharding)
    return value if sharding is value.sharding else jax.device_put(value, sharding)


def _wanted_of_source(source: StoredLeaf, user: LeafInfo, name: str) -> LeafInfo:
    """How to read a source of the leaf `user`: split as that, where it is alike."""
    info = source.info
    is_wide = info.dtype in _WIDE  # jax would make it narrower outside of a computation
    python_type = "numpy.ndarray" if is_wide else "jax.Array"
    sharding = None if is_wide else _alike(user.sharding, user.shape, info.shape)
    return dataclasses.replace(
        info,
        path=name,
        kind="prng_key" if info.kind == "prng_key" else "array",
        python_type=python_type,
        sharding=sharding,
        weak_type=False,
    )


def _alike(
    sharding: Sharding | None, shape: tuple[int, ...], other: tuple[int, ...]
) -> Sharding | None:
    """The sharding of an array of another shape that is split along equal axes."""
    sharding = _automatic(sharding)
    if not isinstance(sharding, NamedSharding) or shape == other:
        return sharding
    parts = list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
    if len(shape) != len(other):
        parts, shape = [None] * len(other), other
    # Else whichever axis all devices can share, so that none holds it all.
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


def _automatic(sharding: Sharding | None) -> Sharding | None:
    """The same sharding, left to the compiler: no types of intermediate arrays."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh) or AxisType.Explicit not in mesh.axis_types:
        return sharding
    plain = Mesh(
        mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim
    )
    return NamedSharding(plain, sharding.spec, memory_kind=sharding.memory_kind)
