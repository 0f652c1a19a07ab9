"""The view on a run: the report's sections, replaced as the run changes."""

from __future__ import annotations

from flaxckpt._report import content, templates
from flaxckpt._report.ui import frame
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._util import html


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page on a run or a checkpoint, the field `run`."""
    return show(workspace, workspace.places.find(query.text("run")))


def show(workspace: Workspace, place: Location) -> html.Markup:
    """Returns the page on a run or a checkpoint."""
    workspace.feeds.latest(place)  # the first report has a version
    version = workspace.version(place)
    shown = _describe(workspace, place)
    return frame.render("ui/overview.html", workspace, place, version=version, **shown)


def sections(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the sections on a run as of now; with `all`, all of its steps."""
    place = workspace.places.find(query.text("run"))
    most = None if query.text("all") else content.MOST_STEPS
    shown = _describe(workspace, place, most)
    return templates.render("ui/sections.html", place=place, **shown)


def _describe(
    workspace: Workspace, place: Location, most: int | None = content.MOST_STEPS
) -> content.Content:
    report = workspace.report(place)
    runs = workspace.places.runs.values()
    return {**content.describe(report, most), "runs": runs}
