"""Values in an object store, entries of a directory, files that were just written."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class StoredValue(NamedTuple):
    """A value in a store; `generation` changes with it."""

    value: bytes
    generation: bytes


class WalkedEntry(NamedTuple):
    """An entry below a directory, with its path there.

    A link is both a link and what it leads to.
    """

    path: str
    is_directory: bool
    is_file: bool
    is_link: bool


class WrittenMarker(NamedTuple):
    """A file that was just written.

    Attributes:
        is_new: False if a store had a file of this name before.
        undo: Removes the file; in a store, only if nobody has written it since.
    """

    is_new: bool
    undo: Callable[[], None]
