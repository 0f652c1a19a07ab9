"""Requests to object stores with deadlines, retries and clear errors.

TensorStore waits minutes for a dead endpoint. These requests are retried after
temporary failures until a deadline, and their errors name the request and the store.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import tensorstore as ts

from flaxckpt import errors
from flaxckpt._storage import store_options
from flaxckpt._storage.store_options import StoreOptions
from flaxckpt._types import JSON

_T = TypeVar("_T")

_SLOWEST_BYTES_PER_SEC = 2**18
"""Assumed lowest transfer rate, which extends the deadline by the size of a request."""

_FIRST_PAUSE_SECS = 0.1
_LONGEST_PAUSE_SECS = 2.0
_LEAST_SECS = 1.0
"""The seconds of a request that cleans up in a store that has not answered for long."""

_FIRST_RETRIES = 4
"""Retries for a store that has never answered, because its address may be wrong."""

_TENSORSTORE_RETRIES: dict[str, JSON] = {
    "max_retries": 3,
    "initial_delay": "100ms",
    "max_delay": "1s",
}
"""TensorStore's own retries within one attempt of ours."""

_RETRIES_OF_ARRAYS: dict[str, JSON] = {
    "max_retries": 32,
    "initial_delay": "100ms",
    "max_delay": "2s",
}
"""TensorStore's retries of reads without `Connection.request`, until the deadline."""

_PERMANENT = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|NOT_FOUND|INVALID_ARGUMENT|OUT_OF_RANGE"
    "|UNIMPLEMENTED|InvalidAccessKey|SignatureDoesNotMatch"
)
"""Errors of a store that retries do not fix."""

_TEMPORARY = re.compile("ABORTED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|CURL")
"""Temporary errors of TensorStore, not due to a wrong value."""


_MEMORY = ts.Context({"memory_key_value_store": {}})
"""Context with the objects of `memory://` of this process."""

_shared: dict[str, JSON] = {}
"""Resources that the specs of buckets refer to. In one context, TensorStore takes equal
specs for one store, and can copy between databases in the store."""

_numbers = itertools.count()


def context(spec: Mapping[str, JSON] | None = None) -> ts.Context:
    """Returns a TensorStore context with the store options and this `memory://`.

    Each has its own cache, so it never takes a replaced database for the old one.
    """
    return ts.Context({"cache_pool": {}, **_shared, **(spec or {})}, _MEMORY)


class TransientError(errors.StoreError):
    """A single attempt of a request failed temporarily."""


class ForkedError(errors.StoreError):
    """TensorStore does not work in a forked process."""


_user: int | None = None
"""PID of the first process with TensorStore threads, here or before a fork."""


def use_threads() -> None:
    """Records the use of TensorStore's threads by this process.

    Call it before TensorStore touches anything except memory. Raises ForkedError if the
    parent of this fork used its threads: TensorStore would abort the process.
    """
    global _user
    if _user is None:
        _user = os.getpid()
    if _user != os.getpid():
        raise ForkedError(
            "TensorStore, which reads and writes object stores and compressed arrays,"
            f" does not work in a forked process if its parent (process {_user}) used"
            " TensorStore before the fork. Start processes with multiprocessing's"
            " 'spawn' or 'forkserver'"
        )


class Connection:
    """Connection to a bucket; `scheme` is `s3`, `gs` or `memory`."""

    def __init__(self, scheme: str, bucket: str, options: StoreOptions) -> None:
        self.url = f"{scheme}://{bucket}"
        self.options = options
        self._scheme = scheme
        self._bucket = bucket
        self._opened: ts.KvStore | None = None
        self._has_answered = False
        self._silent_since: float | None = None
        self._resources = self._name_resources(_TENSORSTORE_RETRIES)
        alone = (
            _TENSORSTORE_RETRIES if options.retries is not None else _RETRIES_OF_ARRAYS
        )
        self._resources_alone = self._name_resources(alone)
        _shared.update(self._resources)
        _shared.update(self._resources_alone)

    def spec(self, prefix: str) -> dict[str, JSON]:
        """Returns the TensorStore spec of the keys under `prefix`."""
        return self._spec(prefix, self._resources_alone)

    def _spec(self, prefix: str, resources: Mapping[str, JSON]) -> dict[str, JSON]:
        if self._scheme == "memory":
            return {"driver": "memory", "path": f"{self._bucket}/{prefix}"}
        spec: dict[str, JSON] = {
            "driver": "gcs" if self._scheme == "gs" else "s3",
            "bucket": self._bucket,
            "path": prefix,
            **{name.partition("#")[0]: name for name in resources},
        }
        if self._scheme == "gs":
            return spec
        spec["use_conditional_write"] = True
        if self.options.endpoint:
            spec["endpoint"] = self.options.endpoint
        if self.options.region:
            spec["aws_region"] = self.options.region
        return spec

    def _name_resources(self, retries: Mapping[str, JSON]) -> dict[str, JSON]:
        """Returns context resources (retries, credentials) under unique names."""
        if self._scheme == "memory":
            return {}
        driver = "gcs" if self._scheme == "gs" else "s3"
        resources: dict[str, JSON] = {
            f"{driver}_request_retries": dict(retries),
            f"{driver}_request_concurrency": {"limit": self.options.concurrency},
        }
        if driver == "s3":
            resources["aws_credentials"] = self._credentials()
        number = next(_numbers)
        return {f"{name}#{number}": value for name, value in resources.items()}

    def _credentials(self) -> JSON:
        options = self.options
        if options.anonymous:
            return {"type": "anonymous"}
        if options.profile or options.credentials_file:
            credentials: dict[str, JSON] = {"type": "profile"}
            if options.profile:
                credentials["profile"] = options.profile
            if options.credentials_file:
                credentials["credentials_file"] = options.credentials_file
            return credentials
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            return {"type": "environment"}
        return {"type": "default"}

    def kv(self) -> ts.KvStore:
        """Returns the open bucket; reopens the bucket after a late answer."""
        opened = self._opened
        if opened is None:  # concurrent threads may each open the bucket; all work
            spec = self._spec("", self._resources)
            future = ts.KvStore.open(spec, context=context())
            opened = self._opened = self.wait(f"open {self.url}", future)
        return opened

    # ---- waiting ------------------------------------------------------------------

    def request(
        self, what: str, begin: Callable[[], ts.Future[_T]], size: int = 0
    ) -> _T:
        """Makes the request `what` of `size` bytes, with retries until a deadline.

        Raises StoreError if the request failed, or exceeded its deadline.
        """
        self._use_threads()
        secs = self._timeout_secs(size)
        until = time.monotonic() + secs
        tries, pause = 1, _FIRST_PAUSE_SECS
        while True:
            try:
                result = begin().result(timeout=max(0.0, until - time.monotonic()))
            except TimeoutError:
                raise self._timeout_error(what, secs) from None
            except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
                left = until - time.monotonic()
                if left <= pause and not _PERMANENT.search(str(error)):
                    self._note_silence()
                if left <= pause or not self._is_retried(error, tries):
                    raise self._request_error(what, error) from None
            else:
                self._has_answered, self._silent_since = True, None
                return result
            time.sleep(pause)
            tries, pause = tries + 1, min(2 * pause, _LONGEST_PAUSE_SECS)

    def _is_retried(self, error: Exception, tries: int) -> bool:
        """Returns True if a request should be retried after `tries` failures."""
        if _PERMANENT.search(str(error)):
            self._has_answered, self._silent_since = True, None
            return False
        if self.options.retries is not None:
            return tries <= self.options.retries
        is_temporary = self._has_answered and _TEMPORARY.search(str(error))
        return bool(is_temporary) or tries <= _FIRST_RETRIES

    def wait(self, what: str, future: ts.Future[_T], size: int = 0) -> _T:
        """Waits for a single attempt until a deadline; other errors propagate.

        Raises StoreError after the deadline, or for a `TransientError`.
        """
        self._use_threads()
        secs = self._timeout_secs(size)
        try:
            return future.result(timeout=secs)
        except TimeoutError:
            raise self._timeout_error(what, secs) from None
        except (ValueError, RuntimeError) as error:
            if _TEMPORARY.search(str(error)):
                raise TransientError(str(self._request_error(what, error))) from None
            raise

    def _use_threads(self) -> None:
        if self._scheme != "memory":
            use_threads()

    def _timeout_secs(self, size: int) -> float:
        """Returns the seconds for a request; see `store_options.cleanup`."""
        secs = self.options.deadline_secs + size / _SLOWEST_BYTES_PER_SEC
        if self._silent_since is None or not store_options.cleans_up.get():
            return secs
        silent = time.monotonic() - self._silent_since
        return min(secs, max(_LEAST_SECS, self.options.deadline_secs - silent))

    def _note_silence(self) -> None:
        if self._silent_since is None or not store_options.cleans_up.get():
            self._silent_since = time.monotonic()

    def _timeout_error(self, what: str, secs: float) -> errors.StoreError:
        self._note_silence()
        # The late request may delay later requests of this connection for long.
        self._opened = None
        return errors.StoreError(
            f"cannot {what}{self._where()}: no answer within"
            f" {secs:.3g} s; check that the store can be"
            " reached, or increase StoreOptions.deadline_secs"
        )

    def _request_error(self, what: str, error: Exception) -> errors.StoreError:
        message = errors.one_line(str(error).split(" [")[0], 200)
        return errors.StoreError(
            f"cannot {what}{self._where()}: {message}; check bucket, region, endpoint"
            " and credentials, and that the store can be reached"
        )

    def _where(self) -> str:
        endpoint = self.options.endpoint
        return f" at {endpoint}" if endpoint and self._scheme == "s3" else ""
