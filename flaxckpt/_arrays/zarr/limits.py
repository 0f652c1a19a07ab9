"""Limits of arrays, which the writer and the reader share."""

from __future__ import annotations

from typing import Any

MAX_AXES = 32
"""Axes of an array as it is stored: TensorStore's limit."""

MAX_SIZE = 2**48
"""Elements along one axis, at least one more than any array has."""

MAX_CHUNKS = 2**20
"""Chunks of one array; the names of more would take gigabytes."""


def sizes(value: Any) -> tuple[int, ...]:
    """Returns the shape that a JSON value holds.

    Raises:
        ValueError: `value` is not a list of sizes within the limits.
    """
    is_shape = isinstance(value, list) and len(value) <= MAX_AXES
    for size in value if is_shape else ():
        is_shape = is_shape and type(size) is int and 0 <= size < MAX_SIZE
    if not is_shape:
        raise ValueError(f"{str(value)[:80]} is no shape")
    return tuple(value)
