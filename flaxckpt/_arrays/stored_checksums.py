"""Reads the checksums at the end of stored chunks, without the chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorstore as ts

from flaxckpt import _storage
from flaxckpt._arrays.zarr import checksums, metadata

_AT_ONCE = 4096


def read(
    root: Path, names: Mapping[str, Sequence[str]], *, ocdbt: bool
) -> dict[str, dict[str, bytes]]:
    """Returns the last four bytes of chunks: array -> key of the chunk -> bytes.

    Args:
        root: The directory or the database with the arrays, with checked links.
        names: Array -> keys of its chunks.
        ocdbt: True if `root` is a database.

    Raises:
        ValueError, OSError: A chunk is missing, too short, or cannot be read.
    """
    _storage.store_requests.use_threads()
    spec = metadata.kvstore(root, "", ocdbt=ocdbt)
    opening = ts.KvStore.open(spec, context=_storage.store_requests.context())
    store = _storage.paths.result(opening, root)
    places = [(name, key) for name, keys in names.items() for key in keys]
    found: dict[str, dict[str, bytes]] = {}
    for start in range(0, len(places), _AT_ONCE):
        batch = places[start : start + _AT_ONCE]
        reads = [
            store.read(
                metadata.database_key(name, key),
                byte_range=slice(-checksums.CHECKSUM_BYTES, None),
            )
            for name, key in batch
        ]
        for (name, key), read in zip(batch, reads, strict=True):
            result = _storage.paths.result(read, root)
            if result.state != "value":
                raise ValueError(f"{metadata.database_key(name, key)} is missing")
            found.setdefault(name, {})[key] = bytes(result.value)
    return found
