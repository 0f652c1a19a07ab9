"""Copies, in the run directory, of steps in the staging directory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from flaxckpt import _checkpoint, _formats, _steps, _storage, _util, errors
from flaxckpt._run.tiers import peer_copies
from flaxckpt._run.tiers.parts import Held, find_held, find_parts

if TYPE_CHECKING:
    from flaxckpt._distributed.operation import Operation

_log = logging.getLogger(__name__)

_THREADS = 8
"""Files copied at a time."""

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


def make(
    path: Path,
    final: Path,
    *,
    overwrite: bool,
    mode: int | None = None,
    operation: Operation | None = None,
) -> int:
    """Copies a step from staging to the run directory; returns its size in bytes.

    Args:
        path: The step in staging.
        final: The path of the step in the run directory.
        overwrite: Whether to replace an existing step.
        mode: Mode of the directories, from which the mode of the files follows; None
            for the umask's.
        operation: An operation of all processes, each of which copies parts of the
            step; None for a step without parts.

    Raises:
        DamagedCheckpointError: The step is damaged here, or no process has a part.
    """
    if operation is None and (why := _checkpoint.verify.find_damage(path, None)):
        raise errors.DamagedCheckpointError(f"{path} is damaged: {why}")
    if _steps.markers.is_damaged(final):
        overwrite = True
        _checkpoint.overwrite.set_aside(final)
    if overwrite and _storage.of(final).exists(final):
        _checkpoint.overwrite.check_replaceable(final)
    is_temporary = _steps.markers.is_temporary(path)
    marks = _steps.markers.for_new_step(final, temporary=is_temporary)
    marks |= _steps.markers.pin_of(path)
    with _checkpoint.commit.replacing(final, overwrite=overwrite, mode=mode) as new:
        absent = _assign(path, new.directory, operation)
        try:
            marker = new.copy(
                path, lambda name: _belongs(name) and str(name) not in absent
            )
            if operation is not None:
                operation.gather("copied")
        except BaseException as error:
            if operation is not None:  # others may still write there
                operation.fail(error, stage="copied")
            raise
        new.write(marks)
        return new.commit(marker).size


def _assign(path: Path, target: Path, operation: Operation | None) -> frozenset[str]:
    """Assigns the parts of a step to processes; returns the files of other processes.

    Raises:
        DamagedCheckpointError: No process has a part.
    """
    held = find_held(path)
    if held is None or _steps.markers.read_parts(path) is None:
        return frozenset()
    parts = find_parts(path)
    rows = [json.dumps(held.parts)]
    if operation is not None:
        if not peer_copies.has_metadata(path):
            raise errors.DamagedCheckpointError(f"the metadata of {path} is damaged")
        operation.first("next", lambda: json.dumps([path.name, held.save]))
        rows = operation.gather("held", json.dumps(_find_sound(path, held)))
    holders = [{*json.loads(row)} for row in rows]
    assigned: dict[int, list[str]] = {n: [] for n in range(len(holders))}
    lost = []
    for part, files in enumerate(parts.files):
        have = [n for n, here in enumerate(holders) if part in here]
        if not have:
            lost.append(f"process {part}")
            continue
        assigned[part if part in have else have[0]] += files
    if lost:
        raise errors.DamagedCheckpointError(
            f"the parts of {errors.first_few(lost, 8)} of {path} are whole at no"
            " process"
        )
    if operation is not None:
        operation.first("copy", lambda: json.dumps([str(target), assigned]))
    return frozenset(name for n in assigned if n for name in assigned[n])


def _find_sound(path: Path, held: Held) -> list[int]:
    """Returns the parts here whose files are as they were written."""
    try:
        files = find_parts(path).files
        names = [name for part in held.parts for name in files[part]]
        faults = _checkpoint.verify.find_faults(path, names)
    except errors.DamagedCheckpointError as error:
        _log.warning("nothing of %s is uploaded from here: %s", path, error)
        return []
    for name, why in faults.items():
        _log.warning("%s is damaged, and not uploaded: %s", path / name, why)
    return [part for part in held.parts if faults.keys().isdisjoint(files[part])]


def copy_part(
    staging: Path, operation: Operation
) -> tuple[Path, _steps.markers.UploadMarker | None]:
    """Copies the files that process 0 assigns to this process.

    Args:
        staging: The staging directory of this process.
        operation: The operation that process 0 has called.

    Returns:
        The step, and its upload marker before; None if another save is there.
    """
    name, save = json.loads(operation.first("next", str))
    path = staging / str(name)
    held = find_held(path)
    is_same = held is not None and held.save == save
    marker = _steps.markers.read_upload_marker(path) if is_same else None
    sound = _find_sound(path, held) if held is not None and is_same else ()
    operation.report("held", json.dumps(sound))
    text, assigned = json.loads(operation.first("copy", str))
    target = _storage.paths.resolve(text)
    names = assigned[str(operation.index)]

    def copy(name: str) -> None:
        operation.check()
        _storage.files.make_parents(target, name)
        _storage.of(target).copy_file(path / name, target / name)

    _util.threads.each(copy, names, threads=_THREADS)
    directories = {str(Path(name).parent) for name in names}
    paths = [target / name for name in (*names, *directories)]
    _storage.of(target).sync_files(paths, _THREADS)
    operation.report("copied")
    operation.first("committed", str, is_patient=True)
    return path, marker


def _belongs(file: Path) -> bool:
    """Returns False for a marker or a leftover, by its path in the step."""
    where, name = str(file.parent), file.name
    if where in (".", _formats.items.METRICS) and _storage.files.is_temporary(name):
        return False
    is_mark = where == "." and _steps.markers.is_marker(name)
    return not is_mark or _steps.markers.is_copied(name)
