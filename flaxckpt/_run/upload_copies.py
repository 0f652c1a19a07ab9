"""Copies, in the run directory, of steps in the staging directory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from flaxckpt import _checkpoint, _formats, _steps, _storage, errors

Relation: TypeAlias = Literal["none", "same", "other", "damaged"]


def compare(path: Path, final: Path) -> Relation:
    """Compares a step in staging with the run directory's step of the same number.

    Steps are the same if their commit markers, with the manifest's digest, are equal.

    Args:
        path: The step in staging.
        final: The path of the step in the run directory.

    Returns:
        `none`: `final` is not a checkpoint, or the rest of a save. `same`: `final` is
        this step, complete or not. `other`: `final` is another step, of another writer
        or a later save. `damaged`: `final` is a step with a changed commit marker or
        manifest.

    Raises:
        OSError: The run directory cannot be read.
    """
    marker = _content(final / _storage.transaction.MARKER)
    if marker is not None and marker == _content(path / _storage.transaction.MARKER):
        return "same"
    manifest = _content(final / _formats.orbax_json.MANIFEST)
    if marker is None and _storage.transaction.is_unfinished(final):
        return "none"
    if marker is None and manifest is None:
        is_there = _storage.of(final).exists(final)
        return "other" if is_there and _is_foreign(final) else "none"
    is_intact = (
        manifest is not None
        and marker == _formats.native_contents.commit_marker(manifest)
    )
    return "other" if is_intact else "damaged"


def _content(file: Path) -> bytes | None:
    """Returns the content of a small file; None if missing or unsuitable."""
    try:
        return _storage.of(file).read(file, max_bytes=_formats.orbax_json.MAX_BYTES)
    except (
        FileNotFoundError,
        NotADirectoryError,
        errors.DamagedCheckpointError,
        ValueError,
    ):
        return None


def _is_foreign(final: Path) -> bool:
    """Returns True for a checkpoint of another library."""
    try:
        return bool(_formats.recognises(final))
    except (errors.CheckpointFormatError, errors.DamagedCheckpointError):
        return False


def is_whole(final: Path, step: int) -> bool:
    """Returns True if `final` is the complete `step`, and not marked as damaged."""
    try:
        _checkpoint.file_sizes.check(final, step)
    except (errors.DamagedCheckpointError, errors.CheckpointFormatError):
        return False
    return not _steps.markers.is_damaged(final)


def make(path: Path, final: Path, *, overwrite: bool, mode: int | None = None) -> int:
    """Copies a step from staging to the run directory; returns its size in bytes.

    Args:
        path: The step in staging.
        final: The path of the step in the run directory.
        overwrite: Whether to replace an existing step.
        mode: Mode of the directories, from which the mode of the files follows; None
            for the umask's.
    """
    if _steps.markers.is_damaged(final):
        overwrite = True
        _checkpoint.overwrite.set_aside(final)
    if overwrite and _storage.of(final).exists(final):
        _checkpoint.overwrite.check_replaceable(final)
    is_temporary = _steps.markers.is_temporary(path)
    marks = _steps.markers.for_new_step(final, temporary=is_temporary)
    marks |= _steps.markers.pin_of(path)
    with _checkpoint.commit.replacing(final, overwrite=overwrite, mode=mode) as new:
        marker = new.copy(path, _belongs)
        new.write(marks)
        return new.commit(marker).size


def _belongs(file: Path) -> bool:
    """Returns False for a marker or a leftover, by its path in the step."""
    where, name = str(file.parent), file.name
    if where in (".", _formats.items.METRICS) and _storage.files.is_temporary(name):
        return False
    is_mark = where == "." and _steps.markers.is_marker(name)
    return not is_mark or _steps.markers.is_copied(name)
