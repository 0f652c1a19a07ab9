"""The view on the leaves of a step: a tree, a search, the statistics of a leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flaxckpt import _inspect, errors
from flaxckpt._report import flight_recorder, templates
from flaxckpt._report.ui import frame
from flaxckpt._report.ui.workspace import Query, Workspace
from flaxckpt._types import LeafPath
from flaxckpt._util import html

_MOST_CHILDREN = 200
_MOST_FOUND = 100
_OPENED_ROWS = 40
"""A container is unfolded at first if the tree has few rows then."""

_BINS = 40
_MOST_BYTES = 2**31
"""Larger leaves are read only on request."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page on the leaves of the `step` of a `run`, or on one `leaf`.

    By default, the leaf is the one that statistics make notable, with the reason.
    """
    place = workspace.places.find(query.text("run"))
    report, step = workspace.report(place), query.number("step")
    notable, why = flight_recorder.choose_leaf(report) or ("", "")
    values = {**_LIMITS, "leaf": query.text("leaf") or notable}
    chosen = flight_recorder.choose_leaf_step(report, values["leaf"])
    is_before = step is None and chosen != max(report.usable, default=None)
    step = chosen if step is None else step
    return frame.render(
        "ui/leaves.html",
        workspace,
        place,
        run=place.name,
        step=step,
        report=report,
        why=why if values["leaf"] == notable else "",
        is_before=is_before,
        opened=workspace.opened.find(place, step),
        **values,
    )


_LIMITS: Mapping[str, Any] = {
    "under": "",
    "start": 0,
    "unfold": _OPENED_ROWS,
    "most": _MOST_CHILDREN,
    "found": None,
    "leaf": "",
}
"""The top of the tree, folded but for the way to a `leaf`."""


def branch(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the content of a container, `under`, from its child `from` on.

    Without a container, returns the top of the tree.
    """
    under, start = query.text("under"), query.number("from")
    if not under and start is None:
        return _show(workspace, query, leaf=query.text("leaf"))
    return _show(workspace, query, under=under, start=start or 0, unfold=0)


def search(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the leaves whose paths have all words of `q`; the tree without any."""
    words = query.text("q").lower().split()
    return _show(workspace, query, words=words)


def _show(
    workspace: Workspace, query: Query, words: Sequence[str] = (), **limits: object
) -> html.Markup:
    place = workspace.places.find(query.text("run"))
    opened = workspace.opened.get(place, query.number("step"))
    values = {**_LIMITS, **limits, "opened": opened, "run": place.name}
    if words:
        found = find(list(opened.stored.metadata.leaves), words)
        shown = [opened.leaves[path] for path in found[:_MOST_FOUND]]
        values |= {"found": shown, "count": len(found)}
    return templates.render("ui/tree.html", step=opened.step, **values)


def find(paths: Sequence[LeafPath], words: Sequence[str]) -> list[LeafPath]:
    """Returns the paths that contain all words, in any case of letters."""
    return [path for path in paths if all(word in path.lower() for word in words)]


def statistics(workspace: Workspace, query: Query) -> html.Markup:
    """Reads a `leaf` and returns its statistics; a large one only if `large` is set."""
    place = workspace.places.find(query.text("run"))
    opened = workspace.opened.get(place, query.number("step"))
    leaf = query.text("leaf")
    tree = opened.leaves.get(leaf)
    if tree is None:
        raise errors.CheckpointNotFoundError(
            f"{opened.stored.metadata.path} has no leaf {leaf!r}"
        )
    result = None
    if tree.bytes <= _MOST_BYTES or query.text("large"):
        read = _inspect.leaf_statistics.statistics_of
        result = read(opened.stored, leaf, bins=_BINS)
    return templates.render(
        "ui/leaf.html", run=place.name, step=opened.step, tree=tree, result=result
    )
