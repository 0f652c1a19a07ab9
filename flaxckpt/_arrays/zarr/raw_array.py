"""An array whose chunks are its values, followed by their checksum."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flaxckpt._arrays.zarr import metadata


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
    encoding: metadata.Encoding
    digests: Mapping[str, str] = MappingProxyType({})
