"""Reader of safetensors checkpoints: a single file, or shards with an index."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from flaxckpt import _arrays, _state, _storage, errors
from flaxckpt._formats import file_leaves, hub_cache, shards, signatures
from flaxckpt._formats.reader import CheckpointMetadata, Stored
from flaxckpt._formats.safetensors import files as safetensors_files
from flaxckpt._formats.safetensors import header as safetensors_header
from flaxckpt._formats.safetensors import metadata as safetensors_metadata
from flaxckpt._formats.safetensors.header import (
    INDEX_SUFFIX,
    OURS,
    SafetensorsHeader,
    SafetensorsTensor,
)
from flaxckpt._formats.safetensors.metadata import Described
from flaxckpt._state.leaf import Leaf, LeafTable, StoredLeaf
from flaxckpt._storage import Stamp
from flaxckpt._types import JSON


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    main = path = hub_cache.find_snapshot(path) or path
    if path.is_dir():
        file = safetensors_files.find_main_file(path)
        if file is None:
            raise errors.CheckpointFormatError(
                f"{path} no longer holds a single safetensors file or index"
            )
        shards.check_index(path, safetensors_header.SUFFIX)
        main = shards.locate(path, file.name)
    stamp = _storage.stamp(main)
    files: dict[str, Stamp] = {}
    tensors: dict[str, SafetensorsTensor] = {}
    metadata: Mapping[str, JSON]
    if main.name.endswith(INDEX_SUFFIX):
        metadata = _read_shards(main, tensors, files)
    else:
        header = _read_header(main)
        shards.warn_if_shard(main)
        tensors.update(header.tensors)
        files = dict.fromkeys(tensors, stamp)
        metadata = header.metadata
    unknown: set[str] = set()
    described = _describe(path, tensors, metadata, resolve, unknown)
    table = _leaf_table(path, described, tensors, files)
    return Stored(
        CheckpointMetadata(
            str(path),
            "safetensors",
            step,
            {info.path: info for info in described.infos},
            described.metrics,
            custom=described.custom,
            total_bytes=sum(info.stored_bytes for info in described.infos),
            lineage=described.lineage,
            transforms=described.transforms,
        ),
        table,
        described.structure,
        frozenset(unknown),
        stamp=stamp,
    )


def _describe(
    path: Path,
    tensors: Mapping[str, SafetensorsTensor],
    metadata: Mapping[str, JSON],
    resolve: _state.treedef.Resolve,
    unknown: set[str],
) -> Described:
    ours = metadata.get(OURS)
    if isinstance(ours, str):
        try:
            return safetensors_metadata.describe_native(ours, tensors, resolve, unknown)
        except safetensors_metadata.LaterVersionError as error:
            raise errors.CheckpointFormatError(f"{path}: {error}") from None
        except ValueError as error:
            raise shards.damaged_error(path, error) from None
    return safetensors_metadata.describe_foreign(path, tensors, metadata)


def _leaf_table(
    path: Path,
    described: Described,
    tensors: Mapping[str, SafetensorsTensor],
    files: Mapping[str, Stamp],
) -> LeafTable:
    table: LeafTable = {}
    for info in described.infos:
        stored = StoredLeaf(path, info, value=described.strings.get(info.path))
        if info.dtype is not None:
            name = described.names[info.path]
            tensor, file = tensors[name], files[name]
            span = _arrays.read_plan.Span(
                file.path,
                tensor.offset,
                tensor.shape,
                tensor.dtype,
                identity=file.identity,
                is_replaced_only=described.is_native,
            )
            stored = file_leaves.stored_leaf(path, info, span)
        table[info.path] = Leaf(info, (stored,))
    return table


_TEXT_BYTES = 56
"""Bytes to show of text that a server has sent in place of a file."""


# ---- files ------------------------------------------------------------------------


def _read_header(path: Path) -> SafetensorsHeader:
    try:
        text, size = _header_text(path)
        return safetensors_header.parse_header(text, file_size=size)
    except errors.CheckpointFormatError:
        raise
    except safetensors_header.NotReadError as error:
        rows = [
            f"{safetensors_header.short(name)}: {dtype}"
            for name, dtype in error.tensors.items()
        ]
        raise errors.CheckpointFormatError(
            f"{path} has tensors of unsupported element types:\n"
            f"{errors.rows(rows)}\nDequantize them with the program that wrote them,"
            " and save them again."
        ) from None
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise shards.damaged_error(path, error) from None


def _header_text(path: Path) -> tuple[bytes, int]:
    """Returns the header of a file, and the size of the file in bytes."""
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
        raise ValueError("it is not a regular file")
    with _storage.of(path).open_file(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > file_size - 8:
            start += file.read(_TEXT_BYTES)
            if stand_in := signatures.describe_stand_in(start):
                raise errors.CheckpointFormatError(f"{path} is {stand_in}")
            line = start.strip().partition(b"\n")[0]
            if line and line.isascii() and (words := line.decode()).isprintable():
                raise ValueError(f"wanted a header, found text that begins {words!r}")
            raise ValueError(
                f"wanted a header of {length} bytes, found a file of {file_size}"
            )
        if length > safetensors_header.MAX_HEADER_BYTES:
            raise ValueError(
                f"its header has {length} bytes; at most"
                f" {safetensors_header.MAX_HEADER_BYTES} are read"
            )
        text = file.read(length)
    if len(text) != length:
        raise ValueError("it became shorter while it was read")
    return text, file_size


def _read_shards(
    index_file: Path, tensors: dict[str, SafetensorsTensor], files: dict[str, Stamp]
) -> Mapping[str, JSON]:
    """Reads an index and its shards' headers; returns the metadata of the index."""
    index = shards.read_index(index_file)
    stamps = shards.list_files(index_file, index)
    found: dict[tuple[str, str], SafetensorsTensor] = {}
    listed = 0
    for name, file in stamps.items():
        header = _read_header(file.path)
        found |= {(tensor, name): row for tensor, row in header.tensors.items()}
        listed += sum(index.files.get(tensor) == name for tensor in header.tensors)
        try:
            safetensors_header.check_count(len(index.files) + len(found) - listed)
        except ValueError as error:
            raise shards.damaged_error(index_file, error) from None
    shards.check_leaves(index_file, index, found.keys())
    for tensor, name in index.files.items():
        tensors[tensor], files[tensor] = found[tensor, name], stamps[name]
    return index.metadata
