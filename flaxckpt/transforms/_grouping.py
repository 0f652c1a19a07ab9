"""Joins groups of leaves, splits leaves, and does the same to their mirrors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax

from flaxckpt import _arrays, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._types import LeafPath, Shape
from flaxckpt.transforms import _base
from flaxckpt.transforms._base import NewLeaf

Join: TypeAlias = Callable[[Sequence[jax.Array]], jax.Array]
PartFn: TypeAlias = Callable[[jax.Array], jax.Array]
Made: TypeAlias = tuple[Sequence[Leaf], Callable[..., jax.Array]]
"""The sources of a leaf, and the function that computes it."""

Parts: TypeAlias = tuple[Leaf, Callable[[int], PartFn]]
"""The source of the parts of a leaf, and the function for each part by number."""

Groups: TypeAlias = dict[LeafPath, dict[int, LeafPath]]
"""New path -> number of a part -> its old path."""


def add(groups: Groups, new: LeafPath, number: int, path: LeafPath, what: str) -> None:
    """Records the leaf at `path` as a part of a new leaf.

    Raises:
        OptionError: Another leaf has the same number.
    """
    taken = groups.setdefault(new, {}).setdefault(number, path)
    if taken != path:
        raise errors.OptionError(
            f"{what}: {taken} and {path} would both be part {number} of {new}"
        )


def join(
    table: LeafTable,
    groups: Groups,
    join_fn: Join,
    join_mirrors: Callable[[Sequence[Leaf], Shape], Made | None],
    *,
    counts: Mapping[LeafPath, int],
    what: str,
) -> LeafTable:
    """Returns the table with each group of leaves joined to a single leaf.

    Args:
        table: Old table.
        groups: The groups to join.
        join_fn: Maps the values of the parts, in order, to the new value.
        join_mirrors: Maps mirrors of another shape than the parts, and the shape of the
            parts, to the joined leaf; None if they cannot be joined.
        counts: Required number of parts of each group.
        what: The transform, for messages.
    """

    def whole(*values: jax.Array) -> jax.Array:
        return join_fn(values)

    derive = _arrays.lazy.Deriver(what)
    for new, parts in groups.items():
        _check_complete(new, parts, counts[new], what)

    def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[NewLeaf]:
        for new, parts in groups.items():
            present = [parts[i] for i in sorted(parts) if parts[i] in leaves]
            some = [leaves[path] for path in present]
            if is_mirror and len(present) < len(parts):
                yield from _keep_old_paths(present, leaves, groups)
                continue
            if is_mirror and not _are_like(some, table, present):
                made = join_mirrors(some, table[present[0]].info.shape)
                if made is None:
                    yield from _keep_old_paths(present, leaves, groups)
                else:
                    sources, fn = made
                    leaf = derive(sources, fn, base=some[0].info)
                    yield NewLeaf(present[0], new, leaf)
                continue
            if some[0].info.kind == "empty":
                yield NewLeaf(present[0], new, some[0])
                continue
            types = {leaf.info.dtype for leaf in some}
            if len(types) > 1:
                raise errors.OptionError(
                    f"{what}: the parts of {new} have different types,"
                    f" {', '.join(sorted(map(str, types)))}: cast them first"
                )
            yield NewLeaf(present[0], new, derive(some, whole))

    return _base.replace(
        table, itertools.chain(*map(dict.values, groups.values())), act
    )


def _are_like(
    mirrors: Sequence[Leaf], table: LeafTable, params: Sequence[LeafPath]
) -> bool:
    """Returns True if all mirrors have their parameters' shapes, or all are empty."""
    return all(
        leaf.info.kind == mirrors[0].info.kind
        and (leaf.info.kind == "empty" or leaf.info.shape == table[path].info.shape)
        for leaf, path in zip(mirrors, params, strict=True)
    )


def _keep_old_paths(
    params: Sequence[LeafPath],
    leaves: Mapping[LeafPath, Leaf],
    taken: Container[LeafPath],
) -> Iterator[NewLeaf]:
    """Yields mirrors that cannot follow their parameters, under their old paths.

    The inverse finds them there. A state with joined or split parameters has no leaves
    at these paths, unless a new path equals an old path.
    """
    for path in params:
        if path not in taken:
            yield NewLeaf(path, path, leaves[path])


def _check_complete(
    new: LeafPath, parts: Mapping[int, LeafPath], count: int, what: str
) -> None:
    if len(parts) < count:
        missing = (str(i) for i in range(count) if i not in parts)
        some = ", ".join(itertools.islice(missing, 8))
        raise errors.OptionError(
            f"{what}: {new} lacks part{'s' * (',' in some)} {some}; found"
            f" {', '.join(list(parts.values())[:3])}. Choose a pattern that excludes"
            " leaves that only some parts have"
        )


def split(
    table: LeafTable,
    names: Mapping[LeafPath, Sequence[LeafPath]],
    part: Callable[[int], PartFn],
    part_mirror: Callable[[Leaf, Shape], Parts | None],
    what: str,
) -> LeafTable:
    """Returns the table with leaves split into parts.

    Args:
        table: Old table.
        names: Path -> the paths of its parts.
        part: Maps the number of a part to the function that extracts its value.
        part_mirror: Maps a mirror of another shape than its parameter, and the shape of
            the parameter, to its parts; None if it cannot be split.
        what: The transform, for messages.
    """
    derive = _arrays.lazy.Deriver(what)
    taken = set(itertools.chain(*names.values()))

    def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[NewLeaf]:
        for path, leaf in leaves.items():
            shape = table[path].info.shape
            source, part_fn = leaf, part
            is_empty = leaf.info.kind == "empty"
            if not is_empty and leaf.info.shape != shape:
                parts = part_mirror(leaf, shape)
                if parts is None:
                    yield from _keep_old_paths([path], leaves, taken)
                    continue
                source, part_fn = parts
            for number, new in enumerate(names[path]):
                made = leaf
                if not is_empty:
                    made = derive([source], part_fn(number), base=leaf.info)
                yield NewLeaf(path, new, made)

    return _base.replace(table, names, act)
