"""Locates the checkpoint of a path and a step, and opens it without its arrays."""

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
    """A recognised checkpoint.

    Attributes:
        path: Path of the checkpoint.
        step: Step number in a run directory; None for a single checkpoint.
        detected: Format of the checkpoint.
    """

    path: Path
    step: int | None
    detected: formats.Detected

    def open(self, types: Sequence[type] = ()) -> Stored:
        """Reads everything but the arrays of the checkpoint.

        Args:
            types: Classes of the caller that the checkpoint may name.

        Raises:
            CheckpointNotFoundError: The checkpoint was deleted since.
            CheckpointFormatError: The checkpoint is of an unsupported kind.
            DamagedCheckpointError: The checkpoint is not intact, or may not be read.
        """
        with (
            _storage.permissions.reading(self.path),
            _storage.paths.listing_cache(self.path),
        ):
            return self._read(types)

    def _read(self, types: Sequence[type]) -> Stored:
        return self.detected.reader.read(
            self.path, step=self.step, resolve=_state.treedef.resolver(types)
        )


def open_checkpoint(
    path: PathLike,
    step: int | None = None,
    *,
    step_format: str | None = None,
    types: Sequence[type] = (),
) -> Stored:
    """Locates a checkpoint and reads everything but the arrays.

    See `locate` and `Located.open`.
    """
    root = _storage.paths.resolve(path)
    with _storage.permissions.reading(root), _storage.paths.listing_cache(root):
        located = _locate(root, step, step_format)
        try:
            return located._read(types)
        except OSError as error:
            unread = error
    # Only outside `looking`, whose listing still has a file deleted meanwhile.
    with _storage.permissions.reading(located.path):
        raise unread


def locate(
    path: PathLike, step: int | None = None, *, step_format: str | None = None
) -> Located:
    """Returns the checkpoint at `path`, or a step of the run directory `path`.

    Args:
        path: A checkpoint, or a directory of steps.
        step: Step number in a directory; None is the newest.
        step_format: Names of the steps; by default the usual names, or the format
            recorded in the run.

    Raises:
        CheckpointNotFoundError: No such checkpoint exists.
        CheckpointFormatError: The path holds something else, or several checkpoints.
        DamagedCheckpointError: The checkpoint is not intact, or may not be read.
        OptionError: `step` is not a step number, or `path` is a single checkpoint.
    """
    root = _storage.paths.resolve(path)
    with _storage.permissions.reading(root), _storage.paths.listing_cache(root):
        return _locate(root, step, step_format)


def number_of(step_format: str | None) -> _steps.names.Number | None:
    """Returns the function from names to step numbers; None without `step_format`."""
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
    if number is None and (other := _steps.index.find_usual_name(path, wanted)):
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
    """Returns the checkpoint of a step.

    Raises:
        CheckpointFormatError: The checkpoint is of an unsupported kind.
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
    """Returns the newest recognised, unmarked step; logs damaged newer steps."""
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
    """Returns the error for a step already marked as damaged."""
    return errors.DamagedCheckpointError(
        f"{path} is marked as damaged: {_steps.markers.damage_reason(path)}; pass its"
        " number as"
        " step= to try it all the same"
    )


def _is_empty(path: Path) -> bool:
    # A commit is never empty.
    return not any(path.iterdir())


def _damaged(path: Path, why: str) -> errors.DamagedCheckpointError:
    """Returns the error for an unreadable path with the name of a step."""
    if not why:
        try:
            formats.detect(path)
        except errors.CheckpointError as error:
            why = str(error)
    return errors.DamagedCheckpointError(
        f"{path} is called like a step, but cannot be read: {why or 'it was changed'}"
    )


def summary(steps: list[int]) -> str:
    """Returns a short list of steps, for messages."""
    if not steps:
        return "no steps"
    shown = ", ".join(str(step) for step in steps[-5:])
    if len(steps) > 5:
        return f"{len(steps)} steps, the newest {shown}"
    return f"steps {shown}"


def read_stored(path: Path, step: int | None, types: Sequence[type] = ()) -> Stored:
    """Reads everything but the arrays of the checkpoint at exactly `path`."""
    with _storage.permissions.reading(path), _storage.paths.listing_cache(path):
        return Located(path, step, formats.detect(path)).open(types)


def read_step(path: Path, step: int, types: Sequence[type] = ()) -> Stored:
    """Reads everything but the arrays of a step of a run.

    Raises:
        DamagedCheckpointError: The checkpoint was saved as another step.
    """
    stored = read_stored(path, step, types)
    check_step(path, step, stored)
    return stored


def check_step(path: Path, step: int, stored: Stored) -> None:
    """Raises DamagedCheckpointError if `stored` was saved as another step.

    Raises:
        DamagedCheckpointError: Names both steps.
    """
    if stored.recorded_step not in (step, None):
        raise errors.DamagedCheckpointError(
            f"{path} is called like step {step} and was saved as step"
            f" {stored.recorded_step}: restore another step, or load it by its own path"
        )
