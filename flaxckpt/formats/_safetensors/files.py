"""Reads the headers and indices of safetensors files, not the tensors."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from flaxckpt import _storage, errors
from flaxckpt._storage import Stamp
from flaxckpt._types import JSON
from flaxckpt.formats._safetensors import header
from flaxckpt.formats._safetensors.header import Header, Index, Tensor
from flaxckpt.formats._signatures import LFS, OF_LFS

_log = logging.getLogger(__name__)


def read_header(path: Path) -> Header:
    """Reads the header of a file, after a check of its limits.

    Raises:
        DamagedCheckpointError: The file is missing, malformed or truncated.
        CheckpointFormatError: A Git LFS pointer, or tensors of unsupported types.
    """
    try:
        text, size = _header_text(path)
        return header.parse_header(text, file_size=size)
    except errors.CheckpointFormatError:
        raise
    except header.NotReadError as error:
        rows = [
            f"{header.short(name)}: {dtype}" for name, dtype in error.tensors.items()
        ]
        raise errors.CheckpointFormatError(
            f"{path} has {len(rows)} tensors of element types that are not read here:\n"
            f"{errors.rows(rows)}\nDequantize them with the program that wrote them,"
            " and save them again."
        ) from None
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise damaged(path, _words(error)) from None


def _header_text(path: Path) -> tuple[bytes, int]:
    """Returns the header of a file, and the size of the file in bytes."""
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
        raise ValueError("it is no plain file")
    with _storage.of(path).open_file(path) as file:
        status = os.fstat(file.fileno())
        start = file.read(8)
        if start == LFS[:8] and start + file.read(len(LFS) - 8) == LFS:
            raise errors.CheckpointFormatError(f"{path} is {OF_LFS}")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > status.st_size - 8:
            raise ValueError(
                f"its header is said to have {length} bytes, the file has"
                f" {status.st_size}"
            )
        if length > header.MAX_HEADER_BYTES:
            raise ValueError(
                f"its header has {length} bytes, and at most"
                f" {header.MAX_HEADER_BYTES} are read"
            )
        text = file.read(length)
    if len(text) != length:
        raise ValueError("it was cut short while it was read")
    return text, status.st_size


def read_shards(
    index_file: Path, tensors: dict[str, Tensor], files: dict[str, Stamp]
) -> Mapping[str, JSON]:
    """Reads an index and its shards' headers into `tensors` and `files`, by tensor.

    Returns the metadata of the index.
    """
    index = _read_index(index_file)
    faults = []
    unlisted = 0
    headers: dict[str, Header] = {}
    stamps: dict[str, Stamp] = {}
    for name in sorted(set(index.files.values())):
        shard = inside(index_file.parent, name)
        stamps[name] = _storage.stamp(shard)
        headers[name] = read_header(shard)
        listed = [index.files.get(tensor) == name for tensor in headers[name].tensors]
        unlisted += listed.count(False)
        try:
            header.check_count(len(index.files) + unlisted)
        except ValueError as error:
            raise damaged(index_file, error) from None
    for tensor, name in index.files.items():
        if tensor not in headers[name].tensors:
            faults.append(f"{tensor[:80]}: wanted in {name}, found nothing there")
            continue
        tensors[tensor] = headers[name].tensors[tensor]
        files[tensor] = stamps[name]
    if faults:
        raise errors.DamagedCheckpointError(
            f"{index_file} does not fit the files beside it:\n"
            f"{errors.rows(faults)}\nGet all of them again from where they came."
        )
    if unlisted:
        _log.warning("%d tensors beside %s are not in it", unlisted, index_file)
    return index.metadata


def _read_index(index_file: Path) -> Index:
    try:
        if not stat.S_ISREG(index_file.stat().st_mode):
            raise ValueError("it is no plain file")
        text = _storage.of(index_file).read(
            index_file, max_bytes=header.MAX_HEADER_BYTES
        )
        if text.startswith(LFS):
            raise errors.CheckpointFormatError(f"{index_file} is {OF_LFS}")
        return header.parse_index(text)
    except errors.CheckpointFormatError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise damaged(index_file, _words(error)) from None


def inside(directory: Path, name: str) -> Path:
    """Returns the path of the file `name` in `directory`.

    Raises:
        DamagedCheckpointError: The file is missing, or a symlink out of the directory.
            Symlinks into the blobs of Hugging Face's hub cache are allowed.
    """
    path = directory / name
    try:
        real = path.resolve(strict=True)
    except PermissionError:
        raise
    except (OSError, RuntimeError) as error:
        raise damaged(path, _words(error)) from None
    home = directory.resolve()
    snapshots = next((each for each in home.parents if each.name == "snapshots"), None)
    blobs = None if snapshots is None else snapshots.parent / "blobs"
    if real.parent not in (home, blobs):
        raise errors.DamagedCheckpointError(
            f"{path} is a link to {real}, outside of its directory: copy that file here"
        )
    return path


def damaged(path: Path, error: object) -> errors.DamagedCheckpointError:
    """Returns the error for a damaged file or checkpoint."""
    return errors.DamagedCheckpointError(
        f"{path} is no intact safetensors checkpoint: {str(error)[:300]};"
        " get it again from where it came"
    )


def _words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
