"""The page of a restore: the planned action for each leaf; reads no arrays."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxckpt import _checkpoint, _inspect, _suggest, _transforms, errors
from flaxckpt._inspect.plan_damage import PlanDamage
from flaxckpt._report import flight_recorder, templates
from flaxckpt._report.content import Content
from flaxckpt._report.data import Report
from flaxckpt._report.ui import frame
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._types import LeafPath
from flaxckpt._util import html

if TYPE_CHECKING:
    from flaxckpt._checkpoint.plan import Action, RestorePlan
    from flaxckpt._inspect.abstract_file import TargetState
    from flaxckpt.transforms import Transform

_MOST_ROWS = 500

_RULES = ("only", "drop", "rename", "cast")
"""The fields of transforms, in the order in which they are applied."""

_CHOICES: Mapping[str, Sequence[str]] = {
    "source": ("new",),
    "optimizer": ("match", "exact", "reinit"),
    "missing": ("init",),
}
"""Field -> its values, beside the default."""

_ACTIONS: Sequence[Action] = (
    *("conflict", "init", "dropped", "renamed", "transformed", "matched", "cast"),
    *("resharded", "loaded"),
)
"""The ones to look at first."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page that plans a restore of the `step` of a `run` `into` another."""
    place = workspace.places.find(query.text("run"))
    targets = workspace.targets.all()
    chosen = query.text("into")
    empty = workspace.targets.without_steps(targets)
    into = workspace.targets.find(chosen) if chosen else place
    report, step = workspace.report(place), query.number("step")
    if step is None and place.is_run:
        step = flight_recorder.choose_step(report)
    return frame.render(
        "ui/plan.html",
        workspace,
        place,
        step=step,
        into=into.name,
        report=report,
        targets=targets,
        empty=empty,
        given={name: query.text(name) for name in (*_RULES, *_CHOICES)},
    )


class _Asked(NamedTuple):
    """The plan that a reader asked for.

    `target_step` is the step with the state `target`, if it is not the newest.
    """

    place: Location
    into: Location
    query: Query
    target: TargetState
    target_step: int | None

    def chosen(self, name: str) -> Any:
        """Returns the value of a choice; None for the default.

        Raises:
            OptionError: It is none of the values.
        """
        values, chosen = _CHOICES[name], self.query.text(name)
        if chosen and chosen not in values:
            *others, last = values
            wanted = f"{', '.join(others)} or {last}" if others else last
            raise errors.OptionError(f"{name} must be {wanted}, found {chosen!r:.80}")
        return chosen or None

    @property
    def is_source(self) -> bool:
        """True if a new run begins from the checkpoint."""
        return self.chosen("source") is not None

    @property
    def is_by_path(self) -> bool:
        """True if optimizer leaves are matched by path, as the target has no roles."""
        return self.chosen("optimizer") is None and not self.target.has_roles

    def plan(self, changes: Sequence[Transform], *, as_source: bool) -> RestorePlan:
        """Returns the plan, after the transforms of the checkpoint."""
        usual: Any = "match" if self.target.has_roles else "exact"
        usual = "reinit" if as_source else usual
        return _checkpoint.restore.plan_for_target(
            self.place.path,
            self.target.state,
            step=self.query.number("step"),
            transforms=changes,
            missing=self.chosen("missing") or "error",
            optimizer=self.chosen("optimizer") or usual,
            unused="ignore",
            as_source=as_source,
        )

    def call(self, changes: Sequence[Transform]) -> list[str]:
        """Returns lines of Python: the import that the restore needs, and its call."""
        call = _inspect.restore_call.write_call(
            str(self.place.path),
            self.query.number("step"),
            changes,
            missing=self.chosen("missing") or "error",
            optimizer=self.chosen("optimizer"),
            as_source=self.is_source,
        )
        names = _inspect.restore_call.write_import(changes)
        return [names, "", call] if names else [call]

    def address(self, view: str, **fields: str) -> html.Markup:
        """Returns the address of a view of this plan with other fields."""
        names = ("run", "step", "into", *_CHOICES, *_RULES)
        given = {name: self.query.text(name) or None for name in names}
        return templates.address(view, **{**given, **fields})

    def command(self, **fields: str) -> str:
        """Returns the command of this plan with other fields, to paste in a shell."""
        names = ("step", *_CHOICES, *_RULES)
        given = {name: self.query.text(name) for name in names} | fields
        words = ["flaxckpt", "plan", str(self.place.path), str(self.into.path)]
        if given.pop("source", ""):
            words.append("--as-source")
        if self.target_step is not None:
            words += ["--target-step", str(self.target_step)]
        for name, content in given.items():
            for line in filter(None, map(str.strip, content.split("\n"))):
                words += [f"--{name}", line]
        return shlex.join(words)

    def propose(self, kind: str, rules: Sequence[str] = (), **fields: str) -> Content:
        """Returns a remedy of a kind: rules, and the plan with other fields."""
        url, command = self.address("/plan", **fields), self.command(**fields)
        return {"kind": kind, "rules": rules, "url": url, "command": command}

    def propose_renames(self, found: Sequence[tuple[str, str]]) -> Content:
        """Returns the remedy that renames leaves."""
        rules = [f"{pattern}={name}" for pattern, name in found]
        return self.propose("rename", rules, rename="\n".join(rules))


def _ask(workspace: Workspace, query: Query) -> _Asked:
    """Returns what a request asks for.

    If the description of the newest step of the target cannot be read, its state is
    that of the newest step without known damage.
    """
    place = workspace.places.find(query.text("run"))
    into = workspace.targets.find(query.text("into"))
    step = None
    try:
        target = _inspect.abstract_file.read_target(into.path)
    except errors.DamagedCheckpointError:
        step = _find_other_step(workspace, into, None) if into.is_run else None
        if step is None:
            raise
        target = _inspect.abstract_file.read_target(into.path, step=step)
    return _Asked(place, into, query, target, step)


def result(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the plan of a restore, after the transforms of the fields.

    Raises:
        OptionError: A transform is invalid, or has no effect; or the state of a new run
            has optimizer leaves, but names no classes.
    """
    rules = {name: query.text(name).split("\n") for name in _RULES}
    changes = _transforms.from_text.parse(
        **{name: filter(None, map(str.strip, lines)) for name, lines in rules.items()}
    )
    asked = _ask(workspace, query)
    if asked.is_source:
        _check_source(asked)
    try:
        plan = asked.plan(changes, as_source=asked.is_source)
    except errors.DamagedCheckpointError as error:
        return _show(workspace, asked, PlanDamage(str(error), is_read=True))
    source = None
    if not asked.is_source and asked.target.may_begin_from(asked.place.path):
        source = _propose_source(asked, asked.plan(changes, as_source=True))
    is_plain = bool(plan.problems) and not changes
    report = workspace.report(asked.place)
    states = zip(report.steps, report.integrity, strict=True)
    return _show(
        workspace,
        asked,
        _find_damage(report, plan),
        plan=plan,
        verified={step.path for step, check in states if check.state == "verified"},
        problems={problem.leaf: problem for problem in plan.problems},
        remedy=_find_remedy(plan, asked) if is_plain else None,
        source=source,
        fresh=_inspect.restore_call.describe_fresh(
            plan, missing=asked.chosen("missing") or "error", as_source=asked.is_source
        ),
        call=asked.call(changes),
        groups=_group(plan),
    )


def _show(
    workspace: Workspace, asked: _Asked, damage: PlanDamage | None, **values: object
) -> html.Markup:
    step = None
    if damage is not None and damage.is_read:
        step = _find_other_step(workspace, asked.place, asked.query.number("step"))
    return templates.render(
        "ui/planned.html",
        **{"plan": None, **values},
        damage=damage,
        other=step,
        other_url=None if step is None else asked.address("/plan", step=str(step)),
        into=asked.into.name,
        target_step=asked.target_step,
        command=asked.command(),
        most=_MOST_ROWS,
    )


def _check_source(asked: _Asked) -> None:
    if leaves := asked.target.optimizer_leaves_without_classes():
        raise errors.OptionError(
            f"a new run begins its optimizer anew, but {asked.into.name} names no"
            f" classes, so that {errors.first_few(leaves, 1)} would be planned as any"
            " other leaf: choose the state of a run or a checkpoint, a file that"
            " flaxckpt show CHECKPOINT --json has written, or a file with only the"
            " parameters"
        )


def _find_damage(report: Report, plan: RestorePlan) -> PlanDamage | None:
    """Returns what verifications, markers, and the sizes of the files say."""
    for step, check in zip(report.steps, report.integrity, strict=True):
        if step.path == plan.path and check.state == "verified":
            return None
        is_found = check.is_bad and check.bytes_checked and step.damage is None
        if step.path == plan.path and is_found:  # a mark would say where
            return PlanDamage(check.detail, is_read=True)
    return _inspect.plan_damage.find(plan)


def _find_other_step(
    workspace: Workspace, place: Location, step: int | None
) -> int | None:
    """Returns the newest step without known damage other than `step`, or None.

    Returns None for a checkpoint that is no step of a run.
    """
    steps = workspace.report(place).good_steps
    return max((n for n in steps if n != step), default=None)


def _propose_source(asked: _Asked, plan: RestorePlan) -> html.Markup:
    """Returns the address of the `plan` of the source of a new run."""
    fields = {"source": "new"}
    if plan.drops and not any(asked.query.text(name) for name in _RULES):
        fields |= {"drop": "\n".join(plan.drops), "missing": "init"}
    elif asked.query.text("drop") and _checkpoint.plan.lacks_only_leaves(plan):
        fields["missing"] = "init"  # what was dropped may be missing on purpose
    return asked.address("/plan", **fields)


def _find_remedy(plan: RestorePlan, asked: _Asked) -> Content | None:
    """Returns rules for the fields, or the address that guesses them; or None."""
    if plan.renames:
        return asked.propose_renames(plan.renames)
    if plan.drops:
        rules = "\n".join(plan.drops)
        return asked.propose("drop", plan.drops, drop=rules, missing="init")
    is_by_path = asked.is_by_path and not asked.is_source
    if is_by_path and _checkpoint.plan.lacks_optimizer_leaves(plan):
        return asked.propose("roles", optimizer="match")
    if any(problem.kind == "missing" for problem in plan.problems):
        return {"kind": "guess", "url": asked.address("/plan/suggest")}
    return None


def suggest(workspace: Workspace, query: Query) -> html.Markup:
    """Guesses the renames for a restore of the `step` of a `run` `into` another."""
    asked = _ask(workspace, query)
    found = _suggest.suggestion.suggest(
        asked.place.path, asked.target.state, step=query.number("step")
    )
    remedy: Content = {"kind": "found", "rules": (), "url": None}
    if found.renames:
        remedy = asked.propose_renames(found.renames)
    return templates.render("ui/remedy.html", remedy=remedy, found=found)


def _group(plan: RestorePlan) -> dict[tuple[Action, ...], list[LeafPath]]:
    """Returns the leaves of each kind, those to look at first."""
    groups: dict[tuple[Action, ...], list[LeafPath]] = {}
    for path, leaf in plan.leaves.items():
        groups.setdefault(leaf.actions, []).append(path)
    ranked = sorted(groups, key=lambda actions: min(map(_ACTIONS.index, actions)))
    return {actions: groups[actions] for actions in ranked}
