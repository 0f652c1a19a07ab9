"""Transforms of shared leaves: `untie` copies a leaf, and `tie` is its inverse."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from flaxckpt import _arrays, _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base
from flaxckpt._transforms.base import NewLeaf, TableTransform, Transform
from flaxckpt._transforms.map_values import arrays
from flaxckpt._transforms.patterns import (
    check_replacement,
    compile_pattern,
    expand,
    invert,
)
from flaxckpt._types import LeafPath

_ADVICE = (
    "The pattern matches the leaves to remove, and the replacement is the path of an"
    " equal leaf."
)


@dataclasses.dataclass(frozen=True)
class _Untie(TableTransform):
    """Implements `untie`."""

    pattern: re.Pattern[str]
    replacement: str

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = base.matches(self.pattern, table)

        def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[NewLeaf]:
            for path, leaf in leaves.items():
                yield NewLeaf(path, path, leaf)
                yield NewLeaf(path, expand(matches[path], self.replacement), leaf)

        return base.replace(table, matches, act)

    def __str__(self) -> str:
        return base.call("untie", self.pattern.pattern, self.replacement)

    def inverse(self) -> Transform:
        return tie(*invert(self.pattern.pattern, self.replacement))


def untie(pattern: str, replacement: str) -> TableTransform:
    r"""Copies the matching leaves to new paths, as `copy` does; `tie` is the inverse.

    ```python
    untie("model/embed_tokens/weight", "lm_head/weight")
    ```

    A model whose parameters are not shared is then filled from a checkpoint that has
    shared parameters once. Moments are copied as well.

    Args:
        pattern: Regular expression on the whole leaf path.
        replacement: Path of the copy; `\1` stands for a group.

    Raises:
        OptionError: `pattern` is not a valid regular expression. When applied: it
            matches nothing, or two leaves get the same path.
    """
    return _Untie(compile_pattern(pattern), check_replacement(pattern, replacement))


@dataclasses.dataclass(frozen=True)
class _Tie(TableTransform):
    """Implements `tie`.

    Attributes:
        pattern: On whole leaf paths.
        replacement: The path of the leaf to keep.
        advice: What to do if leaves differ; None for that of `tie`.
    """

    pattern: re.Pattern[str]
    replacement: str
    advice: str | None = None

    def __call__(self, table: LeafTable) -> LeafTable:
        matches = base.matches(self.pattern, table)
        chosen = arrays(matches, table, str(self))
        kept = {path: expand(matches[path], self.replacement) for path in chosen}
        self._check(table, kept)
        equals: dict[LeafPath, list[LeafPath]] = {}
        for path, shared in kept.items():
            equals.setdefault(shared, []).append(path)

        def act(leaves: dict[LeafPath, Leaf], is_mirror: bool) -> Iterator[NewLeaf]:
            for shared, paths in equals.items():
                present = [path for path in (shared, *paths) if path in leaves]
                if not present:
                    continue
                leaf = leaves[present[0]]
                if not is_mirror:
                    others = [leaves[path] for path in paths]
                    advice = () if self.advice is None else (self.advice,)
                    leaf = _arrays.lazy.require_equal(leaf, others, *advice)
                yield NewLeaf(present[0], shared, leaf)

        return base.replace(table, {*kept, *equals}, act)

    def _check(self, table: LeafTable, kept: dict[LeafPath, LeafPath]) -> None:
        """Raises an error for leaves that have no equal leaf to be tied to."""
        faults = {}
        for path, shared in kept.items():
            if path == shared:
                faults[path] = "is tied to itself"
            elif shared in kept:
                faults[path] = f"is tied to {shared}, which is tied itself"
            elif shared not in table:
                faults[path] = f"is tied to {shared}, which does not exist"
            elif not _is_alike(table[path], table[shared]):
                faults[path] = (
                    f"is {table[path].info}, but {shared} is {table[shared].info}"
                )
        if faults:
            raise errors.OptionError(
                f"{self} cannot tie"
                f" {_util.humanize.count(len(faults), 'leaf', 'leaves')}:\n"
                + errors.rows(f"{path} {why}" for path, why in faults.items())
                + f"\n{self.advice or _ADVICE}"
            )

    def __str__(self) -> str:
        return base.call("tie", self.pattern.pattern, self.replacement)

    def inverse(self) -> Transform:
        return untie(*invert(self.pattern.pattern, self.replacement))


def _is_alike(leaf: Leaf, other: Leaf) -> bool:
    one, two = leaf.info, other.info
    return (one.shape, one.dtype, one.kind) == (two.shape, two.dtype, two.kind)


def tie(pattern: str, replacement: str) -> TableTransform:
    r"""Removes the matching leaves, each of which must equal the leaf at another path.

    ```python
    tie("lm_head/weight", "model/embed_tokens/weight")
    ```

    The values are compared as they are read, or at the save; NaN equals NaN. Of their
    moments the kept leaf's stay and the others are removed: they are moments of
    gradients that were computed apart, and no function of them is the moment of the
    shared parameter. The inverse is `untie`.

    Args:
        pattern: Regular expression on the whole leaf path of the leaves to remove.
        replacement: Path of the leaf to keep; `\1` stands for a group.

    Raises:
        OptionError: `pattern` is not a valid regular expression. When applied: it
            matches nothing, or the leaf to keep is missing or has another shape or
            type. When values are read: the leaves differ.
    """
    return make_tie(pattern, replacement)


def make_tie(
    pattern: str, replacement: str, advice: str | None = None
) -> TableTransform:
    """Returns `tie` with other advice for leaves that differ; see `tie`."""
    replacement = check_replacement(pattern, replacement)
    return _Tie(compile_pattern(pattern), replacement, advice)
