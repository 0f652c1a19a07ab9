"""The view on the differences between two steps."""

from __future__ import annotations

from flaxckpt import _inspect, errors
from flaxckpt._report import content, flight_recorder, templates
from flaxckpt._report.ui import frame
from flaxckpt._report.ui.opened import OpenCheckpoint
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._util import html

_MOST_BYTES = 2**32
"""Larger pairs of steps are compared only on request."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page that compares step `a` of a `run` with step `b` of `with`."""
    place = workspace.places.find(query.text("run"))
    others = workspace.places.checkpoints()
    other = workspace.places.find(query.text("with") or place.name, others)
    report, other_report = workspace.report(place), workspace.report(other)
    a, b = query.number("a"), query.number("b")
    if other == place:
        a, b = flight_recorder.choose_pair(report, a, b)
    else:
        a = max(report.usable, default=None) if a is None else a
        b = max(other_report.usable, default=None) if b is None else b
    is_asked = query.number("b") is not None or place != other or None not in (a, b)
    return frame.render(
        "ui/compare.html",
        workspace,
        place,
        other=other,
        fields={"run": place.name, "a": a, "b": b, "with": other.name},
        report=report,
        other_report=other_report,
        others=others,
        empty=workspace.places.without_steps(others),
        is_asked=is_asked,
    )


def result(workspace: Workspace, query: Query) -> html.Markup:
    """Compares two steps, and returns the leaves that differ."""
    place = workspace.places.find(query.text("run"))
    others = workspace.places.checkpoints()
    other = workspace.places.find(query.text("with") or place.name, others)
    first = workspace.opened.get(place, query.number("a"))
    second = workspace.opened.get(other, query.number("b"))
    if first[:2] == second[:2]:
        raise errors.OptionError("choose two different steps")
    size = first.root.bytes + second.root.bytes
    if size > _MOST_BYTES and not query.text("large"):
        fields = {"run": place.name, "a": first.step, "b": second.step}
        values = {"diff": None, "size": size, **fields, "other": other.name}
        return templates.render("ui/compared.html", **values)
    found = _inspect.diff.diff(
        place.path, other.path, step_a=first.step, step_b=second.step
    )
    repeated = workspace.feeds.latest(other).report.copies
    is_one = first.place == second.place
    names = _name(first, is_one), _name(second, is_one)
    groups = content.group_changes(found, repeated)
    return templates.render("ui/compared.html", diff=found, groups=groups, names=names)


def _name(opened: OpenCheckpoint, is_one: bool) -> str:
    """Returns the name of a checkpoint, with its run unless the runs are one."""
    if opened.step is None:
        return opened.place.name
    return f"step {opened.step:,}" + ("" if is_one else f" of {opened.place.name}")
