"""The steps under a directory, which are called as steps usually are, or as a run says.

Anything else whose name ends in a number, as `model1`, is a step only if the format of
its name is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from flaxckpt import _storage, errors
from flaxckpt._steps import journal

_T5X_TEMPORARY = re.compile(r"\.tmp-[0-9]+")
"""How T5X ends the name of a step that is not finished."""

_ANY_NAME = re.compile(r"(?:.*(?<![0-9]\.)(?<![0-9]))?([0-9]{1,18})", re.DOTALL)

_SIGNS = ("flaxckpt.json", "_CHECKPOINT_METADATA", "commit_success.txt")
"""Files of which each is in steps and nowhere else."""

_USUAL_PREFIX = re.compile(
    r"(?:checkpoint|ckpt|step)?[-_]?|checkpoint\.npz-|streaming_.*_", re.DOTALL
)


Number: TypeAlias = Callable[[str], int | None]
"""Gives the step that a name means; None if it means none."""


class Found(NamedTuple):
    """What is under a run directory.

    Attributes:
        steps: Step -> the checkpoint, ascending.
        doubtful: Step -> what is called like those, or has files that only a step has,
            but is not recognised; and why. Ascending.
        step_format: How they are called, if that was given.
    """

    steps: dict[int, Path]
    doubtful: dict[int, tuple[Path, str]]
    step_format: str | None = None


def sign(path: Path) -> str | None:
    """The file by which a directory is known to be, or to have been, a checkpoint."""
    return next((name for name in _SIGNS if (path / name).is_file()), None)


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
            for _, path, number in _ending_in_numbers(root)
            if number == step and is_usual_name(path.name)
        ),
        None,
    )


def find(
    root: Path, is_checkpoint: Callable[[Path], bool], number: Number | None = None
) -> dict[int, Path]:
    """The steps under `root`, ascending; see `of`."""
    return of(root, is_checkpoint, number).steps


def with_any_name(
    root: Path, is_checkpoint: Callable[[Path], bool]
) -> dict[int, list[Path]]:
    """Number -> checkpoints whose names end in it, steps or not."""
    found: dict[int, list[Path]] = {}
    for _, path, step in _ending_in_numbers(root):
        try:
            is_one = is_checkpoint(path)
        except errors.CheckpointFormatError:  # several items, or damage
            is_one = True
        if is_one:
            found.setdefault(step, []).append(path)
    return found


def of(
    root: Path, is_checkpoint: Callable[[Path], bool], number: Number | None = None
) -> Found:
    """What is under `root`: steps, and what may be damaged ones.

    Args:
        root: A directory.
        is_checkpoint: Tells a step from what is merely called like one.
        number: Gives the step that a name means. By default steps are called as the
            journal of the run says, or as steps usually are: `3`, `step_3`,
            `checkpoint_3`.

    Raises:
        CheckpointFormatError: Two of them are one step.
    """
    steps: dict[int, Path] = {}
    doubts: list[tuple[Path, int, str]] = []
    called = _called_like_steps(root, number)
    for path, step in called:
        try:
            is_step = is_checkpoint(path)
        except errors.DamagedCheckpointError as error:
            doubts.append((path, step, str(error)))
            continue
        except errors.CheckpointFormatError:
            is_step = True  # it says what is to be done when it is read
        if not is_step:
            doubts.append((path, step, ""))
        elif step in steps:
            raise errors.CheckpointFormatError(
                f"{root} holds step {step} twice, as"
                f" {errors.printable(steps[step].name)} and"
                f" {errors.printable(path.name)}: pass the path of one of them"
            )
        else:
            steps[step] = path
    kinds = {(_prefix(path.name), path.is_dir()) for path in steps.values()}
    doubtful = {
        step: (path, why)
        for path, step, why in doubts
        if step not in steps
        and (
            why  # it cannot even be looked at
            or (_prefix(path.name), path.is_dir()) in kinds
            or sign(path) is not None
        )
    }
    return Found(dict(sorted(steps.items())), dict(sorted(doubtful.items())))


def _called_like_steps(root: Path, number: Number | None) -> list[tuple[Path, int]]:
    """What has the name of a step, with its number."""
    if number is not None:
        return [
            (path, step)
            for path in _finished(root)
            if (step := number(path.name)) is not None
        ]
    found = list(_ending_in_numbers(root))
    prefixes = {prefix for prefix, _, _ in found}
    usual = {prefix for prefix in prefixes if _USUAL_PREFIX.fullmatch(prefix)}
    if len(prefixes) > 1 or not usual:
        usual = prefixes & _recorded(root) or usual
    return [(path, step) for prefix, path, step in found if prefix in usual]


def _recorded(root: Path) -> set[str]:
    """The prefix of step names in the run's journal."""
    found = set()
    for event in journal.recent(root / journal.NAME):
        name = event.path.rstrip("/").rpartition("/")[2]
        match = _ANY_NAME.fullmatch(name) if event.kind == "committed" else None
        if match is not None and int(match[1]) == event.step:
            found.add(name[: match.start(1)])
    return found


def _ending_in_numbers(root: Path) -> Iterator[tuple[str, Path, int]]:
    """What begins the name, path and number of what has a number at its end."""
    for path in _finished(root):
        if match := _ANY_NAME.fullmatch(path.name):
            yield path.name[: match.start(1)], path, int(match[1])


def _finished(root: Path) -> Iterator[Path]:
    """The entries under `root`, except links and entries being written or deleted."""
    for path in sorted(root.iterdir()):
        is_temporary = (
            _storage.temporary.TEMPORARY in path.name
            or _T5X_TEMPORARY.search(path.name)
        )
        if not is_temporary and not path.is_symlink():
            yield path


def _prefix(name: str) -> str:
    """The part of a name before its final number."""
    match = _ANY_NAME.fullmatch(name)
    return name[: match.start(1)] if match else name
