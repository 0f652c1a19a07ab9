"""Stacks leaves along a new axis, and unstacks them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from flaxckpt import _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._types import LeafPath, Shape
from flaxckpt.transforms import _base, _factored, _grouping
from flaxckpt.transforms._base import TableTransform, Transform
from flaxckpt.transforms._map import arrays
from flaxckpt.transforms._patterns import (
    INDEX,
    check_replacement,
    compile_pattern,
    expand,
    invert,
    name_index,
)


@dataclasses.dataclass(frozen=True)
class _Stack(TableTransform):
    """Implements `stack`."""

    pattern: re.Pattern[str]
    replacement: str
    axis: int
    text: str

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = _base.matches(self.pattern, table)
        groups: _grouping.Groups = {}
        stacks: dict[LeafPath, str] = {}  # new path -> old path up to the number
        sizes: dict[str, int] = {}
        for path in arrays(matches, table, str(self)):
            number = matches[path]["i"]
            if not number.isascii() or not number.isdigit():
                raise errors.OptionError(
                    f"{self}: the first group, or the group i, must match the number of"
                    f" a part; it matched {number!r} in {path}"
                )
            new = expand(matches[path], self.replacement)
            _grouping.add(groups, new, int(number), path, str(self))
            beginning = path[: matches[path].start("i")]
            beginning = stacks.setdefault(new, beginning)
            sizes[beginning] = max(sizes.get(beginning, 0), int(number) + 1)
        # Leaves of the same layers: their number is the number of layers.
        counts = {new: sizes[beginning] for new, beginning in stacks.items()}

        def join(values: Sequence[jax.Array]) -> jax.Array:
            return jnp.stack(values, self.axis)

        def join_mirrors(
            mirrors: Sequence[Leaf], shape: Shape
        ) -> _grouping.Made | None:
            axis = self.axis % (len(shape) + 1)
            origins = [*range(axis), None, *range(axis, len(shape))]
            new_shape = (*shape[:axis], len(mirrors), *shape[axis:])
            found = []
            for mirror in mirrors:
                source = _factored.source(mirror.info, shape, origins, new_shape, table)
                if source is None:
                    return None
                found.append(source)
            lacking = found[0].lacking
            if any(source.lacking != lacking for source in found):
                return None
            leaves = [source.leaf for source in found]
            return leaves, _stacked(axis - (lacking < axis))

        return _grouping.join(
            table, groups, join, join_mirrors, counts=counts, what=str(self)
        )

    def __str__(self) -> str:
        axis = self.axis or None
        return _base.call("stack", self.text, self.replacement, axis=axis)

    def inverse(self) -> Transform:
        pattern, back = invert(self.pattern.pattern, self.replacement)
        return unstack(pattern, back, axis=self.axis)


@functools.cache
def _stacked(axis: int) -> Callable[..., jax.Array]:
    return lambda *values: jnp.stack(values, axis)


def stack(pattern: str, replacement: str, *, axis: int = 0) -> TableTransform:
    r"""Stacks leaves, such as the layers of a scan, and their moments.

    ```python
    stack(r"params/layers_(\d+)/(.*)", r"params/layers/\2")
    ```

    Args:
        pattern: Regular expression on the whole leaf path. Its first group, or the
            group named `i`, is the number of the part: 0, 1, ….
        replacement: Path of the stacked leaf; `\2` stands for the second group.
        axis: The position of the new axis.

    Raises:
        OptionError: `pattern` is not a valid regular expression. When applied: nothing
            matches, parts are missing (as for a leaf that only some layers have), or
            shapes or types do not fit.
    """
    compile_pattern(pattern)
    axis = _util.arguments.check_int("axis", axis)
    named = compile_pattern(name_index(pattern))
    return _Stack(named, check_replacement(pattern, replacement), axis, pattern)


@dataclasses.dataclass(frozen=True)
class _Unstack(TableTransform):
    """Implements `unstack`."""

    pattern: re.Pattern[str]
    replacement: str
    axis: int

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = _base.matches(self.pattern, table)
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

        def part_mirror(mirror: Leaf, shape: Shape) -> _grouping.Parts | None:
            info, axis = mirror.info, self.axis % len(shape)
            if _factored.is_factored(info):
                origins = [i for i in range(len(shape)) if i != axis]
                new_shape = [shape[i] for i in origins]
                found = _factored.source(info, shape, origins, new_shape, table)
                if found is None:
                    return None
                position = axis - (found.lacking < axis)
                return found.leaf, functools.partial(_part, position)
            if info.role is not None and info.role.state_class:
                return None
            # Factored moments of other libraries, such as T5X, keep the first axes.
            ndim = len(info.shape)
            if 0 <= self.axis < ndim < len(shape) and info.shape[axis] == shape[axis]:
                return mirror, functools.partial(_part, axis)
            return None

        return _grouping.split(
            table, names, functools.partial(_part, self.axis), part_mirror, str(self)
        )

    def __str__(self) -> str:
        axis = self.axis or None
        return _base.call("unstack", self.pattern.pattern, self.replacement, axis=axis)

    def inverse(self) -> Transform:
        pattern, back = invert(self.pattern.pattern, self.replacement)
        return stack(pattern, back, axis=self.axis)


@functools.cache
def _part(axis: int, number: int) -> Callable[[jax.Array], jax.Array]:
    return lambda whole: jax.lax.index_in_dim(whole, number, axis, keepdims=False)


def unstack(pattern: str, replacement: str, *, axis: int = 0) -> TableTransform:
    r"""Unstacks leaves along an axis, such as the layers of a scan, and their moments.

    ```python
    unstack(r"params/layers/(.*)", r"params/layers_{i}/\1")
    ```

    Args:
        pattern: Regular expression on the whole leaf path.
        replacement: Path of a part; `{i}` stands for its number, `\1` for a group.
        axis: The axis to remove.

    Raises:
        OptionError: `pattern` is not a valid regular expression, or `{i}` is missing.
            When applied: nothing matches, or a leaf does not have the axis.
    """
    axis = _util.arguments.check_int("axis", axis)
    if INDEX not in check_replacement(pattern, replacement):
        raise errors.OptionError(
            f"unstack needs {INDEX} in the path of a part, got {replacement!r}"
        )
    return _Unstack(compile_pattern(pattern), replacement, axis)
