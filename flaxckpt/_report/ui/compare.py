"""The view on the differences between two steps."""

from __future__ import annotations

from flaxckpt import _inspect, _storage, errors
from flaxckpt._report import gathering, section_state
from flaxckpt._report.ui import forms, frame
from flaxckpt._report.ui.opened import OpenCheckpoint
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Query, Workspace, address
from flaxckpt._util import html

_MOST_ROWS = 500
_MOST_BYTES = 2**32
"""Larger pairs of steps are compared only on request."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page that compares step `a` of a `run` with step `b` of `with`."""
    place = workspace.places.find(query.text("run"))
    others = workspace.targets.checkpoints()
    other = workspace.targets.find_checkpoint(query.text("with") or place.name)
    a, b = _choose_steps(workspace, place, other, query)
    choices = [forms.hidden("run", place.name)]
    if place.is_run:
        choices.append(forms.step_choice(workspace, place, "From step", "a", a))
    if len(others) > 1:
        choices.append(
            forms.checkpoint_choice(
                others,
                "to",
                "with",
                other.name,
                empty=workspace.targets.without_steps(others),
                steps="b",
            )
        )
    if other.is_run:
        choices.append(forms.step_choice(workspace, other, "to step", "b", b))
    choices.append(html.element("button", "Compare", type="submit"))
    is_asked = query.number("b") is not None or (place, a) != (other, b)
    url = address("/compare/result", run=place.name, a=a, b=b, **{"with": other.name})
    result = html.element(
        "div",
        frame.message(
            "Reading both, and comparing them leaf by leaf …"
            if is_asked
            else "There is no other step or checkpoint to compare with."
        ),
        id="result",
        aria_live="polite",
        hx_get=url if is_asked else None,
        hx_trigger="load" if is_asked else None,
    )
    return frame.page(
        workspace,
        f"Compare steps of {place.name}",
        html.element(
            "section",
            html.element("h2", "What changed between two steps"),
            html.element("form", *choices, class_="choices"),
            result,
            frame.fold("Compare with another run", _where(workspace)),
        ),
        place=place,
        view="/compare",
        version=workspace.version(place),
    )


def _where(workspace: Workspace) -> str:
    """Returns how another run or checkpoint gets into the list."""
    places = workspace.places
    start = (
        "For a run or checkpoint that is not in the list, start the page with it:"
        f" {forms.start_with_another(workspace)}"
    )
    if not places.is_single or _storage.of(places.root).costs_requests:
        return start
    return f"The list has the runs and checkpoints in {places.root.parent}. {start}"


def _choose_steps(
    workspace: Workspace, place: Location, other: Location, query: Query
) -> tuple[int | None, int | None]:
    """Returns the steps of a request; by default the newest good one, and one before.

    Steps of the request stay, whatever their state: comparing them tells what is wrong.
    """
    a, b = query.number("a"), query.number("b")
    if b is None:
        b = max(forms.good_steps(workspace, other), default=None)
    if a is None:
        others = forms.good_steps(workspace, place)
        if other == place and b is not None:
            earlier = [step for step in others if step < b]
            others = earlier or [step for step in others if step > b][:1]
        a = max(others, default=None)
    return a, b


def result(workspace: Workspace, query: Query) -> html.Markup:
    """Compares two steps, and returns the leaves that differ."""
    place = workspace.places.find(query.text("run"))
    other = workspace.targets.find_checkpoint(query.text("with") or place.name)
    first = workspace.opened.get(place, query.number("a"))
    second = workspace.opened.get(other, query.number("b"))
    if first[:2] == second[:2]:
        raise errors.OptionError("choose two different steps")
    size = first.root.bytes + second.root.bytes
    if size > _MOST_BYTES and not query.text("large"):
        fields = {"run": place.name, "a": first.step, "b": second.step}
        url = address("/compare/result", **fields, **{"with": other.name}, large=1)
        return forms.read_anyway(size, url, "#result")
    found = _inspect.diff.diff(
        place.path, other.path, step_a=first.step, step_b=second.step
    )
    repeated = workspace.feeds.latest(other).report.copies
    names = _names(first, second)
    steps = first.step or 0, second.step or 0
    change = gathering.describe_change(found, repeated, steps, names)
    summary = section_state.change_summary(change, names)
    shown = section_state.change_tables(
        change, names, most=_MOST_ROWS, rest="flaxckpt diff --json lists all"
    )
    return html.join([html.element("p", summary, class_="summary-text"), *shown])


def _names(first: OpenCheckpoint, second: OpenCheckpoint) -> tuple[str, str]:
    """Returns the names of two checkpoints, with their runs if these are different."""
    if first.place == second.place:
        return f"step {first.step:,}", f"step {second.step:,}"
    return _name(first), _name(second)


def _name(opened: OpenCheckpoint) -> str:
    if opened.step is None:
        return opened.place.name
    return f"step {opened.step:,} of {opened.place.name}"
