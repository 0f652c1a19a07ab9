"""The steps under a run directory: names, listing, marks, removal.

Listing reads names only: a directory is committed by being renamed to its name.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flaxckpt import (
    _access,
    _leases,
    _locks,
    _marked,
    _remote,
    _renames,
    _storage,
    _unfinished,
    errors,
)

_log = logging.getLogger(__name__)

TEMPORARY = _unfinished.TEMPORARY
"""In the name of a directory: not committed, for Orbax as for us."""

PIN = "PINNED"
"""A file of this name keeps its step, whatever the policies say; T5X's convention."""

UNTIL_NEXT = "TEMPORARY"
"""A file of this name lets its step go as soon as there is a newer one."""

WITHOUT_DATASET = "DATASET_LET_GO"
"""A file of this name says that the dataset's state was deleted on purpose."""

MEASURED = "MEASURED"
"""A file of this name says that metrics were added after the save."""

DAMAGED = "DAMAGED"
"""A file of this name takes its step out of the list, and has the reason in JSON."""

NOT_UPLOADED = "NOT_UPLOADED"
"""A file of this name keeps its step in the staging directory, and has JSON: the run's
directory has not got the step from there, or not its latest marks and metrics."""

_MARK = b"1\n"

_T5X_TEMPORARY = re.compile(r"\.tmp-[0-9]+")
"""How T5X ends the name of a step that is not finished."""

_FIELD = re.compile(r"\{step(?::0(\d+)d)?\}")
_ANY_NAME = re.compile(r"(?:.*(?<![0-9]\.)(?<![0-9]))?([0-9]{1,18})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StepFormat:
    """How a step's directory is called.

    Attributes:
        template: `{step}`, with a prefix (`step_{step}`) or padded with zeros
            (`{step:08d}`), or both.

    Source: Orbax's step name formats, `<prefix>_<step>` and a fixed length.
    """

    template: str = "{step}"

    def __post_init__(self) -> None:
        fields = _FIELD.findall(self.template)
        rest = _FIELD.sub("", self.template)
        if len(fields) != 1 or any(char in rest for char in "{}/\\\0"):
            raise errors.OptionError(
                f"step_format must hold {{step}} or {{step:08d}} once and no '/', got"
                f" {self.template!r}; for example 'step_{{step}}'"
            )

    def name(self, step: int) -> str:
        """The directory of `step`."""
        return self.template.format(step=step)

    def step(self, name: str) -> int | None:
        """The step whose directory is called `name`; None if none is."""
        before, _, after = _FIELD.sub("\0", self.template).partition("\0")
        digits = name.removeprefix(before).removesuffix(after)
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            return None
        return int(digits) if self.name(int(digits)) == name else None


def check(step: int) -> int:
    """`step` as a plain int.

    Raises:
        OptionError: It is no whole number from 0.
    """
    try:
        number = step.__index__()
    except AttributeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < 10**18:
        raise errors.OptionError(
            f"a step is the number of completed training steps, 0 or more, got {step!r}"
        )
    return number


def listed(root: Path, step_format: StepFormat) -> dict[int, Path]:
    """The committed steps under `root` that are not marked as damaged, ascending.

    A directory that is empty is none: nothing of ours or Orbax's is ever committed
    empty.
    """
    with _access.explained(root):
        return _told_apart(root, step_format)[0]


def damaged(root: Path, step_format: StepFormat) -> dict[int, Path]:
    """The steps under `root` that are marked as damaged, ascending."""
    with _access.explained(root):
        return _told_apart(root, step_format)[1]


def _told_apart(
    root: Path, step_format: StepFormat
) -> tuple[dict[int, Path], dict[int, Path]]:
    """The steps under `root` that are not marked as damaged, and those that are."""
    found: tuple[dict[int, Path], dict[int, Path]] = {}, {}
    contents: dict[str, set[str]] = {}
    if _remote.is_remote(root):
        contents = root.tree()
    try:
        names = sorted(contents or _storage.directories(root))
    except FileNotFoundError:
        return found
    steps = {step_format.step(name): root / name for name in names}
    for step in sorted(step for step in steps if step is not None):
        content = contents.get(steps[step].name) or _content(steps[step])
        if content and _counts(steps[step], content):
            found[DAMAGED in content][step] = steps[step]
    return found


def _counts(path: Path, content: Collection[str]) -> bool:
    """Whether a checkpoint in a store has its marker; those of others need none."""
    if not _remote.is_remote(path):
        return True
    if _marked.MARKER in content:
        return len(content) > 1  # it came late, and alone
    return not any(name in content for name in _PARTS_OF_ORBAX)


_PARTS_OF_ORBAX = ("state", "default", "_CHECKPOINT_METADATA", "_METADATA", "metrics")


def _content(path: Path) -> list[str]:
    """The names in a directory; none if it was just deleted."""
    try:
        return _storage.names(path)
    except FileNotFoundError:
        return []


class Found(NamedTuple):
    """What is under a run directory.

    Attributes:
        steps: Step -> the checkpoint, ascending.
        doubtful: Step -> what is called like those, or has files that only a step has,
            but is not recognised; and why. Ascending.
    """

    steps: dict[int, Path]
    doubtful: dict[int, tuple[Path, str]]


_MARKS = ("flaxckpt.json", "_CHECKPOINT_METADATA", "commit_success.txt")
"""Files of which each is in steps and nowhere else."""

_USUAL_PREFIX = re.compile(r"(?:checkpoint|ckpt|step)?[-_]?|streaming_.*_", re.DOTALL)


def has_mark(path: Path) -> str | None:
    """The file by which a directory is known to be, or to have been, a checkpoint."""
    return next((name for name in _MARKS if (path / name).is_file()), None)


def is_usual_name(name: str) -> bool:
    """Whether steps are usually called so: `3`, `step_3`, `checkpoint_3`."""
    match = _ANY_NAME.fullmatch(name)
    return match is not None and bool(_USUAL_PREFIX.fullmatch(name[: match.start(1)]))


def number(name: str) -> int | None:
    """The number in which a name ends, as those of steps do; None if it does not."""
    match = _ANY_NAME.fullmatch(name)
    return int(match[1]) if match else None


def called(root: Path, step: int) -> Path | None:
    """What is usually called like `step`, under `root`; None if there is nothing."""
    return next(
        (
            path
            for _, path, number in _called_like_steps(root)
            if number == step and is_usual_name(path.name)
        ),
        None,
    )


def find(root: Path, is_checkpoint: Callable[[Path], bool]) -> dict[int, Path]:
    """The steps under `root`, however they are called, ascending.

    See `survey`.
    """
    return survey(root, is_checkpoint).steps


def survey(root: Path, is_checkpoint: Callable[[Path], bool]) -> Found:
    """What is under `root`: steps, however they are called, and what may be damaged.

    Args:
        root: A directory.
        is_checkpoint: Tells a step from what is merely called like one.

    Raises:
        CheckpointFormatError: Two of them are one step, or there are several kinds of
            names, none of which steps usually have.
    """
    groups: dict[str, dict[Path, int]] = {}
    doubts: list[tuple[str, Path, int, str]] = []
    for prefix, path, step in _called_like_steps(root):
        try:
            is_step = is_checkpoint(path)
        except errors.DamagedCheckpointError as error:
            doubts.append((prefix, path, step, str(error)))
            continue
        except errors.CheckpointFormatError:
            is_step = True  # it says what is to be done when it is read
        if is_step:
            groups.setdefault(prefix, {})[path] = step
        else:
            doubts.append((prefix, path, step, ""))
    chosen = _chosen(root, groups)
    steps: dict[int, Path] = {}
    for path, step in chosen.items():
        if step in steps:
            raise errors.CheckpointFormatError(
                f"{root} holds step {step} twice, as"
                f" {errors.printable(steps[step].name)} and"
                f" {errors.printable(path.name)}: pass the path of one of them"
            )
        steps[step] = path
    kinds = {
        (prefix, path.is_dir())
        for prefix, paths in groups.items()
        for path in paths
        if path in chosen
    }
    doubtful = {
        step: (path, why)
        for prefix, path, step, why in doubts
        if step not in steps and _may_be_step(prefix, path, why, kinds)
    }
    return Found(dict(sorted(steps.items())), dict(sorted(doubtful.items())))


def _called_like_steps(root: Path) -> Iterator[tuple[str, Path, int]]:
    """What begins the name, path and number of what has a number at its end."""
    for path in sorted(root.iterdir()):
        match = _ANY_NAME.fullmatch(path.name)
        if not match or TEMPORARY in path.name or path.is_symlink():
            continue
        if not _T5X_TEMPORARY.search(path.name):
            yield path.name[: match.start(1)], path, int(match[1])


def _chosen(root: Path, groups: dict[str, dict[Path, int]]) -> dict[Path, int]:
    """The steps of a run, without others' files whose names end in a number, too."""
    usual = [prefix for prefix in groups if _USUAL_PREFIX.fullmatch(prefix)]
    if not usual and len(groups) > 1:
        raise errors.CheckpointFormatError(
            f"{root} holds several kinds of steps: pass the path of one of them:\n"
            + errors.rows(
                f"{prefix}<step>: {len(paths)}, such as {next(iter(paths)).name}"
                for prefix, paths in groups.items()
            )
        )
    return {
        path: step
        for prefix in usual or groups
        for path, step in groups[prefix].items()
    }


def _may_be_step(
    prefix: str, path: Path, why: str, kinds: set[tuple[str, bool]]
) -> bool:
    if why:  # it cannot even be looked at
        known = {known for known, _ in kinds}
        return prefix in known or bool(_USUAL_PREFIX.fullmatch(prefix))
    return (prefix, path.is_dir()) in kinds or has_mark(path) is not None


class Marks(NamedTuple):
    """What the files beside its arrays say of a step.

    Attributes:
        pinned: It stays, whatever the policies say.
        temporary: It goes as soon as there is a newer step.
        has_dataset: There is a dataset's state.
        let_go: That was, or is to be, deleted on purpose.
        readers: Who reads it.
        waiting: It is in a staging directory, and still to be uploaded.
    """

    pinned: bool
    temporary: bool
    has_dataset: bool
    let_go: bool
    readers: tuple[str, ...]
    waiting: bool


def marks(path: Path, *, dataset: str) -> Marks:
    """Looks at the step `path`, once.

    Args:
        path: Its directory.
        dataset: What that of a dataset's state is called in it.
    """
    try:
        names = set(_storage.names(path))
    except FileNotFoundError:  # just deleted
        names = set()
    reading = [name for name in names if name.startswith(_leases.READING)]
    return Marks(
        PIN in names,
        UNTIL_NEXT in names,
        dataset in names,
        WITHOUT_DATASET in names,
        tuple(map(_leases.reader, _leases.living(path, reading))),
        NOT_UPLOADED in names,
    )


def is_mark(name: str) -> bool:
    """Whether a file of this name only says how long its step stays."""
    return name in _MARKS_OF_STAYING or name.startswith(_leases.READING)


def goes_along(name: str) -> bool:
    """Whether a mark of this name goes along with a copy of its step."""
    return name in (WITHOUT_DATASET, MEASURED)


_MARKS_OF_STAYING = frozenset(
    (
        PIN,
        UNTIL_NEXT,
        WITHOUT_DATASET,
        MEASURED,
        DAMAGED,
        NOT_UPLOADED,
        _leases.DELETING,
    )
)


def marks_of_new(final: Path, *, temporary: bool) -> dict[str, bytes]:
    """The marks of what is about to take the name `final`: file name -> content.

    A pin is of the name: what replaces a pinned step is pinned.
    """
    found = {UNTIL_NEXT: _MARK} if temporary else {}
    return found | ({PIN: _MARK} if is_pinned(final) else {})


def is_pinned(path: Path) -> bool:
    """Whether the step at `path` stays whatever the policies say."""
    return (path / PIN).is_file()


def is_temporary(path: Path) -> bool:
    """Whether the step at `path` goes as soon as there is a newer one."""
    return (path / UNTIL_NEXT).is_file()


def pin(path: Path) -> None:
    """Keeps the step at `path` until it is unpinned."""
    _storage.replace(path / PIN, _MARK)


def unpin(path: Path) -> None:
    """Leaves the step at `path` to the policies again."""
    _remove_mark(path, PIN)


def make_permanent(path: Path) -> None:
    """Has the step at `path` stay like others, when it was temporary."""
    _remove_mark(path, UNTIL_NEXT)


def is_measured(path: Path) -> bool:
    """Whether metrics were added to the step at `path` after its save."""
    return _storage.lexists(path / MEASURED)


def mark_measured(path: Path) -> None:
    """Notes that metrics were added to the step at `path`: they are there already."""
    if not is_measured(path):
        _storage.replace(path / MEASURED, _MARK)


def is_damaged(path: Path) -> bool:
    """Whether the step at `path` is marked as damaged."""
    return _storage.lexists(path / DAMAGED)


def mark_damaged(path: Path, reason: str) -> None:
    """Takes the step at `path` out of the list of steps, durably."""
    told = {"reason": reason, "time": time.time()}
    _storage.replace(path / DAMAGED, json.dumps(told).encode())


def unmark_damaged(path: Path) -> None:
    """Puts the step at `path` back into the list of steps."""
    _remove_mark(path, DAMAGED)


def why_damaged(path: Path) -> str:
    """What the mark of a damaged step says; it counts even if that is lost."""
    try:
        told = json.loads(_storage.read(path / DAMAGED, max_bytes=_MAX_MARK_BYTES))
        return errors.printable(str(told["reason"])[:_MAX_REASON])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its mark does not say why"


class Waiting(NamedTuple):
    """What the mark of a step says that is still to be uploaded.

    Attributes:
        overwrite: Whether it replaces what the directory has of its name.
        removed: Marks that were taken from it, which the directory may have still.
        change: Another one whenever something of the step has changed.
    """

    overwrite: bool = False
    removed: tuple[str, ...] = ()
    change: str = ""

    def content(self) -> bytes:
        """Of the mark, as of a new change."""
        row = self._replace(change=secrets.token_hex(8))._asdict()
        return json.dumps(row).encode()


def waiting(path: Path) -> Waiting | None:
    """What is still to be uploaded of the step at `path`; None if nothing is."""
    try:
        found = json.loads(
            _storage.read(path / NOT_UPLOADED, max_bytes=_MAX_MARK_BYTES)
        )
        removed = tuple(map(str, found["removed"]))
        return Waiting(bool(found["overwrite"]), removed, str(found["change"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Waiting()  # it counts even if what it says is lost


def is_waiting(path: Path) -> bool:
    """Whether the step at `path` is still to be uploaded."""
    return (path / NOT_UPLOADED).is_file()


def wait_for_upload(path: Path, removed: Collection[str] = ()) -> None:
    """Marks the step at `path` as still to be uploaded, or as changed once more."""
    now = waiting(path) or Waiting()
    both = tuple(sorted({*now.removed, *removed}))
    _storage.replace(path / NOT_UPLOADED, now._replace(removed=both).content())


def uploaded(path: Path) -> None:
    """Nothing of the step at `path` is still to be uploaded."""
    _remove_mark(path, NOT_UPLOADED)


_MAX_MARK_BYTES = 2**16
_MAX_REASON = 1000


def _remove_mark(path: Path, name: str) -> None:
    try:
        (path / name).unlink()
    except FileNotFoundError:
        return
    _storage.sync_directory(path)


def delete(path: Path, *, even_pinned: bool = False) -> None:
    """Removes a step: first its name, durably, then its files.

    Files that cannot be removed are swept another time.

    Raises:
        SaveFailedError: Somebody reads it, or has pinned it.
        OSError: It has its name still, or that it has not may not last.
    """
    if _remote.is_remote(path):
        _delete_in_store(path, even_pinned=even_pinned)
        return
    aside = _unfinished.beside(path, _unfinished.DELETED)
    with _unfinished.claimed(path):
        with _leases.deletion(path):
            if not even_pinned:
                _check_not_pinned(path, path)
            _renames.withdraw(path, aside)
            try:
                # Only what has no name any more is sure to be neither read nor pinned.
                if late := _leases.readers(aside):
                    raise _leases.in_use(path, late)
                if not even_pinned:
                    _check_not_pinned(path, aside)
            except errors.SaveFailedError:
                aside.rename(path)
                _storage.sync_directory(path.parent)
                raise
        _unfinished.discard(aside)
    _log.info("deleted %s", path)


def _delete_in_store(path: _remote.RemotePath, *, even_pinned: bool) -> None:
    with _locks.held(path) as lock, _leases.deletion(path):
        if not even_pinned:
            _check_not_pinned(path, path)
        marker = _marked.withdraw(path)
        try:
            # Whoever came before it counted no more is seen now.
            if late := _leases.readers(path):
                raise _leases.in_use(path, late)
            if not even_pinned:
                _check_not_pinned(path, path)
        except errors.SaveFailedError:
            _marked.put_back(path, marker)
            raise
        _marked.remove(lock)
    _log.info("deleted %s", path)


def _check_not_pinned(path: Path, now: Path) -> None:
    if is_pinned(now):
        raise errors.SaveFailedError(f"{path} is not deleted: it is pinned")


def delete_dataset(path: Path, dataset: str) -> None:
    """Removes the dataset's state of a step: first it is marked as let go, durably.

    Args:
        path: The step.
        dataset: What the directory of that state is called in it.

    Raises:
        SaveFailedError: Somebody reads the step.
    """
    aside = _unfinished.beside(path, _unfinished.DELETED)
    with _unfinished.claimed(path / dataset):
        with _leases.deletion(path):
            if not (path / WITHOUT_DATASET).is_file():
                _storage.replace(path / WITHOUT_DATASET, _MARK)
            if _remote.is_remote(path):
                _storage.remove_tree(path / dataset)
                return
            (path / dataset).rename(aside)
            _storage.sync_directory(path)
        _unfinished.discard(aside)


def sweep(root: Path, step_format: StepFormat) -> None:
    """Removes what saves and deletions that were cut off have left under `root`.

    Raises:
        OSError: Something could not be removed.
    """
    _unfinished.sweep(root, lambda name: step_format.step(name) is not None)


def tidy(root: Path, step_format: StepFormat, items: Sequence[str]) -> None:
    """Removes all that crashes have left in a run directory; says what it cannot.

    Args:
        root: The directory.
        step_format: How its steps are called.
        items: The directories in it, and in each step, where files are replaced.
    """
    try:
        sweep(root, step_format)
        inside = () if _remote.is_remote(root) else items  # no leftovers in there
        directories = [root / name for name in inside]
        for step in listed(root, step_format).values():
            directories += [step, *(step / name for name in inside)]
        for directory in directories:
            if not directory.is_symlink():
                _unfinished.sweep_files(directory)
    except OSError as error:
        _log.warning("what a crash has left in %s is there still: %s", root, error)
