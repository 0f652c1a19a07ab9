"""A step in the directory of a run that is the copy of one in its staging directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from flaxckpt import (
    _audit,
    _belongings,
    _commit,
    _marked,
    _marks,
    _remote,
    _staging,
    _storage,
    _threads,
    _unfinished,
    errors,
)
from flaxckpt.formats import _orbax

_COPYING_THREADS = 8


_MAX_MARKER_BYTES = 2**16


def is_same(path: Path, final: Path) -> bool:
    """Whether the directory has exactly this step, whole or not."""
    try:
        there = _storage.read(final / _marked.MARKER, max_bytes=_MAX_MARKER_BYTES)
    except (FileNotFoundError, errors.DamagedCheckpointError):
        return False
    return there == (path / _marked.MARKER).read_bytes()


def is_whole(final: Path) -> bool:
    """Whether the step that the directory has is whole, and not marked as damaged."""
    try:
        _audit.check(final)
    except (errors.DamagedCheckpointError, errors.CheckpointFormatError):
        return False
    return not _marks.is_damaged(final)


def make(path: Path, final: Path, *, overwrite: bool) -> int:
    """Makes a step of the directory of one in staging; returns its size in bytes."""
    overwrite = overwrite or _marks.is_damaged(final)
    if overwrite and _storage.lexists(final):
        _belongings.check_replaceable(final)
    is_temporary = _marks.is_temporary(path)
    marks = _marks.of_new(final, temporary=is_temporary)
    if _marks.is_pinned(path):
        marks |= _marks.of_new(path, temporary=is_temporary)
    files = [
        file for file in path.rglob("*") if file.is_file() and _belongs(path, file)
    ]
    if _remote.is_remote(final):
        return _staging.upload(
            path,
            final,
            overwrite=overwrite,
            files=files,
            marks=marks,
            keep=lambda name: name == _marks.PIN,
        )
    with _unfinished.made(final) as temporary:
        for directory in sorted({file.parent for file in files}):
            (temporary / directory.relative_to(path)).mkdir(parents=True, exist_ok=True)

        def copy(file: Path) -> None:
            shutil.copyfile(file, temporary / file.relative_to(path))

        _threads.each(copy, files, threads=_COPYING_THREADS)
        _commit.write_new(temporary, marks)
        size = _storage.sync_tree(temporary)
        _commit.name(temporary, final, overwrite=overwrite)
        return size


def _belongs(path: Path, file: Path) -> bool:
    """Whether a file is of the step itself, and neither a mark nor a leftover."""
    name = file.relative_to(path).as_posix()
    where = name.rpartition("/")[0]
    is_leftover = where in ("", _orbax.METRICS) and _storage.is_replacing(file.name)
    is_mark = not where and _marks.is_mark(name) and not _marks.goes_along(name)
    return not (is_leftover or is_mark)
