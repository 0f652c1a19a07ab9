"""Makes new leaves of groups of leaves, and of their moments.

Transforms that rename, join, split and rearrange leaves say which groups there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax

from flaxckpt import _arrays
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base, factored
from flaxckpt._transforms.axis_maps import AxisMap
from flaxckpt._transforms.base import Act, NewLeaf, TableTransform, Transform
from flaxckpt._types import LeafPath, Shape

_Fn: TypeAlias = Callable[..., jax.Array]

_Source: TypeAlias = tuple[Sequence[Leaf], _Fn]
"""Leaves, and the function from their values to that of a new leaf."""


class LeafGroup(NamedTuple):
    """Leaves that become new leaves together.

    Attributes:
        old: The paths of the leaves, in the order of the functions' arguments.
        new: The path of each new leaf, and the function from the values of all old
            leaves to its value; None for a copy of the first leaf. Moments of another
            shape than their parameters only follow an `AxisMap`.
    """

    old: Sequence[LeafPath]
    new: Sequence[tuple[LeafPath, _Fn | None]]


@dataclasses.dataclass(frozen=True)
class Regrouping(TableTransform):
    """Makes new leaves of groups; see `stack`, `split`, `transpose`, ….

    Attributes:
        name: The call that creates the transform, for the record.
        find: Finds the groups in a table.
        undo: Returns the inverse.
        moves: See `base.replace`.
        ties: See `regroup`.
    """

    name: str
    find: Callable[[LeafTable], Iterable[LeafGroup]]
    undo: Callable[[], Transform]
    moves: bool = True
    ties: Sequence[str] | None = None

    def __call__(self, table: LeafTable) -> LeafTable:
        groups = list(self.find(table))
        return regroup(table, groups, self.name, moves=self.moves, ties=self.ties)

    def __str__(self) -> str:
        return self.name

    def inverse(self) -> Transform:
        return self.undo()


def regroup(
    table: LeafTable,
    groups: Sequence[LeafGroup],
    what: str,
    *,
    moves: bool = True,
    ties: Sequence[str] | None = None,
) -> LeafTable:
    """Returns the table with new leaves in the place of groups, and of their moments.

    Moments that cannot follow keep their old paths, unless a new leaf has the path of
    their parameter. The inverse finds them there: a state with the new leaves has no
    leaves at these paths.

    Args:
        table: Old table.
        groups: The groups; a leaf may be in several.
        what: The transform, for messages.
        moves: See `base.replace`.
        ties: If several groups may make the same leaf, whose values must then be equal:
            the advice if they are not, or nothing for the usual advice.

    Raises:
        OptionError: A function cannot be applied, or two leaves get the same path.
    """
    derive = _arrays.lazy.Deriver(what)
    taken = {path for group in groups for path, _ in group.new}

    def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[NewLeaf]:
        for group in groups:
            present = [path for path in group.old if path in leaves]
            members = [leaves[path] for path in present]
            new = None
            if len(present) == len(group.old):
                new = _new_leaves(group, members, table, derive)
            for path, leaf in new or ():
                yield NewLeaf(present[0], path, leaf)
            for path, leaf in zip(present, members, strict=True):
                if new is None and path not in taken:
                    yield NewLeaf(path, path, leaf)

    chosen = dict.fromkeys(path for group in groups for path in group.old)
    acts = act if ties is None else _tied(act, ties)
    return base.replace(table, chosen, acts, moves=moves)


def _tied(act: Act, advice: Sequence[str]) -> Act:
    """Returns `act` with one leaf for each new path; of moments, the first."""

    def tied(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[NewLeaf]:
        rows: dict[LeafPath, list[NewLeaf]] = {}
        for row in act(leaves, is_mirror):
            rows.setdefault(row.path, []).append(row)
        for first, *others in rows.values():
            leaf = first.leaf
            if others and not is_mirror:
                equal = [row.leaf for row in others]
                leaf = _arrays.lazy.require_equal(leaf, equal, *advice)
            yield first._replace(leaf=leaf)

    return tied


def _new_leaves(
    group: LeafGroup,
    members: Sequence[Leaf],
    table: LeafTable,
    derive: _arrays.lazy.Deriver,
) -> list[tuple[LeafPath, Leaf]] | None:
    """Returns the new leaves of a group; None for moments that cannot follow.

    Args:
        group: The group.
        members: Its leaves, or their moments in a slot.
        table: All leaves.
        derive: Makes computed leaves.
    """
    shapes = [table[path].info.shape for path in group.old]
    are_empty = all(leaf.info.kind == "empty" for leaf in members)
    are_like = all(
        leaf.info.dtype is not None and leaf.info.shape == shape
        for leaf, shape in zip(members, shapes, strict=True)
    )
    is_single = len(group.old) == len(group.new) == 1
    new = []
    for path, fn in group.new:
        leaf = members[0]
        if fn is not None and not are_empty:
            source: _Source | None = (members, fn)
            if not are_like:
                source = _follow(fn, members, shapes[0], table, is_single=is_single)
            if source is None:
                return None
            leaf = derive(*source, base=leaf.info)
        new.append((path, leaf))
    return new


def _follow(
    fn: _Fn,
    moments: Sequence[Leaf],
    shape: Shape,
    table: LeafTable,
    *,
    is_single: bool,
) -> _Source | None:
    """Returns the source of a moment of another shape than its parameter, if any.

    Args:
        fn: The function from the values of parameters to that of a new parameter.
        moments: Of these parameters, in a slot.
        shape: Of the first parameter.
        table: All leaves.
        is_single: True if one parameter becomes one.
    """
    if is_single and factored.has_no_axes(moments[0].info, shape, table):
        return moments, _unchanged
    if not isinstance(fn, AxisMap) or (origins := fn.origins(len(shape))) is None:
        return None
    new_shape = [len(moments) if axis is None else shape[axis] for axis in origins]
    sources = [
        source
        for moment in moments
        if (source := factored.source(moment, shape, origins, new_shape, table))
    ]
    axes = {source.axes for source in sources}
    if len(sources) < len(moments) or len(axes) > 1:
        return None
    return [source.leaf for source in sources], fn.on(axes.pop(), len(shape))


def _unchanged(x: jax.Array) -> jax.Array:
    """Returns `x`: norms and placeholders have no axes of their parameter."""
    return x
