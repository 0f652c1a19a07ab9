"""`StoreOptions`, the options of one object store, and short deadlines of requests."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from flaxckpt import _util, errors


@dataclasses.dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of an object store.

    Options that are None come from the environment: `AWS_ENDPOINT_URL_S3` or
    `AWS_ENDPOINT_URL`, `AWS_REGION` or `AWS_DEFAULT_REGION`, `AWS_PROFILE`, and the
    credentials of the AWS and Google tools.

    Attributes:
        endpoint: URL of an S3 server; by default Amazon's.
        region: Region of the bucket.
        profile: Section of the AWS credentials file.
        credentials_file: Path to use instead of `~/.aws/credentials`.
        anonymous: Whether to send unsigned requests, for public buckets.
        deadline_secs: Seconds for a request, including retries; large objects get one
            more second for each 256 KiB.
        retries: Number of retries after a temporary failure. None: a store that has
            answered before is retried until the deadline, so that it may restart; a
            store that has never answered is asked 5 times in all.
        concurrency: Number of concurrent requests.

    Raises:
        OptionError: A number is out of range.
    """

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    credentials_file: str | None = None
    anonymous: bool = False
    deadline_secs: float = 60.0
    retries: int | None = None
    concurrency: int = 32

    def __post_init__(self) -> None:
        _util.arguments.check_positive("deadline_secs", self.deadline_secs)
        if self.retries is not None:
            _util.arguments.check_int("retries", self.retries, least=0)
        _util.arguments.check_int("concurrency", self.concurrency, least=1)
        for name in ("endpoint", "region", "profile", "credentials_file"):
            value = getattr(self, name)
            if not isinstance(value, str | None):
                raise errors.OptionError(
                    f"{name} must be a string or None, got"
                    f" {_util.arguments.describe(value)}"
                )


cleans_up = contextvars.ContextVar("cleans_up", default=False)
"""Whether the requests of this thread clean up after others."""


@contextlib.contextmanager
def cleanup() -> Iterator[None]:
    """Limits the requests of this thread in the block, which clean up after others.

    After one without an answer, they have one deadline together, and then a moment
    each: a sweep removes what they leave.
    """
    token = cleans_up.set(True)
    try:
        yield
    finally:
        cleans_up.reset(token)
