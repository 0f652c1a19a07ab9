"""Leaves that are computed, of those of a checkpoint or of a state.

What is computed is said by a function that jax traces: its result's shape is known
before anything is read, and it runs where the result shall be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from flaxckpt import _dtypes, _info, _layout, _place, _read, _tree, errors
from flaxckpt._info import Leaf, LeafInfo, LeafTable, StoredLeaf
from flaxckpt._types import LeafPath

Fn: TypeAlias = Callable[..., jax.Array]

_WIDE = frozenset(("int64", "uint64", "float64", "complex128"))
"""Types that jax makes narrower, unless it is told otherwise."""

# ---- saying what is computed --------------------------------------------------------


def derive(
    leaves: Sequence[Leaf], fn: Fn, *, what: str, base: LeafInfo | None = None
) -> Leaf:
    """The leaf that `fn` makes of the values of `leaves`.

    Args:
        leaves: Arrays, numbers or PRNG keys.
        fn: From their values to the new one; traced.
        what: Who asks, for messages.
        base: What lends the new leaf its path, its kind of value and its role; by
            default the first of `leaves`.

    Raises:
        OptionError: `fn` cannot be traced, or makes what cannot be stored.
    """
    base = base or leaves[0].info
    parts = [_value_fn(leaf) for leaf in leaves]
    counts = [len(leaf.sources) for leaf in leaves]

    def value(*args: jax.Array) -> jax.Array:
        values, start = [], 0
        for part, count in zip(parts, counts, strict=True):
            values.append(part(*args[start : start + count]))
            start += count
        return fn(*values)

    try:
        made = _shape_of_result(fn, [leaf.info for leaf in leaves])
    except jax.errors.JAXTypeError as error:
        raise errors.OptionError(
            f"{what} cannot be traced for {base.path}: use jax.numpy, which works on"
            f" arrays before they are read ({_first_line(error)})"
        ) from None
    except (TypeError, ValueError, IndexError) as error:
        found = ", ".join(str(leaf.info) for leaf in leaves[:3])
        raise errors.OptionError(
            f"{what} does not go with {base.path}, {found}: {_first_line(error)}"
        ) from None
    info = _derived_info(base, made, what)
    sources = tuple(source for leaf in leaves for source in leaf.sources)
    return Leaf(info, sources, value)


_shapes: weakref.WeakKeyDictionary[Fn, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""What functions make of which shapes: layers are alike, and tracing takes long."""


def _shape_of_result(fn: Fn, infos: Sequence[LeafInfo]) -> Any:
    try:
        known = _shapes.setdefault(fn, {})
    except TypeError:  # it can be no key
        known = {}
    form = tuple((info.shape, info.dtype, info.prng_impl) for info in infos)
    if form not in known:
        with wide(infos):
            known[form] = jax.eval_shape(fn, *map(abstract, infos))
    return known[form]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0][:200]


def _value_fn(leaf: Leaf) -> Fn:
    """From the sources of a leaf to its value, in the type that it says."""
    fn, info = leaf.fn, leaf.info

    def value(*args: jax.Array) -> jax.Array:
        array = args[0] if fn is None else fn(*args)
        if info.kind == "prng_key":
            return array
        return jnp.asarray(array, _dtypes.to_numpy(info.dtype or ""))

    return value


def abstract(info: LeafInfo) -> jax.ShapeDtypeStruct:
    """A leaf's value, as jax traces it."""
    if info.kind == "prng_key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=info.prng_impl))
        return jax.ShapeDtypeStruct(info.shape, key.dtype)
    return jax.ShapeDtypeStruct(info.shape, _dtypes.to_numpy(info.dtype or ""))


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
    return dataclasses.replace(found, weak_type=False, role=base.role)


@contextlib.contextmanager
def wide(infos: Iterable[LeafInfo]) -> Iterator[None]:
    """Lets jax compute in 64 bits if any leaf has them."""
    if any(info.dtype in _WIDE for info in infos):
        with jax.enable_x64(True):
            yield
    else:
        yield


# ---- before a save ------------------------------------------------------------------


def computed(table: LeafTable) -> LeafTable:
    """The table of a state with all that has to be computed for it, computed.

    Not under jit: a training loop saves again and again, and every table brings new
    functions, while jax has the operations in them compiled already.
    """
    return {
        path: leaf if leaf.fn is None else _computed(leaf)
        for path, leaf in table.items()
    }


def _computed(leaf: Leaf) -> Leaf:
    info = leaf.info
    with wide((info, *_infos_of(leaf))):
        value: Any = _value_fn(leaf)(*(_as_array(source) for source in leaf.sources))
    if info.python_type != "jax.Array":
        value = np.asarray(value)
        if info.kind == "scalar":
            value = value[()] if info.python_type == "numpy.generic" else value.item()
    described = _info.describe(info.path, _tree.Entry(info.keys, value, False))
    assert isinstance(described, LeafInfo), described
    return Leaf(dataclasses.replace(described, role=info.role), (value,))


def _as_array(value: Any) -> jax.Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _infos_of(leaf: Leaf) -> Iterator[LeafInfo]:
    for source in leaf.sources:
        if isinstance(source, StoredLeaf):
            yield source.info
        else:
            found = _info.describe("", _tree.Entry((), source, False))
            if isinstance(found, LeafInfo):
                yield found


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
    for batch in _batches(leaves, options.max_concurrent_bytes):
        values |= _read_batch(batch, options)
    return values


def _batches(leaves: Sequence[Leaf], max_bytes: int) -> Iterator[list[Leaf]]:
    batch: list[Leaf] = []
    total = 0
    for group in _groups(leaves):
        sources = {id(s): s for leaf in group for s in leaf.sources}.values()
        size = sum(
            _layout.stored_bytes(s.info) for s in sources if isinstance(s, StoredLeaf)
        )
        size += sum(_layout.stored_bytes(leaf.info) for leaf in group)
        if batch and total + size > max_bytes:
            yield batch
            batch, total = [], 0
        batch += group
        total += size
    if batch:
        yield batch


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
    by_devices: dict[frozenset[Any] | None, list[Leaf]] = {}
    for leaf in leaves:
        sharding = leaf.info.sharding
        devices = None if sharding is None else frozenset(sharding.device_set)
        by_devices.setdefault(devices, []).append(leaf)
    values: dict[LeafPath, Any] = {}
    for some in by_devices.values():
        values |= _make(some, options)
    return values


def _make(leaves: Sequence[Leaf], options: _read.Options) -> dict[LeafPath, Any]:
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
            given[key] = source
    found = _read.read(tuple(jobs.values()), options)
    arrays = given | {key: found[job.wanted.path] for key, job in jobs.items()}
    order = {key: i for i, key in enumerate(arrays)}

    def make(args: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            _value_fn(leaf)(*(args[order[id(source)]] for source in leaf.sources))
            for leaf in leaves
        ]

    shardings = [_automatic(leaf.info.sharding) for leaf in leaves]
    infos = [info for leaf in leaves for info in (leaf.info, *_infos_of(leaf))]
    with wide(infos):
        made = jax.jit(make, out_shardings=shardings)(list(arrays.values()))
    return {
        leaf.info.path: _place.place(value, leaf.info)
        for leaf, value in zip(leaves, made, strict=True)
    }


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
