"""Finding optimizer leaves of a checkpoint by what they are."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator

from flaxckpt import (
    _optax,
)
from flaxckpt._info import LeafTable, Role
from flaxckpt._types import LeafPath


class Finder:
    """Finds optimizer leaves of a checkpoint by their role.

    Only leaves of the same optimizer are considered: those of a generator are never
    taken for a discriminator's. Where the checkpoint has no roles, as Orbax writes it,
    a leaf's surroundings tell: the fields beside it must be those of the transform.
    """

    def __init__(self, table: LeafTable) -> None:
        self._table = table
        self._found: dict[Role, list[LeafPath]] = {}

    @functools.cached_property
    def _by_role(self) -> dict[Role, list[LeafPath]]:
        by_role: dict[Role, list[LeafPath]] = {}
        for path, leaf in self._table.items():
            if leaf.info.role is not None and leaf.info.kind != "empty":
                by_role.setdefault(leaf.info.role, []).append(path)
        return by_role

    @functools.cached_property
    def _by_ending(self) -> dict[str, list[LeafPath]]:
        """Leaves without a role, sorted, by each end of their paths."""
        by_ending: dict[str, list[LeafPath]] = {}
        for path in sorted(self._table):
            info = self._table[path].info
            if info.role is None and info.kind != "empty":
                # The last part may be a box's, or the name of a parameter.
                endings = {*_endings(path), *_endings(path.removesuffix("/value"))}
                for ending in endings:
                    by_ending.setdefault(ending, []).append(path)
        return by_ending

    @functools.cached_property
    def _children(self) -> dict[LeafPath, set[str]]:
        """What is right below each container, by its path."""
        children: dict[LeafPath, set[str]] = {}
        for path in self._table:
            inner = path.removesuffix("/value")
            while inner:
                container, _, name = inner.rpartition("/")
                names = children.setdefault(container, set())
                if name in names:
                    break  # and so are the containers around it
                names.add(name)
                inner = container
        return children

    def plays(self, path: LeafPath, role: Role, fields: frozenset[str]) -> bool:
        """Whether the stored leaf at `path` has the role of a wanted one.

        Optax renames the classes of its states now and then, so the same fields in the
        same place will do.

        Args:
            path: Of the stored leaf.
            role: That of the wanted one.
            fields: All fields of the state that the wanted one belongs to.
        """
        found = self._table[path].info.role
        if found is not None and found[:3] == role[:3]:
            return True
        if found is not None and _optax.exists(found.state_class):
            return False  # Adam's and AdaBelief's states have the same fields
        if not fields:
            return found is None or not found.state_class
        ending = _ending(role)
        for bare in (path, path.removesuffix("/value")):
            if bare.endswith(f"/{ending}") or bare == ending:
                container = bare[: -len(ending)].rstrip("/")
                return self._children.get(container, set()) == fields
        return False

    def find(self, role: Role, fields: frozenset[str]) -> list[LeafPath]:
        """All stored leaves that may be the wanted one, in whichever place."""
        if same := self._by_role.get(role):
            return same
        if not fields:
            return []
        if role not in self._found:
            inside = f"{role.optimizer}/" if role.optimizer else ""
            paths = self._by_ending.get(_ending(role), [])
            # Those of one optimizer stand together.
            start = stop = bisect.bisect_left(paths, inside)
            while stop < len(paths) and paths[stop].startswith(inside):
                stop += 1
            self._found[role] = [
                path for path in paths[start:stop] if self.plays(path, role, fields)
            ]
        return self._found[role]


def _endings(path: LeafPath) -> Iterator[str]:
    """`a/b/c`, `b/c` and `c`, of the path `a/b/c`."""
    yield path
    start = path.find("/")
    while start >= 0:
        yield path[start + 1 :]
        start = path.find("/", start + 1)


def _ending(role: Role) -> LeafPath:
    return f"{role.field}/{role.param}" if role.param else role.field
