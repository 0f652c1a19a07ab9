"""Transforms that make one leaf of several, or several of one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from flaxckpt import _derive, errors
from flaxckpt._info import Leaf, LeafTable
from flaxckpt._types import LeafPath, Shape
from flaxckpt.transforms import _table
from flaxckpt.transforms._patterns import (
    INDEX,
    compile_pattern,
    expand,
    invert,
    name_index,
)
from flaxckpt.transforms._table import Row, TableTransform, Transform
from flaxckpt.transforms._values import arrays

_Join: TypeAlias = Callable[[Sequence[jax.Array]], jax.Array]
_Groups: TypeAlias = dict[LeafPath, dict[int, LeafPath]]
"""New path -> number of a part -> its old path."""


# ---- one of several -----------------------------------------------------------------


def _add(
    groups: _Groups, new: LeafPath, number: int, path: LeafPath, what: str
) -> None:
    taken = groups.setdefault(new, {}).setdefault(number, path)
    if taken != path:
        raise errors.OptionError(
            f"{what}: {taken} and {path} would both be part {number} of {new}"
        )


def _joined(
    table: LeafTable, groups: _Groups, join: _Join, *, count: int | None, what: str
) -> LeafTable:
    """The table with each group of leaves joined to one.

    Args:
        table: Old table.
        groups: Which leaves become which.
        join: From the values of the parts, in order, to the new value.
        count: How many parts a group has; None: as many as there are, without gaps.
        what: Who asks, for messages.
    """

    def joined(*values: jax.Array) -> jax.Array:
        return join(values)

    derive = _derive.Deriver(what)
    for new, parts in groups.items():
        _check_complete(new, parts, count or max(parts) + 1, what)

    def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[Row]:
        for new, parts in groups.items():
            present = [parts[i] for i in sorted(parts) if parts[i] in leaves]
            some = [leaves[path] for path in present]
            if is_mirror and (
                len(present) < len(parts) or not _are_like(some, table, present)
            ):
                continue  # such moments cannot be joined: they start afresh
            if some[0].info.kind == "empty":
                yield Row(present[0], new, some[0])
                continue
            types = {leaf.info.dtype for leaf in some}
            if len(types) > 1:
                raise errors.OptionError(
                    f"{what}: the parts of {new} are of different types,"
                    f" {', '.join(sorted(map(str, types)))}: cast them first"
                )
            yield Row(present[0], new, derive(some, joined))

    return _table.replace(
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


def _check_complete(
    new: LeafPath, parts: Mapping[int, LeafPath], count: int, what: str
) -> None:
    if len(parts) < count:
        missing = (str(i) for i in range(count) if i not in parts)
        some = ", ".join(itertools.islice(missing, 8))
        raise errors.OptionError(
            f"{what}: {new} lacks its parts {some}; it would be made of"
            f" {', '.join(list(parts.values())[:3])}"
        )


@dataclasses.dataclass(frozen=True)
class _Stack(TableTransform):
    """See `stack`."""

    pattern: re.Pattern[str]
    replacement: str
    axis: int
    text: str

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = _table.matches(self.pattern, table)
        groups: _Groups = {}
        for path in arrays(matches, table, str(self)):
            number = matches[path]["i"]
            if not number.isascii() or not number.isdigit():
                raise errors.OptionError(
                    f"{self}: its group (the first, or the one called i) must match the"
                    f" number of a part, and matched {number!r} in {path}"
                )
            new = expand(matches[path], self.replacement)
            _add(groups, new, int(number), path, str(self))

        def join(values: Sequence[jax.Array]) -> jax.Array:
            return jnp.stack(values, self.axis)

        return _joined(table, groups, join, count=None, what=str(self))

    def __str__(self) -> str:
        axis = self.axis or None
        return _table.call("stack", self.text, self.replacement, axis=axis)

    def inverse(self) -> Transform:
        pattern, back = invert(self.pattern.pattern, self.replacement)
        return unstack(pattern, back, axis=self.axis)


def stack(pattern: str, replacement: str, *, axis: int = 0) -> TableTransform:
    r"""Stacks leaves, such as those of layers for a scan, and their moments likewise.

    ```python
    stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")
    ```

    Args:
        pattern: Regular expression on the whole leaf path. Its first group, or the one
            called `i`, is the number of the part: 0, 1, ….
        replacement: Path of the stacked leaf; `\2` stands for the second group.
        axis: Where the new axis is.

    Raises:
        OptionError: `pattern` is no regular expression. When applied: nothing matches,
            parts are missing, or they do not go together.
    """
    named = compile_pattern(name_index(pattern))
    return _Stack(named, replacement, axis, pattern)


@dataclasses.dataclass(frozen=True)
class _Fuse(TableTransform):
    """See `fuse`.

    Attributes:
        parts: For each part its pattern and the path of the whole.
        axis: Along which axis.
        sizes: Extents of the parts.
    """

    parts: tuple[tuple[re.Pattern[str], str], ...]
    axis: int
    sizes: tuple[int, ...] | None

    def __call__(self, table: LeafTable) -> LeafTable:
        groups: _Groups = {}
        for number, (pattern, replacement) in enumerate(self.parts):
            matches = _table.matches(pattern, table)
            for path in arrays(matches, table, str(self)):
                _add(
                    groups, expand(matches[path], replacement), number, path, str(self)
                )

        def join(values: Sequence[jax.Array]) -> jax.Array:
            for value in values:
                _check_axis(value, self.axis)
            found = tuple(value.shape[self.axis] for value in values)
            if self.sizes is None and len(set(found)) > 1:
                raise ValueError(f"its parts differ: pass sizes={list(found)}")
            if self.sizes is not None and found != self.sizes:
                raise ValueError(f"its parts have the sizes {list(found)}")
            return jnp.concatenate(values, self.axis)

        return _joined(table, groups, join, count=len(self.parts), what=str(self))

    def __str__(self) -> str:
        patterns = [pattern.pattern for pattern, _ in self.parts]
        whole = {replacement for _, replacement in self.parts}
        shown = whole.pop() if len(whole) == 1 else [r for _, r in self.parts]
        return _table.call("fuse", patterns, shown, axis=self.axis, sizes=self.sizes)

    def inverse(self) -> Transform:
        inverted = [invert(p.pattern, replacement) for p, replacement in self.parts]
        whole = {pattern for pattern, _ in inverted}
        if len(whole) > 1:
            raise errors.OptionError(
                f"{self} cannot be inverted: its parts are matched differently"
            )
        parts = [part for _, part in inverted]
        return split(whole.pop(), parts, axis=self.axis, sizes=self.sizes)


def fuse(
    patterns: Sequence[str],
    replacement: str,
    *,
    axis: int = -1,
    sizes: Sequence[int] | None = None,
) -> TableTransform:
    r"""Concatenates leaves, such as query, key and value, and their moments likewise.

    ```python
    fuse([r"(.*)/query/kernel", r"(.*)/key/kernel", r"(.*)/value/kernel"],
         r"\1/qkv/kernel")
    ```

    Args:
        patterns: For each part a regular expression on the whole leaf path, in order.
        replacement: Path of the whole; `\1` stands for a group.
        axis: Along which axis.
        sizes: Extents of the parts; needed only if they differ.

    Raises:
        OptionError: A pattern is no regular expression. When applied: one matches
            nothing, parts are missing, or they do not go together.
    """
    if isinstance(patterns, str) or len(patterns) < 2:
        raise errors.OptionError(f"fuse needs a list of patterns, got {patterns!r}")
    parts = tuple((compile_pattern(pattern), replacement) for pattern in patterns)
    return _Fuse(parts, axis, None if sizes is None else tuple(sizes))


def _check_axis(x: jax.Array, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"it has no axis {axis}")


# ---- several of one -----------------------------------------------------------------


def _parted(
    table: LeafTable,
    names: Mapping[LeafPath, Sequence[LeafPath]],
    part: Callable[[int, jax.Array], jax.Array],
    fits: Callable[[Shape, Shape], bool],
    what: str,
) -> LeafTable:
    """The table with leaves taken apart.

    Args:
        table: Old table.
        names: Path -> the paths of its parts.
        part: From the number of a part and the whole to the part's value.
        fits: Whether a mirror of this shape, of a parameter of that one, can be taken
            apart likewise.
        what: Who asks, for messages.
    """
    derive = _derive.Deriver(what)
    part_fn = functools.cache(functools.partial(functools.partial, part))

    def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[Row]:
        for path, leaf in leaves.items():
            is_empty = leaf.info.kind == "empty"
            if not is_empty and not fits(leaf.info.shape, table[path].info.shape):
                continue  # factored moments: they start afresh
            for number, new in enumerate(names[path]):
                made = leaf
                if not is_empty:
                    made = derive([leaf], part_fn(number))
                yield Row(path, new, made)

    return _table.replace(table, names, act)


@dataclasses.dataclass(frozen=True)
class _Unstack(TableTransform):
    """See `unstack`."""

    pattern: re.Pattern[str]
    replacement: str
    axis: int

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = _table.matches(self.pattern, table)
        names = {}
        for path in arrays(matches, table, str(self)):
            shape = table[path].info.shape
            if not -len(shape) <= self.axis < len(shape):
                raise errors.OptionError(
                    f"{self}: {path}, {table[path].info}, has no axis {self.axis}"
                )
            names[path] = [
                expand(matches[path], self.replacement.replace(INDEX, str(i)))
                for i in range(shape[self.axis])
            ]

        def part(number: int, whole: jax.Array) -> jax.Array:
            return jax.lax.index_in_dim(whole, number, self.axis, keepdims=False)

        def fits(shape: Shape, of_param: Shape) -> bool:
            ndim = len(of_param) if self.axis < 0 else len(shape)
            return (
                len(shape) == ndim > self.axis
                and shape[self.axis] == of_param[self.axis]
            )

        return _parted(table, names, part, fits, str(self))

    def __str__(self) -> str:
        axis = self.axis or None
        return _table.call("unstack", self.pattern.pattern, self.replacement, axis=axis)

    def inverse(self) -> Transform:
        pattern, back = invert(self.pattern.pattern, self.replacement)
        return stack(pattern, back, axis=self.axis)


def unstack(pattern: str, replacement: str, *, axis: int = 0) -> TableTransform:
    r"""Takes leaves apart along an axis, such as layers of a scan, and their moments.

    ```python
    unstack(r"params/layers/(.*)", r"params/layers_{i}/\1")
    ```

    Args:
        pattern: Regular expression on the whole leaf path.
        replacement: Path of a part; `{i}` stands for its number, `\1` for a group.
        axis: Which axis goes.

    Raises:
        OptionError: `pattern` is no regular expression, or `{i}` is missing. When
            applied: nothing matches, or a leaf has no such axis.
    """
    if INDEX not in replacement:
        raise errors.OptionError(
            f"unstack needs {INDEX} in the path of a part, got {replacement!r}"
        )
    return _Unstack(compile_pattern(pattern), replacement, axis)


@dataclasses.dataclass(frozen=True)
class _Split(TableTransform):
    """See `split`."""

    pattern: re.Pattern[str]
    replacements: tuple[str, ...]
    axis: int
    sizes: tuple[int, ...] | None

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = _table.matches(self.pattern, table)
        names = {
            path: [expand(matches[path], part) for part in self.replacements]
            for path in arrays(matches, table, str(self))
        }

        def part(number: int, whole: jax.Array) -> jax.Array:
            _check_axis(whole, self.axis)
            sizes = self._sizes(whole.shape[self.axis])
            start = sum(sizes[:number])
            return jax.lax.slice_in_dim(
                whole, start, start + sizes[number], axis=self.axis
            )

        return _parted(table, names, part, lambda a, b: a == b, str(self))

    def _sizes(self, total: int) -> tuple[int, ...]:
        count = len(self.replacements)
        if self.sizes is None and total % count == 0:
            return (total // count,) * count
        if self.sizes is None or sum(self.sizes) != total:
            raise ValueError(f"its axis {self.axis} has {total} rows: pass their sizes")
        return self.sizes

    def __str__(self) -> str:
        pattern, parts = self.pattern.pattern, list(self.replacements)
        return _table.call("split", pattern, parts, axis=self.axis, sizes=self.sizes)

    def inverse(self) -> Transform:
        inverted = [invert(self.pattern.pattern, r) for r in self.replacements]
        parts = tuple((compile_pattern(p), whole) for p, whole in inverted)
        return _Fuse(parts, self.axis, self.sizes)


def split(
    pattern: str,
    replacements: Sequence[str],
    *,
    axis: int = -1,
    sizes: Sequence[int] | None = None,
) -> TableTransform:
    r"""Cuts leaves into parts, such as a fused query, key and value, and their moments.

    ```python
    split(r"(.*)/qkv/kernel",
          [r"\1/query/kernel", r"\1/key/kernel", r"\1/value/kernel"])
    ```

    Args:
        pattern: Regular expression on the whole leaf path.
        replacements: Paths of the parts, in order; `\1` stands for a group.
        axis: Along which axis.
        sizes: Extents of the parts; without, they are equal.

    Raises:
        OptionError: `pattern` is no regular expression. When applied: nothing matches,
            or a leaf cannot be cut so.
    """
    if isinstance(replacements, str) or len(replacements) < 2:
        raise errors.OptionError(f"split needs a list of parts, got {replacements!r}")
    if sizes is not None and len(sizes) != len(replacements):
        raise errors.OptionError(
            f"split needs a size for each of {len(replacements)} parts, got {sizes}"
        )
    return _Split(
        compile_pattern(pattern),
        tuple(replacements),
        axis,
        None if sizes is None else tuple(sizes),
    )
