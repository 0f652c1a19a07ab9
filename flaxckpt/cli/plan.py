"""`flaxckpt plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from flaxckpt.cli import _app, _output
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt._checkpoint.plan import RestorePlan
    from flaxckpt.maps._suggest.suggestion import Suggestion


@_app.verb
def plan(
    path: _app.PathArgument,
    target: Annotated[
        str,
        Argument(
            metavar="TARGET",
            help="The state to restore into: another checkpoint, a JSON file with"
            ' shapes, {"params": {"w": "float32[3, 4]"}}, or output of show --json.',
        ),
    ],
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    target_step: Annotated[
        int | None, Option("--target-step", min=0, help="Step of TARGET.")
    ] = None,
    optimizer: Annotated[
        Literal["match", "exact", "reinit"] | None,
        Option(
            "--optimizer",
            help="How to match optimizer leaves; by default by role, or by path if"
            " TARGET has no roles.",
        ),
    ] = None,
    unused: Annotated[
        Literal["warn", "error", "ignore"],
        Option("--unused", help="How to treat leaves that TARGET lacks."),
    ] = "warn",
    suggest: Annotated[
        bool,
        Option(
            "--suggest",
            help="Guess the transforms from the names of PATH to those of TARGET.",
        ),
    ] = False,
    json: _app.JsonOption = False,
) -> int:
    """Shows the plan of a restore, leaf by leaf.

    Plans a restore of PATH into the state of TARGET, and reads no arrays.
    Exits with 1 if the restore would fail; with --suggest, if leaves of
    TARGET have no source, or a choice is ambiguous.

    Example:
      flaxckpt plan runs/7 runs/8
      flaxckpt plan runs/7 wanted.json
      flaxckpt plan model.safetensors wanted.json --suggest
    """
    from flaxckpt import _checkpoint, _inspect

    path, step = _app.locate_step(path, step, step_format)
    target_state = _inspect.abstract_file.read_target(target, step=target_step)
    if suggest:
        from flaxckpt.maps import _suggest

        suggestion = _suggest.suggestion.suggest(path, target_state.state, step=step)
        return _show_suggestion(suggestion, json=json)
    restore_plan = _checkpoint.restore.plan_for_target(
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


def _show_suggestion(suggestion: Suggestion, *, json: bool) -> int:
    """Prints a suggestion; returns the exit code."""
    is_whole = not (suggestion.ambiguous or suggestion.left)
    if json:
        fields = _output.fields_of(suggestion)
        del fields["given"], fields["published"]
        _output.print_document({"ok": is_whole, **fields, "code": suggestion.code})
    else:
        _output.print_lines(str(suggestion))
    return _app.SUCCESS if is_whole else _app.FINDING


def _show(restore_plan: RestorePlan) -> None:
    if _output.is_terminal():
        _output.console().print(restore_plan)
    else:
        _output.print_lines(str(restore_plan))
