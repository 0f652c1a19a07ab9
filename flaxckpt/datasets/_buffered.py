"""Prefetches batches on a thread and keeps the state of the last taken batch."""

from __future__ import annotations

import atexit
import collections
import contextlib
import copy
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

from flaxckpt import _util, errors
from flaxckpt._types import Closing
from flaxckpt.datasets import _adapters, _duck_types

Batch = TypeVar("Batch")

_SECONDS_AT_EXIT = 5.0
_POLL_SECS = 10.0


class Buffered(Closing, Generic[Batch]):
    """Prefetches batches on a thread; the state follows the last batch taken.

    A prefetcher around an iterator hides the loop's position from a checkpoint: the
    state of the inner iterator is ahead of the batches that the loop has used.
    `Buffered` keeps the state with each batch. The state is the same as without the
    buffer, so `iterator` and `Buffered` restore each other's states.

    ```python
    with Buffered(batches, depth=2, transform=jax.device_put) as batches:
        for batch in batches: ...
    ```

    After the end of the data, `iter()` starts the next epoch if `iterator` is a loader
    with epochs. It is not thread-safe.

    Args:
        iterator: Any iterator or loader that can be saved. Only the buffer may use it.
        depth: The number of batches to prefetch.
        transform: Applied to each batch on the thread.

    Attributes:
        iterator: The argument. It is ahead of the loop.

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
        self._depth = _util.arguments.check_int("depth", depth, least=1)
        if transform is not None:
            _util.arguments.check_function("transform", transform, "of a batch")
        self._transform = transform
        self._state: _State | None = None  # the initial state, until a batch is taken
        self._batches: Iterator[Any] | None = None
        self._worker: _Worker | None = None
        self._ended = False
        self._closed = False

    @property
    def elastic(self) -> bool:
        """True if the state of `iterator` fits any number of processes."""
        return bool(getattr(self.iterator, "elastic", False))

    def __iter__(self) -> Self:
        self._ended = False
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        self._check_not_forked()
        if self._worker is None:
            self._start()
        assert self._worker is not None
        result = self._worker.take()
        if result.error is not None:
            self._stop()  # the thread ends after an error
            if not result.is_end:
                raise result.error
            self._batches, self._ended = None, True
        self._state = result.state
        if self._ended:
            raise StopIteration
        return result.batch  # type: ignore[no-any-return]

    def get_state(self) -> Any:
        """Returns the state of `iterator` after the last returned batch."""
        if self._state is None:
            return self._adapter.get_state(self.iterator)
        return self._state.whole

    def set_state(self, state: Any) -> None:
        """Drops prefetched batches, and continues at a state from `get_state`."""
        self._set(lambda: self._adapter.set_state(self.iterator, copy.deepcopy(state)))
        if _duck_types.has_shards(self.iterator):
            self._state = _state(self._adapter, self.iterator)
        else:
            self._state = _State(copy.deepcopy(state))

    @property
    def get_shard_states(self) -> Callable[[], list[Any]] | None:
        """A function that returns the states of `iterator`'s shards, or None."""
        if not _duck_types.has_shards(self.iterator):
            return None
        return lambda: list(
            (self._state or _state(self._adapter, self.iterator)).shards
        )

    @property
    def set_shard_states(self) -> Callable[[list[Any]], None] | None:
        """A function that sets the states of `iterator`'s shards, or None."""
        return self._set_shard_states if _duck_types.has_shards(self.iterator) else None

    def _set_shard_states(self, states: list[Any]) -> None:
        self._set(lambda: self.iterator.set_shard_states(copy.deepcopy(states)))
        self._state = _state(self._adapter, self.iterator)

    def _set(self, set_inner: Callable[[], None]) -> None:
        self._check_open()
        self._check_not_forked()
        self._stop()
        self._batches = None
        try:
            set_inner()
        except Exception:
            if self._state is not None:  # so that the loop can continue
                with contextlib.suppress(Exception):
                    before = copy.deepcopy(self._state.whole)
                    self._adapter.set_state(self.iterator, before)
            raise
        self._ended = False

    def close(self) -> None:
        """Ends the thread and drops prefetched batches; the state stays.

        Waits at most a few seconds for a batch in progress.
        """
        self._stop(timeout_secs=_SECONDS_AT_EXIT)
        self._closed = True

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
        # The thread has no reference to this object, and ends with it.
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
                "this Buffered is closed, and its iterator is ahead of the batches"
                " taken: create a new Buffered and restore its state"
            )

    def _check_not_forked(self) -> None:
        """Raises DatasetStateError if the thread was lost in a fork."""
        if self._worker is not None and not self._worker.is_in_this_process():
            raise errors.DatasetStateError(
                "this Buffered was started in another process, and a fork does not copy"
                " its thread: create it, and its iterator, in the process that uses the"
                " batches"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    whole: Any
    shards: tuple[Any, ...] = ()


def _state(adapter: _adapters.Adapter, iterator: Any) -> _State:
    shards = iterator.get_shard_states() if _duck_types.has_shards(iterator) else ()
    return copy.deepcopy(_State(adapter.get_state(iterator), tuple(shards)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Result:
    """A batch with the state after the batch, or an error."""

    batch: Any
    state: _State | None
    error: BaseException | None = None
    is_end: bool = False


class _Worker:
    """A thread that prefetches batches until stopped, or until an error."""

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
        self._ready: collections.deque[_Result] = collections.deque()
        self._stopped = False
        # Enter the lock itself: Ctrl-C in Condition.__enter__ may leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._run, name="flaxckpt Buffered", daemon=True
        )
        _running.add(self)
        self._thread.start()

    def take(self) -> _Result:
        """Returns the next batch, waiting until ready."""
        with self._lock:
            while not self._ready:
                self._changed.wait(_POLL_SECS)
                if not self._ready and not self._thread.is_alive():
                    raise errors.DatasetStateError(
                        "the thread that prefetches batches ended without an error: the"
                        " program is about to exit"
                    )
            result = self._ready.popleft()
            self._changed.notify_all()
            return result

    def is_in_this_process(self) -> bool:
        """Returns True if the thread belongs to this process, not to a parent."""
        return os.getpid() == self._pid

    def stop(self) -> None:
        """Ends the thread after the current batch."""
        if not self.is_in_this_process():
            return  # a fork copies neither threads nor the release of locks
        with self._lock:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout_secs: float | None = None) -> None:
        self._thread.join(timeout_secs)

    def _run(self) -> None:
        while self._has_room():
            result = self._fetch()
            with self._lock:
                self._ready.append(result)
                self._changed.notify_all()
            if result.error is not None:
                return

    def _has_room(self) -> bool:
        with self._lock:
            while not self._stopped and len(self._ready) >= self._depth:
                # Garbage collection may stop this worker inside of wait itself, where
                # the notification is missed: check again after a while.
                self._changed.wait(_POLL_SECS)
            return not self._stopped

    def _fetch(self) -> _Result:
        try:
            try:
                batch = next(self._batches)
            except StopIteration as end:
                return _Result(None, self._state(), end, is_end=True)
            state = self._state()
            if self._transform is not None:
                batch = self._transform(batch)
            return _Result(batch, state)
        except StopIteration as error:  # as in a generator: it would end the loop
            unexpected = RuntimeError(
                "the transform of a Buffered raised StopIteration"
            )
            unexpected.__cause__ = error
            return _Result(None, None, unexpected)
        except BaseException as error:
            return _Result(None, None, error)


_running: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Ends all threads: a thread in library code would crash Python's exit."""
    workers = list(_running)
    for worker in workers:
        worker.stop()
    end = time.monotonic() + _SECONDS_AT_EXIT
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
