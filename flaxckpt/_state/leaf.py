"""The data types that cross modules: leaves, layouts, checkpoints and readers."""

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

    from flaxckpt._arrays.zarr.raw_array import RawArray


class Role(NamedTuple):
    """What an optimizer leaf is, wherever in its optimizer it stands.

    Attributes:
        state_class: Class of the innermost transform's state, `ScaleByAdamState`.
        field: Its field, `mu`.
        param: Path below the field: the parameter's, or empty for a counter.
        optimizer: Path of the whole optimizer's state, `opt_state`.
    """

    state_class: str
    field: str
    param: LeafPath
    optimizer: LeafPath


@dataclasses.dataclass(frozen=True, slots=True)
class LeafInfo:
    """What is known of a leaf without its values.

    Attributes:
        path: The leaf path, `params/Dense_0/kernel`.
        keys: The same, key by key.
        kind: `empty` is a container without children, which has a place but no data.
        python_type: `jax.Array`, `numpy.ndarray`, `numpy.generic`, `int`, `float`,
            `bool`, `complex` or `str`; of an empty container `None`, `dict`, `list`
            or `tuple`.
        shape: In elements; `()` for scalars. Of a PRNG key, the shape of the keys.
        dtype: Name of the element type; None for strings and empty containers.
        sharding: Where its values are or shall be, if that is known.
        chunk_shape: Extent of the stored chunks; None for what is not an array.
        weak_type: Whether jax may promote it like a Python number.
        prng_impl: Of a PRNG key, its implementation (`threefry2x32`).
        spec: How it is, or was when it was saved, split over a mesh.
        shard_shape: The part of it that one device holds, or held; None if that is
            not known, or all of it.
        role: Of an optimizer leaf, what it is in whichever place.
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
        """Whether the leaf is a Python number, which has no width."""
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
        info: How it is stored.
        open: Opens it as an array, read-only. Arrays that are read together share
            the context.
        value: What has been read already: a string.
        raw: Where its chunks are, if they can be read without `open`.
        check: Compares its files with their digests, where chunks have no checksums.
            Raises ValueError and OSError.
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
        info: What is known of it.
        sources: Its value, or where that is stored; several, if it is made of several.
            An empty container has None.
        fn: What makes it of its sources, as jax arrays of the shapes and types that
            these have themselves. It is traced. None: it is its only source, cast.
    """

    info: LeafInfo
    sources: tuple[Source, ...]
    fn: Callable[..., jax.Array] | None = None

    @property
    def source(self) -> Source:
        """Its only source."""
        [source] = self.sources
        return source


LeafTable: TypeAlias = dict[LeafPath, Leaf]
