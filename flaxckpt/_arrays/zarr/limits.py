"""Limits of arrays, shared by writer and reader."""

from __future__ import annotations

from typing import Any

MAX_AXES = 32
"""Maximal number of axes of a stored array: TensorStore's limit."""

MAX_SIZE = 2**48
"""Exclusive bound on the elements along an axis."""

MAX_CHUNKS = 2**20
"""Maximal number of chunks of an array; more names would take gigabytes."""


def sizes(value: Any) -> tuple[int, ...]:
    """Returns the shape in a JSON value.

    Raises:
        ValueError: `value` is not a list of sizes within the limits.
    """
    is_shape = isinstance(value, list) and len(value) <= MAX_AXES
    for size in value if is_shape else ():
        is_shape = is_shape and type(size) is int and 0 <= size < MAX_SIZE
    if not is_shape:
        raise ValueError(f"{str(value)[:80]} is no shape")
    return tuple(value)
