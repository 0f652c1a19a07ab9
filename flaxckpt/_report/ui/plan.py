"""The page of a restore: the planned action for each leaf; reads no arrays."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from flaxckpt import _checkpoint, _inspect, _storage, _suggest, errors
from flaxckpt._checkpoint.plan import Action, LeafPlan, RestorePlan
from flaxckpt._inspect.abstract_file import TargetState
from flaxckpt._report import flight_recorder, tables
from flaxckpt._report.ui import forms, frame
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Query, Workspace, address
from flaxckpt._transforms import from_text
from flaxckpt._types import LeafPath
from flaxckpt._util import html, humanize
from flaxckpt.errors import Mismatch
from flaxckpt.transforms import Transform

_MOST_ROWS = 500


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page that plans a restore of the `step` of a `run` `into` another."""
    place = workspace.places.find(query.text("run"))
    targets = workspace.targets.all()
    chosen = query.text("into")
    empty = workspace.targets.without_steps(targets)
    into = workspace.targets.find(chosen) if chosen else place
    step = query.number("step")
    if step is None and place.is_run:
        step = flight_recorder.choose_step(workspace.report(place))
    choices = [forms.hidden("run", place.name)]
    if place.is_run:
        choices.append(
            forms.step_choice(workspace, place, "Restore step", "step", step)
        )
    choices.append(
        forms.checkpoint_choice(
            targets, "into the state of", "into", into.name, empty=empty
        )
    )
    choices.append(
        forms.choice("as", "source", [*_SOURCES.items()], query.text("source"))
    )
    choices.append(_optimizer_choice(query))
    choices.append(
        forms.choice(
            "if a leaf is missing",
            "missing",
            [*_MISSING.items()],
            query.text("missing"),
        )
    )
    choices.append(html.element("button", "Plan", type="submit"))
    choices.append(_rule_fields(query))
    fields = {"run": place.name, "step": step, "into": into.name}
    names = (*_RULES, "source", "optimizer", "missing")
    given = {name: query.text(name) or None for name in names}
    result = html.element(
        "div",
        frame.message("Planning …"),
        id="result",
        aria_live="polite",
        hx_get=address("/plan/result", **fields, **given),
        hx_trigger="load",
    )
    return frame.page(
        workspace,
        f"Restore {place.name}",
        html.element(
            "section",
            html.element("h2", "What a restore would do"),
            html.element("p", _WHAT, class_="summary-text"),
            html.element("form", *choices, class_="choices"),
            result,
            frame.fold("Plan into another state", _where(workspace)),
        ),
        place=place,
        view="/plan",
        version=workspace.version(place),
    )


_WHAT = "The plan says what a restore would do to each leaf. It reads no array."

_RULES: Mapping[str, tuple[str, str]] = {
    "only": ("keep only", "params/.*"),
    "drop": ("drop", "params/head/.*"),
    "rename": ("rename", r"params/encoder/(.*)=params/backbone/\1"),
    "cast": ("cast", ".*/kernel=bfloat16"),
}
"""Field -> its label, and an example; in the order in which they are applied."""


def _rule_fields(query: Query) -> html.Markup:
    """Returns the fields of the transforms, folded while all are empty."""
    fields = [
        forms.lines(label, name, query.text(name), example)
        for name, (label, example) in _RULES.items()
    ]
    note = (
        "One rule a line, in this order, as --rename of the command line has them:"
        " regular expressions on whole leaf paths. Moments follow their parameters."
    )
    return html.element(
        "details",
        html.element("summary", "Change the checkpoint first, as a fine-tuning does"),
        html.element("p", note, class_="note"),
        html.element("div", *fields, class_="rules"),
        open="" if any(query.text(name) for name in _RULES) else None,
        class_="transforms",
    )


_SOURCES = {"": "a step to continue from", "new": "the source of a new run"}
"""Whether a new run begins from the checkpoint -> what that means."""

_OPTIMIZERS = {
    "": "by roles, if recorded; afresh in a new run",
    "match": "matched by roles",
    "exact": "matched by paths",
    "reinit": "started afresh",
}
"""How optimizer leaves are matched -> what that means."""


_MISSING = {"": "the restore fails", "init": "the state's value is kept"}
"""How leaves that the checkpoint lacks are treated -> what that means."""


def _optimizer_choice(query: Query) -> html.Markup:
    chosen = query.text("optimizer")
    return forms.choice(
        "with the optimizer", "optimizer", [*_OPTIMIZERS.items()], chosen
    )


def _where(workspace: Workspace) -> str:
    """Returns how another state gets into the list."""
    root = workspace.places.root
    start = forms.start_with_another(workspace)
    if _storage.of(root).costs_requests:
        return f"For a state that is not in the list, start the page with it: {start}"
    directory = root.parent if workspace.places.is_single else root
    return (
        f"The list has the runs, the checkpoints and the JSON files with a state in"
        f" {directory}. To add a state, copy it there, or write it, as in flaxckpt show"
        f" CHECKPOINT --json > {shlex.quote(str(directory / 'wanted.json'))}, and load"
        f" this page again; or start the page with it: {start}"
    )


def result(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the plan of a restore, after the transforms of the fields.

    Raises:
        OptionError: A transform is invalid, or has no effect.
    """
    place = workspace.places.find(query.text("run"))
    into = workspace.targets.find(query.text("into"))
    rules = {name: query.text(name).split("\n") for name in _RULES}
    changes = from_text.parse(
        **{name: filter(None, map(str.strip, lines)) for name, lines in rules.items()}
    )
    target, target_step = _read_target(workspace, into)
    as_source, optimizer = _as_source(query), _optimizer(query)
    if as_source:
        _check_source(target, into.name)
    by_path = not as_source and optimizer is None and not target.has_roles
    asked = _Asked(place, into, query, target_step)
    try:
        plan = asked.plan(target, changes, as_source=as_source)
    except errors.DamagedCheckpointError as error:
        other = _find_other_step(workspace, place, query.number("step"))
        state = _PlanState(True, str(error), other=other)
        return _describe_damage(state, asked)
    state = _find_state(workspace, asked, plan)
    remedy = html.NOTHING
    if plan.problems and not changes:
        remedy = _remedy(plan, asked, by_path=by_path)
    source = html.NOTHING
    if not as_source and target.may_begin_from(place.path):
        source = _propose_source(asked, asked.plan(target, changes, as_source=True))
    return html.join(
        [
            _outcome(plan, into.name, state, remedy, asked, changes),
            _note_target_step(asked),
            source,
            _actions(plan),
            *_groups(plan),
        ]
    )


def _read_target(
    workspace: Workspace, into: Location
) -> tuple[TargetState, int | None]:
    """Returns the state to restore into, and its step unless it is the newest.

    If the description of the newest step cannot be read, it is the state of the newest
    step without known damage.
    """
    try:
        return _inspect.abstract_file.read_target(into.path), None
    except errors.DamagedCheckpointError:
        step = _find_other_step(workspace, into, None) if into.is_run else None
        if step is None:
            raise
        return _inspect.abstract_file.read_target(into.path, step=step), step


def _check_source(target: TargetState, name: str) -> None:
    """Raises an error if the optimizer of a new run cannot be recognised.

    Args:
        target: The state of the new run.
        name: Its name in the list.

    Raises:
        OptionError: The state has optimizer leaves, but names no classes.
    """
    if leaves := target.optimizer_leaves_without_classes():
        raise errors.OptionError(
            f"a new run begins its optimizer anew, but {name} names no classes, so that"
            f" {errors.first_few(leaves, 1)} would be planned as any other leaf: choose"
            " the state of a run or a checkpoint, a file that flaxckpt show CHECKPOINT"
            " --json has written, or a file with only the parameters"
        )


class _Asked(NamedTuple):
    """The plan that a reader has asked for.

    Attributes:
        place: The run or checkpoint to restore.
        into: The state to restore into.
        query: The fields.
        target_step: The step with this state, if it is not the newest of a run.
    """

    place: Location
    into: Location
    query: Query
    target_step: int | None = None

    def plan(
        self, target: TargetState, changes: Sequence[Transform], *, as_source: bool
    ) -> RestorePlan:
        """Returns the plan.

        Args:
            target: The state to restore into.
            changes: The transforms of the checkpoint.
            as_source: True if a new run begins from the checkpoint.
        """
        optimizer = _optimizer(self.query) or ("reinit" if as_source else None)
        by_path = optimizer is None and not target.has_roles
        return _checkpoint.restore.plan_for_target(
            self.place.path,
            target.state,
            step=self.query.number("step"),
            transforms=changes,
            missing=_missing(self.query),
            optimizer=optimizer or ("exact" if by_path else "match"),
            unused="ignore",
            as_source=as_source,
        )

    def call(self, changes: Sequence[Transform]) -> list[str]:
        """Returns lines of Python: the import that the restore needs, and its call."""
        call = _inspect.restore_call.write_call(
            str(self.place.path),
            self.query.number("step"),
            changes,
            missing=_missing(self.query),
            optimizer=_optimizer(self.query),
            as_source=_as_source(self.query),
        )
        names = _inspect.restore_call.write_import(changes)
        return [names, "", call] if names else [call]

    def address(self, view: str, **fields: str) -> html.Markup:
        """Returns the address of a view of this plan with other fields."""
        names = ("run", "step", "into", "source", "optimizer", "missing", *_RULES)
        given = {name: self.query.text(name) or None for name in names}
        return address(view, **{**given, **fields})

    def command(self, **fields: str) -> str:
        """Returns the command of this plan with other fields, to paste in a shell."""
        given = {name: self.query.text(name) for name in (*_OPTIONS, *_RULES)} | fields
        words = ["flaxckpt", "plan", str(self.place.path), str(self.into.path)]
        if given.pop("source", ""):
            words.append("--as-source")
        if self.target_step is not None:
            words += ["--target-step", str(self.target_step)]
        for name, content in given.items():
            for line in filter(None, map(str.strip, content.split("\n"))):
                words += [f"--{name}", line]
        return shlex.join(words)


_OPTIONS = ("step", "source", "optimizer", "missing")


class _PlanState(NamedTuple):
    """The state of the files of a checkpoint.

    Attributes:
        is_bad: True if it is damaged or cannot be read.
        detail: What is known.
        elsewhere: Damage where the restore would not read; empty for none.
        other: Another step to restore if it is bad, or None.
    """

    is_bad: bool
    detail: str
    elsewhere: str = ""
    other: int | None = None


def _find_state(workspace: Workspace, asked: _Asked, plan: RestorePlan) -> _PlanState:
    """Returns what verifications, markers, and the sizes of the files say."""
    report = workspace.report(asked.place)
    other = _find_other_step(workspace, asked.place, asked.query.number("step"))
    for step, check in zip(report.steps, report.integrity, strict=True):
        if step.path != plan.path or not (check.is_bad or check.state == "verified"):
            continue
        if check.state == "verified":
            return _PlanState(False, "every byte was verified")
        if check.bytes_checked and step.damage is None:  # a mark says where
            return _PlanState(True, check.detail, other=other)
    damage = _inspect.plan_damage.find(plan)
    if damage is not None and damage.is_read:
        return _PlanState(True, damage.reason, other=other)
    elsewhere = "" if damage is None else damage.reason
    return _PlanState(False, "no array was read; Verify reads every byte", elsewhere)


def _find_other_step(
    workspace: Workspace, place: Location, step: int | None
) -> int | None:
    """Returns the newest step without known damage other than `step`, or None.

    Returns None for a checkpoint that is no step of a run.
    """
    report = workspace.report(place)
    steps = [each.step for each in report.steps if each.step not in report.faults]
    others = [other for other in steps if other is not None and other != step]
    return max(others, default=None)


def _describe_damage(state: _PlanState, asked: _Asked) -> html.Markup:
    """Returns the damage of a checkpoint, with a link to the plan of another step."""
    text = "The restore would fail: the checkpoint is damaged."
    parts = [
        html.element("p", text, class_="outcome bad"),
        html.element("p", state.detail, class_="summary-text"),
    ]
    if state.other is not None:
        url = asked.address("/plan", step=str(state.other))
        link = html.element("a", f"Plan step {state.other:,} instead", href=url)
        text = ", the newest that is not known to be damaged."
        parts.append(html.element("p", link, text))
    return html.join(parts)


def _note_target_step(asked: _Asked) -> html.Markup:
    """Returns a line on the step with the state, unless it is the newest of its run."""
    if asked.target_step is None:
        return html.NOTHING
    text = (
        f"The state is that of step {asked.target_step:,} of {asked.into.name}: a newer"
        " step is damaged."
    )
    return html.element("p", text, class_="note")


def _propose_source(asked: _Asked, plan: RestorePlan) -> html.Markup:
    """Returns a line with the link to the `plan` of the source of a new run."""
    fields = {"source": "new"}
    if plan.drops and not any(asked.query.text(name) for name in _RULES):
        fields |= {"drop": "\n".join(plan.drops), "missing": "init"}
    elif asked.query.text("drop") and _checkpoint.plan.lacks_only_leaves(plan):
        fields["missing"] = "init"  # what was dropped may be missing on purpose
    url = asked.address("/plan", **fields)
    return html.element(
        "p",
        "If a new run begins from this checkpoint, ",
        html.element("a", "plan it as the source of a new run", href=url),
        ": its optimizer and its step begin anew, as in flaxckpt plan --as-source.",
        class_="note",
    )


def _remedy(plan: RestorePlan, asked: _Asked, *, by_path: bool) -> html.Markup:
    """Returns rules for the fields, or a button that guesses them.

    Args:
        plan: The plan.
        asked: The plan asked for.
        by_path: True if optimizer leaves are matched by path, as the target has no
            roles.
    """
    if plan.renames:
        rules = [f"{pattern}={name}" for pattern, name in plan.renames]
        return _proposal("This rename moves them:", rules, asked, "rename")
    if plan.drops:
        text = "Dropping these begins them and their moments anew:"
        return _proposal(text, plan.drops, asked, "drop", missing="init")
    if by_path and _checkpoint.plan.lacks_optimizer_leaves(plan):
        text = (
            "The state names no classes. With the optimizer matched by roles, it"
            " initializes the leaves that the checkpoint lacks."
        )
        return _link_plan([html.element("p", text)], asked, optimizer="match")
    if not any(problem.kind == "missing" for problem in plan.problems):
        return html.NOTHING
    url = asked.address("/plan/suggest")
    button = html.element(
        "button",
        "Guess the renames from the names",
        type="button",
        hx_get=url,
        hx_target="#remedy",
        hx_swap="outerHTML",
    )
    return html.element("div", button, id="remedy", class_="remedy")


def _proposal(
    text: str, rules: Sequence[str], asked: _Asked, field: str, **fields: str
) -> html.Markup:
    """Returns rules in the form of the `field`, with a link that plans with them.

    Args:
        text: What the rules do.
        rules: The rules, one a line.
        asked: The present plan.
        field: The field of the rules.
        fields: Values of other fields.
    """
    content = "\n".join(rules)
    shown = [html.element("p", text), html.element("pre", _in_lines(rules))]
    return _link_plan(shown, asked, **{field: content}, **fields)


def _in_lines(lines: Sequence[str]) -> html.Markup:
    """Returns lines of a `pre` element."""
    return html.Markup("\n".join(map(html.text, lines)))


def _link_plan(
    shown: Sequence[html.Markup], asked: _Asked, **fields: str
) -> html.Markup:
    """Returns `shown`, with a link that plans with other `fields`, and a command."""
    url = asked.address("/plan", **fields)
    return html.element(
        "div",
        *shown,
        html.element("a", "Plan with it", href=url, class_="button"),
        html.element("p", "In a terminal:"),
        html.element("pre", asked.command(**fields), class_="command"),
        id="remedy",
        class_="remedy",
    )


def suggest(workspace: Workspace, query: Query) -> html.Markup:
    """Guesses the renames for a restore of the `step` of a `run` `into` another."""
    place = workspace.places.find(query.text("run"))
    into = workspace.targets.find(query.text("into"))
    target, target_step = _read_target(workspace, into)
    step = query.number("step")
    found = _suggest.suggestion.suggest(place.path, target.state, step=step)
    total = humanize.count(len(found.leaves) + len(found.left), "parameter")
    text = f"{len(found.leaves):,} of {total} have a source."
    if found.renames:
        rules = [f"{pattern}={name}" for pattern, name in found.renames]
        asked = _Asked(place, into, query, target_step)
        return _proposal(f"{text} This rename moves them:", rules, asked, "rename")
    if found.rows or found.ambiguous:
        text += (
            " Renames are not enough: flaxckpt plan --suggest prints the transforms,"
            " in Python."
        )
    return html.element("div", frame.message(text), id="remedy", class_="remedy")


def _as_source(query: Query) -> bool:
    match query.text("source"):
        case "":
            return False
        case "new":
            return True
        case other:
            raise errors.OptionError(f"source must be new, found {other!r:.80}")


def _optimizer(query: Query) -> Literal["match", "exact", "reinit"] | None:
    match query.text("optimizer"):
        case "":
            return None
        case "match" | "exact" | "reinit" as chosen:
            return chosen
        case other:
            raise errors.OptionError(
                f"optimizer must be match, exact or reinit, found {other!r:.80}"
            )


def _missing(query: Query) -> Literal["error", "init"]:
    match query.text("missing"):
        case "":
            return "error"
        case "init":
            return "init"
        case other:
            raise errors.OptionError(f"missing must be init, found {other!r:.80}")


def _outcome(
    plan: RestorePlan,
    into: str,
    state: _PlanState,
    remedy: html.Markup,
    asked: _Asked,
    changes: Sequence[Transform],
) -> html.Markup:
    query = asked.query
    parts = []
    if state.is_bad:
        parts.append(_describe_damage(state, asked))
    if plan.problems:
        leaves = humanize.count(len(plan.problems), "leaf", "leaves")
        text = f"The restore would fail: {leaves} of {into} cannot be restored."
        parts.append(html.element("p", text, class_="outcome bad"))
        parts.append(remedy)
        parts.append(html.element("p", f"In Python: {plan.advice}", class_="advice"))
    if parts:
        return html.join(parts)
    size = humanize.size(plan.bytes_to_read)
    text = f"The restore would succeed, and read {size} ({state.detail})."
    parts.append(html.element("p", text, class_="outcome good"))
    if state.elsewhere:
        note = (
            "The checkpoint is damaged, but as far as is known not where this restore"
            f" reads: {state.elsewhere}"
        )
        parts.append(html.element("p", note, class_="summary-text"))
    if fresh := _inspect.restore_call.describe_fresh(
        plan, missing=_missing(query), as_source=_as_source(query)
    ):
        parts.append(html.element("p", fresh, class_="summary-text"))
    for where, lines in (
        ("In Python", asked.call(changes)),
        ("In a terminal", [asked.command()]),
    ):
        parts.append(
            html.element(
                "details",
                html.element("summary", where),
                html.element("pre", _in_lines(lines), class_="command"),
                class_="same-plan",
                open="" if where == "In Python" else None,
            )
        )
    return html.join(parts)


def _actions(plan: RestorePlan) -> html.Markup:
    """Returns a list of what happens to how many leaves; each leaf counts once."""
    outcomes = _checkpoint.plan.count_outcomes(plan)
    items = []
    for action, meaning in _MEANINGS.items():
        if action not in outcomes:
            continue
        total, parts = outcomes[action]
        text = f": {meaning}"
        if parts:
            listed = [f"{n:,} {part} ({_MEANINGS[part]})" for part, n in parts.items()]
            text = f", {', '.join(listed)}"
        count = html.element("strong", f"{total:,} {action}")
        items.append(html.element("li", count, text))
    return html.element("ul", *items, class_="actions")


_MEANINGS: Mapping[Action, str] = {
    "conflict": "in the state, and not restorable",
    "init": "not from the checkpoint: initialized by the optimizer, or kept from the"
    " state",
    "dropped": "only in the checkpoint, and left out",
    "renamed": "under another path in the checkpoint",
    "transformed": "computed from stored leaves",
    "matched": "found by their role in the optimizer",
    "cast": "stored as another type",
    "resharded": "split in another way",
    "loaded": "as they are stored",
}
"""Action -> what it means, the ones to look at first."""


def _groups(plan: RestorePlan) -> list[html.Markup]:
    """Returns a table for each kind of leaves that are not restored as stored."""
    problems = {problem.leaf: problem for problem in plan.problems}
    groups: dict[tuple[Action, ...], dict[LeafPath, LeafPlan]] = {}
    for path, leaf in plan.leaves.items():
        groups.setdefault(leaf.actions, {})[path] = leaf
    ranked = sorted(groups.items(), key=lambda group: _rank(group[0]))
    made = []
    for actions, leaves in ranked:
        rows = [
            _row(path, leaf, problems.get(path))
            for path, leaf in list(leaves.items())[:_MOST_ROWS]
        ]
        title = f"{humanize.count(len(leaves), 'leaf', 'leaves')}: {', '.join(actions)}"
        caption = "In the order of the state"
        if len(leaves) > len(rows):
            caption = f"The first {len(rows)} of {len(leaves):,}"
        made.append(
            html.element(
                "details",
                html.element("summary", title),
                tables.table(caption, _COLUMNS, rows, what="leaves"),
                class_="group",
                open="" if actions != ("loaded",) else None,
            )
        )
    return made


_COLUMNS = [
    tables.Column("leaf"),
    tables.Column("wanted"),
    tables.Column("found"),
]


def _rank(actions: Sequence[Action]) -> int:
    order = list(_MEANINGS)
    return min(order.index(action) for action in actions)


def _row(path: LeafPath, leaf: LeafPlan, problem: Mismatch | None) -> tables.TableRow:
    found = "" if leaf.found is None else str(leaf.found)
    if leaf.sources and leaf.sources != (path,):
        found += f" from {', '.join(leaf.sources[:3])}"
        found += " …" if len(leaf.sources) > 3 else ""
    if leaf.transforms:
        found += f", by {' > '.join(leaf.transforms)}"
    wanted = "" if leaf.wanted is None else str(leaf.wanted)
    if problem is not None and "conflict" in leaf.actions:
        wanted, found = problem.wanted, problem.found
    data: Mapping[str, object] = {
        "data_path": path,
        "data_actions": " ".join(leaf.actions),
    }
    kind = "bad" if "conflict" in leaf.actions else None
    return tables.TableRow([path, wanted, found], data, kind)
