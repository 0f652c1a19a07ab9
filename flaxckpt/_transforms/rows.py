"""Makes new leaves by the rows of transforms, and lets their mirrors follow."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax

from flaxckpt import _arrays, _state, _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base, factored
from flaxckpt._transforms.axis_maps import AxisMap
from flaxckpt._transforms.base import NewLeaf, TableTransform, Transform
from flaxckpt._transforms.mirrors import Mirror, Mirrors, Slot, find_mirrors, held
from flaxckpt._transforms.patterns import compile_pattern
from flaxckpt._types import LeafPath, Shape

_log = logging.getLogger(__name__)

_Fn: TypeAlias = Callable[..., jax.Array]

_Source: TypeAlias = tuple[Sequence[Leaf], _Fn]
"""Leaves, and the function from their values to that of a new leaf."""


@dataclasses.dataclass(frozen=True)
class ValueMap:
    """Computes the values of a leaf by `fn`, which gets the leaf with the path first.

    `mirror_fn`, or `fn`, maps mirrors if the shape changes; `resizes` is True if `fn`
    keeps the values when it keeps the shape.
    """

    fn: _Fn
    precision: _arrays.lazy.Precision = "carried"
    resizes: bool = False
    mirror_fn: _Fn | None = None

    def of_mirror(self, mirror: Leaf, before: Leaf, after: Leaf) -> _Fn | None:
        """Returns the function of a mirror; None if it is initialised again."""
        if before.info.shape == after.info.shape:
            return unchanged
        if mirror.info.shape != before.info.shape or mirror.info.dtype is None:
            return None
        return self.mirror_fn or self.fn


def unchanged(x: jax.Array) -> jax.Array:
    """Returns `x`: the function of a leaf that stays as it is."""
    return x


ALONE = ValueMap(unchanged)
"""The function of a leaf that moves to another path without its mirrors."""


class LeafRow(NamedTuple):
    """Old leaves, and the path and function of each new leaf; None copies the first.

    Mirrors of another shape than their parameters only follow an `AxisMap`.
    """

    old: Sequence[LeafPath]
    new: Sequence[tuple[LeafPath, _Fn | ValueMap | None]]


@dataclasses.dataclass(frozen=True)
class RowTransform(TableTransform):
    """Makes new leaves by rows that `find` writes; see `rename`, `stack`, `pad`, …."""

    name: str
    find: Callable[[LeafTable], Iterable[LeafRow]]
    undo: Callable[[], Transform] | None = None
    undo_on_restore: Callable[[], Transform | None] | None = None
    moves: bool = True
    ties: Sequence[str] | None = None

    def __call__(self, table: LeafTable) -> LeafTable:
        rows = list(self.find(table))
        return apply_rows(table, rows, self.name, moves=self.moves, ties=self.ties)

    def __str__(self) -> str:
        return self.name

    def on_restore(self) -> Transform | None:
        if self.undo_on_restore is not None:
            return self.undo_on_restore()
        return self.inverse()

    def inverse(self) -> Transform:
        return super().inverse() if self.undo is None else self.undo()


def in_place(
    name: str,
    pattern: str,
    fn_of: Callable[[LeafPath], _Fn | ValueMap],
    undo: Callable[[], Transform] | None = None,
) -> RowTransform:
    """Returns the transform that changes each matching leaf by `fn_of` of its path."""
    compiled = compile_pattern(pattern)

    def find(table: LeafTable) -> Iterator[LeafRow]:
        for path in base.match_arrays(compiled, table, name):
            yield LeafRow([path], [(path, fn_of(path))])

    return RowTransform(name, find, undo, moves=False)


def apply_rows(
    table: LeafTable,
    rows: Sequence[LeafRow],
    what: str,
    *,
    moves: bool = True,
    moves_unclear: bool = True,
    ties: Sequence[str] | None = None,
) -> LeafTable:
    """Returns the table with new leaves in the place of old ones, and of their mirrors.

    Mirrors that cannot follow keep their old paths, where the inverse finds them,
    unless a new leaf has the path of their parameter. With `moves`, mirrors in rows of
    their own are moved by these. `ties` says what to do if rows that make the same leaf
    give it several values; None forbids such rows. Raises OptionError with all leaves
    to which rows do not apply.
    """
    mirrored = find_mirrors(table)
    direct = {path: path for row in rows for path in row.old}
    agreed = _resolve_ambiguous(mirrored, direct) if moves_unclear else {}
    known = {**mirrored.known, **agreed}
    members: dict[Slot, dict[LeafPath, LeafPath]] = {}
    for path, mirror in known.items():
        if mirror.param in direct and (path not in direct or not moves):
            members.setdefault(mirror.slot, {})[mirror.param] = path
    for paths in members.values():
        for path in paths.values():
            direct.pop(path, None)
    _warn_of_lost(mirrored, direct, table)
    engine = _Engine(table, rows, what)
    made: dict[LeafPath, list[NewLeaf]] = {}
    new_paths: dict[LeafPath, list[LeafPath]] = {}
    leaves: Iterable[NewLeaf] = engine.leaves(direct)
    if ties is not None:
        leaves = _tied(leaves, ties, are_mirrors=False)
    for new in leaves:
        new_paths.setdefault(new.at, []).append(new.path)
        made.setdefault(new.at, []).append(new)
    renamed = _renaming(known, new_paths)
    for slot, paths in members.items():
        leaves = engine.mirrors({param: table[path] for param, path in paths.items()})
        if ties is not None:
            leaves = _tied(leaves, ties, are_mirrors=True)
        for at, path, leaf in leaves:
            where = paths[at]
            name = renamed(where, path)
            leaf = _with_role_of(leaf, name, known[where].name)
            made.setdefault(where, []).append(NewLeaf(where, slot.path(name), leaf))
    for path in direct.keys() & known.keys():
        names = [renamed(path, p) for p in new_paths.get(known[path].param, ())]
        made[path] = [_retarget(row, names) for row in made.get(path, ())]
    gone = {*direct, *(path for paths in members.values() for path in paths.values())}
    return base.assemble(table, gone, made)


class _Engine:
    """Evaluates rows, for leaves and for the mirrors in a slot."""

    def __init__(self, table: LeafTable, rows: Sequence[LeafRow], what: str) -> None:
        self._table = table
        self._rows = rows
        self._derive = _arrays.lazy.Deriver(what)
        self._made: dict[LeafPath, Leaf] = {}
        self._numbers: dict[LeafPath, list[int]] = {}  # of the rows of an old leaf
        for number, row in enumerate(rows):
            for path in row.old:
                self._numbers.setdefault(path, []).append(number)

    def leaves(self, chosen: Mapping[LeafPath, LeafPath]) -> list[NewLeaf]:
        new = []
        with self._derive as derive:
            for row in self._rows:
                if row.old[0] not in chosen:
                    continue
                members = [self._table[path] for path in row.old]
                for path, fn in row.new:
                    leaf = members[0]
                    if fn is ALONE:
                        pass
                    elif isinstance(fn, ValueMap):
                        leaf = derive(members, fn.fn, precision=fn.precision)
                        if fn.resizes and leaf.info.shape == members[0].info.shape:
                            leaf = members[0]
                    elif fn is not None:
                        leaf = derive(members, fn)
                    self._made[path] = leaf
                    new.append(NewLeaf(row.old[0], path, leaf))
        return new

    def mirrors(self, leaves: Mapping[LeafPath, Leaf]) -> list[NewLeaf]:
        """Returns the new mirrors in a slot, under the paths of parameters."""
        new: list[NewLeaf] = []
        taken = self._made.keys()
        numbers = {n for path in leaves for n in self._numbers[path]}
        with self._derive:
            for row in map(self._rows.__getitem__, sorted(numbers)):
                present = [path for path in row.old if path in leaves]
                if any(isinstance(fn, ValueMap) for _, fn in row.new):
                    new += self._in_place(row, leaves)
                    continue
                followed = None
                if len(present) == len(row.old):
                    followed = self._follow(row, [leaves[path] for path in present])
                for path, leaf in followed or ():
                    new.append(NewLeaf(row.old[0], path, leaf))
                if followed is None:
                    left = (path for path in present if path not in taken)
                    new += [NewLeaf(path, path, leaves[path]) for path in left]
        return new

    def _in_place(
        self, row: LeafRow, mirrors: Mapping[LeafPath, Leaf]
    ) -> Iterator[NewLeaf]:
        """Yields the mirrors of parameters whose values a row computes."""
        for path, fn in row.new:
            is_in_place = path in row.old and path in mirrors
            if not is_in_place or not isinstance(fn, ValueMap):
                continue
            leaf = mirrors[path]
            follow: _Fn | None = unchanged
            if held(leaf) == "copy":
                follow = fn.fn
            elif leaf.info.kind != "empty":
                follow = fn.of_mirror(leaf, self._table[path], self._made[path])
            if follow is not None:
                if follow is not unchanged:
                    leaf = self._derive([leaf], follow, precision=fn.precision)
                yield NewLeaf(path, path, leaf)

    def _follow(
        self, row: LeafRow, mirrors: Sequence[Leaf]
    ) -> list[tuple[LeafPath, Leaf]] | None:
        """Returns the new mirrors of a row; None if the mirrors cannot follow."""
        if all(fn is None for _, fn in row.new):
            return [(path, mirrors[0]) for path, _ in row.new]
        shapes = [self._table[path].info.shape for path in row.old]
        are_empty = all(leaf.info.kind == "empty" for leaf in mirrors)
        are_like = all(
            leaf.info.dtype is not None and leaf.info.shape == shape
            for leaf, shape in zip(mirrors, shapes, strict=True)
        )
        is_single = len(row.old) == len(row.new) == 1
        is_fixed = is_single and factored.has_no_axes(
            mirrors[0].info, shapes[0], self._table
        )
        new = []
        for path, fn in row.new:
            leaf = mirrors[0]
            if fn is not None and not are_empty and (are_like or not is_fixed):
                assert not isinstance(fn, ValueMap), path
                source: _Source | None = (mirrors, fn)
                if not are_like:
                    source = _of_axes(fn, mirrors, shapes[0], self._table)
                if source is None:
                    return None
                leaf = self._derive(*source, base=leaf.info)
            new.append((path, leaf))
        return new


def _of_axes(
    fn: _Fn, mirrors: Sequence[Leaf], shape: Shape, table: LeafTable
) -> _Source | None:
    """Returns the source of a mirror of another shape than its parameter, if any."""
    if not isinstance(fn, AxisMap) or (origins := fn.origins(len(shape))) is None:
        return None
    new_shape = [len(mirrors) if axis is None else shape[axis] for axis in origins]
    sources = [
        source
        for mirror in mirrors
        if (source := factored.source(mirror, shape, origins, new_shape, table))
    ]
    axes = {source.axes for source in sources}
    if len(sources) < len(mirrors) or len(axes) > 1:
        return None
    return [source.leaf for source in sources], fn.on(axes.pop(), len(shape))


def _tied(
    new: Iterable[NewLeaf], advice: Sequence[str], *, are_mirrors: bool
) -> Iterator[NewLeaf]:
    """Yields one leaf for each new path; of mirrors, the first."""
    by_path: dict[LeafPath, list[NewLeaf]] = {}
    for row in new:
        by_path.setdefault(row.path, []).append(row)
    for first, *others in by_path.values():
        leaf = first.leaf
        if others and not are_mirrors:
            equal = [row.leaf for row in others]
            leaf = _arrays.lazy.require_equal(leaf, equal, *advice)
        yield first._replace(leaf=leaf)


# ---- the paths and roles of mirrors -------------------------------------------------


def _renaming(
    known: Mapping[LeafPath, Mirror], new_paths: Mapping[LeafPath, Sequence[LeafPath]]
) -> Callable[[LeafPath, LeafPath], LeafPath]:
    """Returns the function from a mirror and its parameter's new path to its name."""
    first_keys: dict[str, set[str]] = {}
    for mirror in known.values():
        new = new_paths.get(mirror.param, ())
        keys = first_keys.setdefault(mirror.root, set())
        keys.update(path.partition("/")[0] for path in new)

    def rename(path: LeafPath, new: LeafPath) -> LeafPath:
        mirror = known[path]
        return mirror.renamed(new, has_root=len(first_keys[mirror.root]) <= 1)

    return rename


def _resolve_ambiguous(
    mirrored: Mirrors, chosen: Mapping[LeafPath, LeafPath]
) -> dict[LeafPath, Mirror]:
    """Returns mirrors with several possible parameters, all of them chosen."""
    agreed = {}
    faults = {}
    for path, (slot, candidates) in mirrored.unclear.items():
        of_chosen = [param in chosen for param in candidates.values()]
        if all(of_chosen):
            root, param = next(iter(candidates.items()))
            agreed[path] = Mirror(param, param.removeprefix(root), slot)
        elif any(of_chosen) and path not in chosen:
            faults[path] = " or ".join(candidates.values())
    if faults:
        raise errors.OptionError(
            "the parameters of"
            f" {_util.humanize.count(len(faults), 'moment')} are ambiguous:\n"
            + errors.rows(f"{path}: {which}" for path, which in faults.items())
            + "\nLet the pattern match the moments as well, or drop them first."
        )
    return agreed


def _warn_of_lost(
    mirrored: Mirrors, chosen: Mapping[LeafPath, LeafPath], table: LeafTable
) -> None:
    """Warns of mirrors that resemble changed parameters' mirrors but do not follow."""

    def look(path: LeafPath) -> tuple[object, ...]:
        return *path.split("/")[-2:], table[path].info.shape

    looks = {look(path) for path in chosen} if mirrored.lost else set()
    left = [
        path for path in mirrored.lost if path not in chosen and look(path) in looks
    ]
    if left:
        _log.warning(
            "%s may be moments of changed parameters, and stay unchanged because the"
            " parameters are unknown: %s",
            _util.humanize.count(len(left), "optimizer leaf", "optimizer leaves"),
            errors.first_few(left),
        )


def _retarget(row: NewLeaf, names: Sequence[LeafPath]) -> NewLeaf:
    """Returns a mirror that was moved by itself with the role of its new parameter."""
    for name in names:
        if _state.tree.before(row.path, name):
            return row._replace(leaf=_with_role_of(row.leaf, name))
    return row


def _with_role_of(leaf: Leaf, param: LeafPath, old: LeafPath | None = None) -> Leaf:
    """Returns a mirror with the role of `param`; it may be below the name of `old`."""
    role = leaf.info.role
    if role is not None and old is not None and role.param.startswith(f"{old}/"):
        param += role.param.removeprefix(old)
    if role is None or role.param == param:
        return leaf
    info = dataclasses.replace(leaf.info, role=role._replace(param=param))
    return dataclasses.replace(leaf, info=info)
