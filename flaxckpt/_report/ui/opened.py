"""The checkpoints that were opened last, without their arrays: opening takes long."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flaxckpt import _inspect
from flaxckpt._formats import locate
from flaxckpt._formats.reader import Stored
from flaxckpt._inspect.run_search import Location
from flaxckpt._inspect.subtrees import Subtree
from flaxckpt._types import LeafPath

_MOST_OPEN = 6


class OpenCheckpoint(NamedTuple):
    """A checkpoint without its arrays.

    Attributes:
        step: The step of a run; None for a checkpoint.
        stored: The checkpoint as its reader opened it.
        children: Path of a container -> what it contains. The root also has what its
            child with an empty key contains, because their paths are equal.
    """

    place: Location
    step: int | None
    stored: Stored
    root: Subtree
    leaves: Mapping[LeafPath, Subtree]
    children: Mapping[LeafPath, Sequence[Subtree]]


class OpenCheckpoints:
    """Opens checkpoints, and keeps a few; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int | None], OpenCheckpoint] = {}  # newest last

    def get(self, place: Location, step: int | None) -> OpenCheckpoint:
        """Returns an open checkpoint, opened again if it has changed.

        Without a step, it is the newest of a run.

        Raises:
            CheckpointError: As for `metadata`.
        """
        if place.is_run and step is None:
            step = locate.locate(place.path).step
        with self._lock:
            found = self.find(place, step) or _open(place, step)
            self._open.pop((str(place.path), step), None)
            self._open[str(place.path), step] = found
            while len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
            return found

    def find(self, place: Location, step: int | None) -> OpenCheckpoint | None:
        """Returns a checkpoint that is open and has not changed, or None."""
        found = self._open.get((str(place.path), step))
        stamp = None if found is None else found.stored.stamp
        return found if stamp is not None and stamp.is_current() else None


def _open(place: Location, step: int | None) -> OpenCheckpoint:
    stored = locate.open_checkpoint(place.path, step, types=None)
    trees = _inspect.subtrees.subtrees(stored.metadata.leaves)
    leaves = {tree.path: tree for tree in trees if tree.info is not None}
    return OpenCheckpoint(place, step, stored, trees[0], leaves, _children(trees))


def _children(trees: Sequence[Subtree]) -> dict[LeafPath, list[Subtree]]:
    """Returns the content of each container; a state that is one leaf has itself."""
    children: dict[LeafPath, list[Subtree]] = {"": []}
    for tree in trees:
        if tree.info is not None or tree.path:
            children[tree.path.rpartition("/")[0]].append(tree)
        if tree.info is None:
            children.setdefault(tree.path, [])
    return children
