"""Object stores: keys and values behind TensorStore's drivers, with our own deadlines.

TensorStore waits for a dead endpoint for minutes. Here every request has a deadline,
what may pass is tried again, and whatever fails says what was asked of whom.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import tensorstore as ts

from flaxckpt import errors
from flaxckpt._types import JSON

_T = TypeVar("_T")

_SLOWEST_BYTES_PER_SEC = 2**18
"""What a request may take longer than the deadline: as if its bytes came so slowly."""

_PART_BYTES = 8 * 2**20
"""Of what is read part by part, one part."""

_CONCURRENCY = 32
_FIRST_PAUSE_SECS = 0.1
_LONGEST_PAUSE_SECS = 2.0
_OWN_RETRIES: dict[str, JSON] = {
    "max_retries": 3,
    "initial_delay": "100ms",
    "max_delay": "1s",
}
"""Of TensorStore, within one try of ours."""

_LASTING = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|NOT_FOUND|INVALID_ARGUMENT|OUT_OF_RANGE"
    "|UNIMPLEMENTED|InvalidAccessKey|SignatureDoesNotMatch"
)
"""In what a store says that will not change its mind."""


_PASSING = re.compile("ABORTED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|CURL")
"""In what TensorStore says if it is not the value that is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreOptions:
    """How object stores are reached.

    What is None comes from the environment: `AWS_ENDPOINT_URL_S3` or
    `AWS_ENDPOINT_URL`, `AWS_REGION` or `AWS_DEFAULT_REGION`, `AWS_PROFILE`, and the
    credentials as the AWS and Google tools find them.

    Attributes:
        endpoint: URL of a server that speaks S3; None is Amazon's.
        region: Of the bucket.
        profile: Section of the AWS credentials file.
        credentials_file: Another one than `~/.aws/credentials`.
        anonymous: Whether to sign nothing, as for public buckets.
        deadline_secs: How long one request may take in all, retries included; large
            objects get more time, a second for each 256 KiB.
        retries: How often a request that failed, but may not fail again, is repeated.
        concurrency: How many requests run at one time.

    Raises:
        OptionError: A number makes no sense.
    """

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    credentials_file: str | None = None
    anonymous: bool = False
    deadline_secs: float = 60.0
    retries: int = 4
    concurrency: int = _CONCURRENCY

    def __post_init__(self) -> None:
        if not self.deadline_secs > 0 or self.retries < 0 or self.concurrency < 1:
            raise errors.OptionError(
                "deadline_secs and concurrency must be positive and retries 0 or more,"
                f" got {self.deadline_secs}, {self.concurrency} and {self.retries}"
            )


class Found(NamedTuple):
    """A value in a store.

    Attributes:
        value: Its bytes.
        generation: Changes with the value.
    """

    value: bytes
    generation: bytes


_MEMORY = ts.Context({"memory_key_value_store": {}})
"""Where `memory://` is, for all of this process."""


_shared: dict[str, JSON] = {}
"""What specifications of buckets name: of one context, TensorStore knows them as one
store, and can copy between the databases in it."""


def context(spec: Mapping[str, JSON] | None = None) -> ts.Context:
    """A new context that has the memory of this process in it, and how stores are had.

    Whatever opens something in a store does so with such a context.
    """
    return ts.Context({**_shared, **(spec or {})}, _MEMORY)


@functools.cache
def _nothing() -> bytes:
    """The generation of a key without a value."""
    spec = {"driver": "memory"}
    empty = ts.KvStore.open(spec).result()
    return bytes(empty.read("none").result().stamp.generation)


_numbers = itertools.count()


class _Look:
    """The keys under a prefix, as they were when they were listed."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.keys: list[str] | None = None
        self.changes = 0

    def has(self, key: str) -> bool:
        """Whether it was there."""
        keys = self.keys or []
        at = bisect.bisect_left(keys, key)
        return at < len(keys) and keys[at] == key

    def under(self, prefix: str) -> list[str]:
        """Those that begin so."""
        keys = self.keys or []
        start = bisect.bisect_left(keys, prefix)
        begin_so = itertools.takewhile(
            lambda key: key.startswith(prefix), itertools.islice(keys, start, None)
        )
        return list(begin_so)


class Store:
    """A bucket.

    Args:
        scheme: `s3`, `gs` or `memory`.
        bucket: Its name.
        options: How it is reached.

    Attributes:
        url: `s3://bucket`.
        options: As given.
    """

    def __init__(
        self, scheme: str, bucket: str, options: StoreOptions | None = None
    ) -> None:
        self.url = f"{scheme}://{bucket}"
        self.options = options or StoreOptions()
        self._scheme = scheme
        self._bucket = bucket
        self._lock = threading.Lock()
        self._opened: ts.KvStore | None = None
        self._resources = self._named()
        _shared.update(self._resources)
        self._counts: dict[str, int] = {}
        self._looks = threading.local()
        self._changes = 0

    def spec(self, prefix: str) -> dict[str, JSON]:
        """TensorStore's description of what lies under `prefix`."""
        if self._scheme == "memory":
            return {"driver": "memory", "path": f"{self._bucket}/{prefix}"}
        spec: dict[str, JSON] = {
            "driver": "gcs" if self._scheme == "gs" else "s3",
            "bucket": self._bucket,
            "path": prefix,
            **{name.partition("#")[0]: name for name in self._resources},
        }
        if self._scheme == "gs":
            return spec
        spec["use_conditional_write"] = True
        if self.options.endpoint:
            spec["endpoint"] = self.options.endpoint
        if self.options.region:
            spec["aws_region"] = self.options.region
        return spec

    def _named(self) -> dict[str, JSON]:
        """How its requests are made, under names that no other store has."""
        if self._scheme == "memory":
            return {}
        driver = "gcs" if self._scheme == "gs" else "s3"
        found: dict[str, JSON] = {
            f"{driver}_request_retries": _OWN_RETRIES,
            f"{driver}_request_concurrency": {"limit": self.options.concurrency},
        }
        if driver == "s3":
            found["aws_credentials"] = self._credentials()
        number = next(_numbers)
        return {f"{name}#{number}": value for name, value in found.items()}

    def _credentials(self) -> JSON:
        options = self.options
        if options.anonymous:
            return {"type": "anonymous"}
        if options.profile or options.credentials_file:
            found: dict[str, JSON] = {"type": "profile"}
            if options.profile:
                found["profile"] = options.profile
            if options.credentials_file:
                found["credentials_file"] = options.credentials_file
            return found
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            return {"type": "environment"}
        return {"type": "default"}

    # ---- requests -----------------------------------------------------------------

    def read(
        self,
        key: str,
        *,
        start: int | None = None,
        stop: int | None = None,
        size: int = 0,
    ) -> Found | None:
        """The value of `key`, or its bytes from `start` to `stop`; None without one.

        A part that reaches beyond the end is an error, but for one of no bytes: that
        asks for the generation alone. `size` is how much may come, for the deadline.
        """
        part = None if start is None and stop is None else slice(start, stop)
        found = self.ask(
            f"read {self.url}/{key}",
            lambda: self._kv().read(key, byte_range=part),
            size=size,
        )
        if found.state == "missing":
            return None
        return Found(bytes(found.value), bytes(found.stamp.generation))

    def part(self, key: str, start: int, stop: int) -> bytes | None:
        """Bytes of a value, fewer than asked for if it ends before; None without one.

        Args:
            key: Which value.
            start: The first byte.
            stop: The one after the last.
        """
        found = self._span(key, start, stop)
        return found and found.value[: stop - start]

    def pieces(self, key: str, size: int) -> Iterator[bytes]:
        """A value from its beginning to its end, part after part.

        Args:
            key: Which value; without one, there are no parts.
            size: How long it should be. It may have another length.

        Raises:
            StoreError: It was replaced meanwhile, or the store is out of reach.
        """
        known: bytes | None = None
        for start in itertools.count(0, _PART_BYTES):
            stop = start + _PART_BYTES
            found = self._span(key, start, stop if stop < size else None)
            if found is None and known is None:
                return
            if found is None or (known is not None and known != found.generation):
                raise errors.StoreError(
                    f"cannot read {self.url}/{key}: it was replaced meanwhile; try"
                    " again"
                )
            known = found.generation
            yield found.value
            if len(found.value) != _PART_BYTES or stop >= size:
                return

    def _span(self, key: str, start: int, stop: int | None) -> Found | None:
        """What there is of a value from `start` to `stop`, or to its end."""
        for end in (stop, None):
            try:
                size = (stop or start + _PART_BYTES) - start
                return self.read(key, start=start, stop=end, size=size)
            except errors.StoreError as error:
                if _BEYOND not in str(error):
                    raise
        # Of a value that ends before, the generation alone.
        found = self.read(key, start=0, stop=0)
        return found and Found(b"", found.generation)

    def write(self, key: str, value: bytes) -> bytes:
        """Puts `value` there, whatever was; returns its generation."""
        generation = self._write(key, value, None)
        assert generation is not None
        return generation

    def create(self, key: str, value: bytes) -> bytes | None:
        """Puts `value` there if nothing is; returns its generation, None if not."""
        return self.exchange(key, value, _nothing())

    def exchange(self, key: str, value: bytes, generation: bytes) -> bytes | None:
        """Puts `value` there if that of `generation` is; its generation, or None."""
        return self._write(key, value, generation)

    def _write(self, key: str, value: bytes, generation: bytes | None) -> bytes | None:
        with self._changing():
            found = self.ask(
                f"write {self.url}/{key}",
                lambda: self._kv().write(key, value, if_equal=generation),
                size=len(value),
            )
        if found.generation:
            self._count(key, len(value))
            return bytes(found.generation)
        # A try whose answer was lost makes the next one find its own value.
        there = self.read(key)
        if there is not None and there.value == value:
            self._count(key, len(value))
            return there.generation
        return None

    # ---- what was written ---------------------------------------------------------

    @contextlib.contextmanager
    def counted(self, prefix: str) -> Iterator[None]:
        """Counts the bytes written under `prefix` while the `with` block lasts."""
        self._counts[prefix] = 0
        try:
            yield
        finally:
            self._counts.pop(prefix, None)

    def counted_bytes(self, prefix: str) -> int:
        """How many there were; 0 if nobody counts."""
        return self._counts.get(prefix, 0)

    def _count(self, key: str, size: int) -> None:
        with self._lock:
            for prefix in self._counts:
                if key.startswith(prefix):
                    self._counts[prefix] += size

    # ---- more requests ------------------------------------------------------------

    def delete(self, key: str) -> None:
        """Removes a key, if it is there."""
        with self._changing():
            self.ask(f"delete {self.url}/{key}", lambda: self._kv().write(key, None))

    def remove(self, key: str, generation: bytes) -> None:
        """Removes a key, if its value is that of `generation`."""
        with self._changing():
            self.ask(
                f"delete {self.url}/{key}",
                lambda: self._kv().write(key, None, if_equal=generation),
            )

    def delete_under(self, prefix: str) -> None:
        """Removes all keys that begin with `prefix`."""
        self.delete_all(self.keys(prefix))

    def delete_all(self, given: Iterable[str]) -> None:
        """Removes keys, many at a time."""
        keys = list(given)
        with self._changing():
            for begin in range(0, len(keys), _DELETED_AT_ONCE):
                self._delete_some(keys[begin : begin + _DELETED_AT_ONCE])

    def _delete_some(self, keys: list[str]) -> None:
        started = [self._kv().write(key, None) for key in keys]
        for key, future in zip(keys, started, strict=True):
            try:
                self.wait(f"delete {self.url}/{key}", future)
            except (ValueError, RuntimeError):
                self.delete(key)  # with retries

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, ascending."""
        look = self._look(prefix)
        return self._listed(prefix) if look is None else look.under(prefix)

    def _listed(self, prefix: str) -> list[str]:
        until = ts.KvStore.KeyRange(prefix, _after(prefix))
        found = self.ask(f"list {self.url}/{prefix}", lambda: self._kv().list(until))
        return sorted(key.decode(errors="surrogateescape") for key in found)

    def has(self, key: str) -> bool:
        """Whether there is a value, however long."""
        if (look := self._look(key)) is not None:
            return look.has(key)
        return self.read(key, start=0, stop=0) is not None

    # ---- looking once -------------------------------------------------------------

    @contextlib.contextmanager
    def looking(self, prefix: str) -> Iterator[None]:
        """Has what is under `prefix` be listed once while the `with` block lasts.

        That is what `keys` and `has` then say on this thread, until this process writes
        or deletes anything in the store. What others do meanwhile is not seen.
        """
        looks: list[_Look] = self._looks.__dict__.setdefault("all", [])
        looks.append(_Look(prefix))
        try:
            yield
        finally:
            looks.pop()

    def _look(self, prefix: str) -> _Look | None:
        """The outermost look that has what begins with `prefix`, as it is now."""
        looks: list[_Look] = self._looks.__dict__.get("all", [])
        for look in looks:
            if prefix.startswith(look.prefix):
                if look.keys is None or look.changes != self._changes:
                    look.changes = self._changes
                    look.keys = self._listed(look.prefix)
                return look
        return None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            yield
        finally:  # also if nobody knows whether it was done
            with self._lock:
                self._changes += 1

    # ---- waiting ------------------------------------------------------------------

    def ask(self, what: str, begin: Callable[[], ts.Future[_T]], size: int = 0) -> _T:
        """Has a request done, with retries, in time.

        Args:
            what: It, in words.
            begin: Begins it; called again for each try.
            size: Bytes that it moves.

        Raises:
            StoreError: It failed, or took too long.
        """
        until = time.monotonic() + self._allowed(size)
        for pause in [*self._pauses(), None]:
            try:
                future = begin()
                return future.result(timeout=max(0.0, until - time.monotonic()))
            except TimeoutError:
                raise self._late(what, size) from None
            except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
                left = until - time.monotonic()
                if pause is None or left <= pause or _LASTING.search(str(error)):
                    raise self._failed(what, error) from None
            time.sleep(pause)
        raise AssertionError

    def wait(self, what: str, future: ts.Future[_T], size: int = 0) -> _T:
        """Waits for what was begun, once, in time.

        Raises:
            StoreError: It took too long, or the store was out of reach. What else went
                wrong is raised as it is.
        """
        try:
            return future.result(timeout=self._allowed(size))
        except TimeoutError:
            raise self._late(what, size) from None
        except (ValueError, RuntimeError) as error:
            if _PASSING.search(str(error)):
                raise self._failed(what, error) from None
            raise

    def _allowed(self, size: int) -> float:
        return self.options.deadline_secs + size / _SLOWEST_BYTES_PER_SEC

    def _pauses(self) -> Iterator[float]:
        pause = _FIRST_PAUSE_SECS
        for _ in range(self.options.retries):
            yield pause
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)

    def _late(self, what: str, size: int) -> errors.StoreError:
        # What is under way still may hold up all that comes after it, for long.
        with self._lock:
            self._opened = None
        return errors.StoreError(
            f"cannot {what}{self._where()}: wanted an answer within"
            f" {self._allowed(size):g} s, found none; see that the store can be"
            " reached, or set a longer StoreOptions.deadline_secs"
        )

    def _failed(self, what: str, error: Exception) -> errors.StoreError:
        said = " ".join(str(error).split(" [")[0].split())[:200]
        return errors.StoreError(
            f"cannot {what}{self._where()}: {said}; see that bucket, region, endpoint"
            " and credentials are right, and that the store can be reached"
        )

    def _where(self) -> str:
        endpoint = self.options.endpoint
        return f" at {endpoint}" if endpoint and self._scheme == "s3" else ""

    def _kv(self) -> ts.KvStore:
        with self._lock:
            if self._opened is None:
                spec = self.spec("")
                future = ts.KvStore.open(spec, context=context())
                self._opened = self.wait(f"open {self.url}", future)
            return self._opened


_BEYOND = "OUT_OF_RANGE"
"""What TensorStore says if a value ends before what was asked for."""

_DELETED_AT_ONCE = 256


def _after(prefix: str) -> str | bytes:
    """The first key that does not begin with `prefix`; empty if there is no such."""
    found = prefix.encode(errors="surrogateescape").rstrip(b"\xff")
    return found[:-1] + bytes([found[-1] + 1]) if found else b""
