"""Concatenates leaves along an existing axis, and splits leaves into parts."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxckpt import _util, errors
from flaxckpt._state.leaf import LeafTable
from flaxckpt.transforms import _base, _grouping
from flaxckpt.transforms._base import TableTransform, Transform
from flaxckpt.transforms._map import arrays
from flaxckpt.transforms._patterns import (
    check_replacement,
    compile_pattern,
    expand,
    invert,
)


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
        groups: _grouping.Groups = {}
        for number, (pattern, replacement) in enumerate(self.parts):
            matches = _base.matches(pattern, table)
            for path in arrays(matches, table, str(self)):
                _grouping.add(
                    groups, expand(matches[path], replacement), number, path, str(self)
                )

        def join(values: Sequence[jax.Array]) -> jax.Array:
            for value in values:
                _check_axis(value, self.axis)
            found = tuple(value.shape[self.axis] for value in values)
            if self.sizes is None and len(set(found)) > 1:
                raise ValueError(
                    f"the parts have different sizes: pass sizes={list(found)}"
                )
            if self.sizes is not None and found != self.sizes:
                raise ValueError(
                    f"the parts have the sizes {list(found)}, wanted {list(self.sizes)}"
                )
            return jnp.concatenate(values, self.axis)

        return _grouping.join(
            table,
            groups,
            join,
            lambda *_: None,
            counts=dict.fromkeys(groups, len(self.parts)),
            what=str(self),
        )

    def __str__(self) -> str:
        patterns = [pattern.pattern for pattern, _ in self.parts]
        whole = {replacement for _, replacement in self.parts}
        shown = whole.pop() if len(whole) == 1 else [r for _, r in self.parts]
        return _base.call("fuse", patterns, shown, axis=self.axis, sizes=self.sizes)

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
    return _Fuse(parts, axis, _checked_sizes(sizes))


def _checked_sizes(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return (
        None if sizes is None else _util.arguments.check_ints("sizes", sizes, least=0)
    )


@dataclasses.dataclass(frozen=True)
class _Split(TableTransform):
    """Implements `split`."""

    pattern: re.Pattern[str]
    replacements: tuple[str, ...]
    axis: int
    sizes: tuple[int, ...] | None

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = _base.matches(self.pattern, table)
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
        return _grouping.split(table, names, part_fn, lambda *_: None, str(self))

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
        return _base.call("split", pattern, parts, axis=self.axis, sizes=self.sizes)

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
    checked = _checked_sizes(sizes)
    if checked is not None and len(checked) != len(replacements):
        raise errors.OptionError(
            f"split needs a size for each of {len(replacements)} parts, got {sizes}"
        )
    return _Split(
        compile_pattern(pattern),
        tuple([check_replacement(pattern, part) for part in replacements]),
        _util.arguments.check_int("axis", axis),
        checked,
    )


def _check_axis(x: jax.Array, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"it has no axis {axis}")
