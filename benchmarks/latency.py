"""A proxy before a server on this machine, with the latency of a distant one.

Run as `python -m benchmarks.latency PORT MILLISECONDS`: it prints its own port. Bytes
wait for half of the milliseconds in each direction, however many are under way, so the
bandwidth is that of the machine. A new connection takes another round trip, as for the
handshake of TCP.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def delayed(url: str, milliseconds: float) -> Iterator[str]:
    """Yields the URL of a server behind a proxy; without latency, `url` itself."""
    if not milliseconds:
        yield url
        return
    command = [sys.executable, "-m", "benchmarks.latency"]
    arguments = [str(urlsplit(url).port), str(milliseconds)]
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, text=True, cwd=_ROOT
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


class _Direction(asyncio.Protocol):
    """Passes on the bytes of one side of a connection, later.

    Args:
        delay: Seconds that the bytes wait.
        first_delay: Seconds that the first bytes wait in addition.
    """

    def __init__(self, delay: float, first_delay: float = 0.0) -> None:
        self.own: asyncio.Future[asyncio.Transport] = asyncio.Future()
        self.other: asyncio.Future[asyncio.Transport] = asyncio.Future()
        self._delay = delay
        self._ready = asyncio.get_running_loop().time() + first_delay
        self._received: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._pass_on())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.own.set_result(transport)

    def data_received(self, data: bytes) -> None:
        self._put(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._put(b"")

    def _put(self, data: bytes) -> None:
        now = asyncio.get_running_loop().time()
        self._received.put_nowait((max(now, self._ready) + self._delay, data))

    async def _pass_on(self) -> None:
        target = await self.other
        while True:
            due, data = await self._received.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            if not data:
                target.close()
                return
            target.write(data)


async def _serve(port: int, milliseconds: float) -> None:
    loop = asyncio.get_running_loop()
    one_way = milliseconds / 2000
    connecting: collections.deque[asyncio.Task[None]] = collections.deque()

    async def connect(client: _Direction) -> None:
        server = _Direction(one_way)
        await loop.create_connection(lambda: server, "127.0.0.1", port)
        client.other.set_result(await server.own)
        server.other.set_result(await client.own)

    def accept() -> _Direction:
        client = _Direction(one_way, first_delay=2 * one_way)
        connecting.append(asyncio.ensure_future(connect(client)))
        return client

    listener = await loop.create_server(accept, "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
