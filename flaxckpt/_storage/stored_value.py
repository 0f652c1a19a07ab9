"""Values in an object store, entries of a directory, files that were just written."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class StoredValue(NamedTuple):
    """A value in a store; `generation` changes with it."""

    value: bytes
    generation: bytes


class WalkedEntry(NamedTuple):
    """An entry below a directory; a link is both a link and what it leads to."""

    path: str
    is_directory: bool
    is_file: bool
    is_link: bool


class WrittenMarker(NamedTuple):
    """A file that was just written; `is_new` is False if a store had it before.

    `undo` removes the file; in a store, only if nobody has written it since.
    """

    is_new: bool
    undo: Callable[[], None]
