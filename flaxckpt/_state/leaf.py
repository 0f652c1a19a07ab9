"""Leaves, leaf infos and leaf tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from flaxckpt._state import tree
from flaxckpt._types import LeafPath, Shape

if TYPE_CHECKING:
    import tensorstore as ts

    from flaxckpt._arrays.zarr.metadata import RawArray


class Role(NamedTuple):
    """The role of an optimizer leaf, independent of its place in the optimizer.

    Attributes:
        state_class: Class of the innermost transform's state, `ScaleByAdamState`.
        field: Field of the state, `mu`.
        param: Path below the field: the parameter's path, or empty for a counter.
        optimizer: Path of the whole optimizer's state, `opt_state`.
    """

    state_class: str
    field: str
    param: LeafPath
    optimizer: LeafPath


@dataclasses.dataclass(frozen=True, slots=True)
class LeafInfo:
    """A leaf's properties without its values.

    Attributes:
        path: The leaf path, `params/Dense_0/kernel`.
        keys: The keys of the path.
        kind: `empty` is a container without children, which has a place but no data.
        python_type: `jax.Array`, `numpy.ndarray`, `numpy.generic`, `int`, `float`,
            `bool`, `complex` or `str`; of an empty container `None`, `dict`, `list`
            or `tuple`.
        shape: In elements; `()` for scalars. Of a PRNG key, the shape of the keys.
        dtype: Name of the element type; None for strings and empty containers.
        sharding: The sharding of the values, if known.
        chunk_shape: Shape of the stored chunks; None if not an array.
        weak_type: True if jax may promote the leaf like a Python number.
        prng_impl: The implementation of a PRNG key (`threefry2x32`).
        spec: The partition spec, current or at the save.
        shard_shape: The shape of the shard on a device, current or at the save; None
            if unknown, or if the shard is the whole leaf.
        role: The role of an optimizer leaf.
    """

    path: LeafPath
    keys: tuple[tree.Key, ...]
    kind: Literal["array", "scalar", "string", "prng_key", "empty"]
    python_type: str
    shape: Shape = ()
    dtype: str | None = None
    sharding: Sharding | None = None
    chunk_shape: Shape | None = None
    weak_type: bool = False
    prng_impl: str | None = None
    spec: PartitionSpec | None = None
    shard_shape: Shape | None = None
    role: Role | None = None

    @property
    def is_python_number(self) -> bool:
        """True for a Python number, which has no width."""
        return self.kind == "scalar" and self.python_type != "numpy.generic"

    def __str__(self) -> str:
        match self.kind:
            case "string":
                return "a str"
            case "empty":
                return (
                    "None"
                    if self.python_type == "None"
                    else f"an empty {self.python_type}"
                )
            case "scalar" if self.python_type == "numpy.generic":
                return f"a numpy {self.dtype}"
            case "scalar":
                return f"a Python {self.python_type}"
            case "prng_key":
                return f"{self.prng_impl} keys {list(self.shape)}"
            case _:
                return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A leaf in a checkpoint, not yet read.

    Attributes:
        root: The checkpoint, for messages.
        info: The leaf as stored.
        open: Opens the leaf as a read-only array. Arrays that are read together share
            the context.
        value: A string, which is read with the leaf table.
        raw: Locations of the chunks, if readable without `open`.
        check: Compares files with their digests, for chunks without checksums. Raises
            ValueError and OSError.
    """

    root: Path
    info: LeafInfo
    open: Callable[[ts.Context], ts.Future[ts.TensorStore]] | None = None
    value: str | None = None
    raw: RawArray | None = None
    check: Callable[[], None] | None = None


Value: TypeAlias = (
    "jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic"
    " | bool | int | float | complex | str | None"
)


Source: TypeAlias = "Value | StoredLeaf"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A row of a leaf table.

    Attributes:
        info: The properties of the leaf.
        sources: The value, or the stored leaf; several for a computed leaf. The source
            of an empty container is None.
        fn: Computes the leaf from its sources, as jax arrays of their stored shapes and
            types. It is traced. If None, the leaf is its only source, cast.
    """

    info: LeafInfo
    sources: tuple[Source, ...]
    fn: Callable[..., jax.Array] | None = None

    @property
    def source(self) -> Source:
        """The only source of the leaf."""
        [source] = self.sources
        return source


LeafTable: TypeAlias = dict[LeafPath, Leaf]
