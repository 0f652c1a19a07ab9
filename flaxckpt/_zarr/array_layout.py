"""Chunks and encoding of arrays on disk."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Literal

from flaxckpt import _util, errors
from flaxckpt._zarr import metadata

_log = logging.getLogger(__name__)

MIB = 2**20

_CHUNK_BYTES = 64 * MIB
_COMPRESSED_CHUNK_BYTES = 8 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Chunks and encoding of arrays on disk.

    Attributes:
        chunk_bytes: Upper bound on a chunk, in bytes before compression; None for
            64 MiB, or 8 MiB for compressed chunks, which are in memory several times
            while they are encoded.
        store: No effect, as all arrays are stored in a database; use is logged. Will be
            removed.
        codec: `none`; `compact` is blosc with lz4 and bit-shuffle; `zstd` is level 1.
        checksum: True if every chunk ends in its CRC-32C, verified by all readers. Not
            available in zarr 2.
        zarr_version: 3, or 2 for readers without zarr 3: Orbax before 0.4.5, and T5X.
        shard_axes: Axes along which arrays will be cut when they are restored on
            another mesh, for example `(0, 1)`, or -1 for the last. Chunks are shaped so
            that a process reads little more than its part. Axes that an array lacks
            are ignored. Costs more, smaller files, which may not be mapped as a whole.
    """

    chunk_bytes: int | None = None
    store: Literal["auto", "files", "ocdbt"] | None = None
    codec: Literal["none", "compact", "zstd"] = "none"
    checksum: bool = True
    zarr_version: Literal[2, 3] = 3
    shard_axes: int | Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.chunk_bytes is not None:
            _util.arguments.check_int("chunk_bytes", self.chunk_bytes, least=1)
        axes = self.shard_axes
        axes = _util.arguments.check_ints(
            "shard_axes", axes if _util.arguments.is_list(axes) else (axes,)
        )
        object.__setattr__(self, "shard_axes", axes)
        for name, allowed in (
            ("store", (None, "auto", "files", "ocdbt")),
            ("codec", ("none", "compact", "zstd")),
            ("zarr_version", (2, 3)),
        ):
            if getattr(self, name) not in allowed:
                raise errors.OptionError(
                    f"{name} must be one of {allowed}, got {getattr(self, name)!r}"
                )
        if self.store is not None:
            _log.warning(
                "ArrayLayout(store=%r) has no effect any more, as all arrays are stored"
                " in a database: leave it out",
                self.store,
            )
            object.__setattr__(self, "store", None)

    @property
    def max_chunk_bytes(self) -> int:
        """Upper bound on a chunk, in bytes before compression."""
        default = _CHUNK_BYTES if self.codec == "none" else _COMPRESSED_CHUNK_BYTES
        return default if self.chunk_bytes is None else self.chunk_bytes

    @property
    def encoding(self) -> metadata.Encoding:
        """Encoding of the chunks of all arrays."""
        has_checksums = self.checksum and self.zarr_version == 3
        return metadata.Encoding(self.codec, has_checksums, self.zarr_version)


_DEFAULT = ArrayLayout()


def check_layout(layout: ArrayLayout | None) -> ArrayLayout:
    """Returns `layout`, or the default layout; raises OptionError for anything else."""
    if layout is None:
        return _DEFAULT
    if not isinstance(layout, ArrayLayout):
        raise errors.OptionError(
            "layout must be a flaxckpt.ArrayLayout, got"
            f" {_util.arguments.describe(layout)}:"
            " pass layout=ArrayLayout(codec='zstd')"
        )
    return layout
