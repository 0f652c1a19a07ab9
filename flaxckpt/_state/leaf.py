"""Leaves, leaf infos and leaf tables; `_state.describe` makes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from flaxckpt._state import dtypes, tree
from flaxckpt._types import LeafPath, Shape, row

if TYPE_CHECKING:
    import jax
    import numpy as np
    import tensorstore as ts
    from jax.sharding import PartitionSpec, Sharding

    from flaxckpt._arrays.read_plan import Span
    from flaxckpt._zarr.checksums import ChunkChecksums
    from flaxckpt._zarr.metadata import RawArray


MeshAxes: TypeAlias = str | tuple[str, ...] | None
"""The mesh axes that split an axis of a leaf; None for none."""


class Role(NamedTuple):
    """The role of an optimizer leaf, independent of its place in the optimizer.

    `param` is the path below the field: the parameter's path, or empty for a counter.
    """

    state_class: str
    field: str
    param: LeafPath
    optimizer: LeafPath


class Box(NamedTuple):
    """A box around a leaf or its containers, absent from the leaf path.

    `depth` is the number of keys inside; jax and Orbax add `field` to the path.
    """

    depth: int
    field: str


@row
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
        mesh_axes: The partition spec, current or at the save, as a tuple.
        shard_shape: The shape of the shard on a device, current or at the save; None
            if unknown, or if the shard is the whole leaf.
        role: The role of an optimizer leaf.
        boxes: The boxes around the leaf, the outermost first; only known to transforms.
        stored_shape: The shape on disk; of a PRNG key, with an axis for its words.
        stored_dtype: The type on disk; empty for strings and empty containers.
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
    mesh_axes: tuple[MeshAxes, ...] | None = None
    shard_shape: Shape | None = None
    role: Role | None = None
    boxes: tuple[Box, ...] = ()
    stored_shape: Shape = dataclasses.field(init=False, repr=False, compare=False)
    stored_dtype: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        info: Any = self  # a row is frozen for type checkers only
        info.stored_shape = self.shape
        info.stored_dtype = dtypes.stored_name(self.dtype or "") or ""
        if self.kind == "prng_key":
            info.stored_shape = (*self.shape, dtypes.key_words(self.prng_impl or ""))

    @property
    def stored_bytes(self) -> int:
        """The uncompressed size of the values, in bytes."""
        if self.dtype is None:
            return 0
        return math.prod(self.stored_shape) * dtypes.item_bits(self.stored_dtype) // 8

    @property
    def spec(self) -> PartitionSpec | None:
        """The partition spec, current or at the save."""
        # Imported here: metadata is read and printed without jax.
        from jax.sharding import PartitionSpec

        return None if self.mesh_axes is None else PartitionSpec(*self.mesh_axes)

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


EMPTY_STATE = LeafInfo("", (), "empty", "dict")
"""The only leaf of a state without leaves: an empty dict."""


class Unsupported(NamedTuple):
    """Why values are not read: their form, and a sentence on how to get others."""

    form: str
    advice: str


@row
class StoredLeaf:
    """A leaf in a checkpoint, not yet read.

    Attributes:
        open: Opens the leaf as a read-only array. Arrays that are read together share
            the context.
        value: A string, which is read with the leaf table.
        raw: Locations of the chunks, if readable without `open`.
        span: Location of the values in a file, if readable without `open`.
        check: Compares what `open` does not: files with their digests, or the checksums
            of chunks with the recorded ones. Raises ValueError and OSError.
        find_files: Finds the files of the chunks: path in the checkpoint -> first byte
            and end of the chunks in it; None if unknown. Raises ValueError and OSError.
        with_chunks: Returns the leaf with functions that look only at some chunks, by
            their keys. None if they never look at others.
    """

    root: Path
    info: LeafInfo
    open: Callable[[ts.Context], ts.Future[ts.TensorStore]] | None = None
    value: str | None = None
    raw: RawArray | None = None
    span: Span | None = None
    check: Callable[[], None] | None = None
    unsupported: Unsupported | None = None
    checksums: ChunkChecksums | None = None
    find_files: Callable[[], Mapping[str, tuple[int, int]]] | None = None
    with_chunks: Callable[[Container[str]], StoredLeaf] | None = None


Value: TypeAlias = (
    "jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic"
    " | bool | int | float | complex | str | None"
)

Source: TypeAlias = "Value | StoredLeaf | tree.Node"


@row
class Leaf:
    """A row of a leaf table.

    Attributes:
        info: The properties of the leaf.
        sources: The value, or the stored leaf; several for a computed leaf. The source
            of an empty container is None, or its node while transforms change a state.
        fn: Computes the leaf from its sources, as jax arrays of their stored shapes and
            types. It is traced. If None, the leaf is its only source, cast.
        transforms: Names of the transforms that changed the leaf, in order.
    """

    info: LeafInfo
    sources: tuple[Source, ...]
    fn: Callable[..., jax.Array] | None = None
    transforms: tuple[str, ...] = ()

    @property
    def source(self) -> Source:
        [source] = self.sources
        return source

    @property
    def stored(self) -> list[StoredLeaf]:
        return [source for source in self.sources if isinstance(source, StoredLeaf)]

    @property
    def text(self) -> str:
        """The value of a string leaf, which is read with the leaf table."""
        source = self.source
        return str(source.value if isinstance(source, StoredLeaf) else source)

    @property
    def unsupported(self) -> Unsupported | None:
        """The reason why the leaf cannot be read or computed, or None."""
        for source in self.sources:
            if isinstance(source, StoredLeaf) and source.unsupported:
                return source.unsupported
        return None


LeafTable: TypeAlias = dict[LeafPath, Leaf]
