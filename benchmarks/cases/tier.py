"""Local directories of four processes: saves, copies at peers, restores after a loss.

All processes run on this machine, so that all directories are on one disk.
"""

from __future__ import annotations

from benchmarks import job_tier, several, timing
from benchmarks.samples import Rows, Sample, Series, Settings

CASE = "tier"
JOBS = {"1 process": 1, "4 processes": 4}
"""Name of a job -> its processes."""


def run(settings: Settings) -> Rows:
    """Measures jobs in turn, each with several saves, copies and restores."""
    for turn in timing.turns(list(JOBS), settings.rounds, warm_up=False):
        with timing.scratch(settings.directory) as scratch:
            rows = several.run(
                job_tier.__name__, JOBS[turn.contender], scratch, quick=settings.quick
            )
        for row in rows:
            for what, value in row.items():
                series = Series(CASE, what.replace("_", " "), turn.contender)
                yield Sample(series, value, "bytes" if "memory" in what else "s")
