"""Parts of steps in the directories of several processes: who has what.

A part is the files of arrays that a process has written. A process has the metadata of
a step, its own part, and perhaps others. A step is whole if the processes together have
all its parts, or the run directory has it.
"""

from __future__ import annotations

import collections
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt import _formats, _steps, _storage, errors
from flaxckpt._steps.markers import PARTS, StepParts

_log = logging.getLogger(__name__)

_MOST_FAULTS = 4
"""The most that an error names of a step."""

# Of reading a file that is not there.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

MARKER, MANIFEST = _storage.transaction.MARKER, _formats.orbax_json.MANIFEST


class Held(NamedTuple):
    """What a process has of a step.

    Attributes:
        save: The identity of the save: parts of other saves do not fit.
        total: Number of parts of the step; 0 if they are unknown, as `PARTS` or the
            manifest is damaged.
        parts: The parts whose files are all there.
        created: Nanoseconds since 1970 at the call of the save.
        is_settled: Whether the step was in the run directory before its last change.
        changes: Number of changes of the step since its save.
        is_waiting: Whether some of them are not uploaded, as far as the process knows.
        fault: What is damaged, so that the save or its parts are not known for sure.
        is_changing: Whether a save of the step is under way here.
    """

    save: str
    total: int
    parts: tuple[int, ...]
    created: int = 0
    is_settled: bool = False
    changes: int = 0
    is_waiting: bool = False
    fault: str = ""
    is_changing: bool = False

    @property
    def state(self) -> tuple[int, bool]:
        """How much the process knows of the step; of one save, the greatest counts."""
        return (self.changes, not self.is_waiting) if self.total else (-1, False)


def identify(path: Path) -> str | None:
    """Returns the identity of the save of a step; None if unknown, or unreadable."""
    try:
        return read_identity(path)
    except OSError:
        return None


def read_identity(path: Path) -> str | None:
    """Returns the identity of the save of a step; None if the step has none.

    Raises OSError for a step that cannot be read at present.
    """
    # It is the digest of the commit marker, which follows from the manifest: a step in
    # parts that has lost its marker belongs to its save still.
    store, most = _storage.of(path), _formats.orbax_json.MAX_BYTES
    try:
        try:
            marker = store.read(path / MARKER, max_bytes=most)
        except FileNotFoundError:
            if store.costs_requests or not (path / PARTS).exists():
                return None
            manifest = store.read(path / MANIFEST, max_bytes=most)
            marker = _formats.native_contents.commit_marker(manifest)
    except (*_ABSENT, ValueError, errors.DamagedCheckpointError):
        return None
    return _storage.files.digest(marker)


class ReplacedError(errors.SaveFailedError):
    """Another writer has replaced a step in the meantime."""


def check_save(path: Path, saves: Collection[str | None]) -> None:
    """Raises ReplacedError if a step is of none of these saves.

    A job that was thought dead may replace it; its whole files would be mixed with
    those before. Raises SaveFailedError for a step that cannot be read.
    """
    try:
        is_known = read_identity(path) in saves
    except OSError as error:
        raise errors.SaveFailedError(f"{path} cannot be read: {error}") from error
    if not is_known:
        raise ReplacedError(
            f"{path} was saved by another writer in the meantime: end the other job, or"
            " give each run its own directory"
        )


def find_held(path: Path) -> Held | None:
    """Returns what is here of a step; None if unreadable, older, or not ours."""
    try:
        return read_held(path)
    except OSError:
        return None


def read_held(path: Path) -> Held | None:
    """Returns what is here of a step; None if it is older, or not ours.

    Raises OSError for a step that cannot be read at present.
    """
    if (save := read_identity(path)) is None:
        return None
    try:
        parts = find_parts(path)
        here = [n for n, files in enumerate(parts.files) if _has_all(path, files)]
        is_settled = _steps.markers.is_settled(path)
    except errors.DamagedCheckpointError:
        return Held(save, 0, ())
    except (OSError, ValueError) as error:
        if _is_manifest_lost(path):
            return Held(save, 0, ())
        if isinstance(error, OSError):
            raise
        return None
    return Held(
        save,
        len(parts.files),
        tuple(here),
        find_time(path),
        is_settled,
        _steps.markers.count_changes(path),
        _steps.markers.is_marked_for_upload(path),
    )


def _is_manifest_lost(path: Path) -> bool:
    """Returns True if the manifest is not the one that our commit marker stands for."""
    try:
        digest = json.loads((path / MARKER).read_bytes())[MANIFEST]
        return bool(_storage.files.digest((path / MANIFEST).read_bytes()) != digest)
    except _ABSENT:
        return True
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False  # at present, or of another program


def find_doubtful(held: Sequence[Mapping[int, Held]]) -> set[int]:
    """Returns the steps that the processes have not whole, or in several saves.

    A flipped bit in a small file looks like another save, or like a missing part.
    """
    saves: dict[int, set[str]] = {}
    for steps in held:
        for step, here in steps.items():
            saves.setdefault(step, set()).add(here.save)
    _, lost = choose(held, {})
    several = {step for step, found in saves.items() if len(found) > 1}
    return several | {each.step for each in lost}


def examine(path: Path, here: Held, others: Collection[str]) -> Held:
    """Returns what is here of a doubtful step, with what is damaged of its small files.

    Args:
        path: The step.
        here: What `find_held` has found.
        others: The saves of the step at other processes.
    """
    try:
        manifest = (path / MANIFEST).read_bytes()
        marker = _formats.native_contents.commit_marker(manifest)
        listed = parse_manifest(manifest)
        known = _steps.markers.read_parts(path) or listed
    except (OSError, ValueError, errors.DamagedCheckpointError):
        return here  # looked at elsewhere
    save = _storage.files.digest(marker)
    if save != here.save and here.save not in others:
        if save not in others:
            return Held(here.save, 0, (), fault=f"{MARKER} or {MANIFEST} is damaged")
        _log.warning("%s is damaged, and written again", path / MARKER)
        _storage.of(path).replace(path / MARKER, marker)
        here = here._replace(save=save)
    if known.sizes == listed.sizes:
        return here
    if save != here.save:  # the manifest is damaged, and copied again by a restore
        return here
    return Held(save, 0, (), fault=f"{PARTS} is damaged")


def find_time(path: Path) -> int:
    """Returns the nanoseconds since 1970 at the call of a save; 0 if unknown."""
    try:
        row = json.loads((path / _formats.items.CHECKPOINT).read_bytes())
        return int(row["init_timestamp_nsecs"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0


def find_parts(path: Path) -> StepParts:
    """Returns the parts of a step, without deleted items; one, of a single process.

    Raises:
        DamagedCheckpointError: The marker of parts is damaged.
        ValueError: The manifest is damaged, or is of an older format.
        OSError: The manifest is missing, or cannot be read.
    """
    parts = _steps.markers.read_parts(path)
    parts = parts or parse_manifest((path / MANIFEST).read_bytes())
    deleted = _steps.markers.deleted_items(_storage.of(path).names(path))
    return parts.without(deleted) if deleted else parts


def parse_manifest(content: bytes) -> StepParts:
    """Returns the only part of a step in one directory.

    Raises:
        ValueError: The manifest is damaged, or is of an older format.
    """
    try:
        files = json.loads(content)["files"]
        return StepParts(0, ({str(name): int(size) for name, size in files.items()},))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the manifest names no files: {error}") from None


def _has_all(path: Path, files: Mapping[str, int]) -> bool:
    return all(file_size(path / name) == size for name, size in files.items())


def file_size(file: Path) -> int | None:
    """Returns the bytes of a file; None if it is missing."""
    try:
        return os.stat(file, follow_symlinks=False).st_size  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None


class Whole(NamedTuple):
    """A step that can be restored.

    Attributes:
        step: Its number.
        save: The identity of the save; None to read it from the run directory alone.
        holders: Part -> the processes that have it.
        is_far: Whether the run directory has this save of the step.
    """

    step: int
    save: str | None
    holders: Mapping[int, Sequence[int]]
    is_far: bool


class Lost(NamedTuple):
    """A step that cannot be restored.

    Attributes:
        step: Its number.
        parts: The parts that no process has; empty if the parts are unknown, as their
            lists are damaged at all processes.
        faults: What is damaged of it at which process.
    """

    step: int
    parts: tuple[int, ...]
    faults: tuple[str, ...] = ()

    @property
    def is_damaged(self) -> bool:
        """True unless only machines are missing."""
        return not self.parts or bool(self.faults)

    def __str__(self) -> str:
        why = "its parts are unknown: PARTS or flaxckpt.json is damaged"
        if self.parts:
            why = f"the parts of {names_of(self.parts)} are at no process"
        return "; ".join((why, *self.faults[:_MOST_FAULTS]))


def find_behind(held: Sequence[Mapping[int, Held]]) -> list[dict[int, list[int]]]:
    """Returns what each process knows less of than others.

    Args:
        held: What each process has: step -> parts.

    Returns:
        Process -> step -> the processes of the same save that know most of it.
    """
    best: dict[tuple[int, str], tuple[tuple[int, bool], list[int]]] = {}
    for process, steps in enumerate(held):
        for step, here in steps.items():
            state, some = best.setdefault((step, here.save), ((-1, False), []))
            if here.state > state:
                best[step, here.save] = here.state, [process]
            elif here.state == state:
                some.append(process)
    return [
        {
            step: best[step, here.save][1]
            for step, here in steps.items()
            if here.state < best[step, here.save][0]
        }
        for steps in held
    ]


def choose(
    held: Sequence[Mapping[int, Held]], far: Mapping[int, str | None]
) -> tuple[list[Whole], list[Lost]]:
    """Returns the steps that are whole, best first, and those that are not.

    Parts of different saves of a step are never mixed. Of these, the newest comes
    first, but not one that was uploaded, and replaced in the run directory. The run
    directory comes after the processes.

    Args:
        held: What each process has: step -> parts.
        far: The steps of the run directory -> the identities of their saves, if known.
    """
    found: list[Whole] = []
    lost: list[Lost] = []
    for step in sorted(far.keys() | {s for steps in held for s in steps}, reverse=True):
        saves: dict[str, dict[int, list[int]]] = {}
        times: dict[str, int] = {}
        settled: set[str] = set()
        having = {n: steps[step] for n, steps in enumerate(held) if step in steps}
        for here in having.values():
            holders = saves.setdefault(here.save, {})
            for part in range(len(holders), here.total):
                holders[part] = []
            times[here.save] = max(here.created, times.get(here.save, 0))
            settled |= {here.save} if here.is_settled else set()
        for process, here in having.items():
            holders = saves[here.save]
            # A process that has lost PARTS knows one part, with the files of all.
            is_whole = here.total == 1 and bool(here.parts)
            for part in holders if is_whole else here.parts:
                holders[part].append(process)
        for save in sorted(saves, key=lambda save: -times[save]):
            holders = saves[save]
            is_far = far.get(step) == save
            if save in settled and not is_far and far.get(step) is not None:
                continue
            if is_far or all(holders.values()):
                found.append(Whole(step, save, holders, is_far))
        if step in far:
            found.append(Whole(step, None, {}, True))
        elif not (found and found[-1].step == step):
            missing = [
                tuple(part for part, some in holders.items() if not some)
                for holders in saves.values()
            ]
            lost.append(Lost(step, min(missing, key=len)))
    return found, lost


def choose_copies(
    domains: Sequence[str],
    count: int,
    holders: Mapping[int, Sequence[int]] | None = None,
) -> list[list[int]]:
    """Returns the processes that keep a new copy of each part.

    Each copy is in a failure domain of its own; each process keeps about as many parts
    as any other. With fewer other domains, there are fewer copies.

    Args:
        domains: Process -> the name of its failure domain.
        count: Number of copies, with those that exist.
        holders: Part -> the processes that have it; None for the parts of a new step,
            one of each process. A part that no process has is not copied.
    """
    if holders is None:
        holders = {process: [process] for process in range(len(domains))}
    load = collections.Counter(process for some in holders.values() for process in some)
    keepers: list[list[int]] = [[] for _ in holders]
    for part, some in holders.items():
        # A process may have got its own part again meanwhile.
        order = [(part + n) % len(domains) for n in range(len(domains))]
        used = {domains[process] for process in some}
        while used and len(used) <= count:
            others = [n for n in order if domains[n] not in used]
            if not others:
                break
            best = min(others, key=lambda n: load[n])  # of equals, the first
            keepers[part].append(best)
            used.add(domains[best])
            load[best] += 1
    return keepers


def first_source(own: Any, part: Any, count: Any) -> Any:
    """Returns which of the `count` holders of a part a process asks first.

    A low-discrepancy sequence, so that the holders send the part about equally often,
    whichever processes need it. Arguments may be arrays of numbers.
    """
    return (own * 0x9E3779B1 + part * 0xC13FA9A9) % 2**32 * count // 2**32


def names_of(processes: Iterable[int]) -> str:
    return errors.first_few([f"process {process}" for process in processes], 8)
