"""Index of the steps under a directory, by the run's or a usual format of names.

Any other name with a number at its end, such as `model1`, is no step.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from flaxckpt import _storage, errors
from flaxckpt._steps import journal, markers, names

_T = TypeVar("_T")

_SIGNS = ("flaxckpt.json", "_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that only steps contain."""

_ARRAYS = ("manifest.ocdbt", "d", "array_metadatas", "_sharding")
"""Entries beside the arrays of a step; `state` alone may be a directory of the user."""


class Entry(Generic[_T]):
    """A directory or file with the name of a step, recognised on demand."""

    def __init__(
        self,
        step: int,
        path: Path,
        recognise: Callable[[Path], _T | None],
        files: Collection[str] | None = None,
    ) -> None:
        self.step = step
        self.path = path
        self._files = files
        self._recognise = recognise

    @functools.cached_property
    def files(self) -> Collection[str]:
        """The names of the entries directly in the directory; empty if unknown."""
        if self._files is not None:
            return self._files
        try:
            return _storage.of(self.path).names(self.path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return ()

    @functools.cached_property
    def _recognised(self) -> tuple[_T | None, errors.CheckpointError | None]:
        try:
            return self._recognise(self.path), None
        except (errors.DamagedCheckpointError, errors.CheckpointFormatError) as error:
            return None, error

    @property
    def checkpoint(self) -> _T | None:
        return self._recognised[0]

    @property
    def error(self) -> errors.CheckpointError | None:
        return self._recognised[1]

    @property
    def why(self) -> str:
        """The message of `error`; empty without an error."""
        return "" if self.error is None else str(self.error)

    @property
    def is_damaged(self) -> bool:
        """True if `files` include the marker of a damaged step."""
        return markers.DAMAGED in self.files

    @property
    def is_step(self) -> bool:
        """True for a step: a load returns values, or an error with advice."""
        is_unclear = isinstance(self.error, errors.CheckpointFormatError)
        return bool(self.checkpoint) or is_unclear

    @property
    def was_step(self) -> bool:
        """True for a step, or a possible former step with damage to report."""
        try:
            return may_be_step(self.path) or self.is_step or bool(self.error)
        except (errors.CheckpointError, OSError):
            return True


class StepIndex(Generic[_T]):
    """Index of the steps under a directory; recognises each step once, on demand.

    `number` returns the step of a name, by default by the journal or a usual format,
    `3`, `step_3`. Raises CheckpointFormatError if two checkpoints are the same step.
    """

    def __init__(
        self,
        root: Path,
        recognise: Callable[[Path], _T | None],
        number: names.Number | None = None,
    ) -> None:
        self._named: dict[int, list[Entry[_T]]] = {}
        for path, step in _named_like_steps(root, number):
            entry = Entry(step, path, recognise)
            self._named.setdefault(step, []).append(entry)
        for step, entries in self._named.items():
            paths = [e.path for e in entries if len(entries) > 1 and e.is_step]
            if len(paths) > 1:
                raise errors.CheckpointFormatError(
                    f"{root} contains step {step} twice, as"
                    f" {errors.printable(paths[0].name)} and"
                    f" {errors.printable(paths[1].name)}: pass the path of one of them"
                )

    @property
    def numbers(self) -> list[int]:
        return sorted(self._named)

    def find(self, step: int) -> Entry[_T] | None:
        return next((e for e in self._named.get(step, ()) if e.is_step), None)

    def find_doubtful(self, step: int) -> Entry[_T] | None:
        """Returns the entry of a possibly damaged step; None if `find` succeeds.

        The entry is inaccessible, is named like other steps, or has files of steps.
        """
        if self.find(step) is not None:
            return None
        for entry in reversed(self._named.get(step, ())):
            if entry.why or self._is_alike(entry.path) or may_be_step(entry.path):
                return entry
        return None

    def _is_alike(self, path: Path) -> bool:
        """Returns True if a step differs from `path` only in the number."""
        kind = _kind(path)
        steps = (self.find(step) for step in reversed(self.numbers))
        return any(entry is not None and _kind(entry.path) == kind for entry in steps)

    @functools.cached_property
    def steps(self) -> dict[int, Path]:
        entries = ((step, self.find(step)) for step in self.numbers)
        return {step: entry.path for step, entry in entries if entry is not None}

    @property
    def entries(self) -> list[Entry[_T]]:
        """The entries of steps and of former steps, ascending; one of each number."""
        found = (self._find_former(step) for step in self.numbers)
        return [entry for entry in found if entry is not None]

    def _find_former(self, step: int) -> Entry[_T] | None:
        former = (entry for entry in reversed(self._named[step]) if entry.was_step)
        return self.find(step) or next(former, None)


def list_committed(
    root: Path, step_format: names.StepFormat, recognise: Callable[[Path], _T | None]
) -> list[Entry[_T]]:
    """Returns the committed steps under a run directory, ascending, from listings."""
    with _storage.read_errors.explain_errors(root):
        try:
            contents = _storage.of(root).contents(
                root, lambda name: step_format.step(name) is not None
            )
        except FileNotFoundError:
            return []
        entries = [
            Entry(step, root / name, recognise, files or ())
            for name, files in contents.items()
            if (step := step_format.step(name)) is not None
            and (files is None or _storage.transaction.lists_committed(root, files))
        ]
        return sorted(entries, key=lambda entry: entry.step)


def list_steps(root: Path, step_format: names.StepFormat) -> dict[int, Path]:
    """Returns the committed steps under `root`, except damaged steps, ascending."""
    entries = list_committed(root, step_format, Path.is_dir)
    return {e.step: e.path for e in entries if not e.is_damaged}


def find_links(
    root: Path, number: names.Number | None, after: int | None = None
) -> dict[int, Path]:
    """Returns the symbolic links with names of later steps, which are no steps."""
    return _find_links(root, _number_names(root, number or names.usual_number), after)


def _find_links(
    root: Path, numbers: Mapping[str, int | None], after: int | None
) -> dict[int, Path]:
    oldest = -1 if after is None else after
    found = {
        step: root / name
        for name, step in numbers.items()
        if step is not None and step > oldest and (root / name).is_symlink()
    }
    return dict(sorted(found.items()))


def _number_names(root: Path, number: names.Number) -> dict[str, int | None]:
    """Maps each name under `root` to its number, or to None."""
    try:
        with _storage.read_errors.explain_errors(root):
            return {name: number(name) for name in _storage.of(root).names(root)}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def find_left_out(
    root: Path,
    step_format: names.StepFormat,
    recognise: Callable[[Path], _T | None],
    *,
    after: int | None = None,
    only_usual: bool = False,
) -> dict[int, Path]:
    """Returns the checkpoints with names of other formats, and links, ascending.

    Only numbers above `after` count, and with `only_usual`, only usual names or those
    in the journal.
    """
    oldest = -1 if after is None else after
    numbers = _number_names(root, step_format.step)
    found = _find_links(root, numbers, after)
    others = [name for name, step in numbers.items() if step is None]
    is_any = any(re.search("[0-9]", name) for name in others)
    committed = _committed_names(root) if is_any else {}
    for name in others:
        step = committed.get(name, names.number(name))
        if step is None or step <= oldest or names.is_temporary(name):
            continue
        is_usual = name in committed or names.is_usual(name)
        if is_usual or not only_usual:
            entry = Entry(step, root / name, recognise)
            if entry.was_step:
                found[step] = entry.path
    return dict(sorted(found.items()))


def sign(path: Path) -> str | None:
    """Returns the name of a file from a present or former checkpoint, or None."""
    return next((name for name in _SIGNS if (path / name).is_file()), None)


def may_be_step(path: Path) -> bool:
    """Returns True for a directory with what only a present or former step has."""
    names = (path / "state" / name for name in _ARRAYS)
    return sign(path) is not None or any(map(_storage.of(path).exists, names))


def find_usual_name(root: Path, step: int) -> Path | None:
    """Returns the path under `root` with a usual name of `step`, or None."""
    for path in _finished(root):
        if names.number(path.name) == step and names.is_usual(path.name):
            return path
    return None


def checkpoints_by_number(
    root: Path, is_checkpoint: Callable[[Path], object]
) -> dict[int, list[Path]]:
    """Maps each number to all checkpoints, also no steps, whose names end in it."""
    checkpoints: dict[int, list[Path]] = {}
    for path in _finished(root):
        step = names.number(path.name)
        if step is None:
            continue
        try:
            is_one = is_checkpoint(path)
        except errors.CheckpointFormatError:  # a checkpoint of several items
            is_one = True
        if is_one:
            checkpoints.setdefault(step, []).append(path)
    return checkpoints


def _named_like_steps(
    root: Path, number: names.Number | None
) -> Iterator[tuple[Path, int]]:
    paths = list(_finished(root))
    if number is None:
        number = names.number
        prefixes = {names.prefix(p.name) for p in paths if number(p.name) is not None}
        usual = {prefix for prefix in prefixes if names.is_usual_prefix(prefix)}
        if len(prefixes) > 1 or not usual:
            usual = prefixes & _recorded_prefixes(root) or usual
        paths = [path for path in paths if names.prefix(path.name) in usual]
    for path in paths:
        if (step := number(path.name)) is not None:
            yield path, step


def _recorded_prefixes(root: Path) -> set[str]:
    """Returns the prefixes of step names in the run's journal."""
    committed = _committed_names(root).items()
    return {
        names.prefix(name) for name, step in committed if names.number(name) == step
    }


def _committed_names(root: Path) -> dict[str, int]:
    """Returns the names of the steps that the run's journal has as committed."""
    return {
        event.path.rstrip("/").rpartition("/")[2]: event.step
        for event in journal.recent(root / journal.NAME)
        if event.kind == "committed" and event.step is not None
    }


def _finished(root: Path) -> Iterator[Path]:
    """Yields the entries under `root`, except links and temporary entries."""
    for path in sorted(root.iterdir()):
        if not (names.is_temporary(path.name) or path.is_symlink()):
            yield path


def _kind(path: Path) -> tuple[str, bool]:
    return names.prefix(path.name), path.is_dir()
