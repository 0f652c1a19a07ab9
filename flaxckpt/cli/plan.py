"""`flaxckpt plan`."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from flaxckpt import errors
from flaxckpt.cli import _app, _output, _transforms
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt._checkpoint.plan import RestorePlan
    from flaxckpt.maps._suggest.suggestion import Suggestion

_MOST_ROWS = 20
_DROPS = 3
"""The most patterns that advice names."""


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
      flaxckpt plan runs/7 runs/8 --rename 'params/encoder/(.*)=params/backbone/\1'
      flaxckpt plan runs/7 runs/8 --drop 'params/head/.*' --missing init
      flaxckpt plan Llama-3.2-1B wanted.json --map auto
      flaxckpt plan model.safetensors wanted.json --suggest
    """
    from flaxckpt import _checkpoint, _inspect, _storage
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
    by_path = optimizer is None and not target_state.has_roles
    restore_plan = _checkpoint.restore.plan_for_target(
        path,
        target_state.state,
        step=step,
        transforms=changes,
        missing=missing,
        optimizer=optimizer or ("exact" if by_path else "match"),
        unused=unused,
    )
    damage = _inspect.run_view.find_known_damage(
        _storage.paths.from_text(restore_plan.path)
    )
    planned = _Planned(
        restore_plan, damage, missing, by_path=by_path, has_changes=bool(changes)
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
        damage: The damage, or None.
        missing: How leaves that the checkpoint lacks are treated.
        by_path: True if optimizer leaves are matched by path, as the target has no
            roles.
        has_changes: True if transforms change the checkpoint first.
    """

    plan: RestorePlan
    damage: str | None
    missing: Literal["error", "init"]
    by_path: bool
    has_changes: bool

    @property
    def is_good(self) -> bool:
        """True if nothing known prevents the restore."""
        return not self.plan.problems and self.damage is None

    def document(self) -> dict[str, Any]:
        """Returns the plan as JSON."""
        fields = _output.fields_of(self.plan)
        return {"ok": self.is_good, "damage": self.damage, **fields}

    def conclusion(self) -> list[str]:
        """Returns lines on the damage of the checkpoint."""
        if self.damage is None:
            return []
        damage = errors.printable(self.damage)
        return [f"The checkpoint is damaged, so the restore would fail: {damage}"]

    def renames(self) -> str:
        """Returns the options that move the leaves, to paste; empty for none."""
        return " ".join([_as_option(*rename) for rename in self.plan.renames])

    def advice(self) -> str:
        """Returns the options that may help; empty for none."""
        if self.plan.renames:
            return ""
        if drops := self._drops():
            return f"{drops} --missing init plans for a state with new values of them"
        missing = [each.leaf for each in self.plan.problems if each.kind == "missing"]
        if not missing:
            return ""
        advice = []
        if not self.has_changes:
            advice.append("--suggest guesses the transforms from the names")
        if self.missing == "error":
            advice.append(
                "--missing init plans for a state with values for the missing leaves"
            )
        if self.by_path and any("opt_state" in leaf.split("/") for leaf in missing):
            advice.append(
                "--optimizer match plans for an optimizer that initializes its leaves,"
                " as TARGET names no classes"
            )
        return "; ".join(advice)

    def _drops(self) -> str:
        """Returns options that drop the leaves of other shapes, such as of a head.

        Empty for none, or for many. Their moments are dropped with them.
        """
        other = {
            path
            for path, leaf in self.plan.leaves.items()
            if leaf.wanted is not None
            and leaf.found is not None
            and leaf.wanted.shape != leaf.found.shape
        }
        patterns: dict[str, None] = {}
        for problem in self.plan.problems:
            path = problem.leaf
            if path in other and "opt_state" not in path.split("/"):
                parent = path.rpartition("/")[0]
                below = {p for p in self.plan.leaves if p.startswith(f"{parent}/")}
                is_whole = bool(parent) and below <= other
                name = re.escape(parent if is_whole else path)
                patterns[f"{name}/.*" if is_whole else name] = None
        if len(patterns) > _DROPS or self.missing == "init":
            return ""
        return " ".join(f"--drop {shlex.quote(pattern)}" for pattern in patterns)

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
    if advice := planned.advice():
        _output.print_paragraph(f"On the command line: {advice}")
    if planned.plan.advice:
        _output.print_paragraph(f"In Python: {planned.plan.advice}")
    for line in (*planned.conclusion(), planned.fresh()):
        if line:
            _output.print_paragraph(line)
