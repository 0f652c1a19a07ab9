"""Locates the checkpoint of a path and a step, and opens it without its arrays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from flaxckpt import _formats, _state, _steps, _storage, errors
from flaxckpt._formats import hub_cache
from flaxckpt._formats.reader import CheckpointMetadata, Stored
from flaxckpt._types import PathLike

_log = logging.getLogger(__name__)

_Entry: TypeAlias = "_steps.index.Entry[_formats.DetectedFormat]"
_Index: TypeAlias = "_steps.index.StepIndex[_formats.DetectedFormat]"


_ABOUT_LINKS = "which is no step of a run: pass its path alone to load it"


class Located(NamedTuple):
    """A recognised checkpoint; `step` is None outside of a run directory."""

    path: Path
    step: int | None
    detected: _formats.DetectedFormat

    def open(self, types: Sequence[type] = ()) -> Stored:
        """Reads all but the arrays; the checkpoint may name the caller's `types`.

        Raises CheckpointNotFoundError if it was deleted since; CheckpointFormatError if
        it is of an unsupported kind; DamagedCheckpointError if it is not intact, was
        saved as another step, or may not be read.
        """
        stored = self.open_as_saved(types)
        check_step(self.path, self.step, stored)
        return stored

    def open_as_saved(self, types: Sequence[type] = ()) -> Stored:
        """Returns the same as `open`, also if it was saved as another step."""
        with (
            _storage.read_errors.reading(self.path),
            _storage.paths.listing_cache(self.path),
        ):
            return self._read(types)

    def _read(self, types: Sequence[type] | None, *, warn: bool = True) -> Stored:
        """Returns the same as `open_as_saved`; imports no class if `types` is None."""
        resolve: _state.treedef.Resolve = _state.treedef.resolve_nothing
        if types is not None:
            resolve = _state.classes.resolver(types)
        reader = self.detected.reader
        stored = reader.read(self.path, step=self.step, resolve=resolve)
        for text in stored.warnings if warn else ():
            _log.warning("%s", text)
        return stored


def open_checkpoint(
    path: PathLike, step: int | None = None, *, types: Sequence[type] | None = ()
) -> Stored:
    """Locates a checkpoint, reads all but arrays; imports no class without `types`."""
    located, stored = _open(path, step, None, types)
    check_step(located.path, located.step, stored)
    return stored


def read_metadata(
    path: PathLike, step: int | None = None, *, step_format: str | None = None
) -> CheckpointMetadata:
    """Locates a checkpoint and returns its metadata, without importing any class."""
    return open_without_classes(path, step, step_format=step_format).metadata


def open_without_classes(
    path: PathLike, step: int | None = None, *, step_format: str | None = None
) -> Stored:
    """Locates and reads all but arrays; imports no class, builds dicts and lists."""
    return _open(path, step, step_format, None)[1]


def _open(
    path: PathLike,
    step: int | None,
    step_format: str | None,
    types: Sequence[type] | None,
) -> tuple[Located, Stored]:
    root = _storage.paths.resolve(path)
    with _storage.read_errors.reading(root), _storage.paths.listing_cache(root):
        located = _locate(root, step, step_format)
        try:
            return located, located._read(types)
        except OSError as error:
            unread = error
    # Only outside `listing_cache`, which still lists a file deleted meanwhile.
    with _storage.read_errors.reading(located.path):
        raise unread


def locate(
    path: PathLike,
    step: int | None = None,
    *,
    step_format: str | None = None,
    warn: bool = True,
) -> Located:
    """Returns the checkpoint at `path`, or a step of the run directory `path`.

    By default it is the newest step, of the usual format or that recorded in the run.

    Raises:
        CheckpointNotFoundError: No such checkpoint exists.
        CheckpointFormatError: The path holds something else, or several checkpoints.
        DamagedCheckpointError: The checkpoint is not intact, or may not be read.
        OptionError: `step` is not a step number, or `path` is a single checkpoint.
    """
    root = _storage.paths.resolve(path)
    with _storage.read_errors.reading(root), _storage.paths.listing_cache(root):
        return _locate(root, step, step_format, warn)


def step_parser(step_format: str | None) -> _steps.names.Number | None:
    """Returns the function from names to step numbers; None without `step_format`."""
    return None if step_format is None else _steps.names.StepFormat(step_format).step


def _locate(
    path: Path, step: int | None, step_format: str | None, warn: bool = True
) -> Located:
    step = None if step is None else _steps.names.check(step)
    number = step_parser(step_format)
    detected = _formats.find_format(path) if _formats.exists(path) else None
    if detected is not None and step is None:
        found = path
        if detected.format == "big_vision":
            found = _formats.follow(path)
        elif detected.format in _formats.IN_SHARDS:
            found = hub_cache.find_snapshot(path) or path
        return Located(found, None, detected)
    if not path.is_dir():
        if detected is None:
            _formats.detect(path)  # raises
        raise _not_a_directory(path)
    index = _steps.index.StepIndex(path, _formats.identify, number)
    if step is None:
        return _newest(path, index, number, warn)
    if (entry := index.find(step)) is not None:
        return _to_located(entry)
    if detected is not None:
        raise _not_a_directory(path)
    if (doubt := index.find_doubtful(step)) is not None:
        if _formats.is_being_written(doubt.path):
            raise errors.CheckpointNotFoundError(
                f"{path} has no step {step} yet: {_formats.advice_on_saves(path)}"
            )
        raise _damaged_error(doubt.path, doubt.why) from doubt.error
    if number is None and (other := _steps.index.find_usual_name(path, step)):
        raise _damaged_error(other, "")
    advice = _formats.advice_on_saves(path)
    if link := _steps.index.find_links(path, number).get(step):
        advice = f"; {link.name} is a symbolic link, {_ABOUT_LINKS}"
    elif advice:
        advice = f"; {advice}"
    elif not index.steps:
        advice = _formats.advice_on_names(path)
    raise errors.CheckpointNotFoundError(
        f"{path} has no step {step}: it has {summarize(list(index.steps), step)}"
        f"{advice}{_steps.journal.describe_deletion(path, step)}"
    )


def find_doubtful(path: Path, step: int | None) -> Path:
    """Returns the path of a damaged step; `path` itself if that is unknown."""
    if step is None:
        return path
    try:
        index = _steps.index.StepIndex(path, _formats.identify)
        doubt = index.find_doubtful(step)
    except (errors.CheckpointError, OSError):
        return path
    return path if doubt is None else doubt.path


def _not_a_directory(path: Path) -> errors.OptionError:
    return errors.OptionError(
        f"{path} is a single checkpoint, not a directory of steps: leave step out,"
        " or pass its parent"
    )


def _to_located(entry: _Entry) -> Located:
    """Returns the checkpoint of a step; raises its error if it has none."""
    if entry.checkpoint is None:
        assert entry.error is not None, entry
        raise entry.error
    return Located(entry.path, entry.step, entry.checkpoint)


def _newest(
    root: Path, index: _Index, number: _steps.names.Number | None, warn: bool
) -> Located:
    """Returns the newest recognised, unmarked step; logs newer steps left out."""
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
        _damaged_error(doubt.path, doubt.why)
        for doubt in doubts
        # A commit is never empty.
        if (doubt.why or not doubt.path.is_dir() or any(doubt.path.iterdir()))
        and not _formats.is_being_written(doubt.path)
    ]
    damaged += [
        errors.DamagedCheckpointError(
            f"{path} is marked as damaged: {_steps.markers.damage_reason(path)}; pass"
            " its number as step= to try it anyway"
        )
        for path in marked
    ]
    after = None if newest is None else newest.step
    left_out = [
        *damaged,
        *(
            errors.CheckpointFormatError(f"{path} is a symbolic link, {_ABOUT_LINKS}")
            for path in _steps.index.find_links(root, number, after).values()
        ),
    ]
    if newest is None:
        if left_out:
            raise left_out[-1]
        _formats.detect(root)  # raises
        raise errors.CheckpointNotFoundError(
            f"{root} changed while it was read: try again"
        )
    for error in left_out if warn else ():
        _log.warning(
            "a newer step is left out, and step %d is used: %s", newest.step, error
        )
    return _to_located(newest)


def _damaged_error(path: Path, why: str) -> errors.DamagedCheckpointError:
    """Returns the error for an unreadable path with the name of a step."""
    why = find_damage(path, why) or "it has changed"
    return errors.DamagedCheckpointError(
        f"{path} has the name of a step, but cannot be read: {why}"
    )


def find_damage(path: Path, why: str) -> str | None:
    """Returns why a path named like a checkpoint is none; None if it is one."""
    if why:
        return why
    try:
        _formats.detect(path)
    except errors.CheckpointError as error:
        return str(error)
    return None


def summarize(steps: list[int], near: int) -> str:
    """Returns a short list of steps, for messages: of many, those near a number."""
    if not steps:
        return "no steps"
    if len(steps) > 5:
        return f"{len(steps):,} steps, the nearest {list_nearest(steps, near)}"
    return f"steps {', '.join(map(str, steps))}"


def list_nearest(steps: Sequence[int], near: int) -> str:
    """Returns the two steps below a number and the two above it, joined by commas."""
    below = [step for step in sorted(steps) if step < near][-2:]
    above = [step for step in sorted(steps) if step > near][:2]
    return ", ".join(map(str, (*below, *above)))


def read_stored(path: Path, step: int | None, types: Sequence[type] = ()) -> Stored:
    """Reads everything but the arrays of the checkpoint at exactly `path`, as saved."""
    with _storage.read_errors.reading(path), _storage.paths.listing_cache(path):
        return Located(path, step, _formats.detect(path)).open_as_saved(types)


def read_without_classes(path: Path) -> Stored:
    """Reads all but the arrays at exactly `path`; imports no class, logs nothing."""
    with _storage.read_errors.reading(path), _storage.paths.listing_cache(path):
        located = Located(path, None, _formats.detect(path))
        return located._read(None, warn=False)


def read_step(path: Path, step: int | None) -> Stored:
    """Reads everything but the arrays of a step of a run; of any with `step` None."""
    stored = read_stored(path, step)
    check_step(path, step, stored)
    return stored


def check_step(path: Path, step: int | None, stored: Stored) -> None:
    """Raises DamagedCheckpointError if `stored`, or an item, is of another step."""
    if step is None:
        return
    parts = {path: stored, **{path / n: one for n, one in stored.own_items.items()}}
    for place, part in parts.items():
        if part.recorded_step not in (step, None):
            raise errors.DamagedCheckpointError(
                f"{place} has the name of step {step}, but was saved as step"
                f" {part.recorded_step}: restore another step, or load this path"
                " directly"
            )
