"""Saves to and restores from a bucket, with the latency of a distant one.

SeaweedFS serves the bucket on this machine, from the disk to be measured. boto3 writes
and reads each array as an object, in parts; plain sockets do so without parts, without
checksums and without signing what they send: the limit of this machine. Both restore
numpy arrays; flaxckpt restores jax arrays, verified.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import http.client
import importlib.util
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np

import flaxckpt
from benchmarks import latency, states, timing
from benchmarks.samples import Rows, Sample, Series, Settings, Skip
from benchmarks.states import PyTree

CASE = "buckets"
BOTO3 = "boto3"
SOCKETS = "plain sockets"
FLAXCKPT = "flaxckpt"
_ROUND_TRIPS_MS = (0, 20, 80)
_SOCKETS = 8
_VOLUMES = (
    200  # of 64 MB; SeaweedFS does not reuse the space of deleted objects at once
)

_Arrays: TypeAlias = Mapping[str, Any]


def run(settings: Settings) -> Rows:
    """Measures each latency with a new server."""
    if why := obstacle():
        yield Skip(CASE, "all", why)
        return
    for milliseconds in _ROUND_TRIPS_MS[: 1 if settings.quick else None]:
        with (
            timing.scratch(settings.directory) as scratch,
            server(scratch) as (url, bucket),
            latency.delayed(url, milliseconds) as delayed_url,
        ):
            yield from _measure(settings, f"{milliseconds} ms", delayed_url, bucket)


def obstacle() -> str:
    """Returns the reason why nothing can be measured; empty if it can."""
    for package in ("boto3", "pytest"):  # pytest for the server of the tests
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return "" if shutil.which("weed", path=beside) else "SeaweedFS is not installed"


@contextlib.contextmanager
def server(directory: Path) -> Iterator[tuple[str, str]]:
    """Yields URL and bucket of a server, with its credentials in the environment."""
    from tests.helpers import store_servers

    server = store_servers.seaweed(directory, volumes=_VOLUMES)
    before = dict(os.environ)
    try:
        server.start()
        os.environ.update(server.environment)
        yield server.url, server.bucket
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.kill()


def _measure(settings: Settings, label: str, url: str, bucket: str) -> Rows:
    abstract_state = states.mixed(quick=settings.quick)
    original = states.fill(abstract_state)
    # The servers of all latencies have the same name.
    flaxckpt.set_store_options(
        f"s3://{bucket}", flaxckpt.StoreOptions(endpoint=url, region="us-east-1")
    )
    contenders: dict[str, _Contender] = {
        FLAXCKPT: _Flaxckpt(f"s3://{bucket}/run"),
        BOTO3: _Boto3(url, bucket),
        SOCKETS: _Sockets(url, bucket),
    }
    try:
        for step, turn in enumerate(timing.turns(list(contenders), settings.rounds)):
            contender = contenders[turn.contender]
            new = jax.tree.map(functools.partial(jnp.add, step), original)
            state = jax.block_until_ready(new)
            timing.settle()
            _, save = timing.measure(contender.save, step, state)
            timing.settle()
            restored, restore = timing.measure(contender.restore, step, abstract_state)
            if turn.is_first:
                _check_equal(restored, state)
            del restored
            contender.delete(step)
            if turn.is_timed:
                yield Sample(Series(CASE, f"{label}: save", turn.contender), save)
                yield Sample(Series(CASE, f"{label}: restore", turn.contender), restore)
    finally:
        for contender in contenders.values():
            contender.close()
        flaxckpt.set_store_options(f"s3://{bucket}", None)


def _check_equal(restored: _Arrays, state: _Arrays) -> None:
    for name, array in state.items():
        if not np.array_equal(restored[name], array):
            raise ValueError(f"{name} differs after a restore")


class _Contender:
    """Saves arrays as steps in a bucket, and restores them."""

    def save(self, step: int, state: _Arrays) -> None:
        """Returns when the step is complete."""
        raise NotImplementedError

    def restore(self, step: int, abstract_state: PyTree) -> _Arrays:
        """Returns the arrays of a step."""
        raise NotImplementedError

    def delete(self, step: int) -> None:
        """Deletes a step; not timed."""

    def close(self) -> None:
        """Closes threads and connections."""


class _Flaxckpt(_Contender):
    def __init__(self, url: str) -> None:
        self._url = url
        self._checkpointer = flaxckpt.Checkpointer(url)

    def save(self, step: int, state: _Arrays) -> None:
        self._checkpointer.save(step, state).wait()

    def restore(self, step: int, abstract_state: PyTree) -> _Arrays:
        restored = flaxckpt.load(self._url, abstract_state, step=step)
        arrays: _Arrays = jax.block_until_ready(restored)
        return arrays

    def delete(self, step: int) -> None:
        self._checkpointer.delete(step)

    def close(self) -> None:
        self._checkpointer.close()


class _Objects(_Contender):
    """An object for each array, without anything that tells whether a step is whole."""

    def __init__(self, url: str, bucket: str) -> None:
        import boto3

        self._bucket = bucket
        self._client = boto3.client("s3", endpoint_url=url)

    def restore(self, step: int, abstract_state: PyTree) -> _Arrays:
        contents = self._read([f"{self.prefix(step)}{name}" for name in abstract_state])
        return {
            name: np.frombuffer(content, leaf.dtype).reshape(leaf.shape)
            for content, (name, leaf) in zip(
                contents, abstract_state.items(), strict=True
            )
        }

    def prefix(self, step: int) -> str:
        """Returns the start of the keys of a step."""
        return f"{type(self).__name__}/{step}/"

    def _read(self, keys: list[str]) -> list[Any]:
        """Returns the content of objects."""
        raise NotImplementedError

    def delete(self, step: int) -> None:
        listed = self._client.list_objects_v2(
            Bucket=self._bucket, Prefix=self.prefix(step)
        )
        for row in listed["Contents"]:
            self._client.delete_object(Bucket=self._bucket, Key=row["Key"])

    def close(self) -> None:
        self._client.close()


class _Boto3(_Objects):
    """boto3's TransferManager with its defaults: parts of 8 MB, 10 threads."""

    def save(self, step: int, state: _Arrays) -> None:
        from s3transfer.manager import TransferManager

        with TransferManager(self._client) as manager:
            uploads = [
                manager.upload(
                    io.BytesIO(np.asarray(array).data),
                    self._bucket,
                    f"{self.prefix(step)}{name}",
                )
                for name, array in state.items()
            ]
            for upload in uploads:
                upload.result()

    def _read(self, keys: list[str]) -> list[Any]:
        from s3transfer.manager import TransferManager

        contents = [io.BytesIO() for _ in keys]
        with TransferManager(self._client) as manager:
            downloads = [
                manager.download(self._bucket, key, content)
                for key, content in zip(keys, contents, strict=True)
            ]
            for download in downloads:
                download.result()
        return [content.getbuffer() for content in contents]


class _Sockets(_Objects):
    """HTTP without anything around it: one request for each array."""

    def __init__(self, url: str, bucket: str) -> None:
        super().__init__(url, bucket)
        self._address = urlsplit(url).netloc
        self._local = threading.local()
        self._pool = concurrent.futures.ThreadPoolExecutor(_SOCKETS)

    def save(self, step: int, state: _Arrays) -> None:
        def put(item: tuple[str, jax.Array]) -> None:
            name, array = item
            content = np.asarray(array).reshape(-1).view(np.uint8)
            key = f"{self.prefix(step)}{name}"
            self._request("PUT", "put_object", key, content.data).read()

        self._each(put, state.items())

    def _read(self, keys: list[str]) -> list[Any]:
        def get(key: str) -> np.ndarray[Any, Any]:
            response = self._request("GET", "get_object", key)
            content = np.empty(int(response.headers["Content-Length"]), np.uint8)
            view, size = content.data, 0
            while size < len(content):
                size += response.readinto(view[size:])
            response.read()
            return content

        return self._each(get, keys)

    def _each(self, function: Callable[[Any], Any], items: Any) -> list[Any]:
        return list(self._pool.map(function, items))

    def _request(
        self, method: str, operation: str, key: str, body: Any = None
    ) -> http.client.HTTPResponse:
        url = urlsplit(
            self._client.generate_presigned_url(
                operation, Params={"Bucket": self._bucket, "Key": key}
            )
        )
        if not hasattr(self._local, "connection"):
            connect = functools.partial(http.client.HTTPConnection, blocksize=2**20)
            self._local.connection = connect(self._address)
        connection: http.client.HTTPConnection = self._local.connection
        connection.request(method, f"{url.path}?{url.query}", body)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{method} {key}: {response.status} {response.read()!r}")
        return response

    def close(self) -> None:
        self._pool.shutdown()
        super().close()
