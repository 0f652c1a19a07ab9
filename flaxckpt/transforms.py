"""Transforms: what to change between a state and its checkpoint.

A transform takes a leaf table and gives another. It touches names and infos, never the
values: those follow while they are moved.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from flaxckpt import _dtypes, errors
from flaxckpt._info import Leaf, LeafTable

__all__ = ["Transform", "cast"]

Transform: TypeAlias = Callable[[LeafTable], LeafTable]
"""Leaf table in, leaf table out."""


def apply(transforms: Iterable[Transform], table: LeafTable) -> LeafTable:
    """The table after all `transforms`, one after another."""
    for transform in transforms:
        table = transform(table)
    return table


def cast(pattern: str, dtype: Any, *, lossy: bool = False) -> Transform:
    """Changes the element type of the floating leaves that match.

    ```python
    save(path, state, transforms=[cast("params/.*", "bfloat16")])
    ```

    Args:
        pattern: Regular expression on the whole leaf path.
        dtype: The new type, by name or as numpy or jax have it. If it is a floating
            type, floating leaves that match get it, and others stay as they are.
        lossy: Also change integers to floats, floats to integers, and integers to
            narrower ones. Values are then cut as numpy cuts them.

    Raises:
        OptionError: `pattern` is no regular expression, or `dtype` no element type.
            When the transform is applied: nothing matches, or a leaf that matches
            cannot be cast without `lossy`.

    Source: `save_dtype` and `restore_dtype` of T5X, `float_dtype` of fjformer.
    """
    wanted = dtype if isinstance(dtype, str) else _dtypes.name(dtype)
    wanted = _dtypes.name(_dtypes.to_numpy(wanted))
    compiled = compile_pattern(pattern)

    def transform(table: LeafTable) -> LeafTable:
        matching = match(compiled, table)
        faults = {
            path: str(table[path].info)
            for path in matching
            if not lossy and not _is_safe(table[path], wanted)
        }
        if faults:
            raise errors.OptionError(
                f"cast({pattern!r}, {wanted!r}) would lose values of integers:\n"
                + errors.rows(
                    f"{path}: found {found}" for path, found in faults.items()
                )
                + "\nPass lossy=True if that is what you want."
            )
        return {
            path: _cast(leaf, wanted, lossy) if path in matching else leaf
            for path, leaf in table.items()
        }

    return transform


def _is_safe(leaf: Leaf, wanted: str) -> bool:
    found = leaf.info.dtype
    if leaf.info.kind != "array" or found is None:
        return True
    kinds = (_dtypes.kind(found), _dtypes.kind(wanted))
    return kinds[1] == "float" or _dtypes.restores_as(found, wanted)


def _cast(leaf: Leaf, wanted: str, lossy: bool) -> Leaf:
    found = leaf.info.dtype
    if leaf.info.kind != "array" or found is None:
        return leaf
    if not lossy and not _dtypes.restores_as(found, wanted):
        return leaf
    return dataclasses.replace(
        leaf, info=dataclasses.replace(leaf.info, dtype=wanted, weak_type=False)
    )


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern on whole leaf paths.

    Raises:
        OptionError: It is no regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise errors.OptionError(
            f"{pattern!r} is no regular expression: {error}"
        ) from None


def match(pattern: re.Pattern[str], table: Iterable[str]) -> set[str]:
    """The leaf paths that `pattern` matches as a whole.

    Raises:
        OptionError: There are none.
    """
    paths = list(table)
    found = {path for path in paths if pattern.fullmatch(path)}
    if not found:
        near = difflib.get_close_matches(pattern.pattern, paths, n=3, cutoff=0.3)
        raise errors.OptionError(
            f"the pattern {pattern.pattern!r} matches no leaf"
            + (f"; the nearest are {', '.join(near)}" if near else "")
        )
    return found
