"""The protocol of saveable iterators, and small iterator classes for users."""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from flaxckpt import _util, errors

Batch = TypeVar("Batch")


@runtime_checkable
class SaveableIterator(Protocol):
    """The protocol of iterators with a saveable state, from grain.

    The state may nest dicts, lists and tuples of numbers, strings, bytes, numpy arrays
    and torch tensors.

    A true attribute `elastic` says that the state is the same on all processes, and
    fits any number of processes. With `get_shard_states()`, a list of the states of the
    iterator's shards, and `set_shard_states(list)`, shards may move between processes:
    process K of N has the shards K, K + N, and so on.
    """

    def get_state(self) -> Any:
        """Returns the position after the last returned batch."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Moves to a position returned by `get_state`."""
        ...


class StepIndexed(Generic[Batch]):
    """Batches computed from their index, which forms the whole state.

    ```python
    batches = StepIndexed(lambda i: make_batch(seed=0, index=i))
    ```

    Args:
        fn: Returns batch `i`; must be deterministic.
        start: Index of the first batch.

    Raises:
        OptionError: `start` is not a whole number from 0.
    """

    __module__ = "flaxckpt.datasets._iterators"  # checkpoints record this path

    elastic = True

    def __init__(self, fn: Callable[[int], Batch], *, start: int = 0) -> None:
        if not callable(fn):
            raise errors.OptionError(
                "StepIndexed needs a function that returns batch i, got"
                f" {_util.arguments.describe(fn)}: StepIndexed(lambda i: batches[i])"
            )
        self._fn = fn
        self._next = _util.arguments.check_int("start", start, least=0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._fn(self._next)
        self._next += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """Returns the index of the next batch."""
        return {"next_index": self._next}

    def set_state(self, state: Any) -> None:
        """Continues with batch `state["next_index"]`.

        Raises:
            DatasetStateError: The index is not a whole number from 0.
        """
        index: Any = state.get("next_index") if isinstance(state, Mapping) else None
        if not _is_index(index):
            raise errors.DatasetStateError(
                "the state of a StepIndexed must be {'next_index': n}, where n is a"
                f" whole number from 0, got {errors.printable(f'{state!r:.80}')}\n"
                "Pass an iterator of the kind that was saved, or dataset=None to start"
                " the data from the beginning."
            )
        self._next = int(index)


def _is_index(value: Any) -> bool:
    """Returns True for a whole number from 0, of Python or numpy."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_whole and int(value) >= 0


@dataclasses.dataclass(frozen=True, slots=True)
class Restarting:
    """Lets a run restart the data if the saved dataset states do not fit.

    ```python
    CheckpointCallback(checkpointer, dataset=Restarting(batches))
    ```

    If the saved states do not fit the number of processes, or the step has no dataset
    state (deleted on purpose, or never saved), the iterator is left unchanged, so a new
    iterator starts at the beginning, and a warning is logged. Without `Restarting`,
    this is an error.

    Attributes:
        iterator: The iterator, or the list of iterators, as for `dataset=`.
    """

    iterator: Any


def copy_position(dataset: Any) -> Any:
    """Returns a copy of a dataset at its current position, if cheap.

    Copies `StepIndexed`, alone or among others. Other iterators are returned
    themselves, and move on.
    """
    if isinstance(dataset, StepIndexed):
        return copy.copy(dataset)
    if isinstance(dataset, Restarting):
        return Restarting(copy_position(dataset.iterator))
    if isinstance(dataset, list | tuple):
        return [copy_position(iterator) for iterator in dataset]
    return dataset
