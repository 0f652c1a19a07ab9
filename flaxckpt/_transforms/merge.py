"""Adds the leaves of another checkpoint to a leaf table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from flaxckpt import _state, _steps, _storage, _util, errors
from flaxckpt._formats import locate
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms import base
from flaxckpt._transforms.base import TableTransform, Transform
from flaxckpt._types import PathLike


@dataclasses.dataclass(frozen=True)
class _Merge(TableTransform):
    path: str
    step: int | None
    transforms: tuple[Transform, ...]
    on_conflict: Literal["error", "first", "second"]
    wanted: LeafTable | None = None

    def with_wanted(self, wanted: LeafTable | None) -> Transform:
        return dataclasses.replace(self, wanted=wanted)

    def __call__(self, table: LeafTable) -> LeafTable:
        stored = locate.open_checkpoint(self.path, self.step)
        stored.check_items(stored.items.trees)
        mine = _state.boxes.with_boxes(stored.table, stored.structure)
        other = base.apply(self.transforms, mine, self.wanted)
        twice = [
            path for path in other if path in table and table[path].info.kind != "empty"
        ]
        if twice and self.on_conflict == "error":
            raise errors.OptionError(
                f"{_util.humanize.count(len(twice), 'leaf', 'leaves')} of"
                f" {stored.metadata.path} would be merged over others:\n"
                + errors.rows(f"{path}: {other[path].info}" for path in twice)
                + '\nDrop or rename some, or pass on_conflict="first" or "second".'
            )
        if self.on_conflict == "first":
            return {**other, **table}
        return {**table, **other}

    def __str__(self) -> str:
        conflict = None if self.on_conflict == "error" else self.on_conflict
        inner = [*base.describe(self.transforms)] or None
        return base.call(
            "merge", self.path, step=self.step, transforms=inner, on_conflict=conflict
        )


def merge(
    path: PathLike,
    *,
    step: int | None = None,
    transforms: Sequence[Transform] = (),
    on_conflict: Literal["error", "first", "second"] = "error",
) -> TableTransform:
    """Adds the leaves of another checkpoint, in any supported format.

    ```python
    load("vision", state, transforms=[merge("text.safetensors", transforms=[...])])
    ```

    Args:
        path: A checkpoint, or a run directory.
        step: The step to read; the newest by default.
        transforms: Applied to the other checkpoint first.
        on_conflict: If both have a leaf, raise, or keep the leaf of one checkpoint.

    Raises:
        OptionError: When applied: both checkpoints have a leaf, and `on_conflict` is
            "error".
        CheckpointError: When applied: the checkpoint does not exist, or is damaged.
    """
    allowed = ("error", "first", "second")
    _util.arguments.check_choice("on_conflict", on_conflict, allowed)
    resolved = str(_storage.paths.resolve(path))
    step = None if step is None else _steps.names.check(step)
    return _Merge(resolved, step, base.check(transforms), on_conflict)
