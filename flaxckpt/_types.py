"""Type aliases shared by all modules, and what their classes share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeAlias, TypeVar, dataclass_transform

_T = TypeVar("_T")

PyTree: TypeAlias = Any
"""Any tree of containers that jax flattens, or a Flax NNX object."""

PathLike: TypeAlias = str | os.PathLike[str]
"""A local path (relative is fine) or a `file://` URL."""

LeafPath: TypeAlias = str
"""The path of a leaf in its state: `params/Dense_0/kernel`."""

Shape: TypeAlias = tuple[int, ...]

JSON: TypeAlias = (
    "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def row(cls: type[_T]) -> type[_T]:
    """Makes a dataclass that is frozen for type checkers only.

    For classes with an instance for each leaf: to make a frozen one takes eight times
    as long, which was a quarter of the time to plan a save.
    """
    return dataclasses.dataclass(slots=True, unsafe_hash=True)(cls)


class Closing:
    """An object that is closed at the end of a `with` block."""

    def close(self) -> None:
        """Ends the use of the object."""
        raise NotImplementedError

    def _close_after(self, error: BaseException) -> None:
        """Ends the use of the object after `error` in the block."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        # `sys.exit()`, and closing a generator with the block in it, are no failures.
        is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is None or is_exit or isinstance(error, GeneratorExit):
            self.close()
        else:
            self._close_after(error)
