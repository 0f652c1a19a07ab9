"""How arrays are cut and encoded on disk."""

from __future__ import annotations

import dataclasses
from typing import Literal

from flaxckpt import _util, errors
from flaxckpt._arrays.zarr import metadata

MIB = 2**20


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
        _util.arguments.whole("chunk_bytes", self.chunk_bytes, least=1)
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
    def encoding(self) -> metadata.Encoding:
        """How the chunks of all arrays are encoded."""
        has_checksums = self.checksum and self.zarr_version == 3
        return metadata.Encoding(self.codec, has_checksums, self.zarr_version)


def checked_layout(layout: ArrayLayout | None) -> ArrayLayout:
    """The layout that was passed, or the default layout.

    Raises:
        OptionError: It is something else.
    """
    if layout is None:
        return ArrayLayout()
    if not isinstance(layout, ArrayLayout):
        raise errors.OptionError(
            "layout must be a flaxckpt.ArrayLayout, got"
            f" {_util.arguments.found(layout)}:"
            " pass layout=ArrayLayout(store='files')"
        )
    return layout
