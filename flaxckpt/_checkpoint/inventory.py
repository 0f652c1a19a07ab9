"""The files of a flaxckpt checkpoint, according to its manifest; reads no file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from flaxckpt import _formats, _state, _zarr
from flaxckpt._formats.items import Items
from flaxckpt._formats.native_manifest import Manifest
from flaxckpt._state.leaf import LeafInfo
from flaxckpt._types import LeafPath
from flaxckpt._zarr.metadata import Encoding

_OUTSIDE_NODES_BYTES = 4096
"""OCDBT stores values of at least this size outside of its nodes, uncompressed.

Values of up to 100 bytes are in the nodes, which are compressed.
"""


class StoredFile(NamedTuple):
    """A file of a checkpoint, with the leaves that cannot be read without it.

    Attributes:
        is_shared: True if this holds for some of `leaves` only: the tree of the
            database says for which.
        size: Bytes; None if not recorded, or dependent on the values.
        codec: Codec of a chunk with a file of its own; else `none`.
    """

    name: str
    leaves: tuple[LeafPath, ...] = ()
    is_shared: bool = False
    size: int | None = None
    codec: str = "none"
    digest: str | None = None


class Inventory(NamedTuple):
    """The files of a checkpoint, except metrics, markers and the commit marker.

    `unlisted` maps items whose files of arrays the manifest does not name to the least
    bytes of these files.
    """

    files: Mapping[str, StoredFile]
    unlisted: Mapping[str, int]


def make(manifest: Manifest, deleted: Collection[str] = ()) -> Inventory:
    """Returns the files that a checkpoint without `deleted` items needs."""
    items, encoding, sizes = manifest.items, manifest.encoding, manifest.files or {}
    files = {_formats.orbax_json.MANIFEST: StoredFile(_formats.orbax_json.MANIFEST)}
    leaves: dict[str | None, tuple[LeafPath, ...]] = {None: ()}
    unlisted: dict[str, int] = {}
    for item, infos in manifest.parts.items():
        arrays = [info for info in infos if info.dtype is not None]
        leaves[item] = tuple([info.path for info in arrays])
        if item in deleted or not arrays:
            continue
        if manifest.ocdbt:
            name = _formats.items.database(item)
            files[name] = StoredFile(name, leaves[item])
        if encoding is not None and not manifest.ocdbt:
            for info in arrays:
                files |= {f.name: f for f in _files_of_array(items, encoding, info)}
        elif manifest.files is None:
            unlisted[item] = _least_bytes(encoding, arrays)
    gone = tuple(f"{item}/" for item in deleted)
    for name in (*sizes, *manifest.digests):
        if not name.startswith(gone):
            tree, digest = items.tree_of_file(name), manifest.digests.get(name)
            if name in files:
                files[name] = files[name]._replace(digest=digest)
                continue
            size, is_shared = sizes.get(name), digest is None
            files[name] = StoredFile(name, leaves[tree], is_shared, size, digest=digest)
    return Inventory(files, unlisted)


def _files_of_array(
    items: Items, encoding: Encoding, info: LeafInfo
) -> Iterator[StoredFile]:
    root, leaves = _formats.items.prefix(items.array_directory(info)), (info.path,)
    codec = _zarr.metadata.choose_codec(encoding, info.stored_shape, info.stored_dtype)
    size = chunk_bytes(encoding, info) or None
    metadata, *chunks = array_files(encoding, info)
    yield StoredFile(f"{root}{metadata}", leaves)
    for key in chunks:
        yield StoredFile(f"{root}{key}", leaves, size=size, codec=codec)


def array_files(encoding: Encoding, info: LeafInfo) -> list[str]:
    """Returns the names of an array's metadata file, and then of its chunk files."""
    is_zarr_2 = encoding.version == 2
    return [
        _zarr.metadata.METADATA_FILES[encoding.version],
        *[c.key_2 if is_zarr_2 else c.key for c in _zarr.metadata.chunks_of(info)],
    ]


def chunk_bytes(encoding: Encoding, info: LeafInfo) -> int:
    """Returns the bytes of each stored chunk, with checksum; 0 if the size varies."""
    shape, dtype = info.stored_shape, info.stored_dtype
    codec = _zarr.metadata.choose_codec(encoding, shape, dtype)
    if codec != "none" or info.chunk_shape is None:
        return 0
    size = math.prod(info.chunk_shape) * _state.dtypes.item_size(dtype)
    return size + checksum_bytes(encoding)


def checksum_bytes(encoding: Encoding) -> int:
    return _zarr.checksums.CHECKSUM_BYTES if encoding.checksum else 0


def _least_bytes(encoding: Encoding | None, arrays: Sequence[LeafInfo]) -> int:
    """Returns the bytes of the arrays that a database stores outside of its nodes."""
    return sum(
        info.stored_bytes
        for info in arrays
        if encoding is not None and chunk_bytes(encoding, info) >= _OUTSIDE_NODES_BYTES
    )
