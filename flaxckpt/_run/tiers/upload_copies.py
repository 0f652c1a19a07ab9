"""Copies, in the run directory, of steps in the staging directory."""

from __future__ import annotations

import filecmp
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from flaxckpt import _checkpoint, _formats, _steps, _storage, _util, errors
from flaxckpt._run.tiers import part_copies
from flaxckpt._run.tiers.parts import (
    check_save,
    find_held,
    find_parts,
    read_held,
    read_identity,
)

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
        _checkpoint.completeness.check(final, step)
    except (errors.DamagedCheckpointError, errors.CheckpointFormatError):
        return False
    return not _steps.markers.is_damaged(final)


def make(
    path: Path,
    final: Path,
    *,
    overwrite: bool,
    earlier: Path | None = None,
    mode: int | None = None,
    operation: Operation | None = None,
) -> int:
    """Copies a step from staging to the run directory; returns its size in bytes.

    Args:
        path: The step in staging.
        final: The path of the step in the run directory.
        overwrite: Whether to replace an existing step.
        earlier: Another step of the run directory, for hard links to files of arrays
            that are equal; None for none.
        mode: Mode of the directories, from which the mode of the files follows; None
            for the umask's.
        operation: An operation of all processes, each of which copies parts of the
            step; None for a step without parts.

    Raises:
        DamagedCheckpointError: The step is damaged here, or no process has a part.
        ReplacedError: Another process has replaced the step meanwhile.
    """
    save = read_identity(path)
    names: Collection[str] = ()
    if operation is None:
        if why := _checkpoint.verify.find_damage(path, None):
            raise errors.DamagedCheckpointError(f"{path} is damaged: {why}")
        if (held := read_held(path)) is not None:
            known = find_parts(path)
            _assign(path, range(len(known.files)), [held.parts])
            names = known.sizes
    if _steps.markers.is_damaged(final):
        overwrite = True
        _checkpoint.overwrite.set_aside(final)
    if overwrite and _storage.of(final).exists(final):
        _checkpoint.overwrite.check_replaceable(final)
    is_temporary = _steps.markers.is_temporary(path)
    marks = _steps.markers.for_new_step(final, temporary=is_temporary)
    marks |= _steps.markers.pin_of(path)
    with _checkpoint.commit.replacing(final, overwrite=overwrite, mode=mode) as new:
        copied = (
            _link_equal(path, new.directory, earlier, names)
            if operation is None
            else _copy_parts(path, new.directory, earlier, operation)
        )
        marker = new.copy(path, lambda name: _belongs(name) and str(name) not in copied)
        check_save(path, {save})
        new.write(marks)
        return new.commit(marker).size


def _link_equal(
    path: Path, target: Path, earlier: Path | None, names: Collection[str]
) -> frozenset[str]:
    """Makes hard links to equal files of an earlier step, and returns their names."""
    linked: set[str] = set()

    def link(name: str) -> None:
        assert earlier is not None, name
        _storage.files.make_parents(target, name)
        old = earlier / name
        if _storage.files.link_if(
            old, target / name, lambda: filecmp.cmp(old, path / name, shallow=False)
        ):
            linked.add(name)

    _util.threads.each(link, names if earlier else (), threads=_THREADS)
    return frozenset(linked)


# ---- steps in parts --------------------------------------------------------------


def _copy_parts(
    path: Path, target: Path, earlier: Path | None, operation: Operation
) -> frozenset[str]:
    """Has processes copy the parts of a step; returns the names of the files.

    Each process verifies the parts that it copies. A part that is damaged there is
    copied by the next process that has it.

    Raises:
        DamagedCheckpointError: The metadata is damaged, or no process has a part.
    """
    if (held := find_held(path)) is None or not part_copies.has_metadata(path):
        raise errors.DamagedCheckpointError(f"the metadata of {path} is damaged")
    known = find_parts(path)
    near = None if earlier is None else str(earlier)
    message = [path.name, held.save, str(target), near]
    operation.first("next", lambda: message)
    sound = [{*row} for row in operation.gather("held", held.parts)]
    missing, turn = {*range(len(known.files))}, 0
    while missing:
        assigned = _assign(path, missing, sound)
        operation.first(f"copy {turn}", functools.partial(list, assigned))
        try:
            mine = assigned[0]
            damaged = _copy_sound(path, held.save, target, earlier, mine, operation)
            rows = operation.gather(f"copied {turn}", damaged)
        except BaseException as error:  # others may still write there
            operation.fail(error, stage=f"copied {turn}")
            raise
        missing = set()
        for process, row in enumerate(rows):
            sound[process] -= {*row}
            missing |= {*row}
        turn += 1
    operation.first(f"copy {turn}", lambda: None)
    return frozenset(known.sizes)


def _assign(
    path: Path, parts: Collection[int], sound: Sequence[Collection[int]]
) -> list[list[int]]:
    """Assigns parts of a step to processes: process -> its parts.

    Args:
        path: The step.
        parts: The parts.
        sound: Process -> the parts that it has, as far as known.

    Raises:
        DamagedCheckpointError: No process has a part.
    """
    assigned: list[list[int]] = [[] for _ in sound]
    lost = []
    for part in sorted(parts):
        holders = [process for process, here in enumerate(sound) if part in here]
        if holders:
            assigned[part if part in holders else holders[0]].append(part)
        else:
            lost.append(f"process {part}")
    if lost:
        raise errors.DamagedCheckpointError(
            f"the parts of {errors.first_few(lost, 8)} of {path} are whole at no"
            " process"
        )
    return assigned


def _copy_sound(
    path: Path,
    save: str,
    target: Path,
    earlier: Path | None,
    parts: Sequence[int],
    operation: Operation,
) -> list[int]:
    """Copies the undamaged parts of those given; returns the damaged ones.

    Raises ReplacedError if another save than `save` is there.
    """
    if not parts:
        return []
    files = find_parts(path).files
    check_save(path, {save})  # another one may have fewer parts
    faults = _checkpoint.verify.find_faults(
        path, [name for part in parts for name in files[part]]
    )
    for name, why in faults.items():
        _log.warning("%s is damaged, and not uploaded: %s", path / name, why)
    damaged = [part for part in parts if not faults.keys().isdisjoint(files[part])]
    names = [n for part in parts if part not in damaged for n in files[part]]

    linked = _link_equal(path, target, earlier, names)

    def copy(name: str) -> None:
        operation.check()
        _storage.files.make_parents(target, name)
        _storage.of(target).copy_file(path / name, target / name)

    _util.threads.each(copy, [n for n in names if n not in linked], threads=_THREADS)
    directories = {str(Path(name).parent) for name in names}
    paths = [target / name for name in (*names, *directories)]
    _storage.of(target).sync_files(paths, _THREADS)
    check_save(path, {save})
    return damaged


def tell_uploaded(
    path: Path, save: str | None, changes: int, operation: Operation
) -> None:
    """Tells the other processes how many changes of a save are uploaded, and waits."""
    message = [path.name, save, changes]
    operation.first("next", lambda: message)
    operation.gather("noted")


def help_copy(
    staging: Path,
    operation: Operation,
    note_uploaded: Callable[[Path, str, int], object],
) -> None:
    """Copies the parts that process 0 assigns to this process.

    Args:
        staging: The staging directory of this process.
        operation: The operation that process 0 has called.
        note_uploaded: Called instead, if process 0 tells that changes are uploaded:
            with the step, its save, and the number of its changes.
    """
    name, save, *texts = operation.first("next", str)
    path = staging / str(name)
    if len(texts) == 1:
        note_uploaded(path, save, *texts)
        operation.report("noted")
        return
    target, earlier = (text and _storage.paths.resolve(text) for text in texts)
    held = find_held(path)
    is_same = held is not None and held.save == save
    operation.report("held", held.parts if held and is_same else ())
    for turn in itertools.count():
        assigned = operation.first(f"copy {turn}", str)
        if assigned is None:
            break
        mine = assigned[operation.index]
        damaged = _copy_sound(path, save, target, earlier, mine, operation)
        operation.report(f"copied {turn}", damaged)
    operation.first("committed", str, is_patient=True)


def _belongs(file: Path) -> bool:
    """Returns False for a marker or a leftover, by its path in the step."""
    where, name = str(file.parent), file.name
    if where in (".", _formats.items.METRICS) and _storage.files.is_temporary(name):
        return False
    is_mark = where == "." and _steps.markers.is_marker(name)
    return not is_mark or _steps.markers.is_copied(name)
