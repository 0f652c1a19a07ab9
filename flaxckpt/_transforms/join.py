"""Joins leaves (`fuse`, `stack`) and splits leaves (`split`, `unstack`).

`fuse` and `split` work along an existing axis, `stack` and `unstack` along a new axis.
Mirrors of the leaves follow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from flaxckpt import _arrays, _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base, factored
from flaxckpt._transforms.base import NewLeaf, TableTransform, Transform
from flaxckpt._transforms.map_values import arrays
from flaxckpt._transforms.patterns import (
    INDEX,
    check_replacement,
    compile_pattern,
    expand,
    invert,
    name_index,
)
from flaxckpt._types import LeafPath, Shape

_JoinFn: TypeAlias = Callable[[Sequence[jax.Array]], jax.Array]
_PartFn: TypeAlias = Callable[[jax.Array], jax.Array]
_Joined: TypeAlias = tuple[Sequence[Leaf], Callable[..., jax.Array]]
"""The sources of a leaf, and the function that computes it."""

_Parts: TypeAlias = tuple[Leaf, Callable[[int], _PartFn]]
"""The source of the parts of a leaf, and the function for each part by number."""

_Groups: TypeAlias = dict[LeafPath, dict[int, LeafPath]]
"""New path -> number of a part -> its old path."""


def _add_part(
    groups: _Groups, new: LeafPath, number: int, path: LeafPath, what: str
) -> None:
    """Records the leaf at `path` as a part of a new leaf.

    Raises:
        OptionError: Another leaf has the same number.
    """
    taken = groups.setdefault(new, {}).setdefault(number, path)
    if taken != path:
        raise errors.OptionError(
            f"{what}: {taken} and {path} would both be part {number} of {new}"
        )


def _join_groups(
    table: LeafTable,
    groups: _Groups,
    join_fn: _JoinFn,
    *,
    numbers: Mapping[LeafPath, Sequence[int]],
    what: str,
    join_mirrors: Callable[[Sequence[Leaf], Shape], _Joined | None] = lambda *_: None,
) -> LeafTable:
    """Returns the table with each group of leaves joined to a single leaf.

    Args:
        table: Old table.
        groups: The groups to join.
        join_fn: Maps the values of the parts, in order, to the new value.
        numbers: Required numbers of the parts of each group.
        what: The transform, for messages.
        join_mirrors: Maps mirrors of another shape than the parts, and the shape of the
            parts, to the joined leaf; None if they cannot be joined.
    """

    def whole(*values: jax.Array) -> jax.Array:
        return join_fn(values)

    derive = _arrays.lazy.Deriver(what)
    for new, parts in groups.items():
        _check_complete(new, parts, numbers[new], what)

    def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[NewLeaf]:
        for new, parts in groups.items():
            present = [parts[i] for i in sorted(parts) if parts[i] in leaves]
            members = [leaves[path] for path in present]
            if is_mirror and len(present) < len(parts):
                yield from _keep_old_paths(present, leaves, groups)
                continue
            if is_mirror and not _are_like(members, table, present):
                joined = join_mirrors(members, table[present[0]].info.shape)
                if joined is None:
                    yield from _keep_old_paths(present, leaves, groups)
                else:
                    sources, fn = joined
                    leaf = derive(sources, fn, base=members[0].info)
                    yield NewLeaf(present[0], new, leaf)
                continue
            if members[0].info.kind == "empty":
                yield NewLeaf(present[0], new, members[0])
                continue
            types = {leaf.info.dtype for leaf in members}
            if len(types) > 1:
                raise errors.OptionError(
                    f"{what}: the parts of {new} have different types,"
                    f" {', '.join(sorted(map(str, types)))}: cast them first"
                )
            yield NewLeaf(present[0], new, derive(members, whole))

    return base.replace(table, itertools.chain(*map(dict.values, groups.values())), act)


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
    new: LeafPath, parts: Mapping[int, LeafPath], numbers: Sequence[int], what: str
) -> None:
    if len(parts) < len(numbers):
        missing = (str(i) for i in numbers if i not in parts)
        listed = ", ".join(itertools.islice(missing, 8))
        raise errors.OptionError(
            f"{what}: {new} lacks part{'s' * (',' in listed)} {listed}; found"
            f" {', '.join(list(parts.values())[:3])}. Choose a pattern that excludes"
            " leaves that only some parts have"
        )


def _split_leaves(
    table: LeafTable,
    names: Mapping[LeafPath, Sequence[LeafPath]],
    part: Callable[[int], _PartFn],
    what: str,
    split_mirror: Callable[[Leaf, Shape], _Parts | None] = lambda *_: None,
) -> LeafTable:
    """Returns the table with leaves split into parts.

    Args:
        table: Old table.
        names: Path -> the paths of its parts.
        part: Maps the number of a part to the function that extracts its value.
        what: The transform, for messages.
        split_mirror: Maps a mirror of another shape than its parameter, and the shape
            of the parameter, to its parts; None if it cannot be split.
    """
    derive = _arrays.lazy.Deriver(what)
    taken = set(itertools.chain(*names.values()))

    def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[NewLeaf]:
        for path, leaf in leaves.items():
            shape = table[path].info.shape
            source, part_fn = leaf, part
            is_empty = leaf.info.kind == "empty"
            if not is_empty and leaf.info.shape != shape:
                parts = split_mirror(leaf, shape)
                if parts is None:
                    yield from _keep_old_paths([path], leaves, taken)
                    continue
                source, part_fn = parts
            for number, new in enumerate(names[path]):
                part_leaf = leaf
                if not is_empty:
                    part_leaf = derive([source], part_fn(number), base=leaf.info)
                yield NewLeaf(path, new, part_leaf)

    return base.replace(table, names, act)


# ---- along an existing axis ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Fuse(TableTransform):
    """Implements `fuse`.

    Attributes:
        parts: For each part its pattern and the path of the whole.
        axis: The axis of concatenation.
        sizes: Sizes of the parts along the axis.
    """

    parts: tuple[tuple[re.Pattern[str], str], ...]
    axis: int
    sizes: tuple[int, ...] | None

    def __call__(self, table: LeafTable) -> LeafTable:
        groups: _Groups = {}
        for number, (pattern, replacement) in enumerate(self.parts):
            matches = base.matches(pattern, table)
            for path in arrays(matches, table, str(self)):
                _add_part(
                    groups, expand(matches[path], replacement), number, path, str(self)
                )

        def join(values: Sequence[jax.Array]) -> jax.Array:
            for value in values:
                _check_axis(value, self.axis)
            sizes = tuple(value.shape[self.axis] for value in values)
            if self.sizes is None and len(set(sizes)) > 1:
                raise ValueError(
                    f"the parts have different sizes: pass sizes={list(sizes)}"
                )
            if self.sizes is not None and sizes != self.sizes:
                raise ValueError(
                    f"the parts have the sizes {list(sizes)}, wanted {list(self.sizes)}"
                )
            return jnp.concatenate(values, self.axis)

        return _join_groups(
            table,
            groups,
            join,
            numbers=dict.fromkeys(groups, range(len(self.parts))),
            what=str(self),
        )

    def __str__(self) -> str:
        patterns = [pattern.pattern for pattern, _ in self.parts]
        whole = {replacement for _, replacement in self.parts}
        shown = whole.pop() if len(whole) == 1 else [r for _, r in self.parts]
        return base.call("fuse", patterns, shown, axis=self.axis, sizes=self.sizes)

    def inverse(self) -> Transform:
        inverted = [invert(p.pattern, replacement) for p, replacement in self.parts]
        whole = {pattern for pattern, _ in inverted}
        if len(whole) > 1:
            raise errors.OptionError(
                f"{self} cannot be inverted: its parts have different inverse patterns"
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
    r"""Concatenates leaves, such as query, key and value, and their moments.

    ```python
    fuse([r"(.*)/query/kernel", r"(.*)/key/kernel", r"(.*)/value/kernel"],
         r"\1/qkv/kernel")
    ```

    Args:
        patterns: For each part a regular expression on the whole leaf path, in order.
        replacement: Path of the whole; `\1` stands for a group.
        axis: The axis of concatenation.
        sizes: Sizes of the parts along the axis; needed only if they differ.

    Raises:
        OptionError: A pattern is not a valid regular expression. When applied: a
            pattern matches nothing, parts are missing, or shapes or types do not fit.
    """
    if not isinstance(patterns, list | tuple) or len(patterns) < 2:
        raise errors.OptionError(f"fuse needs a list of patterns, got {patterns!r:.80}")
    parts = tuple(
        (compile_pattern(pattern), check_replacement(pattern, replacement))
        for pattern in patterns
    )
    axis = _util.arguments.check_int("axis", axis)
    return _Fuse(parts, axis, _check_sizes(sizes))


def _check_sizes(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return (
        None if sizes is None else _util.arguments.check_ints("sizes", sizes, least=0)
    )


@dataclasses.dataclass(frozen=True)
class _SplitLeaf(TableTransform):
    """Implements `split`."""

    pattern: re.Pattern[str]
    replacements: tuple[str, ...]
    axis: int
    sizes: tuple[int, ...] | None

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = base.matches(self.pattern, table)
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

        part_fn = functools.cache(functools.partial(functools.partial, part))
        return _split_leaves(table, names, part_fn, str(self))

    def _sizes(self, total: int) -> tuple[int, ...]:
        count = len(self.replacements)
        if self.sizes is None and total % count == 0:
            return (total // count,) * count
        if self.sizes is None or sum(self.sizes) != total:
            raise ValueError(
                f"axis {self.axis} has {total} rows: pass the sizes of the parts"
            )
        return self.sizes

    def __str__(self) -> str:
        pattern, parts = self.pattern.pattern, list(self.replacements)
        return base.call("split", pattern, parts, axis=self.axis, sizes=self.sizes)

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
    r"""Splits leaves into parts, such as a fused query, key and value, and moments.

    ```python
    split(r"(.*)/qkv/kernel",
          [r"\1/query/kernel", r"\1/key/kernel", r"\1/value/kernel"])
    ```

    Args:
        pattern: Regular expression on the whole leaf path.
        replacements: Paths of the parts, in order; `\1` stands for a group.
        axis: The axis to split.
        sizes: Sizes of the parts along the axis; equal by default.

    Raises:
        OptionError: `pattern` is not a valid regular expression. When applied: nothing
            matches, or a leaf cannot be split into these sizes.
    """
    if not isinstance(replacements, list | tuple) or len(replacements) < 2:
        raise errors.OptionError(
            f"split needs a list of parts, got {replacements!r:.80}"
        )
    checked = _check_sizes(sizes)
    if checked is not None and len(checked) != len(replacements):
        raise errors.OptionError(
            f"split needs a size for each of {len(replacements)} parts, got {sizes}"
        )
    return _SplitLeaf(
        compile_pattern(pattern),
        tuple([check_replacement(pattern, part) for part in replacements]),
        _util.arguments.check_int("axis", axis),
        checked,
    )


def _check_axis(x: jax.Array, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"it has no axis {axis}")


# ---- along a new axis ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """The numbers of the parts that `stack` and `unstack` work on.

    Attributes:
        start: The first number.
        stride: The difference of two numbers.
        stop: The numbers are less than this; None for no bound.
    """

    start: int = 0
    stride: int = 1
    stop: int | None = None

    @classmethod
    def check(cls, start: int, stride: int, stop: int | None) -> _Numbers:
        """Returns the numbers for arguments of a user.

        Raises:
            OptionError: An argument is not a whole number, or there are no numbers.
        """
        start = _util.arguments.check_int("start", start, least=0)
        stride = _util.arguments.check_int("stride", stride, least=1)
        if stop is not None:
            stop = _util.arguments.check_int("stop", stop, least=start + 1)
        return cls(start, stride, stop)

    def __contains__(self, number: int) -> bool:
        return number in self.up_to(number + 1)

    def up_to(self, end: int) -> range:
        """Returns the numbers less than `end`; all of them if there is a bound."""
        return range(self.start, end if self.stop is None else self.stop, self.stride)

    def for_rows(self, count: int, axis: int) -> range:
        """Returns the numbers of `count` rows along `axis`.

        Raises:
            ValueError: There are more or fewer numbers.
        """
        numbers = self.up_to(self.start + count * self.stride)
        if len(numbers) != count:
            raise ValueError(
                f"axis {axis} has {count} rows, but there are {len(numbers)} numbers"
                f" from {self.start} to {self.stop}"
            )
        return numbers

    def options(self) -> dict[str, int | None]:
        """Returns the arguments for `call`, without defaults."""
        stride = None if self.stride == 1 else self.stride
        return {"start": self.start or None, "stride": stride, "stop": self.stop}


@dataclasses.dataclass(frozen=True)
class _Stack(TableTransform):
    """Implements `stack`."""

    pattern: re.Pattern[str]
    replacement: str
    axis: int
    numbers: _Numbers
    text: str

    def __call__(self, table: LeafTable) -> LeafTable:
        groups, numbers = self._groups(table)

        def join(values: Sequence[jax.Array]) -> jax.Array:
            return jnp.stack(values, self.axis)

        def join_mirrors(mirrors: Sequence[Leaf], shape: Shape) -> _Joined | None:
            axis = self.axis % (len(shape) + 1)
            origins = [*range(axis), None, *range(axis, len(shape))]
            new_shape = (*shape[:axis], len(mirrors), *shape[axis:])
            sources = []
            for mirror in mirrors:
                source = factored.source(mirror.info, shape, origins, new_shape, table)
                if source is None:
                    return None
                sources.append(source)
            lacking = sources[0].lacking
            if any(source.lacking != lacking for source in sources):
                return None
            leaves = [source.leaf for source in sources]
            return leaves, _stacked(axis - (lacking < axis))

        return _join_groups(
            table,
            groups,
            join,
            numbers=numbers,
            what=str(self),
            join_mirrors=join_mirrors,
        )

    def _groups(self, table: LeafTable) -> tuple[_Groups, dict[LeafPath, range]]:
        """Returns the groups of leaves to stack, and the required numbers of each."""
        matches = base.matches(self.pattern, table)
        groups: _Groups = {}
        stacks: dict[LeafPath, str] = {}  # new path -> old path up to the number
        ends: dict[str, int] = {}
        found = []
        for path in arrays(matches, table, str(self)):
            number = matches[path]["i"]
            if not number.isascii() or not number.isdigit():
                raise errors.OptionError(
                    f"{self}: the first group, or the group i, must match the number of"
                    f" a part; it matched {number!r} in {path}"
                )
            found.append(int(number))
            if found[-1] not in self.numbers:
                continue
            new = expand(matches[path], self.replacement)
            _add_part(groups, new, found[-1], path, str(self))
            beginning = path[: matches[path].start("i")]
            beginning = stacks.setdefault(new, beginning)
            ends[beginning] = max(ends.get(beginning, 0), found[-1] + 1)
        if found and not groups:
            listed = ", ".join(map(str, sorted(set(found))[:8]))
            raise errors.OptionError(
                f"{self}: no part has such a number; the numbers are {listed}"
            )
        # Leaves of the same layers: their numbers are those of the layers.
        numbers = {new: self.numbers.up_to(ends[b]) for new, b in stacks.items()}
        return groups, numbers

    def __str__(self) -> str:
        return base.call(
            "stack",
            self.text,
            self.replacement,
            axis=self.axis or None,
            **self.numbers.options(),
        )

    def inverse(self) -> Transform:
        pattern, back = invert(self.pattern.pattern, self.replacement)
        return _Unstack(compile_pattern(pattern), back, self.axis, self.numbers)


@functools.cache
def _stacked(axis: int) -> Callable[..., jax.Array]:
    return lambda *values: jnp.stack(values, axis)


def stack(
    pattern: str,
    replacement: str,
    *,
    axis: int = 0,
    start: int = 0,
    stride: int = 1,
    stop: int | None = None,
) -> TableTransform:
    r"""Stacks leaves, such as the layers of a scan, and their moments.

    ```python
    stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")
    stack(r"layers/(\d+)/(.*)", r"blocks/local/\2", stride=2)  # layers 0, 2, 4, …
    stack(r"layers/(\d+)/(.*)", r"blocks/global/\2", start=1, stride=2)
    stack(r"(.*)/experts/(?P<i>\d+)/(.*)", r"\1/experts/\3")
    ```

    Args:
        pattern: Regular expression on the whole leaf path. Its first group, or the
            group named `i`, is the number of the part: 0, 1, ….
        replacement: Path of the stacked leaf; `\2` stands for the second group.
        axis: The position of the new axis.
        start: The number of the first part.
        stride: The difference between the numbers of two parts; leaves with numbers
            between them stay.
        stop: Parts have numbers less than this, and all of them must exist; without a
            bound by default.

    Raises:
        OptionError: `pattern` is not a valid regular expression. When applied: nothing
            matches, parts are missing (as for a leaf that only some layers have), or
            shapes or types do not fit.
    """
    compile_pattern(pattern)
    axis = _util.arguments.check_int("axis", axis)
    return _Stack(
        compile_pattern(name_index(pattern)),
        check_replacement(pattern, replacement),
        axis,
        _Numbers.check(start, stride, stop),
        pattern,
    )


@dataclasses.dataclass(frozen=True)
class _Unstack(TableTransform):
    """Implements `unstack`."""

    pattern: re.Pattern[str]
    replacement: str
    axis: int
    numbers: _Numbers

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = base.matches(self.pattern, table)
        names = {}
        for path in arrays(matches, table, str(self)):
            shape = table[path].info.shape
            if not -len(shape) <= self.axis < len(shape):
                raise errors.OptionError(
                    f"{self}: {path}, {table[path].info}, has no axis {self.axis}"
                )
            try:
                numbers = self.numbers.for_rows(shape[self.axis], self.axis)
            except ValueError as error:
                raise errors.OptionError(
                    f"{self} cannot unstack {path}: {error}"
                ) from None
            names[path] = [
                expand(matches[path], self.replacement.replace(INDEX, str(i)))
                for i in numbers
            ]

        def split_mirror(mirror: Leaf, shape: Shape) -> _Parts | None:
            info, axis = mirror.info, self.axis % len(shape)
            if factored.is_factored(info):
                origins = [i for i in range(len(shape)) if i != axis]
                new_shape = [shape[i] for i in origins]
                source = factored.source(info, shape, origins, new_shape, table)
                if source is None:
                    return None
                position = axis - (source.lacking < axis)
                return source.leaf, functools.partial(_part, position)
            if info.role is not None and info.role.state_class:
                return None
            # Factored moments of other libraries, such as T5X, keep the first axes.
            ndim = len(info.shape)
            if 0 <= self.axis < ndim < len(shape) and info.shape[axis] == shape[axis]:
                return mirror, functools.partial(_part, axis)
            return None

        return _split_leaves(
            table, names, functools.partial(_part, self.axis), str(self), split_mirror
        )

    def __str__(self) -> str:
        return base.call(
            "unstack",
            self.pattern.pattern,
            self.replacement,
            axis=self.axis or None,
            **self.numbers.options(),
        )

    def inverse(self) -> Transform:
        pattern, back = invert(self.pattern.pattern, self.replacement)
        named = compile_pattern(name_index(pattern))
        return _Stack(named, back, self.axis, self.numbers, pattern)


@functools.cache
def _part(axis: int, number: int) -> Callable[[jax.Array], jax.Array]:
    return lambda whole: jax.lax.index_in_dim(whole, number, axis, keepdims=False)


def unstack(
    pattern: str,
    replacement: str,
    *,
    axis: int = 0,
    start: int = 0,
    stride: int = 1,
    stop: int | None = None,
) -> TableTransform:
    r"""Unstacks leaves along an axis, such as the layers of a scan, and their moments.

    ```python
    unstack(r"params/layers/(.*)", r"params/layers_{i}/\1")
    ```

    Args:
        pattern: Regular expression on the whole leaf path.
        replacement: Path of a part; `{i}` stands for its number, `\1` for a group.
        axis: The axis to remove.
        start: The number of the first part.
        stride: The difference between the numbers of two parts.
        stop: The numbers are less than this; the axis must have as many rows.

    Raises:
        OptionError: `pattern` is not a valid regular expression, or `{i}` is missing.
            When applied: nothing matches, or a leaf does not have the axis.
    """
    axis = _util.arguments.check_int("axis", axis)
    if INDEX not in check_replacement(pattern, replacement):
        raise errors.OptionError(
            f"unstack needs {INDEX} in the path of a part, got {replacement!r}"
        )
    numbers = _Numbers.check(start, stride, stop)
    return _Unstack(compile_pattern(pattern), replacement, axis, numbers)
