"""Source files of a conversion: checks for changes and for overlap with the target."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from flaxckpt import _steps, _storage, errors
from flaxckpt._formats import recognise, shards

_MAX_FILES = 200_000
"""Maximum number of files to watch in a source."""


def stamps(source: Path) -> tuple[_storage.Stamp, ...]:
    """Returns the stamps of all files of a checkpoint, in order, up to a limit."""
    files = (path for path in _files(source) if not _steps.markers.is_marker(path.name))
    return tuple([_storage.stamp(path) for path in itertools.islice(files, _MAX_FILES)])


def _files(source: Path) -> Iterator[Path]:
    if _storage.of(source).costs_requests or source.is_dir():
        for name in _storage.listing.files_below(source):
            yield source / name
        return
    yield source
    if found := sorted(shards.names(source)):
        for name in found:
            yield source.parent / name
    elif recognise.t5x(source):
        for path in sorted(source.resolve().parent.iterdir()):
            if (path / ".zarray").is_file() and not path.is_symlink():
                yield from _files(path)


def changed(stamps: Iterable[_storage.Stamp]) -> list[str]:
    return [str(stamp.path) for stamp in stamps if not stamp.is_current()]


def check_apart(
    final: Path, sources: Iterable[Path], files: Iterable[_storage.Stamp]
) -> None:
    """Raises OptionError if the target is a source, or inside or above one."""
    target = _storage.paths.real(final)
    for source in sources:
        real = _storage.paths.real(source)
        if target == real or _contains(target, real) or _contains(real, target):
            raise errors.OptionError(
                f"{final} is inside the checkpoint {source}, or contains it: choose"
                " a path beside it"
            )
    for stamp in files:
        real = _storage.paths.real(stamp.path)
        if target == real or _contains(target, real):
            raise errors.OptionError(
                f"{final} is or contains the source file {stamp.path}: choose another"
                " path"
            )


def _contains(directory: str, path: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")
