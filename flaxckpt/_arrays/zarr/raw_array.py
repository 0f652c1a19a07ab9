"""Location of a raw array, with chunks of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flaxckpt._arrays.zarr import metadata


class RawArray(NamedTuple):
    """An array with chunks of plain values, optionally followed by a checksum.

    Attributes:
        root: The directory or database with the arrays.
        name: Name of the array.
        ocdbt: True if `root` is a database.
        encoding: Encoding of the chunks.
        digests: File of the database -> digest; empty if not recorded.
    """

    root: Path
    name: str
    ocdbt: bool
    encoding: metadata.Encoding
    digests: Mapping[str, str] = MappingProxyType({})
