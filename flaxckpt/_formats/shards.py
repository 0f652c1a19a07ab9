"""Checkpoints of several files, with an index: names of leaves, and their files.

Source: `save_pretrained` and `flax_shard_checkpoint` of transformers.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _storage, _util, errors
from flaxckpt._formats import hub_cache, signatures
from flaxckpt._formats.safetensors import header
from flaxckpt._formats.safetensors.header import ShardIndex
from flaxckpt._storage import Stamp

_log = logging.getLogger(__name__)

INDEX_END = ".index.json"
MANY = 20
"""The most files listed in a message."""

_CONSOLIDATED = "consolidated"
_SHARD = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})(\.\w+)", re.DOTALL)


def read_index(index_file: Path) -> ShardIndex:
    """Reads an index of files beside it; raises an error for anything else."""
    try:
        if not stat.S_ISREG(index_file.stat().st_mode):
            raise ValueError("it is not a regular file")
        text = _storage.of(index_file).read(
            index_file, max_bytes=header.MAX_HEADER_BYTES
        )
        if stand_in := signatures.describe_stand_in(text):
            raise errors.CheckpointFormatError(f"{index_file} is {stand_in}")
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


def list_candidates(directory: Path, suffix: str) -> list[str]:
    """Returns the names of the indices in a directory, else of files with `suffix`.

    Names that begin with `consolidated`, Mistral's copies of a model, count if alone.
    """
    names = sorted(
        path.name for path in directory.iterdir() if not path.name.startswith(".")
    )
    for end in (suffix + INDEX_END, suffix):
        found = [name for name in names if name.endswith(end)]
        others = [name for name in found if not name.startswith(_CONSOLIDATED)]
        if found:
            return others or found
    return []


def describe_indices(directory: Path, suffix: str) -> str | None:
    """Describes a directory with several indices of files with `suffix`; else None."""
    names = list_candidates(directory, suffix)
    if len(names) < 2 or not names[0].endswith(INDEX_END):
        return None
    return (
        f"a directory that holds several {suffix.removeprefix('.')} indices"
        f" ({errors.first_few(names, MANY)}): pass the path of one"
    )


class _Set(NamedTuple):
    """The shards of a checkpoint, of which some may be missing."""

    index_name: str
    missing: list[str]


def _find_set(names: Sequence[str]) -> _Set | None:
    """Returns the set that all of `names` are shards of, or None."""
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    kinds = {(match[1], match[3], match[4]) for match in matches}
    if len(matches) != len(names) or len(kinds) != 1:
        return None
    stem, count, suffix = kinds.pop()
    if not 1 < int(count) <= header.MAX_SHARDS:
        return None
    digits = len(matches[0][2])
    numbers = range(1, int(count) + 1)
    wanted = (f"{stem}-{n:0{digits}d}-of-{count}{suffix}" for n in numbers)
    present = set(names)
    missing = [name for name in wanted if name not in present]
    return _Set(f"{stem}{suffix}{INDEX_END}", missing)


def is_incomplete(names: Sequence[str]) -> bool:
    """Returns True for an incomplete set of shards of the same checkpoint."""
    shards = _find_set(names)
    return shards is not None and bool(shards.missing)


def check_index(directory: Path, suffix: str) -> None:
    """Raises DamagedCheckpointError for shards with `suffix` without their index."""
    names = list_candidates(directory, suffix)
    if (shards := _find_set(names)) is None:
        return
    alone = "or pass the path of one shard to load it alone"
    if not shards.missing:
        raise errors.DamagedCheckpointError(
            f"{directory} holds {_util.humanize.count(len(names), 'shard')} and no"
            f" index: get {shards.index_name}, {alone}"
        )
    raise errors.DamagedCheckpointError(
        f"{directory} holds {len(names)} of {len(names) + len(shards.missing)} shards"
        f" and no index; these are missing:\n{errors.rows(shards.missing)}\nGet them"
        f" and {shards.index_name}, {alone}."
    )


def warn_if_shard(path: Path) -> None:
    """Logs a warning if a file, which is opened alone, is one of several shards."""
    if (shards := _find_set([path.name])) is None:
        return
    index_file = path.with_name(shards.index_name)
    advice = f"; pass {index_file} to load all" if index_file.is_file() else ""
    _log.warning("%s is one of several shards; the others are not read%s", path, advice)


def locate(directory: Path, name: str) -> Path:
    """Returns the path of a file; a link out is damage, unless to the Hub's blobs."""
    path = directory / name
    try:
        hub_cache.check_link(path)
    except (PermissionError, errors.DamagedCheckpointError):
        raise
    except (OSError, RuntimeError) as error:
        raise damaged_error(path, error) from None
    return path


def list_files(index_file: Path, index: ShardIndex) -> dict[str, Stamp]:
    """Returns the files of an index by name, as they are before they are read."""
    names = sorted(set(index.files.values()))
    return {name: _storage.stamp(locate(index_file.parent, name)) for name in names}


def check_leaves(
    index_file: Path, index: ShardIndex, found: Set[tuple[str, str]]
) -> None:
    """Compares the leaves and files of an index with those `found` in the files.

    Logs a warning if there are more. Raises DamagedCheckpointError if some are missing.
    """
    anywhere = dict(found)
    faults = [
        f"{leaf[:80]}: wanted in {name}, found {anywhere.get(leaf, 'none')}"
        for leaf, name in index.files.items()
        if (leaf, name) not in found
    ]
    if faults:
        raise mismatch_error(index_file, faults)
    if more := len(found) - len(index.files):
        _log.warning(
            "%d leaves in the files of %s are not listed in it", more, index_file
        )


def mismatch_error(index_file: Path, faults: list[str]) -> errors.CheckpointError:
    """Returns the error for leaves of an index that its files lack."""
    return errors.DamagedCheckpointError(
        f"{index_file} does not match the files beside it:\n"
        f"{errors.rows(faults)}\nGet another copy of all of them."
    )


def damaged_error(path: Path, error: Exception) -> errors.DamagedCheckpointError:
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
