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

_OWN = frozenset(
    (
        *(_orbax.STATE, _orbax.DATASET, _orbax.METRICS),
        *(_orbax_json.MANIFEST, _orbax_disk.CHECKPOINT, "commit_success.txt"),
    )
)
_FILES_OF_ORBAX = _OWN | {
    *(_orbax_disk.TREE, _orbax_disk.AGGREGATE, _orbax_disk.STRINGS),
    *("_sharding", "manifest.ocdbt", "orbax.checkpoint"),
    *(".zarray", "zarr.json"),  # of an array without a name
}


_DIRECTORIES_OF_ORBAX = frozenset(("array_metadatas", "d", "metadata"))
_MARKS_OF_ORBAX = re.compile(
    r"_METADATA|checkpoint|\.zarray|zarr\.json|manifest\.ocdbt|metadata|metrics"
    r"|process_\d+-of-\d+\.json"
)
"""A file of which one is in every item and every array."""


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
    if not _storage.lexists(final):
        return
    is_directory = final.is_dir() and not final.is_symlink()
    if is_directory and not any(final.iterdir()):
        return
    if not overwrite:
        raise errors.CheckpointExistsError(
            f"{final} exists: choose another path, or pass overwrite=True"
        )
    foreign = None
    if is_directory:
        foreign = _foreign(final)
    elif not final.is_symlink() and formats.recognises(final):
        foreign = []
    if foreign is None:
        raise errors.CheckpointExistsError(
            f"{final} exists and is no checkpoint, so it is not overwritten:"
            " remove it yourself, or choose another path"
        )
    if foreign:
        raise errors.CheckpointExistsError(
            f"{final} is no checkpoint alone, so it is not overwritten: what else is in"
            f" it would be lost:\n{errors.rows(foreign)}\nMove that away, or choose"
            " another path."
        )


def _foreign(directory: Path) -> list[str] | None:
    """What in a directory is not of the checkpoint there; None if there is none."""
    try:
        is_orbax = _orbax.is_whole(directory)
    except errors.CheckpointFormatError:  # several items
        is_orbax = True
    found = sorted(directory.iterdir())
    if is_orbax and (directory / _orbax_json.MANIFEST).is_file():
        return [path.name for path in found if not _is_own(path.name)]
    if is_orbax:
        return [path.name for path in found if not _is_of_orbax(path)]
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


def _is_own(name: str) -> bool:
    return name in _OWN or _marks.is_mark(name)


def _is_of_orbax(path: Path) -> bool:
    if path.is_dir():
        return not path.is_symlink() and (
            path.name in _DIRECTORIES_OF_ORBAX
            or path.name.startswith("ocdbt.process_")
            or any(map(_MARKS_OF_ORBAX.fullmatch, _storage.names(path)))
        )
    return path.name in _FILES_OF_ORBAX or _marks.is_mark(path.name)


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
