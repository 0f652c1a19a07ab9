"""The native format of flaxckpt, readable by Orbax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt.formats._native import (
        checkpoint,
        checksums,
        contents,
        items,
        manifest,
        metadata,
        names,
        orbax_files,
        orbax_json,
    )

__all__ = [
    "checkpoint",
    "checksums",
    "contents",
    "items",
    "manifest",
    "metadata",
    "names",
    "orbax_files",
    "orbax_json",
]

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(__name__, __all__)
