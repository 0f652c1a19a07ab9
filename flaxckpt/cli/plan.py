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
        int | None,
        typer.Option("--target-step", min=0, help="Step of TARGET."),
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

    path, step = _app.checkpoint(path, step, step_format)
    wanted = _inspect.abstract_file.read_target(target, step=target_step)
    found = _checkpoint.restore.plan(
        path,
        wanted.state,
        step=step,
        optimizer=optimizer or ("match" if wanted.has_roles else "exact"),
        unused=unused,
    )
    if json:
        _output.document({"ok": not found.problems, **_output.fields(found)})
    else:
        _show(found)
    return _app.FOUND if found.problems else _app.FINE


def _show(found: RestorePlan) -> None:
    if _output.is_terminal():
        _output.rich_print(found)
    else:
        _output.lines(str(found))
    if count := len(found.problems):
        told = "1 leaf" if count == 1 else f"{count} leaves"
        rows = [f"{p.leaf}: wanted {p.wanted}, found {p.found}" for p in found.problems]
        _output.lines(f"{told} cannot be restored:\n{errors.rows(rows)}")
