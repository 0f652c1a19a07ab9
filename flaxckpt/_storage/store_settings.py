"""Which options each store has: those set for its URL, and those of the environment."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from flaxckpt import _storage, _util, errors
from flaxckpt._storage.store_options import StoreOptions

if TYPE_CHECKING:
    from flaxckpt._storage.bucket import Bucket

SCHEMES = ("s3", "gs", "memory")

_options: dict[str, StoreOptions] = {}
_stores: dict[tuple[str, StoreOptions], Bucket] = {}


@_util.guessed_names.explain
def set_store_options(url: str, options: StoreOptions | None) -> None:
    """Sets the options of object stores for this process.

    ```python
    flaxckpt.set_store_options("s3://bucket", flaxckpt.StoreOptions(region="eu-west-1"))
    ```

    Args:
        url: A bucket, `s3://bucket`; or `s3://`, for all buckets without options of
            their own.
        options: The options; None for the options of the environment.

    Raises:
        OptionError: The URL is not the URL of an object store.
    """
    if not isinstance(url, str):
        raise errors.OptionError(
            "wanted the URL of a bucket, such as s3://bucket, found"
            f" {_util.arguments.describe(url)}; it comes before the options"
        )
    if not isinstance(options, StoreOptions | None):
        raise errors.OptionError(
            "options must be a flaxckpt.StoreOptions or None, got"
            f" {_util.arguments.describe(options)}"
        )
    scheme, separator, bucket = url.partition("://")
    if scheme not in SCHEMES or not separator or "/" in bucket:
        raise errors.OptionError(
            f"wanted the URL of a bucket, such as s3://bucket, found {url!r}"
        )
    _options.pop(url, None)
    if options is not None:
        _options[url] = options


def forget(store: Bucket) -> None:
    """Forgets an open bucket: the next use opens a new connection."""
    _stores.pop((store.url, store.options), None)


def of(scheme: str, bucket: str) -> Bucket:
    """Returns the bucket of a URL, with the present options."""
    chosen = _options.get(f"{scheme}://{bucket}") or _options.get(f"{scheme}://")
    options = _completed(scheme, chosen or StoreOptions())
    key = (f"{scheme}://{bucket}", options)
    if key not in _stores:
        # Through the door: TensorStore is imported with the first bucket.
        _stores.setdefault(key, _storage.bucket.Bucket(scheme, bucket, options))
    return _stores[key]


def _completed(scheme: str, options: StoreOptions) -> StoreOptions:
    if scheme != "s3":
        return options
    endpoint = options.endpoint or _variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    region = options.region or _variable("AWS_REGION", "AWS_DEFAULT_REGION")
    has_keys = bool(os.environ.get("AWS_ACCESS_KEY_ID"))
    return dataclasses.replace(
        options,
        endpoint=endpoint and endpoint.rstrip("/"),
        # Servers other than Amazon's ignore the region, and do not report any.
        region=region or ("us-east-1" if endpoint else None),
        profile=options.profile or (None if has_keys else _variable("AWS_PROFILE")),
    )


def _variable(*names: str) -> str | None:
    values = (os.environ.get(name) for name in names)
    return next((value for value in values if value), None)
