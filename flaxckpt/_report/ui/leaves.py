"""The view on the leaves of a step: a tree, a search, the statistics of a leaf."""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt import _inspect, errors
from flaxckpt._inspect.leaf_statistics import LeafStatistics
from flaxckpt._report import flight_recorder, templates
from flaxckpt._report.content import Branch, Content
from flaxckpt._report.ui import forms, frame
from flaxckpt._report.ui.opened import OpenCheckpoint
from flaxckpt._report.ui.workspace import Query, Workspace, address
from flaxckpt._run.disk_usage import Subtree
from flaxckpt._types import LeafPath
from flaxckpt._util import html, humanize

_MOST_CHILDREN = 200
_MOST_FOUND = 100
_OPENED_ROWS = 40
"""A container is unfolded at first if the tree has few rows then."""

_BINS = 40
_MOST_BYTES = 2**31
"""Larger leaves are read only on request."""


def page(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the page on the leaves of the `step` of a `run`, or on one `leaf`.

    By default, the leaf is the one that changed most at the last save, if statistics
    tell it.
    """
    place = workspace.places.find(query.text("run"))
    report, step = workspace.report(place), query.number("step")
    if step is None:
        step = max(forms.good_steps(report), default=None)
    leaf = query.text("leaf")
    leaf = leaf or flight_recorder.find_most_changed(report.leaf_histories) or ""
    opened = workspace.opened.find(place, step)
    run = {"run": place.name, "step": step}
    return frame.render(
        "ui/leaves.html",
        workspace,
        f"Leaves of {place.name}",
        place,
        "/leaves",
        version=workspace.version(place),
        run=place.name,
        step=step,
        options=forms.step_options(report, step),
        search=address("/leaves/search", **run),
        tree=None if opened is None else _top(opened),
        tree_url=address("/leaves/branch", **run),
        leaf_url=address("/leaves/leaf", **run, leaf=leaf) if leaf else None,
    )


# ---- the tree ---------------------------------------------------------------------


def branch(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the content of a container, `under`, from its child `from` on.

    Without a container, returns the top of the tree.
    """
    place = workspace.places.find(query.text("run"))
    opened = workspace.opened.get(place, query.number("step"))
    under, start = query.text("under"), query.number("from")
    if not under and start is None:
        return templates.render("ui/tree.html", tree=_top(opened))
    branches = _level(opened, under, start=start or 0)
    title = None if under else "Leaves"
    return templates.render("ui/tree.html", tree={"branches": branches, "title": title})


def _top(opened: OpenCheckpoint) -> Content:
    leaves = humanize.count(opened.root.leaves, "leaf", "leaves")
    return {
        "note": f"{leaves}, {humanize.size(opened.root.bytes)}",
        "branches": _level(opened, "", unfold=_OPENED_ROWS),
        "title": "Leaves",
    }


def _level(
    opened: OpenCheckpoint, under: LeafPath, *, start: int = 0, unfold: int = 0
) -> list[Branch]:
    children = opened.children.get(under, ())
    end = start + _MOST_CHILDREN
    entries = [
        _branch(opened, child, unfold // max(1, len(children)))
        for child in children[start:end]
    ]
    if len(children) > end:
        more = {
            "type": "button",
            "hx-get": _url("/leaves/branch", opened, under=under, **{"from": end}),
            "hx-target": "closest ul",
            "hx-swap": "afterend",
        }
        link = {"tag": "button", "attributes": more}
        text = f"{len(children) - end:,} more"
        entries.append(Branch(text, "", 1, 0, "", link=link))
    return entries


def _branch(opened: OpenCheckpoint, tree: Subtree, unfold: int) -> Branch:
    if tree.info is not None:
        return _leaf_entry(opened, tree, tree.name)
    row = Branch(tree.name, tree.path, tree.leaves, tree.bytes, "")
    children = opened.children[tree.path]
    if len(children) <= unfold:
        room = unfold // len(children) - 1
        inner = [_branch(opened, child, room) for child in children]
        return row._replace(inner=inner, is_open=True)
    url = _url("/leaves/branch", opened, under=tree.path)
    return row._replace(inner=None, data={"hx-get": url, **_ON_UNFOLDING})


_ON_UNFOLDING = {
    "hx-trigger": "click once from:find summary",
    "hx-target": "find ul",
    "hx-swap": "outerHTML",
}


def _leaf_entry(opened: OpenCheckpoint, tree: Subtree, name: str) -> Branch:
    page = _url("/leaves", opened, leaf=tree.path)
    link = {
        "href": page,
        "hx-get": _url("/leaves/leaf", opened, leaf=tree.path),
        "hx-target": "#leaf",
        "hx-push-url": page,
    }
    shown = {"tag": "a", "attributes": link}
    return Branch(name, tree.path, 1, tree.bytes, str(tree.info), link=shown)


def _url(path: str, opened: OpenCheckpoint, **fields: object) -> html.Markup:
    return address(path, run=opened.place.name, step=opened.step, **fields)


def search(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the leaves whose paths have all words of `q`; the tree without any."""
    place = workspace.places.find(query.text("run"))
    opened = workspace.opened.get(place, query.number("step"))
    words = query.text("q").lower().split()
    if not words:
        return templates.render("ui/tree.html", tree=_top(opened))
    found = find(list(opened.stored.metadata.leaves), words)
    note = f"{len(found):,} of {opened.root.leaves:,} leaves"
    if len(found) > _MOST_FOUND:
        note += f"; the first {_MOST_FOUND} are shown"
    trees = map(opened.leaves.__getitem__, found[:_MOST_FOUND])
    branches = [_leaf_entry(opened, tree, tree.shown_path) for tree in trees]
    tree = {"note": note, "branches": branches, "title": "Found leaves"}
    return templates.render("ui/tree.html", tree=tree)


def find(paths: Sequence[LeafPath], words: Sequence[str]) -> list[LeafPath]:
    """Returns the paths that contain all words, in any case of letters."""
    return [path for path in paths if all(word in path.lower() for word in words)]


# ---- a leaf -----------------------------------------------------------------------


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
    is_small = tree.bytes <= _MOST_BYTES or query.text("large")
    result = _read(opened, leaf) if is_small else None
    return templates.render(
        "ui/leaf.html",
        tree=tree,
        url=_url("/leaves/leaf", opened, leaf=leaf, large=1),
        step=opened.step,
        result=result,
        values=None if result is None else _values(result),
    )


def _read(opened: OpenCheckpoint, leaf: LeafPath) -> LeafStatistics:
    return _inspect.leaf_statistics.statistics_of(opened.stored, leaf, bins=_BINS)


def _values(result: LeafStatistics) -> str | None:
    """Returns the values of a small leaf; None for another."""
    if result.values is None:
        return None
    values = result.values if isinstance(result.values, list) else [result.values]
    return ", ".join(map(humanize.number, values)) or "no elements"
