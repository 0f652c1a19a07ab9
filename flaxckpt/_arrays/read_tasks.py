"""Reads of leaves in progress: tasks to run on threads, and their result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flaxckpt import _storage, _util
from flaxckpt._zarr.metadata import Array, Region

THREADS = 8
"""Threads that read files. More than cores: some wait for the disk."""

_THREADS_IN_STORES = 32
"""Threads that read objects: they mostly wait for the network."""

_SMALL_GAP_BYTES = 2**16
_SMALL_GAP_IN_STORES_BYTES = 2**22
"""Smaller gaps between bytes are read, too: another request would take longer."""


class Reading:
    """A read of a leaf in progress.

    Args:
        tasks: Tasks to run first, in any order and on any thread.
        arrays: Returns the values after all tasks: region -> values. `result` raises
            ValueError and OSError of `arrays` and of tasks.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], None]],
        arrays: Callable[[], Mapping[Region, Array]],
    ) -> None:
        self._errors: list[Exception] = []
        # No methods of this object: a cycle would hold the values, perhaps the size of
        # the whole state, until the garbage collector runs.
        self.tasks = tuple(
            [functools.partial(_attempt, task, self._errors) for task in tasks]
        )
        self._arrays = arrays

    def result(self) -> Mapping[Region, Array]:
        """Returns the values: region -> values.

        Raises:
            ValueError, OSError: Values are missing or damaged.
        """
        if self._errors:
            raise self._errors[0]
        return self._arrays()


def _attempt(task: Callable[[], None], errors: list[Exception]) -> None:
    """Runs a task; adds an error that the reading is to raise to `errors`."""
    try:
        task()
    except (ValueError, OSError) as error:
        errors.append(error)
    except MemoryError:
        errors.append(_util.memory.TooLargeError())


def failed_reading(error: Exception) -> Reading:
    """Returns a reading with an error as its result."""

    def fail() -> None:
        raise error

    return Reading([fail], dict)


def run(readings: Sequence[Reading], *, in_store: bool = False) -> None:
    """Runs the tasks of all readings, in files or in an object store."""
    tasks = [task for reading in readings for task in reading.tasks]
    threads = _THREADS_IN_STORES if in_store else THREADS
    _util.threads.each(lambda task: task(), tasks, threads=threads)


def small_gap(path: Path) -> int:
    """Returns the bytes below which a gap between values is read, too."""
    if _storage.of(path).costs_requests:
        return _SMALL_GAP_IN_STORES_BYTES
    return _SMALL_GAP_BYTES
