"""The zarr format: metadata, chunks, codecs and OCDBT databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt._zarr import (
        array_layout,
        btree,
        checksums,
        chunk_file,
        chunk_headers,
        chunk_shape,
        metadata,
        ocdbt,
        writer_assignment,
    )

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__)
