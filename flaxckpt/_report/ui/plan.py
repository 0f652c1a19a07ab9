"""The page of a restore: the planned action for each leaf; reads no arrays."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flaxckpt import _inspect, _suggest, _transforms, errors
from flaxckpt._inspect.listing import Step
from flaxckpt._inspect.plan_damage import PlanDamage
from flaxckpt._inspect.run_search import Location
from flaxckpt._report import flight_recorder, templates
from flaxckpt._report.content import Content
from flaxckpt._report.data import Integrity
from flaxckpt._report.ui import aside, frame
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._types import LeafPath
from flaxckpt._util import html

if TYPE_CHECKING:
    from flaxckpt._checkpoint.plan import RestorePlan
    from flaxckpt._inspect.restore_call import RestoreCall

_MOST_ROWS = 500

_RULES = ("only", "drop", "rename", "cast")
"""The fields of transforms, in the order in which they are applied."""

_CHOICES: Mapping[str, Sequence[str]] = {
    "source": ("new",),
    "optimizer": ("match", "exact", "reinit"),
    "missing": ("init",),
}
"""Field -> its values, beside the default."""

_ACTIONS = (
    *("conflict", "missing", "init", "dropped", "renamed", "transformed", "matched"),
    *("cast", "resharded", "loaded"),
)
"""The ones to look at first."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page that plans a restore of the `step` of a `run` `into` another."""
    place = workspace.places.find(query.text("run"))
    targets = workspace.places.states()
    chosen = query.text("into")
    empty = workspace.places.without_steps(targets)
    into = workspace.places.find(chosen, targets) if chosen else place
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
    """The restore that a reader asked for, of `place` into the state of `into`.

    Attributes:
        steps: The steps of `place`, with their integrity.
        good: The steps of `place` without known damage.
        other: The newest step of `into` without known damage, or None.
        target_step: The step with the state, if it is not the newest.
    """

    place: Location
    into: Location
    query: Query
    steps: Sequence[tuple[Step, Integrity]]
    good: Sequence[int]
    other: int | None
    target_step: int | None = None

    def address(self, view: str, **fields: object) -> html.Markup:
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
            for line in _lines(content):
                words += [f"--{name}", line]
        return shlex.join(words)

    def propose(self, **options: Any) -> Content:
        """Returns a remedy: its options, and the plan with them."""
        fields = {
            name: value if isinstance(value, str) else "\n".join(value)
            for name, value in options.items()
        }
        url, command = self.address("/plan", **fields), self.command(**fields)
        return {"options": options, "url": url, "command": command}


def _lines(text: str) -> list[str]:
    return [*filter(None, map(str.strip, text.split("\n")))]


def _ask(workspace: Workspace, query: Query) -> _Asked:
    """Returns what a request asks for."""
    place = workspace.places.find(query.text("run"))
    into = workspace.places.find(query.text("into"), workspace.places.states())
    report = workspace.report(place)
    good = workspace.report(into).good_steps if into.is_run else ()
    steps = [*zip(report.steps, report.integrity, strict=True)]
    return _Asked(place, into, query, steps, report.good_steps, max(good, default=None))


def _prepare(asked: _Asked) -> tuple[_Asked, RestoreCall]:
    """Returns the call of a restore.

    If the description of the newest step of the target cannot be read, its state is
    that of the newest step without known damage.

    Raises:
        OptionError: A choice has another value; a transform is invalid; or the state of
            a new run has optimizer leaves, but names no classes.
    """
    place, into, query = asked[:3]
    chosen = {name: _choose(query, name) for name in _CHOICES}
    rules = {name: _lines(query.text(name)) for name in _RULES}
    try:
        target = _inspect.abstract_file.read_target(into.path)
    except errors.DamagedCheckpointError:
        if asked.other is None:
            raise
        asked = asked._replace(target_step=asked.other)
        target = _inspect.abstract_file.read_target(into.path, step=asked.other)
    is_source = chosen["source"] is not None
    if is_source:
        target.check_source(into.name)
    return asked, _inspect.restore_call.RestoreCall(
        str(place.path),
        query.number("step"),
        target,
        _transforms.from_text.parse(**rules),
        chosen["optimizer"],
        chosen["missing"] or "error",
        "ignore",
        is_source,
    )


def _choose(query: Query, name: str) -> Any:
    """Returns the value of a choice; None for the default."""
    values, chosen = _CHOICES[name], query.text(name)
    if chosen and chosen not in values:
        *others, last = values
        wanted = f"{', '.join(others)} or {last}" if others else last
        raise errors.OptionError(f"{name} must be {wanted}, found {chosen!r:.80}")
    return chosen or None


def result(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the plan of a restore, after the transforms of the fields.

    Raises:
        OptionError: As for `_prepare`; or a transform has no effect.
    """
    return aside.call(_plan, _ask(workspace, query))


def _plan(asked: _Asked) -> html.Markup:
    asked, restore = _prepare(asked)
    try:
        plan = restore.plan()
    except errors.DamagedCheckpointError as error:
        return _show(asked, PlanDamage(str(error), is_read=True))
    source = None
    if not restore.as_source and restore.target.may_begin_from(asked.place.path):
        has_dropped = bool(asked.query.text("drop"))
        options = restore.options_as_source(has_dropped=has_dropped)
        source = asked.propose(source="new", **options)["url"]
    names = restore.write_import()
    call = restore._replace(unused="warn").write_call()
    return _show(
        asked,
        _find_damage(asked, plan),
        plan=plan,
        verified={step.path for step, c in asked.steps if c.state == "verified"},
        problems={problem.leaf: problem for problem in plan.problems},
        remedy=None if restore.transforms else _find_remedy(plan, restore, asked),
        source=source,
        fresh=restore.describe_fresh(plan),
        call=[names, "", call] if names else [call],
        groups=_group(plan),
    )


def _show(asked: _Asked, damage: PlanDamage | None, **values: object) -> html.Markup:
    step = None
    if damage is not None and damage.is_read:  # the newest other one
        chosen = asked.query.number("step")
        step = max((n for n in asked.good if n != chosen), default=None)
    return templates.render(
        "ui/planned.html",
        **{"plan": None, **values},
        damage=damage,
        other=step,
        other_url=None if step is None else asked.address("/plan", step=step),
        into=asked.into.name,
        target_step=asked.target_step,
        command=asked.command(),
        most=_MOST_ROWS,
    )


def _find_damage(asked: _Asked, plan: RestorePlan) -> PlanDamage | None:
    """Returns what verifications, markers, and the sizes of the files say."""
    for step, check in asked.steps:
        if step.path == plan.path and check.state == "verified":
            return None
        is_found = check.is_bad and check.bytes_checked and step.damage is None
        if step.path == plan.path and is_found:  # a mark would say where
            return PlanDamage(check.detail, is_read=True)
    return _inspect.plan_damage.find(plan)


def _find_remedy(
    plan: RestorePlan, restore: RestoreCall, asked: _Asked
) -> Content | None:
    """Returns rules for the fields, or the address that guesses them; or None."""
    found = {(*options,): options for options in restore.remedies(plan)}
    if ("suggest",) in found and ("optimizer",) not in found:
        return {"options": {}, "url": asked.address("/plan/suggest")}
    found.pop(("missing",), None)  # the field is beside the plan
    return asked.propose(**[*found.values()][-1]) if found else None


def suggest(workspace: Workspace, query: Query) -> html.Markup:
    """Guesses the renames for a restore of the `step` of a `run` `into` another."""
    return aside.call(_guess, _ask(workspace, query))


def _guess(asked: _Asked) -> html.Markup:
    asked, restore = _prepare(asked)
    found = _suggest.suggestion.suggest(
        restore.path, restore.target.state, step=restore.step
    )
    remedy: Content = {"options": {}, "url": None}
    if found.renames:
        rules = [f"{pattern}={name}" for pattern, name in found.renames]
        remedy = asked.propose(rename=rules)
    return templates.render("ui/remedy.html", remedy=remedy, found=found)


def _group(plan: RestorePlan) -> dict[tuple[str, ...], list[LeafPath]]:
    """Returns the leaves of each kind, those to look at first."""
    groups: dict[tuple[str, ...], list[LeafPath]] = {}
    for path, actions in plan.outcomes.items():
        groups.setdefault(actions, []).append(path)
    ranked = sorted(groups, key=lambda actions: min(map(_ACTIONS.index, actions)))
    return {actions: groups[actions] for actions in ranked}
