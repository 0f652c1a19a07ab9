"""A tree of the leaves of a state, with folded containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flaxckpt._report import tables
from flaxckpt._util import html, humanize


class Branch(NamedTuple):
    """A container or a leaf of a tree.

    Attributes:
        name: The key below the container around it.
        path: The leaf path, or the common prefix of the leaves.
        leaves: The number of leaves; 1 for a leaf.
        bytes: The size of all values.
        type: The type of a leaf, `float32[4, 4]`, or a note on a container without
            `inner`; empty for other containers.
        inner: The containers and leaves inside; None if they are inserted when the
            container is unfolded.
        is_open: True if the container is unfolded at first.
        data: HTML attributes of the entry.
    """

    name: object
    path: str
    leaves: int
    bytes: int
    type: str
    inner: Sequence[Branch] | None = ()
    is_open: bool = False
    data: Mapping[str, object] = {}


def tree(branches: Sequence[Branch], title: str) -> html.Markup:
    """Returns a tree with a search field and buttons to unfold and fold all."""
    buttons = [
        html.element("button", label, type="button", data_action=action)
        for label, action in (("Unfold all", "unfold"), ("Fold all", "fold"))
    ]
    controls = html.element("div", *buttons, class_="control buttons")
    return html.element(
        "div",
        html.element(
            "div", tables.search_field("leaves"), controls, class_="control controls"
        ),
        entries(branches, title=title),
        class_="tree",
        data_scope="",
    )


def entries(branches: Sequence[Branch], *, title: str | None = None) -> html.Markup:
    """Returns the list of containers and leaves, to be put into a tree."""
    return html.element("ul", *map(_entry, branches), aria_label=title)


def _entry(branch: Branch) -> html.Markup:
    line = html.join(
        [
            html.element("span", branch.name, class_="key"),
            html.element("span", branch.type, class_="type"),
            html.element("span", _count(branch), class_="count"),
            html.element("span", humanize.size(branch.bytes), class_="size"),
        ]
    )
    if branch.inner is not None and not branch.inner:
        return html.element(
            "li", line, data_leaf="", data_path=branch.path, **branch.data
        )
    folded = html.element(
        "details",
        html.element("summary", line),
        entries(branch.inner or ()),
        open="" if branch.is_open else None,
        data_open="" if branch.is_open else None,
    )
    return html.element(
        "li", folded, data_branch="", data_path=branch.path, **branch.data
    )


def _count(branch: Branch) -> str:
    if branch.leaves == 1 and branch.inner is not None and not branch.inner:
        return ""
    return humanize.count(branch.leaves, "leaf", "leaves")
