"""Checks of the files of flaxckpt's own format against checksums and sizes.

A check is a function that raises an error for a fault. Files are read in small parts.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import crc32c

from flaxckpt import _arrays, _state, _storage
from flaxckpt._checkpoint import file_sizes, verify_report
from flaxckpt._state.leaf import Leaf, LeafInfo
from flaxckpt._types import LeafPath
from flaxckpt.formats import _native


def check_keys(
    path: Path,
    encoding: _arrays.zarr.metadata.Encoding,
    leaves: Mapping[LeafPath, Leaf],
    found: verify_report.Findings,
) -> None:
    """Records arrays without metadata or with missing chunks in the OCDBT database.

    The database itself may be valid without them.
    """
    if any(_native.items.is_of_arrays(name) for name in found.problems):
        return  # the database has changed and may not be readable
    there: set[str] = set()
    manifest = f"{_native.items.STATE}/{_arrays.zarr.ocdbt.MANIFEST}"
    found.attempt(
        manifest,
        lambda: there.update(_arrays.zarr.ocdbt.keys(path / _native.items.STATE)),
    )
    if manifest in found.problems or manifest in found.unread:
        return
    for leaf_path, leaf in leaves.items():
        name = _native.orbax_json.param_name(leaf.info.keys)
        chunks = file_sizes.chunk_names(encoding, leaf.info)
        missing = [
            key
            for key in (file_sizes.metadata_name(encoding), *chunks)
            if _arrays.zarr.metadata.database_key(name, key) not in there
        ]
        if missing:
            rest = f" and {len(missing) - 1} more are" if missing[1:] else " is"
            why = f"{missing[0]}{rest} missing in the database"
            found.add(found.problems, leaf_path, why)


def of_array(
    path: Path,
    encoding: _arrays.zarr.metadata.Encoding,
    info: LeafInfo,
    digests: Mapping[str, str],
    found: verify_report.Findings,
) -> tuple[set[str], list[Callable[[], object]]]:
    """Returns the files of an array, and checks of the files without a digest."""
    directory = file_sizes.array_directory(info)
    shape, dtype = _arrays.layout.stored_form(info)
    chunk_shape = info.chunk_shape or ()
    metadata = f"{directory}/{file_sizes.metadata_name(encoding)}"
    files = {metadata}
    checks: list[Callable[[], object]] = []
    if metadata not in digests:

        def check_metadata() -> None:
            text = _arrays.zarr.chunk_file.small(path / metadata)
            _arrays.zarr.metadata.check_metadata(
                text, encoding, shape, dtype, chunk_shape
            )
            _arrays.zarr.metadata.check_compact(text)

        checks.append(check_metadata)
    size = file_sizes.chunk_bytes(encoding, info)
    most = size or math.prod(chunk_shape) * _state.dtypes.item_bits(dtype) // 8
    for key in file_sizes.chunk_names(encoding, info):
        file = f"{directory}/{key}"
        files.add(file)
        if file not in digests:
            check = _check_chunk if encoding.checksum else _check_size
            chunk = _Chunk(path / file, path, size, most)
            checks.append(functools.partial(check, chunk, found.counter.add))
    return files, checks


def check_digest(
    path: Path, name: str, recorded: str, count: Callable[[int], object]
) -> None:
    """Raises ValueError if the SHA-256 of a file differs from `recorded`."""
    digest = hashlib.sha256()
    most = verify_report.LARGE if _native.items.is_of_arrays(name) else 0
    verify_report.stream(path / name, path, count, digest.update, most)
    _storage.files.check_digest("it", f"sha256:{digest.hexdigest()}", recorded)


class _Chunk(NamedTuple):
    """A chunk file and the expected size.

    Attributes:
        file: Path of the chunk file.
        root: The checkpoint.
        size: Expected size in bytes; 0 if the size varies.
        most: Size in bytes without compression.
    """

    file: Path
    root: Path
    size: int
    most: int

    def check_size(self, found: int) -> None:
        if found != (self.size or found) or not found:
            wanted = self.size or "some"
            raise ValueError(f"{self.file.name} has {found} bytes instead of {wanted}")


def _check_size(chunk: _Chunk, count: Callable[[int], object]) -> None:
    """Raises ValueError if a chunk file has the wrong size."""
    found = _storage.of(chunk.file).known_size(chunk.file, chunk.root)
    if found is not None:
        chunk.check_size(found)
        return
    sizes: list[int] = []
    verify_report.stream(
        chunk.file, chunk.root, count, lambda part: sizes.append(len(part)), chunk.most
    )
    chunk.check_size(sum(sizes))


def _check_chunk(chunk: _Chunk, count: Callable[[int], object]) -> None:
    """Raises ValueError if a chunk file does not match the checksum at the end."""
    size = _storage.of(chunk.file).known_size(chunk.file, chunk.root)
    if size is not None:
        chunk.check_size(size)  # before reading the whole file
    value, found, tail = 0, 0, b""

    def take(part: memoryview) -> None:
        nonlocal value, found, tail
        found += len(part)
        if len(part) < _arrays.zarr.chunk_file.CHECKSUM_BYTES:
            part, tail = memoryview(tail + bytes(part)), b""
        value = crc32c.crc32c(tail, value)
        value = crc32c.crc32c(part[: -_arrays.zarr.chunk_file.CHECKSUM_BYTES], value)
        tail = bytes(
            part[-_arrays.zarr.chunk_file.CHECKSUM_BYTES :]
        )  # the checksum, unless another part follows

    verify_report.stream(chunk.file, chunk.root, count, take, chunk.most)
    chunk.check_size(found)
    if tail != value.to_bytes(_arrays.zarr.chunk_file.CHECKSUM_BYTES, "little"):
        raise ValueError(
            f"{chunk.file.name} has changed since it was written: its CRC-32C is"
            " another"
        )


def check_committed(path: Path) -> None:
    """Raises ValueError if the commit marker does not match the manifest."""
    manifest = _native.items.read_file(path / _native.orbax_json.MANIFEST, path)
    found = _native.items.read_file(path / _storage.commit_marker.MARKER, path)
    if found != _native.checkpoint.commit_marker(manifest):
        raise ValueError("its content has changed since it was written")


def of_metrics(
    path: Path, found: verify_report.Findings, *, is_digested: bool
) -> list[tuple[str, Callable[[], object]]]:
    """Returns the checks of the metrics, as pairs of file name and check.

    Args:
        path: The checkpoint.
        found: Receives metrics that have no digest.
        is_digested: Whether the digests of the metrics must exist.
    """
    name = f"{_native.items.METRICS}/{_native.items.METRICS}"

    def check() -> None:
        if (path / _native.items.METRICS).exists():
            (path / name).stat()  # raises if the directory has no metrics file
        _native.metadata.load_metrics(path)

    checks: list[tuple[str, Callable[[], object]]] = [(name, check)]
    digests = _native.items.METRICS_DIGESTS
    if is_digested or (path / digests).exists():
        check_digests = functools.partial(_native.metadata.check_metrics_digests, path)
        checks.append((digests, check_digests))
    elif (path / name).exists():
        found.unchecked[name] = "they were written without a digest"
    return checks
