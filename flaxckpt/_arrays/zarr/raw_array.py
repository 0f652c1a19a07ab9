"""Location of a raw array: chunks of plain values and a checksum."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flaxckpt._arrays.zarr import metadata


class RawArray(NamedTuple):
    """A raw array: each chunk consists of plain values and their checksum.

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
