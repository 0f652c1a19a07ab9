"""The steps under a directory, whatever they are called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _unfinished, errors

_T5X_TEMPORARY = re.compile(r"\.tmp-[0-9]+")
"""How T5X ends the name of a step that is not finished."""

_ANY_NAME = re.compile(r"(?:.*(?<![0-9]\.)(?<![0-9]))?([0-9]{1,18})", re.DOTALL)

_SIGNS = ("flaxckpt.json", "_CHECKPOINT_METADATA", "commit_success.txt")
"""Files of which each is in steps and nowhere else."""

_USUAL_PREFIX = re.compile(r"(?:checkpoint|ckpt|step)?[-_]?|streaming_.*_", re.DOTALL)


class Found(NamedTuple):
    """What is under a run directory.

    Attributes:
        steps: Step -> the checkpoint, ascending.
        doubtful: Step -> what is called like those, or has files that only a step has,
            but is not recognised; and why. Ascending.
    """

    steps: dict[int, Path]
    doubtful: dict[int, tuple[Path, str]]


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
            for _, path, number in _called_like_steps(root)
            if number == step and is_usual_name(path.name)
        ),
        None,
    )


def find(root: Path, is_checkpoint: Callable[[Path], bool]) -> dict[int, Path]:
    """The steps under `root`, however they are called, ascending.

    See `of`.
    """
    return of(root, is_checkpoint).steps


def of(root: Path, is_checkpoint: Callable[[Path], bool]) -> Found:
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
        if not match or _unfinished.TEMPORARY in path.name or path.is_symlink():
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
    return (prefix, path.is_dir()) in kinds or sign(path) is not None
