"""`flaxckpt plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _transforms
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
    map: _transforms.MapOption = None,
    only: _transforms.OnlyOption = None,
    drop: _transforms.DropOption = None,
    rename: _transforms.RenameOption = None,
    cast: _transforms.CastOption = None,
    suggest: Annotated[
        bool,
        Option(
            "--suggest",
            help="Guess the transforms from the names of PATH to those of TARGET.",
        ),
    ] = False,
    json: _app.JsonOption = False,
) -> int:
    r"""Shows the plan of a restore, leaf by leaf.

    Plans a restore of PATH into the state of TARGET, and reads no arrays.
    Exits with 1 if the restore would fail; with --suggest, if leaves of
    TARGET have no source, or a choice is ambiguous.

    --map, --only, --drop, --rename and --cast change PATH first, in this order, as a
    fine-tuning does. Patterns are regular expressions on whole leaf paths.

    Example:
      flaxckpt plan runs/7 runs/8
      flaxckpt plan runs/7 runs/8 --rename 'params/encoder/(.*)=params/backbone/\1'
      flaxckpt plan Llama-3.2-1B wanted.json --map auto
      flaxckpt plan model.safetensors wanted.json --suggest
    """
    from flaxckpt import _checkpoint, _inspect
    from flaxckpt.maps import _named

    changes = _transforms.parse(only, drop, rename, cast)
    path, step = _app.locate_step(path, step, step_format)
    target_state = _inspect.abstract_file.read_target(target, step=target_step)
    if suggest:
        if changes or map is not None:
            raise errors.OptionError(
                "--suggest guesses the transforms: leave out --map, --only, --drop,"
                " --rename and --cast"
            )
        from flaxckpt.maps import _suggest

        suggestion = _suggest.suggestion.suggest(path, target_state.state, step=step)
        return _show_suggestion(suggestion, json=json)
    if map is not None:
        changes[:0] = _named.find_for_state(map, path, target_state.state)
    restore_plan = _checkpoint.restore.plan_for_target(
        path,
        target_state.state,
        step=step,
        transforms=changes,
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
    fresh = restore_plan.count("init")
    if fresh and not restore_plan.problems:
        leaves = _output.count(fresh, "leaf", "leaves")
        _output.print_line(
            f"The optimizer initializes {leaves}: pass a state that has one, such as a"
            " TrainState."
        )
