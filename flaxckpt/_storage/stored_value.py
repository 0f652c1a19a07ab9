"""A value in an object store, with its generation, and a file that was just written."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class StoredValue(NamedTuple):
    """A value in a store.

    Attributes:
        value: The bytes.
        generation: Changes with the value.
    """

    value: bytes
    generation: bytes


class WrittenMarker(NamedTuple):
    """A file that was just written.

    Attributes:
        is_new: False if a store had a file of this name before.
        undo: Removes the file; in a store, only if nobody has written it since.
    """

    is_new: bool
    undo: Callable[[], None]
