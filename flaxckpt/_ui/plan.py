"""The view on a restore: what becomes of each leaf, without reading any array."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Literal

from flaxckpt import _checkpoint, _inspect, _report, errors
from flaxckpt._checkpoint.plan import Action, LeafPlan, RestorePlan
from flaxckpt._types import LeafPath
from flaxckpt._ui import forms, frame
from flaxckpt._ui.workspace import Query, Workspace, address
from flaxckpt._util import html, humanize
from flaxckpt.errors import Mismatch
from flaxckpt.transforms import _parse

_MOST_ROWS = 500


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page that plans a restore of the `step` of a `run` `into` another."""
    place = workspace.places.find(query.text("run"))
    names = [*workspace.places.runs, *workspace.places.others]
    chosen = query.text("into") or next((n for n in names if n != place.name), "")
    into = workspace.places.find(chosen or place.name)
    step = query.number("step")
    steps = forms.good_steps(workspace, place)
    if step is None and steps:
        step = steps[-1]
    choices = [forms.hidden("run", place.name)]
    if place.is_run:
        choices.append(
            forms.step_choice(workspace, place, "Restore step", "step", step)
        )
    choices.append(
        forms.checkpoint_choice(workspace, "into the state of", "into", into.name)
    )
    choices.append(_optimizer_choice(query))
    choices.append(html.element("button", "Plan", type="submit"))
    choices.append(_rule_fields(query))
    is_asked = query.text("into") != ""
    fields = {"run": place.name, "step": step, "into": into.name}
    given = {name: query.text(name) or None for name in (*_RULES, "optimizer")}
    result = html.element(
        "div",
        frame.message(
            "Shows what a restore would do to each leaf, and reads no array.\n"
            "To plan a restore into a state that is not in the list, start the page"
            f" with it: {_command(workspace)}"
        ),
        id="result",
        aria_live="polite",
        hx_get=address("/plan/result", **fields, **given) if is_asked else None,
        hx_trigger="load" if is_asked else None,
    )
    return frame.page(
        workspace,
        f"Restore {place.name}",
        html.element(
            "section",
            html.element("h2", "What a restore would do"),
            html.element("form", *choices, class_="choices"),
            result,
        ),
        place=place,
        view="/plan",
    )


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


_OPTIMIZERS = {
    "": "matched by roles, if recorded",
    "match": "matched by roles",
    "exact": "matched by paths",
    "reinit": "started afresh",
}
"""How optimizer leaves are matched -> what that means."""


def _optimizer_choice(query: Query) -> html.Markup:
    chosen = query.text("optimizer")
    return forms.choice(
        "with the optimizer", "optimizer", [*_OPTIMIZERS.items()], chosen
    )


def _command(workspace: Workspace) -> str:
    """Returns the command that adds a checkpoint to the list of targets."""
    opened = shlex.quote(str(workspace.places.root))
    others = "".join(f" --against {shlex.quote(n)}" for n in workspace.places.others)
    return f"flaxckpt ui {opened}{others} --against PATH"


def result(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the plan of a restore, after the transforms of the fields.

    Raises:
        OptionError: A transform is invalid, or has no effect.
    """
    place = workspace.places.find(query.text("run"))
    into = workspace.places.find(query.text("into"))
    rules = {name: query.text(name).split("\n") for name in _RULES}
    changes = _parse.parse(
        **{name: filter(None, map(str.strip, lines)) for name, lines in rules.items()}
    )
    target = _inspect.abstract_file.read_target(into.path)
    plan = _checkpoint.restore.plan_for_target(
        place.path,
        target.state,
        step=query.number("step"),
        transforms=changes,
        optimizer=_optimizer(query) or ("match" if target.has_roles else "exact"),
        unused="ignore",
    )
    return html.join([_outcome(plan, into.name), _actions(plan), *_groups(plan)])


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


def _outcome(plan: RestorePlan, into: str) -> html.Markup:
    if plan.problems:
        leaves = humanize.count(len(plan.problems), "leaf", "leaves")
        text = f"The restore would fail: {leaves} of {into} cannot be restored."
        failed = html.element("p", text, class_="outcome bad")
        return html.join([failed, html.element("pre", plan.advice)])
    size = humanize.size(plan.bytes_to_read)
    text = f"The restore would succeed if the files are whole, and read {size}."
    succeeds = html.element("p", text, class_="outcome good")
    if not (fresh := plan.count("init")):
        return succeeds
    note = (
        f"The optimizer initializes {humanize.count(fresh, 'leaf', 'leaves')}: pass a"
        " state that has one, such as a TrainState."
    )
    return html.join([succeeds, html.element("p", note, class_="summary-text")])


def _actions(plan: RestorePlan) -> html.Markup:
    counts = {action: plan.count(action) for action in _MEANINGS}
    items = [
        html.element(
            "li", html.element("strong", f"{n:,} {action}"), f": {_MEANINGS[action]}"
        )
        for action, n in counts.items()
        if n
    ]
    return html.element("ul", *items, class_="actions")


_MEANINGS: Mapping[Action, str] = {
    "conflict": "in the state, and not restorable",
    "init": "not in the checkpoint, so they start afresh",
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
                _report.tables.table(caption, _COLUMNS, rows, what="leaves"),
                class_="group",
                open="" if actions != ("loaded",) else None,
            )
        )
    return made


_COLUMNS = [
    _report.tables.Column("leaf"),
    _report.tables.Column("wanted"),
    _report.tables.Column("found"),
]


def _rank(actions: Sequence[Action]) -> int:
    order = list(_MEANINGS)
    return min(order.index(action) for action in actions)


def _row(
    path: LeafPath, leaf: LeafPlan, problem: Mismatch | None
) -> _report.tables.Row:
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
    return _report.tables.Row([path, wanted, found], data, kind)
