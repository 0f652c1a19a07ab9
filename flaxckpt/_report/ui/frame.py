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


def page(
    workspace: Workspace,
    title: str,
    *content: object,
    place: Location | None = None,
    view: str = "/",
    version: str | None = None,
) -> html.Markup:
    """Returns a page.

    Args:
        workspace: The data behind the page.
        title: The title of the window.
        *content: The page below the header.
        place: The run or checkpoint that the page shows; None for all of them.
        view: The address of the view.
        version: The version of the data on the page, which follows the changes of the
            run, or of all runs; None for a page that does not.
    """
    head = html.element(
        "head",
        html.element("meta", charset="utf-8"),
        html.element(
            "meta", name_="viewport", content="width=device-width, initial-scale=1"
        ),
        html.element("meta", name_="color-scheme", content="light dark"),
        html.element("meta", name_="htmx-config", content=json.dumps(_HTMX)),
        html.element("link", rel="icon", href="data:,"),
        html.element("title", f"{title} · flaxckpt"),
        html.element("link", rel="stylesheet", href=f"/static/{STYLE}"),
        *[html.element("script", src=f"/static/{name}", defer="") for name in SCRIPTS],
    )
    body = html.element(
        "body",
        templates.render("start.html"),
        _header(workspace, place, view),
        html.element("main", *content, id="main", tabindex=-1),
        _footer(workspace, place),
        class_="ui",
        hx_ext="morph",
        data_events=None if version is None else _events(place, version),
    )
    document = html.element("html", head, body, lang="en")
    return html.Markup(f"<!doctype html>\n{document}\n")


def _events(place: Location | None, version: str) -> html.Markup:
    run = None if place is None else place.name
    return address("/events", run=run, version=version)


def _header(workspace: Workspace, place: Location | None, view: str) -> html.Markup:
    places = workspace.places
    is_below = place is not None and not places.is_single
    above = str(places.root if is_below else places.root.parent)
    name = html.element("h1", places.root.name or str(places.root))
    crumbs: list[html.Markup] = []
    if not places.is_single:
        is_here = "page" if place is None else None
        link = html.element("a", "All runs", href="/", aria_current=is_here)
        crumbs.append(link)
    if place is not None:
        name = html.element("h1", place.name)
        crumbs += [
            html.element(
                "a",
                title,
                href=address(path, run=place.name),
                aria_current="page" if path == view else None,
            )
            for path, title in VIEWS.items()
        ]
    news = html.element("p", "", class_="news", id="news", role="status")
    return html.element(
        "header",
        html.element(
            "div",
            html.element("p", above, class_="path"),
            name,
            class_="title",
        ),
        news,
        html.element("nav", *crumbs, aria_label="Views"),
        class_="bar",
    )


def _footer(workspace: Workspace, place: Location | None) -> html.Markup:
    path = workspace.places.root if place is None else place.path
    version = importlib.metadata.version("flaxckpt")
    return html.element(
        "footer",
        f"flaxckpt {version}. This page only reads {path}, and ends with"
        " Ctrl-C in the terminal.",
    )


def message(text: str, kind: str = "note") -> html.Markup:
    """Returns a message, a paragraph for each of its lines.

    Args:
        text: The message.
        kind: A CSS class: `note` or `error`.
    """
    lines = [html.element("p", line) for line in text.splitlines()[:_MOST_LINES]]
    role = "alert" if kind == "error" else None
    return html.element("div", *lines, class_=f"message {kind}", role=role)


def fold(title: str, text: str) -> html.Markup:
    """Returns a text that is folded under a title."""
    return html.element(
        "details", html.element("summary", title), message(text), class_="more"
    )


_MOST_LINES = 40
