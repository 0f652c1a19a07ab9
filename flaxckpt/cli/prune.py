"""`flaxckpt prune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _policies
from flaxckpt.cli._output import Cell, TextColumn

if TYPE_CHECKING:
    from flaxckpt._inspect.run_view import Pruned


@_app.verb
def prune(
    path: _app.RunArgument,
    keep: _policies.KeepOption = None,
    config: _policies.ConfigOption = None,
    group: _policies.GroupOption = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Delete the steps; otherwise only list them."),
    ] = False,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Deletes the steps that no policy keeps.

    Without --yes, only lists them.
    Never deletes the newest step, pinned steps, and steps being read. Deletes nothing
    until the newest step has been verified. Exits with 1 if a step could not be
    deleted.

    Example:
      flaxckpt prune runs/7 --keep latest:3 --keep best:1:eval/loss:min --yes
    """
    from flaxckpt import _inspect

    policies, of_datasets = _policies.both(keep, config, group)
    if not policies:
        raise errors.OptionError(
            "prune needs policies, which a run directory does not record: pass"
            " --keep latest:3, --keep best:1:eval/loss:min, --keep every:1000, or the"
            " settings of the run as --config FILE"
        )
    found = _inspect.run_view.prune(
        path,
        keep=policies,
        keep_dataset=of_datasets,
        dry_run=not yes,
        step_format=step_format,
    )
    code = _app.FOUND if found.left else _app.FINE
    if json:
        _output.document(found)
        return code
    columns = [TextColumn("step", is_number=True), TextColumn("stays for")]
    _output.table(columns, [_row(found, step) for step in found.reasons])
    _output.line(_summary(found))
    return code


def _row(found: Pruned, step: int) -> list[str | Cell]:
    if step in found.deleted:
        return [str(step), Cell("goes" if found.dry_run else "deleted", "yellow")]
    why = ", ".join(found.reasons[step])
    return [str(step), why or Cell("could not be deleted", "red")]


def _summary(found: Pruned) -> str:
    if found.left:
        return f"deleted {len(found.deleted)} of {_steps(found.deleted + found.left)}"
    if not found.deleted:
        return "nothing to delete"
    what = _steps(found.deleted)
    if found.bytes is not None:
        what += f", {_output.size(found.bytes)}"
    if found.dry_run:
        return f"would delete {what}: pass --yes to do so"
    return f"deleted {what}"


def _steps(steps: Sequence[int]) -> str:
    return f"{len(steps)} {'step' if len(steps) == 1 else 'steps'}"
