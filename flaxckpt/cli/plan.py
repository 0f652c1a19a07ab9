"""`flaxckpt plan`."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _transforms
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt._checkpoint.plan import RestorePlan
    from flaxckpt._inspect.plan_damage import PlanDamage
    from flaxckpt.maps._suggest.suggestion import Suggestion

_MOST_ROWS = 20


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
    missing: Annotated[
        Literal["error", "init"],
        Option(
            "--missing",
            help="How to treat leaves that PATH lacks; init keeps the values of the"
            " state.",
        ),
    ] = "error",
    unused: Annotated[
        Literal["warn", "error", "ignore"],
        Option("--unused", help="How to treat leaves that TARGET lacks."),
    ] = "warn",
    map: _transforms.MapOption = None,
    only: _transforms.OnlyOption = None,
    drop: _transforms.DropOption = None,
    rename: _transforms.RenameOption = None,
    cast: _transforms.CastOption = None,
    as_source: Annotated[
        bool,
        Option(
            "--as-source",
            help="Plan PATH as the source of a new run, as restore_or_init(source=…)"
            " does: by default, the optimizer and the step begin anew.",
        ),
    ] = False,
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
    from flaxckpt import _checkpoint, _inspect
    from flaxckpt.maps import _named

    changes = _transforms.parse(only, drop, rename, cast)
    path, step = _app.locate_step(path, step, step_format)
    target_state = _inspect.abstract_file.read_target(target, step=target_step)
    if suggest and (changes or map is not None):
        raise errors.OptionError(
            "--suggest guesses the transforms: leave out --map, --only, --drop,"
            " --rename and --cast"
        )
    suggestion = None
    if suggest:
        from flaxckpt.maps import _suggest

        suggestion = _suggest.suggestion.suggest(path, target_state.state, step=step)
        changes = [] if suggestion.ambiguous else suggestion.transforms
    if map is not None:
        changes[:0] = _named.find_for_state(map, path, target_state.state)
    if as_source:
        optimizer = optimizer or "reinit"
        target_state.check_source()
    by_path = optimizer is None and not target_state.has_roles
    restore_plan = _checkpoint.restore.plan_for_target(
        path,
        target_state.state,
        step=step,
        transforms=changes,
        missing=missing,
        optimizer=optimizer or ("exact" if by_path else "match"),
        unused=unused,
        as_source=as_source,
    )
    planned = _Planned(
        restore_plan,
        _inspect.plan_damage.find(restore_plan),
        missing,
        by_path=by_path,
        has_changes=bool(changes) or suggest,
        as_source=as_source,
    )
    if suggestion is not None:
        return _show_suggestion(suggestion, planned, json=json)
    if json:
        _output.print_document(planned.document())
    else:
        _show(planned)
    return _app.SUCCESS if planned.is_good else _app.FINDING


class _Planned(NamedTuple):
    """A plan, and the known damage of the checkpoint.

    Attributes:
        plan: The plan.
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

    def renames(self) -> str:
        """Returns the options that move the leaves, to paste; empty for none."""
        return " ".join([_as_option(*rename) for rename in self.plan.renames])

    def drops(self) -> str:
        """Returns the options that begin leaves of other shapes anew, to paste."""
        options = [f"--drop {shlex.quote(pattern)}" for pattern in self.plan.drops]
        if options and self.missing == "error":
            options.append("--missing init")
        return " ".join(options)

    def advice(self) -> str:
        """Returns the options that may help; empty for none."""
        from flaxckpt import _checkpoint

        if self.plan.renames or self.plan.drops:
            return ""
        if not any(problem.kind == "missing" for problem in self.plan.problems):
            return ""
        advice = []
        if not self.has_changes:
            advice.append("--suggest guesses the transforms from the names")
        if self.missing == "error":
            advice.append(
                "--missing init plans for a state with values for the missing leaves"
            )
        if self.by_path and _checkpoint.plan.lacks_optimizer_leaves(self.plan):
            advice.append(
                "--optimizer match plans for an optimizer that initializes its leaves,"
                " as TARGET names no classes"
            )
        return "; ".join(advice)

    def fresh(self) -> str:
        """Returns a line on the leaves with values of the program; empty for none."""
        fresh = self.plan.count("init")
        if not fresh or not self.is_good:
            return ""
        leaves = _output.count(fresh, "leaf", "leaves")
        if self.missing == "init":
            return (
                f"Not from the checkpoint: {leaves}. Pass a state with values for them,"
                " not only shapes, and with its optimizer, such as a TrainState."
            )
        if self.as_source:
            return (
                f"Begin anew, as in a new run: {leaves}. Pass a state that has an"
                " optimizer, such as a TrainState."
            )
        return (
            f"The optimizer initializes {leaves}: pass a state that has one, such as a"
            " TrainState."
        )


def _as_option(pattern: str, replacement: str) -> str:
    return f"--rename {shlex.quote(f'{pattern}={replacement}')}"


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
    if suggestion.renames:
        options = [_as_option(*rename) for rename in suggestion.renames]
        lines += ["", "on the command line:", *[f"  {each}" for each in options]]
    if not suggestion.ambiguous:
        lines += ["", f"with these transforms, {planned.plan.summary}"]
        rows = [f"  {problem.row.strip()}" for problem in planned.plan.problems]
        lines += ["cannot be restored:", *rows[:_MOST_ROWS]] if rows else []
        if len(rows) > _MOST_ROWS:
            lines.append(f"  … and {len(rows) - _MOST_ROWS} more")
        if advice := planned.advice():
            lines.append(f"On the command line: {advice}")
        renames = [_as_option(*rename) for rename in suggestion.renames]
        if (drops := planned.drops()) and (renames or not suggestion.transforms):
            pasted = " ".join([*renames, drops])
            lines.append(f"On the command line, instead of --suggest: {pasted}")
    _output.print_lines("\n".join([*lines, *planned.conclusion()]))
    return _app.SUCCESS if is_whole else _app.FINDING


def _show(planned: _Planned) -> None:
    """Prints the plan, and what has to be known for it."""
    restore_plan = dataclasses.replace(planned.plan, advice="")
    if _output.is_terminal():
        _output.console().print(restore_plan)
    else:
        _output.print_lines(str(restore_plan))
    if renames := planned.renames():
        # Not wrapped: a line break in the middle would be pasted.
        _output.print_line(f"On the command line: {renames}")
    if drops := planned.drops():
        _output.print_line(f"On the command line: {drops}")
    if advice := planned.advice():
        _output.print_paragraph(f"On the command line: {advice}")
    if planned.plan.advice:
        _output.print_paragraph(f"In Python: {planned.plan.advice}")
    for line in (planned.fresh(), *planned.conclusion()):
        if line:
            _output.print_paragraph(line)
