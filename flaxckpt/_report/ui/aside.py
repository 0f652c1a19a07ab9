"""A process beside the server, for what needs jax.

jax takes more memory than all else of the page, and never gives it back.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from flaxckpt import errors

_T = TypeVar("_T")

_IDLE_SECS = 20.0
"""The process ends so long after its last call."""

_lock = threading.Lock()
_running: list[tuple[subprocess.Popen[bytes], Any]] = []
"""The process, and our end of its pipe; none before the first call."""


def call(function: Callable[..., _T], *args: object) -> _T:
    """Returns what a function returns in the other process, or raises its error.

    Raises:
        CheckpointError: The process ended, such as without memory.
    """
    with _lock:
        for is_last in (False, True):  # an idle process may be ending
            _, pipe = _running[0] if _running else _start()
            try:
                pipe.send((function, args))
                is_error, result = pipe.recv()
                break
            except (EOFError, OSError):
                code = _end()
                if is_last:
                    raise errors.CheckpointError(
                        f"the process that plans restores ended with code {code}: the"
                        " memory may not suffice"
                    ) from None
    if is_error:
        raise result
    return result  # type: ignore[no-any-return]


def _start() -> tuple[subprocess.Popen[bytes], Any]:
    ours, theirs = multiprocessing.Pipe()
    code = f"from {__name__} import answer; answer({theirs.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # Ctrl-C is for the server
    )
    theirs.close()
    threading.Thread(target=process.wait, daemon=True).start()  # collects it
    _running.append((process, ours))
    return process, ours


@atexit.register
def _end() -> int | None:
    """Ends the process, and returns its code."""
    for process, pipe in _running[:]:
        _running.clear()
        pipe.close()
        process.kill()
        return process.wait()
    return None


def answer(pipe: int) -> None:
    """Answers the calls from a pipe until none comes any more, or the server ends."""
    calls = Connection(pipe)
    try:
        while calls.poll(_IDLE_SECS):
            function, args = calls.recv()
            try:
                result = False, function(*args)
            except Exception as error:
                result = True, error
            calls.send(result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the server has ended
