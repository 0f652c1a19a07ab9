"""Remaps leaves by a table of rows: names with indices, and forms of the values.

An index in only one of a row's two names is an axis of the arrays on the other side.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from flaxckpt import _util, errors
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms import base
from flaxckpt._transforms.axis_form import ELLIPSIS, Form, solve_sizes
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.indexed_names import IndexedName, Values, parse_name
from flaxckpt._transforms.mirrors import is_parameter, outside
from flaxckpt._transforms.patterns import compile_pattern, name_nearest
from flaxckpt._transforms.rows import LeafRow, apply_rows
from flaxckpt._types import LeafPath


class Row(NamedTuple):
    """A row of `remap`: leaves of one layout, and the same leaves of another.

    Attributes:
        source: The name in the checkpoint, with indices in braces.
        form: The axes of both, in einops notation; None if the values stay as they are.
        optional: True if the leaves may be missing.
    """

    source: str
    target: str
    form: str | None = None
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.source!r} -> {self.target!r}"


# ---- parsing ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RemapRule:
    """A parsed row, with the indices that only the source or only the target has."""

    row: Row
    source: IndexedName
    target: IndexedName
    form: Form | None
    gathered: tuple[str, ...]
    scattered: tuple[str, ...]

    @functools.cached_property
    def loop(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.source.axes if axis in self.target.axes)

    @functools.cached_property
    def words(self) -> dict[str, int]:
        """The sizes of the indices over words, which belong to this row alone."""
        return {**self.source.counts, **self.target.counts}

    def targets(
        self, loop: Values, sizes: Mapping[str, int]
    ) -> list[tuple[LeafPath, Callable[..., jax.Array] | None]]:
        """Returns the new paths, each with the function of the gathered leaves."""
        form = self.form and self.form.with_sizes(sizes)
        targets = []
        for scattered in _product(self.scattered, sizes):
            path = self.target.format({**loop, **scattered}, sizes)
            fn: Callable[..., jax.Array] | None = form
            if form is not None and (self.gathered or scattered):
                fn = _Computation(form, self.gathered, tuple(scattered.items()))
            targets.append((path, fn))
        return targets

    def inverse(self) -> Row:
        form = None if self.form is None else self.form.inverse().text
        return Row(self.row.target, self.row.source, form, self.row.optional)


def _parse(row: Row) -> RemapRule:
    source, target = parse_name(row.source), parse_name(row.target)
    gathered = tuple(axis for axis in source.axes if axis not in target.axes)
    scattered = tuple(axis for axis in target.axes if axis not in source.axes)
    form = None
    if row.form is not None:
        form = Form.parse(row.form, {})
    elif gathered and scattered:
        raise errors.OptionError(
            f"the row {row} needs a form, such as '{' '.join(gathered)} … ->"
            f" {' '.join(scattered)} …'"
        )
    elif gathered or scattered:
        axes = (*((axis,) for axis in gathered or scattered), ELLIPSIS)
        form = Form.of_axes(axes, axes)
    if form is not None:
        gathered = _leading(form.old, gathered, row, "source")
        scattered = _leading(form.new, scattered, row, "target")
        both = sorted(form.names & set(source.axes) & set(target.axes))
        if both:
            raise errors.OptionError(
                f"the form of the row {row} has the axis {both[0]}, which is an index"
                " of both names"
            )
    return RemapRule(row, source, target, form, gathered, scattered)


def _leading(
    axes: Sequence[tuple[str, ...]], indices: Sequence[str], row: Row, side: str
) -> tuple[str, ...]:
    """Returns the indices in the order of the form, which must begin with them."""
    first = [axis[0] for axis in axes[: len(indices)] if len(axis) == 1]
    if sorted(first) != sorted(indices):
        raise errors.OptionError(
            f"the {side} side of the form of the row {row} must begin with"
            f" {' '.join(indices)}, which only the name of the {side} has"
        )
    return tuple(first)


# ---- the table ----------------------------------------------------------------------


_Matches: TypeAlias = Mapping[tuple[int, ...], Mapping[tuple[int, ...], LeafPath]]
"""Values of the loop -> values of the gathered indices -> leaf path; of one row."""


@dataclasses.dataclass(frozen=True)
class Remap(TableTransform):
    """Implements `remap` and `make_remap`, whose arguments its fields are."""

    rules: tuple[RemapRule, ...]
    sizes: Mapping[str, int]
    rest: Literal["keep", "error"] = "keep"
    ignored: re.Pattern[str] | None = None
    ignored_by_inverse: re.Pattern[str] | None = None
    within: str | None = ""
    inverse_within: str | None = None
    name: str | None = None

    def __call__(self, table: LeafTable) -> LeafTable:
        leaf_rows = self._leaf_rows(table)
        if self.rest == "error":
            chosen = {path for row in leaf_rows for path in row.old}
            table = self._without_ignored(table, chosen)
        return apply_rows(table, leaf_rows, str(self), ties=())

    def _leaf_rows(self, table: LeafTable) -> list[LeafRow]:
        """Returns the rows of leaves that become leaves together, none missing."""
        counts = dict(self.sizes)
        matches = []
        for rule in self.rules:
            limits = {**self.sizes, **rule.words}
            of_rule: dict[tuple[int, ...], dict[tuple[int, ...], LeafPath]] = {}
            for path, leaf in table.items():
                values = rule.source.match(path, limits)
                if values is None or leaf.info.kind == "empty":
                    continue
                for axis, value in values.items():
                    if axis not in limits:
                        counts[axis] = max(counts.get(axis, 0), value + 1)
                loop = tuple(values[axis] for axis in rule.loop)
                gathered = tuple(values[axis] for axis in rule.gathered)
                of_rule.setdefault(loop, {})[gathered] = path
            matches.append(of_rule)
        missing = [
            _missing(rule, of_rule, {**counts, **rule.words})
            for rule, of_rule in zip(self.rules, matches, strict=True)
        ]
        if any(count for count, _ in missing):
            matched = {
                p for rows in matches for row in rows.values() for p in row.values()
            }
            raise self._missing_error(missing, [p for p in table if p not in matched])
        return self._fit(matches, counts, table)

    def _fit(
        self, matches: Sequence[_Matches], counts: Mapping[str, int], table: LeafTable
    ) -> list[LeafRow]:
        """Returns the rows of all rules, to whose forms all leaves must fit."""
        leaf_rows = []
        faults: dict[LeafPath, str] = {}
        for rule, of_rule in zip(self.rules, matches, strict=True):
            known = {**self.sizes, **rule.words}
            numbers = rule.source.axes if of_rule else ()
            known |= {axis: counts[axis] for axis in numbers if axis not in known}
            for loop, there in of_rule.items():
                paths = [there[key] for key in sorted(there)]
                values = dict(zip(rule.loop, loop, strict=True))
                try:
                    new = rule.targets(values, _solve(rule, paths, known, table))
                    leaf_rows.append(LeafRow(paths, new))
                except ValueError as error:
                    form = rule.form.text if rule.form else ""
                    faults[paths[0]] = f"{error}; the form is {form}"
        if faults:
            rows = (f"{path}, {table[path].info}: {faults[path]}" for path in faults)
            raise errors.OptionError(
                f"{_util.humanize.count(len(faults), 'leaf does', 'leaves do')} not fit"
                f" {self._title}:\n{errors.rows(rows)}"
            )
        return leaf_rows

    def _missing_error(
        self,
        missing: Sequence[tuple[int, Iterable[LeafPath]]],
        others: Sequence[LeafPath],
    ) -> errors.OptionError:
        count = sum(count for count, _ in missing)
        paths = itertools.chain.from_iterable(paths for _, paths in missing)
        shown = itertools.islice(paths, errors.ROWS_SHOWN)
        lines = [f"{path}{name_nearest(path, others)}" for path in shown]
        what = _util.humanize.count(count, "leaf is", "leaves are")
        return errors.OptionError(
            f"{self._title}: {what} missing:\n{errors.rows(lines, count)}"
        )

    @property
    def _title(self) -> str:
        return self.name or "remap"

    def _without_ignored(
        self, table: LeafTable, chosen: Container[LeafPath]
    ) -> LeafTable:
        shared = _common_root([rule.source.beginning for rule in self.rules])
        within = shared if self.within is None else self.within
        others = [
            path
            for path, leaf in outside(table).items()
            if path.startswith(within)
            and path not in chosen
            # Steps and keys are in other containers.
            and (path.startswith(shared) or is_parameter(leaf.info))
        ]
        ignored = {p for p in others if self.ignored and self.ignored.fullmatch(p)}
        extra = [path for path in others if path not in ignored]
        if extra:
            lines = (
                f"{path}: {table[path].info}"
                f"{self._why_extra(path) if i < errors.ROWS_SHOWN else ''}"
                for i, path in enumerate(extra)
            )
            raise errors.OptionError(
                f"{self._title} has no row for"
                f" {_util.humanize.count(len(extra), 'leaf', 'leaves')}:\n"
                + errors.rows(lines)
                + "\nDrop them first, if you do not need them: drop(pattern)."
                + ("" if self.name else ' Or keep them: rest="keep".')
            )
        return {path: leaf for path, leaf in table.items() if path not in ignored}

    def _why_extra(self, path: LeafPath) -> str:
        """Returns the reason why a leaf has no row, if there is a similar row."""
        for rule in self.rules:
            if rule.source.pattern.fullmatch(path):
                limits = (
                    f"{a}={self.sizes[a]}" for a in rule.source.axes if a in self.sizes
                )
                return f"; its index is beyond the sizes {', '.join(limits)}"
        return name_nearest(path, [rule.source.text for rule in self.rules])

    def __str__(self) -> str:
        if self.name is not None:
            return self.name
        rows = [
            tuple(r.row)
            if r.row.optional
            else tuple(r.row[: 2 + (r.row.form is not None)])
            for r in self.rules
        ]
        rest = None if self.rest == "keep" else self.rest
        ignored = self.ignored and self.ignored.pattern
        return base.call("remap", rows, rest=rest, ignored=ignored, **self.sizes)

    def inverse(self) -> Transform:
        return dataclasses.replace(
            self,
            rules=tuple(_parse(rule.inverse()) for rule in self.rules),
            ignored=self.ignored_by_inverse,
            ignored_by_inverse=self.ignored,
            within=self.inverse_within,
            inverse_within=self.within,
            name=self.name and f"inverse({self.name})",
        )


def _common_root(names: Sequence[str]) -> str:
    """Returns the longest container, with its slash, that all names are in."""
    parts = [name.split("/")[:-1] for name in names]
    root = ""
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        root += f"{level[0]}/"
    return root


def _product(axes: Sequence[str], sizes: Mapping[str, int]) -> Iterator[Values]:
    """Yields all values of some indices; never all at once: sizes may be wrong."""
    if not axes:
        yield {}
        return
    for value in range(sizes[axes[0]]):
        for others in _product(axes[1:], sizes):
            yield {axes[0]: value, **others}


def _missing(
    rule: RemapRule, matches: _Matches, counts: Mapping[str, int]
) -> tuple[int, Iterator[LeafPath]]:
    """Returns the number of missing leaves of a row, and an iterator over their paths.

    Sizes may be wrong, so the iterator does not depend on their product.
    """
    if any(axis not in counts for axis in rule.source.axes):
        needed = not rule.row.optional
        return int(needed), iter([rule.source.text] * needed)
    loops = len(matches)
    if not rule.row.optional:
        loops = math.prod(counts[axis] for axis in rule.loop)
    of_loop = math.prod(counts[axis] for axis in rule.gathered)
    count = loops * of_loop - sum(map(len, matches.values()))
    return count, _missing_paths(rule, matches, counts)


def _missing_paths(
    rule: RemapRule, matches: _Matches, counts: Mapping[str, int]
) -> Iterator[LeafPath]:
    loops: Iterable[tuple[int, ...]] = matches
    if not rule.row.optional:
        loops = (tuple(loop.values()) for loop in _product(rule.loop, counts))
    for values in loops:
        there = matches.get(values, {})
        loop = dict(zip(rule.loop, values, strict=True))
        for gathered in _product(rule.gathered, counts):
            if tuple(gathered.values()) not in there:
                yield rule.source.format({**loop, **gathered}, counts)


def _solve(
    rule: RemapRule,
    paths: Sequence[LeafPath],
    known: Mapping[str, int],
    table: LeafTable,
) -> Mapping[str, int]:
    """Returns the sizes of all axes of the form of leaves, which must be alike."""
    if rule.form is None:
        return known
    forms = {(table[path].info.shape, table[path].info.dtype) for path in paths}
    if len(forms) > 1:
        raise ValueError("the leaves to join have different shapes or types")
    [(shape, _)] = forms
    return solve_sizes(rule.form.old[len(rule.gathered) :], shape, known)


# ---- values -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Computation:
    """The function of gathered leaves for the new leaf with the `picked` indices."""

    form: Form
    gathered: tuple[str, ...]
    picked: tuple[tuple[str, int], ...]

    def __call__(self, *values: jax.Array) -> jax.Array:
        form, x = self.form, values[0]
        if self.gathered:
            counts = (form.sizes[axis] for axis in self.gathered)
            x = jnp.stack(values).reshape(*counts, *x.shape)
        late = []
        for axis, number in self.picked:
            # An axis of the array itself is indexed before the others are rearranged.
            if not self.gathered and (axis,) in form.old:
                at = form.position(axis)
                x = jax.lax.index_in_dim(x, number, at, keepdims=False)
                form = form.without(axis)
            else:
                late.append(number)
        return form(x)[tuple(late)]


# ---- the transform ------------------------------------------------------------------


def remap(
    rows: Iterable[Row | tuple[str, ...]],
    *,
    rest: Literal["keep", "error"] = "keep",
    ignored: str | None = None,
    **sizes: int,
) -> TableTransform:
    r"""Remaps leaves, and their moments, by a table of names and forms.

    ```python
    remap(
        [
            ("embed/weight", "params/embed/embedding"),
            ("layers/{i}/q/weight", "params/layers_{i}/q/kernel", "(h d) e -> e h d"),
            ("layers/{i}/up/weight", "params/mlp/up/kernel", "i f e -> i e f"),
            ("qkv/weight", "params/{c:q|k|v}/kernel", "(c o) e -> c e o"),
        ],
        h=8,
    )
    ```

    The names are leaf paths with indices in braces: `{i}` is a number, `{i+1}` a number
    that begins at 1, and `{c:q|k|v}` one of several words. `{(b r)}` is a number made
    of two indices, of which `r` runs faster: the layers of blocks that repeat. A number
    has the same size in all rows, and all values of an index must be there.

    An index in the source only is an axis of the target's array, as for layers that are
    stacked; an index in the target only is an axis of the source's array. The side of
    the form that belongs to the name with the index begins with it. Two rows with the
    same source copy it; of two rows with the same target, the leaves must be equal.

    Args:
        rows: For each kind of leaf the name in the checkpoint, the name in the state
            and perhaps the form: their axes in einops notation. A `Row` can also be
            optional.
        rest: `"error"` to refuse arrays without a row. Moments follow their parameters,
            and need none; nor do counters and PRNG keys in other containers than all
            rows. The inverse refuses leaves in the containers of all targets only.
        ignored: With `rest="error"`, a regular expression on whole leaf paths: these
            leaves are left out.
        sizes: The sizes of axes that shapes do not determine, and of indices.

    Raises:
        OptionError: A row is not valid. When applied: leaves are missing, or do not fit
            their form.
    """
    return make_remap([*rows], sizes, rest=rest, ignored=ignored)


def make_remap(
    rows: Sequence[Row | tuple[str, ...]],
    sizes: Mapping[str, int],
    *,
    rest: Literal["keep", "error"] = "keep",
    ignored: str | None = None,
    ignored_by_inverse: str | None = None,
    inverse_within: str | None = None,
    name: str | None = None,
) -> TableTransform:
    """Returns `remap` with a name for messages.

    `inverse_within` begins the paths of all leaves that need a row of the inverse; None
    stands for the containers that all targets share.
    """
    listed = [_check_row(row) for row in rows]
    if not listed:
        raise errors.OptionError("remap needs at least one row")
    _util.arguments.check_choice("rest", rest, ("keep", "error"))
    checked = {
        axis: _util.arguments.check_int(axis, size, least=1)
        for axis, size in sizes.items()
    }
    rules = tuple(map(_parse, listed))
    for rule in rules:
        for side in (rule.source, rule.target):
            checked |= {a: rule.words[a] for a in side.inner if a in rule.words}
            lacking = [axis for axis in side.inner if axis not in checked]
            if lacking:
                raise errors.OptionError(
                    f"the name {side.text!r} needs the size of {lacking[0]}: pass"
                    f" {lacking[0]}=…"
                )
    forth, back = (
        None if pattern is None else compile_pattern(pattern)
        for pattern in (ignored, ignored_by_inverse)
    )
    return Remap(
        rules, checked, rest, forth, back, inverse_within=inverse_within, name=name
    )


def _check_row(row: Any) -> Row:
    is_row = isinstance(row, tuple | list) and 2 <= len(row) <= 4
    if not is_row or not all(isinstance(name, str) for name in row[:2]):
        raise errors.OptionError(
            f"a row must be (source, target) or (source, target, form), got {row!r:.80}"
        )
    return Row(*row)
