"""Processes of a job on this machine, for cases that need several.

A case is a module that is run as `python -m MODULE RANK PORT PROCESSES DIRECTORY
[--quick]`, and prints its results as JSON, a line each.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

DEVICES = 8
"""Devices of all processes together."""

_ROOT = Path(__file__).parents[1]
_TIMEOUT_SECS = 600


class Job(NamedTuple):
    """The job of a process.

    Attributes:
        rank: The number of the process.
        processes: The number of processes.
        directory: A directory that all share.
        quick: True for tiny states.
    """

    rank: int
    processes: int
    directory: Path
    quick: bool


def join() -> Job:
    """Joins the job that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("processes", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{given.port}"
        jax.distributed.initialize(address, given.processes, given.rank)
    return Job(given.rank, given.processes, given.directory, given.quick)


def run(
    module: str, processes: int, directory: Path, *, quick: bool
) -> list[dict[str, Any]]:
    """Runs a module as several processes; returns all that they print.

    Raises:
        RuntimeError: A process failed.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    rest = [str(port), str(processes), str(directory), *["--quick"] * quick]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), *rest],
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )
        for rank in range(processes)
    ]
    try:
        texts = [process.communicate(timeout=_TIMEOUT_SECS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    if any(codes):
        raise RuntimeError(f"the processes of {module} ended with {codes}")
    lines = (line for text in texts for line in text.splitlines())
    # Gloo prints its connections, too.
    return [json.loads(line) for line in lines if line.startswith("{")]
