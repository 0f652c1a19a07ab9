"""Leaves of another checkpoint beside those of the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from flaxckpt import _steps, _storage, errors
from flaxckpt._state.leaf import LeafTable
from flaxckpt._types import LeafPath, PathLike
from flaxckpt.formats import _locate
from flaxckpt.transforms import _base
from flaxckpt.transforms._base import TableTransform, Transform


@dataclasses.dataclass(frozen=True)
class _Merge(TableTransform):
    """See `merge`."""

    path: str
    step: int | None
    transforms: tuple[Transform, ...]
    on_conflict: Literal["error", "first", "second"]
    wanted: LeafTable | None = None

    def with_wanted(self, wanted: LeafTable | None) -> Transform:
        return dataclasses.replace(self, wanted=wanted)

    def __call__(self, table: LeafTable) -> LeafTable:
        stored = _locate.open_checkpoint(self.path, self.step)
        other = _base.apply(self.transforms, stored.table, self.wanted)
        twice = [path for path in other if _has_leaf(table, path)]
        if twice and self.on_conflict == "error":
            raise errors.OptionError(
                f"{len(twice)} leaves of {stored.metadata.path} are there already:\n"
                + errors.rows(f"{path}: {other[path].info}" for path in twice)
                + '\nDrop or rename some, or pass on_conflict="first" or "second".'
            )
        if self.on_conflict == "first":
            return {**other, **table}
        return {**table, **other}

    def __str__(self) -> str:
        conflict = None if self.on_conflict == "error" else self.on_conflict
        inner = [*_base.describe(self.transforms)] or None
        return _base.call(
            "merge", self.path, step=self.step, transforms=inner, on_conflict=conflict
        )


def _has_leaf(table: LeafTable, path: LeafPath) -> bool:
    return path in table and table[path].info.kind != "empty"


def merge(
    path: PathLike,
    *,
    step: int | None = None,
    transforms: Sequence[Transform] = (),
    on_conflict: Literal["error", "first", "second"] = "error",
) -> TableTransform:
    """Adds the leaves of another checkpoint, in whichever format.

    ```python
    load("vision", state, transforms=[merge("text.safetensors", transforms=[...])])
    ```

    Args:
        path: A checkpoint, or a run directory.
        step: Which step of it; by default the newest.
        transforms: What to change in it first.
        on_conflict: Which checkpoint wins where both have a leaf.

    Raises:
        OptionError: When applied: both have a leaf, and neither shall win.
        CheckpointError: When applied: there is no such checkpoint, or it is damaged.
    """
    if on_conflict not in ("error", "first", "second"):
        raise errors.OptionError(
            f"on_conflict must be 'error', 'first' or 'second', got {on_conflict!r}"
        )
    resolved = str(_storage.local.resolve(path))
    step = None if step is None else _steps.names.check(step)
    return _Merge(resolved, step, _base.checked(transforms), on_conflict)
