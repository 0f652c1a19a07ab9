"""Reader of safetensors checkpoints: a single file, or shards with an index."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from flaxckpt import _arrays, _state, _steps, _storage, errors
from flaxckpt._state.leaf import Leaf, LeafTable, StoredLeaf
from flaxckpt._storage import Stamp
from flaxckpt._types import JSON
from flaxckpt.formats import _signatures
from flaxckpt.formats._reader import CheckpointMetadata, Stored
from flaxckpt.formats._safetensors import files as safetensors_files
from flaxckpt.formats._safetensors import header as safetensors_header
from flaxckpt.formats._safetensors import metadata as safetensors_metadata
from flaxckpt.formats._safetensors.header import INDEX_SUFFIX, OURS, SUFFIX, Tensor
from flaxckpt.formats._safetensors.metadata import Described

_log = logging.getLogger(__name__)


_IN_STEPS = ("_CHECKPOINT_METADATA", "_METADATA", "checkpoint")
"""Every step of Orbax, T5X or flaxckpt has at least one of these files."""


_BEGINNING = re.compile(rb'\s*\{\s*["}]')
_SHARD = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})\.safetensors", re.DOTALL)
_MANY = 20
"""The most files listed in a message."""


def recognises(path: Path) -> str | None:
    """Returns the evidence for safetensors (file, index, directory); else None."""
    if path.is_dir():
        main = _main_file(path)
        return None if main is None else f"it holds {main.name}"
    if path.name.endswith(INDEX_SUFFIX) and path.is_file():
        return f"its name ends in {INDEX_SUFFIX}"
    if not path.is_file():
        return None
    start = _signatures.first_bytes(path, 8 + 64)
    length = int.from_bytes(start[:8], "little")
    if _BEGINNING.match(start[8:]) and length <= safetensors_header.MAX_HEADER_BYTES:
        return "it begins with the header of a safetensors file"
    if path.suffix == SUFFIX and not _is_something_else(path, start):
        return f"its name ends in {SUFFIX}"
    return None


def refusal(directory: Path) -> str | None:
    """Describes a directory with several safetensors files or indices; else None."""
    names = _candidates(directory)
    if len(names) < 2:
        return None
    kind = "indices" if names[0].endswith(INDEX_SUFFIX) else "files"
    return (
        f"a directory that holds several safetensors {kind}"
        f" ({errors.first_few(names, _MANY)}): pass the path of one"
    )


def _is_something_else(path: Path, start: bytes) -> bool:
    """Returns True if a file begins like a file of another format."""
    others = (_signatures.LFS, b"PK\x03\x04", b"\x80\x02", b"\x80\x04")
    return start.startswith(others) or _signatures.is_msgpack(path)


def _candidates(directory: Path) -> list[str]:
    """Returns the names of the indices in a directory, else of safetensors files."""
    names = sorted(
        path.name for path in directory.iterdir() if not path.name.startswith(".")
    )
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    return indices or [name for name in names if name.endswith(SUFFIX)]


def _main_file(directory: Path) -> Path | None:
    """Returns the only index or safetensors file in a directory, or None.

    Without an index, the first of an incomplete set of shards, for which `read` raises
    an error. None in a run directory, which has steps beside the file.
    """
    names = _candidates(directory)
    if not names or (len(names) > 1 and not _are_shards(names)):
        return None
    if any(_is_beside(path) for path in directory.iterdir()):
        return None
    return directory / names[0]


def _are_shards(names: list[str]) -> bool:
    """Returns True for an incomplete set of shards of the same checkpoint."""
    found = [_SHARD.fullmatch(name) for name in names]
    wholes = {(match[1], match[3]) if match else None for match in found}
    return len(wholes) == 1 and None not in wholes and bool(_missing(names))


def _missing(names: list[str]) -> list[str]:
    """Returns the missing shards of the set of `names[0]`; empty if not a shard."""
    match = _SHARD.fullmatch(names[0])
    if match is None or int(match[3]) > safetensors_header.MAX_SHARDS:
        return []
    stem, digits, count = match[1], len(match[2]), match[3]
    wanted = (
        f"{stem}-{number:0{digits}d}-of-{count}{SUFFIX}"
        for number in range(1, int(count) + 1)
    )
    known = set(names)
    return [name for name in wanted if name not in known]


def _is_beside(path: Path) -> bool:
    """Returns True for a step of a run; a safetensors file beside it is an export."""
    try:
        if any((path / name).exists() for name in _IN_STEPS):
            return True
        return (
            _steps.names.is_usual(path.name)
            and path.is_file()
            and _signatures.is_msgpack(path)
        )
    except PermissionError:
        return _steps.names.is_usual(path.name)


def read(path: Path, *, step: int | None, resolve: _state.treedef.Resolve) -> Stored:
    """Reads everything but arrays.

    Raises:
        DamagedCheckpointError: A file is missing or malformed.
    """
    main = path
    if path.is_dir():
        found = _main_file(path)
        if found is None:
            raise errors.CheckpointFormatError(
                f"{path} holds no single safetensors file or index any more"
            )
        _check_shards(path, _candidates(path))
        main = safetensors_files.inside(path, found.name)
    stamp = _storage.stamp(main)
    files: dict[str, Stamp] = {}
    tensors: dict[str, Tensor] = {}
    metadata: Mapping[str, JSON]
    if main.name.endswith(INDEX_SUFFIX):
        metadata = safetensors_files.read_shards(main, tensors, files)
    else:
        header = safetensors_files.read_header(main)
        if _missing([main.name]):
            _log.warning("%s is one of several shards, the others are not read", main)
        tensors.update(header.tensors)
        files = dict.fromkeys(tensors, stamp)
        metadata = header.metadata
    unknown: set[str] = set()
    described = _describe(path, tensors, metadata, resolve, unknown)
    table = _table(path, described, tensors, files)
    return Stored(
        CheckpointMetadata(
            str(path),
            "safetensors",
            step,
            {info.path: info for info in described.infos},
            described.metrics,
            None,
            None,
            described.custom,
            has_dataset=False,
            total_bytes=sum(
                _arrays.layout.stored_bytes(info) for info in described.infos
            ),
            lineage=described.lineage,
            transforms=described.transforms,
        ),
        table,
        described.structure,
        frozenset(unknown),
        stamp=stamp,
    )


def _check_shards(path: Path, names: list[str]) -> None:
    """Raises DamagedCheckpointError for missing shards without an index.

    Raises:
        DamagedCheckpointError: Lists the missing shards.
    """
    if names[0].endswith(INDEX_SUFFIX):
        return
    if missing := _missing(names):
        raise errors.DamagedCheckpointError(
            f"{path} holds {len(names)} of {len(names) + len(missing)} shards and no"
            f" index; these are missing:\n{errors.rows(missing)}\nGet them, and the"
            f" index *{INDEX_SUFFIX}, again from where they came, or pass the path of"
            " one to load it alone."
        )


def _describe(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, JSON],
    resolve: _state.treedef.Resolve,
    unknown: set[str],
) -> Described:
    ours = metadata.get(OURS)
    if isinstance(ours, str):
        try:
            return safetensors_metadata.describe_own(ours, tensors, resolve, unknown)
        except safetensors_metadata.LaterVersionError as error:
            raise errors.CheckpointFormatError(f"{path}: {error}") from None
        except ValueError as error:
            raise safetensors_files.damaged(path, error) from None
    described, is_split = safetensors_metadata.describe_foreign(tensors, metadata)
    if not is_split:
        _log.warning(
            "the names of the tensors in %s stay whole: one continues another one"
            " after a dot, or has too many dots",
            path,
        )
    return described


def _table(
    path: Path,
    described: Described,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, Stamp],
) -> LeafTable:
    table: LeafTable = {}
    for info in described.infos:
        stored = StoredLeaf(path, info, value=described.strings.get(info.path))
        if info.dtype is not None:
            name = described.names[info.path]
            place = tensors[name]
            file = files[name]
            span = _arrays.byte_ranges.Span(
                file.path,
                place.offset,
                place.shape,
                place.dtype,
                identity=file.identity,
            )
            stored = StoredLeaf(
                path, info, functools.partial(_arrays.byte_ranges.opened, (span,))
            )
        table[info.path] = Leaf(info, (stored,))
    return table
