"""The view on a run: the report's sections, replaced as the run changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from flaxckpt._report import (
    cards,
    offline,
    section_origin,
    section_saves,
    section_state,
    section_steps,
)
from flaxckpt._report.data import Report
from flaxckpt._report.section import Section
from flaxckpt._report.ui import frame
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Query, Workspace, address
from flaxckpt._util import html

_MOST_STEPS = 200
"""More rows would answer slowly to a click on a heading."""

_STATE: Sequence[Callable[[Report], Section | None]] = (
    functools.partial(section_state.sizes, has_tree=False),
    section_origin.dataset,
)
"""The sections of the second column; changes and leaves have their own views."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page on a run or a checkpoint, the field `run`."""
    return show(workspace, workspace.places.find(query.text("run")))


def show(workspace: Workspace, place: Location) -> html.Markup:
    """Returns the page on a run or a checkpoint."""
    workspace.feeds.latest(place)  # the first report has a version
    version = workspace.version(place)
    report = workspace.feeds.latest(place).report
    content = html.element(
        "div",
        _content(workspace, report, place),
        id="sections",
        hx_get=address("/run/sections", run=place.name),
        hx_trigger="run-changed from:body",
        hx_swap="morph:innerHTML",
    )
    return frame.page(
        workspace,
        place.name,
        content,
        place=place,
        view="/run",
        version=version,
    )


def sections(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the sections on a run as of now; with `all`, all of its steps."""
    place = workspace.places.find(query.text("run"))
    report = workspace.feeds.latest(place).report
    most = None if query.text("all") else _MOST_STEPS
    return _content(workspace, report, place, most=most)


def _content(
    workspace: Workspace,
    report: Report,
    place: Location,
    *,
    most: int | None = _MOST_STEPS,
) -> html.Markup:
    report = workspace.verifications.update(place, report)
    show_all = html.element(
        "button",
        "show all",
        type="button",
        hx_get=address("/run/sections", run=place.name, all=1),
        hx_target="#sections",
        hx_swap="morph:innerHTML",
    )
    steps = section_steps.steps(
        report, most=len(report.history) if most is None else most, rest=show_all
    )
    run = [section_saves.saves(report), _integrity(report, place)]
    state = [section(report) for section in _STATE]
    links = {
        str(each.path): address("/run", run=each.name)
        for each in workspace.places.runs.values()
    }
    leaves = section_saves.leaves(report)
    lineage = section_origin.lineage(report, links=links)
    columns = []
    for sections in (run, state):
        markup = [section.markup() for section in sections if section is not None]
        columns.append(html.element("div", *markup, class_="column"))
    return html.join(
        [
            offline.recorder(report),
            cards.cards(*offline.headline(report)),
            html.element(
                "div",
                section_steps.metrics(report).markup(),
                *[
                    each.markup()
                    for each in (leaves, steps, lineage)
                    if each is not None
                ],
                *columns,
                class_="columns",
            ),
        ]
    )


def _integrity(report: Report, place: Location) -> Section | None:
    link = html.element("a", "Verify", href=address("/verify", run=place.name))
    how = html.join((link, " reads every byte."))
    return section_origin.integrity(report, verify=how)
