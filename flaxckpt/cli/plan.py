"""`flaxckpt plan`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import click

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _transforms
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flaxckpt._checkpoint.plan import RestorePlan
    from flaxckpt._inspect.abstract_file import TargetState
    from flaxckpt._inspect.plan_damage import PlanDamage
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
        help="Plan PATH as the source of a new run, as restore_or_init(source=…)"
        " does: by default, the optimizer and the step begin anew.",
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

    changes = _transforms.parse(only, drop, rename, cast)
    if suggest and (changes or map is not None):
        raise errors.OptionError(
            "--suggest guesses the transforms: leave out --map, --only, --drop,"
            " --rename and --cast"
        )
    wanted = _Wanted(
        _inspect.abstract_file.read_target(target, step=target_step),
        optimizer,
        missing,
        unused,
        as_source=as_source,
    )
    stored = _app.locate_step(path, step, step_format)
    if suggest:
        return _plan_guess(stored, wanted, json=json)
    if map is not None:
        changes[:0] = _find_map(map, stored[0], wanted)
    planned = wanted.plan(stored, changes)
    if json:
        _output.print_document(planned.document())
        return _app.SUCCESS if planned.is_good else _app.FINDING
    source = None
    if not as_source and wanted.state.may_begin_from(path):
        source = wanted.as_new_run().offer(stored, changes)
    call = wanted.call(stored, changes) if map is None else None
    _show(planned, call, source)
    return _app.SUCCESS if planned.is_good else _app.FINDING


def _find_map(map: str, path: str, wanted: _Wanted) -> list[Transform]:
    """Returns the transforms of a published model."""
    from flaxckpt._maps import named

    return [*named.find_for_state(map, path, wanted.state.state)]


def _plan_guess(stored: tuple[str, int | None], wanted: _Wanted, *, json: bool) -> int:
    """Prints guessed transforms and the plan with them; returns the exit code."""
    from flaxckpt import _suggest

    path, step = stored
    guess = _suggest.suggestion.suggest(path, wanted.state.state, step=step)
    changes = [] if guess.ambiguous else guess.transforms
    planned = wanted.plan(stored, changes, is_guess=True)
    return _show_suggestion(guess, planned, json=json)


class _Remedy(NamedTuple):
    """A command for another plan, or a call for the restore, to paste."""

    purpose: str
    command: str


class _Wanted(NamedTuple):
    """The state to restore into, and the options of the restore.

    Attributes:
        optimizer: How to match optimizer leaves; None for the default.
        missing: How leaves that the checkpoint lacks are treated.
        unused: How leaves that the state lacks are treated.
        as_source: True if a new run begins from the checkpoint.
    """

    state: TargetState
    optimizer: _Optimizer | None
    missing: Literal["error", "init"]
    unused: Literal["warn", "error", "ignore"]
    as_source: bool

    def plan(
        self,
        stored: tuple[str, int | None],
        changes: Sequence[Transform],
        *,
        is_guess: bool = False,
    ) -> _Planned:
        """Returns the plan for the path and step `stored`, after the `changes`."""
        from flaxckpt import _checkpoint, _inspect

        path, step = stored
        optimizer = self.optimizer
        if self.as_source:
            optimizer = optimizer or "reinit"
            self.state.check_source()
        by_path = optimizer is None and not self.state.has_roles
        made = _checkpoint.restore.plan_for_target(
            path,
            self.state.state,
            step=step,
            transforms=changes,
            missing=self.missing,
            optimizer=optimizer or ("exact" if by_path else "match"),
            unused=self.unused,
            as_source=self.as_source,
        )
        return _Planned(
            made,
            _inspect.plan_damage.find(made),
            self.missing,
            by_path=by_path,
            has_changes=bool(changes) or is_guess,
            as_source=self.as_source,
        )

    def call(
        self, stored: tuple[str, int | None], changes: Sequence[Transform]
    ) -> _Remedy:
        """Returns the call in Python of a plan; the arguments are as for `plan`."""
        from flaxckpt._inspect import restore_call

        call = restore_call.write_call(
            *stored,
            changes,
            missing=self.missing,
            optimizer=self.optimizer,
            unused=self.unused,
            as_source=self.as_source,
        )
        names = restore_call.write_import(changes)
        return _Remedy(f"In Python ({names})" if names else "In Python", call)

    def as_new_run(self) -> _Wanted:
        """Returns the same, for the source of a new run."""
        return self._replace(as_source=True)

    def offer(
        self, stored: tuple[str, int | None], changes: Sequence[Transform]
    ) -> _Remedy:
        """Returns the command that plans the source, with all that it needs."""
        from flaxckpt import _checkpoint

        given: dict[str, object] = {"as_source": True}
        planned = self.plan(stored, changes)
        remedy = planned.remedy(**given)
        # What was dropped may be missing on purpose.
        has_dropped = click.get_current_context().params["drop"]
        if has_dropped and _checkpoint.plan.lacks_only_leaves(planned.plan):
            given["missing"] = "init"
        command = _app.command_line(**given) if remedy is None else remedy.command
        return _Remedy("For the source of a new run", command)


class _Planned(NamedTuple):
    """A plan, and the known damage of the checkpoint.

    Attributes:
        damage: The damage, also of files that the restore would not read, or None.
        missing: How leaves that the checkpoint lacks are treated.
        by_path: True if optimizer leaves are matched by path, as the target has no
            roles.
        has_changes: True if transforms change the checkpoint first, or were guessed.
        as_source: True if a new run begins from the checkpoint.
    """

    plan: RestorePlan
    damage: PlanDamage | None
    missing: Literal["error", "init"]
    by_path: bool
    has_changes: bool
    as_source: bool

    @property
    def is_good(self) -> bool:
        """True if nothing known prevents the restore."""
        return not self.plan.problems and self._damage(is_read=True) is None

    def document(self) -> dict[str, Any]:
        """Returns the plan as JSON."""
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
        """Returns the commands that may help, the alternatives if there are several."""
        if remedy := self.remedy():
            return [remedy]
        return self.alternatives()

    def remedy(self, **others: object) -> _Remedy | None:
        """Returns the command, with `others` changed, that the problems call for."""
        changed = {**others}
        effects = []
        if self.plan.renames:
            rules = [f"{pattern}={name}" for pattern, name in self.plan.renames]
            changed["rename"] = [*self._given("rename"), *rules]
            effects.append("rename the leaves")
        if self.plan.drops:
            changed["drop"] = [*self._given("drop"), *self.plan.drops]
            changed["missing"] = "init"
            effects.append("initialize leaves of other shapes")
        if not effects:
            return None
        return _Remedy(f"To {' and '.join(effects)}", _app.command_line(**changed))

    def alternatives(self) -> list[_Remedy]:
        """Returns the commands that may help if leaves are missing."""
        from flaxckpt import _checkpoint

        if not any(problem.kind == "missing" for problem in self.plan.problems):
            return []
        found = []
        if not self.has_changes:
            command = _app.command_line(suggest=True)
            found.append(_Remedy("To guess the transforms from the names", command))
        if self.missing == "error":
            command = _app.command_line(missing="init")
            purpose = "For a state with values for the missing leaves"
            found.append(_Remedy(purpose, command))
        if self.by_path and _checkpoint.plan.lacks_optimizer_leaves(self.plan):
            command = _app.command_line(optimizer="match")
            purpose = (
                "For an optimizer that initializes its leaves, as TARGET names no"
                " classes"
            )
            found.append(_Remedy(purpose, command))
        return found

    def _given(self, name: str) -> list[str]:
        return click.get_current_context().params[name] or []

    def origins(self) -> list[str]:
        """Returns lines on the leaves of the checkpoint, and those of the program."""
        from flaxckpt._inspect import restore_call

        if not self.is_good:
            return []
        fresh = restore_call.describe_fresh(
            self.plan, missing=self.missing, as_source=self.as_source
        )
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
    lines = [str(suggestion)]
    renames = [f"{pattern}={name}" for pattern, name in suggestion.renames]
    if renames:
        command = _app.command_line(suggest=False, rename=renames)
        lines += ["", "on the command line:", f"  {command}"]
    if not suggestion.ambiguous:
        lines += ["", f"with these transforms, {planned.plan.summary}"]
        rows = [f"  {problem.row.strip()}" for problem in planned.plan.problems]
        lines += ["cannot be restored:", *rows[:_MOST_ROWS]] if rows else []
        if len(rows) > _MOST_ROWS:
            lines.append(f"  … and {len(rows) - _MOST_ROWS} more")
        remedies = planned.alternatives()
        if not (planned.plan.renames or planned.plan.drops):
            lines += [f"{each.purpose}: {each.command}" for each in remedies]
        elif planned.plan.drops and (renames or not suggestion.transforms):
            command = _app.command_line(
                suggest=False,
                rename=renames,
                drop=[*planned.plan.drops],
                missing="init",
            )
            lines.append(f"To initialize leaves of other shapes: {command}")
    _output.print_lines("\n".join([*lines, *planned.conclusion()]))
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
