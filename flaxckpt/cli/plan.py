"""`flaxckpt plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flaxckpt import errors
from flaxckpt.cli import _app, _output

if TYPE_CHECKING:
    from flaxckpt._checkpoint.plan import RestorePlan


@_app.verb
def plan(
    path: _app.PathArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The state to restore into: another checkpoint, a JSON file with"
            ' shapes, {"params": {"w": "float32[3, 4]"}}, or output of show --json.',
        ),
    ],
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    target_step: Annotated[
        int | None, typer.Option("--target-step", min=0, help="Step of TARGET.")
    ] = None,
    optimizer: Annotated[
        Literal["match", "exact", "reinit"] | None,
        typer.Option(
            "--optimizer",
            help="How to match optimizer leaves; by default by role, or by path if"
            " TARGET has no roles.",
            show_default=False,
        ),
    ] = None,
    unused: Annotated[
        Literal["warn", "error", "ignore"],
        typer.Option("--unused", help="How to treat leaves that TARGET lacks."),
    ] = "warn",
    json: _app.JsonOption = False,
) -> int:
    """Shows the plan of a restore, leaf by leaf.

    Plans a restore of PATH into the state of TARGET, and reads no arrays.
    Exits with 1 if the restore would fail.

    Example:
      flaxckpt plan runs/7 runs/8
      flaxckpt plan runs/7 wanted.json
    """
    from flaxckpt import _checkpoint, _inspect

    path, step = _app.locate_step(path, step, step_format)
    target_state = _inspect.abstract_file.read_target(target, step=target_step)
    restore_plan = _checkpoint.restore.plan(
        path,
        target_state.state,
        step=step,
        optimizer=optimizer or ("match" if target_state.has_roles else "exact"),
        unused=unused,
    )
    if json:
        _output.print_document(
            {"ok": not restore_plan.problems, **_output.fields_of(restore_plan)}
        )
    else:
        _show(restore_plan)
    return _app.FINDING if restore_plan.problems else _app.SUCCESS


def _show(restore_plan: RestorePlan) -> None:
    if _output.is_terminal():
        _output.console().print(restore_plan)
    else:
        _output.print_lines(str(restore_plan))
    if count := len(restore_plan.problems):
        rows = [
            f"{problem.leaf}: wanted {problem.wanted}, found {problem.found}"
            for problem in restore_plan.problems
        ]
        leaves = _output.count(count, "leaf", "leaves")
        _output.print_lines(f"{leaves} cannot be restored:\n{errors.rows(rows)}")
