"""A simulated network between the machines of a job, for the files of peers.

It stands in for `http.client` and the server of `_distributed.peer_files`. What is
above, the requests and the checks of the answers, is the real code.
"""

import http.client
import json
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

from flaxckpt import _storage, _util
from flaxckpt._distributed import peer_files
from verification.simulation import kernel

NAME = "network"
"""The name of a `Network` in `World.shared`."""


class Weather(NamedTuple):
    """Chances of faults of a request, and their kinds.

    Attributes:
        fails: The chance that a request fails in one of the ways of `_FAULTS`.
        slow: The chance that it takes up to `slowest_secs`.
        slowest_secs: The longest time of a request.
    """

    fails: float = 0.0
    slow: float = 0.0
    slowest_secs: float = 5.0


_FAULTS = (
    "refused",
    "silent",
    "status",
    "no http",
    "cut off",
    "slow",
    "wrong bytes",
    "wrong length",
    "endless",
)


class Network:
    """The connections between the machines of a world.

    Args:
        world: The world.

    Attributes:
        weather: The chances of faults; it may change.
        apart: Pairs of machines that do not reach each other.
    """

    def __init__(self, world: kernel.World) -> None:
        self.weather = Weather()
        self.apart: set[frozenset[str]] = set()
        self.servers: dict[int, FileServer] = {}
        self.world = world
        world.shared[NAME] = self


def _network() -> Network:
    world = kernel.current()
    assert world is not None
    network: Network = world.shared[NAME]
    return network


def _machine(network: str | None = None) -> str:
    return _network().world._running().process.machine


class FileServer:
    """Stands in for `peer_files.FileServer`."""

    def __init__(self, root: Path, host: str, certificate: str | None = None) -> None:
        assert certificate is None, "TLS is not simulated"
        network = _network()
        self.root = root
        self.process = network.world._running().process
        token = network.world.random.randbytes(4).hex()
        self.peer = peer_files.Peer(host, 50_000 + len(network.servers), token)
        network.servers[self.peer.port] = self

    def close(self) -> None:
        """Stops the server."""
        _network().servers[self.peer.port] = None  # its port is not used again


class _Connection:
    """Stands in for `http.client.HTTPConnection`."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._port = port
        self._timeout = timeout
        self._fault: str | None = None
        self._request: tuple[str, str, Mapping[str, str]] = "", "", {}

    def request(self, method: str, url: str, headers: Mapping[str, str]) -> None:
        network = _network()
        world, weather = network.world, network.weather
        world.point(f"request {url}")
        if weather.slow and world.random.random() < weather.slow:
            world.sleep(weather.slowest_secs * world.random.random())
        self._fault = None
        if weather.fails and world.random.random() < weather.fails:
            self._fault = world.random.choice(_FAULTS)
            world.record(f"request {url}", self._fault)
        server = network.servers[self._port]
        if server is None or not server.process.is_alive or self._fault == "refused":
            raise ConnectionRefusedError("connection refused")
        if frozenset((_machine(), server.process.machine)) in network.apart:
            self._fault = "silent"
        self._request = method, url, headers

    def getresponse(self) -> "_Response":
        network = _network()
        world, server = network.world, network.servers[self._port]
        is_paused = server is not None and server.process.paused_until > world.now
        if self._fault == "silent" or is_paused:
            world.sleep(self._timeout)
            raise TimeoutError("timed out")
        if self._fault == "no http":
            raise http.client.BadStatusLine("\x00")
        if server is None or not server.process.is_alive:
            raise ConnectionResetError("reset by the peer")
        if self._fault == "status":
            return _Response(server, world.random.choice((200, 206, 403, 500)), b"")
        method, url, headers = self._request
        assert headers["Authorization"] == f"Bearer {server.peer.token}"
        path, _, query = url.partition("?")
        if query:
            names = urllib.parse.parse_qs(query)["name"]
            if method == "HEAD":
                found = [_identify(server, name) for name in names]
                if self._fault == "wrong bytes":
                    found = ["the same"] * len(found)
                return _Response(server, 200, b"", self._fault, identities=found)
            contents = [_read(server, name) for name in names]
            sizes = [None if content is None else len(content) for content in contents]
            sent = b"".join(filter(None, contents))
            return _Response(server, 200, sent, self._fault, sizes=sizes)
        content = _read(server, urllib.parse.unquote(path[1:]))
        if content is None:
            return _Response(server, 404, b"")
        start = int(headers.get("Range", "bytes=0-")[len("bytes=") : -1])
        return _Response(server, 206 if start else 200, content[start:], self._fault)

    def close(self) -> None:
        """Ends the connection."""


def _read(server: FileServer, name: str) -> bytes | None:
    if (file := peer_files.open_file(server.root, name)) is None:
        return None
    with file:
        return file.read()


def _identify(server: FileServer, name: str) -> str | None:
    if (file := peer_files.open_file(server.root, name)) is None:
        return None
    with file:
        return str(_storage.files.identity(os.fstat(file.fileno())))


class _Response:
    """Stands in for `http.client.HTTPResponse`, and for its file."""

    def __init__(
        self,
        server: FileServer,
        status: int,
        content: bytes,
        fault: str | None = None,
        *,
        sizes: list[int | None] | None = None,
        identities: list[str | None] | None = None,
    ) -> None:
        random = _network().world.random
        self.fp = self
        self.headers = {
            "File-Sizes": json.dumps(sizes),
            "File-Identities": json.dumps(identities),
        }
        self.status = status
        self.length: int | None = len(content)
        self._server = server
        self._fault = fault
        if fault == "cut off":
            content = content[: random.randrange(len(content) + 1)]
        elif fault == "wrong bytes" and content:
            place = random.randrange(len(content))
            changed = bytes([content[place] ^ 1 << random.randrange(8)])
            content = content[:place] + changed + content[place + 1 :]
        elif fault == "wrong length":
            self.length = random.randrange(2 * len(content) + 2)
        elif fault == "endless":
            self.length = None
            content *= 1000
        self._content = content

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def readinto1(self, buffer: memoryview) -> int:
        world = _network().world
        world.point("receive")
        size = len(buffer)
        if self._fault == "slow":
            world.sleep(29.0)
            size = min(size, 10)
        if not self._server.process.is_alive:
            raise ConnectionResetError("reset by the peer")
        part, self._content = self._content[:size], self._content[size:]
        buffer[: len(part)] = part
        return len(part)


PATCHES: dict[tuple[Any, str], Any] = {
    (peer_files, "FileServer"): FileServer,
    (peer_files, "http"): SimpleNamespace(
        client=SimpleNamespace(
            HTTPConnection=_Connection, HTTPException=http.client.HTTPException
        )
    ),
    (_util.processes, "own_address"): _machine,
}
"""For `stand_ins.installed`."""
