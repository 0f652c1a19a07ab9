"""The frame of all pages: the name of the run, the views, messages."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping

from flaxckpt._report import templates
from flaxckpt._report.ui.places import Location
from flaxckpt._report.ui.workspace import Workspace, address
from flaxckpt._util import html

VIEWS: Mapping[str, str] = {
    "/run": "Overview",
    "/leaves": "Leaves",
    "/compare": "Compare",
    "/plan": "Plan",
    "/verify": "Verify",
}
"""Address of a view on a run -> its title."""

_HTMX = {
    # Nothing that the content security policy forbids, and nothing from elsewhere.
    "allowEval": False,
    "allowScriptTags": False,
    "includeIndicatorStyles": False,
    "selfRequestsOnly": True,
    # Going back loads the page again, so nothing is kept in the browser.
    "historyCacheSize": 0,
    "refreshOnHistoryMiss": True,
    "responseHandling": [{"code": ".*", "swap": True}],
}

SCRIPTS = ("htmx.min.js", "idiomorph.min.js", "report.js", "ui.js")
STYLE = "style.css"


def render(
    template: str,
    workspace: Workspace,
    title: str,
    place: Location | None = None,
    view: str = "/",
    *,
    version: str | None = None,
    **values: object,
) -> html.Markup:
    """Returns a page.

    Args:
        template: The template, which extends `ui/page.html`.
        workspace: The data behind the page.
        title: The title of the window.
        place: The run or checkpoint that the page shows; None for all of them.
        view: The address of the view.
        version: The version of the data on the page, which follows the changes of the
            run, or of all runs; None for a page that does not.
        **values: The variables of the template.
    """
    places = workspace.places
    run = None if place is None else place.name
    is_below = place is not None and not places.is_single
    links = {path: address(path, run=run) for path in VIEWS} if run else {}
    return templates.render(
        template,
        title=title,
        path=places.root if place is None else place.path,
        above=places.root if is_below else places.root.parent,
        heading=run or places.root.name or places.root,
        crumbs=[(VIEWS[path], links[path], path == view) for path in links],
        has_all=not places.is_single,
        is_all=place is None,
        events=version
        if version is None
        else address("/events", run=run, version=version),
        version=importlib.metadata.version("flaxckpt"),
        htmx=json.dumps(_HTMX),
        scripts=SCRIPTS,
        style=STYLE,
        **values,
    )


def message(text: str, kind: str = "note") -> html.Markup:
    """Returns a message, a paragraph for each line; its class is `note` or `error`."""
    return templates.render("ui/message.html", text=text, kind=kind)
