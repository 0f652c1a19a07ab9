"""Which checkpoint a path means, and what is in it, arrays unread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from flaxckpt import _state, _steps, _storage, errors, formats
from flaxckpt.formats._reader import Stored

_log = logging.getLogger(__name__)


def locate(
    path: Path, step: int | None, step_format: str | None = None
) -> tuple[Path, int | None]:
    """The checkpoint that `path` and `step` mean, and its number if it is a step.

    Args:
        path: A checkpoint, or a directory of steps.
        step: Which step of a directory; None is the newest.
        step_format: How its steps are called; by default as steps usually are, or as
            the run says.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointFormatError: What is there is none, or is several.
        DamagedCheckpointError: It is one that is not intact, or may not be read.
        OptionError: `step` is no step, or `path` is one checkpoint.
    """
    with _storage.permissions.reading(path), _storage.paths.looking(path):
        number = None if step is None else _steps.names.check(step)
        return _locate(path, number, number_of(step_format))


def number_of(step_format: str | None) -> _steps.scan.Number | None:
    """What gives the step that a name means under a format; None if there is none."""
    return None if step_format is None else _steps.names.StepFormat(step_format).step


def _locate(
    path: Path, step: int | None, number: _steps.scan.Number | None
) -> tuple[Path, int | None]:
    is_one = path.exists() and formats.recognises(path)
    if step is None and is_one:
        return path, None
    if is_one and not (
        path.is_dir() and step in _steps.scan.find(path, formats.recognises, number)
    ):
        raise errors.OptionError(
            f"{path} is one checkpoint, not a directory of steps: leave step out, or"
            " pass its parent"
        )
    if not path.is_dir():
        formats.detect(path)  # raises
    found = _steps.scan.of(path, formats.recognises, number)
    if step is None:
        return _newest(path, found)
    if step in found.doubtful:
        if formats.is_being_written(found.doubtful[step][0]):
            raise errors.CheckpointNotFoundError(
                f"{path} has no step {step} yet: {formats.advice_on_saves(path)}"
            )
        raise _damaged(*found.doubtful[step])
    if step not in found.steps:
        if number is None and (other := _steps.scan.called(path, step)):
            raise _damaged(other, "")
        raise errors.CheckpointNotFoundError(
            f"{path} has no step {step}: it has {summary(list(found.steps))}"
            + _advice(path, found)
        )
    return found.steps[step], step


def _advice(path: Path, found: _steps.scan.Found) -> str:
    if advice := formats.advice_on_saves(path):
        return f"; {advice}"
    return "" if found.steps else formats.advice_on_names(path)


def _newest(root: Path, found: _steps.scan.Found) -> tuple[Path, int]:
    """The newest good step; newer ones that are not good are logged."""
    marked = {s: p for s, p in found.steps.items() if _steps.markers.is_damaged(p)}
    steps = {s: p for s, p in found.steps.items() if s not in marked}
    newest = max(steps, default=-1)
    damaged = [
        _damaged(path, why)
        for number, (path, why) in found.doubtful.items()
        if number > newest
        and not (path.is_dir() and not why and _is_empty(path))
        and not formats.is_being_written(path)
    ]
    damaged += [_marked(path) for s, path in marked.items() if s > newest]
    if not steps:
        if damaged:
            raise damaged[-1]
        formats.detect(root)  # raises
    for error in damaged:
        _log.warning("a newer step is left out, step %d is taken: %s", newest, error)
    return steps[newest], newest


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
    """Reads everything of a checkpoint but its arrays."""
    with _storage.permissions.reading(path), _storage.paths.looking(path):
        reader = formats.detect(path).reader
        return reader.read(path, step=step, resolve=_state.classes.resolver(types))


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
