"""Leaves of the table joined to one, or taken apart, and their mirrors likewise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax

from flaxckpt import _arrays, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._types import LeafPath, Shape
from flaxckpt.transforms import _base
from flaxckpt.transforms._base import Row

Join: TypeAlias = Callable[[Sequence[jax.Array]], jax.Array]
PartFn: TypeAlias = Callable[[jax.Array], jax.Array]
Made: TypeAlias = tuple[Sequence[Leaf], Callable[..., jax.Array]]
"""What a leaf is made of, and how."""

Parts: TypeAlias = tuple[Leaf, Callable[[int], PartFn]]
"""What the parts of a leaf are made of, and how each of them is, by its number."""

Groups: TypeAlias = dict[LeafPath, dict[int, LeafPath]]
"""New path -> number of a part -> its old path."""


def add(groups: Groups, new: LeafPath, number: int, path: LeafPath, what: str) -> None:
    """Notes that the leaf at `path` is a part of a new one.

    Raises:
        OptionError: Another one is, by the same number.
    """
    taken = groups.setdefault(new, {}).setdefault(number, path)
    if taken != path:
        raise errors.OptionError(
            f"{what}: {taken} and {path} would both be part {number} of {new}"
        )


def joined(
    table: LeafTable,
    groups: Groups,
    join: Join,
    join_mirrors: Callable[[Sequence[Leaf], Shape], Made | None],
    *,
    counts: Mapping[LeafPath, int],
    what: str,
) -> LeafTable:
    """The table with each group of leaves joined to one.

    Args:
        table: Old table.
        groups: Which leaves become which.
        join: From the values of the parts, in order, to the new value.
        join_mirrors: From mirrors of other shapes than that of the parts, which comes
            with them, to how they are joined; None if they cannot be.
        counts: How many parts each group must have.
        what: Who asks, for messages.
    """

    def whole(*values: jax.Array) -> jax.Array:
        return join(values)

    derive = _arrays.lazy.Deriver(what)
    for new, parts in groups.items():
        _check_complete(new, parts, counts[new], what)

    def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[Row]:
        for new, parts in groups.items():
            present = [parts[i] for i in sorted(parts) if parts[i] in leaves]
            some = [leaves[path] for path in present]
            if is_mirror and len(present) < len(parts):
                yield from _left(present, leaves, groups)
                continue
            if is_mirror and not _are_like(some, table, present):
                made = join_mirrors(some, table[present[0]].info.shape)
                if made is None:
                    yield from _left(present, leaves, groups)
                else:
                    sources, fn = made
                    leaf = derive(sources, fn, base=some[0].info)
                    yield Row(present[0], new, leaf)
                continue
            if some[0].info.kind == "empty":
                yield Row(present[0], new, some[0])
                continue
            types = {leaf.info.dtype for leaf in some}
            if len(types) > 1:
                raise errors.OptionError(
                    f"{what}: the parts of {new} are of different types,"
                    f" {', '.join(sorted(map(str, types)))}: cast them first"
                )
            yield Row(present[0], new, derive(some, whole))

    return _base.replace(
        table, itertools.chain(*map(dict.values, groups.values())), act
    )


def _are_like(
    mirrors: Sequence[Leaf], table: LeafTable, params: Sequence[LeafPath]
) -> bool:
    """Whether mirrors are arrays of their parameters' shapes, or all are empty."""
    return all(
        leaf.info.kind == mirrors[0].info.kind
        and (leaf.info.kind == "empty" or leaf.info.shape == table[path].info.shape)
        for leaf, path in zip(mirrors, params, strict=True)
    )


def _left(
    params: Sequence[LeafPath],
    leaves: Mapping[LeafPath, Leaf],
    taken: Container[LeafPath],
) -> Iterator[Row]:
    """Mirrors that cannot follow their parameters, under the paths that they have.

    There, the inverse finds them again. A state whose parameters are joined, or taken
    apart, asks for none of them, unless a new path is an old one, too.
    """
    for path in params:
        if path not in taken:
            yield Row(path, path, leaves[path])


def _check_complete(
    new: LeafPath, parts: Mapping[int, LeafPath], count: int, what: str
) -> None:
    if len(parts) < count:
        missing = (str(i) for i in range(count) if i not in parts)
        some = ", ".join(itertools.islice(missing, 8))
        raise errors.OptionError(
            f"{what}: {new} lacks part{'s' * (',' in some)} {some}; it would be made of"
            f" {', '.join(list(parts.values())[:3])}. Choose a pattern that leaves out"
            " what only some of the parts have"
        )


def parted(
    table: LeafTable,
    names: Mapping[LeafPath, Sequence[LeafPath]],
    part: Callable[[int], PartFn],
    part_mirror: Callable[[Leaf, Shape], Parts | None],
    what: str,
) -> LeafTable:
    """The table with leaves taken apart.

    Args:
        table: Old table.
        names: Path -> the paths of its parts.
        part: From the number of a part to what makes its value of the whole.
        part_mirror: From a mirror of another shape than its parameter's, which comes
            with it, to how it is taken apart; None if it cannot be.
        what: Who asks, for messages.
    """
    derive = _arrays.lazy.Deriver(what)
    taken = set(itertools.chain(*names.values()))

    def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[Row]:
        for path, leaf in leaves.items():
            shape = table[path].info.shape
            source, part_fn = leaf, part
            is_empty = leaf.info.kind == "empty"
            if not is_empty and leaf.info.shape != shape:
                parts = part_mirror(leaf, shape)
                if parts is None:
                    yield from _left([path], leaves, taken)
                    continue
                source, part_fn = parts
            for number, new in enumerate(names[path]):
                made = leaf
                if not is_empty:
                    made = derive([source], part_fn(number), base=leaf.info)
                yield Row(path, new, made)

    return _base.replace(table, names, act)
