"""Seconds to import flaxckpt, and CPU seconds of commands that read metadata.

Training programs import the packages that flaxckpt needs anyway; commands need none of
them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import flaxckpt
from benchmarks import timing
from benchmarks.samples import Rows, Sample, Series, Settings, Skip

CASE = "imports"
_IMPORTS = {
    "flaxckpt": "import flaxckpt",
    "its dependencies": "import jax, flax, optax, tensorstore",
    "orbax": "import orbax.checkpoint",
}
_TIMES = 3
"""Imports are short and their times vary, so each round has three of each."""

_PROGRAM = """
import time
start = time.perf_counter()
{}
print(time.perf_counter() - start)
"""

VERBS = {
    "ls": ("ls", "RUN"),
    "du": ("du", "RUN"),
    "explain": ("explain", "RUN", "--keep", "latest:1"),
    "pin": ("pin", "RUN", "1"),
    "unpin": ("unpin", "RUN", "1"),
    "prune": ("prune", "RUN", "--keep", "latest:1"),
    "show": ("show", "RUN"),
}
"""Verb -> a command line that reads metadata only; `RUN` is the run directory."""


def run(settings: Settings) -> Rows:
    """Measures each import and each verb in fresh processes."""
    names = list(_IMPORTS)
    if importlib.util.find_spec("orbax") is None:
        names.remove("orbax")
        yield Skip(CASE, "orbax", "orbax is not installed")
    for turn in timing.turns(names, _TIMES * settings.rounds):
        program = _PROGRAM.format(_IMPORTS[turn.contender])
        finished = subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        if turn.is_timed:
            series = Series(CASE, "import", turn.contender)
            yield Sample(series, float(finished.stdout))
    directory = settings.directory / "run"
    with flaxckpt.Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"params": {"w": np.ones(8)}})
    for turn in timing.turns([*VERBS], _TIMES * settings.rounds):
        seconds = _cpu_seconds(VERBS[turn.contender], directory)
        if turn.is_timed:
            series = Series(CASE, f"{turn.contender}: CPU", "flaxckpt")
            yield Sample(series, seconds)


def _cpu_seconds(command: Sequence[str], directory: Path) -> float:
    """Returns the user and system time of a command in a process of its own."""
    words = [str(directory) if word == "RUN" else word for word in command]
    process = subprocess.Popen(
        [sys.executable, "-m", "flaxckpt", *words], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return usage.ru_utime + usage.ru_stime
