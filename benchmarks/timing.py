"""Fair turns: fresh directories, a quiet disk, and nobody always first."""

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


class Turn(NamedTuple):
    """One contender's turn.

    Attributes:
        contender: Whose.
        is_first: Whether it is the contender's first, whose result is checked.
        is_timed: Whether it counts.
    """

    contender: str
    is_first: bool
    is_timed: bool


def turns(
    contenders: Sequence[str], rounds: int, *, warm_up: bool = True
) -> Iterator[Turn]:
    """Gives every contender a turn in each round, in an order that rotates.

    Args:
        contenders: Their names.
        rounds: How many rounds count.
        warm_up: Whether a round that does not count comes first.
    """
    for number in range(rounds + warm_up):
        first = (number - warm_up) % max(1, len(contenders))
        for name in (*contenders[first:], *contenders[:first]):
            yield Turn(name, number == 0, number > 0 or not warm_up)


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A new directory, removed at the end, with nothing left for the disk to do."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    try:
        settle()
        yield directory
    finally:
        shutil.rmtree(directory)
        settle()


def settle() -> None:
    """Leaves no garbage and no unwritten page for the section that is timed next."""
    gc.collect()
    os.sync()


def timed(action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What `action` returns, and how many seconds it took."""
    start = time.perf_counter()
    value = action(*args, **kwargs)
    return value, time.perf_counter() - start
