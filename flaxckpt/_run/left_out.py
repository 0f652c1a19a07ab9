"""Finds checkpoints that are no steps, beside which a run would silently begin anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flaxckpt import _formats, _steps, errors


def find(
    directory: Path,
    step_format: _steps.names.StepFormat,
    latest: int | None,
    *,
    only_usual: bool = False,
) -> dict[int, Path]:
    """Returns the checkpoints after the step `latest` that are no steps, ascending.

    If there are steps, or `only_usual`, the names are usual, or those of former steps.
    """
    return _steps.index.find_left_out(
        directory,
        step_format,
        _formats.identify,
        after=latest,
        only_usual=only_usual or latest is not None,
    )


def describe(found: Mapping[int, Path], step_format: _steps.names.StepFormat) -> str:
    """Returns what `find` has found, and what to do: the end of "the run has …"."""
    newest = found[max(found)]
    if newest.is_symlink():
        return (
            f"the symbolic link {errors.printable(newest.name)}, which is no step: move"
            " the directory that it points to here, or begin another run from it with"
            " source=; to go on without it, remove the link"
        )
    names = {step: path.name for step, path in found.items()}
    formats = [each.template for each in _steps.names.list_formats(newest.name)]
    template = _steps.names.find_format(names) or next(iter(formats), None)
    theirs = "the step_format of their save"
    if template is not None:
        theirs = f"step_format={errors.printable(template)!r}"
    listed = errors.first_few([errors.printable(names[n]) for n in reversed(names)])
    return (
        f"checkpoints with other names than {step_format.template!r}: {listed}. To"
        f" continue with them, pass {theirs}, or begin another run from one"
        " with source=; to go on without them, move them to another directory"
    )
