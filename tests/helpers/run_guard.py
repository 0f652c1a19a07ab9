"""Ends the processes that a test run has started when the run ends.

Otherwise an interrupted or killed run leaves servers and children behind. All its
processes inherit a mark in their environment, by which a small guard process finds them
when the run has ended. Works only on Linux.
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
_guard: "subprocess.Popen[bytes] | None" = (
    None  # referenced, because a deleted Popen warns
)


def start() -> None:
    """Guards this process, unless it belongs to a guarded run."""
    if MARK in os.environ or not hasattr(os, "pidfd_open"):
        return
    os.environ[MARK] = secrets.token_hex()
    global _guard
    _guard = subprocess.Popen(
        [sys.executable, "-ISE", __file__, str(os.getpid()), os.environ[MARK]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C does not reach it
    )


def guard(run: int, mark: str) -> None:
    """Waits until the process `run` ends, then kills all processes with the mark."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(run)], [], [])
    while processes := find_processes(f"{MARK}={mark}".encode()):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def find_processes(variable: bytes) -> list[int]:
    """Returns all other processes that were started with the environment variable."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        process = int(file.parent.name)
        with contextlib.suppress(OSError):
            if process != os.getpid() and variable in file.read_bytes().split(b"\0"):
                processes.append(process)
    return processes


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
