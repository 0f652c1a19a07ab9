"""The view on the leaves of a step: a tree, a search, the statistics of a leaf."""

from __future__ import annotations

from collections.abc import Sequence

from flaxckpt import _inspect, errors
from flaxckpt._inspect.leaf_statistics import LeafStatistics
from flaxckpt._report import charts, flight_recorder, tree
from flaxckpt._report.tree import Branch
from flaxckpt._report.ui import forms, frame
from flaxckpt._report.ui.opened import OpenCheckpoint
from flaxckpt._report.ui.places import Location
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
    """Returns the page on the leaves of the `step` of a `run`, or on one `leaf`."""
    place = workspace.places.find(query.text("run"))
    step = query.number("step")
    steps = forms.good_steps(workspace, place)
    if step is None and steps:
        step = steps[-1]
    leaf = query.text("leaf") or _propose_leaf(workspace, place)
    fields = {"run": place.name, "step": None if step is None else str(step)}
    panel = html.element(
        "section",
        frame.message("Choose a leaf to read its values."),
        id="leaf",
        aria_live="polite",
        hx_get=address("/leaves/leaf", **fields, leaf=leaf) if leaf else None,
        hx_trigger="load" if leaf else None,
    )
    browser = html.element(
        "section",
        html.element("h2", "Leaves" if step is None else f"Leaves of step {step:,}"),
        forms.step_form(workspace, place, step),
        _search_field(fields),
        _tree(workspace, place, step),
    )
    return frame.page(
        workspace,
        f"Leaves of {place.name}",
        html.element("div", browser, panel, class_="panes"),
        place=place,
        view="/leaves",
        version=workspace.version(place),
    )


def _propose_leaf(workspace: Workspace, place: Location) -> str:
    """Returns the leaf that changed most at the last save, if statistics tell it."""
    histories = workspace.report(place).leaf_histories
    return flight_recorder.find_most_changed(histories) or ""


def _tree(workspace: Workspace, place: Location, step: int | None) -> html.Markup:
    """Returns the tree; if the checkpoint has to be opened first, it comes later."""
    opened = workspace.opened.find(place, step)
    if opened is not None:
        return html.element("div", _top(opened), id="tree", class_="tree")
    return html.element(
        "div",
        frame.message("Opening the checkpoint …"),
        id="tree",
        class_="tree",
        hx_get=address("/leaves/branch", run=place.name, step=step),
        hx_trigger="load",
    )


def _top(opened: OpenCheckpoint) -> html.Markup:
    leaves = humanize.count(opened.root.leaves, "leaf", "leaves")
    facts = f"{leaves}, {humanize.size(opened.root.bytes)}"
    return html.join(
        [
            html.element("p", facts, class_="note"),
            _level(opened, "", unfold=_OPENED_ROWS),
        ]
    )


def _search_field(fields: dict[str, str | None]) -> html.Markup:
    return html.element(
        "input",
        type="search",
        name_="q",
        placeholder="Search leaves: kernel layer_3",
        aria_label="Search leaves",
        autocomplete="off",
        hx_get=address("/leaves/search", **fields),
        hx_trigger="input changed delay:30ms, search",
        hx_target="#tree",
        hx_sync="this:replace",
    )


# ---- the tree ---------------------------------------------------------------------


def branch(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the content of a container, `under`, from its child `from` on.

    Without a container, returns the top of the tree.
    """
    place = workspace.places.find(query.text("run"))
    opened = workspace.opened.get(place, query.number("step"))
    if not query.text("under") and query.number("from") is None:
        return _top(opened)
    return _level(opened, query.text("under"), start=query.number("from") or 0)


def _level(
    opened: OpenCheckpoint, under: LeafPath, *, start: int = 0, unfold: int = 0
) -> html.Markup:
    children = opened.children.get(under, ())
    entries = [
        _branch(opened, child, unfold // max(1, len(children)))
        for child in children[start : start + _MOST_CHILDREN]
    ]
    if len(children) > start + _MOST_CHILDREN:
        entries.append(_more(opened, under, start + _MOST_CHILDREN, len(children)))
    return tree.entries(entries, title="Leaves" if not under else None)


def _branch(opened: OpenCheckpoint, tree: Subtree, unfold: int) -> Branch:
    if tree.info is not None:
        return _leaf_entry(opened, tree, tree.name)
    children = opened.children[tree.path]
    is_open = len(children) <= unfold
    inner = (
        [_branch(opened, child, unfold // len(children) - 1) for child in children]
        if is_open
        else None
    )
    url = _url("/leaves/branch", opened, under=tree.path)
    data = {} if is_open else {"hx_get": url, **_ON_UNFOLDING}
    return Branch(
        tree.name, tree.path, tree.leaves, tree.bytes, "", inner, is_open, data=data
    )


_ON_UNFOLDING = {
    "hx_trigger": "click once from:find summary",
    "hx_target": "find ul",
    "hx_swap": "outerHTML",
}


def _leaf_entry(opened: OpenCheckpoint, tree: Subtree, name: str) -> Branch:
    link = html.element(
        "a",
        name,
        href=_url("/leaves", opened, leaf=tree.path),
        hx_get=_url("/leaves/leaf", opened, leaf=tree.path),
        hx_target="#leaf",
        hx_push_url=_url("/leaves", opened, leaf=tree.path),
    )
    return Branch(link, tree.path, 1, tree.bytes, str(tree.info))


def _more(opened: OpenCheckpoint, under: LeafPath, start: int, total: int) -> Branch:
    link = html.element(
        "button",
        f"{total - start:,} more",
        type="button",
        hx_get=_url("/leaves/branch", opened, under=under, **{"from": start}),
        hx_target="closest ul",
        hx_swap="afterend",
    )
    return Branch(link, "", 1, 0, "")


def _url(path: str, opened: OpenCheckpoint, **fields: object) -> html.Markup:
    return address(path, run=opened.place.name, step=opened.step, **fields)


def search(workspace: Workspace, query: Query) -> html.Markup:
    """Returns the leaves whose paths have all words of `q`; the tree without any."""
    place = workspace.places.find(query.text("run"))
    opened = workspace.opened.get(place, query.number("step"))
    words = query.text("q").lower().split()
    if not words:
        return _top(opened)
    found = find(list(opened.stored.metadata.leaves), words)
    count = f"{len(found):,} of {opened.root.leaves:,} leaves"
    if len(found) > _MOST_FOUND:
        count += f"; the first {_MOST_FOUND} are shown"
    shown = [
        _leaf_entry(opened, tree, tree.shown_path)
        for tree in map(opened.leaves.__getitem__, found[:_MOST_FOUND])
    ]
    return html.join(
        [
            html.element("p", count, class_="note", role="status"),
            tree.entries(shown, title="Found leaves"),
        ]
    )


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
    size = tree.bytes
    heading = html.element("h2", tree.shown_path, class_="leaf-path")
    if size > _MOST_BYTES and not query.text("large"):
        url = _url("/leaves/leaf", opened, leaf=leaf, large=1)
        return html.join([heading, forms.read_anyway(size, url, "#leaf")])
    result = _inspect.leaf_statistics.statistics_of(opened.stored, leaf, bins=_BINS)
    return html.join(
        [
            heading,
            _facts(opened, result, size),
            _numbers(result),
            _histogram(leaf, result),
            _values(result),
        ]
    )


def _facts(opened: OpenCheckpoint, result: LeafStatistics, size: int) -> html.Markup:
    info = result.info
    facts = [str(info), humanize.size(size)]
    if opened.step is not None:
        facts.append(f"step {opened.step:,}")
    if info.mesh_axes is not None:
        facts.append(f"split as {info.spec}")
    if info.role is not None:
        facts.append(f"{info.role.state_class}.{info.role.field}")
    return html.element("p", ", ".join(facts), class_="summary-text")


def _numbers(result: LeafStatistics) -> html.Markup:
    """Returns the statistics as pairs of a name and a number."""
    if not result.edges and not result.count:
        return html.NOTHING
    numbers: list[tuple[str, object]] = [
        ("elements", f"{result.count:,}"),
        ("min", result.min),
        ("max", result.max),
        ("mean", result.mean),
        ("std", result.std),
        ("norm", result.norm),
        ("zeros", f"{result.zeros:,}"),
        ("NaNs", f"{result.nans:,}"),
        ("infinities", f"{result.infs:,}"),
    ]
    is_bad = {"NaNs": result.nans, "infinities": result.infs}
    pairs = [
        html.element(
            "div",
            html.element("dt", name),
            html.element("dd", humanize.number(value)),
            class_="bad" if is_bad.get(name) else None,
        )
        for name, value in numbers
        if value is not None
    ]
    return html.element("dl", *pairs, class_="numbers")


def _histogram(leaf: LeafPath, result: LeafStatistics) -> html.Markup:
    if not result.histogram:
        return html.NOTHING
    picture = charts.histogram.histogram(
        f"Values of {leaf or 'the state'}", result.edges, result.histogram
    )
    return html.element("figure", picture)


def _values(result: LeafStatistics) -> html.Markup:
    if result.values is None:
        return html.NOTHING
    values = result.values if isinstance(result.values, list) else [result.values]
    shown = ", ".join(humanize.number(value) for value in values)
    return html.element("p", html.element("code", shown or "no elements"))
