"""The frame of all pages: the name of the run, the views, messages."""

from __future__ import annotations

import importlib.metadata
import json

from flaxckpt import _storage
from flaxckpt._inspect.run_search import Location
from flaxckpt._report import templates
from flaxckpt._report.ui.workspace import Workspace
from flaxckpt._util import html

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
    place: Location | None,
    *,
    version: str | None = None,
    **values: object,
) -> html.Markup:
    """Returns a page, from a template that extends `ui/page.html`.

    A page about all runs has no `place`. The version is that of the data on the page,
    which follows the changes of the run, or of all runs; by default it is the present
    one of the run.
    """
    if version is None and place is not None:
        version = workspace.version(place)
    return templates.render(
        template,
        places=workspace.places,
        is_in_store=_storage.of(workspace.places.root).costs_requests,
        place=place,
        version=version,
        release=importlib.metadata.version("flaxckpt"),
        htmx=json.dumps(_HTMX),
        scripts=SCRIPTS,
        style=STYLE,
        **values,
    )
