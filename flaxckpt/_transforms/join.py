"""Joins leaves along an axis (`fuse`) or a new one (`stack`), and splits them again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp

from flaxckpt import _util, errors
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms import base
from flaxckpt._transforms.axis_maps import AxisMap, Origins, check_axis
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.patterns import (
    INDEX,
    check_replacement,
    compile_pattern,
    expand,
    invert,
    name_index,
)
from flaxckpt._transforms.rows import LeafRow, RowTransform
from flaxckpt._types import LeafPath


def _join(
    parts: Iterable[tuple[LeafPath, int, LeafPath]],
    numbers: Callable[[LeafPath], Sequence[int]],
    fn: Callable[..., jax.Array],
    what: str,
) -> list[LeafRow]:
    """Returns the row of each new leaf; `parts` are its path, a number and an old path.

    `numbers` returns those that a new leaf requires. Raises OptionError with all parts
    that are missing or have the same number.
    """
    wholes: dict[LeafPath, dict[int, LeafPath]] = {}
    faults = []
    for new, number, path in parts:
        taken = wholes.setdefault(new, {}).setdefault(number, path)
        if taken != path:
            faults.append(f"{new}: {taken} and {path} would both be part {number}")
    for new, found in wholes.items():
        if len(found) < len(numbers(new)):
            missing = (str(i) for i in numbers(new) if i not in found)
            listed = ", ".join(itertools.islice(missing, 8))
            some = ", ".join(list(found.values())[:3])
            faults.append(
                f"{new} lacks part{'s' * (',' in listed)} {listed}; found {some}"
            )
    if faults:
        raise errors.OptionError(
            f"{what} cannot join {errors.one_or_rows(faults)}\nChoose a pattern that"
            " excludes leaves that only some parts have"
        )
    return [
        LeafRow([found[i] for i in sorted(found)], [(new, fn)])
        for new, found in wholes.items()
    ]


def _check_types(values: Sequence[jax.Array]) -> None:
    """Raises ValueError if the parts of a leaf have several types."""
    types = sorted({str(value.dtype) for value in values})
    if len(types) > 1:
        raise ValueError(
            f"the parts have different types, {', '.join(types)}: cast them first"
        )


# ---- along an existing axis ---------------------------------------------------------


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
    parts = [(p, check_replacement(p, replacement)) for p in patterns]
    axis = _util.arguments.check_int("axis", axis)
    return _fuse(parts, axis, _check_sizes(sizes))


def _fuse(
    parts: Sequence[tuple[str, str]], axis: int, sizes: tuple[int, ...] | None
) -> TableTransform:
    """Returns `fuse` for parts of which each has its own path of the whole."""
    compiled = [(compile_pattern(pattern), whole) for pattern, whole in parts]
    patterns, wholes = map(list, zip(*parts, strict=True))
    shown = wholes[0] if len({*wholes}) == 1 else wholes
    name = base.call("fuse", patterns, shown, axis=axis, sizes=sizes)

    def find(table: LeafTable) -> list[LeafRow]:
        found = [
            (expand(match, whole), number, path)
            for number, (pattern, whole) in enumerate(compiled)
            for path, match in base.match_arrays(pattern, table, name).items()
        ]
        numbers = range(len(parts))
        return _join(found, lambda _: numbers, _Concatenation(axis, sizes), name)

    def undo() -> Transform:
        inverted = [invert(pattern, whole) for pattern, whole in parts]
        if len({pattern for pattern, _ in inverted}) > 1:
            raise errors.OptionError(
                f"{name} cannot be inverted: its parts have different inverse patterns"
            )
        return split(
            inverted[0][0], [part for _, part in inverted], axis=axis, sizes=sizes
        )

    return RowTransform(name, find, undo)


@dataclasses.dataclass(frozen=True)
class _Concatenation:
    """Concatenates the parts of a leaf; see `fuse`."""

    axis: int
    sizes: tuple[int, ...] | None

    def __call__(self, *values: jax.Array) -> jax.Array:
        _check_types(values)
        for value in values:
            check_axis(value, self.axis)
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


def _check_sizes(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return (
        None if sizes is None else _util.arguments.check_ints("sizes", sizes, least=0)
    )


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
        OptionError: `pattern` is not valid. When applied: nothing matches, or a leaf
            cannot be split into these sizes.
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
    compiled = compile_pattern(pattern)
    parts = [check_replacement(pattern, part) for part in replacements]
    axis = _util.arguments.check_int("axis", axis)
    name = base.call("split", pattern, parts, axis=axis, sizes=checked)
    cuts = [_Cut(number, len(parts), axis, checked) for number in range(len(parts))]

    def find(table: LeafTable) -> Iterator[LeafRow]:
        for path, match in base.match_arrays(compiled, table, name).items():
            new = [expand(match, part) for part in parts]
            yield LeafRow([path], list(zip(new, cuts, strict=True)))

    def undo() -> Transform:
        return _fuse([invert(pattern, part) for part in parts], axis, checked)

    return RowTransform(name, find, undo)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Cuts the part `number` of `count` parts out of a leaf; see `split`."""

    number: int
    count: int
    axis: int
    sizes: tuple[int, ...] | None

    def __call__(self, whole: jax.Array) -> jax.Array:
        check_axis(whole, self.axis)
        total = whole.shape[self.axis]
        sizes = self.sizes
        if sizes is None and total % self.count == 0:
            sizes = (total // self.count,) * self.count
        if sizes is None or sum(sizes) != total:
            raise ValueError(
                f"axis {self.axis} has {total} rows: pass the sizes of the parts"
            )
        start = sum(sizes[: self.number])
        stop = start + sizes[self.number]
        return jax.lax.slice_in_dim(whole, start, stop, axis=self.axis)


# ---- along a new axis ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """The numbers of the parts that `stack` and `unstack` work on; None is no bound."""

    start: int = 0
    stride: int = 1
    stop: int | None = None

    @classmethod
    def check(cls, start: int, stride: int, stop: int | None) -> _Numbers:
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

    def options(self) -> dict[str, int | None]:
        stride = None if self.stride == 1 else self.stride
        return {"start": self.start or None, "stride": stride, "stop": self.stop}


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
    numbers = _Numbers.check(start, stride, stop)
    check_replacement(pattern, replacement)
    compiled = compile_pattern(name_index(pattern))
    options = numbers.options()
    name = base.call("stack", pattern, replacement, axis=axis or None, **options)

    def find(table: LeafTable) -> list[LeafRow]:
        matches = base.match_arrays(compiled, table, name)
        digits = {path: match["i"] for path, match in matches.items()}
        if faults := [
            f"{path}: {text!r}"
            for path, text in digits.items()
            if not (text.isascii() and text.isdigit())
        ]:
            raise errors.OptionError(
                f"{name}: the first group, or the group i, must match the number of a"
                f" part, but it matches other text in {errors.one_or_rows(faults)}"
            )
        parts = []
        stacks: dict[LeafPath, str] = {}  # new path -> old path up to the number
        ends: dict[str, int] = {}
        for path, match in matches.items():
            if (number := int(digits[path])) in numbers:
                new = expand(match, replacement)
                parts.append((new, number, path))
                beginning = stacks.setdefault(new, path[: match.start("i")])
                ends[beginning] = max(ends.get(beginning, 0), number + 1)
        if matches and not parts:
            listed = ", ".join(map(str, sorted(set(map(int, digits.values())))[:8]))
            raise errors.OptionError(
                f"{name}: no part has such a number; the numbers are {listed}"
            )
        # Leaves of the same layers: their numbers are those of the layers.
        return _join(
            parts, lambda new: numbers.up_to(ends[stacks[new]]), _Stacked(axis), name
        )

    def undo() -> Transform:
        inverted = invert(compiled.pattern, replacement)
        return unstack(*inverted, axis=axis, start=start, stride=stride, stop=stop)

    return RowTransform(name, find, undo)


@dataclasses.dataclass(frozen=True)
class _Stacked(AxisMap):
    axis: int

    def __call__(self, *values: jax.Array) -> jax.Array:
        _check_types(values)
        return jnp.stack(values, self.axis)

    def origins(self, ndim: int) -> Origins:
        at = self.axis % (ndim + 1)
        return [*range(at), None, *range(at, ndim)]

    def on(self, axes: Origins, ndim: int) -> AxisMap:
        before = self.origins(ndim)[: self.axis % (ndim + 1)]
        return _Stacked(sum(axis in before for axis in axes))


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
        OptionError: `pattern` is not valid, or `{i}` is missing. When applied: nothing
            matches, or a leaf does not have the axis.
    """
    axis = _util.arguments.check_int("axis", axis)
    if INDEX not in check_replacement(pattern, replacement):
        raise errors.OptionError(
            f"unstack needs {INDEX} in the path of a part, got {replacement!r}"
        )
    numbers = _Numbers.check(start, stride, stop)
    compiled = compile_pattern(pattern)
    options = numbers.options()
    name = base.call("unstack", pattern, replacement, axis=axis or None, **options)

    def find(table: LeafTable) -> list[LeafRow]:
        rows, faults = [], []
        for path, match in base.match_arrays(compiled, table, name).items():
            info = table[path].info
            if not -len(info.shape) <= axis < len(info.shape):
                faults.append(f"{path}, {info}: it has no axis {axis}")
                continue
            size = info.shape[axis]
            listed = numbers.up_to(numbers.start + size * numbers.stride)
            if len(listed) != size:
                faults.append(
                    f"{path}: axis {axis} has {size} rows, but there are {len(listed)}"
                    f" numbers from {numbers.start} to {numbers.stop}"
                )
            templates = (replacement.replace(INDEX, str(i)) for i in listed)
            new = [
                (expand(match, template), _Taken(axis, row))
                for row, template in enumerate(templates)
            ]
            rows.append(LeafRow([path], new))
        if faults:
            raise errors.OptionError(
                f"{name} cannot unstack {errors.one_or_rows(faults)}"
            )
        return rows

    def undo() -> Transform:
        inverted = invert(pattern, replacement)
        return stack(*inverted, axis=axis, start=start, stride=stride, stop=stop)

    return RowTransform(name, find, undo)


@dataclasses.dataclass(frozen=True)
class _Taken(AxisMap):
    """Takes the array of a number along an axis."""

    axis: int
    number: int

    def __call__(self, *values: jax.Array) -> jax.Array:
        return jax.lax.index_in_dim(values[0], self.number, self.axis, keepdims=False)

    def origins(self, ndim: int) -> Origins:
        return [axis for axis in range(ndim) if axis != self.axis % ndim]

    def on(self, axes: Origins, ndim: int) -> AxisMap:
        return _Taken(axes.index(self.axis % ndim), self.number)
