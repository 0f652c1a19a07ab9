"""The memory that a save and a restore take in addition to the state.

Only anonymous memory counts: the system can drop the pages of a mapped file at any
time. Each contender saves in one fresh process and restores in another, so that no
contender reuses memory of another.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import contenders, memory, timing
from benchmarks.samples import Rows, Sample, Series, Settings, Skip

CASE = "memory"
_ROOT = Path(__file__).parents[2]


def run(settings: Settings) -> Rows:
    """Measures once, because memory varies little."""
    if not memory.STATUS.exists():
        yield Skip(CASE, "all", f"this system has no {memory.STATUS}")
        return
    selected, skips = contenders.select(CASE, contenders.OF_LARGE_STATES, settings)
    yield from skips
    for contender in selected.values():
        with timing.scratch(settings.directory) as scratch:
            for action in ("save", "restore"):
                extra = _in_fresh_process(contender.name, action, scratch, settings)
                yield Sample(Series(CASE, action, contender.name), extra, "x")


def _in_fresh_process(
    contender: str, action: str, directory: Path, settings: Settings
) -> float:
    command = [sys.executable, "-m", memory.__name__, contender, action, str(directory)]
    if settings.quick:
        command.append("--quick")
    finished = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=_ROOT
    )
    return float(finished.stdout.splitlines()[-1])
