"""Locates the checkpoint that a path means, and reads all of it but its arrays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from flaxckpt import _state, _steps, _storage, errors, formats
from flaxckpt._types import PathLike
from flaxckpt.formats._reader import Stored

_log = logging.getLogger(__name__)

_Entry: TypeAlias = "_steps.index.Entry[formats.Detected]"
_Index: TypeAlias = "_steps.index.StepIndex[formats.Detected]"


class Located(NamedTuple):
    """A checkpoint that was recognised.

    Attributes:
        path: Where it is.
        step: Its number if it is a step of a directory.
        detected: Its format, by which it is read.
    """

    path: Path
    step: int | None
    detected: formats.Detected

    def open(self, types: Sequence[type] = ()) -> Stored:
        """Reads everything of the checkpoint but its arrays.

        Args:
            types: Classes of the caller that the checkpoint may name.

        Raises:
            CheckpointNotFoundError: It was deleted since.
            CheckpointFormatError: It is of a kind that is not read.
            DamagedCheckpointError: It is not intact, or may not be read.
        """
        with _storage.permissions.reading(self.path), _storage.paths.looking(self.path):
            return self._read(types)

    def _read(self, types: Sequence[type]) -> Stored:
        return self.detected.reader.read(
            self.path, step=self.step, resolve=_state.classes.resolver(types)
        )


def open_checkpoint(
    path: PathLike,
    step: int | None = None,
    *,
    step_format: str | None = None,
    types: Sequence[type] = (),
) -> Stored:
    """Locates a checkpoint, recognises it and reads all of it but its arrays.

    See `locate` and `Located.open`.
    """
    root = _storage.local.resolve(path)
    with _storage.permissions.reading(root), _storage.paths.looking(root):
        located = _locate(root, step, step_format)
        try:
            return located._read(types)
        except OSError as error:
            unread = error
    # Not before the look is over, which does not see what was deleted meanwhile.
    with _storage.permissions.reading(located.path):
        raise unread


def locate(
    path: PathLike, step: int | None = None, *, step_format: str | None = None
) -> Located:
    """Returns the checkpoint that `path` and `step` mean.

    Args:
        path: A checkpoint, or a directory of steps.
        step: Which step of a directory; None is the newest.
        step_format: How its steps are called; by default as steps usually are, or as
            the run says.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointFormatError: The path holds something else, or several checkpoints.
        DamagedCheckpointError: The checkpoint is not intact, or may not be read.
        OptionError: `step` is no step, or `path` is one checkpoint.
    """
    root = _storage.local.resolve(path)
    with _storage.permissions.reading(root), _storage.paths.looking(root):
        return _locate(root, step, step_format)


def number_of(step_format: str | None) -> _steps.names.Number | None:
    """Returns the function from names to steps of a format; None if there is none."""
    return None if step_format is None else _steps.names.StepFormat(step_format).step


def _locate(path: Path, step: int | None, step_format: str | None) -> Located:
    wanted = None if step is None else _steps.names.check(step)
    number = number_of(step_format)
    one = formats.identify(path) if path.exists() else None
    if one is not None and wanted is None:
        return Located(path, None, one)
    if not path.is_dir():
        if one is None:
            formats.detect(path)  # raises
        raise _is_one(path)
    index = _steps.index.StepIndex(path, formats.identify, number)
    if wanted is None:
        return _newest(path, index)
    if (entry := index.find(wanted)) is not None:
        return _located(entry)
    if one is not None:
        raise _is_one(path)
    if (doubt := index.find_doubtful(wanted)) is not None:
        if formats.is_being_written(doubt.path):
            raise errors.CheckpointNotFoundError(
                f"{path} has no step {wanted} yet: {formats.advice_on_saves(path)}"
            )
        raise _damaged(doubt.path, doubt.why)
    if number is None and (other := _steps.index.usually_called(path, wanted)):
        raise _damaged(other, "")
    raise errors.CheckpointNotFoundError(
        f"{path} has no step {wanted}: it has {summary(list(index.steps))}"
        + _advice(path, index)
    )


def _is_one(path: Path) -> errors.OptionError:
    return errors.OptionError(
        f"{path} is one checkpoint, not a directory of steps: leave step out, or"
        " pass its parent"
    )


def _located(entry: _Entry) -> Located:
    """The checkpoint of a step.

    Raises:
        CheckpointFormatError: It is of a kind that is not read.
    """
    if entry.checkpoint is None:
        assert entry.error is not None, entry
        raise entry.error
    return Located(entry.path, entry.step, entry.checkpoint)


def _advice(path: Path, index: _Index) -> str:
    if advice := formats.advice_on_saves(path):
        return f"; {advice}"
    return "" if index.steps else formats.advice_on_names(path)


def _newest(root: Path, index: _Index) -> Located:
    """The newest good step; newer steps that are not good are logged."""
    marked: list[Path] = []
    unknown: list[int] = []
    newest = None
    for step in reversed(index.numbers):
        entry = index.find(step)
        if entry is None:
            unknown.insert(0, step)
        elif _steps.markers.is_damaged(entry.path):
            marked.insert(0, entry.path)
        else:
            newest = entry
            break
    doubts = [doubt for step in unknown if (doubt := index.find_doubtful(step))]
    damaged = [
        _damaged(doubt.path, doubt.why)
        for doubt in doubts
        if (doubt.why or not doubt.path.is_dir() or not _is_empty(doubt.path))
        and not formats.is_being_written(doubt.path)
    ]
    damaged += [_marked(path) for path in marked]
    if newest is None:
        if damaged:
            raise damaged[-1]
        formats.detect(root)  # raises
        raise errors.CheckpointNotFoundError(f"{root} has changed: try again")
    for error in damaged:
        _log.warning(
            "a newer step is left out, step %d is taken: %s", newest.step, error
        )
    return _located(newest)


def _marked(path: Path) -> errors.DamagedCheckpointError:
    """The error for a step that was found damaged before."""
    return errors.DamagedCheckpointError(
        f"{path} is marked as damaged: {_steps.markers.why_damaged(path)}; pass its"
        " number as"
        " step= to try it all the same"
    )


def _is_empty(path: Path) -> bool:
    # Nothing is ever committed empty.
    return not any(path.iterdir())


def _damaged(path: Path, why: str) -> errors.DamagedCheckpointError:
    """The error for what is called like a step and is not recognised."""
    if not why:
        try:
            formats.detect(path)
        except errors.CheckpointError as error:
            why = str(error)
    return errors.DamagedCheckpointError(
        f"{path} is called like a step, but cannot be read: {why or 'it was changed'}"
    )


def summary(steps: list[int]) -> str:
    """A few words on which steps there are."""
    if not steps:
        return "no steps"
    shown = ", ".join(str(step) for step in steps[-5:])
    if len(steps) > 5:
        return f"{len(steps)} steps, the newest {shown}"
    return f"steps {shown}"


def read_stored(path: Path, step: int | None, types: Sequence[type] = ()) -> Stored:
    """Reads everything but the arrays of the checkpoint at exactly this path."""
    with _storage.permissions.reading(path), _storage.paths.looking(path):
        return Located(path, step, formats.detect(path)).open(types)


def read_step(path: Path, step: int, types: Sequence[type] = ()) -> Stored:
    """The same, of a step of a run.

    Raises:
        DamagedCheckpointError: It is another step, under the name of this one.
    """
    stored = read_stored(path, step, types)
    check_step(path, step, stored)
    return stored


def check_step(path: Path, step: int, stored: Stored) -> None:
    """Asserts that a step of a run is the one that it is called.

    Raises:
        DamagedCheckpointError: It is not.
    """
    if stored.recorded_step not in (step, None):
        raise errors.DamagedCheckpointError(
            f"{path} is called like step {step} and was saved as step"
            f" {stored.recorded_step}: restore another step, or load it by its own path"
        )
