"""A value in an object store, with its generation."""

from __future__ import annotations

from typing import NamedTuple


class StoredValue(NamedTuple):
    """A value in a store.

    Attributes:
        value: The bytes.
        generation: Changes with the value.
    """

    value: bytes
    generation: bytes
