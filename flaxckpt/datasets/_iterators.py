"""The protocol of iterators that can be saved, and two small classes for users."""

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
    """What an iterator needs to be saved and restored: grain's protocol.

    The state may nest dicts, lists and tuples of numbers, strings, bytes, numpy arrays
    and torch tensors.

    With an attribute `elastic` that is true, it says that its state is the same on all
    processes, and fits any number of them. With `get_shard_states()`, a list of the
    states of its shards, and `set_shard_states(list)`, shards may move between
    processes: the one called K of N has the shards K, K + N, and so on.
    """

    def get_state(self) -> Any:
        """The position, as of the batch that was returned last."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Goes to a position that `get_state` gave."""
        ...


class StepIndexed(Generic[Batch]):
    """Batches that are a function of their index, so that the index is all the state.

    ```python
    batches = StepIndexed(lambda i: make_batch(seed=0, index=i))
    ```

    Args:
        fn: Makes batch `i`, always the same for the same `i`.
        start: Index of the first batch.

    Raises:
        OptionError: `start` is no whole number from 0.
    """

    __module__ = "flaxckpt.datasets._iterators"  # checkpoints record this path

    elastic = True

    def __init__(self, fn: Callable[[int], Batch], *, start: int = 0) -> None:
        if not callable(fn):
            raise errors.OptionError(
                "StepIndexed wants a function that makes batch i, got"
                f" {_util.arguments.found(fn)}: StepIndexed(lambda i: batches[i])"
            )
        self._fn = fn
        self._next = _util.arguments.whole("start", start, least=0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._fn(self._next)
        self._next += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """The index of the batch that comes next."""
        return {"next_index": self._next}

    def set_state(self, state: Any) -> None:
        """Continues with batch `state["next_index"]`.

        Raises:
            DatasetStateError: That is no whole number from 0.
        """
        found: Any = state.get("next_index") if isinstance(state, Mapping) else None
        if not _is_index(found):
            raise errors.DatasetStateError(
                "the state of a StepIndexed is {'next_index': n}, where n is a whole"
                f" number from 0, got {state!r:.80}"
            )
        self._next = int(found)


def _is_index(value: Any) -> bool:
    """Whether `value` is a whole number from 0, of Python or numpy."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_whole and int(value) >= 0


@dataclasses.dataclass(frozen=True, slots=True)
class Restarting:
    """Lets a run go on with other processes, at the price of its place in the data.

    ```python
    CheckpointCallback(checkpointer, dataset=Restarting(batches))
    ```

    Where the number of processes has changed and the saved states do not fit it, the
    state was let go by `keep_dataset`, or the step was saved without any, the iterator
    is left as it is, which for a new one is at its beginning, and a warning is logged.
    Without this, that is an error.

    Attributes:
        iterator: What `dataset=` takes otherwise.
    """

    iterator: Any


def held(dataset: Any) -> Any:
    """A dataset as it stands now, where that costs next to nothing.

    So it is for `StepIndexed`, alone or among others. Other iterators are returned as
    they are, and go on.
    """
    if isinstance(dataset, StepIndexed):
        return copy.copy(dataset)
    if isinstance(dataset, Restarting):
        return Restarting(held(dataset.iterator))
    if isinstance(dataset, list | tuple):
        return [held(iterator) for iterator in dataset]
    return dataset
