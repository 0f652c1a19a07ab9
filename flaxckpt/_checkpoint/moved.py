"""Finds missing leaves in other containers of the checkpoint."""

from __future__ import annotations

import bisect
import collections
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from flaxckpt import _state
from flaxckpt._checkpoint import match_optimizer
from flaxckpt._checkpoint.plan import RestorePlan
from flaxckpt._state.leaf import LeafInfo, LeafTable
from flaxckpt._types import LeafPath

_TOPS_SHOWN = 6

_TIED = 8
"""The most stored leaves that may be one missing leaf."""

_Parts: TypeAlias = tuple[str, ...]


class Moved(NamedTuple):
    """Leaves stored in another container than the wanted one; empty for the root."""

    wanted: LeafPath
    found: LeafPath
    names: Sequence[LeafPath]

    def __str__(self) -> str:
        where = f"below {self.found}/" if self.found else "at its root"
        them = f"{len(self.names)} leaves"
        if self.wanted:
            them += f" below {self.wanted}/"
        return f"{them}: the checkpoint has them {where}"

    def rename(self, table: LeafTable) -> tuple[str, str] | None:
        """Returns the arguments of the `rename` of the leaves, unless too long."""
        pattern = f"{re.escape(self.found)}/(.*)"
        if not self.found:
            moved = {name.split("/")[0] for name in self.names}
            tops = dict.fromkeys(path.split("/")[0] for path in table)
            others = [re.escape(top) for top in tops if top not in moved]
            some = [re.escape(top) for top in tops if top in moved]
            if min(len(others), len(some)) > _TOPS_SHOWN:
                return None
            if not others:
                pattern = "(.*)"
            elif len(some) <= len(others):
                pattern = f"((?:{'|'.join(some)})(?:/.*)?)"
            else:
                pattern = f"((?!(?:{'|'.join(others)})(?:/|$)).*)"
        escaped = self.wanted.replace("\\", r"\\")
        replacement = rf"{escaped}/\1" if self.wanted else r"\1"
        return pattern, replacement


def find_moved(planned: RestorePlan, table: LeafTable) -> list[Moved]:
    """Returns groups of missing leaves stored in another container.

    A group has most of the missing leaves of its container, and no leaf is in two
    groups. Containers that fit equally well are not in the result, but the first of
    those that fit the whole state, such as items.
    """
    lacking: dict[LeafPath, LeafInfo] = {}
    used: set[LeafPath] = set()
    for path, plan in planned.leaves.items():
        if plan.wanted is None:
            continue
        used.update(plan.sources)
        if plan.actions == ("conflict",) and not plan.sources:
            lacking[path] = plan.wanted
    free = {
        path.removesuffix("/value"): leaf.info
        for path, leaf in table.items()
        if lacking and leaf.info.kind != "empty" and path not in used
    }
    moves = _find_moves(lacking, free)
    within = collections.Counter(
        above for path in lacking for above in _state.tree.prefixes(path)
    )
    ranks = {move: (-len(names), _depth(move)) for move, names in moves.items()}
    tied = collections.Counter((wanted, rank) for (wanted, _), rank in ranks.items())
    groups = []
    filled: set[LeafPath] = set()
    for move, rank in sorted(ranks.items(), key=lambda item: item[1]):
        wanted, found = move
        names = moves[move]
        leaves = {_state.tree.inside(wanted) + name for name in names}
        sources = {_state.tree.inside(found) + name for name in names}
        is_alone = len(names) == 1  # two leaves may have the same name by chance
        is_whole = not wanted and len(names) == len(lacking)
        if (
            (tied[wanted, rank] == 1 or is_whole)
            and 2 * len(names) > within[wanted]
            and not (is_alone and (len(lacking) > 1 or (wanted and found)))
            and filled.isdisjoint(leaves)
            and used.isdisjoint(sources)
        ):
            filled |= leaves
            used |= sources
            groups.append(Moved(wanted, found, names))
    order = {path: n for n, path in enumerate(lacking)}
    return sorted(
        groups, key=lambda each: order[_state.tree.inside(each.wanted) + each.names[0]]
    )


_Move: TypeAlias = tuple[LeafPath, LeafPath]
"""The wanted container, and the container that the checkpoint has."""


def _find_moves(
    lacking: Mapping[LeafPath, LeafInfo], free: Mapping[LeafPath, LeafInfo]
) -> dict[_Move, list[LeafPath]]:
    """Finds moves: to the path with most equal names at its end, then at its start."""
    by_end: dict[tuple[LeafPath, tuple[int, ...] | None], list[_Parts]] = {}
    for parts, path in sorted((tuple(path.split("/")), path) for path in free):
        for end in _state.tree.suffixes(path):
            by_end.setdefault((end, free[path].shape), []).append(parts)
    moves: dict[_Move, list[LeafPath]] = {}
    for path, info in lacking.items():
        ends = _state.tree.suffixes(path)
        end = next((end for end in ends if (end, info.shape) in by_end), "")
        wanted = path.removesuffix(end).rstrip("/")
        stored = by_end.get((end, info.shape), ())
        for parts in _nearest(tuple(path.split("/")), stored):
            found = "/".join(parts).removesuffix(end).rstrip("/")
            place = match_optimizer.place_of_state(free["/".join(parts)])
            # The moment of a parameter is no parameter. What is in its place, but does
            # not fit, has not moved.
            is_moment = place is not None and len(found) > len(place)
            if found != wanted and not (is_moment and info.role is None):
                moves.setdefault((wanted, found), []).append(end)
    return moves


def _nearest(parts: _Parts, stored: Sequence[_Parts]) -> Sequence[_Parts]:
    """Returns the sorted paths with the most names at the start; none if many tie."""

    def same(other: _Parts) -> int:
        pairs = zip(parts, other, strict=False)
        return sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        )

    if not stored:
        return ()
    at = bisect.bisect_left(stored, parts)
    most = max(same(other) for other in stored[max(0, at - 1) : at + 1])
    around = stored[max(0, at - _TIED) : at + _TIED]
    nearest = [other for other in around if same(other) == most]
    return nearest if len(nearest) <= _TIED else ()


def _depth(move: _Move) -> int:
    """Returns the number of names in the containers of a move."""
    return sum(len(above.split("/")) for above in move if above)
