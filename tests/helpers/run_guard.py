"""Ends the processes that a test run has started, as soon as the run has ended.

A run that is interrupted, or killed, leaves servers and children behind otherwise. All
that it starts inherit a mark in their environment, by which a small process of its own
finds them when the run is gone. Only Linux has what this needs.
"""

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "FLAXCKPT_TEST_RUN"
_guard: "subprocess.Popen[bytes] | None" = None  # kept: Popen warns when it is dropped


def start() -> None:
    """Guards this process, unless it is part of a run that is guarded."""
    if MARK in os.environ or not hasattr(os, "pidfd_open"):
        return
    os.environ[MARK] = secrets.token_hex()
    global _guard
    _guard = subprocess.Popen(
        [sys.executable, "-ISE", __file__, str(os.getpid()), os.environ[MARK]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )


def guard(run: int, mark: str) -> None:
    """Waits until the process `run` ends, then kills all that have the mark."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(run)], [], [])
    while processes := marked(f"{MARK}={mark}".encode()):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def marked(variable: bytes) -> list[int]:
    """The processes, but this one, that have been started with the variable set."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        process = int(file.parent.name)
        with contextlib.suppress(OSError):
            if process != os.getpid() and variable in file.read_bytes().split(b"\0"):
                found.append(process)
    return found


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
