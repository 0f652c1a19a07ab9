"""safetensors: one file, or several with an index; lazily read, never trusted."""

from __future__ import annotations

import functools
import logging
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from flaxckpt import _layout, _spans, _storage, _structure, _survey, errors
from flaxckpt._info import CheckpointMetadata, Leaf, LeafTable, Stored, StoredLeaf
from flaxckpt._storage import Stamp
from flaxckpt._types import JSON
from flaxckpt.formats import _safetensors_json, _safetensors_leaves, _scan
from flaxckpt.formats._safetensors_json import (
    INDEX_SUFFIX,
    OURS,
    SUFFIX,
    Header,
    Tensor,
)
from flaxckpt.formats._safetensors_leaves import Described

_log = logging.getLogger(__name__)


_IN_STEPS = ("_CHECKPOINT_METADATA", "_METADATA", "checkpoint")
"""Files of which one is in every step that Orbax, T5X or we wrote."""


_BEGINNING = re.compile(rb'\s*\{\s*["}]')
_LFS = b"version https://git-lfs"
_SHARD = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})\.safetensors", re.DOTALL)
_MANY = 20
"""Files that are named in a message, at most."""


def recognises(path: Path) -> str | None:
    """Why `path` is safetensors: a file, an index, or a directory with one of them."""
    if path.is_dir():
        main = _main_file(path)
        return None if main is None else f"it holds {main.name}"
    if path.name.endswith(INDEX_SUFFIX) and path.is_file():
        return f"its name ends in {INDEX_SUFFIX}"
    if not path.is_file():
        return None
    start = _start(path)
    length = int.from_bytes(start[:8], "little")
    if _BEGINNING.match(start[8:]) and length <= _safetensors_json.MAX_HEADER_BYTES:
        return "it begins with the header of a safetensors file"
    if path.suffix == SUFFIX and not _is_something_else(path, start):
        return f"its name ends in {SUFFIX}"
    return None


def refusal(directory: Path) -> str | None:
    """Why a directory is not read, though there are safetensors files in it."""
    names = _candidates(directory)
    if len(names) < 2:
        return None
    kind = "indices" if names[0].endswith(INDEX_SUFFIX) else "files"
    shown = ", ".join(names[:_MANY]) + (", …" if len(names) > _MANY else "")
    return (
        f"a directory that holds several safetensors {kind} ({shown}): pass the path"
        " of one"
    )


def _start(path: Path) -> bytes:
    try:
        with _storage.opened(path) as file:
            return file.read(72)
    except PermissionError:
        raise
    except OSError:
        return b""


def _is_something_else(path: Path, start: bytes) -> bool:
    """Whether what is in a file speaks against its name."""
    return (
        start.startswith((_LFS, b"PK\x03\x04", b"\x80\x02", b"\x80\x04"))
        or _scan.first_keys(path) is not None
        or _scan.begins_with_record(path)
    )


def _candidates(directory: Path) -> list[str]:
    """The indices in a directory, else its safetensors files."""
    names = sorted(
        path.name for path in directory.iterdir() if not path.name.startswith(".")
    )
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    return indices or [name for name in names if name.endswith(SUFFIX)]


def _main_file(directory: Path) -> Path | None:
    """The index in a directory, else its only safetensors file; None if unclear.

    None, too, if there are steps beside it: then it is a run directory. Of shards
    without their index it is the first; `read` refuses them.
    """
    names = _candidates(directory)
    if not names or (len(names) > 1 and not _are_shards(names)):
        return None
    if any(_is_beside(path) for path in directory.iterdir()):
        return None
    return directory / names[0]


def _are_shards(names: list[str]) -> bool:
    """Whether files are parts of one checkpoint, some of which are not there."""
    found = [_SHARD.fullmatch(name) for name in names]
    wholes = {(match[1], match[3]) if match else None for match in found}
    return len(wholes) == 1 and None not in wholes and bool(_missing(names))


def _missing(names: list[str]) -> list[str]:
    """The shards that are not there, of those that `names` speak of."""
    match = _SHARD.fullmatch(names[0])
    if match is None or int(match[3]) > _safetensors_json.MAX_SHARDS:
        return []
    stem, digits, count = match[1], len(match[2]), match[3]
    wanted = (
        f"{stem}-{number:0{digits}d}-of-{count}{SUFFIX}"
        for number in range(1, int(count) + 1)
    )
    known = set(names)
    return [name for name in wanted if name not in known]


def _is_beside(path: Path) -> bool:
    """Whether `path` is a step of a run: then a file beside it is an export."""
    try:
        if any((path / name).exists() for name in _IN_STEPS):
            return True
        return (
            _survey.is_usual_name(path.name)
            and path.is_file()
            and (_scan.first_keys(path) is not None or _scan.begins_with_record(path))
        )
    except PermissionError:
        return _survey.is_usual_name(path.name)


def read(path: Path, *, step: int | None, resolve: _structure.Resolve) -> Stored:
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
        main = _inside(path, found.name)
    stamp = _storage.stamp(main)
    files: dict[str, Stamp] = {}
    tensors: dict[str, Tensor] = {}
    metadata: Mapping[str, JSON]
    if main.name.endswith(INDEX_SUFFIX):
        metadata = _read_shards(main, tensors, files)
    else:
        header = _read_header(main)
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
            total_bytes=sum(_layout.stored_bytes(info) for info in described.infos),
            lineage=described.lineage,
            transforms=described.transforms,
        ),
        table,
        described.structure,
        frozenset(unknown),
        stamp=stamp,
    )


def _check_shards(path: Path, names: list[str]) -> None:
    """Refuses shards that are not all there and that have no index."""
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
    resolve: _structure.Resolve,
    unknown: set[str],
) -> Described:
    ours = metadata.get(OURS)
    if isinstance(ours, str):
        try:
            return _safetensors_leaves.describe_own(ours, tensors, resolve, unknown)
        except ValueError as error:
            raise _damaged(path, error) from None
    described, is_split = _safetensors_leaves.describe_foreign(tensors, metadata)
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
            span = _spans.Span(
                file.path,
                place.offset,
                place.shape,
                place.dtype,
                identity=file.identity,
            )
            stored = StoredLeaf(path, info, functools.partial(_spans.opened, (span,)))
        table[info.path] = Leaf(info, (stored,))
    return table


def _damaged(path: Path, error: object) -> errors.DamagedCheckpointError:
    return errors.DamagedCheckpointError(
        f"{path} is no intact safetensors checkpoint: {str(error)[:300]};"
        " get it again from where it came"
    )


# ---- files ----------------------------------------------------------------------


def _read_header(path: Path) -> Header:
    """Reads the header of one file, limits first.

    Raises:
        DamagedCheckpointError: It is missing, malformed, or the file is cut short.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would block
            raise ValueError("it is no plain file")
        with _storage.opened(path) as file:
            status = os.fstat(file.fileno())
            start = file.read(8)
            if start == _LFS[:8] and start + file.read(len(_LFS) - 8) == _LFS:
                raise _pointer(path)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > status.st_size - 8:
                raise ValueError(
                    f"its header is said to have {length} bytes, the file has"
                    f" {status.st_size}"
                )
            if length > _safetensors_json.MAX_HEADER_BYTES:
                raise ValueError(
                    f"its header has {length} bytes, and at most"
                    f" {_safetensors_json.MAX_HEADER_BYTES} are read"
                )
            text = file.read(length)
        if len(text) != length:
            raise ValueError("it was cut short while it was read")
        return _safetensors_json.parse_header(text, file_size=status.st_size)
    except errors.CheckpointFormatError:
        raise
    except _safetensors_json.NotReadError as error:
        rows = [
            f"{_safetensors_json.short(name)}: {dtype}"
            for name, dtype in error.tensors.items()
        ]
        raise errors.CheckpointFormatError(
            f"{path} has {len(rows)} tensors of element types that are not read here:\n"
            f"{errors.rows(rows)}\nDequantize them with the program that wrote them,"
            " and save them again."
        ) from None
    except PermissionError:
        raise
    except (ValueError, OSError) as error:
        raise _damaged(path, _words(error)) from None


def _read_shards(
    index_file: Path, tensors: dict[str, Tensor], files: dict[str, Stamp]
) -> Mapping[str, JSON]:
    """Reads an index and the headers of its files, and tells the index's metadata."""
    try:
        if not stat.S_ISREG(index_file.stat().st_mode):
            raise ValueError("it is no plain file")
        text = _storage.read(index_file, max_bytes=_safetensors_json.MAX_HEADER_BYTES)
        if text.startswith(_LFS):
            raise _pointer(index_file)
        index = _safetensors_json.parse_index(text)
    except errors.CheckpointFormatError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise _damaged(index_file, _words(error)) from None
    faults = []
    unlisted = 0
    headers: dict[str, Header] = {}
    stamps: dict[str, Stamp] = {}
    for name in sorted(set(index.files.values())):
        shard = _inside(index_file.parent, name)
        stamps[name] = _storage.stamp(shard)
        headers[name] = _read_header(shard)
        listed = [index.files.get(tensor) == name for tensor in headers[name].tensors]
        unlisted += listed.count(False)
        try:
            _safetensors_json.check_count(len(index.files) + unlisted)
        except ValueError as error:
            raise _damaged(index_file, error) from None
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


def _inside(directory: Path, name: str) -> Path:
    """The file `name` in `directory`.

    Raises:
        DamagedCheckpointError: It is a link to what lies outside, unless that is where
            the cache of Hugging Face's hub has the files of the directory.
    """
    path = directory / name
    try:
        real = path.resolve(strict=True)
    except PermissionError:
        raise
    except (OSError, RuntimeError) as error:
        raise _damaged(path, _words(error)) from None
    home = directory.resolve()
    snapshots = next((each for each in home.parents if each.name == "snapshots"), None)
    blobs = None if snapshots is None else snapshots.parent / "blobs"
    if real.parent not in (home, blobs):
        raise errors.DamagedCheckpointError(
            f"{path} is a link to {real}, outside of its directory: copy that file here"
        )
    return path


def _pointer(path: Path) -> errors.CheckpointFormatError:
    return errors.CheckpointFormatError(
        f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull there"
    )


def _words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
