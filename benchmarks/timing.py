"""Fair turns: fresh directories, an idle disk, and a rotating order."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MANY_FILES = 500
_FORGET_SECS = 6.0
"""Seconds after the removal of many files. For five seconds, ext4 without a journal
gives none of their inodes to new files, and looks at each again for each new file."""


class Turn(NamedTuple):
    """One contender's turn.

    Attributes:
        contender: The name of the contender.
        is_first: True for the contender's first turn, whose result is checked.
        is_timed: True if the turn counts.
    """

    contender: str
    is_first: bool
    is_timed: bool


def turns(
    contenders: Sequence[str], rounds: int, *, warm_up: bool = True
) -> Iterator[Turn]:
    """Gives every contender a turn in each round, in an order that rotates.

    Args:
        contenders: The names of the contenders.
        rounds: The number of rounds that count.
        warm_up: True to add a first round that does not count.
    """
    for number in range(rounds + warm_up):
        first = (number - warm_up) % max(1, len(contenders))
        for name in (*contenders[first:], *contenders[:first]):
            yield Turn(name, number == 0, number > 0 or not warm_up)


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A new directory on an idle disk, removed at the end."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    try:
        settle()
        yield directory
    finally:
        files = sum(len(names) for _, _, names in os.walk(directory))
        shutil.rmtree(directory)
        settle()
        if files > _MANY_FILES:
            time.sleep(_FORGET_SECS)


def settle() -> None:
    """Collects garbage and writes all dirty pages, before the next timed section."""
    gc.collect()
    os.sync()


def measure(
    action: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> tuple[T, float]:
    """Returns the result of `action` and its duration in seconds."""
    start = time.perf_counter()
    value = action(*args, **kwargs)
    return value, time.perf_counter() - start
