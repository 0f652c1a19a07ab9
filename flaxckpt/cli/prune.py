"""`flaxckpt prune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flaxckpt.cli import _app, _output, _policies
from flaxckpt.cli._output import Cell, TextColumn
from flaxckpt.cli._parameters import Option

if TYPE_CHECKING:
    from flaxckpt._inspect.run_view import Pruned


@_app.verb
def prune(
    path: _app.RunArgument,
    keep: _policies.KeepOption = None,
    config: _policies.ConfigOption = None,
    group: _policies.GroupOption = None,
    yes: Annotated[
        bool, Option("--yes", "-y", help="Delete the steps; otherwise only list them.")
    ] = False,
    step_format: _app.StepFormatOption = None,
    json: _app.JsonOption = False,
) -> int:
    """Deletes the steps that no policy keeps.

    Without --yes, only lists them. A run of flaxckpt records its policies; --keep or
    --config replace them.
    Never deletes the newest step, pinned steps, and steps being read. Deletes nothing
    until the newest step has been verified. Exits with 1 if a step could not be
    deleted.

    Example:
      flaxckpt prune runs/7
      flaxckpt prune runs/7 --keep latest:3 --keep best:1:eval/loss:min --yes
    """
    from flaxckpt import _inspect

    rules = _policies.parse_rules(keep, config, group)
    result = _inspect.run_view.prune(
        path, rules, dry_run=not yes, step_format=step_format
    )
    code = _app.FINDING if result.left else _app.SUCCESS
    if json:
        _output.print_document(result)
        return code
    columns = [TextColumn("step", is_number=True), TextColumn("kept by")]
    _output.print_table(columns, [_row(result, step) for step in result.reasons])
    verb = "would be deleted" if result.dry_run else "deleted"
    for item, steps in _steps_of_items(result).items():
        numbers = ", ".join(map(str, steps))
        _output.print_paragraph(f"{item} of step {numbers}: {verb}")
    _output.print_paragraph(_summary(result))
    return code


def _steps_of_items(result: Pruned) -> dict[str, list[int]]:
    steps: dict[str, list[int]] = {}
    for step, item in result.items:
        steps.setdefault(item, []).append(step)
    return steps


def _row(result: Pruned, step: int) -> list[str | Cell]:
    if step in result.deleted:
        return [
            str(step),
            Cell("would be deleted" if result.dry_run else "deleted", "yellow"),
        ]
    why = ", ".join(result.reasons[step])
    return [str(step), why or Cell("could not be deleted", "red")]


def _summary(result: Pruned) -> str:
    if result.left:
        total = _output.count(len(result.deleted + result.left), "step")
        return f"deleted {len(result.deleted):,} of {total}"
    if not result.deleted and not result.items:
        return "nothing to delete"
    steps = _output.count(len(result.deleted), "step")
    if result.items:
        steps += f" and {_output.count(len(result.items), 'item')} of other steps"
    if result.bytes is not None:
        steps += f", {_output.size(result.bytes)}"
    if result.dry_run:
        return f"would delete {steps}: pass --yes to delete"
    return f"deleted {steps}"
