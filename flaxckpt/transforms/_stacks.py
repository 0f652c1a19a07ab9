"""Leaves stacked along a new axis, and taken apart again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxckpt import _arguments, errors
from flaxckpt._info import LeafTable
from flaxckpt._types import Shape
from flaxckpt.transforms import _parts, _table
from flaxckpt.transforms._patterns import (
    INDEX,
    check_replacement,
    compile_pattern,
    expand,
    invert,
    name_index,
)
from flaxckpt.transforms._table import TableTransform, Transform
from flaxckpt.transforms._values import arrays


@dataclasses.dataclass(frozen=True)
class _Stack(TableTransform):
    """See `stack`."""

    pattern: re.Pattern[str]
    replacement: str
    axis: int
    text: str

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = _table.matches(self.pattern, table)
        groups: _parts.Groups = {}
        for path in arrays(matches, table, str(self)):
            number = matches[path]["i"]
            if not number.isascii() or not number.isdigit():
                raise errors.OptionError(
                    f"{self}: its group (the first, or the one called i) must match the"
                    f" number of a part, and matched {number!r} in {path}"
                )
            new = expand(matches[path], self.replacement)
            _parts.add(groups, new, int(number), path, str(self))

        def join(values: Sequence[jax.Array]) -> jax.Array:
            return jnp.stack(values, self.axis)

        return _parts.joined(table, groups, join, count=None, what=str(self))

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
    compile_pattern(pattern)
    axis = _arguments.whole("axis", axis)
    named = compile_pattern(name_index(pattern))
    return _Stack(named, check_replacement(pattern, replacement), axis, pattern)


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

        return _parts.parted(table, names, part, fits, str(self))

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
    axis = _arguments.whole("axis", axis)
    if INDEX not in check_replacement(pattern, replacement):
        raise errors.OptionError(
            f"unstack needs {INDEX} in the path of a part, got {replacement!r}"
        )
    return _Unstack(compile_pattern(pattern), replacement, axis)
