"""Which files belong to a checkpoint: those of one that is replaced or read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from flaxckpt import (
    _marks,
    _remote,
    _storage,
    _unfinished,
    errors,
    formats,
)
from flaxckpt.formats import (
    _orbax,
    _orbax_disk,
    _orbax_json,
    _safetensors_json,
    _t5x,
)

# ---- what is replaced ------------------------------------------------------------


_MAX_FILES = 200_000
"""Files of one source that are watched."""

_DIRECTORIES = frozenset((_orbax.STATE, _orbax.DATASET, _orbax.METRICS))
_FILES = frozenset((_orbax_json.MANIFEST, _orbax_disk.CHECKPOINT, "commit_success.txt"))
_FILES_OF_ORBAX = _FILES | {
    *(_orbax_disk.TREE, _orbax_disk.AGGREGATE, _orbax_disk.STRINGS),
    *(_orbax_disk.SHARDING, _orbax_disk.JSON_ITEM, "manifest.ocdbt"),
    *("orbax.checkpoint", ".zarray", "zarr.json"),  # of an array without a name
}
_DIRECTORIES_OF_ORBAX = _DIRECTORIES | {"array_metadatas", "d", "metadata"}
_MARKS_OF_ORBAX = re.compile(
    r"_METADATA|checkpoint|\.zarray|zarr\.json|manifest\.ocdbt|metadata|metrics"
    r"|process_\d+-of-\d+\.json"
)
"""A file of which one is in every item and every array."""

_OF_AN_ARRAY = re.compile(r"zarr\.json|\.zarray|c|(?:c\.)?\d+(?:\.\d+)*")
"""What is in the directory of an array of ours: metadata, and chunks."""

_OF_A_STATE = re.compile(
    rf"{_orbax_disk.TREE}|{_orbax_disk.SHARDING}|{re.escape(_orbax_disk.STRINGS)}"
    r"|array_metadatas|d|manifest\.ocdbt|ocdbt\.process_.+"
)
_OF_METRICS = re.compile(rf"{_orbax.METRICS}|digests")
_OF_A_DATASET = re.compile(r"metadata|process_\d+-of-\d+\.json|shard_state_\d+\.json")
_OF_NFS = re.compile(r"\.nfs[0-9a-f]{16,}")
"""How a client of NFS calls a file that is deleted, and open still."""


def check_free(final: Path, *, overwrite: bool) -> None:
    """Refuses a path that is taken.

    Only a checkpoint is replaced, and a directory only if nothing else is in it.

    Raises:
        OptionError: It lies below a file.
        CheckpointExistsError: Something is there that may not be replaced.
    """
    there = (path for path in final.parents if _is_taken(path))
    above = next(there, None)  # in a store, there may be nothing
    if above is not None and not above.is_dir():
        raise errors.OptionError(
            f"{final} cannot be made: {above} is a file, not a directory"
        )
    if not _storage.lexists(final) or _is_empty(final):
        return
    if not overwrite:
        raise errors.CheckpointExistsError(
            f"{final} exists: choose another path, or pass overwrite=True"
        )
    check_replaceable(final, of_any_format=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def check_replaceable(final: Path, *, of_any_format: bool = False) -> None:
    """Refuses to replace what is no checkpoint, or a directory with other files in it.

    Args:
        final: What is there.
        of_any_format: Whether to replace checkpoints of other formats than our own and
            Orbax's, too.

    Raises:
        CheckpointExistsError: It may not be replaced.
    """
    foreign = None
    if final.is_dir() and not final.is_symlink():
        foreign = _foreign(final, of_any_format=of_any_format)
    elif of_any_format and not final.is_symlink() and formats.recognises(final):
        foreign = []
    if foreign is None:
        raise errors.CheckpointExistsError(
            f"{final} exists and is no checkpoint, so it is not overwritten:"
            " remove it yourself, or choose another path"
        )
    if foreign:
        raise errors.CheckpointExistsError(
            f"{final} is not overwritten: it holds files that are not the checkpoint's"
            f" and would be lost:\n{errors.rows(foreign)}\nMove them elsewhere, then"
            " try again, or choose another path."
        )


def _foreign(directory: Path, *, of_any_format: bool) -> list[str] | None:
    """What in a directory is not of the checkpoint there; None if there is none."""
    found = sorted(directory.iterdir())
    if _is_orbax(directory):
        if (directory / _orbax_json.MANIFEST).is_file():
            return list(_foreign_to_own(found))
        items = _orbax_disk.item_names(directory)
        return [
            path.name
            for path in found
            if not (_is_of_orbax(path) or (path.name in items and path.is_dir()))
        ]
    if not of_any_format:
        return None
    if _t5x.recognises(directory):
        return [path.name for path in found if not _is_of_t5x(path)]
    files = _of_safetensors(directory, [path.name for path in found])
    if not files:
        return None
    return [
        path.name
        for path in found
        if path.name not in files or not path.is_file() or path.is_symlink()
    ]


def _is_orbax(directory: Path) -> bool:
    """Whether a checkpoint of ours or Orbax's is there, or was, if it is damaged."""
    names = (_marks.DAMAGED, _orbax_json.MANIFEST, _orbax_disk.CHECKPOINT)
    if any(_storage.lexists(directory / name) for name in names):
        return True
    try:
        return _orbax.is_whole(directory)
    except errors.CheckpointFormatError:  # several items, or none of arrays
        return True


def _foreign_to_own(found: Iterable[Path]) -> Iterator[str]:
    """What in a directory is not of our checkpoint there."""
    for path in found:
        if path.is_symlink() or not path.is_dir():
            if not _is_own_file(path) or path.is_symlink():
                yield path.name
        elif path.name == _orbax.STATE:
            yield from _foreign_to_state(path)
        elif path.name == _orbax.METRICS:
            yield from _others(path, _OF_METRICS)
        elif path.name == _orbax.DATASET:
            yield from _others(path, _OF_A_DATASET)
        elif not _is_leftover_or_mark(path):
            yield path.name


def _is_own_file(path: Path) -> bool:
    return path.name in _FILES or _is_passing(path.name)


def _is_passing(name: str) -> bool:
    """Whether it is a mark, or of somebody who reads or changes the checkpoint."""
    return (
        _marks.is_mark(name)
        or _storage.is_replacing(name)
        or _OF_NFS.fullmatch(name) is not None
    )


def _is_leftover_or_mark(directory: Path) -> bool:
    """Whether a directory is what a crash has left, or counts as a mark by its name."""
    if _unfinished.TEMPORARY in directory.name:
        return True
    return _is_passing(directory.name) and not _storage.names(directory)


def _foreign_to_state(state: Path) -> Iterator[str]:
    for path in sorted(state.iterdir()):
        if _OF_A_STATE.fullmatch(path.name) or _is_passing(path.name):
            continue
        if path.is_symlink() or not path.is_dir():
            # An array without a name has its files right here.
            if path.is_symlink() or not _OF_AN_ARRAY.fullmatch(path.name):
                yield f"{state.name}/{path.name}"
        else:
            others = list(_others(path, _OF_AN_ARRAY))
            if others and len(others) == len(_storage.names(path)):
                yield f"{state.name}/{path.name}"
            else:
                yield from (f"{state.name}/{name}" for name in others)


def _others(directory: Path, known: re.Pattern[str]) -> Iterator[str]:
    for name in sorted(_storage.names(directory)):
        if not (known.fullmatch(name) or _is_passing(name)):
            yield f"{directory.name}/{name}"


def _is_of_orbax(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir():
        return (
            path.name in _DIRECTORIES_OF_ORBAX
            or path.name.startswith("ocdbt.process_")
            or _is_leftover_or_mark(path)
            or any(map(_MARKS_OF_ORBAX.fullmatch, _storage.names(path)))
        )
    return path.name in _FILES_OF_ORBAX or _is_passing(path.name)


def _is_of_t5x(path: Path) -> bool:
    if path.is_dir():
        return (path / ".zarray").is_file() and not path.is_symlink()
    return path.name in (_orbax_disk.AGGREGATE, _marks.PIN)


def _of_safetensors(directory: Path, names: Iterable[str]) -> set[str]:
    """The files of the checkpoint in a directory; empty if there is no single one."""
    names = list(names)
    suffix = _safetensors_json.INDEX_SUFFIX
    indices = [name for name in names if name.endswith(suffix)]
    if len(indices) > 1:
        return set()
    if indices:
        return {indices[0], *_shards(directory / indices[0])}
    files = [name for name in names if name.endswith(_safetensors_json.SUFFIX)]
    return set(files) if len(files) == 1 else set()


def _shards(index: Path) -> set[str]:
    """Names of the files that an index is of; none if it cannot be read."""
    try:
        text = _storage.read(index, max_bytes=_safetensors_json.MAX_HEADER_BYTES)
        return set(_safetensors_json.parse_index(text).files.values())
    except (OSError, ValueError):
        return set()


# ---- what is read ----------------------------------------------------------------


def stamps(source: Path) -> tuple[_storage.Stamp, ...]:
    """All files of a checkpoint as they are now, in order; at most a fixed number."""
    found: list[_storage.Stamp] = []
    for path in _files(source):
        if len(found) == _MAX_FILES:
            break
        if not _marks.is_mark(path.name):
            found.append(_storage.stamp(path))
    return tuple(found)


def _files(source: Path) -> Iterator[Path]:
    if _remote.is_remote(source):
        yield from source.rglob("*")
        return
    if source.is_dir():
        for directory, directories, names in os.walk(source):
            directories.sort()
            for name in sorted(names):
                yield Path(directory, name)
        return
    yield source
    if source.name.endswith(_safetensors_json.INDEX_SUFFIX):
        for name in sorted(_shards(source)):
            yield source.parent / name
    elif _t5x.recognises(source):
        for path in sorted(source.resolve().parent.iterdir()):
            if path.is_dir() and _is_of_t5x(path):
                yield from _files(path)


def changed(found: Iterable[_storage.Stamp]) -> list[str]:
    """Which files are not any more what they were."""
    return [str(stamp.path) for stamp in found if not stamp.is_current()]


def check_apart(
    final: Path, sources: Iterable[Path], files: Iterable[_storage.Stamp]
) -> None:
    """Refuses a path that is, lies in or holds what is read, whatever it is called.

    Args:
        final: What is to be made.
        sources: Checkpoints that are read.
        files: Files of them.

    Raises:
        OptionError: It does.
    """
    made = _real(final)
    for source in sources:
        real = _real(source)
        if made == real or _holds(made, real) or _holds(real, made):
            raise errors.OptionError(
                f"{final} lies in the checkpoint {source}, or that in it: choose a path"
                " beside it"
            )
    for stamp in files:
        real = _real(stamp.path)
        if made == real or _holds(made, real):
            raise errors.OptionError(
                f"{final} is, or holds, {stamp.path}, which is read: choose another"
                " path"
            )


def _is_taken(path: Path) -> bool:
    return path.is_file() if _remote.is_remote(path) else os.path.lexists(path)


def _real(path: Path) -> str:
    return str(path) if _remote.is_remote(path) else os.path.realpath(path)


def _holds(directory: str, path: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")
