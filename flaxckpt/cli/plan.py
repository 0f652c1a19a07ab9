"""`flaxckpt plan`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import click

from flaxckpt import _util, errors
from flaxckpt.cli import _app, _output, _transforms
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt._checkpoint.plan import RestorePlan
    from flaxckpt._inspect.plan_damage import PlanDamage
    from flaxckpt._inspect.restore_call import RestoreCall
    from flaxckpt._suggest.suggestion import Suggestion
    from flaxckpt.transforms import Transform

_MOST_ROWS = 20


_TargetArgument = Annotated[
    str,
    Argument(
        metavar="TARGET",
        help="The state to restore into: another checkpoint, a JSON file with"
        ' shapes, {"params": {"w": "float32[3, 4]"}}, or output of show --json.',
    ),
]
_TargetStepOption = Annotated[
    int | None, Option("--target-step", is_step=True, help="Step of TARGET.")
]
_Optimizer = Literal["match", "exact", "reinit"]
_OptimizerOption = Annotated[
    _Optimizer | None,
    Option(
        "--optimizer",
        help="How to match optimizer leaves; by default by role, or by path if"
        " TARGET has no roles.",
    ),
]
_MissingOption = Annotated[
    Literal["error", "init"],
    Option(
        "--missing",
        help="How to treat leaves that PATH lacks; init keeps the values of the state.",
    ),
]
_UnusedOption = Annotated[
    Literal["warn", "error", "ignore"],
    Option("--unused", help="How to treat leaves that TARGET lacks."),
]
_AsSourceOption = Annotated[
    bool,
    Option(
        "--as-source",
        help="Plan PATH as the source of a new run, as restore_or_init does: by"
        " default, the optimizer and the step begin anew.",
    ),
]
_SuggestOption = Annotated[
    bool,
    Option(
        "--suggest",
        help="Guess the transforms from the names of PATH to those of TARGET.",
    ),
]


@_app.verb
def plan(
    path: _app.PathArgument,
    target: _TargetArgument,
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    target_step: _TargetStepOption = None,
    optimizer: _OptimizerOption = None,
    missing: _MissingOption = "error",
    unused: _UnusedOption = "warn",
    map: _transforms.MapOption = None,
    only: _transforms.OnlyOption = None,
    drop: _transforms.DropOption = None,
    rename: _transforms.RenameOption = None,
    cast: _transforms.CastOption = None,
    lossy: _transforms.LossyOption = False,
    as_source: _AsSourceOption = False,
    suggest: _SuggestOption = False,
    json: _app.JsonOption = False,
) -> int:
    r"""Shows the plan of a restore, leaf by leaf.

    Plans a restore of PATH into the state of TARGET, and reads no arrays.
    Exits with 1 if the restore would fail, also because the names or sizes of files
    are wrong; with --suggest, if leaves of TARGET have no source, or a choice is
    ambiguous.

    --map, --only, --drop, --rename and --cast change PATH first, in this order, as a
    fine-tuning does. Patterns are regular expressions on whole leaf paths.

    Example:
      flaxckpt plan runs/7 runs/8
      flaxckpt plan runs/7 runs/8 --as-source
      flaxckpt plan runs/7 runs/8 --rename 'params/encoder/(.*)=params/backbone/\1'
      flaxckpt plan runs/7 runs/8 --drop 'params/head/.*' --missing init
      flaxckpt plan Llama-3.2-1B wanted.json --map auto
      flaxckpt plan model.safetensors wanted.json --suggest
    """
    from flaxckpt import _inspect

    changes = _transforms.parse(only, drop, rename, cast, lossy=lossy)
    if suggest and (changes or map is not None):
        raise errors.OptionError(
            "--suggest guesses the transforms: leave out --map, --only, --drop,"
            " --rename and --cast"
        )
    state = _inspect.abstract_file.read_target(target, step=target_step)
    if as_source:
        state.check_source("TARGET")
    at = _app.locate_step(path, step, step_format)
    restore = _inspect.restore_call.RestoreCall(
        *at, state, changes, optimizer, missing, unused, as_source
    )
    if suggest:
        return _plan_guess(restore, json=json)
    if map is not None:
        found = _find_map(map, restore)
        restore = restore._replace(transforms=[*found, *changes])
    planned = _Planned.of(restore)
    if json:
        _output.print_document(planned.document())
        return _app.SUCCESS if planned.is_good else _app.FINDING
    source = None
    if not as_source and state.may_begin_from(path):
        options = restore.options_as_source(has_dropped=bool(drop))
        command = _change_command(as_source=True, **options)
        source = _Remedy("For the source of a new run", command)
    call = _write_call(restore) if map is None else None
    _show(planned, call, source)
    return _app.SUCCESS if planned.is_good else _app.FINDING


def _find_map(map: str, restore: RestoreCall) -> list[Transform]:
    from flaxckpt._maps import named

    return [*named.find_for_state(map, restore.path, restore.target.state)]


def _plan_guess(restore: RestoreCall, *, json: bool) -> int:
    """Prints guessed transforms and the plan with them; returns the exit code."""
    from flaxckpt import _suggest

    guess = _suggest.suggestion.suggest(
        restore.path, restore.target.state, step=restore.step
    )
    changes = [] if guess.ambiguous else guess.transforms
    planned = _Planned.of(restore._replace(transforms=changes))
    return _show_suggestion(guess, planned, json=json)


class _Remedy(NamedTuple):
    """A command for another plan, or a call for the restore, to paste."""

    purpose: str
    command: str


_PURPOSES = {
    ("rename",): "To rename the leaves",
    ("drop", "missing"): "To initialize leaves of other shapes",
    ("rename", "drop", "missing"): "To rename the leaves and initialize leaves of other"
    " shapes",
    ("suggest",): "To guess the transforms from the names",
    ("missing",): "For a state with values for the missing leaves",
    ("optimizer",): "For an optimizer that initializes its leaves, as TARGET names no"
    " classes",
}
"""The options of a remedy -> what it is for."""


def _change_command(**options: Any) -> str:
    """Returns the running command with other options; rules are added to its own."""
    given = click.get_current_context().params
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = [*(given[name] or ()), *value]
    return _app.command_line(**options)


def _write_call(restore: RestoreCall) -> _Remedy:
    names = restore.write_import()
    purpose = f"In Python ({names})" if names else "In Python"
    return _Remedy(purpose, restore.write_call())


class _Planned(NamedTuple):
    """The plan of a restore, and the known damage of the checkpoint.

    `damage` is also that of files that the restore would not read; None for none.
    """

    restore: RestoreCall
    plan: RestorePlan
    damage: PlanDamage | None

    @staticmethod
    def of(restore: RestoreCall) -> _Planned:
        from flaxckpt import _inspect

        plan = restore.plan()
        return _Planned(restore, plan, _inspect.plan_damage.find(plan))

    @property
    def is_good(self) -> bool:
        """True if nothing known prevents the restore."""
        return not self.plan.problems and self._damage(is_read=True) is None

    def document(self) -> dict[str, Any]:
        return {
            "ok": self.is_good,
            "damage": self._damage(is_read=True),
            "damage_elsewhere": self._damage(is_read=False),
            **_output.fields_of(self.plan),
        }

    def _damage(self, *, is_read: bool) -> str | None:
        """Returns the damage where the restore reads, or where it does not, or None."""
        if self.damage is None or self.damage.is_read != is_read:
            return None
        return self.damage.reason

    def conclusion(self) -> list[str]:
        """Returns lines on the damage of the checkpoint, and whether all is well."""
        lines = []
        if (damage := self._damage(is_read=True)) is not None:
            damage = errors.printable(damage)
            lines.append(
                f"The checkpoint is damaged, so the restore would fail: {damage}"
            )
            if click.get_current_context().params["step"] is not None:
                lines[-1] += "; pass another step to --step"
        if (damage := self._damage(is_read=False)) is not None:
            damage = errors.printable(damage)
            lines.append(
                "The checkpoint is damaged, but as far as is known not where this"
                f" restore reads: {damage}"
            )
        if self.is_good and self.plan.bytes_to_read:
            lines.append(
                "The restore would succeed, if the files are whole: no array was read."
            )
        elif self.is_good:
            lines.append("The restore would succeed.")
        return lines

    def remedies(self) -> list[_Remedy]:
        """Returns the commands that may help, each another way."""
        is_guess = click.get_current_context().params["suggest"]
        return [
            _Remedy(_PURPOSES[(*options,)], _change_command(**options))
            for options in self.restore.remedies(self.plan)
            if not (is_guess and "suggest" in options)
        ]

    def origins(self) -> list[str]:
        """Returns lines on the leaves of the checkpoint, and those of the program."""
        from flaxckpt._inspect import restore_call

        if not self.is_good:
            return []
        fresh = self.restore.describe_fresh(self.plan)
        return [*filter(None, (restore_call.describe_loaded(self.plan), fresh))]


def _show_suggestion(suggestion: Suggestion, planned: _Planned, *, json: bool) -> int:
    """Prints a suggestion, and its plan unless ambiguous; returns the exit code."""
    is_whole = not (suggestion.ambiguous or suggestion.left) and planned.is_good
    if json:
        fields = _output.fields_of(suggestion)
        del fields["given"], fields["published"]
        document = {"ok": is_whole, **fields, "code": suggestion.code}
        document["renames"] = suggestion.renames
        if not suggestion.ambiguous:
            document["plan"] = planned.document()
        _output.print_document(document)
        return _app.SUCCESS if is_whole else _app.FINDING
    lines, whole = str(suggestion).split("\n"), {*suggestion.code.split("\n")}
    commands: list[_Remedy] = []
    renames = [f"{pattern}={name}" for pattern, name in suggestion.renames]
    if renames:
        command = _app.command_line(suggest=False, rename=renames)
        lines += ["", "on the command line:", f"  {command}"]
        whole.add(lines[-1])
    if not suggestion.ambiguous:
        lines += ["", f"with these transforms, {planned.plan.summary}"]
        if rows := [problem.row.strip() for problem in planned.plan.problems]:
            lines += ["cannot be restored:", *_util.humanize.rows(rows, _MOST_ROWS)]
        if not (planned.plan.renames or planned.plan.drops):
            commands = planned.remedies()
        elif planned.plan.drops and (renames or not suggestion.transforms):
            command = _app.command_line(
                suggest=False,
                rename=renames,
                drop=[*planned.plan.drops],
                missing="init",
            )
            commands = [_Remedy("To initialize leaves of other shapes", command)]
    for line in lines:
        if line in whole or line.startswith("    "):  # rows of Python
            _output.print_line(line)
        else:
            _output.print_paragraph(line, "    " if line.startswith(" ") else "  ")
    for remedy in commands:
        _output.print_command(*remedy)
    for line in planned.conclusion():
        _output.print_paragraph(line)
    return _app.SUCCESS if is_whole else _app.FINDING


def _show(planned: _Planned, call: _Remedy | None, source: _Remedy | None) -> None:
    """Prints the plan, and what has to be known for it.

    For a plan that succeeds, the `call` of the restore. If it fails, the first advice
    is the command that plans the `source` of a new run, if one may be meant.
    """
    restore_plan = dataclasses.replace(planned.plan, advice="")
    if _output.is_terminal():
        _output.console().print(restore_plan)
    else:
        _output.print_lines(str(restore_plan))
    remedies = planned.remedies()
    if source is not None and planned.plan.problems:
        remedies.insert(0, source)
    for remedy in remedies:
        _output.print_command(*remedy)
    if planned.plan.advice:
        _output.print_paragraph(f"In Python: {planned.plan.advice}")
    for line in [*planned.origins(), *planned.conclusion()]:
        _output.print_paragraph(line)
    if call is not None and planned.is_good:
        _output.print_command(*call)
    if source is not None and not planned.plan.problems:
        _output.print_command(*source)
