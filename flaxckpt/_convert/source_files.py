"""Files of a checkpoint that is converted: unchanged, and apart from the target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from flaxckpt import _steps, _storage, errors
from flaxckpt._checkpoint.overwrite import shards
from flaxckpt.formats import _safetensors, _t5x

_MAX_FILES = 200_000
"""Files of one source that are watched."""


def stamps(source: Path) -> tuple[_storage.local.Stamp, ...]:
    """All files of a checkpoint as they are now, in order; at most a fixed number."""
    found: list[_storage.local.Stamp] = []
    for path in _files(source):
        if len(found) == _MAX_FILES:
            break
        if not _steps.markers.is_mark(path.name):
            found.append(_storage.local.stamp(path))
    return tuple(found)


def _files(source: Path) -> Iterator[Path]:
    storage = _storage.of(source)
    if source.is_dir() or not storage.has_directories:
        for name in storage.files_below(source):
            yield source / name
        return
    yield source
    if source.name.endswith(_safetensors.header.INDEX_SUFFIX):
        for name in sorted(shards(source)):
            yield source.parent / name
    elif _t5x.recognises(source):
        for path in sorted(source.resolve().parent.iterdir()):
            if (path / ".zarray").is_file() and not path.is_symlink():
                yield from _files(path)


def changed(found: Iterable[_storage.local.Stamp]) -> list[str]:
    """Which files are not any more what they were."""
    return [str(stamp.path) for stamp in found if not stamp.is_current()]


def check_apart(
    final: Path, sources: Iterable[Path], files: Iterable[_storage.local.Stamp]
) -> None:
    """Refuses a path that is, lies in or holds what is read, whatever it is called.

    Args:
        final: What is to be made.
        sources: Checkpoints that are read.
        files: Files of them.

    Raises:
        OptionError: It does.
    """
    made = _storage.of(final).real_path(final)
    for source in sources:
        real = _storage.of(source).real_path(source)
        if made == real or _holds(made, real) or _holds(real, made):
            raise errors.OptionError(
                f"{final} lies in the checkpoint {source}, or that in it: choose a path"
                " beside it"
            )
    for stamp in files:
        real = _storage.of(stamp.path).real_path(stamp.path)
        if made == real or _holds(made, real):
            raise errors.OptionError(
                f"{final} is, or holds, {stamp.path}, which is read: choose another"
                " path"
            )


def _holds(directory: str, path: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")
