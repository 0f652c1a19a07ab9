"""Serves the page on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import uvicorn

from flaxckpt import errors
from flaxckpt._report.ui import app, places, workspace
from flaxckpt._types import PathLike

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
        others: Further checkpoints to compare with, and to restore into or from.
        on_ready: Called with the address, which has a token, before the first request.

    Raises:
        CheckpointError: A path cannot be opened.
        OptionError: The port is in use.
    """
    found = places.find_places(path, others)
    others_running = set(threading.enumerate())
    with (
        contextlib.closing(workspace.open_workspace(found)) as space,
        contextlib.closing(_listen(port)) as listener,
    ):
        if found.is_single:
            for place in found.runs.values():
                space.feeds.latest(place)
        number = listener.getsockname()[1]
        token = secrets.token_urlsafe(32)
        server = _Server(
            uvicorn.Config(
                app.make_app(space, token=token, port=number),
                log_level="error",
                access_log=False,
                server_header=False,
                ws="none",
                lifespan="off",
                limit_concurrency=_MOST_CONNECTIONS,
            )
        )
        on_ready(f"http://{HOST}:{number}/?token={token}")
        # uvicorn raises the signal again, after it has ended all connections.
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    _end_unless_idle(set(threading.enumerate()) - others_running)


class _Server(uvicorn.Server):
    """A server that ends soon, whatever is being read."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the server, and the process if a request is still being answered."""
        try:
            await asyncio.wait_for(super().shutdown(sockets), _SHUTDOWN_SECS)
        except TimeoutError:
            _end_process()


def _end_unless_idle(threads: Iterable[threading.Thread]) -> None:
    """Ends the process if some of the threads go on, which read runs.

    Python would join those of verifications; the others may be about to import a
    module, which Python refuses at exit.
    """
    deadline = time.monotonic() + _SHUTDOWN_SECS
    for thread in threads:
        if not thread.daemon or thread.name.startswith("flaxckpt"):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _end_process()


def _end_process() -> NoReturn:
    """Ends the process at once: Python would wait minutes for a thread that reads.

    Nothing is written here, so nothing has to be finished.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


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
