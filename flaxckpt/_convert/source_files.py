"""Source files of a conversion: checks for changes and for overlap with the target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from flaxckpt import _steps, _storage, errors
from flaxckpt.formats import _safetensors, _t5x

_MAX_FILES = 200_000
"""Maximum number of files to watch in a source."""


def stamps(source: Path) -> tuple[_storage.Stamp, ...]:
    """Returns the stamps of all files of a checkpoint, in order, up to a limit."""
    found: list[_storage.Stamp] = []
    for path in _files(source):
        if len(found) == _MAX_FILES:
            break
        if not _steps.markers.is_mark(path.name):
            found.append(_storage.stamp(path))
    return tuple(found)


def _files(source: Path) -> Iterator[Path]:
    storage = _storage.of(source)
    if source.is_dir() or not storage.has_directories:
        for name in storage.files_below(source):
            yield source / name
        return
    yield source
    if source.name.endswith(_safetensors.header.INDEX_SUFFIX):
        for name in sorted(_safetensors.reader.shard_names(source)):
            yield source.parent / name
    elif _t5x.recognises(source):
        for path in sorted(source.resolve().parent.iterdir()):
            if (path / ".zarray").is_file() and not path.is_symlink():
                yield from _files(path)


def changed(found: Iterable[_storage.Stamp]) -> list[str]:
    """Returns the paths of files changed since their stamps."""
    return [str(stamp.path) for stamp in found if not stamp.is_current()]


def check_apart(
    final: Path, sources: Iterable[Path], files: Iterable[_storage.Stamp]
) -> None:
    """Raises OptionError if the target overlaps a source, after resolving symlinks.

    Args:
        final: Path of the new checkpoint.
        sources: Source checkpoints.
        files: Files of the source checkpoints.

    Raises:
        OptionError: The target is a source, or is inside or above a source.
    """
    made = _storage.of(final).real_path(final)
    for source in sources:
        real = _storage.of(source).real_path(source)
        if made == real or _holds(made, real) or _holds(real, made):
            raise errors.OptionError(
                f"{final} is inside the checkpoint {source}, or contains it: choose"
                " a path beside it"
            )
    for stamp in files:
        real = _storage.of(stamp.path).real_path(stamp.path)
        if made == real or _holds(made, real):
            raise errors.OptionError(
                f"{final} is or contains the source file {stamp.path}: choose another"
                " path"
            )


def _holds(directory: str, path: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")
