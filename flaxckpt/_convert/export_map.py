"""The changes of an export: the inverse of a map, by name or as transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from flaxckpt import errors
from flaxckpt._formats import locate
from flaxckpt._maps import named
from flaxckpt._state.leaf import LeafTable
from flaxckpt._transforms import base as _transforms
from flaxckpt._types import LeafPath, PathLike
from flaxckpt.transforms import Transform, cast


class NameFinder(Protocol):
    """Returns the map of a published model to the leaves of a checkpoint."""

    def __call__(
        self,
        name: str,
        config: Mapping[str, Any] | None,
        table: LeafTable,
        /,
        *,
        target: str | None,
        prefix: LeafPath | None,
    ) -> Sequence[Transform]:
        """See `_maps.named.find_for_export`."""
        ...


def find_changes(
    map: str | Sequence[Transform],
    find: NameFinder,
    config: Mapping[str, Any] | None,
    invert: Callable[[tuple[Transform, ...]], Transform],
    *,
    run: PathLike,
    step: int | None,
    before: Sequence[Transform],
    target: str | None,
    prefix: LeafPath | None,
    dtype: Any,
) -> list[Transform]:
    """Returns the transforms from the leaves of a checkpoint to a published model.

    `map` is the name of a family, which `find` looks up, or `auto`, or the transforms
    from the model; the changes `before` its inverse are applied first. Raises
    OptionError if the name is unknown or no map fits, or if `target` or `prefix` was
    passed with transforms.
    """
    before = _transforms.check(before)
    if isinstance(map, str):
        named.check_name("map", map)
        table = _transforms.apply(before, locate.open_checkpoint(run, step).table)
        map = find(map, config, table, target=target, prefix=prefix)
    elif target is not None or prefix is not None:
        raise errors.OptionError("target and prefix need the name of a map, not a list")
    casts = () if dtype is None else (cast(".*", dtype),)
    return [*before, invert(_transforms.check(map, "map")), *casts]
