"""Which steps of a run directory stay, seen from outside of the run.

A directory does not record its policies, so they are asked for. How its steps are
called is found out, or asked for, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flaxckpt import _run, _steps, _storage, errors, formats, policies
from flaxckpt._run.checkpointer import Checkpointer
from flaxckpt._types import PathLike
from flaxckpt.formats import _locate, _native
from flaxckpt.policies import PreservationPolicy


class Survey(NamedTuple):
    """The steps under a run directory.

    Attributes:
        steps: Step -> the checkpoint, ascending.
        doubtful: Step -> the path that may be a damaged step, and why. Ascending.
        step_format: How the steps are called, if that was given.
    """

    steps: dict[int, Path]
    doubtful: dict[int, tuple[Path, str]]
    step_format: str | None = None


def survey(root: Path, step_format: str | None = None) -> Survey:
    """The steps under a run directory; none if a run has only begun.

    Args:
        root: The directory.
        step_format: How they are called; by default as steps usually are, or as the run
            says.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError: Nothing is there, or something
            else.
        OptionError: It is one checkpoint.
    """
    if not root.is_dir() or formats.recognises(root):
        formats.detect(root)
        raise errors.OptionError(
            f"{root} is one checkpoint, not a directory of steps: pass its parent"
        )
    with _storage.permissions.explained(root):
        number = _locate.number_of(step_format)
        index = _steps.index.StepIndex(root, formats.identify, number)
        doubtful = {s: (d.path, d.why) for s, d in index.doubtful.items()}
        doubtful = {s: doubt for s, doubt in doubtful.items() if not _is_empty(*doubt)}
        found = Survey(index.steps, doubtful, step_format)
        if not all_steps(found) and not _has_only_begun(root):
            if step_format is None:
                formats.detect(root)  # raises
            raise errors.CheckpointNotFoundError(
                f"{root} has no steps called like {step_format!r}: see that directory"
                " and format are right"
            )
    return found


def _is_empty(path: Path, why: str) -> bool:
    """Whether it is a directory without anything in it: no step is committed empty."""
    return not why and path.is_dir() and not any(path.iterdir())


def _has_only_begun(root: Path) -> bool:
    """Whether a directory has nothing in it but what a run makes before its steps."""
    return all(
        child.name in _BEFORE_STEPS
        or _storage.temporary.TEMPORARY in child.name
        or _is_empty(child, "")
        for child in root.iterdir()
    )


_BEFORE_STEPS = (_steps.journal.NAME, "metadata", "params_only")


def all_steps(found: Survey) -> dict[int, Path]:
    """The steps, and what may be some, ascending."""
    doubtful = {step: path for step, (path, _) in found.doubtful.items()}
    return dict(sorted({**doubtful, **found.steps}.items()))


def numbers(path: PathLike, step_format: str | None = None) -> list[int]:
    """The steps of a run directory, and what may be some, ascending."""
    return list(all_steps(survey(_storage.local.resolve(path), step_format)))


def damage(path: Path, doubt: str | None) -> str | None:
    """What is known to be wrong with a step.

    Args:
        path: Where it is.
        doubt: Why it is only called like a step; None if it is one.
    """
    if doubt:
        return doubt
    if doubt is None:
        return (
            _steps.markers.why_damaged(path)
            if _steps.markers.is_damaged(path)
            else None
        )
    try:
        formats.detect(path)
    except errors.CheckpointError as error:
        return str(error)
    return None


def has_damage(found: Survey) -> bool:
    """Whether any of the steps is known to be damaged."""
    return any(
        damage(path, found.doubtful.get(step, (path, None))[1]) is not None
        for step, path in all_steps(found).items()
    )


def created(path: Path) -> float | None:
    """When a step was saved, as far as it tells; None if it is gone."""
    try:
        if path.is_dir():
            return _native.items.read_created(path)
        return path.stat().st_mtime
    except (OSError, ValueError):  # gone, or an empty directory
        return None


# ---- why they stay ----------------------------------------------------------------


def explain(
    root: Path, found: Survey, keep: Sequence[PreservationPolicy]
) -> dict[int, list[str]]:
    """Why each step stays, oldest first; a step without a reason would go.

    Args:
        root: The run directory.
        found: The steps that are there.
        keep: The policies of the run.
    """
    name = step_format(found)
    if name is not None:
        run = Checkpointer(root, keep=keep, step_format=name, read_only=True)
        with _storage.permissions.explained(root):
            reasons = run.explain()
    else:
        reasons = policies.decide(
            keep, [_ranked(*item) for item in found.steps.items()]
        )
    for step, (path, why) in found.doubtful.items():
        reasons[step] = [f"damaged: {damage(path, why)}"]
    return dict(sorted(reasons.items()))


def step_format(found: Survey) -> str | None:
    """How the steps are called, as a `Checkpointer` takes it; None if it cannot."""
    if not all(path.is_dir() for path in found.steps.values()):
        return None
    if found.step_format is not None:
        return found.step_format
    for template in _templates(found):
        known = _steps.names.StepFormat(template)
        if all(known.step(path.name) == step for step, path in found.steps.items()):
            return template
    return None


def _templates(found: Survey) -> list[str]:
    """What the names of all steps may be made of."""
    if not found.steps:
        return ["{step}"]
    # The smallest number has the most zeros before it, if any has.
    name = found.steps[min(found.steps)].name
    digits = re.search("[0-9]+$", name)
    assert digits is not None, name
    prefix = name[: digits.start()]
    if any(char in prefix for char in "{}/\\\0"):
        return []
    return [f"{prefix}{{step}}", f"{prefix}{{step:0{len(digits[0])}d}}"]


def _ranked(step: int, path: Path) -> _run.metrics.Ranked:
    """A step of a run whose names no `Checkpointer` has."""
    return _run.metrics.Ranked(
        step,
        temporary=False,
        elsewhere={},
        metrics=dict,
        created=lambda: created(path) or 0.0,
    )


# ---- changing ---------------------------------------------------------------------


def opened(
    path: PathLike,
    *,
    keep: Sequence[PreservationPolicy] = (),
    keep_dataset: Sequence[PreservationPolicy] = (),
    read_only: bool = False,
    called: str | None = None,
) -> Checkpointer:
    """Opens a run directory that is there.

    Args:
        path: The directory.
        keep: As of `Checkpointer`.
        keep_dataset: As of `Checkpointer`.
        read_only: As of `Checkpointer`.
        called: The format of its steps' names; by default it is found out.

    Raises:
        CheckpointNotFoundError, CheckpointFormatError: It is none.
        OptionError: It is one checkpoint, or its steps are called as no `Checkpointer`
            calls them.
    """
    root = _storage.local.resolve(path)
    name = step_format(survey(root, called))
    if name is None:
        raise errors.OptionError(
            f"the steps of {root} are not directories with names such as 100, step_100"
            " or 00000100, all of one format: only such are pinned and pruned. If names"
            " are mixed, say which are meant, as in --step-format 'step_{step}'"
        )
    return Checkpointer(
        root,
        keep=keep,
        keep_dataset=keep_dataset,
        step_format=name,
        read_only=read_only,
    )


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, or would be.

    Attributes:
        path: The run directory.
        dry_run: Whether nothing was done.
        deleted: The steps.
        left: Those that were to go and could not be deleted; the log says why.
        bytes: The size of the files that only these have; None in object stores.
        reasons: Step -> why it stays, of all that were there.
    """

    path: str
    dry_run: bool
    deleted: tuple[int, ...]
    left: tuple[int, ...]
    bytes: int | None
    reasons: Mapping[int, Sequence[str]]


def prune(
    path: PathLike,
    *,
    keep: Sequence[PreservationPolicy],
    keep_dataset: Sequence[PreservationPolicy] = (),
    dry_run: bool,
    step_format: str | None = None,
) -> Pruned:
    """Deletes the steps of a run that no policy keeps, or says which.

    Args:
        path: The run directory.
        keep: Its policies.
        keep_dataset: As of `Checkpointer`; of those that stay.
        dry_run: Whether it is only said.
        step_format: How its steps are called; by default it is found out.

    Raises:
        OptionError: A policy asks for a metric that no step has.
        SaveFailedError: The newest step is damaged, so that older ones stay.
        CheckpointError: As for `opened`.
    """
    with opened(
        path,
        keep=keep,
        keep_dataset=keep_dataset,
        read_only=dry_run,
        called=step_format,
    ) as run:
        reasons = run.explain()
        _check_metrics(run, reasons)
        sizes = _own_sizes(survey(run.directory, step_format).steps, reasons)
        deleted = run.prune(dry_run=dry_run)
        freed = None if sizes is None else sum(sizes.get(s, 0) for s in deleted)
        left = tuple(s for s, why in reasons.items() if not why and s not in deleted)
        return Pruned(str(run.directory), dry_run, deleted, left, freed, reasons)


def _check_metrics(run: Checkpointer, reasons: Mapping[int, Sequence[str]]) -> None:
    """Refuses a policy that keeps nothing because of how its metric is written."""
    for policy in run.keep:
        if not isinstance(policy, policies.BestN) or not reasons:
            continue
        if policies.WithoutMetric(policy.metric) in run.keep:
            continue  # it keeps all of them
        if any(str(policy) in why for why in reasons.values()):
            continue
        known = sorted({name for step in run.steps() for name in run.metrics(step)})
        raise errors.OptionError(
            f"no step of {run.directory} has a finite metric {policy.metric!r}, so the"
            f" best cannot be told and would go; there"
            f" {'are ' + ', '.join(known) if known else 'is none'}"
        )


def _own_sizes(
    steps: Mapping[int, Path], reasons: Mapping[int, Sequence[str]]
) -> dict[int, int] | None:
    """How much each step has that goes, which none has that stays."""
    counted: set[_run.disk_usage.FileId] = set()
    found = {}
    for step in sorted(steps, key=lambda step: not reasons.get(step)):
        usage = _run.disk_usage.on_disk(steps[step], counted)
        if usage is None:
            return None
        found[step] = usage.own
    return found


def set_pinned(
    path: PathLike,
    steps: Sequence[int],
    *,
    pinned: bool,
    step_format: str | None = None,
) -> str:
    """Pins steps, or leaves them to the policies again; all of them or none.

    Args:
        path: The run directory.
        steps: Their numbers.
        pinned: Whether they are pinned.
        step_format: How the steps are called; by default it is found out.

    Returns:
        The run directory.

    Raises:
        CheckpointNotFoundError: It has no such step.
        SaveFailedError: That could not be written down.
        CheckpointError: As for `opened`.
    """
    with opened(path, read_only=True, called=step_format) as run:
        known = {*run.steps(), *run.damaged()}
        for step in steps:
            if step not in known:
                run.metadata(step)  # raises
    with opened(path, called=step_format) as run:
        for step in steps:
            (run.pin if pinned else run.unpin)(step)
        return str(run.directory)
