"""The keys and values of a bucket, behind TensorStore's drivers."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from flaxckpt import _util, errors
from flaxckpt._storage.store_options import StoreOptions
from flaxckpt._storage.store_requests import Connection, TransientError
from flaxckpt._storage.stored_value import StoredValue

_PART_BYTES = 8 * 2**20
"""Size of a part of a value read part by part."""


_PARTS_AT_A_TIME = 8
"""Parts of a value, or small values, that are requested at a time."""

_COPIES_OF_PARTS = 2
"""Copies of a part in memory while it is read: TensorStore's, and a Python object."""

_PARTS_BYTES = 128 * 2**20
"""Memory of all parts of all values that are read at a time."""


@functools.cache
def _nothing() -> bytes:
    """The generation of a key without a value."""
    spec = {"driver": "memory"}
    empty = ts.KvStore.open(spec).result()
    return bytes(empty.read("none").result().stamp.generation)


class _Listing:
    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.keys: list[str] | None = None
        self.changes = 0

    def has(self, key: str) -> bool:
        keys = self.keys or []
        at = bisect.bisect_left(keys, key)
        return at < len(keys) and keys[at] == key

    def under(self, prefix: str) -> list[str]:
        keys = self.keys or []
        start = bisect.bisect_left(keys, prefix)
        rest = itertools.islice(keys, start, None)
        return list(itertools.takewhile(lambda key: key.startswith(prefix), rest))


class _Ahead(NamedTuple):
    """Values read after `changes` changes by this process; None for a missing key."""

    bucket: Bucket
    changes: int
    values: dict[str, StoredValue | None]


# Of a `with` block, and of the threads that work for it.
_LISTINGS: ContextVar[tuple[_Listing, ...]] = ContextVar("listings", default=())
_AHEAD: ContextVar[tuple[_Ahead, ...]] = ContextVar("values read ahead", default=())


class Bucket:
    """A bucket; `appended` are keys of journals -> contents that this process wrote."""

    def __init__(
        self, scheme: str, bucket: str, options: StoreOptions | None = None
    ) -> None:
        self.connection = Connection(scheme, bucket, options or StoreOptions())
        self.url = self.connection.url
        self.options = self.connection.options
        self.appended: dict[str, StoredValue] = {}
        self._lock = _util.forks.PerProcess(threading.Lock)
        self._written: dict[str, dict[str, int]] = {}  # prefix -> sizes of values
        self._reading = _util.forks.PerProcess(
            lambda: _util.threads.Budget(_PARTS_BYTES)
        )
        self._changes = 0

    # ---- requests -----------------------------------------------------------------

    def read(
        self,
        key: str,
        *,
        start: int | None = None,
        stop: int | None = None,
        size: int = 0,
    ) -> StoredValue | None:
        """Returns the value of `key`, or a range of it; None for a missing key.

        An empty range gets only the generation. An expected `size` sets the deadline.
        """
        for bucket, changes, values in _AHEAD.get():
            if bucket is self and changes == self._changes and key in values:
                stored = values[key]
                if stored is None or (stop or 0) <= len(stored.value):
                    return stored and stored._replace(value=stored.value[start:stop])
        part = None if start is None and stop is None else slice(start, stop)
        answer = self.connection.request(
            f"read {self.url}/{key}",
            lambda: self.connection.kv().read(key, byte_range=part),
            size=size,
        )
        if answer.state == "missing":
            return None
        return StoredValue(bytes(answer.value), bytes(answer.stamp.generation))

    def part(self, key: str, start: int, stop: int) -> bytes | None:
        """Returns a byte range of a value, cut off at the end; None if missing."""
        stored = self._span(key, start, stop)
        return stored and stored.value[: stop - start]

    def end(self, key: str, size: int) -> bytes | None:
        """Returns the last `size` bytes of a value, at most all; None if missing."""
        try:
            stored = self.read(key, start=-size)
        except errors.StoreError as error:
            if _BEYOND not in str(error):
                raise
            stored = self.read(key)
        return stored and stored.value

    def pieces(self, key: str, size: int) -> Iterator[bytes]:
        """Yields a value in parts, if any; raises StoreError if replaced meanwhile."""
        generation: bytes | None = None
        for begin in itertools.count(0, _PART_BYTES):
            is_last = begin + _PART_BYTES >= size
            part = self._span(key, begin, None if is_last else begin + _PART_BYTES)
            if part is None and generation is None:
                return
            if part is None or generation not in (None, part.generation):
                raise self._replaced_error(key)
            generation = part.generation
            yield part.value
            if len(part.value) != _PART_BYTES or is_last:
                return

    def read_into(
        self,
        key: str,
        views: Sequence[memoryview],
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> int | None:
        """Fills `views` with a value, or a range of its bytes; several parts at a time.

        Returns the bytes in the range, which may exceed the views; None for a missing
        value. Raises StoreError if it was replaced meanwhile, or is unreachable.
        """
        targets = [np.frombuffer(view, np.uint8) for view in views]
        wanted = sum(len(target) for target in targets)
        begins = range(0, max(wanted, 1), _PART_BYTES)
        parts: list[StoredValue | None] = []
        sizes: list[int] = []

        def read(begin: int) -> None:
            end = start + begin + _PART_BYTES
            is_last = begin == begins[-1]
            expected = min(_PART_BYTES, wanted - begin)
            with self._reading.get().hold(_COPIES_OF_PARTS * expected):
                part = self._span(key, start + begin, stop if is_last else end)
                if part is not None:
                    sizes.append(len(part.value))
                    _copy_into(targets, begin, part.value[: wanted - begin])
                    part = part._replace(value=b"")
            parts.append(part)

        _util.threads.each(read, begins, threads=_PARTS_AT_A_TIME)
        if len({part and part.generation for part in parts}) > 1:
            raise self._replaced_error(key)
        return None if parts[0] is None else sum(sizes)

    def _replaced_error(self, key: str) -> errors.StoreError:
        return errors.StoreError(
            f"cannot read {self.url}/{key}: it was replaced during the read; try again"
        )

    def _span(self, key: str, start: int, stop: int | None) -> StoredValue | None:
        """Returns a value from `start` to `stop`, or to the end of the value."""
        for end in (stop, None):
            try:
                size = (stop or start + _PART_BYTES) - start
                return self.read(key, start=start, stop=end, size=size)
            except errors.StoreError as error:
                if _BEYOND not in str(error):
                    raise
        # The value ends before `start`: return only the generation.
        empty = self.read(key, start=0, stop=0)
        return empty and StoredValue(b"", empty.generation)

    def write(self, key: str, value: bytes) -> bytes:
        """Writes a value unconditionally; returns the generation."""
        generation = self.exchange(key, value, None)
        assert generation is not None
        return generation

    def create(self, key: str, value: bytes) -> bytes | None:
        """Creates a value; returns the generation, or None for an existing key."""
        return self.exchange(key, value, _nothing())

    def exchange(
        self, key: str, value: bytes, generation: bytes | None
    ) -> bytes | None:
        """Replaces the value of `generation`, or any value if `generation` is None.

        Returns the new generation; None if the present value has another generation.
        """
        with self._change():
            stamp = self.connection.request(
                f"write {self.url}/{key}",
                lambda: self.connection.kv().write(key, value, if_equal=generation),
                size=len(value),
            )
        if stamp.generation:
            self._record_size(key, len(value))
            return bytes(stamp.generation)
        # After a lost answer, the retry finds the value of the first attempt.
        present = self.read(key)
        if present is not None and present.value == value:
            self._record_size(key, len(value))
            return present.generation
        return None

    # ---- records of written values ------------------------------------------------

    @contextlib.contextmanager
    def recorded(self, prefix: str) -> Iterator[None]:
        """Records the values written under `prefix` while the `with` block lasts."""
        self._written[prefix] = {}
        try:
            yield
        finally:
            self._written.pop(prefix, None)

    def recorded_bytes(self, prefix: str) -> int:
        """Returns the bytes written under `prefix`; 0 outside of `recorded`."""
        return sum(self._written.get(prefix, {}).values())

    def recorded_size(self, key: str) -> int | None:
        """Returns the size of a written value; None if not recorded."""
        return next((sizes[key] for sizes in self._records(key) if key in sizes), None)

    def _record_size(self, key: str, size: int) -> None:
        for sizes in self._records(key):
            sizes[key] = size

    def _records(self, key: str) -> list[dict[str, int]]:
        with self._lock.get():
            written = [*self._written.items()]
        return [sizes for prefix, sizes in written if key.startswith(prefix)]

    # ---- deleting and listing -----------------------------------------------------

    def delete(self, key: str, generation: bytes | None = None) -> None:
        """Removes a key if present; with `generation`, removes no newer value."""
        with self._change():
            self.connection.request(
                f"delete {self.url}/{key}",
                lambda: self.connection.kv().write(key, None, if_equal=generation),
            )

    def delete_under(self, prefix: str) -> None:
        self.delete_all(self.keys(prefix))

    def delete_all(
        self, keys: Iterable[str], check: Callable[[], object] = lambda: None
    ) -> None:
        """Removes keys, many at a time; calls `check` before requests and retries."""
        waiting = iter(keys)
        with self._change():
            while batch := list(itertools.islice(waiting, _DELETED_AT_ONCE)):
                check()
                futures = [self.connection.kv().write(key, None) for key in batch]
                for key, future in zip(batch, futures, strict=True):
                    try:
                        self.connection.wait(f"delete {self.url}/{key}", future)
                    except (TransientError, ValueError, RuntimeError):
                        check()
                        self.delete(key)  # with retries

    def keys(self, prefix: str) -> list[str]:
        listing = self._listing(prefix)
        return self._list(prefix) if listing is None else listing.under(prefix)

    def _list(self, prefix: str) -> list[str]:
        key_range = ts.KvStore.KeyRange(prefix, _after(prefix))
        keys = self.connection.request(
            f"list {self.url}/{prefix}", lambda: self.connection.kv().list(key_range)
        )
        return sorted(key.decode(errors="surrogateescape") for key in keys)

    def has(self, key: str) -> bool:
        if (listing := self._listing(key)) is not None:
            return listing.has(key)
        return self.read(key, start=0, stop=0) is not None

    @contextlib.contextmanager
    def read_ahead(self, keys: Iterable[str]) -> Iterator[None]:
        """Reads small values at once, for the block, until this process writes."""
        ahead = _Ahead(self, self._changes, {})

        def read(key: str) -> None:
            ahead.values[key] = self.read(key)

        _util.threads.each(read, keys, threads=_PARTS_AT_A_TIME)
        before = _AHEAD.set((*_AHEAD.get(), ahead))
        try:
            yield
        finally:
            _AHEAD.reset(before)

    # ---- cached listings ----------------------------------------------------------

    @contextlib.contextmanager
    def listing_cache(self, prefix: str) -> Iterator[None]:
        """Caches a listing of `prefix` in the block, until a change by this process."""
        before = _LISTINGS.set((*_LISTINGS.get(), _Listing(self, prefix)))
        try:
            yield
        finally:
            _LISTINGS.reset(before)

    def _listing(self, prefix: str) -> _Listing | None:
        """Returns the outermost cached listing around `prefix`, brought up to date."""
        for listing in _LISTINGS.get():
            if listing.bucket is self and prefix.startswith(listing.prefix):
                if listing.keys is None or listing.changes != self._changes:
                    listing.changes = self._changes
                    listing.keys = self._list(listing.prefix)
                return listing
        return None

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        try:
            yield
        finally:  # after an error, the change may have happened, too
            with self._lock.get():
                self._changes += 1


_BEYOND = "OUT_OF_RANGE"
"""TensorStore's error code for a range beyond the end of a value."""

_DELETED_AT_ONCE = 256


def _copy_into(
    targets: Sequence[np.ndarray[Any, np.dtype[np.uint8]]], at: int, content: bytes
) -> None:
    """Copies `content` to the position `at` of the concatenated targets."""
    left = np.frombuffer(content, np.uint8)  # numpy copies beside other threads
    for target in targets:
        part = target[at : at + len(left)]
        part[:] = left[: len(part)]
        left, at = left[len(part) :], max(0, at - len(target))


def _after(prefix: str) -> str | bytes:
    """Returns the end of the key range of `prefix`; empty for an open range."""
    end = prefix.encode(errors="surrogateescape").rstrip(b"\xff")
    return end[:-1] + bytes([end[-1] + 1]) if end else b""
