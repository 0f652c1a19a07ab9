"""Names of the files with the states of iterators."""

from __future__ import annotations

import re

from flaxckpt import _util

STATE = re.compile(r"process_(\d+)-of-(\d+)\.json")
SHARED = "process_0.json"
"""The state that all processes share, as MaxText saves it of an elastic iterator."""


def state_names(iterators: int) -> list[str]:
    """Returns the file names of this process, numbered by parts of the data."""
    processes = _util.processes.process_count()
    return [
        f"process_{_util.processes.process_index() + i * processes}"
        f"-of-{processes * iterators}.json"
        for i in range(iterators)
    ]


def is_state_name(name: str) -> bool:
    return name == SHARED or STATE.fullmatch(name) is not None
