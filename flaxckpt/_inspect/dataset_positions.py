"""Reads the positions of dataset iterators from the integers in their states."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt import _formats, _util, datasets


class Position(NamedTuple):
    """The positions of the dataset iterators at a step.

    Attributes:
        step: The step; None for a checkpoint outside of a run.
        type: The class of the iterator; empty if not recorded.
        processes: The number of processes that saved a state.
        bytes: The size of all states; None in object stores.
        values: Integers in the state of the first iterator, by name.
    """

    step: int | None
    type: str
    processes: int
    bytes: int | None
    values: Mapping[str, int]


_MAX_BYTES = 2**20
"""Limit on the states of a step: larger states are not read, only their size shown."""

_MOST_VALUES = 4
_MOST_VISITED = 10_000


def read(path: Path, step: int | None) -> Position | None:
    """Returns the dataset position of a step, or None without one.

    Raises DamagedCheckpointError if it is damaged; OSError if it cannot be read for
    now.
    """
    item = _formats.items.find_dataset(path)
    files = [] if item is None else [file for file in item.iterdir() if file.is_file()]
    sizes = [file.stat().st_size for file in files]
    if not sizes:
        return None
    if sum(sizes) > _MAX_BYTES:
        return Position(step, "", 0, sum(sizes), {})
    stored = _formats.native.read_dataset(path, {})
    description = _parse(stored.pop(datasets.DESCRIPTION, b"{}"))
    states = sorted(name for name in stored if name.startswith("process_"))
    values = dict(_numbers(_parse(stored[states[0]]))) if states else {}
    type_name = description.get("type") if isinstance(description, Mapping) else None
    return Position(
        step,
        type_name if isinstance(type_name, str) else "",
        len(states),
        sum(sizes),
        values,
    )


def _parse(content: bytes) -> Any:
    try:
        _util.json_limits.check(content)
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _numbers(state: Any) -> Iterator[tuple[str, int]]:
    """Yields the first integers in a state, nearest to its root first."""
    queue: list[tuple[str, Any]] = [("", state)]
    count = 0
    for name, value in queue:  # the loop appends to the list
        if type(value) is int:
            yield name or "state", value
            count += 1
            if count == _MOST_VALUES:
                return
        elif isinstance(value, dict | list) and len(queue) < _MOST_VISITED:
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            queue += [(f"{name}.{key}" if name else str(key), v) for key, v in inner]
