"""Batches made ahead on a thread, with the state of the batch that was taken last."""

from __future__ import annotations

import atexit
import collections
import contextlib
import copy
import dataclasses
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from flaxckpt import errors
from flaxckpt.datasets import _adapters, _duck_types

Batch = TypeVar("Batch")

_SECONDS_AT_EXIT = 5.0
_SECONDS_BETWEEN_LOOKS = 10.0


class Buffered(Generic[Batch]):
    """Makes batches ahead on a thread; its state is that after the batch taken last.

    A prefetcher around an iterator hides from a checkpoint how far the loop has come:
    the state of the inner iterator is that of a batch which nobody has seen yet. This
    one keeps the state with each batch. It is what `iterator` itself would have given,
    so either restores what the other has saved.

    ```python
    with Buffered(batches, depth=2, transform=jax.device_put) as batches:
        for batch in batches: ...
    ```

    After the end of the data, `iter()` begins the next epoch, where `iterator` is a
    loader that has one. Not for several threads at a time.

    Args:
        iterator: Any iterator or loader that can be saved. Only the buffer may use it.
        depth: How many batches are made ahead.
        transform: Applied to each batch on the thread.

    Attributes:
        iterator: As given. It is ahead of the loop.

    Raises:
        DatasetStateError: `iterator` cannot be saved.
    """

    def __init__(
        self,
        iterator: Any,
        depth: int = 2,
        *,
        transform: Callable[[Any], Batch] | None = None,
    ) -> None:
        self.iterator = iterator
        self._adapter = _adapters.find(iterator)
        self._depth = _checked_depth(depth)
        if transform is not None and not callable(transform):
            raise errors.OptionError(
                f"transform must be a function of a batch, got {transform!r:.80}"
            )
        self._transform = transform
        self._state: _State | None = None  # of the beginning, until a batch is taken
        self._batches: Iterator[Any] | None = None
        self._worker: _Worker | None = None
        self._ended = False
        self._closed = False

    @property
    def elastic(self) -> bool:
        """Whether the state fits any number of processes: that of `iterator`."""
        return bool(getattr(self.iterator, "elastic", False))

    def __iter__(self) -> Self:
        self._ended = False
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        self._check_own()
        if self._worker is None:
            self._start()
        assert self._worker is not None
        made = self._worker.take()
        if made.error is not None:
            self._stop()  # it has ended with this one
            if not made.is_end:
                raise made.error
            self._batches, self._ended = None, True
        self._state = made.state
        if self._ended:
            raise StopIteration
        return made.batch  # type: ignore[no-any-return]

    def get_state(self) -> Any:
        """The state of `iterator` as of the batch that was returned last."""
        if self._state is None:
            return self._adapter.get_state(self.iterator)
        return self._state.whole

    def set_state(self, state: Any) -> None:
        """Drops what was made ahead, and continues at a state that `get_state` gave."""
        self._set(lambda: self._adapter.set_state(self.iterator, copy.deepcopy(state)))
        if _has_shards(self.iterator):
            self._state = _state(self._adapter, self.iterator)
        else:
            self._state = _State(copy.deepcopy(state))

    @property
    def get_shard_states(self) -> Callable[[], list[Any]] | None:
        """Gives the states of the shards of `iterator`, if it has them; else None."""
        if not _has_shards(self.iterator):
            return None
        return lambda: list(
            (self._state or _state(self._adapter, self.iterator)).shards
        )

    @property
    def set_shard_states(self) -> Callable[[list[Any]], None] | None:
        """Goes to states of shards, if `iterator` has them; else None."""
        return self._set_shard_states if _has_shards(self.iterator) else None

    def _set_shard_states(self, states: list[Any]) -> None:
        self._set(lambda: self.iterator.set_shard_states(copy.deepcopy(states)))
        self._state = _state(self._adapter, self.iterator)

    def _set(self, set_inner: Callable[[], None]) -> None:
        self._check_open()
        self._check_own()
        self._stop()
        self._batches = None
        try:
            set_inner()
        except Exception:
            if self._state is not None:  # so that the loop could still go on
                with contextlib.suppress(Exception):
                    before = copy.deepcopy(self._state.whole)
                    self._adapter.set_state(self.iterator, before)
            raise
        self._ended = False

    def close(self) -> None:
        """Ends the thread and drops what was made ahead; the state stays.

        A batch that does not come is not waited for.
        """
        self._stop(timeout_secs=_SECONDS_AT_EXIT)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._check_open()
        adapter, inner = self._adapter, self.iterator

        def state() -> _State:
            return _state(adapter, inner)

        if self._state is None:
            self._state = state()
        if self._batches is None:
            self._batches = iter(inner) if hasattr(inner, "__iter__") else inner
        self._worker = _Worker(self._batches, state, self._transform, self._depth)
        # The thread knows nothing of this object, and ends when it is forgotten.
        self._forgotten = weakref.finalize(self, self._worker.stop)
        self._forgotten.atexit = False

    def _stop(self, timeout_secs: float | None = None) -> None:
        if self._worker is not None:
            self._forgotten.detach()
            self._worker.stop()
            self._worker.join(timeout_secs)
            self._worker = None

    def _check_open(self) -> None:
        if self._closed:
            raise errors.DatasetStateError(
                "this Buffered is closed, and its iterator is ahead of what was taken:"
                " make a new one, and restore its state"
            )

    def _check_own(self) -> None:
        """Refuses to go on with a thread that was left behind by a fork."""
        if self._worker is not None and not self._worker.is_own():
            raise errors.DatasetStateError(
                "this Buffered has begun in another process, and its thread did not"
                " come along with the fork: make it, and its iterator, in the process"
                " that takes the batches"
            )


def _checked_depth(depth: object) -> int:
    try:
        number = 0 if isinstance(depth, bool) else operator.index(depth)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise errors.OptionError(
            f"depth must be a whole number of at least 1, got {depth!r}"
        )
    return number


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """The state of an iterator, and those of its shards if it gives them."""

    whole: Any
    shards: tuple[Any, ...] = ()


def _state(adapter: _adapters.Adapter, iterator: Any) -> _State:
    """A copy of the state as it is now."""
    shards = iterator.get_shard_states() if _has_shards(iterator) else ()
    return copy.deepcopy(_State(adapter.get_state(iterator), tuple(shards)))


def _has_shards(iterator: Any) -> bool:
    return _duck_types.has(iterator, "get_shard_states", "set_shard_states")


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A batch and the state after it, or why there is none."""

    batch: Any
    state: _State | None
    error: BaseException | None = None
    is_end: bool = False


class _Worker:
    """A thread that makes batches until it is stopped, or one cannot be made."""

    def __init__(
        self,
        batches: Iterator[Any],
        state: Callable[[], _State],
        transform: Callable[[Any], Any] | None,
        depth: int,
    ) -> None:
        self._batches = batches
        self._state = state
        self._transform = transform
        self._depth = depth
        self._ready: collections.deque[_Made] = collections.deque()
        self._stopped = False
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._run, name="flaxckpt Buffered", daemon=True
        )
        _running.add(self)
        self._thread.start()

    def take(self) -> _Made:
        """Waits for the next batch."""
        with self._changed:
            while not self._ready:
                self._changed.wait(_SECONDS_BETWEEN_LOOKS)
                if not self._ready and not self._thread.is_alive():
                    raise errors.DatasetStateError(
                        "the thread that makes batches has ended without a word: the"
                        " program is about to exit"
                    )
            made = self._ready.popleft()
            self._changed.notify_all()
            return made

    def is_own(self) -> bool:
        """Whether its thread is in this process, not in one that forked this."""
        return os.getpid() == self._pid

    def stop(self) -> None:
        """Ends the thread after the batch that it is making."""
        if not self.is_own():
            return  # a fork leaves threads behind, and locks as they were
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout_secs: float | None = None) -> None:
        """Waits until the thread has ended."""
        self._thread.join(timeout_secs)

    def _run(self) -> None:
        while self._has_room():
            made = self._make()
            with self._changed:
                self._ready.append(made)
                self._changed.notify_all()
            if made.error is not None:
                return

    def _has_room(self) -> bool:
        with self._changed:
            while not self._stopped and len(self._ready) >= self._depth:
                # Garbage may be collected, and this stopped, inside of wait itself,
                # where a notification goes unnoticed: look again after a while.
                self._changed.wait(_SECONDS_BETWEEN_LOOKS)
            return not self._stopped

    def _make(self) -> _Made:
        try:
            try:
                batch = next(self._batches)
            except StopIteration as end:
                return _Made(None, self._state(), end, is_end=True)
            state = self._state()
            if self._transform is not None:
                batch = self._transform(batch)
            return _Made(batch, state)
        except StopIteration as error:  # as in a generator: it would end the loop
            told = RuntimeError("the transform of a Buffered raised StopIteration")
            told.__cause__ = error
            return _Made(None, None, told)
        except BaseException as error:
            return _Made(None, None, error)


_running: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Ends all threads: one inside of a library's code would crash Python's exit."""
    workers = list(_running)
    for worker in workers:
        worker.stop()
    end = time.monotonic() + _SECONDS_AT_EXIT
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
