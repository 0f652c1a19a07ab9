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
            help="What to restore into: another checkpoint, or a file of JSON with its"
            ' shapes: {"params": {"w": "float32[3, 4]"}}, or what show --json prints.',
        ),
    ],
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    target_step: Annotated[
        int | None,
        typer.Option("--target-step", min=0, help="Which step of TARGET."),
    ] = None,
    optimizer: Annotated[
        Literal["match", "exact", "reinit"] | None,
        typer.Option(
            "--optimizer",
            help="How leaves of the optimizer are found; by default by what they are,"
            " or by their paths if TARGET does not tell.",
            show_default=False,
        ),
    ] = None,
    unused: Annotated[
        Literal["warn", "error", "ignore"],
        typer.Option("--unused", help="What of leaves that TARGET does not have."),
    ] = "warn",
    json: _app.JsonOption = False,
) -> int:
    """Says what a restore would do, leaf by leaf.

    That of PATH into the state of TARGET.
    Nothing is restored, and no array is read. It exits with 1 if it cannot be done.

    Example:
      flaxckpt plan runs/7 runs/8
      flaxckpt plan runs/7 wanted.json
    """
    from flaxckpt import _checkpoint, _inspect

    path, step = _app.checkpoint(path, step, step_format)
    wanted = _inspect.abstract_file.wanted(target, step=target_step)
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
