"""Transforms of shared leaves: `untie` copies a leaf, and `tie` is its inverse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flaxckpt import _util, errors
from flaxckpt._state.leaf import Leaf, LeafTable
from flaxckpt._transforms import base
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._transforms.patterns import (
    check_replacement,
    compile_pattern,
    expand,
    invert,
)
from flaxckpt._transforms.rows import LeafRow, RowTransform
from flaxckpt._types import LeafPath

_ADVICE = (
    "The pattern matches the leaves to remove, and the replacement is the path of an"
    " equal leaf."
)


def untie(pattern: str, replacement: str) -> TableTransform:
    r"""Copies the matching leaves to new paths, as `copy` does; `tie` is the inverse.

    ```python
    untie("model/embed_tokens/weight", "lm_head/weight")
    ```

    A model whose parameters are not shared is then filled from a checkpoint that has
    shared parameters once. Moments are copied as well. Arguments and errors are those
    of `rename`.
    """
    compiled = compile_pattern(pattern)
    check_replacement(pattern, replacement)

    def find(table: LeafTable) -> Iterator[LeafRow]:
        for path, match in base.matches(compiled, table).items():
            yield LeafRow([path], [(path, None), (expand(match, replacement), None)])

    def undo() -> Transform:
        return tie(*invert(pattern, replacement))

    return RowTransform(base.call("untie", pattern, replacement), find, undo)


def tie(pattern: str, replacement: str) -> TableTransform:
    r"""Removes the matching leaves, each of which must equal the leaf at another path.

    ```python
    tie("lm_head/weight", "model/embed_tokens/weight")
    ```

    The values are compared as they are read, or at the save; NaN equals NaN. Of their
    moments the kept leaf's stay and the others are removed: no function of them is the
    moment of the shared parameter. The inverse is `untie`.

    Args:
        pattern: Regular expression on the whole leaf path of the leaves to remove.
        replacement: Path of the leaf to keep; `\1` stands for a group.

    Raises:
        OptionError: `pattern` is not valid. When applied: it matches nothing, or the
            leaf to keep is missing or has another shape or type. When values are read:
            the leaves differ.
    """
    return make_tie(pattern, replacement)


def make_tie(
    pattern: str, replacement: str, advice: str | None = None
) -> TableTransform:
    """Returns `tie` with other advice for leaves that differ; see `tie`."""
    check_replacement(pattern, replacement)
    compiled = compile_pattern(pattern)
    name = base.call("tie", pattern, replacement)

    def find(table: LeafTable) -> Iterator[LeafRow]:
        matches = base.match_arrays(compiled, table, name)
        kept = {path: expand(match, replacement) for path, match in matches.items()}
        if faults := _find_faults(table, kept):
            raise errors.OptionError(
                f"{name} cannot tie"
                f" {_util.humanize.count(len(faults), 'leaf', 'leaves')}:\n"
                + errors.rows(f"{path} {why}" for path, why in faults.items())
                + f"\n{advice or _ADVICE}"
            )
        for path in (*dict.fromkeys(kept.values()), *kept):
            yield LeafRow([path], [(kept.get(path, path), None)])

    def undo() -> Transform:
        return untie(*invert(pattern, replacement))

    return RowTransform(name, find, undo, ties=(advice,) if advice else ())


def _find_faults(
    table: LeafTable, kept: Mapping[LeafPath, LeafPath]
) -> dict[LeafPath, str]:
    """Returns why leaves to remove have no equal leaf to be tied to."""
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
    return faults


def _is_alike(leaf: Leaf, other: Leaf) -> bool:
    one, two = leaf.info, other.info
    return (one.shape, one.dtype, one.kind) == (two.shape, two.dtype, two.kind)
