"""Serves the page on this machine until Ctrl-C."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Sequence

import uvicorn

from flaxckpt import _doors, errors
from flaxckpt._types import PathLike
from flaxckpt._ui import app, feeds, opened, places
from flaxckpt._ui.workspace import Workspace

HOST = "127.0.0.1"

_SHUTDOWN_SECS = 1
_MOST_CONNECTIONS = 64


def serve(
    path: PathLike,
    *,
    port: int = 0,
    others: Sequence[PathLike] = (),
    on_ready: Callable[[str], None],
) -> None:
    """Serves the page on a run, a checkpoint or a directory of runs, until Ctrl-C.

    Args:
        path: The run directory, checkpoint, or directory of runs.
        port: The port on 127.0.0.1; 0 for any free one.
        others: Further checkpoints that plans may restore into or from.
        on_ready: Called with the address, which has a token, before the first request.

    Raises:
        CheckpointError: A path cannot be opened.
        OptionError: The port is in use.
    """
    found = places.find_places(path, others)
    _doors.open_all()  # before there are threads
    with contextlib.closing(_listen(port)) as listener:
        number = listener.getsockname()[1]
        token = secrets.token_urlsafe(32)
        with contextlib.closing(feeds.Feeds()) as following:
            if found.is_single:
                for place in found.runs.values():
                    following.latest(place)
            workspace = Workspace(found, following, opened.OpenCheckpoints())
            server = _Server(
                uvicorn.Config(
                    app.make_app(workspace, token=token, port=number),
                    log_level="error",
                    access_log=False,
                    server_header=False,
                    ws="none",
                    lifespan="off",
                    limit_concurrency=_MOST_CONNECTIONS,
                    timeout_graceful_shutdown=_SHUTDOWN_SECS,
                ),
                before_shutdown=following.close,
            )
            on_ready(f"http://{HOST}:{number}/?token={token}")
            # uvicorn raises the signal again, after it has ended all connections.
            with contextlib.suppress(KeyboardInterrupt):
                server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """A server that ends the streams of events before it waits for connections."""

    def __init__(
        self, config: uvicorn.Config, *, before_shutdown: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._before_shutdown = before_shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the server."""
        self._before_shutdown()
        await super().shutdown(sockets)


def _listen(port: int) -> socket.socket:
    """Returns a socket that listens on this machine only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(_MOST_CONNECTIONS)
    except (OSError, OverflowError) as error:
        listener.close()
        raise errors.OptionError(
            f"port {port} of {HOST} cannot be used: {error}; pass another --port, or"
            " none for any free one"
        ) from None
    return listener
