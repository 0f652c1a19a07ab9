"""The data types that cross modules: leaves, layouts, checkpoints and readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from flaxckpt import _arguments, _storage, _structure, _tree, _zarr, errors
from flaxckpt._types import JSON, LeafPath, Shape

if TYPE_CHECKING:
    import tensorstore as ts

MIB = 2**20


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
    keys: tuple[_tree.Key, ...]
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


class RawArray(NamedTuple):
    """An array whose chunks are its values, followed by their checksum.

    Attributes:
        root: The directory that holds the arrays, or the database of them.
        name: Which array.
        ocdbt: Whether `root` is a database.
        encoding: How its chunks are encoded.
        digests: File of the database -> its digest; empty if they are not recorded.
    """

    root: Path
    name: str
    ocdbt: bool
    encoding: _zarr.Encoding
    digests: Mapping[str, str] = MappingProxyType({})


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


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayLayout:
    """How arrays are cut and encoded on disk.

    Attributes:
        chunk_bytes: Upper bound on a chunk, in bytes before compression.
        store: `files` is a directory a leaf and a file a chunk, `ocdbt` is one
            database for all leaves, `auto` takes `ocdbt` for many small leaves.
        codec: `none`; `compact` is blosc with lz4 and bit-shuffle; `zstd` is level 1.
        checksum: Whether every chunk ends in its CRC-32C. All readers verify it. zarr 2
            has no such checksums.
        zarr_version: 2 is for readers that do not know 3: Orbax before 0.4.5, and T5X.
    """

    chunk_bytes: int = 64 * MIB
    store: Literal["auto", "files", "ocdbt"] = "auto"
    codec: Literal["none", "compact", "zstd"] = "none"
    checksum: bool = True
    zarr_version: Literal[2, 3] = 3

    def __post_init__(self) -> None:
        _arguments.whole("chunk_bytes", self.chunk_bytes, least=1)
        for name, allowed in (
            ("store", ("auto", "files", "ocdbt")),
            ("codec", ("none", "compact", "zstd")),
            ("zarr_version", (2, 3)),
        ):
            if getattr(self, name) not in allowed:
                raise errors.OptionError(
                    f"{name} must be one of {allowed}, got {getattr(self, name)!r}"
                )

    @property
    def encoding(self) -> _zarr.Encoding:
        """How the chunks of all arrays are encoded."""
        has_checksums = self.checksum and self.zarr_version == 3
        return _zarr.Encoding(self.codec, has_checksums, self.zarr_version)


def checked_layout(layout: ArrayLayout | None) -> ArrayLayout:
    """The layout that was passed, or the default layout.

    Raises:
        OptionError: It is something else.
    """
    if layout is None:
        return ArrayLayout()
    if not isinstance(layout, ArrayLayout):
        raise errors.OptionError(
            f"layout must be a flaxckpt.ArrayLayout, got {_arguments.found(layout)}:"
            " pass layout=ArrayLayout(store='files')"
        )
    return layout


class Lineage(NamedTuple):
    """A checkpoint from which a run began.

    Attributes:
        path: Where it was.
        step: Which step of a run directory; None if it stood alone.
        digest: Checksum of the file that describes it, or of all of it; None if that
            is too large to read.
        transforms: What was changed in it, as text.
    """

    path: str
    step: int | None
    digest: str | None
    transforms: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """All that is known of a checkpoint without reading an array.

    Attributes:
        path: The checkpoint, a directory or a file.
        format: `flaxckpt`, or whose it is else: `orbax`, `t5x`, `msgpack`, `streaming`,
            `safetensors` or `npz`.
        step: Its number under a run directory; None if it stands alone.
        leaves: Leaf path -> what is known of it, in the order of the state.
        metrics: What was measured at this step.
        created: When the save began, in seconds since 1970; None if not recorded.
        committed: When it was committed, likewise.
        custom: The user's own `metadata=`.
        has_dataset: Whether it has the state of a dataset iterator.
        total_bytes: Size of all arrays, uncompressed.
        lineage: What the run began from, the nearest first.
        transforms: What was changed when it was saved, as text.
    """

    path: str
    format: str
    step: int | None
    leaves: Mapping[LeafPath, LeafInfo]
    metrics: Mapping[str, float]
    created: float | None
    committed: float | None
    custom: Mapping[str, JSON]
    has_dataset: bool
    total_bytes: int
    lineage: tuple[Lineage, ...] = ()
    transforms: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SaveResult:
    """What a finished save did.

    Attributes:
        step: The checkpoint's step; None if it stands alone.
        path: Where it is.
        bytes_written: Size of the files that were written, less those that were linked
            from the step before.
        blocked_secs: How long the caller waited.
        total_secs: From the call until all was durable and old steps were deleted.
        deleted_steps: Steps that the preservation policies let go; with a staging
            directory, those that are gone from there.
        skipped: None, or why nothing was written.
        tier: Where it is durable: in the `directory` itself, or in the one for
            `staging`, from which it is uploaded.
    """

    step: int | None
    path: str
    bytes_written: int
    blocked_secs: float
    total_secs: float
    deleted_steps: tuple[int, ...] = ()
    skipped: str | None = None
    tier: Literal["directory", "staging"] = "directory"


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint as a reader found it, arrays unread.

    Attributes:
        metadata: All but the values.
        table: Leaf path -> leaf that can be opened.
        structure: Its containers, with their exact types if the format records them.
        unknown_types: Classes in `structure` that become plain dicts or lists.
        digests: Relative path -> digest that was written down for a file.
        stamp: The file that describes it; another one means another checkpoint.
        recorded_step: The step that it was saved as; None if that is not recorded.
    """

    metadata: CheckpointMetadata
    table: LeafTable
    structure: _tree.Node | LeafPath
    unknown_types: frozenset[str] = frozenset()
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stamp: _storage.Stamp | None = None
    recorded_step: int | None = None


class Reader(Protocol):
    """Knows one format."""

    def recognises(self, path: Path) -> str | None:
        """Why `path` is a checkpoint in this format; None if it is none.

        Judged by names of files and the first bytes of one.
        """
        ...

    def read(
        self, path: Path, *, step: int | None, resolve: _structure.Resolve
    ) -> Stored:
        """Reads everything but arrays."""
        ...
