"""Paths of stored leaves that are, or may be, in boxes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from flaxckpt import _state, _util
from flaxckpt._formats.reader import Stored
from flaxckpt._state.leaf import Box, LeafTable
from flaxckpt._types import LeafPath

_OURS = "flaxckpt"
"""Name of our own format in metadata."""


class StoredPaths:
    """Finds stored leaves, after transforms, by the paths of wanted leaves."""

    def __init__(
        self, stored: Stored, table: LeafTable, wanted: _state.flax_state.FlatState
    ) -> None:
        self._stored = stored
        self._table = table
        self._wanted = wanted

    def find(self, path: LeafPath) -> LeafPath | None:
        """Returns the path of the stored leaf at `path`, or in a box there, or None."""
        leaf = self._table.get(path)
        if leaf is not None and leaf.info.kind != "empty":
            return path
        for field in _state.tree.BOX_FIELDS:
            in_box = f"{path}/{field}"
            leaf = self._table.get(in_box)
            if leaf is None or leaf.info.kind == "empty":
                continue
            if self._may_be_box(path):
                return in_box
        return self._in_outer_box(path)

    def _in_outer_box(self, path: LeafPath) -> LeafPath | None:
        """Returns the stored leaf of a wanted leaf in several boxes, or deep in one."""
        boxes = self._boxed.get(path, ())
        is_in_one = len(boxes) == 1 and boxes[0].depth == 0
        if not boxes or (is_in_one and path):
            return None
        info = dataclasses.replace(self._wanted.table[path].info, boxes=boxes)
        in_boxes = _state.boxes.jax_path(info)
        leaf = self._table.get(in_boxes)
        return None if leaf is None or leaf.info.kind == "empty" else in_boxes

    def _may_be_box(self, path: LeafPath) -> bool:
        """Returns True if the contents of a stored container may be a boxed leaf.

        Other formats write boxes as dicts of a single leaf.
        """
        is_ours = self._stored.metadata.format == _OURS
        return path in self._single and (
            not is_ours or path in self._boxed or path in self._stored_boxes
        )

    @_util.forks.lazy
    def _single(self) -> set[LeafPath]:
        """Stored containers with a single leaf, named like the field of a box."""
        others: set[LeafPath] = set()
        seen: set[LeafPath] = set()
        for path in self._table:
            inner = path
            while inner:
                container, _, name = inner.rpartition("/")
                is_in_box = name in _state.tree.BOX_FIELDS and inner is path
                if not is_in_box or container in seen:
                    others.add(container)
                if container in seen:
                    break  # the containers around this container are done, too
                seen.add(container)
                inner = container
        return seen - others

    @_util.forks.lazy
    def _stored_boxes(self) -> frozenset[LeafPath]:
        """The paths of stored boxes whose leaf paths have their fields."""
        return frozenset(_state.boxes.find_named(self._stored.structure))

    @_util.forks.lazy
    def _boxed(self) -> Mapping[LeafPath, tuple[Box, ...]]:
        return _state.boxes.find(self._wanted.structure)
