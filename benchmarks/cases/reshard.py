"""Bytes that processes read to restore on another mesh, to those that they need.

Four processes with two devices each save on four meshes and restore on the other three.
Everything that a restore reads counts, also metadata, and all of it is verified.
"""

from __future__ import annotations

import collections
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import reshard, timing
from benchmarks.samples import Rows, Sample, Series, Settings, Skip

CASE = "reshard"
_ROOT = Path(__file__).parents[2]
_FIGURES = {
    "shard_axes": "12 changes of mesh, shard_axes",
    "default": "12 changes of mesh",
}
_TIMEOUT_SECS = 600


def run(settings: Settings) -> Rows:
    """Measures once, because the bytes hardly vary."""
    if not reshard.IO.exists():
        yield Skip(CASE, "all", f"this system has no {reshard.IO}")
        return
    with timing.scratch(settings.directory) as scratch:
        rows = _in_processes(scratch, settings)
    for layout, figure in _FIGURES.items():
        read: collections.Counter[str] = collections.Counter()
        needed: collections.Counter[str] = collections.Counter()
        for row in rows:
            if row["layout"] == layout:
                read[row["change"]] += row["read"]
                needed[row["change"]] += row["needed"]
        ratios = [read[change] / needed[change] for change in needed]
        total = read.total() / needed.total()
        yield Sample(Series(CASE, f"{figure}: read", "flaxckpt"), total, "x")
        worst = Series(CASE, f"{figure}: the worst", "flaxckpt")
        yield Sample(worst, max(ratios), "x")


def _in_processes(directory: Path, settings: Settings) -> list[dict[str, Any]]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, "-m", reshard.__name__]
    rest = [str(port), str(directory), *["--quick"] * settings.quick]
    flags = "--xla_force_host_platform_device_count=2"
    processes = [
        subprocess.Popen(
            [*command, str(rank), *rest],
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )
        for rank in range(reshard.PROCESSES)
    ]
    try:
        texts = [process.communicate(timeout=_TIMEOUT_SECS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        codes = [process.returncode for process in processes]
        raise RuntimeError(f"the processes of the case {CASE} ended with {codes}")
    return [json.loads(line) for text in texts for line in text.splitlines()]
