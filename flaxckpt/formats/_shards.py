"""Checkpoints of several files, with an index: names of leaves, and their files.

Source: `save_pretrained` and `flax_shard_checkpoint` of transformers.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

from flaxckpt import _storage, errors
from flaxckpt.formats import _hub_cache, _signatures
from flaxckpt.formats._safetensors import header
from flaxckpt.formats._safetensors.header import Index

INDEX_END = ".index.json"
_SHARD = re.compile(r"(.+)-\d{5,6}-of-\d{5,6}(\.\w+)", re.DOTALL)


def read_index(index_file: Path) -> Index:
    """Reads an index.

    Raises:
        DamagedCheckpointError: It is missing, or not an index of files beside it.
        CheckpointFormatError: It is a Git LFS pointer.
    """
    try:
        if not stat.S_ISREG(index_file.stat().st_mode):
            raise ValueError("it is not a regular file")
        text = _storage.of(index_file).read(
            index_file, max_bytes=header.MAX_HEADER_BYTES
        )
        if text.startswith(_signatures.LFS):
            raise errors.CheckpointFormatError(f"{index_file} is {_signatures.OF_LFS}")
        return header.parse_index(text, _suffix(index_file))
    except errors.CheckpointFormatError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise damaged_error(index_file, error) from None


def names(index_file: Path) -> set[str]:
    """Returns the file names in an index; empty if `index_file` is no such file."""
    if not index_file.name.endswith(INDEX_END):
        return set()
    try:
        return set(read_index(index_file).files.values())
    except (OSError, errors.CheckpointError):
        return set()


def find_index(shard: Path) -> Path | None:
    """Returns the index beside a file with the name of a shard; None if there is none.

    The file is one of several, and not a checkpoint of its own.
    """
    match = _SHARD.fullmatch(shard.name)
    if match is None:
        return None
    index_file = shard.with_name(f"{match[1]}{match[2]}{INDEX_END}")
    return index_file if index_file.is_file() else None


def warning(shard: Path) -> str:
    """Returns the warning for a shard that is opened alone."""
    index_file = find_index(shard)
    advice = f"; pass {index_file} to load all" if index_file else ""
    return f"{shard} is one of several shards; the others are not read{advice}"


def locate(directory: Path, name: str) -> Path:
    """Returns the path of the file `name` in `directory`.

    Raises:
        DamagedCheckpointError: The file is missing, or a symlink out of the directory.
            Links of a snapshot in the Hub's cache may lead to its blobs.
    """
    path = directory / name
    try:
        _hub_cache.check_link(path)
    except (PermissionError, errors.DamagedCheckpointError):
        raise
    except (OSError, RuntimeError) as error:
        raise damaged_error(path, error) from None
    return path


def mismatch_error(index_file: Path, faults: list[str]) -> errors.CheckpointError:
    """Returns the error for leaves of an index that its files lack."""
    return errors.DamagedCheckpointError(
        f"{index_file} does not match the files beside it:\n"
        f"{errors.rows(faults)}\nGet another copy of all of them."
    )


def damaged_error(path: Path, error: Exception) -> errors.DamagedCheckpointError:
    """Returns the error for a file that cannot be read."""
    kind = _suffix(path).removeprefix(".")
    return errors.DamagedCheckpointError(
        f"{path} is not an intact {kind} checkpoint:"
        f" {errors.one_line(_reason(error))}; get another copy"
    )


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(INDEX_END)).suffix or header.SUFFIX


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
