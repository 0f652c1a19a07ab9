"""What a save has written, for the manifest, and for the save that follows."""

from __future__ import annotations

import base64
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax

from flaxckpt._storage import Stamp
from flaxckpt._types import JSON
from flaxckpt._zarr.btree import Place, Value

Checksums: TypeAlias = dict[str, dict[str, bytes]]
"""Array -> chunk key -> checksums of the segments of the chunk: the last is its own."""


class Previous(NamedTuple):
    """The arrays of an earlier checkpoint, to link unchanged files.

    `sources` maps names to the saved jax array and type; `stamp` detects a replaced
    checkpoint. Linked files must have `file_mode`, if given, as names of a file share
    it.
    """

    root: Path
    sources: Mapping[str, tuple[weakref.ref[jax.Array], str]]
    stamp: Stamp | None = None
    file_mode: int | None = None

    def of_item(self, item: str, prefix: str) -> Previous:
        """Returns the arrays of an item, whose names begin with `prefix`."""
        sources = {
            name[len(prefix) :]: source
            for name, source in self.sources.items()
            if f"{name}/".startswith(prefix)
        }
        return self._replace(root=self.root / item, sources=sources)

    def is_current(self) -> bool:
        """Returns True unless another checkpoint has replaced this checkpoint."""
        return self.stamp is None or self.stamp.is_current()


class Written(NamedTuple):
    """The checksums of chunks, and the values of the database, for `make_index`."""

    checksums: Checksums
    values: dict[bytes, Value]

    def add(self, other: Written) -> None:
        for name, chunks in other.checksums.items():
            self.checksums.setdefault(name, {}).update(chunks)
        self.values.update(other.values)

    def to_json(self) -> JSON:
        return {
            "checksums": {
                name: {key: _to_text(content) for key, content in chunks.items()}
                for name, chunks in self.checksums.items()
            },
            "values": [
                [key.decode(), _to_text(value) if isinstance(value, bytes) else value]
                for key, value in self.values.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> Written:
        return cls(
            {
                name: {key: base64.b64decode(text) for key, text in chunks.items()}
                for name, chunks in data["checksums"].items()
            },
            {
                key.encode(): base64.b64decode(value)
                if isinstance(value, str)
                else Place(*value)
                for key, value in data["values"]
            },
        )


def _to_text(content: bytes) -> str:
    return base64.b64encode(content).decode()
